"""Start `openkda train` on several processes of this machine through torchrun's launcher, and say why one failed."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from openkda.cli.errors import INTERRUPTED, UserError

#: Time for a last checkpoint when the run is told to stop, in seconds.
STOP_TIMEOUT_S = 600


def launch(words: Sequence[str], nproc: int, logs: Path) -> int:
    """Run `openkda words` on nproc ranks; what they write to stderr goes to a folder in `logs`.

    Returns: The exit code. Raises: UserError with the rank that failed first, and its reason on one line.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # its report is ours
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {logs.parent}: cannot be written to: {error.strerror}") from error
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex[:8],
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ERR),
        signals_to_handle="SIGTERM",
        shutdown_timeout=STOP_TIMEOUT_S,
    )
    try:
        with _interrupts_are_for_the_ranks():
            elastic_launch(config, sys.executable)("-m", "openkda.cli", *words)
    except ChildFailedError as error:
        return _explain(error.failures, logs)
    except SignalException:
        return INTERRUPTED
    return 0


@contextlib.contextmanager
def _interrupts_are_for_the_ranks() -> Iterator[None]:
    """Ctrl-C reaches every rank as well: they stop with a checkpoint, and this process waits for them."""
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _explain(failures: dict[int, Any], logs: Path) -> int:
    """Find the rank that failed first. The others lose it, and fail of that or are told to stop."""
    if any(failure.exitcode == INTERRUPTED for failure in failures.values()):
        return INTERRUPTED
    attempt = max(logs.glob("*/attempt_0"), key=lambda p: p.stat().st_mtime)

    def order(rank: int) -> tuple[int, float]:
        code, log = failures[rank].exitcode, attempt / str(rank) / "stderr.log"
        killed = code < 0 and code != -signal.SIGTERM
        return 0 if killed else 2 if code < 0 else 1, log.stat().st_mtime if log.exists() else 0.0

    rank = min(failures, key=order)
    code, log = failures[rank].exitcode, attempt / str(rank) / "stderr.log"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.exists() else []
    said = [line for line in lines if line.startswith("openkda train: ")]
    if code < 0:
        reason = f"was killed by {signal.Signals(-code).name}"
    elif said:
        reason = said[-1].removeprefix("openkda train: ")
    else:
        reason = f"{lines[-1].strip() if lines else f'ended with exit code {code}'} (details in {log})"
    raise UserError(f"rank {rank}: {reason}")
