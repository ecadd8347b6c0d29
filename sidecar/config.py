"""Settings: defaults < TOML file < ``SGLANG_SIDECAR_*`` environment < flags."""

from __future__ import annotations

import ipaddress
import json
import math
import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import date, time
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct, field

from sidecar import tomlfile
from sidecar.exposure import objection, writable_by_all
from sidecar.model import Gate, Option, Placement, Processes, Severity
from sidecar.patterns import PROMPT, is_prompt
from sidecar.regular import IrregularError, read_regular


class ImportPolicy(StrEnum):
    """When a real import may be run in the server's environment."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class NvmlMode(StrEnum):
    """How NVML is asked: by one process that stays, or by a new one each round."""

    WORKER = "worker"
    ONESHOT = "oneshot"


class Image(StrEnum):
    """Whose image the agent runs in (design: where the sidecar stands)."""

    SERVER = "server"
    OWN = "own"


class Listen(Struct, frozen=True, kw_only=True):
    """An address to serve on. ``host`` None is every interface and both families."""

    host: str | None
    port: int


class Settings(Struct, frozen=True, kw_only=True):
    """The effective settings. A field that is None was left to be found out (``auto``, ``found``)."""

    listen: tuple[Listen, ...] = (Listen(host=None, port=9477),)
    placement: Placement | None = None
    image: Image | None = None
    processes: Processes | None = None
    server_url: str = "http://127.0.0.1:30000"
    server_key_file: str | None = None
    server_ca_file: str | None = None
    server_pid: int | None = None
    server_pattern: str | None = None
    server_python: str | None = None
    server_root: str | None = None
    gpus: tuple[str, ...] = ()
    gpus_expected: int | None = None
    nvml: NvmlMode = NvmlMode.WORKER
    gpu_detail: bool = False
    require: tuple[str, ...] = ()
    import_policy: ImportPolicy = ImportPolicy.AUTO
    import_with_devices: bool = False
    intervals: Mapping[str, float] = field(default_factory=dict)
    deadlines: Mapping[str, float] = field(default_factory=dict)
    baseline: str | None = None
    state_dir: str | None = None
    tls_cert_file: str | None = None
    tls_key_file: str | None = None
    tls_client_ca_file: str | None = None
    token_file: str | None = None
    gate: Mapping[str, Gate] = field(default_factory=dict)
    severity: Mapping[str, Severity] = field(default_factory=dict)
    accept: tuple[str, ...] = ()
    log_format: str = "auto"
    log_level: str = "info"
    options: Mapping[str, Any] = field(default_factory=dict)
    """Values of the settings that probes declare, by key, where some layer above the defaults set them."""
    launch: tuple[str, ...] = ()
    explicit: frozenset[str] = frozenset()
    """Keys that some layer above the defaults set."""


ENVIRONMENT_PREFIX = "SGLANG_SIDECAR_"
"""What every variable of the agent starts with."""

FILE_VARIABLE = "SGLANG_SIDECAR_CONFIG"
"""The variable that names the TOML file where no flag does."""

_FILE_SOURCE = "file "
"""How the source of a value begins that the TOML file gave."""

_FILE_LIMIT = 1024 * 1024
"""Bytes of the longest accepted file: a complete one has about 2 kB, so what is larger is another file."""

_SUFFIXES = (".crt", ".key", ".pem", ".token", ".txt")
"""How names of files end, and no key or token does."""

_SHOWN = 80
"""Characters of a rejected value that an error repeats: enough to recognise it."""

_INJECTED_NAME = re.compile(r"(?:^|_)(?:SERVICE_HOST$|SERVICE_PORT(?:_|$)|PORT(?:_|$))")
"""What Kubernetes appends to a service's name in the variables it injects; a service that is called
``sglang-sidecar`` yields ``SGLANG_SIDECAR_PORT=tcp://...``."""

_INJECTED_VALUE = re.compile(r"(?:tcp|udp|sctp)://", re.IGNORECASE)

_HOST_NAME = re.compile(
    r"(?=.{1,253}\Z)[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?)*\Z"
)

_OTHER_WORDS = {"port": "listen", "host": "listen", "address": "listen", "bind": "listen"}
"""Names that other programs give to what is called differently here."""

_MAX_PORT = 65535
_MAX_SECONDS = 86400.0


# -- what can be wrong ------------------------------------------------------------------------------


