"""Import ``flashinfer.mamba`` the way SGLang does and say what happened.

``python import_probe.py SPEC --fd N``: run by path by the server's interpreter with a normal start, so that
.pth files, PYTHONPATH and LD_LIBRARY_PATH count as they do for the server. Standard library only, Python 3.8
or newer, never imported. SPEC is a JSON object, empty for now.

JSON lines go to file descriptor N: ``{"stage": ...}`` before each step that can hang or crash, at the end one
``{"result": {...}}``. Then the process ends at once: nothing that was imported gets a say in how.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # nothing may be loaded that the server would not load at this point
    from typing import Any

TEXT_LIMIT = 2000
STAGE_LIMIT = 300
MARKED = frozenset(
    (
        "torch",
        "numpy",
        "triton",
        "tvm_ffi",
        "torch_c_dlpack_ext",
        "cutlass",
        "cuda",
        "cudnn",
        "pynvml",
        "requests",
        "tilelang",
        "flashinfer",
        "flashinfer_cubin",
        "flashinfer_jit_cache",
    )
)
"""Top-level packages whose import is worth a stage marker: the large ones and those that load native code."""


def text(value: object) -> str:
    """``str(value)``, bounded, for objects whose ``__str__`` may be broken."""
    try:
        return str(value)[:TEXT_LIMIT]
    except BaseException:  # noqa: BLE001 - it is the imported code's, and may raise anything
        return "(no text)"


def shortened(filename: str) -> str:
    """Give a file's path below the entry of ``sys.path`` that it was found through: no home directories."""
    for entry in sorted((entry for entry in sys.path if isinstance(entry, str)), key=len, reverse=True):
        if entry and filename.startswith(entry.rstrip("/") + "/"):
            return filename[len(entry.rstrip("/")) + 1 :][:200]
    return "/".join(filename.split("/")[-3:])[:200]


def place(error: BaseException) -> str | None:
    """``file:line`` where it was raised."""
    if isinstance(error, SyntaxError) and error.filename:
        return "%s:%s" % (shortened(str(error.filename)), error.lineno)
    trace = error.__traceback__
    if trace is None:
        return None
    while trace.tb_next is not None:
        trace = trace.tb_next
    if trace.tb_frame.f_code.co_filename == __file__:
        return None
    return "%s:%d" % (shortened(trace.tb_frame.f_code.co_filename), trace.tb_lineno)


def origin(error: BaseException) -> BaseException | None:
    """Find the exception that ``error`` was raised from or while handling, at the end of the chain, if any."""
    first = error
    for _ in range(20):
        inner = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if inner is None:
            break
        error = inner
    return None if error is first else error


def described(error: BaseException) -> dict[str, Any]:
    """An exception as plain data."""
    facts = {
        "exception": type(error).__name__,
        "message": text(error),
        "where": place(error),
        "missing": text(error.name) if isinstance(error, ModuleNotFoundError) and error.name else None,
        "errno": error.errno if isinstance(error, OSError) else None,
        "sglang_catches": isinstance(error, (ImportError, AttributeError)),
        "exit": isinstance(error, SystemExit),
        "is_os_error": isinstance(error, OSError),
        "cause": None,
    }
    inner = origin(error)
    if inner is not None:
        facts["cause"] = "%s: %s" % (type(inner).__name__, text(inner)[:300])
    return facts


def versions() -> dict[str, str]:
    """Versions of what is loaded now, by the modules themselves."""
    found = {}
    for name in ("flashinfer", "torch", "tvm_ffi"):
        value = getattr(sys.modules.get(name), "__version__", None)
        if value is not None:
            found[name] = text(value)[:64]
    return found


def torch_facts() -> dict[str, Any]:
    """CUDA version of the torch that is loaded, and whether it touched a GPU."""
    module: Any = sys.modules.get("torch")
    facts: dict[str, Any] = {"torch_cuda": None, "cuda_initialized": None}
    try:
        facts["torch_cuda"] = getattr(module.version, "cuda", None)
        facts["cuda_initialized"] = bool(module.cuda.is_initialized())
    except BaseException:  # noqa: BLE001, S110 - torch absent, half imported or too old to say: nothing is known
        pass
    return facts


def peak_memory() -> int | None:
    """Largest resident size of this program in bytes; getrusage would count what ran before exec."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def main() -> None:
    """Run the script."""
    fd = int(sys.argv[sys.argv.index("--fd") + 1])
    os.set_inheritable(fd, False)
    # Python puts this script's folder first unless PYTHONSAFEPATH is set; nothing may be imported from it.
    here = os.path.dirname(os.path.abspath(__file__))
    if sys.path and os.path.abspath(sys.path[0]) == here:
        del sys.path[0]
    sys.argv = sys.argv[:1]
    write = os.write
    dumps = json.dumps
    marks = {"flashinfer.mamba"}

    def emit(message: dict[str, Any]) -> None:
        data = dumps(message).encode() + b"\n"
        while data:
            data = data[write(fd, data) :]

    def on_event(event: str, arguments: Any) -> None:
        if event != "import" or len(marks) >= STAGE_LIMIT or not isinstance(arguments[0], str):
            return
        name = arguments[0]
        parts = name.split(".")
        if parts[0] in MARKED and len(parts) <= (2 if parts[0] == "flashinfer" else 1) and name not in marks:
            marks.add(name)
            try:  # noqa: SIM105 - contextlib is not loaded yet, and must not be from here
                emit({"stage": "import " + name[:100]})
            except OSError:
                pass  # something closed our descriptor: the import itself must not suffer from that

    emit({"stage": "interpreter"})
    faulthandler.enable()
    if hasattr(sys, "addaudithook"):
        sys.addaudithook(on_event)
    started = time.monotonic()
    result = {"ok": False, "step": "import", "symbol": None, "names": []}
    try:
        emit({"stage": "import flashinfer.mamba"})
        import flashinfer.mamba

        result["step"] = "symbol"
        emit({"stage": "check selective_state_update"})
        from flashinfer.mamba import selective_state_update

        result["symbol"] = type(selective_state_update).__name__[:100]
        result["ok"] = callable(selective_state_update)
        listed = getattr(flashinfer.mamba, "__all__", ())
        result["names"] = sorted(text(name)[:100] for name in listed)[:50]
    except BaseException as error:  # noqa: BLE001 - whatever it raises is the answer
        result["ok"] = False
        result.update(described(error))
    result["seconds"] = time.monotonic() - started
    result["versions"] = versions()
    result.update(torch_facts())
    result["max_rss_bytes"] = peak_memory()
    emit({"result": result})
    os._exit(0)


main()
