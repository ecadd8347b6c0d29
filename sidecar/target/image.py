"""Interpreters of the agent's own image, as far as they may stand for the server's."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from sidecar.config import Image, Settings
from sidecar.model import Placement, Standing, Target
from sidecar.target.interpreters import Interpreter, holds, is_executable

_SERVER_PACKAGES: Final = ("sglang", "flashinfer", "flashinfer_python")


class ImageInterpreters:
    """Looks for interpreters in this image. Its arguments are those of the `TargetFinder`."""

    def __init__(
        self, settings: Settings, standing: Standing, *, environ: Mapping[str, str], prefix: str, filesystem: Path
    ) -> None:
        self._image = settings.image
        self._placement = standing.placement
        self._environ = environ
        self._prefix = prefix
        self._filesystem = filesystem

    def like(self, theirs: Interpreter | None, on_path: Sequence[str]) -> Interpreter | None:
        """The server's interpreter at the same path in our own image, if its packages are there too.

        ``on_path`` is where the server may have found it, when it did not say.
        """
        image = self._image
        # On a host an equal path proves nothing: the server in a container has an image of its own.
        if image is Image.OWN or (image is None and self._placement is Placement.HOST):
            return None
        if theirs is None:
            there = [path for path in on_path if is_executable(self._filesystem / path.lstrip("/"))]
            theirs = Interpreter(path=there[0], source="server-path") if there else None
        if theirs is not None:
            path = self._filesystem / theirs.path.lstrip("/")
            return theirs if is_executable(path) and holds(path, _SERVER_PACKAGES) else None
        return self.search(self._environ) if image is Image.SERVER else None

    def unless_own(self) -> Interpreter | None:
        """The first interpreter that is found, unless this image is known not to be the server's."""
        return None if self._image is Image.OWN else self.search(self._environ)

    def search(self, environ: Mapping[str, str]) -> Interpreter | None:
        """The first interpreter in this image that has SGLang or FlashInfer, and is not the agent's own.

        The agent's own counts when SGLang itself is installed beside it: then it was installed into the
        server's environment.
        """
        for path, source in self._candidates(environ):
            own = os.path.realpath(path.parent.parent) == os.path.realpath(self._prefix)
            if is_executable(path) and holds(path, ("sglang",) if own else _SERVER_PACKAGES):
                return Interpreter(path=self._shown(path), source="own-environment" if own else source)
        return None

    def with_sglang(self, target: Target) -> str | None:
        """An interpreter of this image, another than the target's, that has SGLang beside it."""
        if target.root is not None:
            return None
        for path, _ in self._candidates({**self._environ, **(target.environ or {})}):
            shown = self._shown(path)
            if shown != target.python and is_executable(path) and holds(path, ("sglang",)):
                return shown
        return None

    def _shown(self, path: Path) -> str:
        """A path as this image names it."""
        return str("/" / path.relative_to(self._filesystem)) if self._filesystem != Path("/") else str(path)

    def _candidates(self, environ: Mapping[str, str]) -> Iterable[tuple[Path, str]]:
        root = self._filesystem
        if virtual := environ.get("VIRTUAL_ENV"):
            yield root / virtual.lstrip("/") / "bin/python", "virtual-env"
        yield Path(self._prefix) / "bin/python", "own-environment"
        for path in sorted(root.glob("opt/sglang*/bin/python")):
            yield path, "well-known-path"
        yield root / "opt/venv/bin/python", "well-known-path"
        if conda := environ.get("CONDA_PREFIX"):
            yield root / conda.lstrip("/") / "bin/python", "conda"
        for folder in ("opt/conda", "opt/miniconda3"):
            yield root / folder / "bin/python", "conda"
        for folder in environ.get("PATH", "").split(":"):
            for name in ("python3", "python"):
                if folder.startswith("/"):
                    yield root / folder.lstrip("/") / name, "path"
        for folder in ("usr/local/bin", "usr/bin"):
            yield root / folder / "python3", "well-known-path"
