"""Reducing a server's own description to what may be kept, whatever arrives."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.serverinfo import PROBLEMS, Problem, ServerInfo, parse_info, public_url
from tests.fakes.sglang import CAPTURES, MARKER

RECORDED = sorted(path.parent.name for path in CAPTURES.glob("*/server_info.json"))
GPU = {"device": "cuda", "sampling_backend": "flashinfer", "disable_cuda_graph": True, "skip_server_warmup": False}
EXPECTED: dict[str, dict[str, object]] = {
    "0.5.16": {
        "device": "cpu",
        "attention_backend": "torch_native",
        "mamba_backend": "triton",
        "sampling_backend": "pytorch",
        "disable_cuda_graph": False,
        "skip_server_warmup": True,
    },
    "0.5.16-h200-fa3": GPU | {"attention_backend": "fa3", "mamba_backend": "triton", "skip_server_warmup": True},
    "0.5.16-h200-fa4": GPU | {"attention_backend": "fa4", "mamba_backend": "triton"},
    "0.5.16-h200-fa4-fa3-hybrid": GPU
    | {
        "attention_backend": "fa3",
        "prefill_attention_backend": "fa4",
        "decode_attention_backend": "fa3",
        "mamba_backend": "flashinfer",
    },
}


def parse(payload: object) -> ServerInfo | Problem:
    return parse_info(json.dumps(payload).encode())


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_answers_are_read_and_their_key_dropped(name: str) -> None:
    """Each recorded answer gives its resolved arguments; the key that it carries is nowhere in the result."""
    body = (CAPTURES / name / "server_info.json").read_bytes()
    info = parse_info(body)
    assert info == ServerInfo(
        version="0.5.16",
        tp_size=1,
        dp_size=1,
        pp_size=1,
        nnodes=1,
        node_rank=0,
        base_gpu_id=0,
        gpu_id_step=1,
        enable_dp_attention=False,
        page_size=info.page_size if isinstance(info, ServerInfo) else None,
        kv_cache_dtype="auto",
        enable_mamba_cache_stochastic_rounding=False,
        mamba_cache_philox_rounds=0,
        moe_runner_backend="auto",
        linear_attn_backend="triton",
        speculative_attention_mode="prefill",
        enable_deterministic_inference=False,
        **EXPECTED[name],  # type: ignore[arg-type]  # each has its field's type
    )
    assert MARKER not in repr(info)
    assert (MARKER.encode() in body) is (name == "0.5.16")


def test_the_scheduler_knows_better_than_the_launcher() -> None:
    """Releases before 0.5.4 show flags as typed at the top and the resolved backend in internal_states."""
    info = parse({"version": "0.5.2", "attention_backend": None, "internal_states": [{"attention_backend": "fa3"}]})
    assert isinstance(info, ServerInfo)
    assert (info.version, info.attention_backend) == ("0.5.2", "fa3")


@pytest.mark.parametrize("states", [None, {}, [], "x", [1], [None], [[]], {"0": {}}])
def test_an_odd_internal_state_costs_only_itself(states: object) -> None:
    """Whatever shape the scheduler's states have, the top level is still read."""
    info = parse({"version": "0.5.16", "attention_backend": "fa3", "internal_states": states})
    assert isinstance(info, ServerInfo)
    assert info.attention_backend == "fa3"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tp_size", "2"),
        ("tp_size", True),
        ("tp_size", -1),
        ("tp_size", 1e3),
        ("tp_size", 10**30),
        ("device", 5),
        ("device", "x" * 65),
        ("device", "cu\nda"),
        ("device", "cüda"),
        ("device", ""),
        ("device", ["cuda"]),
        ("enable_mamba_cache_stochastic_rounding", 1),
    ],
)
def test_a_value_of_the_wrong_kind_is_left_out(field: str, value: object) -> None:
    """Each value is checked alone: a wrong type, an absurd length or strange characters cost that value only."""
    info = parse({"version": "0.5.16", field: value})
    assert isinstance(info, ServerInfo)
    assert getattr(info, field) is None
    assert info.version == "0.5.16"


