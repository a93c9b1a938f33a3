"""Standard output whose reader may leave: `openkda train | head`."""

from __future__ import annotations

import os
import sys


def discard() -> None:
    """From now on, throw away what is written to stdout. After a BrokenPipeError: the next write would raise again, and
    so would the one at exit.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
