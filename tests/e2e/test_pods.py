"""The sidecar in pods that run for real, with users, capabilities, limits and mounts as Kubernetes gives them."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fakes.agent import Served
from tests.fakes.containers import FailedInitError, Images, Pod
from tests.fakes.kubelet import Kubelet, ask

pytestmark = [pytest.mark.pods, pytest.mark.timeout(900)]

MakePod = Callable[..., Pod]
MARKER = "SECRET-DO-NOT-EXPORT"
AGENT = "/opt/sglang-sidecar/bin/sglang-sidecar"
LAUNCH = ["--model-path", "/models/tiny", "--mamba-backend", "flashinfer", "--api-key", MARKER]
SITE = "/opt/sglang/lib/python3.11/site-packages"
OFTEN = [word for probe in ("server", "packages", "flashinfer") for word in ("--intervals", f"{probe}=2")]
URL = "http://127.0.0.1:30000"
USER = 10001
LEAST = {
    "capabilities": {"drop": ["ALL"]},
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}
"""What every variant of the sidecar asks for: no capability, and nothing to write to but its volumes."""
RESTRICTED = LEAST | {"runAsUser": USER, "runAsGroup": USER, "runAsNonRoot": True}
"""What the restricted level of pod security asks for, with the server's own user."""
AS_ROOT = LEAST | {"runAsUser": 0, "runAsGroup": 0}
WITH_PTRACE = {"capabilities": {"drop": ["ALL"], "add": ["SYS_PTRACE"]}}
TMP = {"name": "tmp", "mountPath": "/tmp"}


def sidecar(image: str, node: Any, security: dict[str, Any], *arguments: str, **more: Any) -> dict[str, Any]:
    """The sidecar's container: of its own image (``sidecar``) or in the server's (``overlaid``)."""
    container = {
        "name": "sidecar",
        "image": f"localhost/{image}",
        # Looked at more often than usual: the server starts after the sidecar.
        "command": [AGENT, "serve", "--server-url", URL, *OFTEN, *arguments],
        "env": [*node.asking, {"name": "SGLANG_SIDECAR_PORT", "value": "tcp://10.96.0.7:9477"}],
        "securityContext": security,
        "resources": {"limits": {"memory": "1536Mi"}},
        "volumeMounts": [TMP],
    }
    return container | more


