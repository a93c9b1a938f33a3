"""Figures of two sets of logits `[T, vocabulary]`, the reference's first, all in fp64.

KL      sum over the vocabulary of p log(p / q), p the reference's prediction, nats; of several tokens the largest
cos     cosine of the two logit vectors; of several tokens the smallest
top1    whether the likeliest token is the same; of several tokens, whether for all
top5    share of the reference's five likeliest tokens that are among ours
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenFigures:
    """Per token, `[T]` each."""

    kl: Tensor
    cos: Tensor
    max_diff: Tensor
    top1: Tensor
    top5: Tensor
    entropy: Tensor


@torch.no_grad()
def token_figures(reference: Tensor, ours: Tensor) -> TokenFigures:
    """Figures of every token; logits `[T, vocabulary]` of any dtype.

    Raises: ValueError when shapes differ.
    """
    if reference.shape != ours.shape:
        raise ValueError(
            f"token_figures: logits must agree in shape, got {list(reference.shape)} and {list(ours.shape)}"
        )
    a, b = reference.double(), ours.double()
    p, q = a.log_softmax(-1), b.log_softmax(-1)
    k = min(5, a.shape[-1])
    top_a, top_b = a.topk(k).indices, b.topk(k).indices
    shared = (top_a[:, :, None] == top_b[:, None, :]).any(-1).double().mean(-1)
    return TokenFigures(
        kl=(p.exp() * (p - q)).sum(-1),
        cos=torch.cosine_similarity(a, b, dim=-1),
        max_diff=(a - b).abs().amax(-1),
        top1=a.argmax(-1) == b.argmax(-1),
        top5=shared,
        entropy=-(p.exp() * p).sum(-1),
    )


@dataclass(frozen=True)
class Figures:
    """Of a set of tokens: the worst KL, cos and difference, the mean KL, shares of agreement."""

    kl: float
    mean_kl: float
    cos: float
    max_diff: float
    top1: float
    top5: float
    entropy: float
    tokens: int

    def line(self) -> str:
        """The figures as `KL=… cos=… max_diff=… top1=Y|N top5=…%`, then what several tokens add."""
        share = "" if self.tokens == 1 else f" mean_KL={self.mean_kl:.3e} top1_share={100 * self.top1:.2f}%"
        return (
            f"KL={self.kl:.4e} cos={self.cos:.9f} max_diff={self.max_diff:.4e} top1={'Y' if self.top1 == 1 else 'N'} "
            f"top5={100 * self.top5:.4g}%{share}"
        )


def summarize(tokens: Sequence[TokenFigures]) -> Figures:
    """Figures of all tokens of all texts together."""

    def all_of(name: str) -> Tensor:
        return torch.cat([getattr(t, name) for t in tokens]).double()

    kl = all_of("kl")
    return Figures(
        kl=kl.max().item(),  # NaN wins over every number
        mean_kl=kl.mean().item(),
        cos=all_of("cos").min().item(),
        max_diff=all_of("max_diff").max().item(),
        top1=all_of("top1").mean().item(),
        top5=all_of("top5").mean().item(),
        entropy=all_of("entropy").mean().item(),
        tokens=len(kl),
    )


def last_tokens(tokens: Sequence[TokenFigures]) -> list[TokenFigures]:
    """The same figures of the last token of every text only."""
    return [TokenFigures(**{name: value[-1:] for name, value in vars(t).items()}) for t in tokens]


@dataclass
class ErrorSum:
    """Relative RMS error of one quantity, added up over texts: ||ours - reference|| / ||reference||."""

    error: float = 0.0
    size: float = 0.0

    def add(self, reference: Tensor, ours: Tensor) -> None:
        """Add tensors of as many elements; their shapes may differ."""
        a, b = reference.detach().double().flatten(), ours.detach().double().flatten()
        if a.shape != b.shape:
            raise ValueError(f"ErrorSum: sizes must agree, got {list(reference.shape)} and {list(ours.shape)}")
        self.error += (a - b).square().sum().item()
        self.size += a.square().sum().item()

    @property
    def relative(self) -> float:
        if self.error == 0:
            return 0.0
        return float("inf") if self.size == 0 else (self.error / self.size) ** 0.5


@dataclass(frozen=True)
class Thresholds:
    """Limits; None does not judge. KL, cos, max_diff and the shares are those of all tokens."""

    max_kl: float | None = None
    max_mean_kl: float | None = None
    min_cos: float | None = None
    max_diff: float | None = None
    min_top1: float | None = None
    """Percent of tokens."""
    min_top5: float | None = None
    """Percent."""
    max_last_kl: float | None = None
    """KL of last tokens, the figure that is usually published."""
    max_grad_error: float | None = None
    """Largest relative error of a parameter's gradient."""
    max_packed_error: float | None = None
    """Largest relative difference between packed and separate texts, of logits and gradients."""

    def broken(self, values: dict[str, float | None]) -> list[str]:
        """A sentence for every limit that `values`, by the names here, does not keep. NaN keeps none."""
        out = []
        for name, limit in vars(self).items():
            got = values.get(name)
            if limit is None:
                continue
            if got is None:
                out.append(f"{name} {limit:g} was asked for, and was not measured")
            elif name.startswith("max_") and not got <= limit:
                out.append(f"{name.removeprefix('max_')} must be at most {limit:g}, got {got:.4g}")
            elif name.startswith("min_") and not got >= limit:
                out.append(f"{name.removeprefix('min_')} must be at least {limit:.10g}, got {got:.10g}")
        return out
