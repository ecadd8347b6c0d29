"""Real processes that look like an SGLang server, found by the real finder and asked by the real client."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sidecar.config import Settings
from sidecar.model import Placement, Processes, Standing, Target
from sidecar.serverinfo import ServerClient, ServerInfo
from sidecar.target import TargetFinder
from tests.fakes.sglang import CAPTURES, MARKER

STANDING = Standing(placement=Placement.HOST, placement_why="", processes=Processes.SHARED, processes_why="")
STRANGER = 54321
PROGRAM = f"""
import encodings.idna, encodings.latin_1, http.server, json, os, pathlib, sys
folder = pathlib.Path(__file__).parents[1]
uid = int(os.environ["BECOME"])
info = (folder / "info.json").read_bytes()
seen = (folder / "seen").open("a")
if uid != os.geteuid():
    os.setgroups([]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        print(json.dumps(self.headers.get("Authorization")), file=seen, flush=True)
        allowed = self.headers.get("Authorization") == "Bearer {MARKER}"
        body = info if allowed else b"no"
        self.send_response(200 if allowed else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
port = sys.argv[sys.argv.index("--port") + 1] if "--port" in sys.argv else 0
server = http.server.HTTPServer(("127.0.0.1", int(port)), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


@dataclass(frozen=True, slots=True)
class Lookalike:
    """A running process; ``pattern`` finds it and no other test's."""

    pid: int
    port: int
    pattern: str
    folder: Path

    @property
    def seen(self) -> set[str | None]:
        """The authorizations that it was sent."""
        return {json.loads(line) for line in (self.folder / "seen").read_text().splitlines()}


@contextlib.contextmanager
def lookalike(folder: Path, *, uid: int, flags: tuple[str, ...] = ()) -> Iterator[Lookalike]:
    """Run ``python3 -m sglang.launch_server FLAGS`` as a user, with a module of that name that is ours."""
    (folder / "sglang").mkdir()
    (folder / "sglang/launch_server.py").write_text(PROGRAM)
    (folder / "info.json").write_bytes((CAPTURES / "0.5.16-h200-fa3/server_info.json").read_bytes())
    pattern = f"--model-path {folder}/model"
    # The finder passes over what the agent, here this process, started itself: a shell starts it, and is gone.
    argv = [sys.executable, "-m", "sglang.launch_server", *pattern.split(), *flags]
    shell = subprocess.Popen(
        ["/bin/sh", "-c", '"$@" & echo $!', "sh", *argv],
        cwd=folder,
        env={"BECOME": str(uid), "PYTHONPATH": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert shell.stdout is not None
    with shell.stdout:
        pid = int(shell.stdout.readline())
        try:
            shell.wait(timeout=60)
            yield Lookalike(pid, int(shell.stdout.readline()), f"{pattern}($| )", folder)
        finally:
            os.kill(pid, signal.SIGKILL)


async def ask(settings: Settings) -> tuple[Target, ServerInfo | str]:
    """Find the server and ask it: its information, or the token of what is in the way."""
    target = await TargetFinder(settings, STANDING, time, environ={}).find()  # type: ignore[arg-type]  # a clock
    client = ServerClient(settings, time)  # type: ignore[arg-type]  # as above
    try:
        info = await client.info(target)
        return target, info or (client.problem.token if client.problem else "nothing")
    finally:
        await client.close()


@pytest.fixture(name="key")
def _key(tmp_path: Path) -> str:
    (tmp_path / "key").write_text(MARKER)
    return str(tmp_path / "key")


async def test_another_users_process_that_looks_like_the_server_gets_no_key(
    tmp_path: Path, key: str, unused_tcp_port: int
) -> None:
    """Another user's process with a server's command line is found and asked, and never shown the key."""
    if os.geteuid() != 0:
        pytest.skip("only root can start a process of another user")
    with lookalike(tmp_path, uid=STRANGER, flags=("--port", str(unused_tcp_port))) as other:
        settings = Settings(server_key_file=key, server_pattern=other.pattern, deadlines={"server": 30.0})
        target, answer = await ask(settings)
        assert (target.pid, target.uid, target.url) == (other.pid, STRANGER, f"http://127.0.0.1:{unused_tcp_port}")
        assert answer == "key-withheld"
        assert other.seen == {None}
        named = Settings(
            server_key_file=key,
            server_pattern=other.pattern,
            server_url=target.url,
            explicit=frozenset({"server_url"}),
            deadlines={"server": 30.0},
        )
        assert isinstance((await ask(named))[1], ServerInfo), "an address that the operator set is trusted"


async def test_a_server_of_our_own_user_gets_the_key(tmp_path: Path, key: str, unused_tcp_port: int) -> None:
    """A server of the agent's own user, at the address in its flags, is given the key without further settings."""
    with lookalike(tmp_path, uid=os.geteuid(), flags=("--port", str(unused_tcp_port))) as server:
        settings = Settings(server_key_file=key, server_pattern=server.pattern, deadlines={"server": 30.0})
        target, answer = await ask(settings)
    assert (target.pid, target.url_source) == (server.pid, "command-line")
    assert isinstance(answer, ServerInfo)


async def test_a_server_whose_port_is_in_a_file_is_found_where_it_listens(tmp_path: Path, key: str) -> None:
    """With its port in a configuration file a server that answers is asked at the port it really has."""
    with lookalike(tmp_path, uid=os.geteuid(), flags=("--config", "x.yaml")) as server:
        settings = Settings(server_key_file=key, server_pattern=server.pattern, deadlines={"server": 30.0})
        target, answer = await ask(settings)
    assert (target.url, target.url_source) == (f"http://127.0.0.1:{server.port}", "listening-socket")
    assert isinstance(answer, ServerInfo)
