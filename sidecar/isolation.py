"""The only place that starts processes.

Everything that can hang, crash or be hostile (the GPU driver, imports in the server's environment,
reading its files) runs in a child that this module owns:

* its own session, so that a kill reaches its descendants too;
* results as JSON lines on a private file descriptor, never on stdout, which belongs to whatever prints;
* stdout and stderr together in one bounded tail;
* tied to the agent's life (parent-death signal), no core dumps, lowered priority and privilege;
* a child that survives SIGKILL (uninterruptible sleep) is *abandoned*: counted, never waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from sidecar import orphans
from sidecar.untrusted import text

_LAUNCHER = str(Path(__file__).with_name("_launch.py"))
_TAIL_BYTES = 32768
_STAGE_LIMIT = 120
_LINE_LIMIT = 4 * 1024 * 1024
"""Longest accepted result line: a full inventory is about 100 kB; what is larger is not ours."""
_CHANNEL_LIMIT = 8 * 1024 * 1024
_MAX_LINES = 2000
"""What a one-shot child may send in all. The largest honest answer is an inventory of some 100 kB in a few lines;
a child runs code that is not ours and holds the channel, so it must not fill the agent's memory, where JSON of empty
lists takes twenty times the room that it took on the way."""
FLOOD = "flood"
"""The token of a child that was ended because it sent more than that."""
_OWN_VARIABLES = ("LD_LIBRARY_PATH", "PATH", "LANG", "LC_ALL")
"""Those of its own variables with which the agent's interpreter started and that the launcher may need too."""
_SWEEPS = 20
"""Most rounds of the search for what a child left behind; one that forks faster than that is met by the next one."""
_KILL_WAIT = 1.0
"""Seconds that a child may take to vanish after SIGKILL before it counts as abandoned."""


class Privilege(Struct, frozen=True, kw_only=True):
    """What a child may still do. ``None`` leaves the agent's own identity.

    ``capabilities`` False takes every capability from it for good, also from a child that stays root.
    """

    uid: int | None = None
    gid: int | None = None
    groups: tuple[int, ...] | None = None
    no_new_privs: bool = True
    capabilities: bool = True


def signal_name(exit_code: int | None) -> str | None:
    """Name of the signal in an exit status, None where it tells of none."""
    if exit_code is None or exit_code >= 0:
        return None
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


class ChildReport(Struct, frozen=True, kw_only=True):
    """How a one-shot child ended.

    ``exit_code`` is negative for a signal and None when the child could not be reaped. ``timed_out``
    means that it met its time limit; ``killed`` that this module ended it, for whatever reason; ``stuck`` that even
    SIGKILL did not. ``exec_error`` is the system's
    sentence when the program could not be started at all. ``stopped`` is the token that ``watch`` gave.
    """

    lines: tuple[Mapping[str, Any], ...]
    exit_code: int | None
    timed_out: bool = False
    killed: bool = False
    stuck: bool = False
    exec_error: str | None = None
    stopped: str | None = None
    tail: str = ""
    garbage: int = 0
    duration: float = 0.0

    @property
    def result(self) -> Mapping[str, Any] | None:
        """The last line that has a ``result`` key, else None."""
        return next((line for line in reversed(self.lines) if "result" in line), None)

    @property
    def stage(self) -> str | None:
        """The last stage marker, which names where a hang or a crash happened; one line of bounded length."""
        stages = (text(line.get("stage"), _STAGE_LIMIT) for line in reversed(self.lines))
        return next((stage for stage in stages if stage is not None), None)

    @property
    def signal_name(self) -> str | None:
        """Name of the signal that ended the child, if one did."""
        return signal_name(self.exit_code)


