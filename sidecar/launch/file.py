"""The file that SGLang's ``--config`` names, read as SGLang reads it: into words that stand in front of the flags.

SGLang makes ``--key value`` of each entry and lets argparse read the result, in every release that has the flag: keys
are flags without their dashes, ``true`` gives the bare flag of a switch and ``false`` nothing, a list gives several
words, and the command line comes after and so wins.

Such a file may hold keys and may be anybody's: only regular files of modest size are opened, aliases and deep nesting
are refused before anything is built, and only values of listed flags are looked at.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sidecar.launch.args import UNUSABLE, LaunchFileError, is_listed, is_switch, parse_launch

if TYPE_CHECKING:
    import yaml

_SIZE_LIMIT: Final = 256 * 1024
"""Bytes of the longest accepted file. A complete one has 2 kB."""
_DEPTH_LIMIT: Final = 16
_NODE_LIMIT: Final = 4000
"""Entries and values. SGLang has 520 flags; the parser takes a second for 15,000."""
_TEXT_LIMIT: Final = 128
_ITEM_LIMIT: Final = 64
_SUFFIXES: Final = frozenset({".yaml", ".yml"})
_KEY: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")
_TAG: Final = "tag:yaml.org,2002:"
_TAGS: Final = frozenset(
    _TAG + name
    for name in "null bool int float binary timestamp omap pairs set str seq map merge value".split()  # noqa: SIM905
)
"""What a safe loader of YAML builds; SGLang uses one, which refuses every other tag."""
_SIMPLE: Final = frozenset(_TAG + name for name in ("null", "int", "float", "timestamp"))


class LaunchFiles:
    """Reads such files, and remembers the last one while it stays the same. Not for several threads at once."""

    def __init__(self) -> None:
        self._last: tuple[object, tuple[str, ...] | LaunchFileError] | None = None

    def read(self, path: str, folder: str | None, reader: int | None = None) -> tuple[str, ...]:
        """The words of a file, for one that is relative below ``folder``. Raises `LaunchFileError`.

        ``reader`` is the user who named the file, None for the agent's own: what that user might not read is not read
        for him.
        """
        if not path.startswith("/"):
            if folder is None:
                raise LaunchFileError("unknown-folder", f"{path}: the folder that it is in is not known", refused=False)
            path = f"{folder}/{path}"
        if Path(path).suffix.lower() not in _SUFFIXES:
            says = f"ValueError: Config file must be YAML format, got: {Path(path).suffix}"
            raise LaunchFileError("not-yaml-name", f"{path}: not named .yaml or .yml", refused=True, says=says)
        descriptor = _open(path, reader)
        try:
            status = os.fstat(descriptor)
            stamp = (path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            if self._last is None or self._last[0] != stamp:
                self._last = (stamp, _outcome(path, _content(path, descriptor)))
        finally:
            os.close(descriptor)
        outcome = self._last[1]
        if isinstance(outcome, LaunchFileError):
            raise outcome
        return outcome


def fault_of(launch: Sequence[str]) -> LaunchFileError | None:
    """Why the configuration file of a launch that would happen here cannot be read.

    None where it can, where none is named, and where it is not known which one is meant.
    """
    found: list[LaunchFileError] = []
    files = LaunchFiles()

    def read(path: str) -> Sequence[str]:
        try:
            return files.read(path, os.getcwd())  # noqa: PTH109 - its text is what is needed
        except LaunchFileError as error:
            found.append(error)
            raise

    notes = parse_launch(launch, read).notes
    # Under another name the same error is no fault: an earlier command of a script may make the file.
    return found[0] if found and notes.config == found[0].token else None


def _open(path: str, reader: int | None) -> int:
    """A descriptor of a regular file. Nothing else is opened: to open a device or a FIFO can have effects."""
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        says = f"ValueError: Config file not found: {path}"
        raise LaunchFileError("not-found", f"{path}: there is no such file", refused=True, says=says) from None
    except (OSError, ValueError):
        raise LaunchFileError("unreadable", f"{path}: cannot be opened", refused=False) from None
    try:
        status = os.fstat(place)
        if not stat.S_ISREG(status.st_mode):
            raise LaunchFileError("not-a-file", f"{path}: not a regular file", refused=False)
        if reader not in {None, os.geteuid(), status.st_uid} and not status.st_mode & stat.S_IROTH:
            raise LaunchFileError("unreadable", f"{path}: its owner does not let the server's user read", refused=False)
        return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError:
        raise LaunchFileError("unreadable", f"{path}: may not be read", refused=False) from None
    finally:
        os.close(place)


def _content(path: str, descriptor: int) -> bytes | LaunchFileError:
    try:
        with os.fdopen(os.dup(descriptor), "rb") as file:
            content = file.read(_SIZE_LIMIT + 1)
    except OSError:
        return LaunchFileError("unreadable", f"{path}: cannot be read", refused=False)
    if len(content) > _SIZE_LIMIT:
        sentence = f"{path}: larger than {_SIZE_LIMIT // 1024} KiB, which no such file is"
        return LaunchFileError("too-large", sentence, refused=False)
    return content


def _outcome(path: str, content: bytes | LaunchFileError) -> tuple[str, ...] | LaunchFileError:
    if isinstance(content, LaunchFileError):
        return content
    try:
        return tuple(words(content, path))
    except LaunchFileError as error:
        return error


def words(content: bytes, path: str) -> Iterator[str]:
    """The words that a file's content stands for. ``path`` is for the sentences. Raises `LaunchFileError`.

    Values of flags that are not listed are left out; one that cannot be a listed flag's value is `UNUSABLE`.
    """
    import yaml  # a launch without such a file does not pay for it

    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        sentence = f"{path}, line {line}: not UTF-8"
        raise LaunchFileError("invalid-yaml", sentence, refused=True, line=line) from None
    try:
        loader = _loader(text, path)
        root = loader.get_single_node()
        if root is None:
            return
        if not isinstance(root, yaml.MappingNode):
            if isinstance(root, yaml.ScalarNode) and root.tag == f"{_TAG}null":
                return
            says = "ValueError: Config file must contain a dictionary at root level"
            raise _refused("not-a-mapping", path, root, "keys with values are wanted here", says=says)
        yield from _entries(loader, root, path)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        at = None if mark is None else int(mark.line) + 1
        # Not in the parser's words: they repeat pieces of the file.
        sentence = f"{path}{'' if at is None else f', line {at}'}: not valid YAML"
        raise LaunchFileError("invalid-yaml", sentence, refused=True, line=at) from None
    except RecursionError:
        raise LaunchFileError("too-deep", f"{path}: nested too deeply", refused=False) from None


def _loader(text: str, path: str) -> yaml.SafeLoader:
    """A parser that stops at what could blow up, before it is built."""
    import yaml

    class Loader(yaml.SafeLoader):
        def __init__(self, text: str) -> None:
            super().__init__(text)
            self.depth_now = 0
            self.nodes_seen = 0

        def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]  # its stub has no type
            if self.check_event(yaml.AliasEvent):
                sentence = (
                    f"{path}, line {mark.line + 1}: aliases (*name) are not read here, though SGLang reads them; write "
                    "the value out in their place"
                )
                raise LaunchFileError("aliases", sentence, refused=False, line=mark.line + 1)
            self.depth_now += 1
            self.nodes_seen += 1
            if self.depth_now > _DEPTH_LIMIT or self.nodes_seen > _NODE_LIMIT:
                what = "nested too deeply" if self.depth_now > _DEPTH_LIMIT else "too many entries"
                sentence = f"{path}, line {mark.line + 1}: {what}"
                raise LaunchFileError("too-deep", sentence, refused=False, line=mark.line + 1)
            node = super().compose_node(parent, index)
            self.depth_now -= 1
            if node is not None and node.tag not in _TAGS:
                raise _refused("unknown-tag", path, node, "a tag that SGLang does not take")
            return node

    return Loader(text)


def _refused(token: str, path: str, node: yaml.Node, what: str, says: str | None = None) -> LaunchFileError:
    line = node.start_mark.line + 1
    return LaunchFileError(token, f"{path}, line {line}: {what}", refused=True, line=line, says=says)


def _entries(loader: yaml.SafeLoader, root: yaml.MappingNode, path: str) -> Iterator[str]:
    import yaml

    entries: dict[str, yaml.Node] = {}
    for key, value in root.value:
        if isinstance(key, yaml.ScalarNode) and key.tag == f"{_TAG}merge":
            line = key.start_mark.line + 1
            raise LaunchFileError(
                "merge", f"{path}, line {line}: merge keys are not read here", refused=False, line=line
            )
        if not isinstance(key, yaml.ScalarNode) or key.tag not in {f"{_TAG}str", f"{_TAG}value"}:
            raise _refused("key-not-text", path, key, "this key is not text")
        entries[key.value] = value  # of several, the last one counts
    for key, value in entries.items():
        flag = f"--{key}"
        if not key or not set(key) <= _KEY:
            yield f"--{UNUSABLE}"
        elif is_listed(flag) or is_listed(flag.replace("_", "-")):
            yield from _flag_words(loader, flag, value)
        else:
            yield flag


def _flag_words(loader: yaml.SafeLoader, flag: str, value: yaml.Node) -> Sequence[str]:
    import yaml

    if isinstance(value, yaml.ScalarNode) and value.tag == f"{_TAG}bool":
        held = bool(loader.construct_object(value))
        if is_switch(flag.replace("_", "-")):
            return (flag,) if held else (f"{UNUSABLE}{flag}",)
        return flag, str(held).lower()
    if isinstance(value, yaml.SequenceNode):
        if not value.value:
            return (f"{UNUSABLE}{flag}",)
        return flag, *(_word(loader, item) for item in value.value[:_ITEM_LIMIT])
    return flag, _word(loader, value)


def _word(loader: yaml.SafeLoader, node: yaml.Node) -> str:
    """A value as SGLang's ``str()`` gives it, or `UNUSABLE` for what no listed flag takes."""
    import yaml

    if not isinstance(node, yaml.ScalarNode) or len(node.value) > _TEXT_LIMIT:
        return UNUSABLE
    if node.tag == f"{_TAG}str":
        return str(node.value)
    if node.tag == f"{_TAG}bool":
        return str(bool(loader.construct_object(node)))
    if node.tag not in _SIMPLE:
        return UNUSABLE
    try:
        return str(loader.construct_object(node))
    except (ValueError, OverflowError):
        return UNUSABLE