class Problem(Struct, frozen=True, kw_only=True):
    """One thing that is wrong with the configuration.

    ``key`` is the setting, or ``config`` for the file as a whole. ``source`` says where the value came from,
    ``value`` repeats it, shortened, and is empty where it must not be shown. ``sentence`` says it all: key,
    value, source, what is allowed and what to do.
    """

    key: str
    source: str
    value: str
    sentence: str


class ConfigError(Exception):
    """The configuration cannot be used. ``problems`` holds every reason, so that one round of repair is enough."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("\n".join(problem.sentence for problem in problems))
        self.problems = problems


class _Fault(Exception):  # noqa: N818 - never leaves this module; `ConfigError` is what callers meet
    """A parser's objections: (key below the setting or empty, the value to show, what is wrong and allowed)."""

    def __init__(self, *faults: tuple[str, str, str]) -> None:
        super().__init__(faults)
        self.faults = faults


def _reject(value: object, sentence: str, *, below: str = "") -> _Fault:
    """Make the fault of one value."""
    return _Fault((below, _show(value), sentence))


def _show(value: object) -> str:
    """Write a rejected value as an error repeats it: quoted, on one line, shortened."""
    if isinstance(value, bool):
        shown = str(value).lower()  # as TOML has it
    elif isinstance(value, dict):
        shown = "a table"
    elif isinstance(value, (date, time)):
        shown = value.isoformat()
    else:
        shown = repr(value)
    return shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "..."


# -- parsers: from what TOML, a variable or a flag holds to what a field of `Settings` holds ---------


class Known(Struct, frozen=True, kw_only=True):
    """Names that only the rest of the agent knows and that settings may refer to."""

    probes: Collection[str]
    requirements: Collection[str]
    conditions: Collection[str] = ()


_Parser = Callable[[object, Known], Any]


def _string(value: object) -> str:
    """Accept one string; a flag that was given twice is a list of two."""
    if not isinstance(value, str):
        quoted = f'; write "{value}"' if isinstance(value, (int, float)) and not isinstance(value, bool) else ""
        raise _reject(value, f"must be one string{quoted}")
    if not value.strip() or not value.isprintable():
        raise _reject(value, "must not be empty or hold control characters")
    return value.strip()


def _strings(value: object) -> list[str]:
    """Accept a list of strings: a TOML array, a repeated flag, or one text with commas."""
    texts = value if isinstance(value, list) else [value]
    parts = [part for text in texts for part in _string(text).split(",")]
    return [_string(part) for part in parts]


def _listen(value: object, _known: Known) -> tuple[Listen, ...]:
    """Accept one address or several."""
    parts = _strings(value)
    if not parts:
        raise _reject(value, "names no address; leave the key out for the default :9477")
    return tuple(dict.fromkeys(_address(part) for part in parts))


