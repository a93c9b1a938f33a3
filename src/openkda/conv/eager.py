"""The causal depthwise convolution as W shifted products, on any device; differentiable by the library's autograd.

A *tap* of lag l holds x[t-l] for every t, so that y = act(bias + sum over l of weight[:, W-1-l] * tap_l). Where t-l
lies before the sequence the tap reads the initial state instead, or 0. Dense and packed input build their taps
differently and add them in the same order, so the sum has the same bits alone, in a batch or packed.

Sizes come from shapes only: nothing here waits for a device. Every gather below reads each source at most once
where its value counts; all other reads are masked, so their gradients are exact zeros and the sum of gradients does
not depend on its order.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

from openkda import frameworks, packing


def causal_conv1d(
    x: Any,  # [B, T, C]
    weight: Any,  # [C, W]
    bias: Any | None = None,  # [C]
    *,
    activation: str | None = None,
    initial_state: Any | None = None,  # [N, C, W-1]
    output_final_state: bool = False,
    cu_seqlens: Any | None = None,  # [N+1]
) -> tuple[Any, Any | None]:
    """`openkda.causal_conv1d` as shifted products, arguments unchecked; see there."""
    fw = frameworks.of(x)
    dtype = fw.dtype_name(x)
    # Widened once, at the door: sums, and the gradient of x over its W uses, are then kept in fp32 (fp64 for fp64
    # inputs).
    inner = "float64" if dtype == "float64" else "float32"
    x, weight, bias, initial_state = (t if t is None else fw.cast(t, inner) for t in (x, weight, bias, initial_state))
    W = fw.shape(weight)[1]
    window = _Dense(fw, x, W, initial_state) if cu_seqlens is None else _Packed(fw, x, W, initial_state, cu_seqlens)

    # One [C] slice of the weight per lag, oldest input first; the last one meets the current token.
    products = (window.tap(W - 1 - j) * weight_j for j, weight_j in enumerate(fw.unstack(weight, 1)))
    y = functools.reduce(operator.add, products)
    if bias is not None:
        y = y + bias
    if activation == "silu":
        y = y * fw.sigmoid(y)
    final_state = fw.cast(window.final_state(), dtype) if output_final_state else None
    return fw.cast(window.keep(y), dtype), final_state


class _Dense:
    """Every batch row is one sequence: its state and its tokens in a row, [B, W-1+T, C]."""

    def __init__(self, fw: Any, x: Any, W: int, initial_state: Any | None) -> None:
        self.fw, self.T, self.W = fw, fw.shape(x)[1], W
        if initial_state is None:
            self.line = fw.pad(x, 1, self.W - 1, 0)
        else:
            self.line = fw.concat([fw.swap(initial_state), x], 1)

    def tap(self, lag: int) -> Any:
        first = self.W - 1 - lag
        return self.line[:, first : first + self.T]

    def keep(self, y: Any) -> Any:
        return y

    def final_state(self) -> Any:
        # A copy: a view would keep the whole line alive for as long as a cache keeps the state.
        return self.fw.copy(self.fw.swap(self.line[:, self.T :]))


class _Packed:
    """One row of N sequences and a tail. `place` is a token's place within its sequence."""

    def __init__(self, fw: Any, x: Any, W: int, initial_state: Any | None, cu_seqlens: Any) -> None:
        self.fw, (_, self.T, self.C), self.W = fw, fw.shape(x), W
        self.cu = fw.cast(cu_seqlens, "int64")
        self.N = fw.shape(self.cu)[0] - 1
        owner = packing.sequence_ids(self.cu, self.T)  # [T], N for the tail
        self.inside = (owner < self.N)[None, :, None]  # [1, T, 1]
        self.owner = fw.minimum(owner, self.N - 1)
        self.place = fw.arange(self.T, like=self.cu) - fw.take(self.cu, self.owner, 0)  # [T]
        # The tail is cleared before anything is computed, so that a NaN there meets neither an output nor a
        # gradient.
        self.x = fw.where(self.inside, x, 0.0)
        # [N*(W-1), C]: column i of sequence n at n*(W-1) + i
        self.states = None
        if initial_state is not None:
            self.states = fw.reshape(fw.swap(initial_state), (self.N * (self.W - 1), self.C))

    def tap(self, lag: int) -> Any:
        """x[t-lag] where that token is in t's sequence, else its state's column W-1 + place - lag, else 0."""
        fw = self.fw
        if lag == 0:
            return self.x
        shifted = fw.pad(self.x, 1, lag, 0)[:, : self.T]
        before = 0.0
        if self.states is not None:
            column = fw.minimum(self.place, lag - 1) + (self.W - 1 - lag)  # in range also where it is masked
            before = fw.take(self.states, self.owner * (self.W - 1) + column, 0)[None]
        return fw.where((self.place >= lag)[None, :, None], shifted, before)

    def keep(self, y: Any) -> Any:
        return self.fw.where(self.inside, y, 0.0)

    def final_state(self) -> Any:
        """The last W-1 of (initial state, tokens) of each sequence [N, C, W-1]."""
        fw, size = self.fw, (self.N, self.W - 1)
        # Place within the sequence of state column i: below 0 it is column place + W-1 of the initial state.
        length = self.cu[1:] - self.cu[:-1]  # [N]
        place = length[:, None] + (fw.arange(self.W - 1, like=self.cu) - (self.W - 1))[None]  # [N, W-1]
        old = 0.0
        if self.states is not None:
            column = fw.minimum(place, -1) + (self.W - 1)
            row = fw.arange(self.N, like=self.cu)[:, None] * (self.W - 1)
            old = fw.reshape(fw.take(self.states, fw.reshape(row + column, (-1,)), 0), (*size, self.C))
        if self.T == 0:
            state = fw.zeros((*size, self.C), like=self.x) if self.states is None else old
        else:
            token = fw.maximum(self.cu[:-1, None] + place, 0)
            new = fw.reshape(fw.take(self.x[0], fw.reshape(token, (-1,)), 0), (*size, self.C))
            state = fw.where((place >= 0)[:, :, None], new, old)
        return fw.swap(state)
