"""What a probe's ``collect`` may use: the agent's edges to the outside, passed in so that tests own them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sidecar.config import Settings
from sidecar.environment import Environment
from sidecar.isolation import Isolation
from sidecar.model import Clock, Standing
from sidecar.nvml.client import NvmlClient
from sidecar.serverinfo import ServerClient
from sidecar.target import TargetFinder


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """One per agent. ``wake(probe)`` asks the scheduler to run a probe now, for late results.

    ``memory`` is where a probe keeps what it must remember from one round to the next, under its own name.
    """

    settings: Settings
    clock: Clock
    standing: Standing
    isolation: Isolation
    nvml: NvmlClient
    targets: TargetFinder
    server: ServerClient
    environment: Environment
    wake: Callable[[str], None]
    memory: dict[str, object] = field(default_factory=dict)
