"""Writes tests/captures/sglang/releases from the wheels of SGLang's own releases.

    pip download --no-deps --only-binary=:all: --python-version 3.12 -d WHEELS sglang==0.5.9 ...
    python tests/captures/make_releases.py WHEELS

Real: every key of the server's information with its default (the fields of that release's ``ServerArgs``), the
endpoints, the requirements, the module files, the choices of a flag. Set by hand in `RELEASES`: what the server of
the story was launched with, and what the release's own rules make of it on that GPU. Planted: the keys.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

HERE = Path(__file__).parent / "sglang" / "releases"
SECRET = "SECRET-DO-NOT-EXPORT"
PREFIX = "/srv/env"
"""Where the environment of the story lies; the test puts another place in."""
SITE = f"{PREFIX}/lib/python3.12/site-packages"

_OLD_STATES = re.compile(r"GLOBAL_SERVER_ARGS_KEYS = \[(.*?)\]|global_server_args_dict = \{(.*?)\n\}", re.DOTALL)
_MODULES = re.compile(
    r"sglang/(jit_kernel|kernels/ops/attention)/(flash_attention\w*\.py|flash_attn(?:ention)?/(?:cute/)?__init__\.py"
    r"|flash_attention/cute/__init__\.py|flash_attn/cute/interface\.py)$"
)
_CUDA = {"2.6.0": "12.4", "2.7.1": "12.6", "2.8.0": "12.8", "2.9.1": "12.8"}
"""The CUDA release of PyPI's torch; 13.0 from 2.11 on."""
_LOCATION_OF_SECRETS = ("api_key", "admin_api_key", "ssl_keyfile_password")


@dataclass(frozen=True, kw_only=True)
class Release:
    """One story.

    ``resolved`` is what the release makes of the flags, ``typed`` what it shows at the top level up to 0.5.3: the
    flags as typed. ``maps`` are objects that schedulers have mapped, ``layout`` the titles of child processes, each
    with the index of its parent where that is not the main one. ``changes`` are environments that differ from the
    matching one: a distribution's version, or None for one that is gone.
    """

    gpu: str
    flags: tuple[str, ...] = ()
    typed: dict[str, Any] = field(default_factory=dict)
    resolved: dict[str, Any] = field(default_factory=dict)
    architecture: str = "LlamaForCausalLM"
    image: bool = False
    maps: tuple[str, ...] = ()
    layout: tuple[tuple[str, int | None], ...] = (("sglang::scheduler", None),)
    console_script: bool = False
    renamed_main: str | None = None
    changes: dict[str, dict[str, str | None]] = field(default_factory=dict)
    why: str = ""


FLASH_OPS = "sgl_kernel/flash_ops.abi3.so"
DSL = "nvidia_cutlass_dsl/lib/libcute_dsl_runtime.so"
DSL_13 = "nvidia_cutlass_dsl/cu13/lib/libcute_dsl_runtime.so"