def _address(text: str) -> Listen:
    """Read ``HOST:PORT``, an IPv6 address in brackets; no host means every interface and both families."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon:
        hint = f":{text}" if text.isascii() and text.isdigit() else f"{text}:9477"
        raise _reject(text, f"is not HOST:PORT; did you mean {hint}?")
    if ":" in host and not bracketed:
        raise _reject(text, "is not HOST:PORT; an IPv6 address needs brackets, as in [::1]:9477")
    if not (port.isascii() and port.isdigit() and int(port) <= _MAX_PORT):
        raise _reject(text, f"must end in a port from 0 to {_MAX_PORT}, as in 127.0.0.1:9477 or :9477")
    if not host:
        return Listen(host=None, port=int(port))
    name = host[1:-1] if bracketed else host
    if not (_is_ip(name, 6) if bracketed else _is_ip(name, 4) or _is_host_name(name)):
        raise _reject(text, "must start with an IPv4 address, a host name, an IPv6 address in brackets, or nothing")
    return Listen(host=name, port=int(port))


def _is_ip(text: str, version: int) -> bool:
    try:
        return ipaddress.ip_address(text).version == version
    except ValueError:
        return False


def _is_host_name(text: str) -> bool:
    # What consists of digits and dots alone was meant as an IPv4 address and is not one.
    return bool(_HOST_NAME.match(text)) and not text.replace(".", "").isdigit()


def _choice(vocabulary: Iterable[str], *, auto: bool) -> _Parser:
    """Accept one of ``vocabulary``, returned as its own member; with ``auto``, that word means None."""
    members = {str(member): member for member in vocabulary}
    allowed = [*(["auto"] if auto else []), *members]

    def parse(value: object, _known: Known) -> str | None:
        if not isinstance(value, str) or value.strip().lower() not in allowed:
            raise _reject(value, f"must be one of {', '.join(allowed)}")
        return members.get(value.strip().lower())

    return parse


def _url(value: object, _known: Known) -> str:
    """Accept the base address of an HTTP server, without credentials, query and trailing slash."""
    text = _string(value)
    try:
        parts = urlsplit(text)
        host, user = parts.hostname, parts.username is not None or parts.password is not None
        _ = parts.port  # only asked for the ValueError of an impossible one
    except ValueError as error:
        raise _reject("withheld" if "@" in text else text, f"is not a URL: {error}") from None
    if user or "@" in parts.netloc:
        # A password in a URL ends up in process lists and logs; so it must not in this message either.
        raise _Fault(("", "a URL", "holds credentials; leave them out and name a file by server_key_file"))
    if parts.scheme not in {"http", "https"} or not host or " " in text:
        raise _reject(text, "must be http:// or https:// with a host, as in http://127.0.0.1:30000")
    if parts.query or parts.fragment:
        raise _Fault(("", "a URL", "must end before any ? or #: it is the server's base address"))
    return text.rstrip("/")


def _file(*, secret: bool) -> _Parser:
    """Accept a regular file that can be read. With ``secret``, what may be the secret itself is not repeated."""

    def parse(value: object, _known: Known) -> str:
        withheld = secret and not (isinstance(value, str) and _is_path(value))
        try:
            text = _string(value)
            problem = _file_problem(text)
        except _Fault as fault:
            problem = fault.faults[0][2]
            text = ""
        if problem is None:
            return text
        raise _Fault(("", "the value (not shown)" if withheld else _show(value), problem))

    return parse


def _is_path(text: str) -> bool:
    """Whether a text is a path and not, by mistake, the secret that should be in the file; those may have slashes."""
    if text.startswith(("/", "./", "../", "~/")) or Path(text).suffix in _SUFFIXES:
        return True
    try:
        return os.path.lexists(text) or ("/" in text and Path(text).parent.is_dir())
    except (OSError, ValueError):
        return False


def _file_problem(path: str) -> str | None:
    """Say why this is not a readable regular file, or None."""
    try:
        mode = Path(path).stat().st_mode
    except OSError as error:
        return f"must name a readable file: {_system(error)}"
    if not stat.S_ISREG(mode):
        return "must name a regular file"
    if not os.access(path, os.R_OK):
        return "must name a file that this user may read"
    return None


def _directory(value: object, _known: Known) -> str:
    """Accept a directory that exists."""
    text = _string(value)
    try:
        mode = Path(text).stat().st_mode
    except OSError as error:
        raise _reject(text, f"must name a directory: {_system(error)}") from None
    if not stat.S_ISDIR(mode):
        raise _reject(text, "must name a directory, and this is not one")
    return text


def _system(error: OSError) -> str:
    """Repeat the system's own words, without its number and the path."""
    return (error.strerror or type(error).__name__).lower()


def _interpreter(value: object, _known: Known) -> str:
    """Accept the path of an interpreter. Whether it exists is for the probes to say: it may appear later."""
    text = _string(value)
    if not Path(text).is_absolute():
        raise _reject(text, "must be an absolute path, as in /usr/bin/python3")
    return text


def _pid(value: object, _known: Known) -> int:
    """Accept a process id."""
    number = value
    if isinstance(number, str) and number.strip().isascii() and number.strip().isdigit() and len(number) < 11:
        number = int(number)
    if not isinstance(number, int) or isinstance(number, bool) or not 0 < number <= 2**22:
        raise _reject(value, "must be a process id, a whole number from 1 to 4194304")
    return number


def _gpus(value: object, _known: Known) -> tuple[str, ...]:
    """Parse indices and uuids of GPUs, as NVML and CUDA_VISIBLE_DEVICES write them."""
    found = [part for text in _strings(value) for part in text.replace(",", " ").split()]
    for text in found:
        if not re.fullmatch(r"\d{1,3}|(?:GPU|MIG)-[0-9A-Za-z/-]{1,80}", text):
            raise _reject(text, "must be GPU indices or uuids, for example 0,1 or GPU-5b7c1f0e")
    if len(set(found)) != len(found):
        raise _reject(" ".join(found), "names a GPU twice")
    return tuple(found)


def _count(value: object, _known: Known) -> int:
    """Parse a number of GPUs."""
    if isinstance(value, bool) or not re.fullmatch(r"[1-9]\d{0,3}", str(value)):
        raise _reject(value, "must be a whole number from 1 to 9999")
    return int(str(value))


