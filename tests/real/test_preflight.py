"""The preflight against the launches that it predicts: the same flags, the same environment, one after the other.

Only what a machine without a GPU decides. A launch takes SGLang up to a minute to refuse; the numbers are printed.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.fakes.agent import environment, run
from tests.fakes.site import Site
from tests.real.conftest import overlay, row
from tests.real.model import tiny_model

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]

TABLE = "Preflight, and what the launch then did"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A launch that fails.

    ``environ`` stands in front of it, by ``sh -c`` with ``shell``. ``without`` are patterns of what is taken away from
    the environment. ``codes``: what the preflight has to name, one of them; ``status``: what it exits with.
    """

    name: str
    flags: tuple[str, ...]
    codes: tuple[str, ...]
    environ: dict[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    config: str | None = None
    shell: bool = False
    libcuda: bool = True
    status: int = 2


MAMBA = ("--mamba-backend", "flashinfer", "--device", "cuda")
NO_GPU = ("nvml-library-missing", "driver-not-loaded", "cuda-unavailable-to-torch")
CASES = [
    Case(name="mamba, no GPU", flags=MAMBA, codes=NO_GPU),
    Case(name="mamba, disabled by a variable", flags=MAMBA, codes=("flashinfer-disabled-by-env",),
         environ={"SGLANG_IS_FLASHINFER_AVAILABLE": "false"}),
    Case(name="mamba, disabled, by sh -c", flags=MAMBA, codes=("flashinfer-disabled-by-env",), shell=True,
         environ={"SGLANG_IS_FLASHINFER_AVAILABLE": "false"}),
    Case(name="mamba, FlashInfer absent", flags=MAMBA, codes=("flashinfer-not-installed",), without=("flashinfer*",)),
    Case(name="mamba, from a configuration file", flags=("--device", "cuda"), codes=NO_GPU,
         config="mamba-backend: flashinfer\n"),
    Case(name="no such mamba backend", flags=("--mamba-backend", "bogus"), codes=("launch-flags-rejected",)),
    Case(name="no such attention backend", flags=("--attention-backend", "fa5", "--device", "cpu"),
         codes=("launch-flags-rejected",), status=1),  # a plugin may bring it
    Case(name="a number that is none", flags=("--tp-size", "two"), codes=("launch-flags-rejected",)),
    Case(name="no such configuration file", flags=("--config", "/nowhere/server.yaml"),
         codes=("there is no such file",), status=64),
    Case(name="rounding without float16",
         flags=("--mamba-backend", "flashinfer", "--enable-mamba-cache-stochastic-rounding", "--device", "cuda"),
         codes=("mamba-rounding-dtype",)),
    Case(name="no libcuda", flags=("--attention-backend", "fa3", "--device", "cuda"),
         # Without a loaded driver no libcuda is to be expected: the driver is the cause.
         codes=("nvml-library-missing", "driver-not-loaded", "libcuda-unusable"), libcuda=False),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-").replace(",", ""))
def test_a_launch_that_fails(case: Case, full: Path, libcuda: Path, tmp_path: Path) -> None:
    """The preflight names the cause, and what it says that SGLang prints is what the launch printed at its end."""
    site = overlay(full, tmp_path / "environment", without=case.without)
    launch = command(case, site, tmp_path)
    env = environment({"HF_HUB_OFFLINE": "1"} | ({"LD_LIBRARY_PATH": str(libcuda)} if case.libcuda else {}))
    begun = time.monotonic()
    done = run("check", "--no-import", "--", *launch, env=env)
    quick = time.monotonic() - begun
    shown = done.stdout + done.stderr
    told, seconds = launched(launch, env)
    cause = next((line for line in shown.splitlines() if any(code in line for code in case.codes)), "none of them")
    row(TABLE, case.name, f"{quick:.2f} s", cause.strip()[:90], f"{seconds:.1f} s", last_words(told)[:110])
    assert (done.returncode, cause == "none of them") == (case.status, False), shown
    # It ends at its first error, so one of several is enough.
    says = re.findall(r"SGLang(?: says)?: (.+?)\)?$", done.stdout + done.stderr, re.MULTILINE)
    assert not says or any(is_in(one, told) for one in says), (says, told[-2000:])


def is_in(sentence: str, told: str) -> bool:
    """Whether a sentence was printed; an ellipsis in it stands for what the operator typed."""
    parts = [re.escape(" ".join(part.split())) for part in sentence.split("...")]
    return re.search(".*?".join(parts), " ".join(told.split())) is not None


def last_words(told: str) -> str:
    """The last line that looks like an error, else the last line."""
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(?:sglang serve: error|\w*(?:Error|Exception)\b.*:)", line)]
    return (errors or lines)[-1]


def command(case: Case, site: Site, folder: Path) -> list[str]:
    """The launch of a case, the way its operator would type it."""
    flags = ["--model-path", str(tiny_model(folder)), "--load-format", "dummy", "--skip-tokenizer-init", *case.flags]
    if case.config is not None:
        (folder / "server.yaml").write_text(case.config)
        flags += ["--config", str(folder / "server.yaml")]
    words = [*(f"{name}={value}" for name, value in case.environ.items()), site.python, "-m", "sglang.launch_server"]
    if case.shell:
        return ["sh", "-c", "exec env " + shlex.join([*words, *flags])]
    return [*(["env"] if case.environ else []), *words, *flags]


def launched(launch: list[str], env: dict[str, str]) -> tuple[str, float]:
    """What a launch printed until it ended, and the seconds until then. Ended with its group where it does not."""
    begun = time.monotonic()
    process = subprocess.Popen(
        launch, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        told, _ = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return told, time.monotonic() - begun
