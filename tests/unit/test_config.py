"""Settings: four layers, every problem at once, nothing secret in a message."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import fields

from sidecar.config import (
    SETTINGS,
    ConfigError,
    ImportPolicy,
    Listen,
    Loaded,
    Settings,
    load,
    render,
    with_options,
)
from sidecar.model import Option, Placement

PROBES = ("driver", "server")
REQUIREMENTS = ("cuda", "flashinfer-mamba", "gpu-lost")
CONDITIONS = ("gpu-lost", "gpu-missing", "environment-drift")


def read(
    toml: str | bytes | None = None,
    *,
    tmp_path: Path | None = None,
    environ: Mapping[str, str] | None = None,
    **flags: str | list[str],
) -> Loaded:
    """Load from given layers; ``toml`` needs ``tmp_path``."""
    file = None
    if toml is not None:
        assert tmp_path is not None
        file = tmp_path / "sidecar.toml"
        file.write_bytes(toml if isinstance(toml, bytes) else toml.encode())
    return load(
        file=file,
        environ=environ or {},
        flags=flags,
        probe_names=PROBES,
        allowed_requirements=REQUIREMENTS,
        conditions=CONDITIONS,
    )


def sentence(*arguments: Any, **more: Any) -> str:
    """Return the only problem's sentence."""
    with pytest.raises(ConfigError) as caught:
        read(*arguments, **more)
    assert len(caught.value.problems) == 1
    return caught.value.problems[0].sentence


# -- layers -------------------------------------------------------------------------------------------


def test_nothing_given_is_the_defaults() -> None:
    """Without any layer the settings are those that the fields declare, each from the source "default"."""
    loaded = read()
    assert loaded.settings == Settings()
    assert set(loaded.sources.values()) == {"default"}
    assert loaded.settings.explicit == frozenset()


def test_each_layer_wins_over_the_one_below(tmp_path: Path) -> None:
    """A flag wins over the environment, the environment over the file, the file over the default."""
    toml = 'log_level = "debug"\nserver_pid = 7\nimage = "own"\n'
    environ = {"SGLANG_SIDECAR_SERVER_PID": "8", "SGLANG_SIDECAR_IMAGE": "server"}
    loaded = read(toml, tmp_path=tmp_path, environ=environ, image="auto")
    assert (loaded.settings.log_level, loaded.settings.server_pid, loaded.settings.image) == ("debug", 8, None)
    assert loaded.sources["log_level"] == f"file {tmp_path / 'sidecar.toml'}"
    assert loaded.sources["server_pid"] == "environment SGLANG_SIDECAR_SERVER_PID"
    assert loaded.sources["image"] == "flag --image"
    assert loaded.settings.explicit == {"log_level", "server_pid", "image"}


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    """SGLANG_SIDECAR_CONFIG names the file; an explicit argument wins over it."""
    named, given_ = tmp_path / "named.toml", tmp_path / "given.toml"
    named.write_text('log_level = "error"\n')
    given_.write_text('log_level = "debug"\n')
    environ = {"SGLANG_SIDECAR_CONFIG": str(named)}
    common: dict[str, Any] = {"environ": environ, "flags": {}, "probe_names": (), "allowed_requirements": ()}
    assert load(file=None, **common).settings.log_level == "error"
    assert load(file=given_, **common).settings.log_level == "debug"


def test_an_empty_variable_counts_as_not_set() -> None:
    """A variable that a template left empty changes nothing."""
    assert read(environ={"SGLANG_SIDECAR_SERVER_URL": ""}).settings == Settings()


def test_every_setting_fills_a_field_of_settings() -> None:
    """The table declares exactly the fields that users may set, and its default is the field's own."""
    assert {setting.field for setting in SETTINGS} == {one.name for one in fields(Settings)} - {
        "options",
        "launch",
        "explicit",
    }


def test_all_problems_of_all_layers_are_listed_at_once(tmp_path: Path) -> None:
    """One round of repair is enough: no problem hides another one."""
    toml = 'log_level = "loud"\ncolour = "red"\nintervals = {driver = -1, gpu = 5}\n'
    with pytest.raises(ConfigError) as caught:
        read(toml, tmp_path=tmp_path, environ={"SGLANG_SIDECAR_SERVER_PID": "x"}, listen=["9477"])
    keys = [problem.key for problem in caught.value.problems]
    assert keys == ["log_level", "colour", "intervals.driver", "intervals.gpu", "server_pid", "listen"]
    assert str(caught.value).count("\n") == len(keys) - 1


