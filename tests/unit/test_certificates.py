"""From when to when certificates are good, beside what openssl says of them."""

from __future__ import annotations

import base64
import ssl
import subprocess
from pathlib import Path

import pytest

from sidecar.certificates import validities, validity
from tests.fakes.certificates import Authority


def told(path: Path) -> tuple[float, float]:
    """What openssl says of a file's first certificate."""
    command = ["openssl", "x509", "-noout", "-dates", "-in", str(path)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    begins, ends = (ssl.cert_time_to_seconds(line.partition("=")[2]) for line in lines)
    return begins, ends


@pytest.mark.parametrize("days", [1, 365, 36500])
def test_openssl_says_the_same(tmp_path: Path, days: int) -> None:
    """Years from 2050 on are written in another form."""
    path = Authority(tmp_path).sign("server", days).certificate
    (found,) = validities(path.read_bytes())
    assert found is not None
    assert (found.begins, found.ends) == told(path)


def test_other_keys_and_forms(tmp_path: Path) -> None:
    """An RSA certificate with a text in front, and one with trust behind it."""
    plain, trusted = tmp_path / "plain.pem", tmp_path / "trusted.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 9 -subj /CN=x -keyout /dev/null -text -out"
    subprocess.run([*command.split(), str(plain)], check=True, capture_output=True)
    command = f"openssl x509 -in {plain} -addtrust serverAuth -out {trusted}"
    subprocess.run(command.split(), check=True, capture_output=True)
    assert "TRUSTED" in trusted.read_text()
    for path in (plain, trusted):
        (found,) = validities(path.read_bytes())
        assert found is not None
        assert (found.begins, found.ends) == told(path)


def test_all_of_a_file_in_its_order(tmp_path: Path) -> None:
    """Keys between them are none; what is no certificate is None."""
    authority = Authority(tmp_path)
    pair = authority.sign("server", 7)
    rubbish = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
    parts = (pair.certificate.read_bytes(), pair.key.read_bytes(), rubbish, authority.certificate.read_bytes())
    first, second, third = validities(b"".join(parts))
    assert first is not None
    assert third is not None
    assert (first.ends, second, third.ends) == (told(pair.certificate)[1], None, told(authority.certificate)[1])
    assert validities(b"") == ()


def test_what_is_cut_or_spoilt_is_an_error(tmp_path: Path) -> None:
    """Whatever its bytes are, there is a validity or ValueError."""
    pem = Authority(tmp_path).certificate.read_text()
    der = base64.b64decode("".join(pem.splitlines()[1:-1]))
    for length in range(len(der)):
        with pytest.raises(ValueError, match=r"."):
            validity(der[:length])
    for at in range(len(der)):
        for byte in (0x00, 0x7F, 0x80, 0xFF):
            try:
                validity(der[:at] + bytes([byte]) + der[at + 1 :])
            except ValueError:
                continue
