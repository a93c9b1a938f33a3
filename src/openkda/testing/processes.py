"""Run a script as several processes of this machine that talk to one another, and say which of them failed.

Nothing here imports a tensor library: the script does, and sets up its own process group from the environment.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_processes(
    script: Path | str, size: int, *args: str, env: Mapping[str, str] | None = None, timeout_s: float = 600.0
) -> None:
    """Run `python script args` on `size` ranks, with the environment that torch.distributed and Paddle look for.

    Raises: RuntimeError with the last lines of the first rank that failed; the other ranks are stopped then, as they
        would wait for it.
    """
    port = free_port()
    endpoints = ",".join(f"127.0.0.1:{free_port() if rank else port}" for rank in range(size))
    processes, logs = [], []
    for rank in range(size):
        own = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "PADDLE_TRAINER_ID": rank,
            "PADDLE_TRAINERS_NUM": size,
            "PADDLE_TRAINER_ENDPOINTS": endpoints,
            "PADDLE_CURRENT_ENDPOINT": endpoints.split(",")[rank],
            "OMP_NUM_THREADS": 1,
        }
        environment = os.environ | {name: str(value) for name, value in own.items()} | dict(env or {})
        command = [sys.executable, str(script), *args]
        # A file and not a pipe: nobody reads while the ranks run, and a full pipe would stop them.
        log = tempfile.TemporaryFile("w+")
        processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        logs.append(log)
    try:
        _wait(processes, logs, timeout_s)
    finally:
        for process, log in zip(processes, logs, strict=True):
            process.kill()
            process.wait()
            log.close()


def _wait(processes: list[subprocess.Popen], logs: list[IO[str]], timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while any(process.poll() is None for process in processes) and not any(process.poll() for process in processes):
        if time.monotonic() > end:
            raise RuntimeError(f"run_processes: not done after {timeout_s:.0f} s")
        time.sleep(0.02)
    if any(process.poll() for process in processes):
        time.sleep(0.2)  # the first to fail is not always the first to be found: the others lose it and fail too
        raise RuntimeError(_report(processes, logs))


def _report(processes: list[subprocess.Popen], logs: list[IO[str]]) -> str:
    texts = []
    for rank, (process, log) in enumerate(zip(processes, logs, strict=True)):
        if process.poll():
            log.seek(0)
            lines = log.read().strip().splitlines()
            texts.append(f"rank {rank} failed with exit code {process.returncode}:\n" + "\n".join(lines[-25:]))
    return "run_processes: " + "\n".join(texts)