# -- what Kubernetes injects ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SGLANG_SIDECAR_PORT", "tcp://10.0.0.1:9477"),
        ("SGLANG_SIDECAR_PORT_9477_TCP", "tcp://10.0.0.1:9477"),
        ("SGLANG_SIDECAR_PORT_9477_TCP_ADDR", "10.0.0.1"),
        ("SGLANG_SIDECAR_PORT_9477_TCP_PROTO", "tcp"),
        ("SGLANG_SIDECAR_SERVICE_HOST", "10.0.0.1"),
        ("SGLANG_SIDECAR_SERVICE_PORT", "9477"),
        ("SGLANG_SIDECAR_SERVICE_PORT_METRICS", "9477"),
        ("SGLANG_SIDECAR_METRICS_SERVICE_HOST", "10.0.0.1"),
        ("SGLANG_SIDECAR_LISTEN", "udp://10.0.0.1:9477"),
    ],
)
def test_variables_of_a_service_are_ignored_silently(name: str, value: str) -> None:
    """A Service that is called sglang-sidecar injects variables that look like ours; they say nothing."""
    loaded = read(environ={name: value})
    assert loaded.settings == Settings()
    assert loaded.warnings == ()


def test_an_unknown_variable_only_warns() -> None:
    """Another variable with our prefix is named in a warning, without its value, with the closest key."""
    loaded = read(environ={"SGLANG_SIDECAR_SERVER_URI": "hunter2", "PATH": "/bin"})
    assert loaded.settings == Settings()
    (warning,) = loaded.warnings
    assert "SGLANG_SIDECAR_SERVER_URI" in warning
    assert "did you mean SGLANG_SIDECAR_SERVER_URL?" in warning
    assert "hunter2" not in warning


# -- unknown keys -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("toml", "key", "hint"),
    [
        ('server-url = "x"', "server-url", "did you mean server_url?"),
        ('lisen = ":1"', "lisen", "did you mean listen?"),
        ('[server]\nurl = "x"', "server", "did you mean server_url"),
        ('port = "9477"', "port", "did you mean listen?"),
        ("zzz = 1", "zzz", "known keys: listen, "),
    ],
)
def test_an_unknown_key_is_an_error_with_the_closest_one(tmp_path: Path, toml: str, key: str, hint: str) -> None:
    """A misspelt key is named together with the one that was probably meant."""
    told = sentence(toml, tmp_path=tmp_path)
    assert told.startswith(f"{key}: unknown key in file ")
    assert hint in told


def test_the_value_of_an_unknown_key_is_not_repeated(tmp_path: Path) -> None:
    """What stands behind an unknown key may be a secret."""
    assert "sk-12345" not in sentence('server_key = "sk-12345"', tmp_path=tmp_path)


def test_an_unknown_flag_is_an_error() -> None:
    """Flags are held to the same table as keys."""
    assert sentence(server_uri="x") == "--server-uri: unknown flag (did you mean server_url?)"


# -- the file -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"listen = \n", "is not valid TOML: Invalid value (at line 1, column 10)"),
        (b"a = 1\nb = '\xff'\n", "is not UTF-8 (at line 2, column 6); save it as UTF-8"),
        (b"#" * 2_000_000, "is larger than 1048576 bytes; is it the right file?"),
    ],
)
def test_a_malformed_file_is_one_sentence_with_its_place(tmp_path: Path, content: bytes, told: str) -> None:
    """A file that is no TOML is one problem that says where."""
    assert sentence(content, tmp_path=tmp_path) == f"config: {tmp_path / 'sidecar.toml'} {told}"


def test_a_file_that_is_nested_too_deeply_is_one_sentence(tmp_path: Path) -> None:
    """A hostile depth ends in a problem, not in a traceback."""
    assert "is not valid TOML: " in sentence(b"a = " + b"[" * 100_000, tmp_path=tmp_path)


@pytest.mark.parametrize(("name", "told"), [("", "is a directory"), ("none.toml", "no such file or directory")])
def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path, name: str, told: str) -> None:
    """A directory or a missing file is told in the system's words."""
    with pytest.raises(ConfigError) as caught:
        load(file=tmp_path / name, environ={}, flags={}, probe_names=(), allowed_requirements=())
    (problem,) = caught.value.problems
    assert problem.key == "config"
    assert problem.sentence == f"config: {tmp_path / name} cannot be read: {told}"


