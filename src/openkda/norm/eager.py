"""The two normalisations with hand-written derivatives, on any device.

Autograd would keep six fp32 tensors of the size of x for the gated norm; these keep the inputs alone and recompute
the rest. With r = 1 / sqrt(mean x^2 + eps), n = r x and a = act(gate):

    rms_norm_gated   y = n w a      dn = dy w a     dx = r (dn - n mean(dn n))     dw = sum dy n a     dgate = dy n w a'
    l2norm           y = r x        (r = 1 / sqrt(sum x^2 + eps))                  dx = r (dy - y sum(dy y))

The backward is made of differentiable operations on saved inputs, so second derivatives are right as well.
Inside: fp64 for fp64 inputs, fp32 otherwise. The result has the dtype of x, each gradient the dtype of its input.
"""

from __future__ import annotations

from typing import Any

from openkda import frameworks


def l2norm(x: Any, eps: float = 1e-6) -> Any:
    """x [.., D] -> x / sqrt(sum x^2 + eps), in the dtype of x."""
    return frameworks.of(x).custom(_L2Norm, x, eps)


def rms_norm_gated(x: Any, gate: Any, weight: Any, *, activation: str, eps: float = 1e-5) -> Any:
    """x, gate [.., D], weight [D] -> rmsnorm(x) * weight * act(gate), in the dtype of x."""
    return frameworks.of(x).custom(_RMSNormGated, x, gate, weight, activation, eps)


class _L2Norm:
    @staticmethod
    def forward(fw: Any, ctx: Any, x: Any, eps: float) -> Any:
        ctx.eps = eps
        ctx.save_for_backward(x)
        wide = fw.cast(x, _inner_dtype(fw, x))
        return fw.cast(wide * _inverse_norm(fw, wide, eps), fw.dtype_name(x))

    @staticmethod
    def backward(fw: Any, ctx: Any, dy: Any) -> tuple:
        (x,) = ctx.saved_tensors
        wide, dy = (fw.cast(t, _inner_dtype(fw, x)) for t in (x, dy))
        inverse = _inverse_norm(fw, wide, ctx.eps)
        y = wide * inverse
        return fw.cast(inverse * (dy - y * fw.sum(dy * y, -1, keepdim=True)), fw.dtype_name(x)), None


class _RMSNormGated:
    @staticmethod
    def forward(fw: Any, ctx: Any, x: Any, gate: Any, weight: Any, activation: str, eps: float) -> Any:
        ctx.activation, ctx.eps = activation, eps
        ctx.save_for_backward(x, gate, weight)
        wide, gate, weight = (fw.cast(t, _inner_dtype(fw, x)) for t in (x, gate, weight))
        y = wide * _inverse_norm(fw, wide, eps, mean=True) * weight
        return fw.cast(y * _act(fw, gate, activation)[0], fw.dtype_name(x))

    @staticmethod
    def backward(fw: Any, ctx: Any, dy: Any) -> tuple:
        x, gate, weight = ctx.saved_tensors
        wide, wide_gate, wide_weight, dy = (fw.cast(t, _inner_dtype(fw, x)) for t in (x, gate, weight, dy))
        inverse = _inverse_norm(fw, wide, ctx.eps, mean=True)
        n = wide * inverse
        a, slope = _act(fw, wide_gate, ctx.activation)
        dn = dy * wide_weight * a
        dx = inverse * (dn - n * (fw.sum(dn * n, -1, keepdim=True) / fw.shape(x)[-1]))
        dy_n = dy * n
        dweight = fw.sum(fw.reshape(dy_n * a, (-1, fw.shape(x)[-1])), 0)
        dgate = dy_n * wide_weight * slope
        grads = zip((dx, dgate, dweight), (x, gate, weight), strict=True)
        return (*(fw.cast(d, fw.dtype_name(t)) for d, t in grads), None, None)


def _inverse_norm(fw: Any, x: Any, eps: float, *, mean: bool = False) -> Any:
    """[.., D] -> [.., 1]: 1 / sqrt(sum x^2 + eps), or with the mean in place of the sum."""
    total = fw.sum(x * x, -1, keepdim=True)
    return fw.rsqrt((total / fw.shape(x)[-1] if mean else total) + eps)


def _act(fw: Any, u: Any, activation: str) -> tuple[Any, Any]:
    """act(u) and act'(u)."""
    s = fw.sigmoid(u)
    if activation == "sigmoid":
        return s, s * (1 - s)
    return u * s, s * (1 + u * (1 - s))


def _inner_dtype(fw: Any, x: Any) -> str:
    return "float64" if fw.dtype_name(x) == "float64" else "float32"
