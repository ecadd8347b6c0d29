"""Whether anybody may change a file: by its own permissions, its folder's, and those behind a link."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidecar.exposure import anybody_may_write, writable_by_all


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file that only its owner may write, in such a folder."""
    folder = tmp_path / "etc"
    folder.mkdir()
    folder.chmod(0o755)
    path = folder / "baseline.toml"
    path.write_text("")
    path.chmod(0o644)
    return path


@pytest.mark.parametrize(
    ("folder", "own", "exposed"),
    [
        (0o755, 0o644, None),
        (0o775, 0o664, None),
        (0o755, 0o666, "file"),
        (0o777, 0o644, "folder"),
        (0o1777, 0o644, None),
        (0o1777, 0o602, "file"),
    ],
)
def test_permissions(file: Path, folder: int, own: int, exposed: str | None) -> None:
    """Write permission for all, on the file or its folder; in a folder like /tmp nobody replaces others' files."""
    file.chmod(own)
    file.parent.chmod(folder)
    assert writable_by_all(file) == {None: None, "file": file, "folder": file.parent}[exposed]


def test_the_folder_behind_a_link(file: Path, tmp_path: Path) -> None:
    """A link in a safe folder is worth no more than the folder that it leads to."""
    link = tmp_path / "safe" / "link.toml"
    link.parent.mkdir()
    link.parent.chmod(0o755)
    link.symlink_to(file)
    assert writable_by_all(link) is None
    file.parent.chmod(0o777)
    assert writable_by_all(link) == file.parent


def test_what_is_not_there_is_not_exposed(tmp_path: Path) -> None:
    """Whoever reads a missing file, or a loop of links, meets that; here it is nothing."""
    tmp_path.chmod(0o755)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert writable_by_all(loop) is None
    assert writable_by_all(tmp_path / "missing") is None
    assert not anybody_may_write(tmp_path / "missing")
