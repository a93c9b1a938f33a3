"""How wrong may a KDA implementation be? Judged against fp64 on the same rounded inputs, tensor by tensor.

16-bit inputs   RMS(got - exact) <= 1.5 * RMS(rounded - exact); rounded: the eager operator with rounded matmul operands
fp32 inputs     RMS(got - exact) <= 5e-6 * RMS(exact)
fp64 inputs     RMS(got - exact) <= 1e-12 * RMS(exact)

The 16-bit budget has no constant of its own: it follows the data, so strong gates and equal keys need no exception.
Gradients with few elements (A_log has one per head) are judged over several seeds: see `ErrorPool`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

#: 16-bit inputs: error allowed, as a multiple of the error of the rounded eager operator.
BUDGET_FACTOR = 1.5
#: fp32 inputs: relative RMS error allowed to the eager operator.
FP32_LIMIT = 5e-6
#: fp64 inputs: relative RMS error allowed. Sums of about 1e3 terms, 1e-16 each, with room for a factor of 10.
FP64_LIMIT = 1e-12

# Where exact values are below the least normal fp32 number, 0 is a right answer in fp32.
_FP32_TINY = torch.finfo(torch.float32).tiny


def _mean_square(x: Tensor) -> float:
    return x.double().square().mean().item() if x.numel() else 0.0


def relative_rms(got: Tensor, exact: Tensor) -> float:
    """RMS(got - exact) / RMS(exact); NaN when got has a NaN.

    An exact result of zeros asks for zeros: anything above the least normal fp32 number counts as huge.
    """
    if got.shape != exact.shape:
        raise ValueError(f"relative_rms: shapes must agree, got {tuple(got.shape)} and {tuple(exact.shape)}")
    return _mean_square(got.double() - exact.double()) ** 0.5 / max(_mean_square(exact) ** 0.5, _FP32_TINY)


@dataclass
class ErrorPool:
    """Relative errors of one implementation, pooled over several inputs (root of the mean of squares, per tensor).

    Use it where one draw is too noisy to judge, as for dA_log: add the runs of a few seeds, then call `check`.
    """

    _squares: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def add(self, got: Mapping[str, Tensor], exact: Mapping[str, Tensor], rounded: Mapping[str, Tensor]) -> None:
        """Add one run: the implementation, the fp64 oracle, and the rounded eager operator on the same inputs."""
        _same_names(got, exact)
        for name in exact:
            errors = (relative_rms(got[name], exact[name]) ** 2, relative_rms(rounded[name], exact[name]) ** 2)
            self._squares.setdefault(name, []).append(errors)

    def errors(self) -> dict[str, tuple[float, float]]:
        """Per tensor: pooled errors of the implementation and of the rounded eager operator, relative to RMS(exact)."""
        return {
            name: tuple((sum(column) / len(pairs)) ** 0.5 for column in zip(*pairs, strict=True))  # type: ignore[misc]
            for name, pairs in self._squares.items()
        }

    def check(self, factor: float = BUDGET_FACTOR) -> None:
        """Raise AssertionError with a table of all tensors if one is over `factor` times the rounded error."""
        rows = [(name, got, factor * allowed) for name, (got, allowed) in self.errors().items()]
        _check(rows, f"error may be {factor} times that of the eager operator with rounded operands")


def assert_within_budget(
    got: Mapping[str, Tensor], exact: Mapping[str, Tensor], rounded: Mapping[str, Tensor], factor: float = BUDGET_FACTOR
) -> None:
    """Assert the 16-bit budget for one run, every tensor of `exact`; see `ErrorPool` for several."""
    pool = ErrorPool()
    pool.add(got, exact, rounded)
    pool.check(factor)


def assert_close(got: Mapping[str, Tensor], exact: Mapping[str, Tensor], limit: float) -> None:
    """Assert relative RMS error <= limit, usually `FP32_LIMIT` or `FP64_LIMIT`, for every tensor of `exact`."""
    _same_names(got, exact)
    rows = [(name, relative_rms(got[name], exact[name]), limit) for name in exact]
    _check(rows, "relative RMS error against fp64")


def error_table(rows: list[tuple[str, float, float]]) -> str:
    """A table of (tensor, error, allowed), one a line, with the ratio and a mark on those that are over."""
    lines = [f"  {'tensor':14s} {'error':>9s} {'allowed':>9s} {'ratio':>7s}"]
    for name, error, allowed in rows:
        ratio = error / allowed if allowed else (0.0 if error == 0 else float("inf"))
        lines.append(f"  {name:14s} {error:9.1e} {allowed:9.1e} {ratio:7.2f}{'' if error <= allowed else '  <-- over'}")
    return "\n".join(lines)


def _check(rows: list[tuple[str, float, float]], rule: str) -> None:
    over = [name for name, error, allowed in rows if not error <= allowed]  # a NaN is over
    if over:
        raise AssertionError(f"over budget: {', '.join(over)} ({rule})\n{error_table(rows)}")


def _same_names(got: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> None:
    if missing := [name for name in exact if name not in got]:
        raise AssertionError(f"no value for {', '.join(missing)}; the implementation gave {', '.join(got)}")
