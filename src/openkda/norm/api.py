"""The public normalisations: each checks its arguments once, then calls an implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from openkda import backends, checks
from openkda.norm import eager, reference

ACTIVATIONS = ("sigmoid", "silu")
TRITON_WIDTH = 4096  # entries of a row, which a program holds in registers


def _fused(op: str) -> Callable[..., Any]:
    def run(*args: Any, **options: Any) -> Any:
        from openkda.norm import fused  # needs triton, which not everybody has

        return getattr(fused, op)(*args, **options)

    return run


AVAILABLE = {  # best first
    "l2norm": {"triton": _fused("l2norm"), "eager": eager.l2norm, "reference": reference.l2norm},
    "rms_norm_gated": {
        "triton": _fused("rms_norm_gated"),
        "eager": eager.rms_norm_gated,
        "reference": reference.rms_norm_gated,
    },
}


def l2norm(x: Any, eps: float = 1e-6, *, backend: str = "auto") -> Any:
    """Scale vectors to unit length: x / sqrt(sum x^2 + eps), over the last axis. Differentiable.

    eps stands inside the root, so a zero vector stays zero and has a finite gradient; this is not `F.normalize`.

    Args:
        x: `[.., D]`, any float dtype, any strides.
        eps: Added to the sum of squares, above 0.
        backend: "auto", "triton" (D up to 4096), "eager" or "reference".
    Returns: shaped like x, in its dtype.
    Raises: TypeError for a wrong kind or dtype; ValueError for eps <= 0 or a scalar x; BackendUnavailable for a
        backend that cannot run.
    Numerics: fp32 inside (fp64 for fp64 inputs).
    """
    op = "l2norm"
    _check_rows(op, x, eps)
    return _choose(op, backend, x)(x, eps)


def rms_norm_gated(x: Any, gate: Any, weight: Any, *, activation: str, eps: float = 1e-5, backend: str = "auto") -> Any:
    """Normalise by the root mean square, then scale and gate: x / sqrt(mean x^2 + eps) * weight * act(gate).
    Differentiable.

    Args:
        x: `[.., D]`, any float dtype, any strides.
        gate: Gate logits, shaped like x, any float dtype.
        weight: `[D]`, any float dtype.
        activation: "sigmoid" or "silu" (u * sigmoid(u)). There is no default, since libraries differ in theirs:
            Kimi Linear uses "sigmoid".
        eps: Added to the mean of squares, above 0.
        backend: "auto", "triton" (D up to 4096), "eager" or "reference".
    Returns: shaped like x, in its dtype.
    Raises: TypeError for a wrong kind or dtype or a missing activation; ValueError for a wrong shape, an unknown
        activation or eps <= 0; BackendUnavailable for a backend that cannot run.
    Numerics: fp32 inside (fp64 for fp64 inputs).
    """
    op = "rms_norm_gated"
    _check_rows(op, x, eps)
    checks.floating(op, "gate", gate)
    checks.shape(op, "gate", gate, tuple(x.shape), "[.., D]", "one gate per entry of x")
    checks.floating(op, "weight", weight)
    checks.shape(op, "weight", weight, (int(x.shape[-1]),), "[D]", "one entry per channel of x's last axis")
    checks.choice(op, "activation", activation, ACTIVATIONS)
    checks.same_device(op, "x", x, gate=gate, weight=weight)
    return _choose(op, backend, x)(x, gate, weight, activation=activation, eps=eps)


def _choose(op: str, backend: str, x: Any) -> Callable[..., Any]:
    D = int(x.shape[-1])
    refused = None if D <= TRITON_WIDTH else f"needs a last axis of at most {TRITON_WIDTH} entries, got {D}"
    return AVAILABLE[op][backends.choose(op, backend, AVAILABLE[op], x, refused=refused)]


def _check_rows(op: str, x: Any, eps: Any) -> None:
    checks.floating(op, "x", x)
    if len(x.shape) < 1 or int(x.shape[-1]) < 1:
        checks.bad_value(op, "x", "have a last axis of at least 1 entry", list(x.shape))
    checks.positive(op, "eps", eps)
