"""The public convolution: checks its arguments once, then calls an implementation."""

from __future__ import annotations

import functools
from typing import Any

from openkda import backends, checks, frameworks
from openkda.conv import context_parallel, eager, reference
from openkda.parallel.context import check_context

_OP = "causal_conv1d"
TRITON_WIDTHS = (2, 3, 4)


def why_not_width(W: int) -> str | None:
    """Why the triton kernels cannot take filters of this width; None if they can."""
    return None if W in TRITON_WIDTHS else f"needs a width W of 2 to 4, got {W}"


def _fused(*args: Any, **options: Any) -> tuple[Any, Any | None]:
    from openkda.conv import fused  # needs triton, which not everybody has

    return fused.causal_conv1d(*args, **options)


AVAILABLE = {  # best first
    _OP: {"triton": _fused, "eager": eager.causal_conv1d, "reference": reference.causal_conv1d}
}


def causal_conv1d(
    x: Any,
    weight: Any,
    bias: Any | None = None,
    *,
    activation: str | None = None,
    initial_state: Any | None = None,
    output_final_state: bool = False,
    cu_seqlens: Any | None = None,
    cp_context: Any | None = None,
    backend: str = "auto",
) -> tuple[Any, Any | None]:
    """Convolve every channel with its own short filter, looking back only. Differentiable.

    y[t] = act(bias + sum over j of weight[:, j] * x[t - (W-1) + j]), j from 0 to W-1: the last column meets the
    current token. Inputs before the first token of a sequence come from its initial state, or are 0.

    Args:
        x: `[B, T, C]`, any float dtype, any strides.
        weight: `[C, W]`, any float dtype, W >= 1. A checkpoint's `[C, 1, W]` loses its middle axis first.
        bias: `[C]` or None.
        activation: "silu" or None.
        initial_state: The last W-1 inputs before each sequence, oldest first, `[N, C, W-1]`, in the dtype of x;
            None means zeros.
        output_final_state: Return the same for the end of each sequence. fla and transformers keep W columns:
            theirs are these with one older input in front.
        cu_seqlens: int32 or int64 `[N+1]` token offsets of packed sequences (B = 1). An empty sequence passes its
            state through bitwise; after the last offset y is 0 and nothing, NaN included, affects anything.
        cp_context: From `build_cp_context`: the row is spread over ranks and x is this rank's. cu_seqlens is then
            None; initial and final states are of all N sequences, the same on every rank.
        backend: "auto", "triton" (W from 2 to 4), "eager" or "reference".
    Returns: y shaped like x and in its dtype; the final state `[N, C, W-1]` in the dtype of x, or None.
    Raises: TypeError for a wrong kind or dtype; ValueError for a wrong shape, an unknown activation, or B > 1 with
        cu_seqlens; BackendUnavailable for a backend that cannot run.
    Numerics: sums in fp32 (fp64 for fp64 inputs). A window is summed in the same order
        whether its sequence is alone, in a batch or packed.
    """
    _check(x, weight, bias, activation, initial_state, output_final_state, cu_seqlens, cp_context)
    run = AVAILABLE[_OP][backends.choose(_OP, backend, AVAILABLE[_OP], x, refused=why_not_width(int(weight.shape[1])))]
    if cp_context is not None:
        run = functools.partial(context_parallel.causal_conv1d, run, cp_context)
    else:
        run = functools.partial(run, cu_seqlens=cu_seqlens)
    return run(
        x,
        weight,
        bias,
        activation=activation,
        initial_state=initial_state,
        output_final_state=output_final_state,
    )


def _check(
    x: Any,
    weight: Any,
    bias: Any,
    activation: Any,
    initial_state: Any,
    output_final_state: Any,
    cu_seqlens: Any,
    cp_context: Any,
) -> None:
    checks.floating(_OP, "x", x)
    checks.rank(_OP, "x", x, "[B, T, C]")
    B, T, C = (int(n) for n in x.shape)
    W = check_filter(_OP, weight, bias, activation, channels=C)
    if not isinstance(output_final_state, bool):
        checks.bad_type(_OP, "output_final_state", "be a bool", type(output_final_state).__name__)
    N = B if cu_seqlens is None else checks.cu_seqlens(_OP, cu_seqlens, batch=B, tokens=T)
    if cp_context is not None:
        N = _check_context_parallel(x, W, cu_seqlens, cp_context)
    if initial_state is not None:
        dtype = frameworks.of(x).dtype_name(x)
        checks.dtype(_OP, "initial_state", initial_state, (dtype,), "it holds inputs, so it follows x")
        hint = "it holds the last W-1 inputs of every sequence, oldest first; from a state of W columns drop the first"
        checks.shape(_OP, "initial_state", initial_state, (N, C, W - 1), "[N, C, W-1]", hint)
    checks.same_device(_OP, "x", x, weight=weight, bias=bias, initial_state=initial_state, cu_seqlens=cu_seqlens)


def check_filter(op: str, weight: Any, bias: Any, activation: Any, *, channels: int) -> int:
    """Filters [C, W], bias [C] or None, and what follows them; returns W."""
    checks.floating(op, "weight", weight)
    checks.rank(op, "weight", weight, "[C, W]")
    W = int(weight.shape[1])
    checks.shape(op, "weight", weight, (channels, W), "[C, W]", "one filter per channel of x")
    if W < 1:
        checks.bad_value(op, "weight", "have a width W of at least 1", W)
    if bias is not None:
        checks.floating(op, "bias", bias)
        checks.shape(op, "bias", bias, (channels,), "[C]")
    checks.choice(op, "activation", activation, (None, "silu"))
    return W


def _check_context_parallel(x: Any, W: int, cu_seqlens: Any, cp_context: Any) -> int:
    context = check_context(_OP, cp_context)
    if cu_seqlens is not None:
        checks.bad_value(_OP, "cu_seqlens", "be None with cp_context", list(cu_seqlens.shape), "cp_context has them")
    if context.conv_width not in (None, W):
        checks.bad_value(_OP, "weight", f"have the width W = {context.conv_width} of cp_context", W)
    context.check(_OP, "x", x)
    return context.num_sequences
