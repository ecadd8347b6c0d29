"""Building and fetching kernels, and stochastic rounding: judged beside whether FlashInfer can be imported."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from sidecar.config import Settings
from sidecar.environment import Companion, EnvironmentFacts, FlashInferFiles, MambaFiles, Toolchain
from sidecar.model import Answer, Finding, Scope, Status, Target
from sidecar.probes.flashinfer import FlashinferFacts, MambaArguments
from sidecar.serverinfo import ServerInfo
from tests.builders import view
from tests.fakes.flashinfer import collected, judged

TOOLS = Toolchain(
    nvcc="/usr/local/cuda/bin/nvcc",
    nvcc_source="default",
    release="13.0",
    headers=True,
    headers_release="13.0",
    ninja=True,
    environ_seen=True,
)
GOOD = EnvironmentFacts(
    scope=Scope.SERVER,
    python="/venv/bin/python",
    flashinfer=FlashInferFiles(kind="package", version="0.6.14", mamba=MambaFiles(state="present", symbol="bound")),
    torch_cuda="13.0",
    toolchain=TOOLS,
    cubins=0,
)


def finding(code: str, environment: EnvironmentFacts, **changes: Any) -> Finding:
    facts = FlashinferFacts(environment=environment, **{"variables": {}, **changes})
    found: Finding = judged(facts)[code]
    return found


def shown(found: Finding) -> str:
    return f"{found.status}: {found.reason}" if found.reason else str(found.status)


@pytest.mark.parametrize(
    ("tools", "expected", "said"),
    [
        ({}, "false", "nvcc 13.0"),
        # flashinfer-ai/flashinfer#1904: the compiler is then called with the colon in front
        ({"cuda_home": ":/usr/local/cuda", "cuda_home_ok": False}, "true: cuda-home-malformed", "colon"),
        ({"cuda_home": "/gone", "cuda_home_ok": False}, "true: cuda-home-malformed", "'/gone'"),
        # flashinfer-ai/flashinfer#1919
        ({"nvcc": None, "nvcc_source": None, "headers": None}, "true: nvcc-missing", "not in /usr/local/cuda"),
        ({"nvcc": None, "cuda_home": "/cuda", "cuda_home_ok": True}, "true: nvcc-missing", "under CUDA_HOME, /cuda"),
        ({"nvcc": "/s/nvidia/cu13/bin/nvcc", "nvcc_source": "wheel"}, "true: nvcc-missing", "in a wheel"),
        ({"release": "12.8"}, "true: toolkit-mismatch", "older than the CUDA 13.0"),
        ({"release": "14.0", "headers_release": "14.0"}, "true: toolkit-mismatch", "another major"),
        ({"release": "13.2", "headers_release": "13.2"}, "false", "nvcc 13.2"),
        ({"release": None, "headers_release": None}, "false", "unknown release"),
        ({"headers": False, "headers_release": None}, "true: headers-missing", "cuda_runtime.h"),
        # flashinfer-ai/flashinfer#3493
        ({"headers_release": "13.1"}, "true: headers-mismatch", "CUDA 13.1"),
        ({"ninja": False}, "true: ninja-missing", "no ninja"),
        ({"ninja": False, "ninja_beside": True}, "true: ninja-missing", "/venv/bin is not found"),
        ({"nvcc": "/usr/bin/nvcc", "nvcc_source": "path", "headers": False}, "false", "/usr/bin/nvcc is on the path"),
        ({"nvcc": "/usr/bin/nvcc", "nvcc_source": "path", "headers": False, "ninja": False}, "true: ninja-missing", ""),
        ({"environ_seen": False, "ninja": None, "ninja_beside": True}, "false", "nvcc 13.0"),
        ({"environ_seen": False, "nvcc": None, "headers": None}, "unknown: environ-unseen", "cannot be seen"),
        ({"headers": None}, "unknown: toolchain-unseen", "cannot be seen"),
    ],
)
def test_toolchain(tools: dict[str, Any], expected: str, said: str) -> None:
    """What FlashInfer needs to build kernels is told by the files alone, each lack by its own token."""
    found = finding("flashinfer-jit-toolchain", replace(GOOD, toolchain=replace(TOOLS, **tools)))
    assert shown(found) == expected
    assert said in found.message
    if found.status is Status.TRUE:
        assert found.remedy is not None
        assert "flashinfer-jit-cache" in found.remedy
        assert "import that succeeds proves nothing" in found.message


def test_a_compiler_in_a_wheel_is_pointed_at() -> None:
    """FlashInfer never looks for a compiler in wheels, and CUDA_HOME makes it find one there."""
    tools = replace(TOOLS, nvcc="/s/nvidia/cu13/bin/nvcc", nvcc_source="wheel")
    found = finding("flashinfer-jit-toolchain", replace(GOOD, toolchain=tools))
    assert found.remedy is not None
    assert found.remedy.startswith("export CUDA_HOME=/s/nvidia/cu13  # or ")


def test_nothing_is_built_where_the_kernels_are_installed() -> None:
    """A flashinfer-jit-cache that FlashInfer accepts makes the toolchain dispensable, one that it ignores does not."""
    bare = replace(GOOD, toolchain=Toolchain(environ_seen=True))
    for version, expected in (("0.6.14+cu130", "false"), ("0.6.9+cu130", "true: nvcc-missing")):
        files = replace(GOOD.flashinfer, jit_cache=Companion(kind="package", version=version))
        assert shown(finding("flashinfer-jit-toolchain", replace(bare, flashinfer=files))) == expected


@pytest.mark.parametrize(
    ("cubin", "count", "expected"),
    [
        # sgl-project/sglang#10933
        (Companion(), 0, "true: downloads-at-run-time"),
        (Companion(), 12, "false"),
        (Companion(), None, "unknown: cubins-unseen"),
        (Companion(kind="package", version="0.6.14"), None, "false"),
        # The mismatch is told by a condition of its own.
        (Companion(kind="package", version="0.6.13"), 0, "false"),
        (Companion(kind="package"), 0, "false"),
        (Companion(kind="namespace"), 0, "true: downloads-at-run-time"),
    ],
)
def test_cubins(cubin: Companion, count: int | None, expected: str) -> None:
    """Kernels that would be fetched at run time are told from installed ones, and from what was not looked at."""
    files = replace(GOOD.flashinfer, cubin=cubin)
    found = finding("flashinfer-cubins-not-installed", replace(GOOD, flashinfer=files, cubins=count))
    assert shown(found) == expected


def test_a_package_that_flashinfer_passes_over_is_not_where_its_kernels_are() -> None:
    """From 0.7.2 on a package of another version is ignored; a folder of one's own is another place, too."""
    stale = replace(GOOD.flashinfer, version="0.7.2", cubin=Companion(kind="package", version="0.6.13"))
    for count in (0, 500):
        ignored = finding("flashinfer-cubins-not-installed", replace(GOOD, flashinfer=stale, cubins=count))
        assert shown(ignored) == "unknown: cubins-unseen"
    fitting = replace(GOOD.flashinfer, cubin=Companion(kind="package", version="0.6.14"))
    own = finding("flashinfer-cubins-not-installed", replace(GOOD, flashinfer=fitting, cubins=0), cubin_dir=True)
    assert shown(own) == "unknown: cubins-unseen"


