"""Pods on this machine: what a kubelet and containerd make of a pod's specification, with buildah and runc.

A `Pod` takes the dictionary that a manifest holds and does with it what a node does: a sandbox with the pod's
network, processes shared or not, init containers one after another, native sidecars that stay, each container with
the user, capabilities, seccomp profile, limits and mounts that its specification comes to, and an end in the order of
the kubelet. A field that is not understood is an error, so that nothing in a manifest is passed over in silence. What
a node would pull or schedule is not there, nor is its network beyond loopback; probes are the test's business
(`tests.fakes.kubelet`).

Needs to be root, and the programs in `PROGRAMS`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import socketserver
import struct
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tests.fakes import agent

PROGRAMS = ("buildah", "podman", "runc", "debootstrap", "cc")
PACKAGES = ("buildah", "podman", "runc", "crun", "conmon", "uidmap", "netavark", "debootstrap", "gcc", "libc6-dev")
DEFAULT_CAPABILITIES = (
    "AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE", "NET_RAW",
    "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT",
)  # fmt: skip
"""What containerd gives a container that asks for nothing."""
_SECCOMP = Path("/usr/share/containers/seccomp.json")
_UNITS = {"Ki": 1024, "Mi": 1024**2, "Gi": 1024**3, "": 1}
_MASKED = (
    "/proc/asound", "/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list",
    "/proc/timer_stats", "/proc/sched_debug", "/proc/scsi", "/sys/firmware",
)  # fmt: skip
_READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
_PAUSE = """
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
static void end(int number) { (void)number; _exit(0); }
static void reap(int number) { (void)number; while (waitpid(-1, 0, WNOHANG) > 0) {} }
int main(void) {
    signal(SIGTERM, end); signal(SIGINT, end); signal(SIGCHLD, reap);
    for (;;) pause();
}
"""
"""Process 1 of a pod whose containers share their processes."""


def why_not() -> str | None:
    """What is missing for pods to run here, as a sentence; None where they can."""
    if os.geteuid() != 0:
        return "pods need root: containers are made and control groups are set"
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        packages = " ".join(PACKAGES)
        return f"pods need {', '.join(missing)}: apt-get install --no-install-recommends {packages}"
    status = Path("/proc/self/status").read_text()
    if int(re.findall(r"CapEff:\s+(\w+)", status)[0], 16) >> 21 & 1 == 0:
        return "pods need CAP_SYS_ADMIN, which this root has not: is this a container itself?"
    return None


def run(*command: str, timeout: float = 600, env: Mapping[str, str] | None = None) -> str:
    """Run a program; its standard output. Fails with the end of what it said."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, env=env)
    assert done.returncode == 0, f"{' '.join(command[:6])} ...: {(done.stdout + done.stderr)[-3000:]}"
    return done.stdout


