"""The causal depthwise convolution as W shifted products, on any device, with a hand-written derivative.

A *tap* of lag l holds x[t-l] for every t, so that y = act(z), z = bias + sum over l of w_l * tap_l, w_l =
weight[:, W-1-l]. Where t-l lies before the sequence the tap reads the initial state instead, or 0. Dense and packed
input build their taps differently and add them in the same order, so the sum has the same bits alone, in a batch or
packed.

    dz = dy act'(z)     dw_l = sum over t of dz tap_l     dtap_l = dz w_l, which go back where the taps came from

Autograd would keep a dozen fp32 tensors of the size of x; this keeps the inputs alone. The backward is made of
differentiable operations on them, so second derivatives are right as well.

Sizes come from shapes only: nothing here waits for a device. Every gather below reads each source at most once
where its value counts; all other reads are masked.
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
    call = (x, weight, bias, initial_state, cu_seqlens, activation == "silu", output_final_state)
    return frameworks.of(x).custom(_Conv, *call)


class _Conv:
    @staticmethod
    def forward(fw: Any, ctx: Any, *args: Any) -> tuple:
        *tensors, ctx.silu, final = args
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        dtype = fw.dtype_name(tensors[0])
        weight, bias, window = _widened(fw, *tensors)
        z = _weighted(fw, window, weight, bias)
        y = fw.cast(window.keep(z * fw.sigmoid(z) if ctx.silu else z), dtype)
        return y, fw.cast(window.final_state(), dtype) if final else None

    @staticmethod
    def backward(fw: Any, ctx: Any, dy: Any | None, dfinal: Any | None) -> tuple:
        x, weight, bias, state, cu_seqlens = ctx.saved_tensors
        wide_weight, wide_bias, window = _widened(fw, x, weight, bias, state, cu_seqlens)
        dz = fw.zeros(fw.shape(x), like=wide_weight) if dy is None else window.keep(fw.cast(dy, _inner(fw, x)))
        if ctx.silu:
            z = _weighted(fw, window, wide_weight, wide_bias)
            s = fw.sigmoid(z)
            dz = dz * (s + z * s * (1 - s))
        W = fw.shape(weight)[1]
        dtaps = [dz * wide_weight[:, W - 1 - lag] for lag in range(W)]
        dx, dstate = window.spread(dtaps, None if dfinal is None else fw.cast(dfinal, _inner(fw, x)))
        dweight = fw.stack([fw.sum(dz * window.tap(W - 1 - j), (0, 1)) for j in range(W)], 1)
        grads = (dx, dweight, fw.sum(dz, (0, 1)), dstate)
        named = zip(grads, (x, weight, bias, state), strict=True)
        return (*(None if t is None else fw.cast(d, fw.dtype_name(t)) for d, t in named), None, None, None)


def _inner(fw: Any, x: Any) -> str:
    return "float64" if fw.dtype_name(x) == "float64" else "float32"


def _widened(fw: Any, x: Any, weight: Any, bias: Any | None, state: Any | None, cu_seqlens: Any | None) -> tuple:
    """Weight and bias in fp32 (fp64 for fp64 inputs), and the inputs as a window that gives taps."""
    x, weight, bias, state = (t if t is None else fw.cast(t, _inner(fw, x)) for t in (x, weight, bias, state))
    W = fw.shape(weight)[1]
    return weight, bias, _Dense(fw, x, W, state) if cu_seqlens is None else _Packed(fw, x, W, state, cu_seqlens)


def _weighted(fw: Any, window: Any, weight: Any, bias: Any | None) -> Any:
    """z: one [C] slice of the weight per lag, oldest input first; the last one meets the current token."""
    taps = fw.unstack(weight, 1)
    products = (window.tap(len(taps) - 1 - j) * weight_j for j, weight_j in enumerate(taps))
    z = functools.reduce(operator.add, products)
    return z if bias is None else z + bias


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

    def spread(self, dtaps: list[Any], dfinal: Any | None) -> tuple[Any, Any]:
        """Gradients of x and of the initial state from those of the taps, by lag, and of the final state."""
        fw, width = self.fw, self.W - 1
        parts = [fw.pad(dtap, 1, width - lag, lag) for lag, dtap in enumerate(dtaps)]
        if dfinal is not None:
            parts.append(fw.pad(fw.swap(dfinal), 1, self.T, 0))
        dline = functools.reduce(operator.add, parts)
        return dline[:, width:], fw.swap(dline[:, :width])


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
        self.length = self.cu[1:] - self.cu[:-1]  # [N]
        self.columns = (fw.arange(W - 1, like=self.cu) - (W - 1))[None]  # [1, W-1]: a column's place before a sequence
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
        fw = self.fw
        # Place within the sequence of state column i: below 0 it is column place + W-1 of the initial state.
        place = self.length[:, None] + self.columns  # [N, W-1]
        old = 0.0 if self.states is None else self._of_states(self.states, place + (self.W - 1))
        if self.T == 0:
            state = fw.zeros((self.N, self.W - 1, self.C), like=self.x) if self.states is None else old
        else:
            state = fw.where((place >= 0)[:, :, None], self._of_tokens(self.x, place), old)
        return fw.swap(state)

    def spread(self, dtaps: list[Any], dfinal: Any | None) -> tuple[Any, Any]:
        """As in `_Dense`; all gathers. A tap's gradient goes to the token `lag` before, or to a column of the state."""
        fw, width, dx = self.fw, self.W - 1, dtaps[0]
        dstate = fw.zeros((self.N, width, self.C), like=self.x)
        for lag, dtap in enumerate(dtaps[1:], 1):
            reach = fw.where((self.place >= lag)[None, :, None], dtap, 0.0)
            dx = dx + fw.pad(reach, 1, 0, lag)[:, lag : lag + self.T]
            if self.T > 0:
                place = self.columns + lag  # [1, W-1]: of the token whose tap reads column m, if there is one
                meets = (place >= 0) & (place < self.length[:, None])  # [N, W-1]
                dstate = dstate + fw.where(meets[:, :, None], self._of_tokens(dtap, place), 0.0)
        if dfinal is not None and width:
            dfinal = fw.reshape(fw.swap(dfinal), (self.N * width, self.C))
            column = self.place - fw.take(self.length, self.owner, 0) + width  # [T], of the final state
            index = self.owner * width + fw.minimum(fw.maximum(column, 0), width - 1)
            dx = dx + fw.where((column >= 0)[None, :, None], fw.take(dfinal, index, 0)[None], 0.0)
            column = self.columns + width - self.length[:, None]  # [N, W-1]: where short sequences left their state
            dstate = dstate + fw.where((column >= 0)[:, :, None], self._of_states(dfinal, column), 0.0)
        return self.keep(dx), fw.swap(dstate)

    def _of_tokens(self, x: Any, place: Any) -> Any:
        """Rows of x [1, T, C] at places [N or 1, W-1] within each sequence -> [N, W-1, C]; clipped where out of it."""
        fw = self.fw
        token = fw.minimum(fw.maximum(self.cu[:-1, None] + place, 0), self.T - 1)
        return fw.reshape(fw.take(x[0], fw.reshape(token, (-1,)), 0), (self.N, self.W - 1, self.C))

    def _of_states(self, states: Any, column: Any) -> Any:
        """Columns [N, W-1] of each sequence's state, of states [N*(W-1), C] -> [N, W-1, C]; clipped where out of it."""
        fw, width = self.fw, self.W - 1
        row = fw.arange(self.N, like=self.cu)[:, None] * width
        index = row + fw.minimum(fw.maximum(column, 0), width - 1)
        return fw.reshape(fw.take(states, fw.reshape(index, (-1,)), 0), (self.N, width, self.C))