@pytest.mark.parametrize(
    ("version", "expected", "remedy"),
    [
        # What SGLang 0.4.6.post5 requires has no loader of precompiled kernels.
        ("0.2.5", "false", "None"),
        # What SGLang 0.4.10.post2 requires fetches them (flashinfer-ai/flashinfer#1352), and has no command for it.
        ("0.2.9rc2", "true: downloads-at-run-time", "copy what another server has in .cache/flashinfer/cubins"),
        ("0.2.10", "true: downloads-at-run-time", "-m flashinfer --download-cubin"),
        ("0.3.1", "true: downloads-at-run-time", "-m flashinfer --download-cubin"),
    ],
)
def test_kernels_are_missed_where_a_release_fetches_them(version: str, expected: str, remedy: str) -> None:
    """Releases before 0.2.6 fetch none; later ones do, also those for which no package was published."""
    found = finding(
        "flashinfer-cubins-not-installed", replace(GOOD, flashinfer=replace(GOOD.flashinfer, version=version))
    )
    assert shown(found) == expected
    assert remedy in str(found.remedy)
    # PyPI has the package since 0.4.0.
    assert "flashinfer-cubin==" not in str(found.remedy)


def test_remedy_for_cubins_exists() -> None:
    """A package is suggested where PyPI has one, else FlashInfer's own command (flashinfer-ai/flashinfer#4781)."""
    older = replace(GOOD, flashinfer=replace(GOOD.flashinfer, version="0.6.13"))
    found = finding("flashinfer-cubins-not-installed", older)
    assert "install --no-deps flashinfer-cubin==0.6.13" in str(found.remedy)
    assert "flashinfer --download-cubin" in str(finding("flashinfer-cubins-not-installed", GOOD).remedy)


