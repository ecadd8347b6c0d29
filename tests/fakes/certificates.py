"""An authority and what it signs, made by the openssl program, as PEM files."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

DAYS = 2
"""How long a certificate is good."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key."""

    certificate: Path
    key: Path


class Authority(Pair):
    """Signs for 127.0.0.1; ``certificate`` is what others verify by."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(folder / f"{name}.crt", folder / f"{name}.key")
        _openssl("req -x509", f"-subj /CN={name}", self)

    def sign(self, name: str, days: int = DAYS) -> Pair:
        """Make a certificate for a server or a client of this name."""
        folder = self.certificate.parent
        pair = Pair(folder / f"{name}.crt", folder / f"{name}.key")
        _openssl(
            f"req -x509 -CA {self.certificate} -CAkey {self.key}",
            f"-subj /CN={name} -addext subjectAltName=IP:127.0.0.1 -addext basicConstraints=critical,CA:FALSE",
            pair,
            days,
        )
        return pair


def _openssl(command: str, more: str, pair: Pair, days: int = DAYS) -> None:
    subprocess.run(
        ["openssl", *command.split(), "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-days", str(days), *more.split(), "-out", str(pair.certificate), "-keyout", str(pair.key)],
        check=True, capture_output=True,
    )  # fmt: skip


def projected(folder: Path) -> Path:
    """A folder as the kubelet mounts a Secret, still without content: see `project`."""
    folder.mkdir()
    return folder


def project(folder: Path, generation: int, **files: bytes) -> None:
    """Give a mounted Secret new content as the kubelet does: in a folder of its own, to which one link is turned.

    A name's underscores stand for dots: ``tls_crt``.
    """
    fresh = folder / f"..{generation}"
    fresh.mkdir()
    for name, content in files.items():
        (fresh / name.replace("_", ".")).write_bytes(content)
        link = folder / name.replace("_", ".")
        if not link.is_symlink():
            link.symlink_to(f"..data/{link.name}")
    turned = folder / "..data_tmp"
    turned.symlink_to(fresh.name)
    turned.replace(folder / "..data")
