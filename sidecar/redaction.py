"""What looks like a secret, and texts without any.

Nobody can list how secrets are named. What is here is the second line: code of the server's environment gets only
variables that are let through (`childenv`), and no text of it is shown before the values of the others are out of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import unquote

_NAMED: Final = re.compile(
    r"KEY|SECRET|PASSW|PASSPHRASE|PASS$|PWD|CRED|AUTH|COOKIE|DSN|BEARER|APIK|JWT|WEBHOOK|SIGNATURE"
    r"|(?:^|_)(?:PASS|PAT|PIN|SAS)(?:_|$)"
)
"""Marks in the name of a variable that holds a secret, whatever it looks like."""
_NAMED_LOOSELY: Final = re.compile(r"TOKEN|SESSION")
"""Marks of secrets, and of counts: SGLang has two dozen settings such as SGLANG_MAX_NEW_TOKENS_LIMIT."""
_FOLDER_NAMES: Final = frozenset({"PWD", "OLDPWD"})
_WORD: Final = re.compile(r"|true|false|yes|no|on|off|none|null|auto|default|disabled|enabled", re.IGNORECASE)
_IN_EVERY_TEXT: Final = frozenset({"sglang", "flashinfer", "torch", "cuda", "python", "import"})
"""Somebody may have chosen these for a key; without them no text could be understood."""
_NUMBER: Final = re.compile(r"[+-]?\d{0,7}(?:\.\d{0,6})?")
_PLACE_NAME: Final = re.compile(r"(?:^|_)(?:FILE|PATH|DIR|SOCK|HOME|FOLDER)$|^XAUTHORITY$")

_SERVICE_NAME: Final = re.compile(
    r"[A-Z0-9_]+_(?:SERVICE_HOST|SERVICE_PORT(?:_[A-Z0-9_]+)?|PORT(?:_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)?)"
)
_SERVICE_VALUE: Final = re.compile(r"(?:(?:tcp|udp|sctp)://)?[\[\]0-9a-f:.]{1,60}|tcp|udp|sctp", re.IGNORECASE)

_USER: Final = re.compile(r"://(?P<part>[^/?#\s@:'\"]+)@")
_PASSWORDS: Final = (
    re.compile(r"://[^/?#\s@:'\"]*:(?P<part>[^/?#\s@'\"]*)@"),
    # Written as it is, a password may have any sign in it, and end at any of several.
    re.compile(r"://[^/?#\s@:'\"]*:(?P<part>\S*)@"),
)
_PARAMETER: Final = re.compile(
    r"[?&;](?:[\w.%-]*(?:token|key|secret|signature|passw|pwd|auth|cred)[\w.%-]*|sig)=(?P<part>[^&;#\s'\"]{4,})",
    re.IGNORECASE,
)
_FORM: Final = re.compile(
    r"(?P<part>\b(?:hf_|gh[pousr]_)[A-Za-z0-9]{20,}|\b(?:sk|glpat|nvapi|xox[abprs]|github_pat)[-_][\w-]{20,}"
    r"|\bAKIA[0-9A-Z]{16}\b"
    r"|\beyJ[\w-]{8,}\.eyJ[\w-]{8,}(?:\.[\w-]+)?|-----BEGIN [A-Z ]*PRIVATE KEY-----|\bBearer\s+[\w.~+/=-]{8,})"
)
"""How well-known services' tokens, signed tokens and private keys look."""
_IN_VALUES: Final = (_USER, *_PASSWORDS, _PARAMETER, _FORM)
_LOGIN: Final = re.compile(r"(?<=://)[^/?#\s@'\"]+(?=@)")

_SHORTEST: Final = 4
"""Characters; what is shorter stands in any text by chance."""
_SHORTEST_LINE: Final = 12
_CUT_FROM: Final = 100
"""Length from which a text may have been cut in the middle of a secret."""
_MOST_LOOKS: Final = 1000
_IN_ITS_PLACE: Final = "***"


