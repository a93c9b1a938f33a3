"""The examples run, learn, and do what they say."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def plain_pytorch() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plain_pytorch", EXAMPLES / "plain_pytorch.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_plain_pytorch_learns(plain_pytorch: ModuleType, capsys: pytest.CaptureFixture[str]):
    losses = plain_pytorch.main(["--steps", "20"])
    # 8 bits is knowing nothing; below 5 it knows which bytes are frequent.
    assert losses[0] > 7.5
    assert losses[-1] < 5.0
    assert "The import statement" in capsys.readouterr().out


def test_plain_pytorch_decodes_what_the_whole_forward_would_choose(plain_pytorch: ModuleType):
    torch.manual_seed(0)
    model = plain_pytorch.ByteModel(dim=32, num_heads=2)
    text = plain_pytorch.generate(model, "abc", 20)
    tokens = list(b"abc")
    with torch.no_grad():
        for _ in range(20):
            tokens.append(model(torch.tensor([tokens]))[0, -1].argmax().item())
    assert text == bytes(tokens).decode(errors="replace")
