"""Asks NVML, in a process of its own: the program behind `sidecar.nvml.client`.

``python -I -S worker.py [--binding DIR] [--proc DIR] [--dev DIR] --fd N`` reads one JSON object a line from
descriptor N and answers there. ``{"op": "round"}`` is answered by marker lines ``{"at": CALL}``, one before
each call that may never return, and then by one of

* ``{"result": {...}}``: what was found, see `Worker.round`;
* ``{"unusable": SENTENCE}``: the Python binding cannot be used at all;
* ``{"stale": PATH}``: the NVML library was replaced on disk since it was loaded; the worker then ends.

It lives for as long as the agent does, so it imports the standard library and ``pynvml`` only: its memory
counts. It blocks wherever the driver blocks; the client owns the clock.
"""
# pathlib would cost this process start-up time and memory for nothing:
# ruff: noqa: PTH116, PTH118, PTH120, PTH123, PTH208

from __future__ import annotations

import errno
import importlib
import json
import os
import re
import sys

TYPE_CHECKING = False  # the typing module would cost this process about 1 MB
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

LIBRARY = "libnvidia-ml.so.1"
LIBRARY_NOT_FOUND = 12
GPU_IS_LOST = 15
NO_SUCH_FORM = (2, 13, 25)
"""Codes by which an older driver says that it does not know a versioned call or structure."""
_MAX_GPUS = 256
"""More than any machine has: a nonsensical count must not become a loop of hours."""
_MAX_TEXT = 4096


class CallError(Exception):
    """A call that NVML or its binding answered with an error. ``code`` is NVML's, or a token of ours."""

    def __init__(self, call: str, code: int | str, words: str) -> None:
        super().__init__(words)
        self.call = call
        self.code = code


