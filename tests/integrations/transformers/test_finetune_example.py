"""examples/finetune_transformers.py: transformers' Trainer gives the same losses with the integration and without."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from openkda.integrations import transformers as integration

pytest.importorskip("accelerate", reason="transformers' Trainer needs it")


@pytest.fixture(scope="module")
def example() -> ModuleType:
    path = Path(__file__).parents[3] / "examples" / "finetune_transformers.py"
    spec = importlib.util.spec_from_file_location("finetune_transformers", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_loss_equals_the_plain_one_step_by_step(example: ModuleType, capsys: pytest.CaptureFixture[str]):
    options = ["--steps", "8", "--length", "64"]
    ours, plain = example.main(options), example.main([*options, "--plain"])
    assert len(ours) == len(plain) == 8
    assert ours == pytest.approx(plain, rel=0, abs=1e-4)
    assert ours[-1] < ours[0] - 1  # and it learns
    assert not integration.is_enabled()
    assert capsys.readouterr().out.count("The import statement") == 2


def test_packed_paragraphs_train(example: ModuleType):
    losses = example.main(["--steps", "8", "--length", "64", "--packed"])
    assert losses[-1] < losses[0] - 1