@dataclass(slots=True)
class Images:
    """Images in a store of their own below ``folder``; leave the block to remove it."""

    folder: Path
    _lower: dict[str, Path] = field(default_factory=dict)

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "containers.conf").write_text(
            '[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]\nnetns = "none"\n'
            '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\n'
        )
        return self

    def __exit__(self, *_exc: object) -> None:
        with contextlib.suppress(AssertionError):
            self.tool("podman", "rm", "--all", "--force", "--time", "0")
        with contextlib.suppress(AssertionError):
            self.tool("buildah", "rm", "--all")
        # What is mounted there cannot be removed with the test's folder.
        for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
            target = line.split()[1]
            if target.startswith(f"{self.folder}/"):
                subprocess.run(["umount", "--lazy", target], check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    def command(self, program: str, *arguments: str) -> list[str]:
        """A command of buildah or podman on this store."""
        store = ["--root", str(self.folder / "store"), "--runroot", str(self.folder / "run")]
        return [program, *store, "--storage-driver", "overlay", *arguments]

    @property
    def environ(self) -> dict[str, str]:
        """The variables that such a command needs."""
        return os.environ | {"CONTAINERS_CONF": str(self.folder / "containers.conf")}

    def tool(self, program: str, *arguments: str, timeout: float = 900) -> str:
        """Run a command of buildah or podman on this store."""
        return run(*self.command(program, *arguments), env=self.environ, timeout=timeout)

    def build(self, name: str, dockerfile: Path, context: Path, **arguments: str) -> str:
        """Build an image; returns what was printed."""
        given = [word for key, value in arguments.items() for word in ("--build-arg", f"{key}={value}")]
        options = ["--isolation", "chroot", *given, "--tag", f"localhost/{name}", "--file", str(dockerfile)]
        return self.tool("buildah", "bud", *options, str(context))

    def take(self, name: str, folder: Path) -> None:
        """Make an image of a folder that holds a whole root."""
        file = folder.parent / f"{name}.Dockerfile"
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        file.write_text(f"FROM scratch\nCOPY {folder.name} /\nENV PATH={path}\n")
        self.build(name, file, folder.parent)

    def take_above(self, name: str, base: str, folder: Path, environ: Mapping[str, str]) -> None:
        """Make an image of another one with the files of a folder above it, and these variables."""
        file = folder.parent / f"{name}.Dockerfile"
        variables = "".join(f'ENV {key}="{value}"\n' for key, value in environ.items())
        file.write_text(f"FROM localhost/{base}\nCOPY {folder.name} /\n{variables}")
        self.build(name, file, folder.parent)

    def config(self, name: str) -> dict[str, Any]:
        """The configuration of an image: Entrypoint, Cmd, Env, User and so on."""
        found: dict[str, Any] = json.loads(self.tool("buildah", "inspect", "--type", "image", f"localhost/{name}"))
        return found["OCIv1"]["config"]  # type: ignore[no-any-return]  # JSON

    def size(self, name: str) -> int:
        """Bytes of an image with all its layers, unpacked."""
        listed = json.loads(self.tool("podman", "image", "inspect", f"localhost/{name}"))
        return int(listed[0]["Size"])

    def root(self, name: str) -> Path:
        """Where the files of an image are mounted; nobody may write there."""
        if name not in self._lower:
            container = self.tool("buildah", "from", "--pull-never", f"localhost/{name}").strip()
            self._lower[name] = Path(self.tool("buildah", "mount", container).strip())
        return self._lower[name]


@dataclass(slots=True, kw_only=True)
class Container:
    """A container of a pod. ``code`` is its exit status once it has ended, 128 and more for a signal."""

    name: str
    pid: int
    pid_file: Path
    log_path: Path
    process: subprocess.Popen[bytes]
    node: Path
    group: Path
    started: float
    ended: float | None = None

    @property
    def code(self) -> int | None:
        code = self.process.poll()
        if code is not None and self.ended is None:
            self.ended = time.monotonic()
        return code

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait(self, timeout: float) -> int:
        """Its exit status when it has ended by itself."""
        self.process.wait(timeout)
        code = self.code
        assert code is not None
        return code

    def kill(self, number: int) -> None:
        """Send its process 1, or what is in its place, a signal."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def exec(self, *command: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command in it, as ``kubectl exec`` does."""
        runc = ["runc", "--root", str(self.node), "exec", self.log_path.stem, *command]
        return subprocess.run(runc, capture_output=True, text=True, timeout=timeout, check=False)

    def memory(self, name: str) -> int:
        """A number of its memory control group, such as ``usage_in_bytes``."""
        return int((Path("/sys/fs/cgroup/memory") / self.group / f"memory.{name}").read_text())

    def resident(self) -> int:
        """Bytes that all its processes hold and share with nobody, and their part of what they share."""
        total = 0
        for pid in [self.pid, *agent.children(self.pid)]:
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{pid}/smaps_rollup").read_text()
                total += int(re.findall(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)[0]) * 1024
        return total


class FailedInitError(Exception):
    """An init container ended with another status than 0: the kubelet starts nothing behind it."""

    def __init__(self, container: Container) -> None:
        super().__init__(f"init container {container.name} ended with {container.code}: {container.log[-2000:]}")
        self.container = container


class Pod:
    """A pod of a manifest, as a context manager: leave the block to remove it at once, or `stop` it before.

    ``config_maps`` are those of the namespace by their names. ``nvidia`` is what the node's container runtime injects
    into a container with ``runtimeClassName: nvidia`` that asks for GPUs, by NVIDIA_VISIBLE_DEVICES or as a limit that
    a device plugin turns into that: folders and files of this machine by their paths in the container; ``variables``
    are set there, too. ``names`` says which image stands in for one of a registry.
    """

    def __init__(
        self,
        images: Images,
        manifest: Mapping[str, Any],
        folder: Path,
        *,
        config_maps: Mapping[str, Mapping[str, str]] | None = None,
        nvidia: Mapping[str, Path] | None = None,
        variables: Mapping[str, str] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        spec = dict(manifest["spec"])
        self.name = manifest["metadata"].get("name", "pod")
        self.containers: dict[str, Container] = {}
        self.stopped: list[str] = []
        self._images = images
        self._folder = folder
        self._node = folder / "runc"
        self._config_maps = config_maps or {}
        self._nvidia = nvidia or {}
        self._variables = variables or {}
        self._names = names or {}
        self._inits = list(spec.pop("initContainers", []))
        self._mains = list(spec.pop("containers"))
        self._shared = bool(spec.pop("shareProcessNamespace", False))
        self._security = dict(spec.pop("securityContext", {}))
        self._volumes = {one["name"]: one for one in spec.pop("volumes", [])}
        self._runtime_class = spec.pop("runtimeClassName", None)
        self._grace = float(spec.pop("terminationGracePeriodSeconds", 30))
        for name in ("automountServiceAccountToken", "restartPolicy", "enableServiceLinks"):
            spec.pop(name, None)
        assert not spec, f"fields of a pod that are not understood here: {sorted(spec)}"
        self._forwards: list[_Forward] = []
        self._mounted: list[Path] = []
        self._group = f"kubepods/pod{os.getpid()}-{time.monotonic_ns()}"

    # -- life

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True)
        self._make_volumes()
        self._sandbox = self._start_sandbox()
        return self

    def __exit__(self, *_exc: object) -> None:
        for forward in self._forwards:
            forward.close()
        for container in (*reversed(self.containers.values()), self._sandbox):
            name = container.log_path.stem
            self._delete(name)
            with contextlib.suppress(subprocess.TimeoutExpired):
                container.process.wait(10)
        for mounted in reversed(self._mounted):
            subprocess.run(["umount", "--lazy", str(mounted)], check=False)
        for controller in Path("/sys/fs/cgroup").iterdir():
            for group in sorted((controller / self._group).glob("*/"), reverse=True):
                with contextlib.suppress(OSError):
                    group.rmdir()
            for group in (controller / self._group, controller / "kubepods"):
                with contextlib.suppress(OSError):
                    group.rmdir()
        shutil.rmtree(self._folder / "roots", ignore_errors=True)

    def start(self, timeout: float = 120) -> None:
        """Start every container as the kubelet would; raises `FailedInitError` where an init container fails.

        A native sidecar counts as started as soon as it runs: with a startup probe, start it by `start_inits`.
        """
        self.start_inits(timeout)
        self.start_mains()

    def start_inits(self, timeout: float = 120) -> None:
        """Run the init containers one after another; those that restart always are left running."""
        for one in self._inits:
            container = self._start(one)
            if one.get("restartPolicy") != "Always" and container.wait(timeout) != 0:
                raise FailedInitError(container)

    def start_mains(self) -> None:
        """Start the containers proper."""
        for one in self._mains:
            self._start(one)

    def restart(self, name: str) -> Container:
        """Start a container of the specification again, in the same pod, when it has ended."""
        assert self.containers[name].code is not None, f"{name} still runs"
        self._delete(self._id(name))
        return self._start(next(one for one in (*self._inits, *self._mains) if one["name"] == name))

    def stop(self) -> float:
        """End the pod in the kubelet's order; the seconds that it took. ``stopped`` lists who ended, in that order.

        SIGTERM to the containers proper, all at once; when they have ended, to the native sidecars, the last one
        first; SIGKILL when the grace period of the whole pod is over.
        """
        begun = time.monotonic()
        deadline = begun + self._grace
        sidecars = [one["name"] for one in reversed(self._inits) if one.get("restartPolicy") == "Always"]
        groups = [[one["name"] for one in self._mains], *([name] for name in sidecars)]
        for names in groups:
            running = [self.containers[name] for name in names if self.containers[name].code is None]
            for container in running:
                container.kill(signal.SIGTERM)
            while running:
                ended = [container for container in running if container.code is not None]
                self.stopped += [container.name for container in ended]
                running = [container for container in running if container not in ended]
                if time.monotonic() > deadline:
                    for container in running:
                        container.kill(signal.SIGKILL)
                time.sleep(0.02)
        return time.monotonic() - begun

    def __getitem__(self, name: str) -> Container:
        return self.containers[name]

    # -- from outside

    def forward(self, port: int) -> str:
        """An address on this machine that leads to a port of the pod, as ``kubectl port-forward`` gives one."""
        forward = _Forward(self._sandbox.pid, port)
        self._forwards.append(forward)
        return forward.url

    def agent(self, name: str, port: int = 9477) -> agent.Served:
        """The agent in a container of this pod, when it listens."""
        container = self.containers[name]
        url = self.forward(port)
        end = time.monotonic() + 30
        while not _answers(url):
            assert container.code is None, f"{name} ended with {container.code}: {container.log}"
            assert time.monotonic() < end, container.log
            time.sleep(0.05)
        return agent.Served(process=container.process, url=url, log_path=container.log_path)

    # -- how

    def _id(self, name: str) -> str:
        return f"{self._group.rpartition('/')[2]}-{name}"

    def _delete(self, identifier: str) -> None:
        # Quiet: it warns of control groups that went with their last process.
        runc = ["runc", "--root", str(self._node), "delete", "--force", identifier]
        subprocess.run(runc, check=False, capture_output=True)

    def _make_volumes(self) -> None:
        for name, volume in self._volumes.items():
            kind = next(key for key in volume if key != "name")
            if kind == "hostPath":
                continue
            assert kind in {"emptyDir", "configMap"}, f"volume {name} is a {kind}"
            folder = self._folder / "volumes" / name
            folder.mkdir(parents=True)
            if kind == "configMap":
                source = volume[kind]
                data = self._config_maps.get(source["name"])
                assert data is not None or source.get("optional"), f"there is no configMap {source['name']}"
                for file, text in (data or {}).items():
                    (folder / file).write_text(text)
            folder.chmod(0o777 if kind == "emptyDir" else 0o755)
            if group := self._security.get("fsGroup"):
                os.chown(folder, -1, group)
                folder.chmod(0o2777)

    def _start_sandbox(self) -> Container:
        root = self._folder / "sandbox"
        root.mkdir()
        source = root / "pause.c"
        source.write_text(_PAUSE)
        run("cc", "-static", "-Os", "-o", str(root / "pause"), str(source))
        source.unlink()
        namespaces: list[dict[str, str]] = [{"type": kind} for kind in ("pid", "ipc", "uts", "network", "mount")]
        user = {"uid": 65535, "gid": 65535}
        process = {"args": ["/pause"], "env": [], "cwd": "/", "user": user, "noNewPrivileges": True}
        sandbox = self._run_container("sandbox", root, process, namespaces, [], limits={}, readonly=True)
        _in_network(sandbox.pid, _loopback_up)
        return sandbox

    def _start(self, one: Mapping[str, Any]) -> Container:
        given = dict(one)
        name = given.pop("name")
        image = given.pop("image")
        image = self._names.get(image, image).removeprefix("localhost/")
        config = self._images.config(image)
        security = self._security | dict(given.pop("securityContext", {}))
        environ = dict(word.split("=", 1) for word in config.get("Env") or [])
        environ |= {"HOSTNAME": self.name, "KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
        resources = given.pop("resources", {})
        if resources.get("limits", {}).get("nvidia.com/gpu"):
            environ["NVIDIA_VISIBLE_DEVICES"] = "all"
        for source in given.pop("envFrom", []):
            environ |= self._config_map(source.pop("configMapRef"))
            assert not source, f"variables of container {name} from {sorted(source)}"
        for variable in given.pop("env", []):
            if "value" in variable:
                environ[variable["name"]] = _expanded(variable["value"], environ)
                continue
            assert set(variable["valueFrom"]) == {"configMapKeyRef"}, f"variable {variable}"
            reference = variable["valueFrom"]["configMapKeyRef"]
            data = self._config_map(reference)
            assert reference["key"] in data or reference.get("optional"), f"variable {variable}"
            if reference["key"] in data:
                environ[variable["name"]] = data[reference["key"]]
        command = given.pop("command", None)
        words = given.pop("args", None)
        if command is None:
            command = config.get("Entrypoint") or []
            words = config.get("Cmd") or [] if words is None else words
        argv = [_expanded(word, environ) for word in (*command, *(words or ()))]
        mounts = given.pop("volumeMounts", [])
        folder = given.pop("workingDir", None) or config.get("WorkingDir") or "/"
        for key in ("imagePullPolicy", "ports", "restartPolicy", "terminationMessagePolicy"):
            given.pop(key, None)
        for key in ("livenessProbe", "readinessProbe", "startupProbe"):
            given.pop(key, None)
        assert not given, f"fields of container {name} that are not understood here: {sorted(given)}"
        wants_gpus = environ.get("NVIDIA_VISIBLE_DEVICES", "void") not in {"", "void"}
        injected = self._nvidia if wants_gpus and self._runtime_class == "nvidia" else {}
        environ |= self._variables if injected else {}
        uid, gid = self._user(name, security, config.get("User", ""))
        capabilities = _capabilities(security.pop("capabilities", {}))
        process = {
            "args": argv,
            "env": [f"{key}={value}" for key, value in environ.items()],
            "cwd": folder,
            "user": {"uid": uid, "gid": gid, "additionalGids": self._groups(security)},
            "noNewPrivileges": security.pop("allowPrivilegeEscalation", True) is False,
            # Neither ambient nor inheritable: a user that is not root keeps none of them when its program starts.
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
        }
        readonly = security.pop("readOnlyRootFilesystem", False)
        profile = security.pop("seccompProfile", {}).get("type", "Unconfined")
        assert profile in {"RuntimeDefault", "Unconfined"}, profile
        assert security.pop("privileged", False) is False, f"{name} asks to be privileged"
        for key in ("runAsUser", "runAsGroup", "runAsNonRoot", "fsGroup", "supplementalGroups"):
            security.pop(key, None)
        assert not security, f"security context of {name}, not understood here: {sorted(security)}"
        return self._run_container(
            name,
            self._writable(name, image),
            process,
            self._namespaces(),
            [*self._mounts(mounts), *(_bind(source, target) for target, source in injected.items())],
            limits=resources.get("limits", {}),
            readonly=readonly,
            seccomp=_seccomp(capabilities) if profile == "RuntimeDefault" else None,
        )

    def _config_map(self, reference: Mapping[str, Any]) -> Mapping[str, str]:
        data = self._config_maps.get(reference["name"])
        assert data is not None or reference.get("optional"), f"there is no configMap {reference['name']}"
        return data or {}

    def _user(self, name: str, security: Mapping[str, Any], image_user: str) -> tuple[int, int]:
        words = image_user.split(":")
        uid = security.get("runAsUser", int(words[0]) if words[0].isdigit() else 0 if words[0] in {"", "root"} else -1)
        assert uid >= 0, f"{name}: the image's user {words[0]!r} is a name, which runAsNonRoot cannot judge"
        assert uid or not security.get("runAsNonRoot"), f"{name} must not run as root, and its image says no other user"
        return uid, security.get("runAsGroup", int(words[1]) if len(words) > 1 and words[1].isdigit() else 0)

    def _groups(self, security: Mapping[str, Any]) -> list[int]:
        return [*security.get("supplementalGroups", []), *([security["fsGroup"]] if "fsGroup" in security else [])]

    def _namespaces(self) -> list[dict[str, str]]:
        shared = ["ipc", "uts", "net", *(["pid"] if self._shared else [])]
        joined = [
            {"type": "network" if kind == "net" else kind, "path": f"/proc/{self._sandbox.pid}/ns/{kind}"}
            for kind in shared
        ]
        return [{"type": "mount"}, *joined, *([] if self._shared else [{"type": "pid"}])]

    def _mounts(self, mounts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        found = []
        for mount in mounts:
            volume = self._volumes[mount["name"]]
            host = volume.get("hostPath")
            source = Path(host["path"]) if host else self._folder / "volumes" / mount["name"]
            source = source / mount.get("subPath", "")
            found.append(_bind(source, mount["mountPath"], writable=not mount.get("readOnly", False)))
        return found

    def _writable(self, name: str, image: str) -> Path:
        """A root of the container's own above the files of its image."""
        folder = self._folder / "roots" / f"{name}-{len(self._mounted)}"
        for part in ("upper", "work", "merged"):
            (folder / part).mkdir(parents=True)
        parts = f"lowerdir={self._images.root(image)},upperdir={folder}/upper,workdir={folder}/work"
        run("mount", "-t", "overlay", "overlay", "-o", parts, str(folder / "merged"))
        self._mounted.append(folder / "merged")
        return folder / "merged"

    def _run_container(
        self,
        name: str,
        root: Path,
        process: dict[str, Any],
        namespaces: list[dict[str, str]],
        mounts: list[dict[str, Any]],
        *,
        limits: Mapping[str, Any],
        readonly: bool,
        seccomp: dict[str, Any] | None = None,
    ) -> Container:
        bundle = self._folder / "bundles" / f"{name}-{len(self._mounted)}"
        bundle.mkdir(parents=True)
        resources: dict[str, Any] = {"devices": [{"allow": False, "access": "rwm"}]}
        if "memory" in limits:
            resources["memory"] = {"limit": quantity(limits["memory"]), "swap": quantity(limits["memory"])}
        if "cpu" in limits:
            resources["cpu"] = {"period": 100_000, "quota": int(cores(limits["cpu"]) * 100_000)}
        config = {
            "ociVersion": "1.0.2",
            "process": {"terminal": False, **process},
            "root": {"path": str(root), "readonly": readonly},
            "hostname": self.name if name == "sandbox" else "",
            "mounts": [*_STANDARD_MOUNTS, *mounts],
            "linux": {
                "namespaces": namespaces,
                "maskedPaths": list(_MASKED),
                "readonlyPaths": list(_READ_ONLY),
                "resources": resources,
                "cgroupsPath": f"/{self._group}/{name}",
                **({"seccomp": seccomp} if seccomp else {}),
            },
        }
        (bundle / "config.json").write_text(json.dumps(config))
        pid_file = bundle / "pid"
        log_path = bundle / f"{self._id(name)}.log"
        runc = ["runc", "--root", str(self._node), "run", "--bundle", str(bundle), "--pid-file", str(pid_file)]
        begun = time.monotonic()
        with log_path.open("wb") as log:
            runner = subprocess.Popen(
                [*runc, self._id(name)], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        end = time.monotonic() + 30
        while not (pid_file.exists() and pid_file.read_text()):
            said = log_path.read_text(errors="replace")
            assert runner.poll() is None, f"container {name} did not start ({runner.poll()}): {said}"
            assert time.monotonic() < end, f"container {name} did not start: {said}"
            time.sleep(0.01)
        container = Container(
            name=name,
            pid=int(pid_file.read_text()),
            pid_file=pid_file,
            log_path=log_path,
            process=runner,
            node=self._node,
            group=Path(self._group) / name,
            started=begun,
        )
        if name != "sandbox":
            self.containers[name] = container
        return container


_STANDARD_MOUNTS: list[dict[str, Any]] = [
    {"destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid", "noexec", "nodev"]},
    {
        "destination": "/dev",
        "type": "tmpfs",
        "source": "tmpfs",
        "options": ["nosuid", "strictatime", "mode=755", "size=65536k"],
    },
    {
        "destination": "/dev/pts",
        "type": "devpts",
        "source": "devpts",
        "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"],
    },
    {
        "destination": "/dev/shm",
        "type": "tmpfs",
        "source": "shm",
        "options": ["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"],
    },
    {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "noexec", "nodev", "ro"]},
    {
        "destination": "/sys/fs/cgroup",
        "type": "cgroup",
        "source": "cgroup",
        "options": ["nosuid", "noexec", "nodev", "relatime", "ro"],
    },
]
"""What containerd mounts in every container."""


def _bind(source: Path, target: str, *, writable: bool = False) -> dict[str, Any]:
    options = ["rbind", "rprivate", "rw" if writable else "ro"]
    return {"destination": target, "type": "bind", "source": str(source), "options": options}


def _capabilities(given: Mapping[str, Sequence[str]]) -> list[str]:
    dropped = set(given.get("drop", ()))
    kept = [name for name in DEFAULT_CAPABILITIES if "ALL" not in dropped and name not in dropped]
    return [f"CAP_{name}" for name in (*kept, *(one for one in given.get("add", ()) if one not in kept))]


def _seccomp(capabilities: Sequence[str]) -> dict[str, Any]:
    """The runtime's default profile for a container with these capabilities, in runc's form."""
    profile = json.loads(_SECCOMP.read_text())
    machine = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]

    def applies(rule: Mapping[str, Any]) -> bool:
        wanted, unwanted = rule.get("includes") or {}, rule.get("excludes") or {}
        if "arches" in wanted and machine not in wanted["arches"]:
            return False
        if any(name not in capabilities for name in wanted.get("caps", [])):
            return False
        return not any(name in capabilities for name in unwanted.get("caps", []))

    names = ("names", "action", "args", "errnoRet")
    rules = [{key: rule[key] for key in names if rule.get(key)} for rule in profile["syscalls"] if applies(rule)]
    architectures = {"amd64": ["SCMP_ARCH_X86_64"], "arm64": ["SCMP_ARCH_AARCH64"]}[machine]
    return {
        "defaultAction": profile["defaultAction"],
        "defaultErrnoRet": profile.get("defaultErrnoRet", 1),
        "architectures": architectures,
        "syscalls": rules,
    }