def test_a_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    """Editors on Windows write one."""
    assert read(b"\xef\xbb\xbflog_level = 'debug'", tmp_path=tmp_path).settings.log_level == "debug"


# -- kinds of values --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (":9477", [(None, 9477)]),
        ("127.0.0.1:1", [("127.0.0.1", 1)]),
        ("[::1]:9477", [("::1", 9477)]),
        ("[fe80::1%eth0]:80", [("fe80::1%eth0", 80)]),
        ("localhost:0", [("localhost", 0)]),
        ("[::1]:9477, 127.0.0.1:9477", [("::1", 9477), ("127.0.0.1", 9477)]),
        (":9477,:9477", [(None, 9477)]),
    ],
)
def test_addresses(text: str, expected: list[tuple[str | None, int]]) -> None:
    """HOST:PORT, brackets around IPv6, no host for every interface, commas between several."""
    wanted = tuple(Listen(host=host, port=port) for host, port in expected)
    assert read(environ={"SGLANG_SIDECAR_LISTEN": text}).settings.listen == wanted


def test_addresses_may_be_repeated_flags_or_an_array(tmp_path: Path) -> None:
    """A flag adds up with itself and a TOML array holds several."""
    wanted = (Listen(host=None, port=1), Listen(host="::1", port=2))
    assert read(listen=[":1", "[::1]:2"]).settings.listen == wanted
    assert read('listen = [":1", "[::1]:2"]', tmp_path=tmp_path).settings.listen == wanted


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("9477", "did you mean :9477?"),
        ("localhost", "did you mean localhost:9477?"),
        ("::1:9477", "needs brackets"),
        ("1.2.3.4:65536", "a port from 0 to 65535"),
        (":-1", "a port from 0 to 65535"),
        (":٩", "a port from 0 to 65535"),
        ("1.2.3:80", "must start with an IPv4 address"),
        ("[127.0.0.1]:80", "must start with an IPv4 address"),
        ("*:80", "must start with an IPv4 address"),
        ("http://a:80", "needs brackets"),
        (":1,,:2", "must not be empty"),
    ],
)
def test_bad_addresses_say_what_is_allowed(text: str, told: str) -> None:
    """A bad address is repeated with its source and the remedy."""
    message = sentence(listen=[text])
    assert message.startswith("listen: ")
    assert "(flag --listen)" in message
    assert told in message


def test_no_address_at_all_is_an_error(tmp_path: Path) -> None:
    """An agent that listens nowhere was not meant."""
    assert "names no address" in sentence("listen = []", tmp_path=tmp_path)


def test_choices() -> None:
    """Choices become their own members, in any case of letters; auto leaves them to be found out."""
    settings = read(**{"placement": "Host", "import": "never"}).settings
    assert settings.placement is Placement.HOST
    assert settings.import_policy is ImportPolicy.NEVER
    assert read(placement="auto").settings.placement is None
    assert read(**{"import": "auto"}).settings.import_policy is ImportPolicy.AUTO


def test_a_bad_choice_lists_what_is_allowed(tmp_path: Path) -> None:
    """A value outside of the vocabulary is told with the whole vocabulary, whatever its type."""
    assert sentence(placement="pod").endswith("must be one of auto, host, container")
    assert sentence("placement = 3", tmp_path=tmp_path).endswith("must be one of auto, host, container")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://127.0.0.1:30000/", "http://127.0.0.1:30000"),
        ("https://[::1]:8443/prefix/", "https://[::1]:8443/prefix"),
        ("http://server", "http://server"),
    ],
)
def test_urls(text: str, expected: str) -> None:
    """A base address loses its trailing slash and keeps its path."""
    assert read(server_url=text).settings.server_url == expected


@pytest.mark.parametrize(
    "text", ["127.0.0.1:30000", "ftp://a", "http://", "http://a:99999", "http://[::1", "http://a b", "http://a/?k=v"]
)
def test_bad_urls(text: str) -> None:
    """What is no http or https address with a host is rejected."""
    assert sentence(server_url=text).startswith("server_url: ")


@pytest.mark.parametrize("text", ["http://me:hunter2@host", "http://me:hunter2@host:99999", "ftp://hunter2@host/"])
def test_credentials_in_a_url_are_rejected_and_not_repeated(text: str) -> None:
    """A password in a URL is an error that does not show it."""
    with pytest.raises(ConfigError) as caught:
        read(server_url=text)
    (problem,) = caught.value.problems
    assert "hunter2" not in repr(problem)


