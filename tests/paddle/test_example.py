"""examples/paddle_train.py, a few steps of it."""

import importlib.util
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_loss_falls_and_torch_agrees(capsys, monkeypatch):
    spec = importlib.util.spec_from_file_location("paddle_train", EXAMPLES / "paddle_train.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "paddle_train", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "WINDOW", 128)
    losses, difference = module.main(["--steps", "10"])
    assert losses[0] > 7.5
    assert min(losses[-3:]) < losses[0] - 2.5
    assert difference < 2e-5
    assert "step    9" in capsys.readouterr().out
