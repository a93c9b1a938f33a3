"""`openkda train --nproc`: several ranks from one command, and one line that says why one of them failed."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchtitan", reason="training is torchtitan's")

from openkda.cli import launch  # noqa: E402
from openkda.cli.errors import INTERRUPTED, UserError  # noqa: E402
from openkda.cli.main import main  # noqa: E402

SMALL = ["--training.seq_len", "64", "--training.local_batch_size", "2"]
BROKEN = """
import os
from openkda.integrations.torchtitan.config_registry import kimi_linear_tiny

def failing():
    if os.environ["RANK"] == "1":
        {fault}
    return kimi_linear_tiny()
"""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    from pydoc_data.topics import topics

    path = tmp_path / "text.txt"
    path.write_text(topics["yield"] + topics["with"] + topics["comparisons"])
    return path


def command(text: Path, output: Path, *words: str) -> list[str]:
    argv = ["train", "--data", str(text), "--output", str(output), "--nproc", "2", *SMALL, *words]
    return [sys.executable, "-m", "openkda.cli", *argv]


def run(argv: list[str], **environment: str) -> subprocess.CompletedProcess:
    env = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=600)


@pytest.mark.processes
@pytest.mark.parametrize(
    "fault, reason",
    [
        ('raise RuntimeError("the disk\\nof this rank is gone")', "rank 1: of this rank is gone (details in "),
        ("os.kill(os.getpid(), 9)", "rank 1: was killed by SIGKILL"),
    ],
    ids=["raises", "killed"],
)
def test_a_failed_rank_ends_the_run_with_its_reason(text: Path, tmp_path: Path, fault: str, reason: str) -> None:
    package = tmp_path / "broken"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "config_registry.py").write_text(BROKEN.format(fault=fault))
    argv = command(text, tmp_path / "out", "--module", "broken", "--config", "failing", "--steps", "2")
    done = run(argv, PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith(f"openkda train: {reason}")
    assert done.stderr.count("\n") == 1


class Failure:
    def __init__(self, exitcode: int) -> None:
        self.exitcode = exitcode


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """Three ranks; rank 2 wrote first, rank 1 the last line that we word."""
    said = {2: "Traceback\nConnectionError: lost\n", 1: "noise\nopenkda train: text.txt: no such file\n", 0: ""}
    for i, (rank, words) in enumerate(said.items()):
        log = tmp_path / "run" / "attempt_0" / str(rank) / "stderr.log"
        log.parent.mkdir(parents=True)
        log.write_text(words)
        os.utime(log, (100 + i, 100 + i))
    return tmp_path


@pytest.mark.parametrize(
    "codes, reason",
    [
        ({1: 2, 0: -signal.SIGTERM}, "rank 1: text.txt: no such file"),
        ({1: 2, 2: 1}, "rank 2: ConnectionError: lost (details in "),
        ({1: 2, 0: -signal.SIGKILL}, "rank 0: was killed by SIGKILL"),
        ({0: 3}, "rank 0: ended with exit code 3 (details in "),
    ],
    ids=["ours", "first", "killed", "silent"],
)
def test_the_first_failure_is_named(logs: Path, codes: dict[int, int], reason: str) -> None:
    with pytest.raises(UserError) as error:
        launch._explain({rank: Failure(code) for rank, code in codes.items()}, logs)
    assert str(error.value).startswith(reason)


def test_interrupted_ranks_are_no_failure(logs: Path) -> None:
    assert launch._explain({0: Failure(-signal.SIGTERM), 1: Failure(INTERRUPTED)}, logs) == INTERRUPTED


def test_nproc_is_refused_under_torchrun(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("RANK", "0")
    assert main(["train", "--config", "kimi_linear_tiny", "--nproc", "2"]) == 2
    assert "--nproc must be left out under torchrun" in capsys.readouterr().err


def losses(output: Path) -> dict[int, float]:
    """Training loss by step, from the TensorBoard files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for folder in sorted({p.parent for p in (output / "tb").rglob("events.*")}):
        events = EventAccumulator(str(folder))
        events.Reload()
        if "loss_metrics/global_avg_loss" in events.Tags()["scalars"]:
            found |= {e.step: e.value for e in events.Scalars("loss_metrics/global_avg_loss")}
    return found


def ranks_of(process: subprocess.Popen) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children if "openkda.cli" in Path(f"/proc/{pid}/cmdline").read_text()]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.filterwarnings("ignore")  # TensorBoard's
def test_a_killed_run_goes_on_with_the_same_losses(text: Path, tmp_path: Path) -> None:
    options = ["--config", "kimi_linear_tiny", "--steps", "8", "--checkpoint.interval", "2"]
    assert run(command(text, tmp_path / "whole", *options)).returncode == 0
    process = subprocess.Popen(command(text, tmp_path / "out", *options), stderr=subprocess.PIPE, text=True)
    folder, end = tmp_path / "out" / "checkpoint", time.monotonic() + 300
    while not list(folder.glob("step-*/.metadata")) and process.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    os.kill(ranks_of(process)[-1], signal.SIGKILL)
    assert process.wait(timeout=300) == 2
    assert "was killed by SIGKILL" in process.stderr.read()
    argv = [sys.executable, "-m", "openkda.cli", "train", "--resume", str(tmp_path / "out"), "--nproc", "2"]
    done = run(argv)
    assert done.returncode == 0, done.stderr
    assert "resumed from step" in done.stdout
    whole, parts = losses(tmp_path / "whole"), losses(tmp_path / "out")
    assert parts.keys() == whole.keys() == set(range(1, 9))
    assert all(math.isclose(parts[step], whole[step], rel_tol=1e-6) for step in whole)
