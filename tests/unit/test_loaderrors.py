"""Messages of the dynamic loader, taken apart."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from sidecar.loaderrors import LoadError, LoadFault, found_in_wheels, load_error, readable


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # sgl-project/sglang#5100: old strings in the symbol
        (
            "/x/site-packages/sgl_kernel/common_ops.abi3.so: undefined symbol: _ZN5torch3jit17parseSchemaOrNameERKSsb",
            LoadError(
                fault=LoadFault.SYMBOL,
                name="_ZN5torch3jit17parseSchemaOrNameERKSsb",
                readable="torch::jit::parseSchemaOrName",
                library="sgl_kernel/common_ops.abi3.so",
                old_strings=True,
            ),
        ),
        # sgl-project/sglang#30562: new strings in the symbol
        (
            "x.so: undefined symbol: _ZN3c1013MessageLogger6streamB5cxx11Ev",
            LoadError(
                fault=LoadFault.SYMBOL,
                name="_ZN3c1013MessageLogger6streamB5cxx11Ev",
                readable="c10::MessageLogger::stream",
                library="x.so",
                old_strings=False,
            ),
        ),
        # sgl-project/sglang#7033
        (
            "x.so: undefined symbol: _ZN3c104cuda9SetDeviceEa",
            LoadError(
                fault=LoadFault.SYMBOL,
                name="_ZN3c104cuda9SetDeviceEa",
                readable="c10::cuda::SetDevice",
                library="x.so",
            ),
        ),
        # GoogleCloudPlatform/scientific-computing-examples#157: a name of C
        (
            "/x/torch/lib/libtorch_cuda.so: undefined symbol: ncclCommResume",
            LoadError(fault=LoadFault.SYMBOL, name="ncclCommResume", library="lib/libtorch_cuda.so"),
        ),
        # sgl-project/sglang#5094
        (
            "libnvrtc.so.12: cannot open shared object file: No such file or directory",
            LoadError(fault=LoadFault.LIBRARY, name="libnvrtc.so.12"),
        ),
        # Dao-AILab/flash-attention#879
        (
            "/lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.32' not found (required by /x/flash_attn/a.so)",
            LoadError(fault=LoadFault.VERSION, name="GLIBC_2.32", library="flash_attn/a.so"),
        ),
        ("No module named 'x'", None),
        ("", None),
    ],
)
def test_messages(text: str, expected: LoadError | None) -> None:
    """Each message of the loader gives what it missed, and other texts give nothing."""
    assert load_error(text) == expected


def test_a_symbol_comes_before_everything_else_in_a_long_text() -> None:
    """Where a package quotes many failures, the undefined symbol is the one that tells (sgl-project/sglang#30562)."""
    text = (
        "libcudart.so.12: cannot open shared object file\nsm100/common_ops.abi3.so: undefined symbol: _ZN3c106detailE"
    )
    found = load_error(text)
    assert found is not None
    assert (found.fault, found.readable) == (LoadFault.SYMBOL, "c10::detail")


@pytest.mark.parametrize(
    ("symbol", "expected"),
    [
        ("_ZNK3c1010TensorImpl4sizeEv", "c10::TensorImpl::size"),
        ("_Z3foov", "foo"),
        ("_ZN2at4_ops5empty4callE", "at::_ops::empty::call"),
        ("_ZNSt6vectorIiE", "std::vector"),
        ("_ZN99tooshortE", None),
        ("_ZTVN10__cxxabiv1E", None),
        ("plain", None),
    ],
)
def test_readable_names(symbol: str, expected: str | None) -> None:
    """Simple mangled names become readable; of others nothing is made up."""
    assert readable(symbol) == expected


def test_a_library_that_lies_in_a_wheel_is_found(tmp_path: Path) -> None:
    """A library that the loader misses is found in NVIDIA's wheels (sgl-project/sglang#16052), elsewhere not."""
    folder = tmp_path / "nvidia/cuda_nvrtc/lib"
    folder.mkdir(parents=True)
    (folder / "libnvrtc.so.12").touch()
    assert found_in_wheels([str(tmp_path / "none"), str(tmp_path)], "libnvrtc.so.12") == (
        "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"
    )
    assert found_in_wheels([str(tmp_path)], "libnvrtc.so.13") is None
    assert found_in_wheels([str(tmp_path)], "x\0y") is None


@pytest.mark.parametrize(
    ("text", "fault", "name", "library"),
    [
        (
            "/s/tvm_ffi/core.so: cannot open shared object file: Permission denied",
            LoadFault.DENIED,
            "core.so",
            "tvm_ffi/core.so",
        ),
        ("libx.so.1: cannot open shared object file: Too many open files", LoadFault.SHORTAGE, "libx.so.1", None),
        ("libx.so.1: cannot open shared object file: No such file or directory", LoadFault.LIBRARY, "libx.so.1", None),
        (
            "/s/tvm_ffi/core.so: cannot open shared object file: No such file or directory",
            LoadFault.LIBRARY,
            "core.so",
            "tvm_ffi/core.so",
        ),
        (
            "/s/tvm_ffi/core.so: cannot open shared object file: Input/output error",
            LoadFault.UNREADABLE,
            "core.so",
            "tvm_ffi/core.so",
        ),
        (
            "/s/a/b.so: cannot read file data: Input/output error",
            LoadFault.UNREADABLE,
            "cannot read file data: Input/output error",
            "a/b.so",
        ),
        (
            "/s/a/b.so: cannot read file data: Is a directory",
            LoadFault.DAMAGED,
            "cannot read file data",
            "a/b.so",
        ),
        ("libx.so.1: cannot open shared object file", LoadFault.LIBRARY, "libx.so.1", None),
        ("/s/tvm_ffi/core.so: file too short", LoadFault.DAMAGED, "file too short", "tvm_ffi/core.so"),
        (
            "/v/lib/python3.12/site-packages/torch/lib/libc10.so: invalid ELF header",
            LoadFault.DAMAGED,
            "invalid ELF header",
            "torch/lib/libc10.so",
        ),
        ("/s/a/b.so: invalid ELF header", LoadFault.DAMAGED, "invalid ELF header", "a/b.so"),
        ("/s/a/b.so: wrong ELF class: ELFCLASS32", LoadFault.DAMAGED, "wrong ELF class: ELFCLASS32", "a/b.so"),
        (
            "/s/a/b.so: failed to map segment from shared object",
            LoadFault.UNMAPPABLE,
            "failed to map segment from shared object",
            "a/b.so",
        ),
        (
            "/s/a/b.so: failed to map segment from shared object: Cannot allocate memory",
            LoadFault.SHORTAGE,
            "failed to map segment from shared object: Cannot allocate",
            "a/b.so",
        ),
    ],
)
def test_what_the_loader_finds_and_cannot_use(text: str, fault: LoadFault, name: str, library: str | None) -> None:
    """A file that is there is not missing: glibc's own texts (elf/dl-load.c) tell what is wrong with it."""
    found = load_error(f"OSError: {text}")
    assert found is not None
    assert (found.fault, found.name, found.library) == (fault, name, library)


def test_a_full_static_tls_block_is_no_shortage_of_memory() -> None:
    """That text comes from the order in which libraries are loaded, not from a lack of memory."""
    assert load_error("libgomp.so.1: cannot allocate memory in static TLS block") is None


@pytest.mark.parametrize(
    "text",
    [
        "/a.so" * 1200,
        ".so" * 2000,
        "a.so: " * 1000,
        "a" * 6000,
        "cannot open shared object file" * 200,
        ": file too short" * 375,
        "undefined symbol: _Z" + "1a" * 2990,
    ],
    ids=lambda text: text[:20],
)
def test_a_text_that_somebody_chose_costs_little(text: str) -> None:
    """Whoever raises an exception chooses its text, and the agent judges it while everything else waits."""
    began = time.perf_counter()
    load_error(text)
    assert time.perf_counter() - began < 1