class Worker:
    """An NVML session: opened when first needed, kept while it answers, opened again after it failed."""

    def __init__(self, send: Callable[[Mapping[str, Any]], None], binding: Any, *, proc: str, dev: str) -> None:
        """``send`` writes one line to the client; ``binding`` is the module ``pynvml``."""
        self._send = send
        self._nvml = binding
        self._proc = proc
        self._dev = dev
        self._open = False
        self._library: str | None = None
        self._fingerprint: tuple[Any, ...] | None = None

    def stale(self) -> str | None:
        """Tell the path of the loaded library if the file behind it is no longer the same, else None.

        A process that loaded the old library goes on working after an upgrade, while every new one fails;
        only a fresh worker sees what a new process would.
        """
        if self._library is None or library_fingerprint(self._library) == self._fingerprint:
            return None
        return self._library

    def round(self) -> dict[str, Any]:
        """Ask everything once. Never raises.

        ``code`` is 0, or the NVML code of the system-level ``call`` that failed, with NVML's own ``words``.
        ``loader`` is the dynamic loader's sentence when there is no usable library. Fields that could not
        be read are None and named in ``errors`` with their code.
        """
        result: dict[str, Any] = {"code": 0, "call": None, "words": None, "loader": None, "count": None, "gpus": []}
        errors: dict[str, int | str] = {}
        result["errors"] = errors
        self._send({"at": "reading /proc/driver/nvidia"})
        result["module_text"] = read_text(os.path.join(self._proc, "driver/nvidia/version"))
        result["module_gpus"] = count_entries(os.path.join(self._proc, "driver/nvidia/gpus"))
        try:
            if not self._open:
                self._call("nvmlInit")
                self._open = True
            self._system(result, errors)
            count = result["count"] = self._call("nvmlDeviceGetCount")
            result["gpus"] = [self._gpu(index) for index in range(min(count, _MAX_GPUS))]
        except CallError as error:
            result |= {"code": error.code, "call": error.call, "words": str(error)}
        if result["code"] == LIBRARY_NOT_FOUND:
            result["loader"] = self._why_not_loaded()
        else:
            self._remember_library()
            result["nvml_version"] = self._field(errors, "nvmlSystemGetNVMLVersion")
        result["library"] = self._library
        # Last: it is the driver's own open routine and may block like any other call into it.
        self._send({"at": "opening /dev/nvidiactl"})
        result["device"] = open_device(os.path.join(self._dev, "nvidiactl"))
        return result

    def settle(self, result: Mapping[str, Any]) -> None:
        """Close a session in which no GPU answers, so that the next round opens a new one.

        That is a session that died with its driver, and one that was opened before there were GPUs: NVML looks
        for them only then. Called after the result is sent: closing may hang too.
        """
        if self._open and all(gpu["code"] != 0 for gpu in result["gpus"]):
            self._open = False
            self._field({}, "nvmlShutdown")

    def _system(self, result: dict[str, Any], errors: dict[str, int | str]) -> None:
        result["driver_version"] = self._field(errors, "nvmlSystemGetDriverVersion")
        result["cuda_driver_version"] = self._field(errors, "nvmlSystemGetCudaDriverVersion")

    def _gpu(self, index: int) -> dict[str, Any]:
        """Everything about one GPU. ``code`` is 0, the code of its handle, or 15 from whichever call said so."""
        errors: dict[str, int | str] = {}
        gpu: dict[str, Any] = {"index": index, "code": 0, "words": None, "errors": errors}
        try:
            handle = self._call("nvmlDeviceGetHandleByIndex", index, gpu=index)
        except CallError as error:
            return gpu | {"code": error.code, "words": str(error)}
        nvml = self._nvml
        sensor = getattr(nvml, "NVML_TEMPERATURE_GPU", 0)
        # As nvidia-smi shows it: the versioned form keeps what the driver reserved for itself (615 MiB on an
        # H200) out of "used". Drivers before R510 have only the plain one, which counts it in.
        memory_v2 = (nvml.nvmlMemory_v2,) if hasattr(nvml, "nvmlMemory_v2") else ()
        fields: tuple[tuple[str, str, tuple[Any, ...], Callable[[Any], Any]], ...] = (
            ("uuid", "nvmlDeviceGetUUID", (), str),
            ("name", "nvmlDeviceGetName", (), str),
            ("compute_capability", "nvmlDeviceGetCudaComputeCapability", (), list),
            ("mig", "nvmlDeviceGetMigMode", (), lambda modes: bool(modes[0])),
            ("memory", "nvmlDeviceGetMemoryInfo", memory_v2, lambda memory: [int(memory.used), int(memory.total)]),
            ("temperature", "nvmlDeviceGetTemperature", (sensor,), int),
            ("power_mw", "nvmlDeviceGetPowerUsage", (), int),
            ("utilization_percent", "nvmlDeviceGetUtilizationRates", (), lambda rates: int(rates.gpu)),
        )
        for field, call, arguments, convert in fields:
            value = self._field(errors, call, handle, *arguments, gpu=index)
            if memory_v2 and arguments is memory_v2 and errors.get(call) in NO_SUCH_FORM:
                del errors[call]
                value = self._field(errors, call, handle, gpu=index)
            gpu[field] = None if value is None else convert(value)
            if errors.get(call) == GPU_IS_LOST:
                # Each further call to a lost GPU can take seconds, and none will be answered.
                return gpu | {"code": GPU_IS_LOST, "words": "GPU is lost"}
        if len(errors) == len(fields):
            # A handle is only a number; a GPU that answers nothing at all does not answer.
            gpu |= {"code": errors["nvmlDeviceGetUUID"], "words": "no call was answered"}
        return gpu

    def _field(self, errors: dict[str, int | str], call: str, *arguments: Any, gpu: int | None = None) -> Any:
        """Call a getter whose failure costs only itself: None then, with its code in ``errors``."""
        try:
            return self._call(call, *arguments, gpu=gpu)
        except CallError as error:
            errors[call] = error.code
            return None

    def _call(self, call: str, *arguments: Any, gpu: int | None = None) -> Any:
        """Call the binding. Raises CallError for whatever goes wrong in it."""
        self._send({"at": call if gpu is None else f"{call} on GPU {gpu}"})
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
    return importlib.import_module("pynvml")


def serve(descriptor: int, *, binding: str | None, proc: str, dev: str) -> None:
    """Answer requests on ``descriptor`` until the other side closes it."""

    def send(message: Mapping[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(descriptor, data) :]

    worker: Worker | None = None
    with os.fdopen(descriptor, "rb", closefd=False) as requests:
        for request in requests:
            if json.loads(request).get("op") != "round":
                continue
            if worker is None:
                send({"at": "importing pynvml"})
                try:
                    module = load_binding(binding)
                    module.NVMLError, module.nvmlInit  # noqa: B018 - another module of that name lacks them
                except Exception as error:  # noqa: BLE001 - a broken binding is an answer, not a crash
                    send({"unusable": f"{type(error).__name__}: {error}"[:300]})
                    continue
                worker = Worker(send, module, proc=proc, dev=dev)
            if (path := worker.stale()) is not None:
                send({"stale": path})
                return
            result = worker.round()
            send({"result": result})
            worker.settle(result)


def main(argv: list[str]) -> None:
    """Parse the options by hand: argparse would cost this process a megabyte for five words."""
    options = dict(zip(argv[::2], argv[1::2], strict=False))
    serve(
        int(options["--fd"]),
        binding=options.get("--binding"),
        proc=options.get("--proc", "/proc"),
        dev=options.get("--dev", "/dev"),
    )


if __name__ == "__main__":
    main(sys.argv[1:])
