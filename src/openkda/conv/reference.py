"""The causal depthwise convolution, token by token: the definition that every other form is tested against.

    window  = [x[t-W+1], .., x[t]]       per channel; inputs before the sequence come from its initial state, or are 0
    y[t]    = act(bias + sum over j of weight[:, j] * window[j])                                 act = silu or nothing
    state   = the last W-1 inputs, oldest first                                                  [C, W-1]

Inside: fp64 for fp64 inputs, fp32 otherwise; states and outputs have the dtype of x. Gradients by the library's
autograd.
"""

from __future__ import annotations

import itertools
from typing import Any

from openkda import frameworks


def causal_conv1d(
    x: Any,  # [B, T, C]
    weight: Any,  # [C, W]
    bias: Any | None = None,  # [C]
    *,
    activation: str | None = None,
    initial_state: Any | None = None,  # [N, C, W-1]
    output_final_state: bool = False,
    cu_seqlens: Any | None = None,  # [N+1]; its values are read on the host
) -> tuple[Any, Any | None]:
    """`openkda.causal_conv1d` by definition, arguments unchecked; see there."""
    fw = frameworks.of(x)
    dtype, (B, T, C), W = fw.dtype_name(x), fw.shape(x), fw.shape(weight)[1]
    inner = "float64" if dtype == "float64" else "float32"
    sequences = [(b, 0, T) for b in range(B)]  # (batch row, first token, one past the last)
    if cu_seqlens is not None:
        offsets = fw.to_list(cu_seqlens)
        sequences = [(0, start, end) for start, end in itertools.pairwise(offsets)]

    outputs, states = [], []
    for n, (b, start, end) in enumerate(sequences):
        state = fw.zeros((C, W - 1), like=x) if initial_state is None else initial_state[n]
        for t in range(start, end):
            window = fw.concat([state, x[b, t][:, None]], 1)  # [C, W], oldest first
            y = fw.sum(fw.cast(window, inner) * fw.cast(weight, inner), 1)
            if bias is not None:
                y = y + fw.cast(bias, inner)
            outputs.append(y * fw.sigmoid(y) if activation == "silu" else y)
            state = window[:, 1:]
        states.append(state)

    outputs += [fw.zeros((C,), like=x, dtype=inner)] * (B * T - len(outputs))  # after the last offset: padding
    y = fw.stack(outputs, 0) if outputs else fw.zeros((0, C), like=x)
    y = fw.cast(fw.reshape(y, (B, T, C)), dtype)
    if not output_final_state:
        return y, None
    return y, fw.stack(states, 0) if states else fw.zeros((0, C, W - 1), like=x)
