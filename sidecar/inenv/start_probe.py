"""Say which file ends this interpreter when it starts.

``python -S start_probe.py --fd N``: run by path by the server's interpreter, which without its site directories starts
whatever lies in them, and then does what a normal start does there, one file after the other. Standard library only,
Python 3.8 or newer, never imported.

JSON lines go to file descriptor N: ``{"file": FILE}`` before the code of each .pth file, of ``sitecustomize`` and of
``usercustomize``, at the end ``{"result": ...}``: true, or what was raised on the way that a start does not survive.
What ends the process without an exception leaves the last file as its answer.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

ESCAPED = {number: "\\u%04x" % number for number in (*range(32), 34, 92)}
LIMIT = 4096
"""Characters of a path or of a message."""
LEAVE = os._exit


def emitter(fd: int) -> "Callable[[str, str], None]":
    """Give the function that writes a line to the channel, whatever the code of the environment does to ``os``."""
    write = os.write

    def emit(key: str, value: str) -> None:
        write(fd, ('{"%s": %s}\n' % (key, value)).encode("utf-8", "surrogatepass"))

    return emit


def quoted(value: str) -> str:
    """``value`` as a JSON string of bounded length."""
    return '"%s"' % value[:LIMIT].translate(ESCAPED)


def told_first(emit: "Callable[[str, str], None]", place: "Callable[..., str]", run: "Any") -> "Any":
    """Make a function of ``site`` say first which file it is about to run."""

    def tell(*arguments: "Any") -> "Any":
        emit("file", quoted(place(*arguments)))
        return run(*arguments)

    return tell


def found(name: str) -> str:
    """The file of a module that is about to be imported, or its name where there is none."""
    import importlib.util

    spec = importlib.util.find_spec(name)
    return spec.origin or name if spec is not None else name


def main() -> None:
    """Run the script."""
    fd = int(sys.argv[sys.argv.index("--fd") + 1])
    os.set_inheritable(fd, False)
    emit = emitter(fd)
    here = os.path.dirname(os.path.realpath(__file__))
    if sys.path and os.path.realpath(sys.path[0]) == here:
        del sys.path[0]
    sys.argv = [""]
    try:
        import site

        module: "Any" = site
        module.addpackage = told_first(emit, lambda folder, name, _known: os.path.join(folder, name), site.addpackage)
        for name in ("sitecustomize", "usercustomize"):
            run = getattr(site, "exec" + name)
            setattr(site, "exec" + name, told_first(emit, lambda name=name: found(name), run))
        site.main()
        result = "true"
    except BaseException as error:  # noqa: BLE001 - what a start does not survive is the answer
        result = quoted("%s: %s" % (type(error).__name__, error))
    emit("result", result)
    LEAVE(0)


main()
