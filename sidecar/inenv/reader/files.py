"""All access to the files of an environment: bounded, never blocking, inside a foreign root never outside it."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import stat
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing would cost every run 5 ms
    from typing import Callable

FILE_LIMIT = 4 * 1024 * 1024
"""Bytes read of one file; the longest that is read whole, torch's RECORD, has 1.6 MB."""
TOTAL_LIMIT = 256 * 1024 * 1024
"""Bytes read in one run. A full SGLang environment needs about 12 MB; past this every file looks unreadable."""
WALK_LIMIT = 400000
"""Entries looked at by walks in one run; a full SGLang environment has about 40,000 that count."""
ENTRY_LIMIT = 20000
"""Entries of one folder that a walk looks at."""
LISTING_LIMIT = 1000000
"""Names of one folder that a listing takes. It must be all of them: what is not in it counts as not installed."""
DEPTH_LIMIT = 40

SYS_OPENAT2 = 437
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_IN_ROOT = 0x10


class KernelTooOldError(Exception):
    """This kernel cannot resolve paths inside a root (openat2, Linux 5.6)."""


class FolderTooLargeError(Exception):
    """A folder has more names than can be listed, so that nothing can be said of what is missing from it."""


class Tree:
    """What lies below a folder.

    ``names`` holds the files, relative to it; ``stats`` (size, mtime_ns, ctime_ns, inode, mode) of those that Python
    or the dynamic loader can load. ``complete`` is False where a folder could not be listed or a limit was met, so
    that a name's absence proves nothing.
    """

    __slots__ = ("complete", "names", "stats")

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.stats: dict[str, tuple[int, int, int, int, int]] = {}
        self.complete = True


def marks_of(info: os.stat_result) -> tuple[int, int, int, int, int]:
    """What shows that a file is another one: no device number, which a bind mount changes, and no access time."""
    return info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino, info.st_mode


def loadable(name: str) -> bool:
    """Whether Python or the dynamic loader could load a file of this name."""
    return name.endswith((".py", ".so")) or ".so." in name


