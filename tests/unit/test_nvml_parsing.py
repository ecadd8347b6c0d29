"""What the NVML worker and its client make of texts and files, without any process."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.nvml.client import cuda_version, library_version, parse_module
from sidecar.nvml.worker import count_entries, library_fingerprint, mapped_library, open_device, read_text

GCC = "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n"


@pytest.mark.parametrize(
    ("text", "version", "flavour"),
    [
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  "
            "(dvs-builder@U22-I3-AF03-07-2)  Tue Jun  2 21:36:36 UTC 2026\n" + GCC,
            "580.159.04",
            "open",
        ),
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n" + GCC,
            "535.183.01",
            "proprietary",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  560.35.03  Release Build\n", "560.35.03", "open"),
        ("NVRM version: NVIDIA UNIX aarch64 Kernel Module  570.86\n", "570.86", "proprietary"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  soon\n" + GCC, None, "proprietary"),
        (GCC, None, None),
        ("580.159.04\n", None, None),
        ("", None, None),
        ("\x00\ufffd garbage", None, None),
    ],
)
def test_parse_module(text: str, version: str | None, flavour: str | None) -> None:
    """Version and flavour come from the module's own line only, whatever the architecture."""
    assert parse_module(text) == (version, flavour)


@given(st.text())
def test_parse_module_never_raises(text: str) -> None:
    """Any text at all has an answer, and a version only ever looks like one."""
    version, _ = parse_module("NVRM version: NVIDIA UNIX x86_64 Kernel Module" + text)
    assert version is None or all(part.isdigit() for part in version.split("."))


@pytest.mark.parametrize(
    ("path", "version"),
    [
        ("/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.159.04", "580.159.04"),
        ("/usr/lib64/libnvidia-ml.so.570.86", "570.86"),
        ("/usr/lib/wsl/lib/libnvidia-ml.so.1", None),
        ("/opt/libnvidia-ml.so", None),
        (None, None),
    ],
)
def test_library_version(path: str | None, version: str | None) -> None:
    """Only a full version in the file name counts; the interface number 1 is none."""
    assert library_version(path) == version


@pytest.mark.parametrize(("number", "version"), [(13000, "13.0"), (12080, "12.8"), (0, None), (None, None)])
def test_cuda_version(number: int | None, version: str | None) -> None:
    """NVML's number becomes major.minor; 0 is NVML's way not to say."""
    assert cuda_version(number) == version


@pytest.mark.parametrize(
    ("line", "path"),
    [
        (
            "7f00-7f10 r-xp 00000000 08:01 1234   /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.159.04",
            "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.159.04",
        ),
        ("7f00-7f10 r-xp 0 08:01 1 /opt/with space/libnvidia-ml.so.1 (deleted)", "/opt/with space/libnvidia-ml.so.1"),
        ("7f00-7f10 r-xp 0 08:01 1 /usr/lib/libnvidia-mlx.so.1", None),
        ("", None),
    ],
)
def test_mapped_library(line: str, path: str | None) -> None:
    """The library is found among mapped files, also once its file is deleted."""
    maps = f"5500-5510 r--p 0 08:01 1 /usr/bin/python3\n{line}\n7f20-7f30 rw-p 0 00:00 0\n"
    assert mapped_library(maps) == path


@pytest.mark.parametrize(
    ("number", "refused"),
    [(errno.EPERM, True), (errno.EACCES, True), (errno.ENXIO, None), (errno.EIO, None)],
)
def test_open_device_refused(tmp_path: Path, number: int, refused: bool | None) -> None:
    """Only an answer about permission is a refusal; a node without a driver behind it is none.

    Case 2: NVIDIA/nvidia-docker#1730 (EPERM from a device cgroup).
    """
    node = tmp_path / "nvidiactl"
    node.touch()

    def opener(path: str, _flags: int) -> int:
        raise OSError(number, os.strerror(number), path)

    assert open_device(str(node), opener) == {"present": True, "refused": refused}


def test_open_device(tmp_path: Path) -> None:
    """A node that opens is present and not refused; one that is not there is neither."""
    node = tmp_path / "nvidiactl"
    assert open_device(str(node)) == {"present": False, "refused": None}
    node.touch()
    assert open_device(str(node)) == {"present": True, "refused": False}


def test_library_fingerprint(tmp_path: Path) -> None:
    """The fingerprint changes with the file and with the link beside it, and with nothing else."""
    library = tmp_path / "libnvidia-ml.so.1.0"
    library.write_bytes(b"old")
    link = tmp_path / "libnvidia-ml.so.1"
    link.symlink_to(library)
    first = library_fingerprint(str(library))
    assert library_fingerprint(str(library)) == first
    link.unlink()
    link.symlink_to(tmp_path / "libnvidia-ml.so.2.0")
    second = library_fingerprint(str(library))
    assert second != first
    library.write_bytes(b"newer")
    assert library_fingerprint(str(library)) != second
    library.unlink()
    assert library_fingerprint(str(library)) is None


def test_read_text(tmp_path: Path) -> None:
    """A file is read up to the cap and leniently; a missing one is None, an unreadable one empty."""
    file = tmp_path / "version"
    assert read_text(str(file)) is None
    assert read_text(str(file / "below")) is None
    file.write_bytes(b"\xffNVRM" + b"x" * 100_000)
    assert (read_text(str(file)) or "").startswith("\ufffdNVRM")
    assert len(read_text(str(file)) or "") == 4096
    assert read_text(str(tmp_path)) == ""


def test_count_entries(tmp_path: Path) -> None:
    """A folder that cannot be read has no count, not a count of zero."""
    assert count_entries(str(tmp_path / "gpus")) is None
    (tmp_path / "gpus").mkdir()
    assert count_entries(str(tmp_path / "gpus")) == 0
    (tmp_path / "gpus/0000:00:06.0").mkdir()
    assert count_entries(str(tmp_path / "gpus")) == 1
