"""Which variables a child gets, and which are told to be missing."""

from __future__ import annotations

import json

import pytest

from sidecar.childenv import child_environment, may_matter, server_environment, withheld


def test_of_a_servers_environment_only_what_can_matter_is_let_through() -> None:
    """However a secret is named, it does not reach code that could quote it; what decides an import does."""
    kept = {
        "PATH": "/bin",
        "PYTHONPATH": "/x",
        "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
        "FLASHINFER_CUDA_ARCH_LIST": "9.0",
    }
    secret = dict.fromkeys(
        ("DB_URL", "MYSQL_PWD", "PGPASS", "SLACK_WEBHOOK", "HTTPS_PROXY", "SGLANG_API_KEY"), "marker"
    )
    assert server_environment(kept | secret | {"LD_AUDIT": "marker"}) == kept


@pytest.mark.parametrize(
    "name",
    [
        "SGLANG_DB_PWD",
        "SGLANG_PASSPHRASE",
        "NVIDIA_NGC_APIK",
        "SGLANG_BEARER",
        "SGLANG_SESSION",
        "SGLANG_DB_PASS",
        "SGLANG_CREDS",
        "XDG_ANYTHING",
        "TRANSFORMERS_ANYTHING",
    ],
)
def test_secrets_are_told_by_many_names(name: str) -> None:
    """Whatever a secret is called behind a prefix that is let through, it is held back."""
    assert server_environment({name: "marker", "PWD": "/x"}) == {"PWD": "/x"}


@pytest.mark.parametrize("value", ["redis://:marker@host/0", "https://user:marker@host/simple", "https://marker@host"])
def test_a_url_with_a_password_is_a_secret(value: str) -> None:
    """A URL that holds a user's name or password is held back under any name; one without is not."""
    assert server_environment({"PYTHON_INDEX_URL": value, "SGLANG_HOST": "https://host/a@b"}) == {
        "SGLANG_HOST": "https://host/a@b"
    }


def test_a_childs_environment_has_no_secrets_and_no_hooks() -> None:
    """Names that look like secrets, preloads and the metrics library's directory are dropped."""
    given = {
        "PATH": "/bin",
        "LD_LIBRARY_PATH": "/lib",
        "SGLANG_API_KEY": "marker",
        "HF_TOKEN": "marker",
        "DB_PASSWORD": "marker",
        "aws_secret_access": "marker",
        "LD_PRELOAD": "marker",
        "PROMETHEUS_MULTIPROC_DIR": "marker",
        "SGLANG_SIDECAR_LISTEN": "marker",
    }
    kept = child_environment(given, {"HOME": "/tmp/x"})
    assert kept == {"PATH": "/bin", "LD_LIBRARY_PATH": "/lib", "HOME": "/tmp/x"}
    assert "marker" not in json.dumps(kept)


SERVICES = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "KUBERNETES_SERVICE_PORT_HTTPS": "443",
    "KUBERNETES_PORT": "tcp://10.0.0.1:443",
    "AUTH_TOKEN_STORE_PORT_6379_TCP": "tcp://[fd00::1]:6379",
    "AUTH_TOKEN_STORE_PORT_6379_TCP_PROTO": "tcp",
    "AUTH_TOKEN_STORE_SERVICE_HOST": "fd00::1",
}


def test_what_kubernetes_tells_of_services_is_let_through() -> None:
    """Every container has such variables; they are no secrets, whatever a service is called, and none is missed."""
    assert server_environment(SERVICES) == SERVICES
    assert withheld(SERVICES) == ()
    odd = {"AUTH_SERVICE_HOST": "marker-in-place-of-an-address", "AUTH_TOKEN_PORT": "s3cr3t"}
    assert server_environment(odd) == {}
    assert withheld(odd) == ("AUTH_SERVICE_HOST", "AUTH_TOKEN_PORT")


def test_what_no_import_heeds_is_not_missed() -> None:
    """Named are variables that could matter: not a shell's, not an interactive interpreter's, not the agent's own."""
    given = {
        "SHLVL": "1",
        "PYTHONSTARTUP": "/x",
        "SGLANG_SIDECAR_LISTEN": ":1",
        "BASH_FUNC_x%%": "() { :; }",
        "PATH": "/bin",
        "LD_PRELOAD": "/libtcmalloc.so",
        "MY_VARIABLE": "1",
        "SGLANG_API_KEY": "marker",
    }
    assert withheld(given) == ("LD_PRELOAD", "MY_VARIABLE", "SGLANG_API_KEY")


def test_a_variable_is_known_by_its_name() -> None:
    """Whether one is let through can be told before its value is known; a shell's own folder is not asked for."""
    assert [
        name for name in ("PYTHONPATH", "LD_PRELOAD", "HF_TOKEN", "PWD", "MASTER_ADDR", "X") if may_matter(name)
    ] == [
        "PYTHONPATH",
        "LD_PRELOAD",
        "MASTER_ADDR",
    ]
