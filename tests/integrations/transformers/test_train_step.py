"""benchmarks/train_step.py on a CPU: the variants train the same model, and one that cannot run says why."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # each variant is a process that imports transformers

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "train_step.py"
SIZES = "--layers 5 --hidden 64 --heads 2 --head-dim 16 --mlp 96 --vocab 128 --tokens 64 --steps 2 --device cpu"


def run(tmp_path: Path, *options: str) -> list[dict]:
    out = tmp_path / "out.json"
    command = [
        sys.executable,
        str(SCRIPT),
        *SIZES.split(),
        *options,
        "--json",
        str(out),
        "--markdown",
        str(tmp_path / "out.md"),
    ]
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, check=True, timeout=300)
    return json.loads(out.read_text())["rows"]


@pytest.mark.parametrize("checkpoint", ["none", "layers"])
def test_variants_train_the_same_model(tmp_path: Path, checkpoint: str):
    ours, stock = run(tmp_path, "--variants", "openkda", "stock", "--checkpoint", checkpoint)
    assert ours["parameters"] == stock["parameters"]
    assert len(ours["losses"]) == 4
    assert ours["losses"][-1] < ours["losses"][0]  # four steps on one batch
    assert ours["losses"] == pytest.approx(stock["losses"], rel=1e-3)
    assert ours["step_ms"] > 0
    assert f"| stock | {stock['step_ms']:.1f} |" in (tmp_path / "out.md").read_text()


@pytest.mark.skipif(find_spec("fla") is not None, reason="fla is installed")
def test_variant_that_cannot_run_says_why(tmp_path: Path):
    (row,) = run(tmp_path, "--variants", "fla")
    assert row == {"variant": "fla", "reason": "exit code 1: ModuleNotFoundError: No module named 'fla'"}
