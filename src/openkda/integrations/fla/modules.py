"""What fla's layers compute, on openkda's operators, for tensors of any library. The layers are thin classes around it.

fla keeps the last W inputs of a convolution of width W, openkda W-1: the oldest is of no use to the next token.
"""

from __future__ import annotations

from typing import Any

from openkda import checks, conv, frameworks, norm

ACTIVATIONS = {"swish": "silu", "silu": "silu", "sigmoid": "sigmoid"}
_CONV = "ShortConvolution"


def check_convolution(activation: str | None, backend: str | None, kwargs: dict[str, Any]) -> str | None:
    """The constructor's options; returns openkda's activation. openkda has one implementation for either backend."""
    checks.choice(_CONV, "activation", activation, (None, "silu", "swish"))
    checks.choice(_CONV, "backend", backend, ("triton", "cuda", None))
    refuse(_CONV, {name: value for name, value in kwargs.items() if name != "use_fast_conv1d"})
    return None if activation is None else "silu"


def refuse(op: str, kwargs: dict[str, Any]) -> None:
    """No keyword may be left."""
    for name, value in kwargs.items():
        raise TypeError(f"{op}: {name} must be left out, got {value!r}; openkda knows no such argument")


def short_convolution(
    x: Any,
    weight: Any,
    bias: Any | None,
    *,
    activation: str | None,
    residual: Any | None,
    mask: Any | None,
    cache: Any | None,
    want_state: bool,
    cu_seqlens: Any | None,
    cp_context: Any | None,
) -> tuple[Any, Any | None]:
    """x `[B, T, C]`, weight `[C, 1, W]`, cache `[N, C, W]` -> (y `[B, T, C]`, last W inputs `[N, C, W]` or None)."""
    fw, W = frameworks.of(x), int(weight.shape[-1])
    if mask is not None:
        if cu_seqlens is not None:
            checks.bad_value(_CONV, "mask", "be None with cu_seqlens", list(mask.shape), "packed input has no padding")
        x = fw.where(mask[:, :, None] != 0, x, fw.zeros((), like=x))
    if cache is not None:
        N = int(x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1)
        checks.shape(_CONV, "cache", cache, (N, int(weight.shape[0]), W), "[N, D, W]", "W inputs of every sequence")
        cache = fw.cast(cache, fw.dtype_name(x))
    y, _ = conv.causal_conv1d(
        x,
        weight[:, 0],
        bias,
        activation=activation,
        initial_state=None if cache is None else cache[:, :, 1:],
        cu_seqlens=cu_seqlens,
        cp_context=cp_context,
    )
    state = _last_inputs(x, cache, cu_seqlens, W) if want_state else None
    return y if residual is None else y + residual, state


def one_token_each(x: Any, cu_seqlens: Any | None) -> bool:
    """Whether x [B, T, C] holds one token per sequence, as far as shapes tell."""
    return x.shape[0] * x.shape[1] == (x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1)


def _last_inputs(x: Any, cache: Any | None, cu_seqlens: Any | None, W: int) -> Any:
    """The last W of (cache, sequence) for every sequence, oldest first, `[N, C, W]`. Waits for no device."""
    fw = frameworks.of(x)
    B, T, C = fw.shape(x)
    N = B if cu_seqlens is None else fw.shape(cu_seqlens)[0] - 1
    before = fw.zeros((N, W, C), like=x) if cache is None else fw.swap(cache)  # [N, W, C]
    if cu_seqlens is None:
        return fw.swap(fw.concat([before, x], 1)[:, T:])
    cu = fw.cast(cu_seqlens, "int64")
    start, end = cu[:-1, None], cu[1:, None]  # [N, 1]
    column = fw.arange(W, like=cu)[None]
    place = end - W + column  # [N, W], in x where not below start
    inside = place >= start
    tokens = fw.take(fw.pad(x[0], 0, 0, 1), fw.reshape(fw.maximum(place, 0), (-1,)), 0)
    kept = fw.minimum(column + end - start, W - 1) + fw.arange(N, like=cu)[:, None] * W
    old = fw.take(fw.reshape(before, (N * W, C)), fw.reshape(kept, (-1,)), 0)
    return fw.swap(fw.reshape(fw.where(fw.reshape(inside, (-1, 1)), tokens, old), (N, W, C)))


def rms_norm_gated(
    x: Any,
    g: Any,
    weight: Any | None,
    *,
    activation: str,
    eps: float,
    residual: Any | None,
    prenorm: bool,
    residual_in_fp32: bool,
) -> Any:
    """rmsnorm(x + residual) * weight * act(g), `[.., D]` in the dtype of x; with prenorm (that, x + residual).

    The sum is in fp32; handed out it has the dtype of residual, or of x, or is fp32 where there is no residual and
    residual_in_fp32.
    """
    fw = frameworks.of(x)
    dtype = fw.dtype_name(x)
    kept = fw.dtype_name(residual) if residual is not None else "float32" if residual_in_fp32 else dtype
    total = x
    if residual is not None:
        checks.shape("FusedRMSNormGated", "residual", residual, tuple(x.shape), "[.., D]", "it is added to x")
        wide = "float64" if "float64" in (dtype, kept) else "float32"
        total = fw.cast(x, wide) + fw.cast(residual, wide)
    scale = fw.ones((int(x.shape[-1]),), like=x) if weight is None else weight
    y = fw.cast(norm.rms_norm_gated(total, g, scale, activation=ACTIVATIONS[activation], eps=eps), dtype)
    return (y, fw.cast(total, kept)) if prenorm else y