def _switch(value: object, _known: Known) -> bool:
    """Parse a yes or no."""
    if isinstance(value, bool):
        return value
    if str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    raise _reject(value, "must be true or false")


def _pattern(value: object, _known: Known) -> str:
    """Accept a regular expression."""
    text = _string(value)
    try:
        re.compile(text)
    except re.error as error:
        raise _reject(text, f"must be a Python regular expression: {error}") from None
    if not is_prompt(text):
        raise _reject(
            text,
            f"may take minutes where somebody chooses a command line for it: {PROMPT}",
        )
    return text


def _require(value: object, known: Known) -> tuple[str, ...]:
    """Accept names of conditions or features that must hold."""
    names = tuple(dict.fromkeys(_strings(value)))
    faults = [
        (
            "",
            _show(name),
            (
                f"is not something that can be required{_closest(name, known.requirements)}; "
                f"allowed: {', '.join(sorted(known.requirements)) or 'nothing'}"
            ),
        )
        for name in names
        if name not in known.requirements
    ]
    if faults:
        raise _Fault(*faults)
    return names


def _codes(value: object, known: Known) -> tuple[str, ...]:
    """Accept codes of conditions."""
    codes = tuple(dict.fromkeys(_strings(value)))
    faults = [("", _show(code), _no_condition(code, known)) for code in codes if code not in known.conditions]
    if faults:
        raise _Fault(*faults)
    return codes


def _no_condition(code: str, known: Known) -> str:
    return f"is no condition{_closest(code, known.conditions)}; `sglang-sidecar explain` lists them"


def _by_code(vocabulary: Iterable[str]) -> _Parser:
    """Accept one member of ``vocabulary`` by condition: a TOML table, or ``code=word`` with commas between."""
    members = {str(member): member for member in vocabulary}

    def parse(value: object, known: Known) -> Mapping[str, str]:
        faults: list[tuple[str, str, str]] = []
        words: dict[str, str] = {}
        for code, given in _pairs(value, "must be CODE=WORD, as in environment-drift=" + next(iter(members))):
            if code not in known.conditions:
                faults.append((code, _show(given), f"is for {_show(code)}, which {_no_condition(code, known)}"))
            elif not isinstance(given, str) or given not in members:
                faults.append((code, _show(given), f"must be one of {', '.join(members)}"))
            elif words.setdefault(code, members[given]) != given:
                faults.append((code, _show(given), f"contradicts {words[code]}; say it once"))
        if faults:
            raise _Fault(*faults)
        return MappingProxyType(words)

    return parse


def _path(value: object, _known: Known) -> str:
    """Accept the path of a file that may appear, change and disappear later."""
    text = _string(value)
    if not Path(text).is_absolute():
        raise _reject(text, "must be an absolute path, as in /etc/sglang-sidecar/baseline.toml")
    return text


def _seconds(value: object, known: Known) -> Mapping[str, float]:
    """Accept seconds by probe: a TOML table, or ``probe=seconds`` with commas between."""
    faults: list[tuple[str, str, str]] = []
    seconds: dict[str, float] = {}
    for name, given in _pairs(value):
        duration = _number(given)
        if name not in known.probes:
            allowed = ", ".join(sorted(known.probes)) or "nothing"
            nearest = _closest(name, known.probes)
            faults.append((name, _show(given), f"is for {_show(name)}, which is no probe{nearest}; probes: {allowed}"))
        elif not 0 < duration <= _MAX_SECONDS:
            faults.append((name, _show(given), f"must be a number of seconds above 0 and up to {_MAX_SECONDS:g}"))
        else:
            seconds[name] = duration
    if faults:
        raise _Fault(*faults)
    return MappingProxyType(seconds)


