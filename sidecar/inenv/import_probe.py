"""Import a module the way SGLang does and say what happened.

``python import_probe.py SPEC --fd N``: run by path by the server's interpreter with a normal start, so that
.pth files, PYTHONPATH and LD_LIBRARY_PATH count as they do for the server. Standard library only, Python 3.8
or newer, never imported. SPEC is a JSON object: ``module`` is what to import, ``symbol`` the name in it that must
be callable, or null; ``first`` names a module that it imports before anything else; ``load`` lists shared libraries
as patterns below the module's own folder, each of which is loaded for itself in a copy of this process that has
``first`` imported, since two of them in one process would not go together; ``devices`` says that GPUs are visible;
``cwd_on_path`` that the working folder leads the import path, as it does for ``python -m``; ``script`` is the path of
the script whose folder leads it instead, or null.

JSON lines go to file descriptor N: ``{"stage": ...}`` before each step that can hang or crash, ``{"loading":
FILE}`` when a compiled file is about to be loaded and ``{"loading": null}`` once something else is done, at the end
one ``{"result": {...}}``. A signal that ends it leaves the interpreter's own trace on standard error. Then the
process ends at once: nothing that was imported gets a say in how. An interpreter that is too old answers
``{"too_old": "3.7.16"}`` instead: no annotation here may need evaluation or newer syntax.

What this script itself fails at is nothing that the imported code did: it then ends with status 0 and no answer.
"""

# Only modules that the interpreter has built in, or loaded by itself: a file on PYTHONPATH may have any other's name,
# and must be met by the code that is imported, not here.
import builtins
import faulthandler
import os
import sys
import time

# Names of this module's own from here on: the imported code may replace the builtin ones.
ORIGINAL = dict(vars(builtins))
RESTORE = vars(builtins).update
globals().update({name: value for name, value in ORIGINAL.items() if not name.startswith("_")})
LEAVE = os._exit
PID = os.getpid()
PID_NOW = os.getpid

TYPE_CHECKING = False
if TYPE_CHECKING:  # nothing may be loaded that the server would not load at this point
    from typing import Any, Callable

OLDEST = (3, 8)
TEXT_LIMIT = 6000
"""Characters of a message: the kernel wheel's loader lists the failures that led to its own at the end of 2000."""
CHAIN_LIMIT = 8
CHAIN_TEXT_LIMIT = 1000
LOAD_LIMIT = 8
STAGE_LIMIT = 300
LOADING_LIMIT = 500
"""Compiled files that are told of: torch, its libraries and the rest of SGLang's environment bring half of that."""
SPARE_FD = 65535
"""Number of the channel's copy, or the highest there is: code that closes what it inherited often stops earlier."""
NULL_BYTES = "source code string cannot contain null bytes"
"""What Python says of a source file with null bytes, without its name: only whoever imports it stands in the trace."""
SOURCE_LIMIT = 4 << 20
OPENED = [""]
"""The source file that was opened last."""
ESCAPED = {number: "\\u%04x" % number for number in (*range(32), 34, 92)}
"""Characters that may not stand in a JSON string as they are."""
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
        "sgl_kernel",
        "quack",
        "flash_attn",
        "sglang",
    )
)
"""Top-level packages whose import is worth a stage marker: the large ones and those that load native code."""
DEEPER = {"flashinfer": 2, "sgl_kernel": 2, "flash_attn": 2}
"""How many parts of a name are told apart in the markers of a package; one for the others."""


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


def place(error: BaseException) -> "str | None":
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


def with_null_bytes(error: BaseException) -> "str | None":
    """Name the source file whose null bytes an exception is about, if it is the one that was opened last."""
    if not isinstance(error, (SyntaxError, ValueError)) or NULL_BYTES not in text(error):
        return None
    path = OPENED[0]
    try:
        with open(path, "rb") as file:
            return shortened(path) if b"\0" in file.read(SOURCE_LIMIT) else None
    except (OSError, ValueError):
        return None


def chained(error: BaseException) -> "list[BaseException]":
    """``error`` and what it was raised from or while handling, outermost first."""
    found = [error]
    while len(found) < CHAIN_LIMIT:
        inner = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if inner is None or inner in found:
            break
        found.append(inner)
        error = inner
    return found


def link(error: BaseException) -> "dict[str, Any]":
    """One exception of a chain. ``library`` is the file that could not be loaded, where Python names one."""
    path = error.path if isinstance(error, ImportError) else None
    return {
        "exception": type(error).__name__[:100],
        "message": text(error)[:CHAIN_TEXT_LIMIT],
        "library": shortened(path) if isinstance(path, str) and ".so" in path else None,
    }


