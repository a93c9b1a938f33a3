"""One row in a process of its own: `python -m openkda.bench.row SPEC RESULT`, both JSON files.

A peer that crashes, hangs or leaves the GPU in a bad state ends its own row and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def measured(spec: dict[str, Any], *, timeout: float, environment: dict[str, str]) -> dict[str, Any]:
    """Run one row and return its result; `failure` says what went wrong, if anything did.

    Args:
        spec: As `op.run` and `layer.run` take it, with `what`: "op" or "layer".
        timeout: Seconds after which the row's processes are stopped. What it had measured by then is kept.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        given, path = Path(folder, "spec.json"), Path(folder, "result.json")
        given.write_text(json.dumps(spec))
        with Path(folder, "log").open("w+") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "openkda.bench.row", str(given), str(path)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )
            failure = _wait(process, timeout)
            log.seek(0)
            lines = [line.strip() for line in log.read().splitlines() if line.strip()]
        result = json.loads(path.read_text()) if path.exists() else {"implementations": {}, "stage": "start"}
    if failure is None and process.returncode != 0:
        failure = f"exit code {process.returncode}: {lines[-1][:200] if lines else 'no output'}"
    result["failure"] = failure and f"{failure}, in stage: {result['stage']}"
    result["seconds"] = round(time.monotonic() - start, 1)
    return {**spec, **result}


def _wait(process: subprocess.Popen, timeout: float) -> str | None:
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        return f"stopped after {timeout:g} s"
    finally:
        if process.poll() is None:  # also when the user interrupts
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return None


def main(given: str, path: str) -> None:
    """The process of one row."""
    from openkda.bench import layer, op

    spec = json.loads(Path(given).read_text())
    result: dict[str, Any] = {"implementations": {}}

    def save(stage: str) -> None:
        result["stage"] = stage
        draft = Path(path + ".new")
        draft.write_text(json.dumps(result))
        draft.replace(path)

    {"op": op, "layer": layer}[spec["what"]].run(spec, result, save)


if __name__ == "__main__":
    main(*sys.argv[1:])
