"""One line that follows the training: in place on a terminal, a line now and then elsewhere (a file, CI)."""

from __future__ import annotations

import sys
import time
from typing import Any

from openkda.cli import output

PLAIN_INTERVAL_S = 10.0


class Progress:
    """Shows step, loss, bits per byte, speed and the time that is left. A quiet one (other ranks) shows nothing."""

    def __init__(self, total: int, *, quiet: bool = False) -> None:
        self.total, self.quiet = total, quiet
        self._bar: Any = None
        self._task: Any = None
        self._last_print = -float("inf")
        self._unprinted: str | None = None

    def start(self) -> None:
        """Open the live line where the output is a terminal."""
        if self.quiet or not sys.stdout.isatty():
            return
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        self._bar = Bar(BarColumn(bar_width=20), TextColumn("{task.description}"))
        self._task = self._bar.add_task("first step", total=self.total)
        self._bar.start()

    def update(self, step: int, *, loss: float, bits: float, tokens_per_s: float, eta_s: float) -> None:
        """Show the state after `step`: loss in nats per token, bits per byte of text."""
        line = (
            f"step {step}/{self.total}  loss {loss:.4f}  {bits:.3f} bits/byte  "
            f"{tokens_per_s:,.0f} tokens/s  ETA {format_duration(eta_s)}"
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=line)
        elif time.monotonic() - self._last_print >= PLAIN_INTERVAL_S:
            self.say(line)
            self._last_print = time.monotonic()
        else:
            self._unprinted = line

    def say(self, text: str) -> None:
        """Print a line of its own, above the live line if there is one."""
        self._unprinted = None
        if self.quiet:
            return
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
            return
        try:
            print(text, flush=True)
        except BrokenPipeError:  # whoever was reading has seen enough; the training goes on, and the log is a file
            output.discard()

    def stop(self) -> None:
        """Close the live line; without one, print the last state if it was held back."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if self._unprinted is not None:
            self.say(self._unprinted)


def format_duration(seconds: float) -> str:
    """Seconds as m:ss, or h:mm:ss from an hour on."""
    minutes, s = divmod(max(0, round(seconds)), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"
