"""The way from a scrape to whoever is told: real Prometheus, real Alertmanager, and a webhook that remembers.

Rules and routing are the shipped ones, with every duration divided: what takes minutes takes seconds. Divided are
``for``, ``keep_firing_for``, ranges and offsets of expressions, and Alertmanager's ``group_wait``, ``group_interval``
and ``repeat_interval``. Thresholds are not.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from tests.fakes.fleet import Service, alertmanager, prometheus, scrape_config

FOLDER = Path(__file__).parents[2] / "deploy" / "prometheus"
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_RANGE = re.compile(r"(?<=\[)(\d+)([smhd])(?=\])|(?<=offset )(\d+)([smhd])\b")


def seconds(duration: str) -> float:
    """A duration as Prometheus writes it, of one unit."""
    return float(duration[:-1]) * UNITS[duration[-1]]


def divided(duration: str, factor: float) -> str:
    """A duration, divided."""
    return f"{max(1, round(1000 * seconds(duration) / factor))}ms"


def scaled_rules(factor: float) -> dict[str, Any]:
    """The shipped rules, faster by a factor."""
    rules: dict[str, Any] = yaml.safe_load((FOLDER / "rules.yaml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            for name in ("for", "keep_firing_for"):
                if name in rule:
                    rule[name] = divided(rule[name], factor)
            rule["expr"] = _RANGE.sub(lambda found: divided(found[0], factor), rule["expr"])
    return rules


def scaled_routing(factor: float, url: str) -> dict[str, Any]:
    """The shipped routing, faster by a factor; every receiver is the webhook, under its own name."""
    config: dict[str, Any] = yaml.safe_load((FOLDER / "alertmanager.yaml").read_text())

    def scale(route: dict[str, Any]) -> None:
        for name in ("group_wait", "group_interval", "repeat_interval"):
            if name in route:
                route[name] = divided(route[name], factor)
        for child in route.get("routes", ()):
            scale(child)

    scale(config["route"])
    for receiver in config["receivers"]:
        receiver["webhook_configs"] = [{"url": f"{url}/{receiver['name']}", "send_resolved": True}]
    return config


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One alert in a notification. ``notification`` numbers the notifications, ``at`` is monotonic seconds."""

    notification: int
    at: float
    receiver: str
    status: str
    group: Mapping[str, str]
    labels: Mapping[str, str]
    annotations: Mapping[str, str]

    @property
    def name(self) -> str:
        """The alert's name."""
        return self.labels["alertname"]


@dataclass(slots=True)
class Webhook:
    """What was told so far, in order."""

    url: str = ""
    told: list[Told] = field(default_factory=list)
    notifications: int = 0

    def take(self, receiver: str, body: Mapping[str, Any]) -> None:
        """Remember a notification."""
        self.notifications += 1
        for alert in body["alerts"]:
            self.told.append(
                Told(
                    notification=self.notifications,
                    at=time.monotonic(),
                    receiver=receiver,
                    status=alert["status"],
                    group=body["groupLabels"],
                    labels=alert["labels"],
                    annotations=alert["annotations"],
                )
            )

    def firing(self) -> list[Told]:
        """Each alert that was told of, when that was for the first time."""
        first: dict[frozenset[tuple[str, str]], Told] = {}
        for one in list(self.told):
            if one.status == "firing":
                first.setdefault(frozenset(one.labels.items()), one)
        return list(first.values())

    def open(self) -> list[Told]:
        """Each alert that was told of and of whose end nothing was told."""
        last = {frozenset(one.labels.items()): one for one in list(self.told)}
        return [one for one in last.values() if one.status == "firing"]


@contextlib.contextmanager
def webhook() -> Iterator[Webhook]:
    """Listen on a free port of loopback."""
    remembered = Webhook()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            remembered.take(self.path.strip("/"), body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        remembered.url = f"http://127.0.0.1:{server.server_address[1]}"
        yield remembered
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """All that runs."""

    prometheus: Service
    alertmanager: Service
    webhook: Webhook

    def states(self) -> Iterator[tuple[str, Mapping[str, str]]]:
        """The state and labels of each alert that is pending or firing."""
        for one in self.prometheus.get("/api/v1/alerts")["data"]["alerts"]:
            yield one["state"], one["labels"]

    def until(self, done: Callable[[], object], *, patience: float = 30.0) -> None:
        """Wait for something. Raises AssertionError with what is known when it does not come."""
        end = time.monotonic() + patience
        while not done():
            said = [f"{one.status} {one.name} {dict(one.labels)}" for one in self.webhook.told]
            assert time.monotonic() < end, "\n".join(["it did not come; told so far:", *said, *map(str, self.states())])
            time.sleep(0.1)


@contextlib.contextmanager
def chain(
    folder: Path, targets: Sequence[Mapping[str, Any]], *, factor: float, interval: float, programs: str = ""
) -> Iterator[Chain]:
    """Run the chain for these targets.

    ``interval`` is that of scrapes and evaluations, in seconds. ``programs`` is what to put before the programs' names.
    """
    every = f"{round(1000 * interval)}ms"
    (folder / "targets.json").write_text(json.dumps(list(targets)))
    (folder / "rules.yaml").write_text(yaml.safe_dump(scaled_rules(factor)))
    with contextlib.ExitStack() as stack:
        heard = stack.enter_context(webhook())
        routing = scaled_routing(factor, heard.url)
        manager = stack.enter_context(alertmanager(folder, routing, program=f"{programs}prometheus-alertmanager"))
        config = {
            "global": {"scrape_interval": every, "evaluation_interval": every},
            "rule_files": [str(folder / "rules.yaml")],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [manager.url.removeprefix("http://")]}]}]},
            "scrape_configs": [scrape_config(folder / "targets.json", every)],
        }
        # Prometheus tells Alertmanager again at this interval, and with it for how long an alert stays.
        server = stack.enter_context(
            prometheus(folder, config, program=f"{programs}prometheus", flags=["--rules.alert.resend-delay=1s"])
        )
        yield Chain(prometheus=server, alertmanager=manager, webhook=heard)