class _Buffer(Struct):
    """Bytes from the result channel, cut into JSON objects."""

    pending: bytearray = field(default_factory=bytearray)
    garbage: int = 0

    def feed(self, data: bytes) -> list[Mapping[str, Any]]:
        self.pending += data
        if len(self.pending) > _LINE_LIMIT:
            self.garbage += len(self.pending)
            self.pending.clear()
        objects: list[Mapping[str, Any]] = []
        while (end := self.pending.find(b"\n")) >= 0:
            line = bytes(self.pending[:end])
            del self.pending[: end + 1]
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                self.garbage += len(line)
                continue
            if isinstance(value, dict):
                objects.append(value)
            else:
                self.garbage += len(line)
        return objects


class Child:
    """A running child with a two-way channel of JSON lines on its file descriptor ``--fd N``.

    Made by `Isolation.start`. ``receive`` returns the next object, or None once the channel is closed.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], channel: socket.socket, output: socket.socket, mark: str
    ) -> None:
        self.mark = mark
        self._process = process
        self._channel = channel
        self._output = output
        self._buffer = _Buffer()
        self._ready: deque[Mapping[str, Any]] = deque()
        self._tail = bytearray()
        self._received = 0
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(output, self._read_output)
        self.stuck = False

    @property
    def pid(self) -> int:
        """Process id, which is also its process group and session."""
        return self._process.pid

    @property
    def tail(self) -> str:
        """The end of what it printed, decoded leniently."""
        return bytes(self._tail).decode("utf-8", "replace")

    @property
    def garbage(self) -> int:
        """Bytes on the result channel that were not JSON objects."""
        return self._buffer.garbage

    @property
    def received(self) -> int:
        """Bytes that came over the result channel."""
        return self._received

    @property
    def exit_code(self) -> int | None:
        """The exit status once it has ended, negative for a signal.

        Looks without reaping: until `reap`, the number of the process and of its group cannot become another's,
        so that a kill of the group reaches nobody else.
        """
        if self._process.returncode is not None:
            return self._process.returncode
        try:
            info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return self._process.poll()
        if info is None:
            return None
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status

    def reap(self) -> int | None:
        """The exit status, with the process table's entry given back; None while it runs."""
        return self._process.poll()

    def _read_output(self) -> None:
        try:
            data = self._output.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._output)
            return
        self._tail += data
        del self._tail[:-_TAIL_BYTES]

    async def send(self, message: Mapping[str, Any]) -> None:
        """Write one JSON line. Raises OSError when the child is gone."""
        await self._loop.sock_sendall(self._channel, json.dumps(message).encode() + b"\n")

    async def receive(self) -> Mapping[str, Any] | None:
        """The next JSON object from the child, or None after it closed the channel."""
        while not self._ready:
            try:
                data = await self._loop.sock_recv(self._channel, 262144)
            except OSError:
                data = b""
            if not data:
                return None
            self._received += len(data)
            self._ready.extend(self._buffer.feed(data))
            # Data that is already there is returned without suspending: a child that floods the channel would
            # keep the event loop to itself.
            await asyncio.sleep(0)
        return self._ready.popleft()

    def signal_group(self, number: int) -> None:
        """Send a signal to the child and everything it started. A vanished group is no error."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    async def wait(self, timeout: float) -> int | None:
        """The exit status, or None when the child has not ended within ``timeout`` seconds."""
        deadline = self._loop.time() + timeout
        delay = 0.001
        while (code := self.exit_code) is None:
            left = deadline - self._loop.time()
            if left <= 0:
                return None
            # A poll, not a pidfd or SIGCHLD: some sandboxed kernels have no pidfd_open, and asyncio's
            # watchers on 3.11 cost a thread per child.
            await asyncio.sleep(min(delay, left))
            delay = min(delay * 2, 0.05)
        return code

    def close(self) -> None:
        """Give back the file descriptors; a second call does nothing. The process is `Isolation.stop`'s business."""
        if self._channel.fileno() < 0:
            return
        self._read_output_rest()
        self._loop.remove_reader(self._output)
        self._channel.close()
        self._output.close()

    def _read_output_rest(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._output.recv(65536):
                self._tail += data
                del self._tail[:-_TAIL_BYTES]


def _pair(ours_too: contextlib.ExitStack, theirs_too: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
    """Give the two ends of a channel, ours non-blocking; each is closed by its stack."""
    ours, theirs = socket.socketpair()
    ours_too.callback(ours.close)
    theirs_too.callback(theirs.close)
    ours.setblocking(False)
    return ours, theirs


def _memory_file(content: bytes) -> int:
    """A descriptor of a file without a name: an argument could be too long, and anybody may read arguments."""
    descriptor = os.memfd_create("sglang-sidecar-launch", os.MFD_CLOEXEC)
    try:
        left = memoryview(content)
        while left:
            # Under a limit of the size of files a part is written; the next write then says so.
            left = left[os.write(descriptor, left) :]
        os.lseek(descriptor, 0, os.SEEK_SET)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


Watch = Callable[[Child, Sequence[Mapping[str, Any]]], Awaitable[str | None]]
"""Called every ``watch_interval`` seconds with the child and its lines so far; a token ends the child."""


class Isolation:
    """Owner of every child of the agent."""

    def __init__(self) -> None:
        # Processes that leave their session and are orphaned come to this process, where `_sweep` finds them.
        orphans.adopt(True)
        self._orphans = orphans.Orphans()
        self._children: set[Child] = set()
        self._one_shot: set[Child] = set()
        self._abandoned: list[Child] = []
        self.heavy = asyncio.Semaphore(1)
        """Held by whoever runs an expensive child (an import): one at a time in the whole agent."""

    @property
    def abandoned(self) -> int:
        """Children that survived SIGKILL and still exist."""
        self._abandoned = [child for child in self._abandoned if child.reap() is None]
        return len(self._abandoned)

    async def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        nice: int = 0,
        privilege: Privilege | None = None,
        oom_score_adj: int | None = None,
        cwd: str = "/",
        cwd_needed: bool = True,
    ) -> Child:
        """Start ``argv`` in the folder ``cwd`` with ``--fd N`` appended, N being its end of the private channel.

        Never raises for a program that cannot be started: the launcher reports it as an ``exec_error``
        line, which has the key ``folder`` where the child's user may not enter the folder. One that is not needed
        is replaced by the root then. Raises OSError only when the agent itself is out of processes or file
        descriptors.
        """
        privilege = privilege or Privilege()
        mark = self._orphans.mark()
        # What the child alone needs is closed in any case, what the agent needs only where the child did not start.
        with contextlib.ExitStack() as theirs_too, contextlib.ExitStack() as ours_too:
            ours, theirs = _pair(ours_too, theirs_too)
            output, child_output = _pair(ours_too, theirs_too)
            spec = {
                "parent": os.getpid(),
                "result_fd": theirs.fileno(),
                "nice": nice,
                "uid": privilege.uid,
                "gid": privilege.gid,
                "groups": privilege.groups,
                "no_new_privs": privilege.no_new_privs or not privilege.capabilities,
                "capabilities": privilege.capabilities,
                "oom_score_adj": oom_score_adj,
                "environ": {**env, orphans.VARIABLE: mark},
                "limits": list(orphans.limits().items()),
                "cwd": cwd,
                "cwd_needed": cwd_needed,
            }
            spec_fd = _memory_file(json.dumps(spec).encode())
            theirs_too.callback(os.close, spec_fd)
            command = [sys.executable, "-I", "-S", _LAUNCHER, str(spec_fd), *argv, "--fd", str(theirs.fileno())]
            # Blocking, but only until our own interpreter is executed; the launcher takes it from there.
            process = subprocess.Popen(  # noqa: S603, ASYNC220 - argv is ours or the operator's, no shell
                command,
                stdin=subprocess.DEVNULL,
                stdout=child_output.fileno(),
                stderr=child_output.fileno(),
                # The child's variables act only once its privilege is lowered: some of them run code.
                env={name: os.environ[name] for name in _OWN_VARIABLES if name in os.environ},
                cwd="/",
                start_new_session=True,
                pass_fds=(theirs.fileno(), spec_fd),
            )
            ours_too.pop_all()
        child = Child(process, ours, output, mark)
        self._children.add(child)
        return child

    async def stop(self, child: Child, *, grace: float = 0.0) -> int | None:
        """End a child and its group: SIGTERM and ``grace`` seconds if asked, then SIGKILL.

        Returns the exit status, or None for a child that cannot be killed; that one is abandoned.
        """
        if child.exit_code is None and grace > 0:
            child.signal_group(signal.SIGTERM)
            await child.wait(grace)
        # Also after the leader's own end: what it started may still run in its group.
        child.signal_group(signal.SIGKILL)
        code = await child.wait(_KILL_WAIT)
        if code is None:
            child.stuck = True
            self._abandoned.append(child)
        child.reap()
        self._children.discard(child)
        self._one_shot.discard(child)
        for _ in range(_SWEEPS):
            if not self._sweep():
                break
            # What a process that was just ended had started is ours from now on.
            await asyncio.sleep(0.01)
        child.close()
        return code

    def _sweep(self) -> bool:
        """End and reap what children left behind that run no more; say whether there was anything."""
        known = {child.pid for child in (*self._children, *self._abandoned)}
        running = {child.mark for child in self._children}
        # What cannot be told apart waits for the last of those that may have started it.
        with contextlib.suppress(OSError):
            return self._orphans.sweep(known, running, unmarked=not self._one_shot)
        return False

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        timeout: float,
        nice: int = 0,
        privilege: Privilege | None = None,
        oom_score_adj: int | None = None,
        watch: Watch | None = None,
        watch_interval: float = 0.2,
        cwd: str = "/",
        cwd_needed: bool = True,
    ) -> ChildReport:
        """Run a one-shot child to its end, or to ``timeout`` seconds, or until ``watch`` returns a token.

        Whatever ends it, including cancellation, its whole group is gone afterwards.
        """
        loop = asyncio.get_running_loop()
        begun = loop.time()
        lines: list[Mapping[str, Any]] = []
        timed_out = False
        stopped: str | None = None
        child = await self.start(
            argv,
            env=env,
            nice=nice,
            privilege=privilege,
            oom_score_adj=oom_score_adj,
            cwd=cwd,
            cwd_needed=cwd_needed,
        )
        self._one_shot.add(child)

        def flooded() -> bool:
            return child.received > _CHANNEL_LIMIT or len(lines) > _MAX_LINES

        async def collect() -> None:
            while not flooded() and (line := await child.receive()) is not None:
                lines.append(line)

        async def leave() -> None:
            while child.exit_code is None:
                await asyncio.sleep(0.05)
            # A descendant may keep the channel open for ever; what the child itself wrote is here by now.
            await asyncio.sleep(0.05)

        async def supervise() -> str:
            while not flooded():
                if watch is not None and (token := await watch(child, lines)) is not None:
                    return token
                await asyncio.sleep(watch_interval)
            return FLOOD

        supervisor = loop.create_task(supervise())
        tasks: list[asyncio.Task[Any]] = [loop.create_task(collect()), loop.create_task(leave()), supervisor]
        code: int | None = None
        killed = False
        try:
            done, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                timed_out = True
            elif supervisor in done or flooded():
                stopped = supervisor.result() if supervisor in done else FLOOD
            else:
                await child.wait(max(0.2, min(2.0, timeout - (loop.time() - begun))))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            killed = child.exit_code is None
            code = await asyncio.shield(self.stop(child))
        exec_error = next((text(str(line["exec_error"])) for line in lines if "exec_error" in line), None)
        return ChildReport(
            lines=tuple(lines),
            exit_code=code,
            timed_out=timed_out,
            killed=killed,
            stuck=child.stuck,
            exec_error=exec_error,
            stopped=stopped,
            tail=child.tail,
            garbage=child.garbage,
            duration=loop.time() - begun,
        )

    async def close(self) -> None:
        """End every child. Returns within about a second, whatever they do."""
        await asyncio.gather(*(self.stop(child) for child in tuple(self._children)))
        self._sweep()
        orphans.adopt(False)