def _pairs(
    value: object, sentence: str = "must be PROBE=SECONDS, as in driver=10,server=30"
) -> Iterable[tuple[str, object]]:
    """Split into names and what was given for them; ``sentence`` says how that is written."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, (int, float)):
        raise _reject(value, f"{sentence}; in TOML a table")
    pairs: list[tuple[str, object]] = []
    for part in _strings(value):
        name, equals, number = part.partition("=")
        if not equals:
            raise _reject(part, sentence)
        pairs.append((name.strip(), number.strip()))
    return pairs


def _number(given: object) -> float:
    """Read a number; whatever is none becomes NaN, which no range contains."""
    if not isinstance(given, (int, float, str)) or isinstance(given, bool):
        return math.nan
    try:
        return float(given)
    except (ValueError, OverflowError):
        return math.nan


def _closest(name: str, known: Collection[str], written: Callable[[str], str] = str) -> str:
    """Hint at the name that was probably meant, as it is ``written``, or say nothing."""
    from difflib import get_close_matches  # rarely needed

    spelt = name.lower()
    candidates = [_OTHER_WORDS[spelt]] if _OTHER_WORDS.get(spelt) in known else []
    for guess in (spelt, spelt.replace("-", "_")):
        candidates = candidates or get_close_matches(guess, known, n=1)
    return f" (did you mean {written(candidates[0])}?)" if candidates else ""


# -- the table of settings --------------------------------------------------------------------------


class Setting(Struct, frozen=True, kw_only=True):
    """A setting, declared once: TOML key, variable, flag, `config show` and the documentation follow from it.

    ``default`` is the default as people read it. ``repeatable`` flags add up. ``attribute`` is the field of
    `Settings` where it is not the key itself. ``choices`` is empty where any value may be valid. ``option``: a probe
    declares it, and its value is one of `Settings.options`.
    """

    key: str
    parse: _Parser
    default: str
    doc: str
    metavar: str
    repeatable: bool = False
    choices: tuple[str, ...] = ()
    attribute: str = ""
    option: bool = False

    @property
    def field(self) -> str:
        """Name of the field of `Settings`."""
        return self.attribute or self.key

    @property
    def flag(self) -> str:
        """The flag on the command line."""
        return _flag(self.key)

    @property
    def variable(self) -> str:
        """The variable of the environment."""
        return ENVIRONMENT_PREFIX + self.key.upper()


def _choice_setting(key: str, vocabulary: Iterable[str], default: str, doc: str, *, attribute: str = "") -> Setting:
    """Declare a setting with a closed vocabulary; ``auto`` is added where it is the default and not a member itself."""
    words = [str(member) for member in vocabulary]
    auto = default == "auto" and "auto" not in words
    choices = ("auto", *words) if auto else tuple(words)
    return Setting(
        key=key,
        parse=_choice(vocabulary, auto=auto),
        default=default,
        doc=doc,
        metavar="|".join(choices),
        choices=choices,
        attribute=attribute,
    )


SETTINGS: tuple[Setting, ...] = (
    Setting(
        key="listen",
        parse=_listen,
        default=":9477",
        doc="Where to serve: HOST:PORT; `:9477` means every interface and both families, `[::1]:9477` one address",
        metavar="HOST:PORT",
        repeatable=True,
    ),
    _choice_setting("placement", tuple(Placement), "auto", "Whether the sidecar runs on the host or in a container"),
    _choice_setting("image", tuple(Image), "auto", "Whether its container has the server's image or its own"),
    _choice_setting("processes", tuple(Processes), "auto", "Whether the server's processes can be seen from here"),
    Setting(
        key="server_url",
        parse=_url,
        default="http://127.0.0.1:30000",
        doc="Base address of the SGLang server",
        metavar="URL",
    ),
    Setting(
        key="server_key_file",
        parse=_file(secret=True),
        default="none",
        doc="File that holds the server's API key; only its path is ever shown",
        metavar="FILE",
    ),
    Setting(
        key="server_ca_file",
        parse=_file(secret=False),
        default="none",
        doc="File with the certificate authority that signed the server's certificate (PEM)",
        metavar="FILE",
    ),
    Setting(key="server_pid", parse=_pid, default="found", doc="Process id of the server", metavar="PID"),
    Setting(
        key="server_pattern",
        parse=_pattern,
        default="found",
        doc="Regular expression for the first 1024 characters of the server's command line, where there are several; "
        "with at most two of * and +",
        metavar="REGEX",
    ),
    Setting(
        key="server_python",
        parse=_interpreter,
        default="found",
        doc="Absolute path of the interpreter of the server's environment",
        metavar="PATH",
    ),
    Setting(
        key="server_root",
        parse=_directory,
        default="found",
        doc="Root directory below which the server's environment lies",
        metavar="DIRECTORY",
    ),
    Setting(
        key="gpus",
        parse=_gpus,
        default="found",
        doc="The server's GPUs, as indices or uuids",
        metavar="GPU",
        repeatable=True,
    ),
    Setting(
        key="gpus_expected",
        parse=_count,
        default="found",
        doc="How many GPUs the server needs",
        metavar="NUMBER",
    ),
    _choice_setting(
        "nvml", tuple(NvmlMode), "worker", "Whether NVML is asked by a process that stays or a new one each round"
    ),
    Setting(
        key="gpu_detail",
        parse=_switch,
        default="false",
        doc="Whether clocks, PCIe, NVLink and fabric of each GPU are exported too; they are judged regardless",
        metavar="true|false",
        choices=("true", "false"),
    ),
    Setting(
        key="require",
        parse=_require,
        default="none",
        doc="Features or conditions to be judged even when no server is seen to need them",
        metavar="NAME",
        repeatable=True,
    ),
    _choice_setting(
        "import",
        tuple(ImportPolicy),
        "auto",
        "When modules are really imported in the server's environment: where it matters, always, or never",
        attribute="import_policy",
    ),
    Setting(
        key="import_with_devices",
        parse=_switch,
        default="false",
        doc="Whether imports see the GPUs that the server sees; an import may then take some of their memory",
        metavar="true|false",
        choices=("true", "false"),
    ),
    Setting(
        key="baseline",
        parse=_path,
        default="none",
        doc="File that says what the environment should be; written by `baseline write`, read again each minute",
        metavar="FILE",
    ),
    Setting(
        key="state_dir",
        parse=_directory,
        default="none",
        doc="Directory where the last known environment is remembered across restarts, in a folder of the agent's own",
        metavar="DIRECTORY",
    ),
    Setting(
        key="tls_cert_file",
        parse=_file(secret=False),
        default="none",
        doc="Certificate to serve HTTPS with, followed by those between it and the authority (PEM); read again when it "
        "changes",
        metavar="FILE",
    ),
    Setting(
        key="tls_key_file",
        parse=_file(secret=True),
        default="none",
        doc="Private key of that certificate, without a password (PEM); read again when it changes",
        metavar="FILE",
    ),
    Setting(
        key="tls_client_ca_file",
        parse=_file(secret=False),
        default="none",
        doc="Authority of the clients' certificates (PEM): whoever shows none, as a kubelet, gets the probe paths "
        "alone; read again when it changes",
        metavar="FILE",
    ),
    Setting(
        key="token_file",
        parse=_file(secret=True),
        default="none",
        doc="File with the bearer token that all but the probe paths ask for; several, one per line, while it is "
        "changed; read again when it changes",
        metavar="FILE",
    ),
    Setting(
        key="gate",
        parse=_by_code(tuple(Gate)),
        default="declared",
        doc="When a condition makes the pod unready, by code: serving, launch or never; in TOML a table `[gate]`",
        metavar="CODE=GATE",
        repeatable=True,
    ),
    Setting(
        key="severity",
        parse=_by_code(tuple(Severity)),
        default="declared",
        doc="How bad a condition is, by code: info, warning or critical; in TOML a table `[severity]`",
        metavar="CODE=SEVERITY",
        repeatable=True,
    ),
    Setting(
        key="accept",
        parse=_codes,
        default="none",
        doc="Conditions that are known and accepted: shown as info, they gate nothing and change no exit code",
        metavar="CODE",
        repeatable=True,
    ),
    Setting(
        key="intervals",
        parse=_seconds,
        default="per-probe",
        doc="Seconds between two runs of a probe; in TOML a table `[intervals]` with `driver = 10`",
        metavar="PROBE=SECONDS",
        repeatable=True,
    ),
    Setting(
        key="deadlines",
        parse=_seconds,
        default="per-probe",
        doc="Seconds that one run of a probe may take; in TOML a table `[deadlines]` with `driver = 5`",
        metavar="PROBE=SECONDS",
        repeatable=True,
    ),
    _choice_setting(
        "log_format",
        ("auto", "json", "console"),
        "auto",
        "Form of the log on standard error; `auto` is json unless that is a terminal",
    ),
    _choice_setting("log_level", ("debug", "info", "warning", "error"), "info", "Least level that is logged"),
)
"""Every setting of the agent itself, in the order of the documentation; those of probes come after them."""


def with_options(options: Iterable[Option]) -> tuple[Setting, ...]:
    """Every setting, those that probes declare included."""
    return (*SETTINGS, *(_of_option(option) for option in options))


def _of_option(option: Option) -> Setting:
    def parse(value: object, _known: Known) -> Any:
        try:
            return option.parse(value)
        except ValueError as error:
            raise _reject(value, str(error)) from None

    return Setting(
        key=option.key, parse=parse, default=option.default, doc=option.doc, metavar=option.metavar, option=True
    )


def _flag(key: str) -> str:
    """Name the flag of a key."""
    return "--" + key.replace("_", "-")


# -- loading ------------------------------------------------------------------------------------------


class Loaded(Struct, frozen=True, kw_only=True):
    """The effective settings and where each came from.

    ``sources`` has every key: ``default``, ``file PATH``, ``environment NAME`` or ``flag --NAME``.
    ``warnings`` are sentences about what was ignored. ``file`` is the TOML file that was read, if any; ``exposed``
    says, as a sentence, that any user may write it. ``declared`` is every setting that there is.
    """

    settings: Settings
    sources: Mapping[str, str]
    warnings: tuple[str, ...] = ()
    file: Path | None = None
    exposed: str | None = None
    declared: tuple[Setting, ...] = SETTINGS

    def believable_placement(self) -> Placement | None:
        """The placement that is set, unless by a file that any user may write: it decides what that is worth."""
        from_file = self.sources["placement"].startswith(_FILE_SOURCE)
        return None if self.exposed is not None and from_file else self.settings.placement


class _Layers(Struct):
    """What was found so far, lowest layer first; a later value replaces an earlier one."""

    known: Known
    table: Mapping[str, Setting]
    values: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def set(self, setting: Setting, raw: object, source: str) -> None:
        """Parse one value, or note what is wrong with it: a bad value is an error even if a higher layer hides it."""
        try:
            value = setting.parse(raw, self.known)
        except _Fault as fault:
            for below, shown, sentence in fault.faults:
                key = f"{setting.key}.{below}" if below else setting.key
                self.problem(key, source, shown, f"{key}: {shown} ({source}) {sentence}")
            return
        (self.options if setting.option else self.values)[setting.field] = value
        self.sources[setting.key] = source

    def problem(self, key: str, source: str, value: str, sentence: str) -> None:
        """Note what is wrong."""
        self.problems.append(Problem(key=key, source=source, value=value, sentence=sentence))


def load(
    *,
    file: Path | None,
    environ: Mapping[str, str],
    flags: Mapping[str, str | list[str]],
    probe_names: Collection[str],
    allowed_requirements: Collection[str],
    conditions: Collection[str] = (),
    declared: tuple[Setting, ...] = SETTINGS,
) -> Loaded:
    """Find the effective settings: defaults, then the TOML file, the environment and the flags.

    ``file`` wins over the variable `FILE_VARIABLE`. ``flags`` maps keys of settings to texts, to lists of
    texts where they are repeatable. An empty variable counts as not set. ``declared`` is every setting that there is.

    Raises `ConfigError` that lists every problem of every layer.
    """
    layers = _Layers(
        known=Known(probes=probe_names, requirements=allowed_requirements, conditions=conditions),
        table={setting.key: setting for setting in declared},
    )
    path = file
    if path is None and (named := environ.get(FILE_VARIABLE)):
        path = Path(named)
    if path is not None:
        _load_file(path, layers)
    warnings = _load_environment(environ, layers)
    for key, raw in flags.items():
        source = f"flag {_flag(key)}"
        if setting := layers.table.get(key):
            layers.set(setting, raw, source)
        else:
            sentence = f"{_flag(key)}: unknown flag{_closest(key, layers.table)}"
            layers.problem(key, source, "", sentence)
    _check_together(layers)
    if layers.problems:
        raise ConfigError(tuple(layers.problems))
    return Loaded(
        settings=Settings(
            **layers.values, options=MappingProxyType(layers.options), explicit=frozenset(layers.sources)
        ),
        sources=MappingProxyType({key: layers.sources.get(key, "default") for key in layers.table}),
        warnings=warnings,
        file=path,
        exposed=None if path is None else _exposed(path),
        declared=declared,
    )


_NEEDS = (("tls_cert_file", "tls_key_file"), ("tls_key_file", "tls_cert_file"), ("tls_client_ca_file", "tls_cert_file"))
"""Settings that mean nothing without another one."""


def _check_together(layers: _Layers) -> None:
    """Note which setting lacks the one that it needs. One that is there and wrong has its own problem."""
    wrong = {problem.key for problem in layers.problems}
    for key, other in _NEEDS:
        if key in layers.values and other not in layers.values and other not in wrong:
            sentence = f"{key}: is set ({layers.sources[key]}) and needs {other} to be set, too"
            layers.problem(key, layers.sources[key], "", sentence)


def _exposed(path: Path) -> str | None:
    place = writable_by_all(path)
    return None if place is None else f"config: {objection(place)}"


def _load_file(path: Path, layers: _Layers) -> None:
    """Add the layer of the TOML file."""
    source = f"{_FILE_SOURCE}{path}"
    try:
        table = _read_toml(path)
    except ValueError as error:
        layers.problem("config", source, str(path), f"config: {path} {error}")
        return
    for key, raw in table.items():
        if setting := layers.table.get(key):
            layers.set(setting, raw, source)
            continue
        # Only names are repeated: what stands behind an unknown key may be a secret.
        known = layers.table
        nested = [f"{key}_{below}" for below in raw if f"{key}_{below}" in known] if isinstance(raw, dict) else []
        hint = f" (did you mean {', '.join(nested)}, outside of any table?)" if nested else _closest(key, known)
        hint = hint or f"; known keys: {', '.join(known)}"
        layers.problem(key, source, "", f"{key}: unknown key in {source}{hint}")


def _read_toml(path: Path) -> Mapping[str, Any]:
    """Read the file's table. Raises ValueError with the rest of a sentence that starts with the path."""
    try:
        data = read_regular(path, _FILE_LIMIT + 1)
    except (OSError, ValueError, IrregularError) as error:
        why = _system(error) if isinstance(error, OSError) else str(error)
        raise ValueError(f"cannot be read: {why}") from None
    if len(data) > _FILE_LIMIT:
        raise ValueError(f"is larger than {_FILE_LIMIT} bytes; is it the right file?")
    try:
        return tomlfile.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        raise ValueError(f"is not UTF-8 (at line {line}, column {column}); save it as UTF-8") from None
    except ValueError as error:
        # Not only TOMLDecodeError: a number of thousands of digits is refused by Python itself.
        raise ValueError(f"is not valid TOML: {error}") from None