@pytest.mark.parametrize("code", ["flashinfer-jit-toolchain", "flashinfer-cubins-not-installed"])
def test_nothing_is_said_of_what_was_not_read(code: str) -> None:
    """Without a readable FlashInfer of the server's, neither can be told."""
    assert shown(finding(code, replace(GOOD, scope=Scope.SELF))) == "unknown: scope-self"
    assert shown(finding(code, replace(GOOD, problem="root-unreadable"))) == "unknown: root-unreadable"
    assert shown(finding(code, replace(GOOD, flashinfer=FlashInferFiles()))) == "unknown: other-cause"


# -- stochastic rounding ----------------------------------------------------------------------------------

REFUSED = (
    "ValueError: Stochastic rounding for the Mamba SSM cache requires --mamba-ssm-dtype float16, got {}. Run with "
    "--mamba-ssm-dtype float16 or disable --enable-mamba-cache-stochastic-rounding."
)


@pytest.mark.parametrize(
    ("launch", "info", "sglang", "expected", "says"),
    [
        ({"enable_mamba_cache_stochastic_rounding": True}, None, "0.5.16", "true: unset", REFUSED.format("None")),
        (
            {"enable_mamba_cache_stochastic_rounding": True, "mamba_ssm_dtype": "bfloat16"},
            None,
            "0.5.23",
            "true: not-float16",
            REFUSED.format("'bfloat16'"),
        ),
        (
            {"enable_mamba_cache_stochastic_rounding": True, "mamba_ssm_dtype": "float16"},
            None,
            "0.5.16",
            "false",
            None,
        ),
        ({"enable_mamba_cache_stochastic_rounding": True}, None, None, "true: unset", REFUSED.format("None")),
        ({"enable_mamba_cache_stochastic_rounding": True}, None, "0.5.14", "false", None),
        ({"mamba_backend": "flashinfer"}, None, "0.5.16", "false", None),
        ({"incomplete": True}, None, "0.5.16", "unknown: flags-incomplete", None),
        (
            {"enable_mamba_cache_stochastic_rounding": True, "incomplete": True},
            None,
            "0.5.16",
            "unknown: flags-incomplete",
            None,
        ),
        (
            {},
            ServerInfo(enable_mamba_cache_stochastic_rounding=True, mamba_ssm_dtype="float16"),
            "0.5.16",
            "false",
            None,
        ),
        ({}, ServerInfo(), "0.5.16", "false", None),
        ({}, None, "0.5.16", "false", None),
    ],
)
async def test_rounding(
    launch: dict[str, Any], info: ServerInfo | None, sglang: str | None, expected: str, says: str | None
) -> None:
    """SGLang refuses stochastic rounding unless the flag says float16: the model's configuration does not count."""
    target = Target(
        url="http://h",
        url_source="t",
        scope=Scope.SERVER,
        python="/p",
        launch=launch,
        launch_source="command-line" if launch else None,
        environ={},
    )
    installed = {} if sglang is None else {"sglang": sglang}
    facts = await collected(replace(GOOD, distributions=installed), target, info=info)
    found = judged(facts)["mamba-rounding-dtype"]
    assert (shown(found), found.sglang_says) == (expected, says)


def test_rounding_of_a_server_whose_flags_cannot_be_seen() -> None:
    """A server without readable flags is unknown until it answers, by which it has passed SGLang's check."""
    facts = FlashinferFacts(environment=GOOD, server_seen=True)
    assert shown(judged(facts)["mamba-rounding-dtype"]) == "unknown: flags-unseen"
    answering = judged(facts, server=view(Answer.ACCEPTED))["mamba-rounding-dtype"]
    assert shown(answering) == "false"


def test_rounding_matters_whatever_the_backend() -> None:
    """SGLang checks the type before it looks at the backend, so the condition concerns triton's users too."""
    asked = MambaArguments(source="flags", rounding=True)
    facts = FlashinferFacts(environment=GOOD, variables={}, mamba=asked, sglang="0.5.16")
    found = judged(facts, server=view(features={}), settings=Settings())["mamba-rounding-dtype"]
    assert (found.status, found.final) == (Status.TRUE, True)