def test_files_must_be_readable_regular_files(tmp_path: Path) -> None:
    """A key or certificate file must exist and be a regular file."""
    file = tmp_path / "key"
    file.write_text("sk-12345")
    assert read(server_key_file=str(file)).settings.server_key_file == str(file)
    assert "no such file or directory" in sentence(server_ca_file=str(tmp_path / "none"))
    assert "must name a regular file" in sentence(server_ca_file=str(tmp_path))


@pytest.mark.parametrize("value", ["sk-12345", "sk-12345\n", "sk-12345\x00"])
def test_a_key_given_in_place_of_its_file_is_not_repeated(value: str) -> None:
    """Who mistakes the setting for the key itself does not find the key in a log."""
    with pytest.raises(ConfigError) as caught:
        read(server_key_file=value)
    assert "sk-12345" not in repr(caught.value.problems)


@pytest.mark.parametrize("setting", ["token_file", "tls_key_file", "server_key_file"])
def test_a_path_that_is_missing_is_shown(setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what may be a secret itself is kept back: a relative path is none when it is one by its look or folder."""
    (tmp_path / "secrets").mkdir()
    monkeypatch.chdir(tmp_path)
    for path in (f"{tmp_path}/none", "./none", "../none", "none.key", "some/none.pem", "secrets/none", "secrets"):
        assert f"{setting}: '{path}' (" in sentence(**{setting: path}), path
    for secret in ("c2VjcmV0", "c2Vj/cmV0+x==", "eyJhbGci.eyJzdWIi.c2ln"):
        assert f"{setting}: the value (not shown) (" in sentence(**{setting: secret})


def test_the_root_must_be_a_directory(tmp_path: Path) -> None:
    """A root that does not exist or is a file is an error."""
    file = tmp_path / "file"
    file.touch()
    assert read(server_root=str(tmp_path)).settings.server_root == str(tmp_path)
    assert "this is not one" in sentence(server_root=str(file))
    assert "no such file" in sentence(server_root=str(tmp_path / "none"))


def test_an_interpreter_need_not_exist(tmp_path: Path) -> None:
    """The agent starts with an interpreter that is not there (yet), but not with a relative path."""
    missing = str(tmp_path / "none" / "python")
    assert read(server_python=missing).settings.server_python == missing
    assert "must be an absolute path" in sentence(server_python="python3")


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "x", "99999999999999999999", "4194305"])
def test_bad_process_ids(value: str) -> None:
    """A process id is a whole number that Linux can give."""
    assert "must be a process id" in sentence(server_pid=value)


def test_process_ids(tmp_path: Path) -> None:
    """TOML gives a number, the other layers text; true is no number."""
    assert read("server_pid = 42", tmp_path=tmp_path).settings.server_pid == 42
    assert read(server_pid="42").settings.server_pid == 42
    assert "must be a process id" in sentence("server_pid = true", tmp_path=tmp_path)


def test_a_bad_pattern_says_where() -> None:
    """A pattern that does not compile is told with its fault."""
    assert "missing ), unterminated subpattern at position 0" in sentence(server_pattern="(")


def test_a_pattern_that_never_ends_is_refused() -> None:
    """Whoever starts a process chooses its command line, and nothing interrupts a search."""
    assert "use at most two of *, + and {m,n}" in sentence(server_pattern="(a+)+$")


def test_requirements_are_checked_against_what_can_be_required() -> None:
    """Unknown requirements are errors with the closest known one and all that is allowed."""
    assert read(require=["cuda,gpu-lost", "cuda"]).settings.require == ("cuda", "gpu-lost")
    told = sentence(require=["flashinfer_mamba"])
    assert "did you mean flashinfer-mamba?" in told
    assert "allowed: cuda, flashinfer-mamba, gpu-lost" in told


def test_seconds_by_probe(tmp_path: Path) -> None:
    """A TOML table, or probe=seconds with commas."""
    assert read("[intervals]\ndriver = 2\nserver = 0.5", tmp_path=tmp_path).settings.intervals == {
        "driver": 2.0,
        "server": 0.5,
    }
    assert read(deadlines=["driver=10, server=30"]).settings.deadlines == {"driver": 10.0, "server": 30.0}


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e9", "soon", ""])
def test_bad_seconds(value: str) -> None:
    """Seconds are a number above zero and of a sane size."""
    told = sentence(intervals=[f"driver={value}"])
    assert told.startswith("intervals.driver: ")
    assert "a number of seconds above 0" in told


def test_seconds_for_an_unknown_probe() -> None:
    """A misspelt probe is an error, not a setting without effect."""
    assert "(did you mean driver?); probes: driver, server" in sentence(deadlines=["drivers=1"])


@pytest.mark.parametrize(
    ("key", "words"),
    [("gate", {"gpu-lost": "never", "environment-drift": "serving"}), ("severity", {"gpu-lost": "info"})],
)
def test_overrides_by_code(tmp_path: Path, key: str, words: dict[str, str]) -> None:
    """A table of the file, a variable and a repeated flag say the same."""
    table = "".join(f'{code} = "{word}"\n' for code, word in words.items())
    written = [f"{code}={word}" for code, word in words.items()]
    for loaded in (
        read(f"[{key}]\n{table}", tmp_path=tmp_path),
        read(environ={f"SGLANG_SIDECAR_{key.upper()}": ", ".join(written)}),
        read(**{key: written}),
    ):
        assert getattr(loaded.settings, key) == words


@pytest.mark.parametrize(
    ("toml", "key", "told"),
    [
        ("[gate]\ngpu-lots = 'never'", "gate.gpu-lots", "did you mean gpu-lost?"),
        ("[gate]\ngpu-lost = 'sometimes'", "gate.gpu-lost", "must be one of serving, launch, never"),
        ("[gate]\ngpu-lost = true", "gate.gpu-lost", "must be one of serving, launch, never"),
        ("[gate]\ngpu-lost = ['never']", "gate.gpu-lost", "must be one of serving, launch, never"),
        ("gate = 3", "gate", "must be CODE=WORD"),
        ("gate = 'gpu-lost'", "gate", "must be CODE=WORD"),
        ("gate = 'gpu-lost=never,gpu-lost=serving'", "gate.gpu-lost", "contradicts never"),
        ("[severity]\nGPU-LOST = 'info'", "severity.GPU-LOST", "did you mean gpu-lost?"),
        ("[severity]\ngpu-lost = 'fatal'", "severity.gpu-lost", "must be one of info, warning, critical"),
        ("accept = ['gpu-lots']", "accept", "did you mean gpu-lost?"),
        ("accept = [3]", "accept", 'must be one string; write "3"'),
        ("gpus = [0, 1]", "gpus", 'must be one string; write "0"'),
        ("server_url = true", "server_url", "true ("),
        ("accept = {gpu-lost = true}", "accept", "must be one string"),
        ("require = ['gpu-lots']", "require", "did you mean gpu-lost?"),
        ("require = 'everything'", "require", "can be required"),
    ],
)
def test_a_decision_about_nothing_is_an_error(tmp_path: Path, toml: str, key: str, told: str) -> None:
    """A misspelt code or word must not silently leave a gate open, or closed."""
    with pytest.raises(ConfigError) as caught:
        read(toml, tmp_path=tmp_path)
    (problem,) = caught.value.problems
    assert problem.key == key
    assert told in problem.sentence


def test_a_file_that_anybody_may_write_is_told_of(tmp_path: Path) -> None:
    """So is one whose folder they may change; and what such a file says of the placement decides nothing."""
    tmp_path.chmod(0o755)
    loaded = read("placement = 'container'", tmp_path=tmp_path)
    assert (loaded.exposed, loaded.believable_placement()) == (None, Placement.CONTAINER)
    (tmp_path / "sidecar.toml").chmod(0o666)
    loaded = read("placement = 'container'", tmp_path=tmp_path)
    assert "sidecar.toml may be written by every user" in (loaded.exposed or "")
    assert loaded.believable_placement() is None
    assert read("", tmp_path=tmp_path, placement="host").believable_placement() is Placement.HOST
    (tmp_path / "sidecar.toml").chmod(0o644)
    tmp_path.chmod(0o777)
    assert f"{tmp_path} may be written" in (read("", tmp_path=tmp_path).exposed or "")
    assert read().exposed is None


def test_a_long_value_is_shortened() -> None:
    """An error stays readable whatever it repeats."""
    with pytest.raises(ConfigError) as caught:
        read(log_level="x" * 5000)
    assert len(caught.value.problems[0].sentence) < 250


def test_a_flag_that_takes_one_value_rejects_two() -> None:
    """Two values for one setting are a mistake that is told, not a silent choice."""
    assert "must be one string" in sentence(server_url=["http://a", "http://b"])


TEXTS = st.text(st.characters(codec="utf-8"), max_size=30)
VALUES = st.recursive(
    TEXTS | st.integers() | st.floats() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from([setting.key for setting in SETTINGS]), VALUES)
def test_no_value_of_any_type_escapes_as_another_error(key: str, value: Any) -> None:
    """Whatever stands in a file or variable: it is accepted or told as a problem of its key on one line."""
    try:
        read(**{key: value})
    except ConfigError as error:
        for problem in error.problems:
            assert problem.key.startswith(key)
            assert problem.sentence.startswith(problem.key)


# -- config show --------------------------------------------------------------------------------------


def test_show_text(tmp_path: Path) -> None:
    """The table has one line per setting with its value as one would write it, and its source."""
    loaded = read(listen=[":1", "[::1]:2"], intervals=["driver=10"], environ={"SGLANG_SIDECAR_COLOUR": "red"})
    lines = render(loaded, "text").splitlines()
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in lines[1:]}
    assert lines[0].split() == ["setting", "value", "source"]
    assert rows["listen"] == [":1,[::1]:2", "flag --listen"]
    assert rows["intervals"] == ["driver=10", "flag --intervals"]
    assert rows["server_pid"] == ["found", "default"]
    assert rows["import"] == ["auto", "default"]
    assert lines[-1].startswith("warning: SGLANG_SIDECAR_COLOUR: unknown variable")


def test_show_json() -> None:
    """JSON holds values in their own types and null where a value is left to be found out."""
    shown = json.loads(render(read(server_pid="42", listen=["[::1]:2"]), "json"))
    assert shown["settings"]["server_pid"] == {"value": 42, "source": "flag --server-pid"}
    assert shown["settings"]["listen"] == {"value": ["[::1]:2"], "source": "flag --listen"}
    assert shown["settings"]["placement"] == {"value": None, "source": "default"}
    assert list(shown["settings"]) == [setting.key for setting in SETTINGS]


def test_what_show_prints_can_be_given_back() -> None:
    """Each value that config show prints as text is accepted as a variable and means the same."""
    first = read(listen=["[::1]:2"], require=["cuda"], deadlines=["driver=0.5"], image="own", server_pid="9")
    shown = (line.split(maxsplit=2) for line in render(first, "text").splitlines()[1:])
    environ = {f"SGLANG_SIDECAR_{key.upper()}": value for key, value, source in shown if source != "default"}
    again = read(environ=environ)
    assert again.settings == first.settings


# -- settings of probes -------------------------------------------------------------------------------


def _megabytes(value: object) -> int:
    if not str(value).isdigit():
        raise ValueError("must be a number of megabytes")
    return int(str(value))


ROOM = Option(key="room_needed", default="64", doc="Room", metavar="MB", parse=_megabytes)


def _with_room(**more: Any) -> Loaded:
    values: dict[str, Any] = {"file": None, "environ": {}, "flags": {}, "probe_names": (), "allowed_requirements": ()}
    return load(**(values | more), declared=with_options((ROOM,)))


def test_a_probes_setting_has_every_layer(tmp_path: Path) -> None:
    """Default, file, variable and flag, each over the one before; and its source is told."""
    file = tmp_path / "a.toml"
    file.write_text("room_needed = 1\n")
    variable = {"SGLANG_SIDECAR_ROOM_NEEDED": "2"}
    flag = {"room_needed": "3"}
    loaded = [
        _with_room(),
        _with_room(file=file),
        _with_room(file=file, environ=variable),
        _with_room(file=file, environ=variable, flags=flag),
    ]
    assert [ROOM.of(one.settings) for one in loaded] == [64, 1, 2, 3]
    assert [one.sources["room_needed"].split(" ")[0] for one in loaded] == ["default", "file", "environment", "flag"]
    assert "room_needed          64                      default" in render(loaded[0], "text")
    assert json.loads(render(loaded[3], "json"))["settings"]["room_needed"]["value"] == 3
    assert "room_needed" in loaded[3].settings.explicit


def test_a_probes_setting_is_refused_with_its_own_words() -> None:
    """The sentence names key, value and source, as it does for the agent's own."""
    with pytest.raises(ConfigError) as caught:
        _with_room(flags={"room_needed": "much"})
    assert str(caught.value) == "room_needed: 'much' (flag --room-needed) must be a number of megabytes"


def test_without_the_probe_there_is_no_such_setting(tmp_path: Path) -> None:
    """What no probe declares is unknown, as any other key."""
    with pytest.raises(ConfigError, match="room_needed: unknown key"):
        read("room_needed = 1\n", tmp_path=tmp_path)
