"""Start one child the way `isolation` wants it: this file is run, never imported.

``python -I -S _launch.py SPEC_FD ARGV...`` runs with the agent's own interpreter and none of the child's
variables, some of which (LD_*) would run code here before the privilege is lowered. It ties the child's life to
the agent's, lowers its privilege and priority, and then becomes ARGV by exec. A launcher instead of
``preexec_fn``: nothing of ours runs between fork and exec of the serving process (unsafe beside threads), and an
exec that blocks (interpreter on a dead network mount) blocks this child, not the event loop.

SPEC_FD is a descriptor with JSON: ``environ`` (the child's variables), ``parent`` (pid that must still be our
parent), ``result_fd`` (where a failure to start is reported as one JSON line), ``nice``, ``uid``, ``gid``,
``groups``, ``no_new_privs``, ``capabilities``, ``oom_score_adj``, ``limits`` (pairs of a resource and
what it is limited to), ``cwd`` (the folder to start in), ``cwd_needed`` (nothing may run elsewhere).
"""

import ctypes
import json
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
CAPABILITY_VERSION_3 = 0x20080522


def drop_capabilities(libc: ctypes.CDLL) -> None:
    """Empty every set; with no_new_privs set, exec gives root nothing back that is not permitted now."""
    libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    if libc.capset(header, (ctypes.c_uint32 * 6)()) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def limit(kind: int, most: int) -> None:
    """Set a limit for good."""
    try:
        resource.setrlimit(kind, (most, most))
    except (OSError, ValueError):
        # A sandbox may rule only a few of them. Without the one of core files no secret in memory would be safe.
        if kind == resource.RLIMIT_CORE:
            raise


def enter(folder: str, needed: bool) -> None:
    """Go to a folder; one that is not needed may be closed."""
    try:
        os.chdir(folder)
    except OSError:
        if needed:
            raise


def main() -> None:
    with open(int(sys.argv[1]), "rb") as file:
        spec = json.load(file)
    argv = sys.argv[2:]
    # Loaded before the change of user, who may not be able to read this interpreter's library.
    libc = ctypes.CDLL(None, use_errno=True)
    prctl = libc.prctl
    folder = None
    try:
        for kind, most in spec["limits"]:
            limit(kind, most)
        if spec.get("nice"):
            os.nice(spec["nice"])
        if spec.get("oom_score_adj") is not None:
            try:
                with open("/proc/self/oom_score_adj", "w") as file:
                    file.write(str(spec["oom_score_adj"]))
            except OSError:
                pass  # a sandbox without that file only loses the preference of whom to kill first
        if spec.get("groups") is not None:
            os.setgroups(spec["groups"])
        if spec.get("gid") is not None:
            os.setresgid(spec["gid"], spec["gid"], spec["gid"])
        if spec.get("uid") is not None:
            os.setresuid(spec["uid"], spec["uid"], spec["uid"])
        # After the change of user: changing credentials clears the parent-death signal.
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if spec.get("no_new_privs"):
            prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if not spec.get("capabilities", True):
            drop_capabilities(libc)
        if os.getppid() != spec["parent"]:
            os._exit(0)  # the agent died before the signal was armed
        # As the child's user, and tied to the agent's life: the folder may be closed to it, or on a dead mount.
        folder = spec.get("cwd") or "/"
        enter(folder, spec.get("cwd_needed", True))
        folder = None
        os.execvpe(argv[0], argv, spec["environ"])  # noqa: S606 - that no shell comes between is the point
    except Exception as error:  # noqa: BLE001 - whatever it is, the child did not start, and must not look as if it had
        words = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
        said = {"exec_error": words, "errno": getattr(error, "errno", None), "program": argv[0]}
        line = json.dumps(said | ({"folder": folder} if folder else {}))
        os.write(spec["result_fd"], line.encode() + b"\n")
        os._exit(127)


main()