def server(node: Any, security: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """The server's container; root with a container's usual capabilities unless told otherwise."""
    return {
        "name": "server",
        "image": "localhost/sglang",
        "command": ["python", "-m", "sglang.launch_server"],
        "args": LAUNCH,
        # A user without a home cannot run FlashInfer, which keeps a cache there.
        "env": [*node.asking, {"name": "HOME", "value": "/tmp"}, *more.pop("env", [])],
        "securityContext": security or {},
        "volumeMounts": [TMP],
    } | more


def pod(*containers: dict[str, Any], inits: list[dict[str, Any]] | None = None, **spec: Any) -> dict[str, Any]:
    """A manifest."""
    volumes = [{"name": "tmp", "emptyDir": {}}, *spec.pop("volumes", [])]
    rest = {"runtimeClassName": "nvidia", "volumes": volumes, **spec}
    return {"metadata": {"name": "tiny"}, "spec": {"initContainers": inits or [], "containers": [*containers], **rest}}


def native(container: dict[str, Any]) -> dict[str, Any]:
    """The same container as a native sidecar."""
    return container | {"restartPolicy": "Always"}


def module_until(served: Served, key: str, wanted: str, seconds: float = 30) -> dict[str, Any]:
    """What the report says of flashinfer.mamba, once it says this."""
    end = time.monotonic() + seconds
    while (module := (served.report()["modules"] or {}).get("flashinfer.mamba", {})).get(key) != wanted:
        assert time.monotonic() < end, module
        time.sleep(0.2)
    return module


# -- what each variant sees


@dataclass(frozen=True)
class Variant:
    """A way to stand beside a server, and what is seen from there.

    ``denied`` is the reason why the links of the server's process (root, maps, namespaces) may not be read, ``environ``
    the one for its variables, both None where they are read. ``imported`` says whether flashinfer.mamba was imported
    for real, None where it cannot even be looked for.
    """

    image: str
    shared: bool
    security: dict[str, Any]
    scope: str
    denied: str | None
    environ: str | None
    imported: bool | None
    of_server: dict[str, Any] = field(default_factory=dict)


VARIANTS = {
    "own-hidden": Variant("sidecar", False, LEAST, "self", None, "processes-hidden", None),
    "own-shared-another-user": Variant("sidecar", True, LEAST, "self", "other-user", "other-user", None),
    "own-shared-root": Variant("sidecar", True, AS_ROOT, "self", "no-sys-ptrace", "no-sys-ptrace", None),
    "own-shared-root-ptrace": Variant("sidecar", True, AS_ROOT | WITH_PTRACE, "server", None, None, False),
    "own-shared-user-ptrace": Variant(
        "sidecar",
        True,
        RESTRICTED | WITH_PTRACE,
        "self",
        "sys-ptrace-not-effective",
        "sys-ptrace-not-effective",
        None,
    ),
    "own-shared-same-user": Variant("sidecar", True, RESTRICTED, "server", None, None, False, RESTRICTED),
    "server-hidden": Variant("overlaid", False, LEAST, "image", None, "processes-hidden", True),
    "server-hidden-restricted": Variant(
        "overlaid", False, RESTRICTED, "image", None, "processes-hidden", True, RESTRICTED
    ),
    "server-shared-root": Variant("overlaid", True, LEAST, "image", "no-sys-ptrace", "no-sys-ptrace", True),
    "server-shared-root-ptrace": Variant("overlaid", True, LEAST | WITH_PTRACE, "image", None, None, True),
    "server-shared-restricted": Variant("overlaid", True, RESTRICTED, "image", None, None, True, RESTRICTED),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_each_variant_sees_what_it_may_and_says_why_not_the_rest(make_pod: MakePod, node: Any, name: str) -> None:
    """The process, the files, the variables and the import are there, or unknown with the reason of that variant.

    BishopFox/badPods#11, joe-elliott/netcore-kubernetes-profiling#2, iovisor/kubectl-trace#16
    """
    variant = VARIANTS[name]
    beside = native(sidecar(variant.image, node, variant.security))
    manifest = pod(server(node, variant.of_server), inits=[beside], shareProcessNamespace=variant.shared)
    made = make_pod(manifest)
    made.start()
    served = made.agent("sidecar")
    served.until("server_up", 1)
    served.until("nvml_up", 1)
    if variant.imported is not None:
        served.until("module_import_verified", int(variant.imported), module="flashinfer.mamba")
    report = served.report()
    found = report["server"]
    assert report["standing"]["placement"] == "container"
    assert report["standing"]["processes"] == ("shared" if variant.shared else "hidden")
    # HTTP is the same for all.
    assert (found["version"], found["mamba_backend"]) == ("0.5.16", "flashinfer")
    # So is the driver: its libraries are injected into whatever image.
    assert report["driver"]["driver_version"] == "580.159.04"
    assert served.value("ready") == 1
    # The process.
    assert (found["pid"] is not None) is variant.shared
    roles = {one["role"] for one in found["processes"] or []}
    assert roles == ({"main", "scheduler"} if variant.shared else set())
    assert {one["token"] for one in found["denied"]} == {
        reason for reason in (variant.denied, variant.environ) if reason and variant.shared
    }
    assert all(one["remedy"] for one in found["denied"])
    # Its files and variables.
    assert (found["scope"], found["environ"]) == (variant.scope, variant.environ or "readable")
    packages = report["environment"].get("flashinfer-python", {})
    assert (packages.get("value"), packages.get("scope")) == (
        (None, None) if variant.scope == "self" else ("0.6.14", variant.scope)
    )
    # The import: never through the root of another container.
    module = (report["modules"] or {}).get("flashinfer.mamba")
    assert (None if module is None else module["verified"]) is variant.imported
    if variant.imported is False:
        assert (module["importable"], module["why"]) == (True, "foreign-root")
    # Nothing is unknown without a reason, and nothing is broken.
    assert [one["code"] for one in report["conditions"] if one["status"] == "unknown" and not one["reason"]] == []
    served.scrape()
    active = served.labels("condition_active")
    assert [one for one in active if one["severity"] == "critical" and served.value("condition_active", **one)] == []
    for path in ("/report", "/metrics", "/"):
        assert MARKER not in served.get(path)[1]
    assert MARKER not in made["sidecar"].log


def test_the_own_image_needs_nothing_to_write_to(make_pod: MakePod, node: Any) -> None:
    """Without any volume, on a root that is read-only, the agent serves, and says nothing of it."""
    made = make_pod(pod(server(node), sidecar("sidecar", node, LEAST, volumeMounts=[])))
    made.start()
    served = made.agent("sidecar")
    served.until("server_up", 1)
    served.until("ready", 1)
    assert served.get("/readyz") == (200, "ok\n")
    assert "Errno" not in served.log
    assert "Traceback" not in served.log


def test_an_import_without_a_folder_to_write_to_is_unknown(make_pod: MakePod, node: Any) -> None:
    """In the server's image with a read-only root and no volume the import is not run, and nothing is called broken."""
    made = make_pod(pod(server(node), sidecar("overlaid", node, LEAST, volumeMounts=[])))
    made.start()
    served = made.agent("sidecar")
    served.until("server_up", 1)
    served.until("module_importable", 1, module="flashinfer.mamba")
    module = module_until(served, "why", "no-temporary-folder")
    assert (module["importable"], module["verified"]) == (True, False)
    assert served.get("/readyz") == (200, "ok\n")


# -- limits


def test_the_watchdog_ends_a_growing_import_before_the_limit(
    make_pod: MakePod, node: Any, tmp_path: Path, memory_counters: None
) -> None:
    """An import that grows without end is ended below the container's limit; the container is neither killed nor held.

    With control groups of version 1 the kernel kills one process, with those of version 2 Kubernetes has it kill the
    whole container: the watchdog is what keeps both from happening.
    """
    mamba = tmp_path / "mamba.py"
    mamba.write_text("import time\nkept = []\nwhile True:\n    kept.append(b'x' * (2 << 20))\n    time.sleep(0.004)\n")
    grows = {"name": "grows", "hostPath": {"path": str(mamba), "type": "File"}}
    over = {"name": "grows", "mountPath": f"{SITE}/flashinfer/mamba/__init__.py", "readOnly": True}
    beside = sidecar("overlaid", node, LEAST, volumeMounts=[TMP, over])
    made = make_pod(pod(server(node), beside, volumes=[grows]))
    made.start()
    served = made.agent("sidecar")
    with Kubelet(served.url + "/livez", initially=True, period=0.5, timeout=3, failure_threshold=6) as live:
        module_until(served, "evidence", "insufficient-memory", seconds=120)
    container = made["sidecar"]
    assert container.code is None
    limit, most = container.memory("limit_in_bytes"), container.memory("max_usage_in_bytes")
    assert limit == 1536 * 2**20
    assert 0.6 * limit < most < limit
    assert container.memory("failcnt") == 0
    assert (live.success, live.failed()) == (True, [])
    served.scrape()
    assert served.value("condition_active", code="flashinfer-import-failed") is None
    assert served.get("/readyz") == (200, "ok\n")


# -- preflight


def preflight(node: Any, **more: Any) -> dict[str, Any]:
    """An init container that judges the server's own command, environment and mounts before it starts."""
    command = [AGENT, "check", "--fail-on", "critical", "--", "python", "-m", "sglang.launch_server", *LAUNCH]
    container = sidecar("overlaid", node, LEAST)
    return container | {"name": "preflight", "command": command, "env": [*node.asking, *more.pop("env", [])]} | more


def test_the_preflight_lets_a_good_server_start(make_pod: MakePod, node: Any) -> None:
    """It ends with 0, and the server starts behind it."""
    made = make_pod(pod(server(node), inits=[preflight(node)]))
    made.start()
    assert made["preflight"].code == 0
    assert _comes_up(made)
    assert MARKER not in made["preflight"].log


def _comes_up(made: Pod) -> bool:
    url = made.forward(30000) + "/model_info"
    end = time.monotonic() + 30
    while not ask(url).passed:
        assert time.monotonic() < end, made["server"].log
        time.sleep(0.1)
    return True


BROKEN: dict[str, tuple[str, dict[str, Any]]] = {
    "a-variable": (
        "flashinfer-disabled-by-env",
        {"env": [{"name": "SGLANG_IS_FLASHINFER_AVAILABLE", "value": "false"}]},
    ),
    "no-gpu-asked-for": ("nvml-library-missing", {"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]}),
    "a-module": ("flashinfer-import-failed", {}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_preflight_blocks_a_start_that_would_fail(make_pod: MakePod, node: Any, tmp_path: Path, name: str) -> None:
    """It ends with 2 and names the one cause; the kubelet never starts the server."""
    code, more = BROKEN[name]
    volumes = []
    if name == "a-module":
        mamba = tmp_path / "mamba.py"
        mamba.write_text("import flashinfer_needs_this\n")
        volumes = [{"name": "broken", "hostPath": {"path": str(mamba), "type": "File"}}]
        over = {"name": "broken", "mountPath": f"{SITE}/flashinfer/mamba/__init__.py", "readOnly": True}
        more = {"volumeMounts": [TMP, over]}
    made = make_pod(pod(server(node), inits=[preflight(node, **more)], volumes=volumes))
    with pytest.raises(FailedInitError):
        made.start()
    assert made["preflight"].code == 2
    assert f"this launch would fail: {code}" in made["preflight"].log
    assert "server" not in made.containers
    assert MARKER not in made["preflight"].log


# -- the end


def test_a_native_sidecar_outlives_its_server(make_pod: MakePod, node: Any) -> None:
    """SIGTERM reaches the server first; while it drains the sidecar answers, and ends within 2 s once it is told."""
    drains = server(node, env=[{"name": "FAKE_DRAIN", "value": "3"}])
    made = make_pod(pod(drains, inits=[native(sidecar("sidecar", node, LEAST))]))
    made.start()
    served = made.agent("sidecar")
    served.until("server_up", 1)
    with Kubelet(served.url + "/livez", initially=True, period=0.2) as live:
        begun = time.monotonic()
        taken = made.stop()
    assert made.stopped == ["server", "sidecar"]
    assert (made["server"].code, made["sidecar"].code) == (0, 0)
    assert "server: ended" in made["server"].log
    drained = made["server"].ended
    ended = made["sidecar"].ended
    assert drained is not None
    assert ended is not None
    assert drained - begun >= 3
    assert ended - drained < 2
    assert taken < 30
    # It was alive for as long as the server was there.
    assert [one for one in live.failed() if one.at < drained - 0.5] == []


def test_a_sidecar_that_is_killed_takes_nothing_with_it(make_pod: MakePod, node: Any) -> None:
    """The server never notices; the one that is started in its place is ready as soon as it has looked."""
    made = make_pod(pod(server(node), inits=[native(sidecar("overlaid", node, LEAST))]))
    made.start()
    made.agent("sidecar").until("server_up", 1)
    made["sidecar"].kill(9)
    assert made["sidecar"].wait(10) == 137
    made.restart("sidecar")
    served = made.agent("sidecar")
    served.until("server_up", 1)
    served.until("ready", 1)
    assert made["server"].code is None
    assert _comes_up(made)


# -- a kubelet's probes


def test_a_slow_import_holds_up_neither_the_start_nor_the_server(make_pod: MakePod, node: Any, tmp_path: Path) -> None:
    """The startup probe of a native sidecar passes while its import goes on, so that the server may start.

    Case 53, NVIDIA/gpu-monitoring-tools#180
    """
    mamba = tmp_path / "mamba.py"
    busy = "import time\nend = time.monotonic() + 20\nwhile time.monotonic() < end: pass\n"
    mamba.write_text(f"{busy}from .selective_state_update import selective_state_update\n")
    slow = {"name": "slow", "hostPath": {"path": str(mamba), "type": "File"}}
    over = {"name": "slow", "mountPath": f"{SITE}/flashinfer/mamba/__init__.py", "readOnly": True}
    required = native(sidecar("overlaid", node, LEAST, "--import", "always", volumeMounts=[TMP, over]))
    made = make_pod(pod(server(node), inits=[required], volumes=[slow]))
    made.start_inits()
    begun = time.monotonic()
    served = made.agent("sidecar")
    with (
        Kubelet(served.url + "/startupz", initially=False, period=0.25, failure_threshold=100) as startup,
        Kubelet(served.url + "/livez", initially=True, period=0.25) as live,
    ):
        startup.until(True, seconds=10)
        # Now, and not before, the kubelet starts the server.
        made.start_mains()
        served.until("server_up", 1)
        served.scrape()
        assert served.value("module_import_verified", module="flashinfer.mamba") == 0
        assert time.monotonic() - begun < 20, "the import was over before the server was up"
        assert served.get("/readyz")[0] == 200
        served.until("module_import_verified", 1, module="flashinfer.mamba", seconds=90)
        assert live.failed() == []


@pytest.mark.parametrize(
    ("call", "behaviour", "code", "ready"),
    [
        ("nvmlDeviceGetCount", "hang", "driver-hung", True),
        ("nvmlInit", 18, "driver-library-mismatch", True),
        ("nvmlDeviceGetHandleByIndex", 15, "gpu-lost", False),
    ],
    ids=["hung", "mismatch", "lost"],
)
def test_no_state_of_the_driver_restarts_the_sidecar(
    make_pod: MakePod, node: Any, *, call: str, behaviour: str | int, code: str, ready: bool
) -> None:
    """Liveness passes whatever the driver does; readiness follows the gate of what was found.

    Case 46, NVIDIA/dcgm-exporter#393
    """
    fast = ("--intervals", "driver=0.5", "--deadlines", "driver=1", "--gpus", "0")
    made = make_pod(pod(server(node), sidecar("sidecar", node, LEAST, *fast)))
    made.start()
    served = made.agent("sidecar")
    served.until("server_up", 1)
    served.until("ready", 1)
    with (
        Kubelet(served.url + "/readyz", initially=False, period=0.25, timeout=3, failure_threshold=1) as readiness,
        Kubelet(served.url + "/livez", initially=True, period=0.25, timeout=3, failure_threshold=1) as live,
    ):
        readiness.until(True)
        node.driver.set({call: behaviour}, driver_generation=1)
        served.until("condition_active", 1, code=code)
        time.sleep(3)
        if not ready:
            readiness.until(False)
        assert readiness.success is ready
        node.driver.set({call: None}, driver_generation=2)
        served.until("condition_active", 0, code=code, seconds=30)
        readiness.until(True)
        assert live.failed() == []
        assert len(live.attempts) > 10
    assert made["sidecar"].code is None


# -- the manifests


EXAMPLE = Path(__file__).parents[2] / "deploy/kubernetes/example"


def rendered() -> tuple[dict[str, Any], dict[str, dict[str, str]]]:
    """The pod of the example and the configMaps beside it, as kubectl renders them."""
    kubectl = shutil.which("kubectl")
    if kubectl is None or not EXAMPLE.exists():
        pytest.skip("there is no kubectl to render the example with" if EXAMPLE.exists() else "there is no example")
    done = subprocess.run([kubectl, "kustomize", str(EXAMPLE)], capture_output=True, text=True, check=True)
    documents = [one for one in yaml.safe_load_all(done.stdout) if one]
    (deployment,) = [one for one in documents if one["kind"] == "Deployment"]
    maps = {one["metadata"]["name"]: one.get("data", {}) for one in documents if one["kind"] == "ConfigMap"}
    return deployment["spec"]["template"], maps


def probe(made: Pod, manifest: dict[str, Any], kind: str) -> Kubelet:
    """A probe of the sidecar's container as its manifest wants it."""
    (container,) = [one for one in manifest["spec"]["initContainers"] if one["name"] == "sglang-sidecar"]
    wanted = container[kind]
    return Kubelet(
        made.forward(9477) + wanted["httpGet"]["path"],
        initially=kind == "livenessProbe",
        period=min(wanted["periodSeconds"], 0.5),
        timeout=wanted["timeoutSeconds"],
        failure_threshold=wanted["failureThreshold"],
    )


def test_the_example_runs_as_it_is_rendered(make_pod: MakePod, node: Any) -> None:
    """Its preflight and its probes pass, its sidecar sees what the server's user may, and it ends in order."""
    manifest, maps = rendered()
    images = {one["image"] for one in (*manifest["spec"]["initContainers"], *manifest["spec"]["containers"])}
    made = make_pod(manifest, config_maps=maps, names=dict.fromkeys(images, "localhost/overlaid"))
    made.start()
    assert made["sglang-preflight"].code == 0
    served = made.agent("sglang-sidecar")
    with probe(made, manifest, "readinessProbe") as ready, probe(made, manifest, "livenessProbe") as live:
        served.until("server_up", 1, seconds=60)
        served.until("module_import_verified", 1, module="flashinfer.mamba", seconds=60)
        ready.until(True)
        report = served.report()
        assert report["standing"] == report["standing"] | {"placement": "container", "processes": "shared"}
        assert (report["server"]["scope"], report["server"]["environ"]) == ("image", "readable")
        assert report["server"]["denied"] == []
        served.scrape()
        assert served.value("nvml_up") == 1
        assert served.value("baseline_loaded") == 1
        assert ready.failed(since=ready.results[0][0]) == []
        assert live.failed() == []
    assert made.stop() < 60
    assert made.stopped == ["sglang", "sglang-sidecar"]


# -- another implementation


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def test_podman_plays_the_same_pod(images: Images, tmp_path: Path) -> None:
    """``podman play kube`` takes the manifest too: preflight, shared processes, no capability, a probe by exec."""
    ours, theirs = _free_port(), _free_port()
    url = f"http://127.0.0.1:{theirs}"
    launch = ["python", "-m", "sglang.launch_server", *LAUNCH, "--port", str(theirs)]
    # podman hands the words of a probe to a shell, unquoted.
    (tmp_path / "probe.py").write_text(
        f"import urllib.request\nurllib.request.urlopen('http://127.0.0.1:{ours}/livez', timeout=3)\n"
    )
    asks = {"name": "probe", "hostPath": {"path": str(tmp_path / "probe.py"), "type": "File"}}
    probe = {"exec": {"command": ["/opt/sglang-sidecar/bin/python", "-I", "/probe.py"]}, "periodSeconds": 10}
    security = {key: value for key, value in LEAST.items() if key != "seccompProfile"}
    check = ["check", "--fail-on", "critical", "--severity", "nvml-library-missing=warning", "--", *launch]
    common = {"imagePullPolicy": "Never", "securityContext": security, "volumeMounts": [TMP]}
    limits = {"limits": {"memory": "1536Mi"}}
    serve = ["serve", "--listen", f"127.0.0.1:{ours}", "--server-url", url]
    manifest = {
        "apiVersion": "v1",
        "kind": "Pod",
        # podman would remove an init container at once, and fails at it where that takes a moment.
        "metadata": {"name": "played", "annotations": {"io.podman.annotations.init.container.type": "always"}},
        "spec": {
            "hostNetwork": True,
            "shareProcessNamespace": True,
            "initContainers": [
                {"name": "preflight", "image": "localhost/overlaid", "command": [AGENT, *check], **common}
            ],
            "containers": [
                {"name": "server", "image": "localhost/sglang", "imagePullPolicy": "Never", "command": launch},
                {
                    "name": "sidecar",
                    "image": "localhost/overlaid",
                    "command": [AGENT, *serve],
                    "resources": limits,
                    "livenessProbe": probe,
                    **common,
                    "volumeMounts": [TMP, {"name": "probe", "mountPath": "/probe.py"}],
                },
            ],
            "volumes": [{"name": "tmp", "emptyDir": {}}, asks],
        },
    }
    file = tmp_path / "pod.yaml"
    file.write_text(json.dumps(manifest))
    try:
        images.tool("podman", "play", "kube", str(file))
        log = tmp_path / "log"
        served = Served(process=_Running(), url=f"http://127.0.0.1:{ours}", log_path=log)  # type: ignore[arg-type]
        log.write_text("")
        end = time.monotonic() + 60
        while not ask(served.url + "/livez").passed:
            assert time.monotonic() < end, images.tool("podman", "logs", "played-sidecar")
            time.sleep(0.2)
        served.until("server_up", 1)
        served.until("module_import_verified", 1, module="flashinfer.mamba")
        report = served.report()
        assert report["standing"]["processes"] == "shared"
        assert (report["server"]["scope"], report["server"]["environ"]) == ("image", "no-sys-ptrace")
        for _ in range(3):
            images.tool("podman", "healthcheck", "run", "played-sidecar")
    finally:
        subprocess.run(
            images.command("podman", "play", "kube", "--down", str(file)),
            env=images.environ,
            check=False,
            capture_output=True,
        )


class _Running:
    """In the place of a process that podman looks after."""

    def poll(self) -> None:
        return None
