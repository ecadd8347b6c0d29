"""Where the program begins: ``python -m sidecar`` and the console script.

Loading the rest takes half a second, in which a signal counts as well. Python's own answer to SIGINT would be a
traceback, and without a handler process 1 of a container is not ended by any signal: the kernel drops it, and whoever
stops the pod waits out its grace period.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def main() -> int:
    """Run the command of the command line and return its exit status."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # What was ignored before stays ignored: nohup does that.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)
    from sidecar import cli  # only here: by now a signal finds its handler

    return cli.main()


def _end(number: int, _frame: FrameType | None) -> None:
    """End at once, without a word: nothing is there yet that would have to be put away."""
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
