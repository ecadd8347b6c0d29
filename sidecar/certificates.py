"""From when to when certificates are good: all that is read of them here.

The ssl module tells that of a peer's certificate, and of none that is one's own.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

from msgspec import Struct

_PEM: Final = re.compile(
    rb"-----BEGIN (?P<label>(?:X509 |TRUSTED )?CERTIFICATE)-----(?P<body>[A-Za-z0-9+/=\s]+)-----END (?P=label)-----"
)
"""What OpenSSL takes for a certificate."""
_VERSION: Final = 0xA0
_UTC_TIME: Final = 0x17
_GENERALIZED_TIME: Final = 0x18
_CENTURY_ENDS: Final = 50
"""The first year of two digits that belongs to the twentieth century (RFC 5280, 4.1.2.5.1)."""


class Validity(Struct, frozen=True):
    """When a certificate begins and ends to be good, in seconds since the epoch."""

    begins: float
    ends: float


def validities(pem: bytes) -> tuple[Validity | None, ...]:
    """The validity of each certificate of a PEM file, in its order; None where it cannot be read."""
    return tuple(_validity(match["body"]) for match in _PEM.finditer(pem))


def _validity(body: bytes) -> Validity | None:
    try:
        return validity(base64.b64decode(body))
    except ValueError:
        return None


def validity(der: bytes) -> Validity:
    """The validity of one certificate (RFC 5280, 4.1). Raises ValueError."""
    _, certificate = next(_elements(der))
    _, signed = next(_elements(certificate))
    fields = [content for tag, content in _elements(signed) if tag != _VERSION]
    if len(fields) < 4:
        raise ValueError("a certificate is too short")
    times = [_time(tag, content) for tag, content in _elements(fields[3])]  # after serial, signature and issuer
    if len(times) != 2:
        raise ValueError("a certificate has two times")
    return Validity(*times)


def _elements(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Tag and content of each element of a sequence. Raises ValueError, and gives one element at least."""
    at = 0
    while True:
        if at + 2 > len(der):
            raise ValueError("an element is cut off")
        tag, length = der[at], der[at + 1]
        at += 2
        if length & 0x80:
            size = length & 0x7F
            length = int.from_bytes(der[at : at + size])
            at += size
        if at + length > len(der):
            raise ValueError("an element is cut off")
        yield tag, der[at : at + length]
        at += length
        if at == len(der):
            return


def _time(tag: int, content: bytes) -> float:
    text = content.decode("ascii")
    if tag == _UTC_TIME:
        text = ("19" if int(text[:2]) >= _CENTURY_ENDS else "20") + text
    elif tag != _GENERALIZED_TIME:
        raise ValueError("no time of a certificate")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
