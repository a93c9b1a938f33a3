"""The definitions of the two normalisations, with the library's own autograd: what every other form is tested
against.

    l2norm           y = x / sqrt(sum x^2 + eps)                                     over the last axis
    rms_norm_gated   y = x / sqrt(mean x^2 + eps) * weight * act(gate)               act(u) = sigmoid(u) or u sigmoid(u)

Inside: fp64 for fp64 inputs, fp32 otherwise. The result has the dtype of x.
"""

from __future__ import annotations

from typing import Any

from openkda import frameworks


def l2norm(x: Any, eps: float = 1e-6) -> Any:
    """x [.., D] -> x / sqrt(sum x^2 + eps), in the dtype of x."""
    fw = frameworks.of(x)
    wide = fw.cast(x, _inner_dtype(x))
    return fw.cast(wide / fw.sqrt(fw.sum(wide * wide, -1, keepdim=True) + eps), fw.dtype_name(x))


def rms_norm_gated(x: Any, gate: Any, weight: Any, *, activation: str, eps: float = 1e-5) -> Any:
    """x, gate [.., D], weight [D] -> rmsnorm(x) * weight * act(gate), in the dtype of x."""
    fw = frameworks.of(x)
    wide, gate, weight = (fw.cast(t, _inner_dtype(x)) for t in (x, gate, weight))
    rms = fw.sqrt(fw.sum(wide * wide, -1, keepdim=True) / fw.shape(x)[-1] + eps)
    act = fw.sigmoid(gate) if activation == "sigmoid" else gate * fw.sigmoid(gate)
    return fw.cast(wide / rms * weight * act, fw.dtype_name(x))


def _inner_dtype(x: Any) -> str:
    return "float64" if frameworks.of(x).dtype_name(x) == "float64" else "float32"