def described(error: BaseException) -> "dict[str, Any]":
    """An exception as plain data."""
    chain = chained(error)
    facts = {
        "exception": type(error).__name__,
        "message": text(error),
        "where": with_null_bytes(error) or place(error),
        "missing": text(error.name) if isinstance(error, ModuleNotFoundError) and error.name else None,
        "errno": error.errno if isinstance(error, OSError) else None,
        "sglang_catches": isinstance(error, (ImportError, AttributeError)),
        "exit": isinstance(error, SystemExit),
        "is_os_error": isinstance(error, OSError),
        "is_memory_error": any(isinstance(one, MemoryError) for one in chain),
        "cause": None,
        "chain": [link(one) for one in chain],
    }
    if len(chain) > 1:
        facts["cause"] = "%s: %s" % (type(chain[-1]).__name__, text(chain[-1])[:300])
    return facts


def versions() -> "dict[str, str]":
    """Versions of what is loaded now, by the modules themselves."""
    found = {}
    for name in ("flashinfer", "torch", "tvm_ffi", "sgl_kernel"):
        try:
            value = getattr(sys.modules.get(name), "__version__", None)
            if value is not None:
                found[name] = text(value)[:64]
        except BaseException:  # noqa: BLE001 - a module may answer by code of its own
            found.pop(name, None)
    return found


def torch_facts(devices: bool) -> "dict[str, Any]":
    """CUDA version of the torch that is loaded, and whether it touched a GPU, or can where it sees any."""
    module: "Any" = sys.modules.get("torch")
    facts: "dict[str, Any]" = {"torch_cuda": None, "cuda_initialized": None, "cuda_available": None}
    try:
        built_for = getattr(module.version, "cuda", None)
        facts["torch_cuda"] = None if built_for is None else text(built_for)[:64]
        facts["cuda_initialized"] = bool(module.cuda.is_initialized())
        if devices:
            facts["cuda_available"] = bool(module.cuda.is_available())
    except BaseException:  # noqa: BLE001, S110 - torch absent, half imported or too old to say: nothing is known
        pass
    return facts