def _load_environment(environ: Mapping[str, str], layers: _Layers) -> tuple[str, ...]:
    """Add the layer of the environment. Returns warnings about variables that look like ours and are not."""
    warnings: list[str] = []
    variables = {setting.variable: setting for setting in layers.table.values()}
    for name in sorted(environ):
        rest = name.removeprefix(ENVIRONMENT_PREFIX)
        raw = environ[name]
        if name in (rest, FILE_VARIABLE) or not raw or _INJECTED_VALUE.match(raw):
            continue
        if setting := variables.get(name):
            layers.set(setting, raw, f"environment {name}")
        elif not _INJECTED_NAME.search(rest):
            hint = _closest(rest, layers.table, lambda key: layers.table[key].variable)
            warnings.append(f"{name}: unknown variable, ignored{hint}")
    return tuple(warnings)


# -- showing ------------------------------------------------------------------------------------------


def render(loaded: Loaded, form: str) -> str:
    """Write what ``config show`` prints: each setting's effective value and its source, as ``text`` or ``json``."""
    rows = [(setting, _value(loaded.settings, setting)) for setting in loaded.declared]
    if form == "json":
        document = {
            "file": None if loaded.file is None else str(loaded.file),
            "settings": {
                setting.key: {"value": _plain(value), "source": loaded.sources[setting.key]} for setting, value in rows
            },
            "warnings": list(loaded.warnings),
        }
        return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    cells = [("setting", "value", "source")]
    cells += [(setting.key, _readable(setting, value), loaded.sources[setting.key]) for setting, value in rows]
    widths = [max(len(row[column]) for row in cells) for column in (0, 1)]
    lines = [f"{key:<{widths[0]}}  {value:<{widths[1]}}  {source}" for key, value, source in cells]
    return "\n".join([*lines, *(f"warning: {warning}" for warning in loaded.warnings)]) + "\n"


def _value(settings: Settings, setting: Setting) -> object:
    """The effective value; None where a probe's own setting is left at its default."""
    return settings.options.get(setting.key) if setting.option else getattr(settings, setting.field)


def _plain(value: object) -> object:
    """Turn a value into what JSON holds; None where it is left to be found out."""
    match value:
        case Listen(host=host, port=port):
            return f"{f'[{host}]' if host and ':' in host else host or ''}:{port}"
        case tuple():
            return [_plain(item) for item in value]
        case Mapping():
            return {str(key): _plain(item) for key, item in value.items()}
        case _:
            return value


def _readable(setting: Setting, value: object) -> str:
    """Write a value as a variable or flag would hold it."""
    match _plain(value):
        case list() as items if items:
            return ",".join(str(item) for item in items)
        case dict() as table if table:
            return ",".join(
                f"{key}={number if isinstance(number, str) else f'{number:g}'}" for key, number in table.items()
            )
        case None | list() | dict():
            return setting.default
        case bool() as switch:
            return str(switch).lower()
        case plain:
            return str(plain)