RELEASES = {
    "0.4.6.post5": Release(
        gpu="h100",
        resolved={"attention_backend": "fa3", "sampling_backend": "flashinfer"},
        maps=(FLASH_OPS, "sgl_kernel/common_ops.abi3.so"),
        why="Llama on Hopper without flags: fa3, which only the schedulers' own view tells.",
    ),
    "0.4.10.post2": Release(
        gpu="h100",
        flags=("--attention-backend", "fa3", "--decode-attention-backend", "flashinfer"),
        typed={"attention_backend": "fa3", "decode_attention_backend": "flashinfer"},
        resolved={
            "attention_backend": "fa3",
            "prefill_attention_backend": "fa3",
            "decode_attention_backend": "flashinfer",
            "sampling_backend": "flashinfer",
        },
        maps=(FLASH_OPS, "sgl_kernel/common_ops.abi3.so"),
        why="A hybrid: FlashAttention 3 in prefill, none in decode.",
    ),
    "0.5.2": Release(
        gpu="a100",
        flags=("--tp-size", "2"),
        typed={"tp_size": 2},
        resolved={
            "attention_backend": "flashinfer",
            "prefill_attention_backend": "flashinfer",
            "decode_attention_backend": "flashinfer",
            "sampling_backend": "flashinfer",
        },
        maps=(FLASH_OPS, "sgl_kernel/common_ops.abi3.so"),
        layout=(("sglang::scheduler_TP0", None), ("sglang::scheduler_TP1", None)),
        renamed_main="sglang::http_server/tokenizer_manager",
        why="Two A100 without flags: flashinfer. The release that renames its main process and hides its flags; it"
        " maps the FA3 object although nothing uses it.",
    ),
    "0.5.4.post3": Release(
        gpu="b200",
        flags=("--prefill-attention-backend", "fa4"),
        resolved={
            "prefill_attention_backend": "fa4",
            "attention_backend": "flashinfer",
            "sampling_backend": "flashinfer",
            "page_size": 128,
        },
        maps=(FLASH_OPS, "sgl_kernel/sm100/common_ops.abi3.so", "nvidia_cutlass_dsl/lib/libmlir_cuda_runtime.so"),
        why="Blackwell: fa4 for prefill only, as this release allows it, and the default for decode. Information only"
        " at /get_server_info.",
        changes={"no-dsl": {"nvidia-cutlass-dsl": None}},
    ),
    "0.5.6.post2": Release(
        gpu="h200",
        flags=("--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "3", "--speculative-eagle-topk", "1"),
        resolved={
            "attention_backend": "fa3",
            "sampling_backend": "flashinfer",
            "speculative_algorithm": "EAGLE3",
            "speculative_num_steps": 3,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": 4,
        },
        maps=(FLASH_OPS, "sgl_kernel/sm90/common_ops.abi3.so"),
        why="Speculative decoding before drafts had a backend of their own: drafting follows decoding.",
        changes={"stale-kernel": {"sgl-kernel": "0.3.17.post1"}},
    ),
    "0.5.9": Release(
        gpu="h200",
        flags=("--mamba-backend", "flashinfer"),
        resolved={"attention_backend": "fa3", "sampling_backend": "flashinfer", "mamba_backend": "flashinfer"},
        architecture="NemotronHForCausalLM",
        maps=(FLASH_OPS, "sgl_kernel/sm90/common_ops.abi3.so"),
        why="The first release with a mamba backend.",
        changes={
            "older-flashinfer": {"flashinfer-python": "0.6.0", "flashinfer-cubin": "0.6.0"},
            "no-flashinfer": {"flashinfer-python": None, "flashinfer-cubin": None},
        },
    ),
    "0.5.10.post1": Release(
        gpu="b200",
        flags=("--attention-backend", "fa4", "--mm-attention-backend", "fa4"),
        resolved={
            "attention_backend": "fa4",
            "mm_attention_backend": "fa4",
            "sampling_backend": "flashinfer",
            "page_size": 128,
        },
        architecture="Qwen2_5_VLForConditionalGeneration",
        image=True,
        maps=(FLASH_OPS, "sgl_kernel/sm100/common_ops.abi3.so", DSL),
        why="A vision model with fa4 in every phase, from the package flash-attn-4.",
        changes={"no-flash-attn-4": {"flash-attn-4": None}, "old-name": {"sgl-kernel": "0.3.21"}},
    ),
    "0.5.12.post1": Release(
        gpu="rtx5090",
        flags=("--dp-size", "2"),
        resolved={"attention_backend": "flashinfer", "sampling_backend": "flashinfer", "dp_size": 2},
        maps=("sgl_kernel/sm100/common_ops.abi3.so",),
        layout=(
            ("sglang::data_parallel_controller", None),
            ("sglang::scheduler_DP0", 0),
            ("sglang::scheduler_DP1", 0),
        ),
        why="Two replicas on consumer Blackwell: flashinfer, and a controller above the schedulers.",
    ),
    "0.5.15": Release(
        gpu="b200",
        flags=("--prefill-attention-backend", "fa4", "--tp-size", "2"),
        resolved={
            "attention_backend": "trtllm_mha",
            "prefill_attention_backend": "fa4",
            "sampling_backend": "flashinfer",
            "tp_size": 2,
            "page_size": 128,
        },
        maps=("sgl_kernel/sm100/common_ops.abi3.so", DSL_13),
        layout=(("sglang::scheduler_TP0", None), ("sglang::scheduler_TP1", None)),
        console_script=True,
        why="fa4 in prefill, Blackwell's default in decode.",
        changes={"stale-cubin": {"flashinfer-cubin": "0.6.11.post1"}},
    ),
    "0.5.16": Release(
        gpu="h200",
        resolved={"attention_backend": "fa3", "sampling_backend": "flashinfer"},
        maps=(FLASH_OPS, "sgl_kernel/sm90/common_ops.abi3.so"),
        why="Hopper without flags, as recorded from a real server (0.5.16-h200-fa3).",
        changes={"upgraded-in-place": {"flashinfer-cubin": "0.6.12"}, "no-dsl": {"nvidia-cutlass-dsl": None}},
    ),
    "0.5.18": Release(
        gpu="h200",
        flags=(
            "--mamba-backend",
            "flashinfer",
            "--mamba-ssm-dtype",
            "float16",
            "--enable-mamba-cache-stochastic-rounding",
        ),
        resolved={
            "attention_backend": "fa3",
            "sampling_backend": "flashinfer",
            "mamba_backend": "flashinfer",
            "mamba_ssm_dtype": "float16",
            "enable_mamba_cache_stochastic_rounding": True,
        },
        architecture="NemotronHForCausalLM",
        maps=(FLASH_OPS, "sgl_kernel/sm90/common_ops.abi3.so"),
        why="FlashInfer mamba with stochastic rounding, as it must be set.",
        changes={"upgraded-in-place": {"flashinfer-cubin": "0.6.12"}},
    ),
    "0.5.20": Release(
        gpu="b200",
        resolved={"attention_backend": "trtllm_mha", "sampling_backend": "flashinfer", "page_size": 64},
        maps=("sgl_kernel/sm100/common_ops.abi3.so",),
        console_script=True,
        why="Blackwell without flags; the first release with /ready and with the raw command line in its answer.",
        changes={"stale-torch": {"torch": "2.11.0"}},
    ),
    "0.5.23": Release(
        gpu="h200",
        flags=(
            "--prefill-attention-backend",
            "fa4",
            "--decode-attention-backend",
            "fa3",
            "--mamba-backend",
            "flashinfer",
        ),
        resolved={
            "attention_backend": "fa3",
            "prefill_attention_backend": "fa4",
            "decode_attention_backend": "fa3",
            "sampling_backend": "flashinfer",
            "mamba_backend": "flashinfer",
            "page_size": 128,
        },
        architecture="NemotronHForCausalLM",
        maps=(FLASH_OPS, "sgl_kernel/sm90/common_ops.abi3.so", DSL_13),
        console_script=True,
        why="A hybrid of both FlashAttention versions with FlashInfer mamba.",
        changes={"upgraded-in-place": {"flashinfer-cubin": "0.6.13"}, "no-quack": {"quack-kernels": None}},
    ),
}


def parse_wheel(wheel: zipfile.ZipFile) -> dict[str, Any]:
    """What a capture takes from a wheel."""
    names = wheel.namelist()

    def text(name: str) -> str:
        return wheel.read(name).decode()

    metadata = text(next(name for name in names if name.endswith(".dist-info/METADATA")))
    sources = [name for name in names if re.fullmatch(r"sglang/srt/arg_groups/fields/\w+\.py", name)]
    states = _OLD_STATES.search(text("sglang/srt/managers/schedule_batch.py"))
    return {
        "fields": _fields([text(name) for name in sources or ["sglang/srt/server_args.py"]], every=bool(sources)),
        "states": re.findall(r'"(\w+)"', next(filter(None, states.groups()))) if states else None,
        "paths": re.findall(r'^@app\.get\("(/\w*)"\)', text("sglang/srt/entrypoints/http_server.py"), re.MULTILINE),
        "requires": re.findall(r"^Requires-Dist: (.+)$", metadata, re.MULTILINE),
        "requires_python": re.findall(r"^Requires-Python: (.+)$", metadata, re.MULTILINE)[0],
        "modules": sorted(name for name in names if _MODULES.match(name)),
    }


def _fields(sources: list[str], *, every: bool) -> dict[str, Any]:
    """The fields of ServerArgs with their defaults; one that is computed counts as null."""
    fields: dict[str, Any] = {}
    for source in sources:
        tree = ast.parse(source)
        constants = {
            node.targets[0].id: _literal(node.value, {})
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        for owner in tree.body:
            if isinstance(owner, ast.ClassDef) and (every or owner.name == "ServerArgs"):
                for node in owner.body:
                    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                        fields[node.target.id] = _literal(node.value, constants)
    return {name: value for name, value in fields.items() if not name.startswith("_")}


def _literal(node: ast.expr | None, constants: dict[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return constants.get(node.id)
    try:
        value = ast.literal_eval(node) if node is not None else None
        json.dumps(value)
    except (ValueError, TypeError):
        return None
    return value


def answer(version: str, release: Release, parts: dict[str, Any], launch: list[str]) -> dict[str, Any]:
    """The answer to the request for the server's information, in the shape of the release."""
    fields = parts["fields"]
    common = {"model_path": "/models/tiny", "tokenizer_path": "/models/tiny", "served_model_name": "/models/tiny"}
    common |= {"host": "0.0.0.0", "device": "cuda", "mem_fraction_static": 0.85, "chunked_prefill_size": 8192}
    common |= {name: SECRET for name in _LOCATION_OF_SECRETS if name in fields}
    unknown = (set(common) | set(release.typed) | set(release.resolved)) - set(fields)
    if unknown:
        raise SystemExit(f"{version} has no {unknown}")
    resolved = fields | common | release.resolved
    old = Version(version) < Version("0.5.3")
    top = fields | common | release.typed if Version(version) < Version("0.5.4") else resolved
    if old:
        # What only the model runner knows, it adds to the keys that are shared with the schedulers.
        state = {name: resolved.get(name) for name in parts["states"]}
        state |= {name: release.resolved[name] for name in release.resolved if name.endswith("attention_backend")}
    else:
        state = dict(resolved)
    state |= {"last_gen_throughput": 0.0, "memory_usage": {"weight": 0.1, "kvcache": 0.5, "token_capacity": 65536}}
    whole = top | {"status": "ready", "max_total_num_tokens": 65536, "max_req_input_len": 2042}
    if Version(version) >= Version("0.5.20"):
        whole["launch_command"] = " ".join(launch)
    return whole | {"internal_states": [state] * release.resolved.get("dp_size", 1), "version": version}


def model_answer(version: str, release: Release) -> dict[str, Any]:
    """The answer about the model; releases before 0.5.6 say little of it."""
    shown: dict[str, Any] = {"model_path": "/models/tiny", "tokenizer_path": "/models/tiny", "is_generation": True}
    if Version(version) >= Version("0.5.6"):
        shown |= {"has_image_understanding": release.image, "has_audio_understanding": False}
        shown |= {"architectures": [release.architecture]}
    return shown


def processes(release: Release, launch: list[str]) -> list[dict[str, Any]]:
    """The main process, its schedulers (below a controller where there is one) and its detokenizer."""
    common = [f"{SITE}/torch/lib/libtorch_cuda.so", f"{SITE}/tvm_ffi/core.abi3.so"]
    kernels = [f"{SITE}/{name}" for name in release.maps if "common_ops" in name]
    loaded = [f"{SITE}/{name}" for name in release.maps]
    argv = [release.renamed_main, "", ""] if release.renamed_main else launch
    # What setproctitle writes over is lost to whoever reads the environment: for releases that rename it, the main's.
    wiped = {"environ_ok": False} if release.renamed_main else {}
    name = (release.renamed_main or "python3")[:15]
    listed = [{"pid": 200, "ppid": 100, "name": name, "cmdline": argv, "maps": common + kernels, **wiped}]
    pids: list[int] = []
    for title, parent in release.layout:
        pids.append(201 + len(pids))
        listed.append(
            {
                "pid": pids[-1],
                "ppid": 200 if parent is None else pids[parent],
                "name": title[:15],
                "cmdline": [title, "", ""],
                "maps": common + (loaded if "scheduler" in title else kernels),
            }
        )
    title = "sglang::detokenizer"
    listed.append({"pid": 250, "ppid": 200, "name": title[:15], "cmdline": [title, "", ""], "maps": common + kernels})
    return listed


def installed(parts: dict[str, Any], version: str) -> dict[str, str]:
    """Distributions that satisfy what the release requires, each in the lowest version that does."""
    marker = default_environment() | {"python_version": "3.12", "platform_machine": "x86_64", "sys_platform": "linux"}
    found = {"sglang": version}
    for line in parts["requires"]:
        one = Requirement(line)
        extras = ("", "srt", "runtime-common") if Version(version) < Version("0.5.3") else ("",)
        if one.name != "sglang" and (
            one.marker is None or any(one.marker.evaluate(marker | {"extra": extra}) for extra in extras)
        ):
            lowest = [item.version for item in one.specifier if item.operator in {"==", ">=", "~="}]
            found[canonicalize_name(one.name)] = lowest[0] if lowest else "1.0"
    if "cuda-python" in found:
        found["cuda-bindings"] = found["cuda-python"]
    return dict(sorted(found.items()))


def write(wheel: Path) -> None:
    """The capture of one release."""
    version = wheel.name.split("-")[1]
    release = RELEASES.get(version)
    if release is None:
        return
    parts = parse_wheel(zipfile.ZipFile(wheel))
    flags = ["--model-path", "/models/tiny", "--host", "0.0.0.0", "--api-key", SECRET, *release.flags]
    program = [f"{PREFIX}/bin/python"]
    program += [f"{PREFIX}/bin/sglang", "serve"] if release.console_script else ["-m", "sglang.launch_server"]
    launch = [*program, *flags]
    distributions = installed(parts, version)
    torch = distributions["torch"]
    folder = HERE / version
    folder.mkdir(parents=True, exist_ok=True)
    paths = [path for path in ("/server_info", "/get_server_info", "/model_info", "/ready") if path in parts["paths"]]
    environment = {
        "_about": release.why,
        "gpu": release.gpu,
        "paths": paths,
        "requires_python": parts["requires_python"],
        "torch_cuda": _CUDA.get(torch, "13.0"),
        "distributions": distributions,
        "modules": parts["modules"],
        "kernel": sorted({Path(name).parent.name for name in release.maps if "common_ops" in name}),
        "changes": release.changes,
    }
    provenance = (
        f"Of SGLang {version}. From its wheel: every key and default of the server's information"
        f" ({len(parts['fields'])} fields), the endpoints, the requirements, the module files. From its source, by"
        " hand: what the flags resolve to and where it shows, the processes and their titles. Made up: sizes, process"
        " ids, the keys."
    )
    _dump(folder / "server_info.json", answer(version, release, parts, launch))
    _dump(folder / "model_info.json", model_answer(version, release))
    _dump(folder / "processes.json", {"_about": provenance, "processes": processes(release, launch)})
    _dump(folder / "environment.json", environment)
    (folder / "requires.txt").write_text("".join(f"{line}\n" for line in parts["requires"]))


def _dump(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def main() -> None:
    """Write the capture of each release whose wheel is in the folder that is named."""
    for wheel in sorted(Path(sys.argv[1]).glob("sglang-*.whl")):
        write(wheel)


if __name__ == "__main__":
    main()