class Files:
    """A path that cannot be read is None or empty; nothing here raises for one."""

    def __init__(self, root: str | None = None) -> None:
        self.root_fd: int | None = None
        self._listed: dict[str, list[str]] = {}
        self._libraries: dict[str, list[str]] = {}
        self._sets: dict[str, frozenset[str]] = {}
        self._trees: dict[tuple[str, tuple[str, ...]], Tree | None] = {}
        self._bytes_left = TOTAL_LIMIT
        self._entries_left = WALK_LIMIT
        if root is not None:
            self.root_fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            self._libc = ctypes.CDLL(None, use_errno=True)
            os.close(self._open("/"))

    def _open(self, path: str) -> int:
        if self.root_fd is None:
            return os.open(path, os.O_PATH | os.O_CLOEXEC)
        how = struct.pack("=QQQ", os.O_PATH | os.O_CLOEXEC, 0, RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS)
        arguments = (ctypes.c_long(SYS_OPENAT2), ctypes.c_int(self.root_fd), ctypes.c_char_p(os.fsencode(path)))
        fd = int(self._libc.syscall(*arguments, ctypes.c_char_p(how), ctypes.c_size_t(len(how))))
        if fd < 0:
            code = ctypes.get_errno()
            # A seccomp filter of an older container runtime answers EPERM for a call it does not know.
            if code == errno.ENOSYS or (code == errno.EPERM and path == "/"):
                raise KernelTooOldError
            raise OSError(code, os.strerror(code))
        return fd

    def _reopen(self, path: str, wanted: Callable[[int], bool], flags: int) -> int:
        """Open what ``path`` names if it is of the ``wanted`` kind.

        Looked at before it is opened, so that no device or pipe is ever touched.
        """
        handle = self._open(path)
        try:
            if not wanted(os.fstat(handle).st_mode):
                raise OSError(errno.EINVAL, "not what was expected")
            return os.open("/proc/self/fd/%d" % handle, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        finally:
            os.close(handle)

    def stat(self, path: str) -> os.stat_result | None:
        """Status of what a path leads to."""
        try:
            if self.root_fd is None:
                return os.stat(path)
            handle = self._open(path)
        except (OSError, ValueError):
            return None
        try:
            return os.fstat(handle)
        finally:
            os.close(handle)

    def denied(self, path: str) -> bool:
        """Whether a path cannot be looked at for want of permission, which says nothing of what is there."""
        try:
            os.close(self._open(path))
        except OSError as error:
            return error.errno in (errno.EACCES, errno.EPERM)
        except ValueError:
            return False
        return False

    def read_only(self, path: str) -> bool:
        """Whether the mount that a path leads to refuses writing."""
        try:
            handle = self._open(path)
        except (OSError, ValueError):
            return False
        try:
            return bool(os.fstatvfs(handle).f_flag & os.ST_RDONLY)
        except OSError:
            return False
        finally:
            os.close(handle)

    def has_acl(self, path: str) -> bool:
        """Whether access is ruled by more than owner and mode."""
        try:
            handle = self._open(path)
        except (OSError, ValueError):
            return False
        try:
            return bool(os.getxattr("/proc/self/fd/%d" % handle, "system.posix_acl_access"))
        except OSError:
            return False
        finally:
            os.close(handle)

    def is_file(self, path: str) -> bool:
        """Whether it is a regular file."""
        info = self.stat(path)
        return info is not None and stat.S_ISREG(info.st_mode)

    def is_dir(self, path: str) -> bool:
        """Whether it is a directory."""
        info = self.stat(path)
        return info is not None and stat.S_ISDIR(info.st_mode)

    def read(self, path: str, limit: int = FILE_LIMIT) -> str | None:
        """At most ``limit`` bytes of a regular file as text, or None."""
        data = self.read_bytes(path, limit)
        return None if data is None else data.decode("utf-8", "replace")

    def read_bytes(self, path: str, limit: int) -> bytes | None:
        """At most ``limit`` bytes of a regular file, or None."""
        if self._bytes_left <= 0:
            return None
        try:
            fd = self._reopen(path, stat.S_ISREG, os.O_RDONLY)
        except (OSError, ValueError):
            return None
        try:
            chunks = []
            left = min(limit, self._bytes_left)
            while left > 0:
                chunk = os.read(fd, min(left, 1 << 20))
                if not chunk:
                    break
                chunks.append(chunk)
                left -= len(chunk)
                self._bytes_left -= len(chunk)
            return b"".join(chunks)
        except OSError:
            return None
        finally:
            os.close(fd)

    def listing(self, path: str) -> list[str]:
        """Names in a directory in the order in which it gives them; empty for what cannot be listed.

        Raises FolderTooLargeError.
        """
        if path not in self._listed:
            self._listed[path] = self._names(path) or []
        return self._listed[path]

    def names(self, path: str) -> list[str]:
        """Sorted names in a directory."""
        return sorted(self.listing(path))

    def libraries(self, path: str) -> list[str]:
        """Those names in a directory that end like an extension module's, of which each is asked for many times."""
        if path not in self._libraries:
            self._libraries[path] = [name for name in self.listing(path) if name.endswith(".so")]
        return self._libraries[path]

    def has(self, folder: str, name: str) -> bool:
        """Whether a directory has this entry; one listing answers for all of its names."""
        if folder not in self._sets:
            self._sets[folder] = frozenset(self.listing(folder))
        return name in self._sets[folder]

    def _names(self, path: str) -> list[str] | None:
        try:
            fd = self._reopen(path, stat.S_ISDIR, os.O_RDONLY | os.O_DIRECTORY)
        except (OSError, ValueError):
            return None
        try:
            with os.scandir(fd) as entries:
                names = [entry.name for entry in itertools.islice(entries, LISTING_LIMIT)]
        except OSError:
            return None
        finally:
            os.close(fd)
        if len(names) >= LISTING_LIMIT:
            raise FolderTooLargeError(path)
        return names

    def _entries(self, fd: int) -> list[os.DirEntry[str]]:
        """Entries of an open directory for a walk; one that never ends is cut off, not read to its end."""
        with os.scandir(fd) as entries:
            return list(itertools.islice(entries, ENTRY_LIMIT))

    def link(self, path: str) -> str | None:
        """Last part of the name of the file that ``path`` leads to, or None."""
        real = self.real(path)
        return None if real is None else os.path.basename(real)

    def real(self, path: str) -> str | None:
        """Name of the file that ``path`` leads to, or None; in a foreign root its front may be another's view."""
        try:
            handle = self._open(path)
        except (OSError, ValueError):
            return None
        try:
            return os.readlink("/proc/self/fd/%d" % handle)
        except OSError:
            return None
        finally:
            os.close(handle)

    def tree(self, path: str, skipped: tuple[str, ...] = ()) -> Tree | None:
        """Everything below a folder but ``skipped`` ones of its folders, each asked for once; None for no folder.

        Folders that are links are not followed and ``__pycache__`` is left out: an import writes there.
        """
        key = (path, skipped)
        if key not in self._trees:
            self._trees[key] = self._tree(path, skipped)
        return self._trees[key]

    def _tree(self, path: str, skipped: tuple[str, ...]) -> Tree | None:
        try:
            fd = self._reopen(path, stat.S_ISDIR, os.O_RDONLY | os.O_DIRECTORY)
        except (OSError, ValueError):
            return None
        tree = Tree()
        try:
            self._walk(tree, fd, path, "", skipped)
        finally:
            os.close(fd)
        return tree

    def _walk(self, tree: Tree, fd: int, path: str, prefix: str, skipped: tuple[str, ...] = ()) -> None:
        """Add what the open folder ``prefix`` below ``path`` holds, but for ``skipped`` ones of its folders."""
        try:
            found = self._entries(fd)
        except OSError:
            tree.complete = False
            return
        self._entries_left -= len(found)
        if self._entries_left < 0 or len(found) >= ENTRY_LIMIT:
            tree.complete = False
        if self._entries_left < 0:
            return
        folders = []
        for entry in found:
            name = entry.name
            try:
                if entry.is_dir(follow_symlinks=False):
                    if name != "__pycache__" and name not in skipped:
                        folders.append(name)
                    continue
                tree.names.add(prefix + name)
                if not name.endswith((".py", ".so")) and ".so." not in name:
                    continue
                # Installers may link to their cache; what matters is the file, wherever the link may lead.
                if entry.is_symlink():
                    info = self.stat(path + "/" + prefix + name)
                else:
                    info = entry.stat(follow_symlinks=False)
                if info is not None:
                    tree.stats[prefix + name] = marks_of(info)
            except OSError:
                tree.complete = False
        for name in folders:
            self._walk_into(tree, fd, path, prefix + name + "/")

    def _walk_into(self, tree: Tree, fd: int, path: str, prefix: str) -> None:
        name = prefix[:-1].rpartition("/")[2]
        if prefix.count("/") > DEPTH_LIMIT:
            tree.complete = False
            return
        try:
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
        except OSError:
            tree.complete = False
            return
        try:
            self._walk(tree, inner, path, prefix)
        finally:
            os.close(inner)