def is_secret(name: str, value: str) -> bool:
    """Whether a variable looks like a secret, by its name or by what is in it.

    What Kubernetes tells of services is none, whatever the service is called.
    """
    if is_service(name, value):
        return False
    return _is_named(name, value) or any(pattern.search(value) for pattern in _IN_VALUES)


def is_service(name: str, value: str) -> bool:
    """Whether a variable is one by which Kubernetes tells of a service, and says no more than address and port."""
    return _SERVICE_NAME.fullmatch(name) is not None and _SERVICE_VALUE.fullmatch(value) is not None


def secrets_of(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The values that must appear in no text, the longest first: by the names of their variables, and in URLs."""
    found: set[str] = set()
    for name, value in environ.items():
        if not is_secret(name, value):
            continue
        found.update(_parts_of(value))
        if _PLACE_NAME.search(name.upper()) is None:
            found |= {value, repr(value)[1:-1]}
            # Of a key of several lines each is as good as the whole.
            found.update(line for line in value.splitlines() if len(line) >= _SHORTEST_LINE)
    kept = {one for one in found if len(one) >= _SHORTEST and not _WORD.fullmatch(one) and one not in _IN_EVERY_TEXT}
    return tuple(sorted(kept, key=lambda one: (-len(one), one)))


def scrubbed(value: Any, secrets: Sequence[str], depth: int = 12) -> Any:
    """A child's answer without secrets in any of its texts; what is nested deeper than any answer is left out."""
    if isinstance(value, str):
        return _scrubbed_text(value, secrets)
    if depth <= 0 and isinstance(value, dict | list):
        return None
    if isinstance(value, dict):
        return {_scrubbed_text(key, secrets): scrubbed(item, secrets, depth - 1) for key, item in value.items()}
    if isinstance(value, list):
        return [scrubbed(item, secrets, depth - 1) for item in value]
    return value


def _is_named(name: str, value: str) -> bool:
    if name in _FOLDER_NAMES or _WORD.fullmatch(value):
        return False
    upper = name.upper()
    if _NAMED.search(upper):
        return True
    return _NAMED_LOOSELY.search(upper) is not None and _NUMBER.fullmatch(value) is None


def _parts_of(value: str) -> Iterator[str]:
    for pattern in _IN_VALUES:
        for match in pattern.finditer(value):
            # Whoever takes a URL apart has them without their escapes.
            yield from (match["part"], unquote(match["part"]))


def _scrubbed_text(value: str, secrets: Sequence[str]) -> str:
    for secret in secrets:
        value = value.replace(secret, _IN_ITS_PLACE)
        if len(value) >= _CUT_FROM:
            # Whoever bounded the text may have cut it within the secret.
            cut = _begun(value, secret)
            value = f"{value[: len(value) - cut]}{_IN_ITS_PLACE}" if cut else value
            cut = _ended(value, secret)
            value = f"{_IN_ITS_PLACE}{value[cut:]}" if cut else value
    return _FORM.sub(_IN_ITS_PLACE, _LOGIN.sub(_IN_ITS_PLACE, value))


def _begun(value: str, secret: str) -> int:
    """Length of the longest beginning of a secret with which a text ends."""
    start = max(0, len(value) - len(secret) + 1)
    for _ in range(_MOST_LOOKS):
        start = value.find(secret[:_SHORTEST], start)
        if start < 0:
            return 0
        if secret.startswith(value[start:]):
            return len(value) - start
        start += 1
    return 0


def _ended(value: str, secret: str) -> int:
    """Length of the longest end of a secret with which a text begins."""
    end = min(len(value), len(secret) - 1)
    for _ in range(_MOST_LOOKS):
        at = value.rfind(secret[-_SHORTEST:], 0, end)
        if at < 0:
            return 0
        end = at + _SHORTEST
        if secret.endswith(value[:end]):
            return end
        end -= 1
    return 0
