"""A language model with KDA layers in a training loop of your own: PyTorch and openkda, nothing else.

    python examples/plain_pytorch.py                  # about a minute on a CPU
    python examples/plain_pytorch.py --steps 20

It learns the bytes of the language reference that ships with Python, and then continues a prompt token by token, with
the recurrent state in a cache: what a token costs does not depend on how much text came before.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import openkda
from openkda.nn import KDACache


class Block(nn.Module):
    """x + KDA(norm x), then x + MLP(norm x)."""

    def __init__(self, dim: int, num_heads: int, layer_idx: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attention = openkda.KimiDeltaAttention(dim, num_heads, head_dim=dim // num_heads, layer_idx=layer_idx)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, cache: KDACache | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), cache=cache)
        return x + self.mlp(self.norm2(x))


class ByteModel(nn.Module):
    """Bytes in, logits of the next byte out. KDA knows the order of tokens: no position embedding."""

    def __init__(self, dim: int = 96, num_heads: int = 3, num_layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, dim)
        self.blocks = nn.ModuleList(Block(dim, num_heads, i) for i in range(num_layers))
        self.head = nn.Sequential(nn.RMSNorm(dim), nn.Linear(dim, 256, bias=False))

    def forward(self, tokens: Tensor, cache: KDACache | None = None) -> Tensor:
        x = self.embed(tokens)  # [B, T] -> [B, T, D]
        for block in self.blocks:
            x = block(x, cache)
        return self.head(x)


def optimizer_for(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only; A_log and dt_bias are rates, and bear a mark."""
    decay, rest = [], []
    for p in model.parameters():
        (rest if p.ndim < 2 or getattr(p, "_no_weight_decay", False) else decay).append(p)
    return torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=lr)


def train(model: ByteModel, text: Tensor, steps: int) -> list[float]:
    """Loss of every step, in bits per byte."""
    optimizer, losses = optimizer_for(model, lr=3e-3), []
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    for step in range(steps):
        start = torch.randint(len(text) - 257, (8,))
        window = torch.stack([text[i : i + 257] for i in start.tolist()])
        logits = model(window[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item() / math.log(2))
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step:4d}  {losses[-1]:.3f} bits/byte")
    return losses


@torch.no_grad()
def generate(model: ByteModel, prompt: str, num_tokens: int) -> str:
    """The likeliest continuation: the prompt at once, then one token at a time."""
    cache, tokens = KDACache(), torch.tensor([list(prompt.encode())])
    new = []
    for _ in range(num_tokens):
        tokens = model(tokens, cache)[:, -1:].argmax(-1)
        new.append(tokens.item())
    return prompt + bytes(new).decode(errors="replace")


def main(argv: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description="Train a small byte model with KDA layers in plain PyTorch.")
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args(argv).steps
    torch.manual_seed(0)
    text = torch.tensor(list("\n".join(topics.values()).encode()))
    model = ByteModel()
    losses = train(model, text, steps)
    print(generate(model, "The import statement", 80))
    return losses


if __name__ == "__main__":
    main()
