"""The convolution's step while decoding: one token for each sequence, its state edited in place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from openkda import backends, checks, frameworks, packing
from openkda.conv import eager, reference
from openkda.conv.api import check_filter, why_not_width

_OP = "causal_conv1d_update"


def causal_conv1d_update(
    x: Any,
    conv_state: Any,
    weight: Any,
    bias: Any | None = None,
    *,
    activation: str | None = None,
    state_indices: Any | None = None,
    backend: str = "auto",
) -> Any:
    """The next token of N sequences through `openkda.causal_conv1d`; inference only. conv_state is updated in place.

    Args:
        x: `[N, C]`, one token per sequence, any float dtype.
        conv_state: The last W-1 inputs of every sequence, oldest first, `[N, C, W-1]`, contiguous, in the dtype of x;
            with state_indices a pool of them, `[slots, C, W-1]`.
        weight: `[C, W]`, any float dtype, W >= 1.
        bias: `[C]` or None.
        activation: "silu" or None.
        state_indices: int32 or int64 `[N]`, the slot of every sequence. A negative index is padding: y is 0 there and
            no slot is touched. Two sequences must not share a slot.
        backend: "auto", "triton" (W from 2 to 4), "eager" or "reference".
    Returns: y `[N, C]` in the dtype of x.
    Raises: TypeError for a wrong kind or dtype; ValueError for a wrong shape, a state that is not contiguous, an input
        that needs a gradient, or (with OPENKDA_CHECK=1) an index beyond the pool or one that comes twice;
        BackendUnavailable for a backend that cannot run. The state is then unchanged.
    Numerics: the bits of causal_conv1d on the same backend.
    """
    _check(x, conv_state, weight, bias, activation, state_indices)
    run = AVAILABLE[_OP][backends.choose(_OP, backend, AVAILABLE[_OP], x, refused=why_not_width(int(weight.shape[1])))]
    with frameworks.of(x).no_grad():
        return run(x, conv_state, weight, bias, silu=activation == "silu", state_indices=state_indices)


def _check(x: Any, state: Any, weight: Any, bias: Any, activation: Any, indices: Any) -> None:
    checks.floating(_OP, "x", x)
    checks.rank(_OP, "x", x, "[N, C]")
    (N, C), fw = (int(n) for n in x.shape), frameworks.of(x)
    W = check_filter(_OP, weight, bias, activation, channels=C)
    checks.dtype(_OP, "conv_state", state, (fw.dtype_name(x),), "it holds inputs, so it follows x")
    axes = "[N, C, W-1]" if indices is None else "[slots, C, W-1]"
    checks.rank(_OP, "conv_state", state, axes)
    slots = N if indices is None else int(state.shape[0])
    checks.shape(_OP, "conv_state", state, (slots, C, W - 1), axes, "from a state of W columns drop the first")
    if fw.contiguous(state) is not state:
        checks.bad_value(_OP, "conv_state", "be contiguous", "other strides", "it is updated in place")
    if indices is not None:
        checks.state_indices(_OP, indices, sequences=N, slots=slots)
    checks.same_device(_OP, "x", x, conv_state=state, weight=weight, bias=bias, state_indices=indices)
    checks.inference_only(_OP, "causal_conv1d", x, x=x, conv_state=state, weight=weight, bias=bias)


def _step(
    convolve: Callable[..., Any], x: Any, pool: Any, weight: Any, bias: Any, *, silu: bool, state_indices: Any
) -> Any:
    """Through a convolution of whole sequences: gather states, convolve one token, write them back. Padding computes on
    zeros and is dropped by selects.
    """
    fw = frameworks.of(x)
    N, activation = fw.shape(x)[0], "silu" if silu else None
    slots = fw.arange(N, like=x) if state_indices is None else fw.cast(state_indices, "int64")
    live = slots >= 0  # [N]
    slots = fw.maximum(slots, 0)
    states = fw.where(live[:, None, None], fw.take(pool, slots, 0), 0.0)
    token = fw.where(live[:, None], x, 0.0)[:, None]  # [N, 1, C]
    y, states = convolve(token, weight, bias, activation=activation, initial_state=states, output_final_state=True)
    if N > 0 and fw.shape(pool)[2] > 0:
        packing.write_slots_(pool, slots, states, live)
    return fw.where(live[:, None], y[:, 0], 0.0)


def _fused(*args: Any, **options: Any) -> Any:
    from openkda.conv import fused  # needs triton, which not everybody has

    return fused.causal_conv1d_update(*args, **options)


AVAILABLE = {  # best first
    _OP: {
        "triton": _fused,
        "eager": functools.partial(_step, eager.causal_conv1d),
        "reference": functools.partial(_step, reference.causal_conv1d),
    }
}