def quantity(text: str | int) -> int:
    """Bytes of a quantity of memory."""
    match = re.fullmatch(r"(\d+)(Ki|Mi|Gi|)", str(text))
    assert match is not None, text
    return int(match[1]) * _UNITS[match[2]]


def cores(text: str | float) -> float:
    """Cores of a quantity of CPU time."""
    return float(str(text).removesuffix("m")) / (1000 if str(text).endswith("m") else 1)


def _expanded(text: str, environ: Mapping[str, str]) -> str:
    """``$(NAME)`` replaced, as Kubernetes does in commands, arguments and variables."""
    return re.sub(r"\$\((\w+)\)", lambda match: environ.get(match[1], match[0]), text)


# -- the pod's network


def _in_network(pid: int, then: Any) -> None:
    """Call something in a thread that has entered the network of a process."""
    failed: list[BaseException] = []

    def enter() -> None:
        try:
            _enter(pid)
            then()
        except BaseException as error:  # noqa: BLE001 - it is raised below, where somebody sees it
            failed.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def _enter(pid: int) -> None:
    """Move this thread, and nothing else of this process, to the network of another process."""
    new_network = 0x40000000
    descriptor = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, new_network) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    finally:
        os.close(descriptor)


def _loopback_up() -> None:
    set_flags, up_and_running = 0x8914, 0x1 | 0x40
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sh14x", b"lo", up_and_running))


