"""What the system refuses the agent for want of something: that is never a fault of what was looked at."""

from __future__ import annotations

import errno
from typing import Final

_REFUSALS: Final = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
)


def exhausted(error: BaseException | None) -> bool:
    """Whether an error says that the agent, or the machine, has run out of descriptors, memory, processes or disk."""
    return isinstance(error, OSError) and error.errno in _REFUSALS
