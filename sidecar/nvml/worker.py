"""Asks NVML, in a process of its own: the program behind `sidecar.nvml.client`.

``python -I -S worker.py [--binding DIR] [--proc DIR] [--dev DIR] [--slow-every SECONDS] --fd N`` reads one JSON
object a line from descriptor N and answers there. A request ``{"op": "round", "leave_out": [3], "retry": [],
"events": true}`` is answered by lines as things are found, so that a call that never returns costs only what
would have come after it:

* ``{"at": CALL}``, ``{"at": CALL, "gpu": INDEX}``: before each call that may not return;
* ``{"head": {...}}``: the driver and what is not about one GPU, see `Worker.round`;
* ``{"gpu": {...}}``: one GPU, see `Worker._gpu`; those to retry come after everything else;
* ``{"events": {"watched": ..., "xids": [[INDEX, UUID, XID], ...], "errors": {...}}}``;
* ``{"done": true}``: the end of the round.

Instead of all this ``{"unusable": SENTENCE}`` says that the Python binding cannot be used at all, and ``{"stale":
PATH}`` that the NVML library was replaced on disk since it was loaded; the worker then ends.

It lives for as long as the agent does, so it imports the standard library and ``pynvml`` only: its memory
counts. It blocks wherever the driver blocks; the client owns the clock.
"""
# ruff: noqa: PTH116, PTH118, PTH120, PTH123, PTH208 - pathlib would cost this process time and memory for nothing

from __future__ import annotations

import errno
import importlib
import json
import os
import re
import sys
import time

TYPE_CHECKING = False  # the typing module would cost this process about 1 MB
if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence
    from typing import Any

LIBRARY = "libnvidia-ml.so.1"
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NOT_FOUND = 6
TIMEOUT = 10
LIBRARY_NOT_FOUND = 12
GPU_IS_LOST = 15
NO_SUCH_FORM = (INVALID_ARGUMENT, 13, 25)
"""Codes by which an older driver says that it does not know a versioned call or structure."""
NO_SUCH_CALL = (13, "not-in-binding")
"""Library or binding do not have the call."""
RECOVERY_ACTIONS = (
    "none",
    "reset",
    "reboot",
    "drain-p2p",
    "drain-reset",
    "recover-imex-domain",
    "bus-reset",
    "system-reboot",
)
"""Tokens of NVML's recovery actions, by number."""
CLOCK_EVENTS = {
    0x04: "sw_power_cap",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
}
"""Bits of NVML's reasons for holding clocks back that tell of a limit or a fault; idle and settings are left out."""
FABRIC_STATES = ("not-supported", "not-started", "in-progress", "completed")
FABRIC_COMPLETED = 3
VGPU_GUEST = 2
"""The virtualization mode of a GPU that is a vGPU in a guest, and so the only kind that needs a licence."""
SLOW_EVERY = 60.0
"""Seconds for which facts that change rarely, or are slow to ask, are kept."""
_FABRIC_V1_SIZE = 28
_MAX_GPUS = 256
"""More than any machine has: a nonsensical count must not become a loop of hours."""
_MAX_MIG_DEVICES = 64
_MAX_EVENTS = 1000
"""Events taken in one round; what is left waits in NVML for the next one."""
_MAX_TEXT = 4096


class CallError(Exception):
    """A call that NVML or its binding answered with an error. ``code`` is NVML's, or a token of ours."""

    def __init__(self, call: str, code: int | str, words: str) -> None:
        super().__init__(words)
        self.call = call
        self.code = code


class Known:
    """What is remembered of one GPU for as long as it answers and the session lasts.

    ``static`` never changes meanwhile; ``slow`` maps a field to when it was asked (monotonic seconds) and its value.
    """

    __slots__ = ("slow", "static")

    def __init__(self) -> None:
        self.static: dict[str, Any] = {}
        self.slow: dict[str, tuple[float, Any]] = {}