@pytest.mark.parametrize(
    ("value", "kept"), [(2, 2), ("2", "2"), ("fa2", "fa2"), (True, None), (2.5, None), ("a b", None), ([3], None)]
)
def test_a_plugins_version_is_kept_as_number_or_name(value: object, kept: object) -> None:
    """`fa_impl_ver` is no argument of SGLang's own; a plugin's is read in either shape (sgl-project/sglang#22028)."""
    for payload in ({"fa_impl_ver": value}, {"internal_states": [{"fa_impl_ver": value}]}):
        info = parse({"version": "0.5.16"} | payload)
        assert isinstance(info, ServerInfo)
        assert info.fa_impl_ver == kept


def test_a_flag_as_typed_counts_where_the_scheduler_is_silent() -> None:
    """Before 0.5.4 the scheduler's view lacks most arguments; what the launcher was given stands at the top."""
    info = parse({"version": "0.5.2", "sampling_backend": "pytorch", "internal_states": [{"attention_backend": "fa3"}]})
    assert isinstance(info, ServerInfo)
    assert (info.sampling_backend, info.attention_backend) == ("pytorch", "fa3")


@pytest.mark.parametrize(
    ("body", "token"),
    [
        (b"", "not-json"),
        (b"<html><body>Bad gateway</body></html>", "not-json"),
        (b"\xff\xfe\x00", "not-json"),
        (b'{"version": "0.5.16"', "not-json"),
        (b'{"version": "\xff"}', "not-json"),
        (b"[" * 1_000_000, "not-sglang"),
        (b'{"a":' * 1_000_000, "not-json"),
        (b"[]", "not-sglang"),
        (b"null", "not-sglang"),
        (b'"0.5.16"', "not-sglang"),
        (b'{"status": "ok"}', "not-sglang"),
    ],
)
def test_what_is_no_server_information_is_named(body: bytes, token: str) -> None:
    """Pages, garbage, absurd nesting and other services' JSON each give a token and a sentence, never an exception."""
    problem = parse_info(body)
    assert isinstance(problem, Problem)
    assert problem.token == token
    assert problem.sentence.endswith(".")
    assert token in PROBLEMS


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30) | st.just(MARKER + "!"),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["internal_states", "api_key", "launch_command", *ServerInfo.__struct_fields__]), inner
        )
    ),
    max_leaves=20,
)


@given(JSON.map(json.dumps).map(str.encode))
def test_arbitrary_information_is_reduced(body: bytes) -> None:
    """Whatever JSON arrives, each kept value is short and of a plain type, and no key is among them."""
    info = parse_info(body)
    assert MARKER not in repr(info)
    if isinstance(info, ServerInfo):
        for name in ServerInfo.__struct_fields__:
            value = getattr(info, name)
            assert value is None or isinstance(value, int) or (isinstance(value, str) and len(value) <= 64)


@given(
    st.binary(max_size=200)
    | st.recursive(st.none() | st.text() | st.integers(), st.lists).map(json.dumps).map(str.encode)
)
def test_no_body_is_an_error(body: bytes) -> None:
    """Parsing is total."""
    assert isinstance(parse_info(body), ServerInfo | Problem)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://127.0.0.1:30000", "http://127.0.0.1:30000"),
        (f"https://user:{MARKER}@host:1/x?key={MARKER}#{MARKER}", "https://host:1/x"),
        ("http://[::1]:30000/", "http://[::1]:30000/"),
        ("http://[", "(invalid URL)"),
    ],
)
def test_a_url_is_shown_without_credentials(url: str, shown: str) -> None:
    """User, password, query and fragment may hold secrets and are never shown."""
    assert public_url(url) == shown


def test_every_capture_has_its_expectation() -> None:
    """A new recording fails until what is expected of it is written down."""
    assert set(RECORDED) == set(EXPECTED)