def _answers(url: str) -> bool:
    host, _, port = url.removeprefix("http://").partition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=1) as connection:
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: pod\r\nConnection: close\r\n\r\n")
            return connection.recv(8) != b""
    except OSError:
        return False


class _Forward(socketserver.ThreadingTCPServer):
    """Takes connections on loopback and hands them on to a port of a pod."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, pid: int, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.pid = pid
        self.port = port
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()

    def handle_error(self, *_what: object) -> None:
        """A pod that is gone refuses: the client sees its connection closed."""


class _Connection(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, _Forward)
        _enter(self.server.pid)
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=30) as inside:
            inside.settimeout(None)
            back = threading.Thread(target=_copy, args=(inside, self.request), daemon=True)
            back.start()
            _copy(self.request, inside)
            back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


# -- images that others would pull


def builder_root(folder: Path) -> Path:
    """A Debian with Python and pip, which trusts what this machine trusts: what images are built in."""
    root = folder / "builder"
    complete = folder / "builder.complete"
    if not complete.exists():
        shutil.rmtree(root, ignore_errors=True)
        include = "--include=python3-minimal,python3-pip,ca-certificates"
        run("debootstrap", "--variant=minbase", include, "bookworm", str(root), timeout=900)
        # Behind a proxy that has an authority of its own, pip needs it too.
        trusted = Path("etc/ssl/certs/ca-certificates.crt")
        shutil.copyfile("/" / trusted, root / trusted)
        complete.touch()
    return root


def runtime_root(builder: Path, folder: Path) -> Path:
    """The least that a program with glibc needs, as images without a distribution have it: no shell, no tools."""
    root = folder / "runtime"
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / "usr" / name).mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(f"usr/{name}")
    for package in ("libc6", "base-files", "tzdata"):
        (listed,) = [
            *builder.glob(f"var/lib/dpkg/info/{package}.list"),
            *builder.glob(f"var/lib/dpkg/info/{package}:*.list"),
        ]
        for line in listed.read_text().splitlines():
            source, target = builder / line.lstrip("/"), root / line.lstrip("/")
            if source.is_symlink() or source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                if not target.is_symlink() and not target.exists():
                    shutil.copy2(source, target, follow_symlinks=False)
            elif source.is_dir():
                target.mkdir(parents=True, exist_ok=True)
    (root / "tmp").chmod(0o1777)
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/sbin/nologin\n")
    return root