def peak_memory() -> "int | None":
    """Largest resident size of this program in bytes; getrusage would count what ran before exec."""
    try:
        with open("/proc/self/status", "rb") as file:
            for line in file:
                if line.startswith(b"VmHWM:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def wheels_with(said: str) -> "dict[str, list[str]]":
    """Where NVIDIA's wheels brought each library that a message misses, in that version or in another.

    The loader found none: they may lie in a folder that it does not look into, or be of another CUDA.
    """
    # After the import: whatever has these names by now may be the environment's.
    import glob
    import re

    found = {}
    for name in sorted(set(re.findall(r"([\w.+-]{1,60}\.so[\w.]{0,20}): cannot open shared object file", said)))[:4]:
        stem = name.partition(".so")[0]
        places = []
        for entry in sys.path:
            if isinstance(entry, str) and entry:
                places += sorted(glob.glob(os.path.join(glob.escape(entry), "nvidia", "*", "lib", stem + ".so*")))
        found[name] = [shortened(place) for place in places[:5]]
    return found


# -- the channel --------------------------------------------------------------------------------------------


def encoded(value: object) -> str:
    """``value`` as JSON. Not by the module ``json``: on the import path there may be another of that name."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        # A subclass, such as a member of an enumeration, may show itself in any way.
        return int.__repr__(value)
    if isinstance(value, float):
        return float.__repr__(value) if abs(value) < float("inf") else "null"
    if isinstance(value, dict):
        return "{%s}" % ",".join("%s:%s" % (encoded(str(key)), encoded(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return "[%s]" % ",".join(encoded(item) for item in value)
    return '"%s"' % str.translate(str(value), ESCAPED)


def spare(fd: int) -> int:
    """Make a copy of a descriptor at a high number; the same one where there is no room for a copy."""
    try:
        number = min(SPARE_FD, os.sysconf("SC_OPEN_MAX") - 1)
    except (OSError, ValueError):
        return fd
    try:
        os.fstat(number)
    except OSError:
        try:
            return os.dup2(fd, number, inheritable=False) or number
        except OSError:
            pass
    return fd


def emitter(fd: int) -> "Callable[[dict[str, Any]], None]":
    """Give the function that writes a line to the channel, which works whatever the imported code does to ``os``.

    It raises OSError once the channel is closed, and never writes to what has its number then. A copy of this
    process that the imported code made is not asked, and says nothing.
    """
    write, look = os.write, os.fstat
    known = look(fd)
    copies = (spare(fd), fd)

    def emit(message: "dict[str, Any]") -> None:
        if PID_NOW() != PID:
            return
        data = encoded(message).encode("utf-8", "surrogatepass") + b"\n"
        for copy in copies:
            try:
                status = look(copy)
            except OSError:
                continue
            if (status.st_dev, status.st_ino) == (known.st_dev, known.st_ino):
                while data:
                    data = data[write(copy, data) :]
                return
        raise OSError(9, "the channel is closed")

    return emit


def told(emit: "Callable[[dict[str, Any]], None]", stage: str) -> None:
    """Send a stage marker, if that is possible."""
    sent(emit, {"stage": stage})


def sent(emit: "Callable[[dict[str, Any]], None]", message: "dict[str, Any]") -> None:
    """Send a message, if that is possible: what closed the channel must not make the import itself fail."""
    try:  # noqa: SIM105 - contextlib is not loaded yet, and must not be from here
        emit(message)
    except OSError:
        pass


AFTER_LOADING = frozenset(("import", "open", "exec", "compile", "ctypes.dlsym"))
"""Events that none but the interpreter raises, so that the loader has returned to it."""


def loaded_by(event: str, arguments: "Any") -> "str | None":
    """The compiled file that an audit event announces: an extension module, or a library that ctypes opens."""
    # Of an extension module: its name, then its file. The import of any other has None there.
    position = {"import": 1, "ctypes.dlopen": 0}.get(event)
    path = None if position is None or len(arguments) <= position else arguments[position]
    return path if isinstance(path, str) and path else None


def mark_imports(known: "list[str]", emit: "Callable[[dict[str, Any]], None]") -> None:
    """Send a stage marker whenever the import of a large package begins, except for those ``known`` otherwise.

    And say which compiled file is being loaded: a damaged one ends the process inside of the loader.
    """
    marks = set(known)
    loads = [0, False]
    if not hasattr(sys, "addaudithook"):
        return

    def on_event(event: str, arguments: "Any") -> None:
        if event == "open" and isinstance(arguments[0], str) and arguments[0].endswith(".py"):
            OPENED[0] = arguments[0]
        library = loaded_by(event, arguments)
        if library is not None and loads[0] < LOADING_LIMIT:
            loads[:] = [loads[0] + 1, True]
            sent(emit, {"loading": shortened(library)})
        elif loads[1] and event in AFTER_LOADING:
            loads[1] = False
            sent(emit, {"loading": None})
        if event != "import" or len(marks) >= STAGE_LIMIT or not isinstance(arguments[0], str):
            return
        name = arguments[0]
        parts = name.split(".")
        if parts[0] in MARKED and len(parts) <= DEEPER.get(parts[0], 1) and name not in marks:
            marks.add(name)
            told(emit, "import " + name[:100])

    sys.addaudithook(on_event)


# -- the steps ----------------------------------------------------------------------------------------------


def libraries(module: str, patterns: "list[str]") -> "list[tuple[str, str]]":
    """(name below the module's folder, path) of the files that the patterns match, without importing the module."""
    found: "list[tuple[str, str]]" = []
    try:
        import glob
        import importlib.util

        spec = importlib.util.find_spec(module.partition(".")[0])
        for folder in (spec.submodule_search_locations or []) if spec is not None else []:
            for pattern in patterns:
                found += [
                    (path[len(folder) + 1 :][:200], path) for path in sorted(glob.glob(os.path.join(folder, pattern)))
                ]
    except Exception:  # noqa: BLE001 - the import that follows will say what is wrong with the module
        return []
    return [pair for pair in found if ".so" in pair[0]][:LOAD_LIMIT]


def load(name: str, path: str) -> "list[dict[str, Any]]":
    """Load a shared library in a copy of this process and say what the loader said; nothing without a copy."""
    reading, writing = os.pipe()
    try:
        pid = os.fork()
    except BaseException:  # noqa: BLE001 - out of processes, or a warning about threads that is set to be an error
        os.close(reading)
        os.close(writing)
        return []
    if pid == 0:
        said = b""
        try:
            import ctypes

            ctypes.CDLL(path)
        except BaseException as error:  # noqa: BLE001 - whatever it raises is the answer
            said = text(error)[:CHAIN_TEXT_LIMIT].encode("utf-8", "replace") or b"(no text)"
        os.write(writing, b"." + said)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as channel:
        answer = channel.read(8 * CHAIN_TEXT_LIMIT)
    _, status = os.waitpid(pid, 0)
    error = answer[1:].decode("utf-8", "replace") if answer else "the process that loaded it ended without an answer"
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    return [{"path": name, "error": error or None, "signal": number}]


def run(statement: str, scope: "dict[str, Any]") -> None:
    """Execute an import statement as SGLang does, for its very exceptions."""
    # By this file's name: `place` leaves out what is raised in the statement itself.
    exec(compile(statement, __file__, "exec"), scope)  # noqa: S102 - what is executed is above


def imported(spec: "dict[str, Any]", emit: "Callable[[dict[str, Any]], None]") -> "dict[str, Any]":
    """Do what the specification asks for. Whatever is raised on the way is the answer."""
    module, symbol = str(spec["module"]), spec.get("symbol")
    result: "dict[str, Any]" = {"ok": False, "step": "import", "symbol": None, "names": [], "loads": []}
    scope: "dict[str, Any]" = {}
    try:
        if spec.get("first"):
            told(emit, "import " + spec["first"])
            run("import " + spec["first"], {})
            for name, path in libraries(module, spec.get("load") or []):
                told(emit, "load " + name)
                result["loads"] += load(name, path)
        told(emit, "import " + module)
        run("import " + module, scope)
        result["ok"] = True
        if symbol is not None:
            result["ok"] = False
            result["step"] = "symbol"
            told(emit, "check " + symbol)
            run("from %s import %s as found" % (module, symbol), scope)
            result["symbol"] = type(scope["found"]).__name__[:100]
            result["ok"] = callable(scope["found"])
        result["names"] = names_of(module)
    except BaseException as error:  # noqa: BLE001 - whatever it raises is the answer
        RESTORE(ORIGINAL)
        result["ok"] = False
        result.update(described(error))
    # What this calls of the standard library has the builtin names from there.
    RESTORE(ORIGINAL)
    said = " ".join([text(result.get("message") or "")] + [str(one["error"]) for one in result["loads"]])
    if "cannot open shared object file" in said:
        try:
            result["wheels"] = wheels_with(said)
        except BaseException:  # noqa: BLE001 - a hint that could not be had is none
            result["wheels"] = {}
    return result


def names_of(module: str) -> "list[str]":
    """Names that a module says it has; none where it is not there under its name, or says nothing sensible."""
    try:
        listed = getattr(sys.modules.get(module), "__all__", ())
        return sorted(text(name)[:100] for name in listed)[:50]
    except BaseException:  # noqa: BLE001 - it was imported; what it says of itself is beside the point
        return []


def arguments() -> "tuple[dict[str, Any], int]":
    """(specification, descriptor) from the command line as the kernel has it: what runs before may change sys.argv."""
    words = sys.argv
    try:
        with open("/proc/self/cmdline", "rb") as file:
            kept = [os.fsdecode(word) for word in file.read().split(b"\0")[:-1]]
        words = kept if kept[-2:-1] == ["--fd"] else words
    except OSError:
        pass
    # JSON without a module for it. Who starts this wrote it, and nothing in it has a name to call.
    spec = eval(words[-3], {"__builtins__": {}, "true": True, "false": False, "null": None})  # noqa: S307
    return spec, int(words[-1])


def lead(spec: "dict[str, Any]") -> None:
    """Put in front of the import path what the server's interpreter put there, in place of this script's folder."""
    here = os.path.dirname(os.path.realpath(__file__))
    # It is there unless a flag or a variable asks for a safe path; nothing may be imported from it.
    if sys.path and os.path.realpath(sys.path[0]) == here:
        del sys.path[0]
    if sys.flags.isolated or getattr(sys.flags, "safe_path", False):
        return
    script = spec.get("script")
    if spec.get("cwd_on_path"):
        sys.path.insert(0, os.getcwd())
    elif script:
        sys.path.insert(0, script if os.path.isdir(script) else os.path.dirname(os.path.realpath(script)))


def main() -> None:
    """Run the script."""
    spec, fd = arguments()
    os.set_inheritable(fd, False)
    emit = emitter(fd)
    if sys.version_info[:2] < OLDEST:
        emit({"too_old": "%d.%d.%d" % sys.version_info[:3]})
        LEAVE(0)
    lead(spec)
    sys.argv = [__file__]
    # Bound now: the imported code may replace it.
    clock = time.monotonic
    emit({"stage": "interpreter"})
    # By its number: code that runs at each start may have put anything in the place of sys.stderr.
    faulthandler.enable(2, all_threads=False)
    mark_imports([str(spec["module"]), str(spec.get("first"))], emit)
    started = clock()
    result = imported(spec, emit)
    if PID_NOW() != PID:
        LEAVE(0)
    result["seconds"] = clock() - started
    result["versions"] = versions()
    result["max_rss_bytes"] = peak_memory()
    emit({"result": result})
    # What follows is a question of ours: should torch crash over it, the import still went as it went.
    result.update(torch_facts(spec.get("devices") is True))
    emit({"result": result})
    LEAVE(0)


try:
    main()
except BaseException as problem:  # noqa: BLE001 - see above: it is this script's, and no answer
    try:  # noqa: SIM105 - contextlib may be the environment's
        os.write(2, ("The import probe failed: %s: %s\n" % (type(problem).__name__, text(problem)[:200])).encode())
    except BaseException:  # noqa: BLE001, S110 - nobody can be told
        pass
    LEAVE(0)
