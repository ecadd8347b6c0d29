"""What the driver's Xid codes mean, after NVIDIA's public Xid catalogue, in our own words. A table and a look-up.

An Xid is an event, and most of them are the fault of a program: a code alone never proves broken hardware. The
table sorts them into what concerns only the program that met it, what the GPU contained and repaired, what means
that the GPU must not be trusted until it was reset or replaced, and what merely accompanies another report.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from msgspec import Struct


class XidClass(StrEnum):
    """How far an Xid reaches."""

    APPLICATION = "application"
    """The program did something wrong, or was ended: counted, never a condition."""
    CONTAINED = "contained"
    """The driver or the GPU handled an error of the hardware: a warning."""
    HARDWARE = "hardware"
    """The GPU cannot be trusted before it was reset or replaced: critical."""
    INFORMATION = "information"
    """Says nothing by itself, or repeats what is judged elsewhere: counted, never a condition."""
    UNLISTED = "unlisted"
    """Not in this table: a warning, since a new code may be anything."""


class XidReason(StrEnum):
    """What kind of trouble a condition about Xids is about: its reason."""

    FELL_OFF_BUS = "fell-off-bus"
    MEMORY = "memory"
    NVLINK = "nvlink"
    FIRMWARE = "firmware"
    ENGINE = "engine"
    POWER = "power"
    RETIREMENT = "retirement"
    UNLISTED = "unlisted"


class Xid(Struct, frozen=True):
    """One code: what happened, how far it reaches, and one action. ``reason`` is None where it is no condition."""

    meaning: str
    kind: XidClass
    action: str
    reason: XidReason | None = None

    @property
    def resets(self) -> bool:
        """Whether the action is to reset this one GPU, for which there is a command."""
        return self.action in (_RESET, _CONVENIENT)


_RESTART: Final = "restart the program that met it; look for its bug if it returns"
_NOTHING: Final = "nothing; look at what else is reported at that moment"
_RESET: Final = "drain the node and reset the GPU; replace it if it returns"
_CONVENIENT: Final = "let the work finish, then reset the GPU"
_POWER_CYCLE: Final = (
    "drain the node and power-cycle it; check power, cooling and seating, and replace the GPU if it returns"
)


def _application(meaning: str) -> Xid:
    return Xid(meaning, XidClass.APPLICATION, _RESTART)


def _information(meaning: str) -> Xid:
    return Xid(meaning, XidClass.INFORMATION, _NOTHING)


def _contained(meaning: str, reason: XidReason, action: str = _CONVENIENT) -> Xid:
    return Xid(meaning, XidClass.CONTAINED, action, reason)


def _hardware(meaning: str, reason: XidReason, action: str = _RESET) -> Xid:
    return Xid(meaning, XidClass.HARDWARE, action, reason)


_COPY_ENGINES: Final = (39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136))
_DECODERS: Final = (68, 83, 84, 88, 89, 96, 97, 98)
_JPEG_ENGINES: Final = (82, *range(99, 106))
_NVLINK_5: Final = (144, 145, 146, 149, 150)

XIDS: Final[Mapping[int, Xid]] = MappingProxyType(
    {
        8: _application("a channel made no progress in time"),
        11: _application("a program sent an invalid stream of commands"),
        13: _application("a kernel raised an exception, such as an access out of bounds"),
        14: _information("a report without a fault"),
        25: _application("a program sent an illegal notification"),
        31: _application("a program accessed memory that is not mapped"),
        32: _application("a program's stream of commands is corrupted"),
        37: _application("a program used a command that the firmware does not know"),
        38: _information("the context switch was slow"),
        43: _application("a program's channel was stopped after its own fault"),
        44: _application("a program's fault during a context switch"),
        45: _application("a program's channel was removed: it ended, or another fault came before"),
        46: _hardware("the GPU stopped making progress", XidReason.ENGINE),
        48: _hardware("memory error that ECC could not correct", XidReason.MEMORY),
        54: _hardware(
            "auxiliary power is not connected or not sufficient",
            XidReason.POWER,
            "check the power cables and the supply of the board",
        ),
        60: _application("an exception of the security engine"),
        62: _hardware("the power management controller halted", XidReason.FIRMWARE),
        63: _contained("a row of memory was marked to be remapped", XidReason.MEMORY),
        64: _hardware("a row of memory could not be marked to be remapped", XidReason.MEMORY),
        66: _application("a program accessed a register that it may not"),
        67: _application("a program's context failed verification"),
        69: _application("a program used a graphics class wrongly"),
        74: _hardware(
            "an NVLink failed",
            XidReason.NVLINK,
            "drain the node, reset its GPUs together with the NVSwitches, and check seating and cables if it returns",
        ),
        78: _contained(
            "a virtual GPU could not be started",
            XidReason.FIRMWARE,
            "bring the guest's and the host's driver to versions that fit together",
        ),
        79: _hardware(
            "the GPU has fallen off the bus",
            XidReason.FELL_OFF_BUS,
            _POWER_CYCLE,
        ),
        80: _application("a program's stream of commands was corrupted on its way to the GPU"),
        86: _application("an exception of the optical flow engine"),
        92: _contained("corrected memory errors at a high rate", XidReason.MEMORY),
        93: _contained("the memory that holds the board's own records is worn out", XidReason.MEMORY),
        94: _contained("memory error that ECC could not correct, contained to one program", XidReason.MEMORY),
        95: _hardware("memory error that ECC could not correct, not contained", XidReason.MEMORY),
        106: _information("a test message of the management bus"),
        107: _information("a silent test message of the management bus"),
        108: _application("a peer's access over NVLink could not be translated"),
        109: _hardware("a context switch never finished", XidReason.ENGINE),
        110: _hardware("a fault of the security engine", XidReason.ENGINE),
        119: _hardware("the GPU's system processor does not answer", XidReason.FIRMWARE),
        120: _hardware("the GPU's system processor reported an error", XidReason.FIRMWARE),
        121: _contained("corrected errors on the link to the CPU", XidReason.NVLINK),
        136: _hardware("an NVLink could not be trained", XidReason.NVLINK),
        137: _application("a peer's access over NVLink was not permitted"),
        139: _application("an exception of the second optical flow engine"),
        140: _hardware("memory error that ECC could not correct and the driver could not handle", XidReason.MEMORY),
        141: _information("a report of the fast path of CUDA"),
        142: _application("an exception of a video encoder"),
        143: _hardware("the GPU could not be initialized", XidReason.ENGINE),
        147: _information("a report of an NVLink's exerciser"),
        148: _information("a report of an NVLink's controller"),
        151: _hardware("a key could not be rotated", XidReason.ENGINE, "restart the virtual machine"),
        154: _information("the recommended recovery changed; see gpu-recovery-required"),
        155: _hardware("an NVLink reported an error of its software", XidReason.NVLINK),
        156: _contained("a part of the GPU was marked to be retired", XidReason.RETIREMENT),
        157: _hardware("a part of the GPU could not be retired", XidReason.RETIREMENT),
        158: _hardware("the GPU stopped answering in time", XidReason.ENGINE),
        160: _contained("a memory channel was marked to be retired", XidReason.RETIREMENT),
        161: _hardware("a memory channel could not be retired", XidReason.RETIREMENT),
        167: _hardware("a fatal time-out on PCIe", XidReason.FELL_OFF_BUS, _POWER_CYCLE),
        168: _contained("the usable memory of the GPU is smaller than it should be", XidReason.MEMORY),
        171: _contained("memory error that ECC could not correct, in DRAM", XidReason.MEMORY),
        172: _contained("memory error that ECC could not correct, in SRAM", XidReason.MEMORY),
        **dict.fromkeys(_COPY_ENGINES, _application("an exception of a copy engine")),
        **dict.fromkeys(_DECODERS, _application("an exception of a video decoder")),
        **dict.fromkeys(_JPEG_ENGINES, _application("an exception of a JPEG decoder")),
        **dict.fromkeys(_NVLINK_5, _hardware("an NVLink failed", XidReason.NVLINK)),
    }
)
"""By code. Codes that the catalogue calls unused are not listed."""

_UNLISTED: Final = Xid(
    "a code that this release does not know",
    XidClass.UNLISTED,
    "look it up in NVIDIA's Xid catalogue",
    XidReason.UNLISTED,
)


def explain(code: int) -> Xid:
    """The entry for a code; one of class unlisted for a code that is not in the table."""
    return XIDS.get(code, _UNLISTED)
