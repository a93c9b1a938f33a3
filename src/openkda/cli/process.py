"""What a run changes about its process, and puts back: environment, log handlers, signals, process group."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

# Environment of a single process that torchrun did not start; port 0 lets the system choose a free one.
SINGLE_PROCESS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@contextlib.contextmanager
def environment() -> Iterator[None]:
    """The variables torch.distributed wants, for a process that torchrun did not start; torchtitan adds others."""
    before = dict(os.environ)
    if "RANK" not in os.environ:
        os.environ.update(SINGLE_PROCESS)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def log_file(folder: Path, *, verbose: bool) -> Iterator[Path]:
    """Send torchtitan's log, which uses the root logger, and Python warnings to a file in the output folder."""
    rank = int(os.environ.get("RANK", "0"))
    path = folder / ("train.log" if rank == 0 else f"train-rank{rank}.log")
    root = logging.getLogger()
    handlers: list[logging.Handler] = [logging.FileHandler(path)]
    if verbose:
        handlers.append(logging.StreamHandler(sys.stdout))
    level = root.level
    for handler in handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    try:
        yield path
    finally:
        logging.captureWarnings(False)
        root.setLevel(level)
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()


@contextlib.contextmanager
def tidy() -> Iterator[None]:
    """Leave the process as it was: torchtitan joins a process group and takes garbage collection into its own hands."""
    collected = gc.isenabled()
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        if collected:
            gc.enable()


@contextlib.contextmanager
def signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` at the first SIGINT or SIGTERM; the second has its usual effect."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield
        return
    kinds = (signal.SIGINT, signal.SIGTERM)
    before = {kind: signal.getsignal(kind) for kind in kinds}

    def restore() -> None:
        for kind in kinds:
            signal.signal(kind, before[kind])

    def handle(number: int, frame: Any) -> None:
        restore()
        stop()

    for kind in kinds:
        signal.signal(kind, handle)
    try:
        yield
    finally:
        restore()
