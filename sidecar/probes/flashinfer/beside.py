"""What is judged beside whether the module can be imported: building and fetching kernels, stochastic rounding."""

from __future__ import annotations

import posixpath
import shlex

from sidecar import cudalibs, sglangtexts
from sidecar.model import Answer, ConditionType, Finding, Scope, Status, World
from sidecar.modules import as_remedy
from sidecar.probes.flashinfer import texts
from sidecar.probes.flashinfer.conditions import (
    CUBIN_MISMATCH,
    CUBINS_NOT_INSTALLED,
    JIT_CACHE_MISMATCH,
    JIT_TOOLCHAIN,
    ROUNDING_DTYPE,
)
from sidecar.probes.flashinfer.facts import FlashinferFacts
from sidecar.probes.flashinfer.reading import agrees, companion_faults


def _fine(kind: ConditionType, message: str) -> Finding:
    return Finding(code=kind.code, status=Status.FALSE, message=message)


def _open(kind: ConditionType, reason: str, message: str = "") -> Finding:
    return Finding(code=kind.code, status=Status.UNKNOWN, reason=reason, message=message or kind.reasons[reason])


def _unread(kind: ConditionType, facts: FlashinferFacts) -> Finding | None:
    """Give the finding for an environment of which this cannot be said."""
    environment = facts.environment
    if environment.problem is not None:
        return _open(kind, environment.problem)
    if environment.scope is Scope.SELF:
        return _open(kind, "scope-self")
    if environment.flashinfer.kind != "package":
        return _open(kind, "other-cause", "Unknown as long as there is no package flashinfer to be read.")
    return None


# -- building kernels -------------------------------------------------------------------------------------


def jit_toolchain(facts: FlashinferFacts) -> Finding:
    """Whether FlashInfer finds what it needs to build kernels, by reading alone."""
    unread = _unread(JIT_TOOLCHAIN, facts)
    if unread is not None:
        return unread
    environment = facts.environment
    if environment.flashinfer.jit_cache.kind == "package" and agrees(
        facts, JIT_CACHE_MISMATCH, environment.flashinfer.jit_cache
    ):
        return _fine(JIT_TOOLCHAIN, "flashinfer-jit-cache brings the kernels.")
    tools = environment.toolchain
    if not tools.environ_seen and not (tools.nvcc_source == "default" and tools.headers):
        return _open(JIT_TOOLCHAIN, "environ-unseen")
    if tools.cuda_home is not None and tools.cuda_home_ok is False:
        colon = " It starts with a colon." if tools.cuda_home.startswith(":") else ""
        message = f"CUDA_HOME is {tools.cuda_home!r}, which is no folder.{colon}"
        return _lacking(
            "cuda-home-malformed", message, "set CUDA_HOME to the one folder of the CUDA toolkit, or unset it"
        )
    if tools.nvcc is None or tools.nvcc_source == "wheel":
        return _no_compiler(facts)
    if (wrong := _wrong_toolkit(facts)) is not None:
        if not tools.environ_seen:
            # A CUDA_HOME that cannot be seen may lead to another one.
            return _open(JIT_TOOLCHAIN, "environ-unseen")
        wanted = f"install the CUDA toolkit {environment.torch_cuda} and point CUDA_HOME at it"
        return _lacking("toolkit-mismatch", wrong, wanted)
    if tools.headers is False and tools.nvcc_source == "path":
        # It may be a link or a script that leads to the toolkit, and then it knows its own headers.
        return _no_ninja(facts) if tools.ninja is False else _fine(JIT_TOOLCHAIN, f"{tools.nvcc} is on the path.")
    if tools.headers is False:
        message = f"The toolkit of {tools.nvcc} has no cuda_runtime.h."
        return _lacking("headers-missing", message, "install the toolkit's headers (cuda-cudart-dev)")
    if None not in {tools.release, tools.headers_release} and tools.release != tools.headers_release:
        message = f"{tools.nvcc} is CUDA {tools.release}, and the headers beside it are CUDA {tools.headers_release}."
        return _lacking("headers-mismatch", message, "install compiler and headers of one release")
    if tools.ninja is False:
        return _no_ninja(facts)
    if tools.headers is None or (tools.ninja is None and not tools.ninja_beside):
        return _open(JIT_TOOLCHAIN, "toolchain-unseen")
    return _fine(JIT_TOOLCHAIN, f"nvcc {tools.release or 'of unknown release'}, its headers and ninja are there.")


def _lacking(reason: str, message: str, remedy: str, says: str | None = None, *, command: bool = False) -> Finding:
    """Judge that something is missing; a ``remedy`` that is a ``command`` can still be pasted."""
    other = "install the flashinfer-jit-cache of FlashInfer's version from FlashInfer's own index"
    return Finding(
        code=JIT_TOOLCHAIN.code,
        status=Status.TRUE,
        reason=reason,
        message=f"{message} An import that succeeds proves nothing about it: kernels are built at their first use.",
        remedy=f"{remedy}  # or {other}" if command else as_remedy(f"{remedy}, or {other}"),
        sglang_says=says,
    )


