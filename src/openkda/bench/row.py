"""One row in a process of its own: `python -m openkda.bench.row SPEC RESULT`, both JSON files.

A peer that crashes, hangs or leaves the GPU in a bad state ends its own row and nothing else.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


class Row:
    """The process of one row. It starts, imports what it needs, and waits for `measured`.

    Args:
        spec: As `op.run` and `layer.run` take it, with `what`: "op" or "layer".
        environment: Variables that its process gets beside this one's.
    """

    def __init__(self, spec: dict[str, Any], environment: dict[str, str]) -> None:
        self._spec = spec
        self._folder = tempfile.TemporaryDirectory()
        given, self._path = Path(self._folder.name, "spec.json"), Path(self._folder.name, "result.json")
        given.write_text(json.dumps(spec))
        self._log = Path(self._folder.name, "log")
        self.interrupted = False
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "openkda.bench.row", str(given), str(self._path)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    def measured(self, timeout: float) -> dict[str, Any]:
        """Let it measure and return its result; `failure` says what went wrong, if anything did.

        After `timeout` seconds its processes are stopped, or when the user interrupts (then `interrupted` is set); what
        it had measured by then is kept.
        """
        start = time.monotonic()
        try:
            with contextlib.suppress(BrokenPipeError):  # it has ended already: its exit code tells
                self._process.communicate(b"go\n", timeout)
        except subprocess.TimeoutExpired:
            failure = f"stopped after {timeout:g} s"
        except KeyboardInterrupt:
            failure, self.interrupted = "interrupted", True
        else:
            code = self._process.wait()
            failure = f"exit code {code}: {self._last_line()}" if code else None
        self.stop()
        result = (
            json.loads(self._path.read_text()) if self._path.exists() else {"implementations": {}, "stage": "start"}
        )
        result["failure"] = failure and f"{failure}, in stage: {result['stage']}"
        result["seconds"] = round(time.monotonic() - start, 1)
        self._folder.cleanup()
        return {**self._spec, **result}

    def stop(self) -> None:
        """End all its processes, if they have not ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def _last_line(self) -> str:
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1][:200] if lines else "no output"


def measure_all(
    specs: Sequence[dict[str, Any]], environments: Sequence[dict[str, str]], timeout: float, *, ahead: bool
) -> Iterator[dict[str, Any]]:
    """The result of each row, one after another.

    ahead: start the next row's process while a row measures, so that its imports take no time of their own. Right where
    the GPU is measured; a CPU would be disturbed.
    """
    rows: list[Row] = []
    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is threading.main_thread():  # only there may signals be handled
        signal.signal(signal.SIGTERM, _interrupt)
    try:
        for i in range(len(specs)):
            while len(rows) <= min(i + ahead, len(specs) - 1):
                rows.append(Row(specs[len(rows)], environments[len(rows)]))
            yield rows[i].measured(timeout)
            if rows[i].interrupted:
                raise KeyboardInterrupt
    finally:  # also when the user interrupts, or a batch system ends this process: rows are in sessions of their own
        for row in rows:
            row.stop()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main(given: str, path: str) -> None:
    """The process of one row."""
    from openkda.bench import layer, op

    spec = json.loads(Path(given).read_text())
    if spec["peer"] is not None:
        with contextlib.suppress(Exception):  # ahead of time; `run` imports it again, and reports what goes wrong
            importlib.import_module(spec["imports"])
    sys.stdin.readline()
    result: dict[str, Any] = {"implementations": {}}

    def save(stage: str) -> None:
        result["stage"] = stage
        draft = Path(path + ".new")
        draft.write_text(json.dumps(result))
        draft.replace(path)

    {"op": op, "layer": layer}[spec["what"]].run(spec, result, save)


if __name__ == "__main__":
    main(*sys.argv[1:])
