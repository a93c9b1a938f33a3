"""A language model with KDA layers, trained with PaddlePaddle's own optimizer and DataLoader.

    make paddle                                      # sets up .venv-paddle first
    python examples/paddle_train.py --steps 20

It learns the bytes of the language reference that ships with Python. The weights then go to the model of
plain_pytorch.py by a safetensors file, and both give the same logits (left out where torch is not installed).
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import paddle
from paddle import Tensor, nn
from paddle.nn import functional as F

from openkda.paddle import checkpoint
from openkda.paddle.nn import KimiDeltaAttention

WINDOW = 256  # tokens of one example


class RMSNorm(nn.Layer):
    """x / sqrt(mean x^2 + eps) * weight, with torch's default eps."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = self.create_parameter([dim], default_initializer=nn.initializer.Constant(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * paddle.rsqrt(paddle.mean(x * x, -1, keepdim=True) + 2.0**-23) * self.weight


class Block(nn.Layer):
    """x + KDA(norm x), then x + MLP(norm x)."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(dim), RMSNorm(dim)
        self.attention = KimiDeltaAttention(dim, num_heads, head_dim=dim // num_heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ByteModel(nn.Layer):
    """Bytes in, logits of the next byte out. KDA knows the order of tokens: no position embedding."""

    def __init__(self, dim: int = 96, num_heads: int = 3, num_layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, dim, weight_attr=paddle.ParamAttr(initializer=nn.initializer.Normal(0.0, 0.5)))
        self.blocks = nn.LayerList([Block(dim, num_heads) for _ in range(num_layers)])
        self.head = nn.Sequential(RMSNorm(dim), nn.Linear(dim, 256, bias_attr=False))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)  # [B, T] -> [B, T, D]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Windows(paddle.io.Dataset):
    """Windows of WINDOW + 1 bytes of the text, the same ones each time."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.text = np.frombuffer("\n".join(topics.values()).encode(), dtype=np.uint8).astype(np.int64)
        self.starts = np.random.default_rng(0).integers(len(self.text) - WINDOW - 1, size=count)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, i: int) -> np.ndarray:
        return self.text[self.starts[i] : self.starts[i] + WINDOW + 1]


def optimizer_for(model: nn.Layer, lr: float) -> paddle.optimizer.AdamW:
    """AdamW with weight decay on matrices only; A_log and dt_bias are rates, and bear a mark."""
    marked = {p.name for p in model.parameters() if getattr(p, "_no_weight_decay", False) or p.ndim < 2}
    return paddle.optimizer.AdamW(
        lr,
        parameters=model.parameters(),
        weight_decay=0.1,
        apply_decay_param_fun=lambda name: name not in marked,
        grad_clip=nn.ClipGradByGlobalNorm(1.0),
    )


def train(model: ByteModel, steps: int, batch: int = 8) -> list[float]:
    """Loss of every step, in bits per byte."""
    optimizer, losses = optimizer_for(model, lr=3e-3), []
    for step, window in enumerate(paddle.io.DataLoader(Windows(steps * batch), batch_size=batch, return_list=True)):
        window = window[0] if isinstance(window, list) else window
        logits = model(window[:, :-1])
        loss = F.cross_entropy(paddle.reshape(logits, [-1, 256]), paddle.reshape(window[:, 1:], [-1]))
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(loss.item() / math.log(2))
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step:4d}  {losses[-1]:.3f} bits/byte", flush=True)
    return losses


def compare_with_torch(model: ByteModel, tokens: Tensor) -> float:
    """Largest difference between the logits of this model and of plain_pytorch.ByteModel with the same weights."""
    import safetensors.torch
    import torch

    path = Path(__file__).with_name("plain_pytorch.py")
    spec = importlib.util.spec_from_file_location("plain_pytorch", path)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(plain_pytorch := importlib.util.module_from_spec(spec))
    twin = plain_pytorch.ByteModel()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(model, Path(folder) / "model.safetensors")
        twin.load_state_dict(safetensors.torch.load_file(Path(folder) / "model.safetensors"))
    with torch.no_grad(), paddle.no_grad():
        return float(abs(twin(torch.from_numpy(tokens.numpy())).numpy() - model(tokens).numpy()).max())


def main(argv: Sequence[str] | None = None) -> tuple[list[float], float | None]:
    """Losses, and the difference to torch; None without torch."""
    parser = argparse.ArgumentParser(description="Train a small byte model with KDA layers in PaddlePaddle.")
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args(argv).steps
    paddle.seed(0)
    model = ByteModel()
    losses, difference = train(model, steps), None
    if importlib.util.find_spec("torch") is None:
        print("torch is not installed: logits not compared", file=sys.stderr)
    else:
        tokens = paddle.to_tensor(Windows(2)[0][None, :WINDOW])
        difference = compare_with_torch(model, tokens)
        print(f"the same weights in torch: logits differ by {difference:.1e} at most")
    return losses, difference


if __name__ == "__main__":
    main()
