"""Giving up rights as a container's runtime would: user, group, capabilities, bounding set.

Run as a script it is a process of a server with those rights, which waits until its standard input ends:
``python privileges.py UID GID CAPABILITIES BOUNDING [more arguments]``, the sets in hexadecimal.
"""

from __future__ import annotations

import ctypes
import os
import sys

_SET_DUMPABLE, _SET_KEEPCAPS, _CAPBSET_DROP = 4, 8, 24
_VERSION = 0x20080522
"""The layout of capset(2) with two words per set."""


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def become(uid: int, gid: int, capabilities: int, bounding: int) -> None:
    """Give up everything else for good. Needs to be root with all capabilities; raises OSError where it may not."""
    libc = ctypes.CDLL(None, use_errno=True)

    def checked(result: int) -> None:
        if result:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    for bit in range(41):
        if not bounding >> bit & 1:
            checked(libc.prctl(_CAPBSET_DROP, bit, 0, 0, 0))
    checked(libc.prctl(_SET_KEEPCAPS, 1, 0, 0, 0))
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    words = [(capabilities >> shift) & 0xFFFFFFFF for shift in (0, 32)]
    sets = (_Sets * 2)(*(_Sets(word, word, 0) for word in words))
    checked(libc.capset(ctypes.byref(_Header(_VERSION, 0)), sets))
    # A process that changes its user closes itself to others; one that is started as that user does not.
    checked(libc.prctl(_SET_DUMPABLE, 1, 0, 0, 0))


if __name__ == "__main__":
    become(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3], 16), int(sys.argv[4], 16))
    print("up", flush=True)  # noqa: T201 - what the test waits for
    sys.stdin.read()
