"""What probes share: the driver's last reading and how long it counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sidecar.config import Settings
from sidecar.services import driver_reading
from tests.builders import FakeClock
from tests.gpus import reading


class Stepped(FakeClock):
    """A machine whose clock on the wall is set anew."""

    step = 0.0

    def time(self) -> float:
        return self.now + self.step


@pytest.mark.parametrize("step", [0.0, 1e6, -1e6])
async def test_a_reading_ages_by_the_time_that_passes(step: float) -> None:
    """It counts for three intervals and a deadline, whatever the clock on the wall is set to meanwhile."""
    clock = Stepped()
    nvml = SimpleNamespace(latest=reading(), latest_at=clock.monotonic())
    services: Any = SimpleNamespace(clock=clock, nvml=nvml, settings=Settings())
    clock.step = step
    clock.now += 35
    assert await driver_reading(services) is nvml.latest
    clock.now += 1
    assert await driver_reading(services) is None
