"""What looks like a secret, and texts without any."""

from __future__ import annotations

import time

import pytest

from sidecar.redaction import is_secret, scrubbed, secrets_of

TOKEN = "x1" * 12


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PGPASS", "12345678"),
        ("DB_PASSWORD", "1234"),
        ("SGLANG_API_KEY", "123456"),
        ("SLACK_WEBHOOK", "marker"),
        ("HF_TOKEN", "marker"),
        ("SGLANG_URL", "postgres://user:pa/ss#word@host/db"),
        ("SGLANG_URL", "https://marker@host/simple"),
        ("SGLANG_URL", "https://host/model?sig=abcdef0123"),
        ("SGLANG_URL", "https://host/model?a=1&X-Amz-Signature=abcdef0123"),
        ("SGLANG_STORE", "AccountName=me;AccountKey=abcdef0123=="),
        ("SGLANG_ANY", f"hf_{TOKEN}"),
        ("SGLANG_ANY", f"Bearer {TOKEN}"),
        ("SGLANG_ANY", "eyJhbGciOi.eyJzdWIiOi.c2lnbmF0dXJl".replace("Oi", "OiJIUzI1")),
        ("SGLANG_ANY", "-----BEGIN PRIVATE " + "KEY-----\nx"),
    ],
)
def test_what_looks_like_a_secret(name: str, value: str) -> None:
    """By its name or by what is in it: a login or a signature in a URL, a well-known form of a token, a key."""
    assert is_secret(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        # What SGLang counts and switches by the word: not one of them may be kept from an import.
        ("SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION", "4096"),
        ("SGLANG_INIT_NEW_TOKEN_RATIO", "0.7"),
        ("SGLANG_PATCH_TOKENIZER", "True"),
        ("SGLANG_ENABLE_FAILED_SESSION_PROBE", ""),
        ("SGLANG_LOG_DECODE_GRAPH_KEY", "false"),
        ("PWD", "/home/me"),
        ("SGLANG_URL", "https://host/a@b"),
        ("FLASHINFER_CUBINS_REPOSITORY", "https://host/path?version=2"),
        ("AUTH_SERVICE_HOST", "10.0.0.1"),
        ("SGLANG_ANY", "hf_hub_download_and_more_of_it"),
    ],
)
def test_what_does_not(name: str, value: str) -> None:
    """Counts and switches, folders, addresses and names of functions are none."""
    assert not is_secret(name, value)


def test_secrets_leave_every_text() -> None:
    """Values of variables that look like secrets are replaced wherever they stand, cut ones at an end too."""
    secrets = secrets_of(
        {
            "HF_TOKEN": "hf_abcdefgh",
            "DB_URL": "postgres://me:p4ssword@host/db",
            "SHORT_KEY": "abc",
            "USE_AUTH": "true",
            "SSL_KEY_FILE": "/etc/ssl",
            "PWD": "/home/me",
        }
    )
    assert set(secrets) == {"hf_abcdefgh", "postgres://me:p4ssword@host/db", "p4ssword"}
    said = {"a hf_abcdefgh": ["x p4ssword true abc /etc/ssl /home/me", {"n": 1}]}
    assert scrubbed(said, secrets) == {"a ***": ["x *** true abc /etc/ssl /home/me", {"n": 1}]}
    assert scrubbed("x" * 100 + "hf_abcd", secrets) == "x" * 100 + "***"
    assert scrubbed("cdefgh" + "x" * 100, secrets) == "***" + "x" * 100


def test_what_is_nested_without_end_is_left_out() -> None:
    """An answer nested deeper than any honest one is cut, not followed."""
    value: object = "marker"
    for _ in range(500):
        value = [value]
    assert "marker" not in repr(scrubbed(value, ()))


def test_parts_of_a_secret_leave_every_text() -> None:
    """The password of a URL as code that takes it apart has it, each line of a key, the signature of an address."""
    secrets = secrets_of(
        {
            "A_URL": "postgres://me:p%40ssw0rd@host/db",
            "B_URL": "redis://:pa/ss@w0rd@host/0",
            "C_URL": "https://host/x?sig=abc%2Bdef",
            "PEM_KEY": "-----BEGIN X-----\nMIIabcdefghijkl\n-----END X-----",
            "D_DIR": "https://me:hidden1@host",
        }
    )
    said = "a p@ssw0rd b pa/ss@w0rd c abc+def d MIIabcdefghijkl e hidden1"
    assert scrubbed(said, secrets) == "a *** b *** c *** d *** e ***"


def test_logins_and_tokens_leave_every_text_wherever_they_come_from() -> None:
    """A login in a URL and a token of a well-known form are replaced although no variable holds them."""
    said = f"pip could not reach https://me:pw@host/simple (git+ssh://git@host/x) with hf_{TOKEN}, see user@host"
    assert scrubbed(said, ()) == (
        "pip could not reach https://***@host/simple (git+ssh://***@host/x) with ***, see user@host"
    )


def test_a_key_of_a_package_name_spares_the_texts() -> None:
    """Who chose the name of a package for a key has no secret, and texts that can be read."""
    secrets = secrets_of({"SGLANG_API_KEY": "sglang", "OTHER_KEY": "flashinfer"})
    assert scrubbed({"versions": {"flashinfer": "0.6"}}, secrets) == {"versions": {"flashinfer": "0.6"}}


def test_long_secrets_cost_little() -> None:
    """A variable as long as one can be, and texts that nearly begin or end with it, take no noticeable time."""
    secrets = secrets_of({"A_KEY": "k" * 131000, "B_KEY": "ab" * 60000, "C_KEY": "k" * 5000 + "y"})
    begun = time.monotonic()
    for said in ("x" * 6000, "k" * 6000, "ab" * 3000 + "x", "x" + "k" * 5999):
        assert len(scrubbed([said] * 10, secrets)) == 10
    assert time.monotonic() - begun < 10