class Worker:
    """An NVML session: opened when first needed, kept while it answers, opened again after it failed."""

    def __init__(
        self,
        send: Callable[[Mapping[str, Any]], None],
        binding: Any,
        *,
        proc: str,
        dev: str,
        slow_every: float = SLOW_EVERY,
    ) -> None:
        """``send`` writes one line to the client; ``binding`` is the module ``pynvml``."""
        self._send = send
        self._nvml = binding
        self._proc = proc
        self._dev = dev
        self._slow_every = slow_every
        self._open = False
        self._library: str | None = None
        self._fingerprint: tuple[Any, ...] | None = None
        self._marked: tuple[str, int | None] | None = None
        self._known: dict[int, Known] = {}
        self._count: int | None = None
        self._event_set: Any = None
        self._watched: dict[int, tuple[int, str | None]] = {}

    def stale(self) -> str | None:
        """Tell the path of the loaded library if the file behind it is no longer the same, else None.

        A process that loaded the old library goes on working after an upgrade, while every new one fails;
        only a fresh worker sees what a new process would.
        """
        if self._library is None or library_fingerprint(self._library) == self._fingerprint:
            return None
        return self._library

    def round(self, *, leave_out: Container[int] = (), retry: Sequence[int] = (), events: bool = True) -> None:
        """Ask everything once and send it. Never raises what NVML or its binding does.

        ``leave_out`` are GPUs that must not be touched, ``retry`` those to ask at the very end. ``events`` says
        whether to listen for Xid events.

        In the head ``code`` is 0, or the NVML code of the system-level ``call`` that failed, with NVML's own
        ``words``. ``loader`` is the dynamic loader's sentence when there is no usable library. Fields that could
        not be read are None and named in ``errors`` with their code.
        """
        self._marked = None
        head = self._head()
        self._send({"head": head})
        codes: list[int | str] = []
        if head["code"] == 0:
            count = min(head["count"], _MAX_GPUS)
            event_errors: dict[str, int | str] = {}
            if events:
                self._open_events(event_errors)
            first = [index for index in range(count) if index not in leave_out and index not in retry]
            codes += [self._send_gpu(index, events=events) for index in first]
            # Before a GPU that may hang again: whatever it does, the events of this round are told.
            self._send({"events": self._events(event_errors, events=events, answering=0 in codes)})
            codes += [self._send_gpu(index, events=events) for index in retry if index < count]
        self._send({"done": True})
        # After the answer: closing may hang too.
        if self._open and not (codes == [] and head["count"]) and 0 not in codes:
            self._close()

    def _head(self) -> dict[str, Any]:
        head: dict[str, Any] = {"code": 0, "call": None, "words": None, "loader": None, "count": None}
        errors: dict[str, int | str] = {}
        head["errors"] = errors
        self._mark("reading /proc/driver/nvidia")
        head["module_text"] = read_text(os.path.join(self._proc, "driver/nvidia/version"))
        head["module_gpus"] = count_entries(os.path.join(self._proc, "driver/nvidia/gpus"))
        try:
            if not self._open:
                self._call("nvmlInit")
                self._open = True
            head["driver_version"] = self._field(errors, "nvmlSystemGetDriverVersion")
            head["cuda_driver_version"] = self._field(errors, "nvmlSystemGetCudaDriverVersion")
            count = head["count"] = self._call("nvmlDeviceGetCount")
            if count != self._count:
                # Another number of GPUs: an index may be another GPU than before.
                self._known.clear()
                self._count = count
        except CallError as error:
            head |= {"code": error.code, "call": error.call, "words": str(error)}
        if head["code"] == LIBRARY_NOT_FOUND:
            head["loader"] = self._why_not_loaded()
        else:
            self._remember_library()
            head["nvml_version"] = self._field(errors, "nvmlSystemGetNVMLVersion")
        head["library"] = self._library
        # After init: it is the driver's own open routine and may block like any other call into it.
        self._mark("opening /dev/nvidiactl")
        head["device"] = open_device(os.path.join(self._dev, "nvidiactl"))
        return head

    def _close(self) -> None:
        """Close a session in which no GPU answers, so that the next round opens a new one.

        That is a session that died with its driver, and one that was opened before there were GPUs: NVML looks
        for them only then.
        """
        self._open = False
        self._known.clear()
        self._forget_events()
        self._field({}, "nvmlShutdown")

    # -- one GPU ----------------------------------------------------------------------------------

    def _send_gpu(self, index: int, *, events: bool) -> int | str:
        gpu = self._gpu(index, events=events)
        self._send({"gpu": gpu})
        code: int | str = gpu["code"]
        if code != 0:
            self._known.pop(index, None)
        return code

    def _gpu(self, index: int, *, events: bool) -> dict[str, Any]:
        """Everything about one GPU. ``code`` is 0, the code of its handle, or 15 from whichever call said so."""
        gpu: dict[str, Any] = {"index": index, "code": 0, "words": None, "errors": {}}
        try:
            handle = self._call("nvmlDeviceGetHandleByIndex", index, gpu=index)
            questions = Questions(self._nvml, self._call, handle, gpu, self._known.setdefault(index, Known()))
            self._ask(questions)
        except CallError as error:
            # A lost GPU is asked nothing more: each further call can take seconds, and none will be answered.
            return gpu | {"code": error.code, "words": str(error)}
        if not questions.answered and gpu["errors"]:
            # A handle is only a number; a GPU that answers nothing at all does not answer.
            return gpu | {"code": next(iter(gpu["errors"].values())), "words": "no call was answered"}
        if events:
            self._watch(handle, gpu)
        return gpu

    def _ask(self, ask: Questions) -> None:
        """Put every question to one GPU. Raises CallError when the GPU is lost."""
        nvml = self._nvml
        every = self._slow_every
        ask.static("uuid", "nvmlDeviceGetUUID", convert=str)
        ask.static("name", "nvmlDeviceGetName", convert=str)
        ask.static("compute_capability", "nvmlDeviceGetCudaComputeCapability", convert=list)
        ask.static("pci_bus_id", "nvmlDeviceGetPciInfo", convert=lambda info: _text(info.busId), quiet=True)
        ask.field("mig", "nvmlDeviceGetMigMode", convert=lambda modes: bool(modes[0]))
        # As nvidia-smi shows it: the versioned form keeps what the driver reserved for itself (615 MiB on an
        # H200) out of "used". Drivers before R510 have only the plain one, which counts it in.
        versions = [(nvml.nvmlMemory_v2,)] if hasattr(nvml, "nvmlMemory_v2") else []
        ask.field(
            "memory",
            "nvmlDeviceGetMemoryInfo",
            convert=lambda memory: [int(memory.used), int(memory.total)],
            forms=[("nvmlDeviceGetMemoryInfo", arguments) for arguments in [*versions, ()]],
        )
        sensor = getattr(nvml, "NVML_TEMPERATURE_GPU", 0)
        ask.field("temperature", "nvmlDeviceGetTemperature", sensor, convert=int)
        ask.field("power_mw", "nvmlDeviceGetPowerUsage", convert=int)
        ask.field("utilization_percent", "nvmlDeviceGetUtilizationRates", convert=lambda rates: int(rates.gpu))
        # Volatile counters: since the driver was loaded. 0 is the first counter type, corrected the first kind.
        ask.field("ecc_corrected", "nvmlDeviceGetTotalEccErrors", 0, 0, convert=int, quiet=True)
        ask.field("ecc_uncorrected", "nvmlDeviceGetTotalEccErrors", 1, 0, convert=int, quiet=True)
        ask.field("remapped_rows", "nvmlDeviceGetRemappedRows", convert=list, quiet=True)
        action = getattr(nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
        if action is not None:
            ask.field("recovery_action", "nvmlDeviceGetFieldValues", [action], convert=recovery_action, quiet=True)
        ask.field(
            "clock_events",
            "nvmlDeviceGetCurrentClocksEventReasons",
            convert=lambda mask: [name for bit, name in CLOCK_EVENTS.items() if mask & bit],
            forms=[("nvmlDeviceGetCurrentClocksEventReasons", ()), ("nvmlDeviceGetCurrentClocksThrottleReasons", ())],
            no_such=NO_SUCH_CALL,
            quiet=True,
        )
        ask.field("pcie_generation", "nvmlDeviceGetCurrPcieLinkGeneration", convert=int, quiet=True)
        ask.field("pcie_width", "nvmlDeviceGetCurrPcieLinkWidth", convert=int, quiet=True)
        ask.static("pcie_generation_max", "nvmlDeviceGetMaxPcieLinkGeneration", convert=int, quiet=True)
        ask.static("pcie_width_max", "nvmlDeviceGetMaxPcieLinkWidth", convert=int, quiet=True)
        ask.nvlinks(every)
        ask.fabric()
        if ask.gpu["mig"]:
            ask.slow("mig_devices", every, ask.mig_devices)
        else:
            ask.known.slow.pop("mig_devices", None)
        ask.static("virtualization", "nvmlDeviceGetVirtualizationMode", convert=int, quiet=True)
        if ask.gpu["virtualization"] == VGPU_GUEST:
            ask.slow("licensed", every, ask.licensed)

    # -- Xid events -------------------------------------------------------------------------------

    def _open_events(self, errors: dict[str, int | str]) -> None:
        if self._event_set is None:
            self._event_set = self._field(errors, "nvmlEventSetCreate")

    def _watch(self, handle: Any, gpu: dict[str, Any]) -> None:
        """Register a GPU's Xid events, once a session. A refusal is an error of that GPU and hides nothing else."""
        index = gpu["index"]
        if self._event_set is None or index in self._watched:
            return
        kind = getattr(self._nvml, "nvmlEventTypeXidCriticalError", 8)
        errors: dict[str, int | str] = gpu["errors"]
        self._field(errors, "nvmlDeviceRegisterEvents", handle, kind, self._event_set, gpu=index)
        if "nvmlDeviceRegisterEvents" not in errors:
            self._watched[index] = (_address(handle), gpu["uuid"])

    def _events(self, errors: dict[str, int | str], *, events: bool, answering: bool) -> dict[str, Any]:
        """Take the events that are waiting. ``watched`` is None where there is no GPU to listen to."""
        xids: list[list[Any]] = []
        if self._event_set is not None and events and self._watched:
            try:
                while len(xids) < _MAX_EVENTS:
                    event = self._call("nvmlEventSetWait", self._event_set, 0)
                    if (gpu := self._of_event(event.device)) is None:
                        errors["nvmlEventSetWait"] = "unknown-gpu"
                    else:
                        xids.append([*gpu, int(event.eventData)])
            except CallError as error:
                if error.code != TIMEOUT:
                    # One lost GPU can spoil the whole set: the next round makes another of those that answer.
                    errors["nvmlEventSetWait"] = error.code
                    self._forget_events()
        watched = (bool(self._watched) if answering else None) if events else False
        return {"watched": watched, "xids": xids, "errors": errors}

    def _of_event(self, device: Any) -> tuple[int, str | None] | None:
        """Find the GPU of an event by its handle: a GPU that fell off the bus no longer answers with its uuid."""
        address = _address(device)
        found = next(((index, uuid) for index, (own, uuid) in self._watched.items() if own == address), None)
        if found is not None:
            return found
        uuid = self._field({}, "nvmlDeviceGetUUID", device)
        return next(((index, uuid) for index, (_, own) in self._watched.items() if uuid and own == uuid), None)

    def _forget_events(self) -> None:
        event_set, self._event_set = self._event_set, None
        self._watched.clear()
        if event_set is not None:
            self._field({}, "nvmlEventSetFree", event_set)

    # -- calls ------------------------------------------------------------------------------------

    def _mark(self, call: str, gpu: int | None = None) -> None:
        """Tell the client what may not return; the same call many times in a row is told once."""
        if self._marked != (call, gpu):
            self._marked = (call, gpu)
            self._send({"at": call} if gpu is None else {"at": call, "gpu": gpu})

    def _field(self, errors: dict[str, int | str], call: str, *arguments: Any, gpu: int | None = None) -> Any:
        """Call a getter whose failure costs only itself: None then, with its code in ``errors``."""
        try:
            return self._call(call, *arguments, gpu=gpu)
        except CallError as error:
            errors[call] = error.code
            return None

    def _call(self, call: str, *arguments: Any, gpu: int | None = None) -> Any:
        """Call the binding. Raises CallError for whatever goes wrong in it."""
        self._mark(call, gpu)
        try:
            return getattr(self._nvml, call)(*arguments)
        except self._nvml.NVMLError as error:
            raise CallError(call, int(error.value), self._words(error)) from None
        except UnicodeDecodeError:
            raise CallError(call, "undecodable", "the answer is not UTF-8 text") from None
        except AttributeError:
            raise CallError(call, "not-in-binding", "this version of nvidia-ml-py lacks the call") from None
        except Exception as error:  # noqa: BLE001 - whatever the binding trips over costs this one answer only
            raise CallError(call, "binding-error", type(error).__name__) from None

    def _words(self, error: Exception) -> str:
        """NVML's own words for an error. For codes new to the binding they come from the library."""
        try:
            return str(error)[:200]
        except Exception:  # noqa: BLE001 - undecodable text, or a library without nvmlErrorString
            return "no description"

    def _why_not_loaded(self) -> str | None:
        """Ask the loader for its sentence, which the binding swallows: "no such file" is not "wrong ELF class"."""
        import ctypes  # the binding has loaded it already

        try:
            ctypes.CDLL(LIBRARY)
        except OSError as error:
            return str(error)[:300]
        return None

    def _remember_library(self) -> None:
        if self._library is None:
            self._library = mapped_library(read_text("/proc/self/maps", limit=4 * 1024 * 1024) or "")
            if self._library is not None:
                self._fingerprint = library_fingerprint(self._library)


class Questions:
    """The questions of one round to one GPU: fills ``gpu`` field by field, and its ``errors``.

    A field that could not be read is None. NotSupported is not an error of a ``quiet`` field: the GPU does not
    have it. Everything raises CallError when a call says that the GPU is lost, else nothing.
    """

    __slots__ = ("_call", "_handle", "_nvml", "answered", "gpu", "known")

    def __init__(self, nvml: Any, call: Callable[..., Any], handle: Any, gpu: dict[str, Any], known: Known) -> None:
        """``call`` is `Worker._call`."""
        self._nvml = nvml
        self._call = call
        self._handle = handle
        self.gpu = gpu
        self.known = known
        self.answered = False
        """Whether any call was, if only by "not supported"."""

    def field(
        self,
        name: str,
        call: str,
        *arguments: Any,
        convert: Callable[[Any], Any],
        forms: Sequence[tuple[str, Sequence[Any]]] = (),
        no_such: Container[int | str] = NO_SUCH_FORM,
        quiet: bool = False,
    ) -> None:
        """Ask for one field. ``forms`` are calls and arguments to try in turn while one answers ``no_such``."""
        self.gpu[name] = None
        failure: CallError | None = None
        for form, its_arguments in forms or ((call, arguments),):
            try:
                self.gpu[name] = convert(self._call(form, self._handle, *its_arguments, gpu=self.gpu["index"]))
            except CallError as error:
                failure = error
                if error.code not in no_such:
                    break
            except UnicodeDecodeError:
                failure = CallError(form, "undecodable", "the answer is not UTF-8 text")
                break
            else:
                self.answered = True
                return
        if failure is not None:
            self._refused(call, failure, quiet=quiet)

    def static(self, name: str, call: str, *, convert: Callable[[Any], Any], quiet: bool = False) -> None:
        """Ask for a field that never changes: not again once it was answered."""
        if name in self.known.static:
            self.gpu[name] = self.known.static[name]
            return
        self.field(name, call, convert=convert, quiet=quiet)
        if self.gpu[name] is not None:
            self.known.static[name] = self.gpu[name]

    def slow(self, name: str, every: float, ask: Callable[[], Any]) -> None:
        """Ask for a field anew every so many seconds, and show the last answer in between."""
        kept = self.known.slow.get(name)
        if kept is not None and time.monotonic() - kept[0] < every:
            self.gpu[name] = kept[1]
            return
        self.gpu[name] = None
        try:
            self.gpu[name] = ask()
        except CallError as error:
            self._refused(error.call, error, quiet=True)
            if error.code != NOT_SUPPORTED:
                return  # asked again in the next round, so that its error stays visible
        self.known.slow[name] = (time.monotonic(), self.gpu[name])

    def nvlinks(self, every: float) -> None:
        """Collect [link, whether it is up] of the links that the GPU supports; which those are is a slow fact."""
        kept = self.known.slow.get("links")
        fresh = kept is None or time.monotonic() - kept[0] >= every
        links = range(getattr(self._nvml, "NVML_NVLINK_MAX_LINKS", 18)) if kept is None or fresh else kept[1]
        states: list[list[Any]] = []
        self.gpu["nvlinks"] = None
        for link in links:
            try:
                state = self._call("nvmlDeviceGetNvLinkState", self._handle, link, gpu=self.gpu["index"])
            except CallError as error:
                if error.code == INVALID_ARGUMENT and fresh:
                    break
                if error.code != NOT_SUPPORTED:
                    self._refused(error.call, error, quiet=True)
                    return
                self.answered = True
            else:
                self.answered = True
                states.append([link, bool(state)])
        if fresh:
            self.known.slow["links"] = (time.monotonic(), [link for link, _ in states])
        self.gpu["nvlinks"] = states or None

    def fabric(self) -> None:
        """Ask for the state of the registration with the NVSwitch fabric, in the newest form that both sides know."""
        import ctypes  # the binding has loaded it already

        call = "nvmlDeviceGetGpuFabricInfo"
        self.gpu["fabric"] = None
        failure: CallError | None = None
        for form, kind in ((call + "V", "c_nvmlGpuFabricInfo_v2_t"), (call, "c_nvmlGpuFabricInfo_t")):
            structure = getattr(self._nvml, kind, None)
            # Some releases of the binding lay the first form out wrongly: their answer would be read as another one.
            if structure is None or (form == call and ctypes.sizeof(structure) != _FABRIC_V1_SIZE):
                continue
            info = structure()
            try:
                self._call(form, self._handle, ctypes.byref(info), gpu=self.gpu["index"])
            except CallError as error:
                failure = error
                if error.code not in (*NO_SUCH_FORM, "not-in-binding"):
                    break
            else:
                self.answered = True
                self.gpu["fabric"] = fabric_state(int(info.state), int(info.status))
                return
        if failure is not None:
            self._refused(call, failure, quiet=True)

    def mig_devices(self) -> list[list[str | None]]:
        """List [uuid, name] of the MIG devices. Their numbers have gaps. Raises CallError."""
        index = self.gpu["index"]
        count = int(self._call("nvmlDeviceGetMaxMigDeviceCount", self._handle, gpu=index))
        found: list[list[str | None]] = []
        for number in range(min(count, _MAX_MIG_DEVICES)):
            try:
                device = self._call("nvmlDeviceGetMigDeviceHandleByIndex", self._handle, number, gpu=index)
            except CallError as error:
                if error.code == NOT_FOUND:
                    continue
                raise
            uuid = str(self._call("nvmlDeviceGetUUID", device, gpu=index))
            try:
                name = str(self._call("nvmlDeviceGetName", device, gpu=index))
            except CallError as error:
                if error.code == GPU_IS_LOST:
                    raise
                name = None
            found.append([uuid, name])
        return found

    def licensed(self) -> bool | None:
        """Tell whether any licence of a vGPU is in force; None where it needs none. Raises CallError."""
        call = "nvmlDeviceGetGridLicensableFeatures"
        found = self._call(call, self._handle, gpu=self.gpu["index"])
        if not found.isGridLicenseSupported:
            return None
        features = list(found.gridLicensableFeatures)[: found.licensableFeaturesCount]
        return any(feature.featureState != 0 for feature in features)

    def _refused(self, call: str, error: CallError, *, quiet: bool) -> None:
        if error.code == GPU_IS_LOST:
            raise error
        if error.code == NOT_SUPPORTED:
            self.answered = True
            if quiet:
                return
        self.gpu["errors"][call] = error.code


def recovery_action(values: Any) -> str:
    """Name the action in NVML's field value. Raises CallError with the code of the field."""
    value = values[0]
    code = int(value.nvmlReturn)
    if code != 0:
        # A driver that does not know the field calls its number invalid: that is "not supported" too.
        code = NOT_SUPPORTED if code == INVALID_ARGUMENT else code
        raise CallError("nvmlDeviceGetFieldValues", code, "the field was not answered")
    number = int(value.value.uiVal)
    return RECOVERY_ACTIONS[number] if number < len(RECOVERY_ACTIONS) else "other"


def fabric_state(state: int, status: int) -> str | None:
    """Name a state of the registration with the fabric; None for a number that is none."""
    if state >= len(FABRIC_STATES):
        return None
    return "failed" if state == FABRIC_COMPLETED and status != 0 else FABRIC_STATES[state]


def _address(handle: Any) -> int:
    """Give the number behind a handle, by which two of them can be compared."""
    import ctypes  # the binding has loaded it already

    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def _text(value: bytes | str) -> str:
    """Text of a structure, which the binding's releases give as either."""
    return value.decode() if isinstance(value, bytes) else value


def read_text(path: str, *, limit: int = _MAX_TEXT) -> str | None:
    """At most ``limit`` bytes of a file as text, "" if it is there but unreadable, None if it is not there."""
    try:
        with open(path, "rb") as file:
            return file.read(limit).decode("utf-8", "replace")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        return "" if os.path.lexists(path) else None


def count_entries(path: str) -> int | None:
    """How many entries a folder has, or None where it cannot be read."""
    try:
        return len(os.listdir(path))
    except OSError:
        return None


def open_device(path: str, opener: Callable[[str, int], int] = os.open) -> dict[str, Any]:
    """Whether a device node is there, and whether the system refuses to open it.

    ``refused`` is True only for a refusal that is about permission (file mode, device cgroup); False when it
    opens; None when it is not there or fails for another reason, such as a node without a driver.
    """
    try:
        descriptor = opener(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        refused = True if error.errno in (errno.EPERM, errno.EACCES) else None
        return {"present": os.path.lexists(path), "refused": refused}
    os.close(descriptor)
    return {"present": True, "refused": False}


def mapped_library(maps: str) -> str | None:
    """Find the path of the NVML library in the text of ``/proc/self/maps``."""
    found = re.search(r"(/\S.*/libnvidia-ml\.so[^/\n]*?)(?: \(deleted\))?$", maps, re.MULTILINE)
    return found.group(1) if found else None


def library_fingerprint(path: str) -> tuple[Any, ...] | None:
    """Collect what changes when the library is replaced: its file, and where the usual link beside it points."""
    try:
        state = os.stat(path)
    except OSError:
        return None
    link = os.path.join(os.path.dirname(path), LIBRARY)
    return (state.st_size, state.st_mtime_ns, os.path.realpath(link))


def load_binding(folder: str | None) -> Any:
    """Import ``pynvml``, from ``folder`` if given. Raises whatever that import raises."""
    if folder is not None:
        sys.path.insert(0, folder)
    defer_find_library()
    return importlib.import_module("pynvml")


def defer_find_library() -> None:
    """Have ``ctypes.util`` loaded when it is used, not when it is imported.

    The binding imports it for Windows. With it come tempfile, shutil, subprocess and what these need: 2 MB, an eighth
    of this process.
    """
    name = "ctypes.util"
    if name in sys.modules:
        return
    import ctypes  # the binding loads it in any case

    deferred = type(sys)(name, "Stands for the module of this name until somebody looks for a library.")

    def find_library(library: str) -> str | None:
        if sys.modules.get(name) is deferred:
            del sys.modules[name]
        return importlib.import_module(name).find_library(library)  # type: ignore[no-any-return]

    deferred.find_library = find_library  # type: ignore[attr-defined]
    sys.modules[name] = ctypes.util = deferred  # type: ignore[attr-defined]


def serve(descriptor: int, *, binding: str | None, proc: str, dev: str, slow_every: float = SLOW_EVERY) -> None:
    """Answer requests on ``descriptor`` until the other side closes it."""

    def send(message: Mapping[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(descriptor, data) :]

    worker: Worker | None = None
    with os.fdopen(descriptor, "rb", closefd=False) as requests:
        for line in requests:
            request = json.loads(line)
            if request.get("op") != "round":
                continue
            if worker is None:
                send({"at": "importing pynvml"})
                try:
                    module = load_binding(binding)
                    module.NVMLError, module.nvmlInit  # noqa: B018 - another module of that name lacks them
                except Exception as error:  # noqa: BLE001 - a broken binding is an answer, not a crash
                    send({"unusable": f"{type(error).__name__}: {error}"[:300]})
                    continue
                worker = Worker(send, module, proc=proc, dev=dev, slow_every=slow_every)
            if (path := worker.stale()) is not None:
                send({"stale": path})
                return
            worker.round(
                leave_out=request.get("leave_out", ()),
                retry=request.get("retry", ()),
                events=request.get("events", True),
            )


def main(argv: list[str]) -> None:
    """Parse the options by hand: argparse would cost this process a megabyte for six words."""
    options = dict(zip(argv[::2], argv[1::2], strict=False))
    serve(
        int(options["--fd"]),
        binding=options.get("--binding"),
        proc=options.get("--proc", "/proc"),
        dev=options.get("--dev", "/dev"),
        slow_every=float(options.get("--slow-every", SLOW_EVERY)),
    )


if __name__ == "__main__":
    main(sys.argv[1:])
