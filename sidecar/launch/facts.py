"""What is said of a launch, in words that need no reader of launches."""

from __future__ import annotations

from typing import Final

LaunchValue = str | int | bool
"""The value of a launch flag."""

INCOMPLETE: Final = "incomplete"
"""The key of `LaunchArguments.flags` that says that there may be more flags than were read."""

FA_IMPL_VER: Final = "fa_impl_ver"
"""The field of a FlashAttention version that a plugin takes as a flag: a number where it is one, else text."""