def _no_compiler(facts: FlashinferFacts) -> Finding:
    tools = facts.environment.toolchain
    if tools.nvcc is not None:
        # FlashInfer looks at CUDA_HOME, the path and /usr/local/cuda, and never into wheels.
        home = posixpath.dirname(posixpath.dirname(tools.nvcc))
        message = f"FlashInfer finds no nvcc; the one at {tools.nvcc} is in a wheel, where it does not look."
        return _lacking("nvcc-missing", message, f"export CUDA_HOME={shlex.quote(home)}", command=True)
    if tools.cuda_home is not None:
        return _lacking(
            "nvcc-missing", f"There is no nvcc under CUDA_HOME, {tools.cuda_home}.", "install the CUDA toolkit there"
        )
    says = "RuntimeError: Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist"
    message = "There is no nvcc: not by CUDA_HOME, not on the server's path and not in /usr/local/cuda."
    return _lacking("nvcc-missing", message, "install the CUDA toolkit", says)


def _no_ninja(facts: FlashinferFacts) -> Finding:
    if facts.environment.toolchain.ninja_beside and facts.environment.python:
        folder = posixpath.dirname(facts.environment.python)
        message = f"There is no ninja on the server's PATH; the one in {folder} is not found from there."
        return _lacking("ninja-missing", message, f"put {folder} on the server's PATH")
    return _lacking("ninja-missing", "There is no ninja.", texts.install_modules(facts, ["ninja"]).action, command=True)


def _wrong_toolkit(facts: FlashinferFacts) -> str | None:
    """Say how the toolkit does not go with torch; None where it does or where that cannot be told."""
    environment = facts.environment
    release, wanted = cudalibs.version(environment.toolchain.release), cudalibs.version(environment.torch_cuda)
    if release is None or wanted is None:
        return None
    if release[0] == wanted[0] and release >= wanted[: len(release)]:
        return None
    kind = "older than" if release < wanted else "of another major than"
    return (
        f"The toolkit at {environment.toolchain.nvcc} is CUDA {environment.toolchain.release}, {kind} the CUDA "
        f"{environment.torch_cuda} that torch was built for."
    )


# -- fetching kernels -------------------------------------------------------------------------------------


def cubins(facts: FlashinferFacts) -> Finding:
    """Whether precompiled kernels are there or would have to be fetched."""
    kind = CUBINS_NOT_INSTALLED
    unread = _unread(kind, facts)
    if unread is not None:
        return unread
    version = sglangtexts.parsed(texts.flashinfer_version(facts))
    if version is not None and version < texts.FIRST_WITH_CUBINS:
        return _fine(kind, f"FlashInfer {version} fetches no precompiled kernels.")
    if facts.environment.flashinfer.cubin.kind == "package":
        return _cubin_package(facts)
    found = facts.environment.cubins
    if found:
        return _fine(kind, f"{found} precompiled kernels are there.")
    if found is None or facts.variables is None:
        return _open(kind, "cubins-unseen" if found is None else "environ-unseen")
    return Finding(
        code=kind.code,
        status=Status.TRUE,
        reason="downloads-at-run-time",
        message="No precompiled kernels are installed: FlashInfer fetches them when it first needs them.",
        remedy=texts.fetch_cubins(facts),
    )


def _cubin_package(facts: FlashinferFacts) -> Finding:
    """Judge a flashinfer-cubin that is there, which is then what was looked at."""
    kind = CUBINS_NOT_INSTALLED
    told = next((one for one in companion_faults(facts) if one.code == CUBIN_MISMATCH.code), None)
    if facts.cubin_dir or (told is not None and told.reason == "ignored"):
        # FlashInfer looks elsewhere, from 0.7.2 on, or wherever the variable leads.
        return _open(kind, "cubins-unseen")
    if told is None:
        return _fine(kind, "The package flashinfer-cubin is installed.")
    return _fine(kind, f"The package flashinfer-cubin is installed; what is wrong with it, {told.code} tells.")


# -- stochastic rounding ----------------------------------------------------------------------------------


def rounding(facts: FlashinferFacts, world: World) -> Finding:
    """Whether a launch asks for stochastic rounding in a way that SGLang refuses."""
    kind, asked = ROUNDING_DTYPE, facts.mamba
    if world.server.answer is Answer.ACCEPTED and asked.source != "server-info":
        return _fine(kind, "The server answers, so it has passed this check.")
    if asked.source is None:
        if facts.server_seen:
            return _open(kind, "flags-unseen")
        return _fine(kind, "No launch is in sight that would ask for it.")
    if asked.rounding is None:
        return _open(kind, "flags-incomplete")
    if not asked.rounding:
        return _fine(kind, "Stochastic rounding is not asked for.")
    if sglangtexts.knows_rounding(facts.sglang) is False:
        return _fine(kind, f"SGLang {facts.sglang} has no stochastic rounding, and does not know the flag.")
    if asked.ssm_dtype == "float16":
        return _fine(kind, "Stochastic rounding is asked for together with float16 states.")
    got = "the default" if asked.ssm_dtype is None else asked.ssm_dtype
    return Finding(
        code=kind.code,
        status=Status.TRUE,
        reason="unset" if asked.ssm_dtype is None else "not-float16",
        message=f"Stochastic rounding needs --mamba-ssm-dtype float16 on the command line, and it is {got}; SGLang "
        "does not look into the model's configuration here.",
        remedy="add --mamba-ssm-dtype float16, or remove --enable-mamba-cache-stochastic-rounding",
        final=True,
        sglang_says=sglangtexts.rounding_refused(asked.ssm_dtype),
    )
