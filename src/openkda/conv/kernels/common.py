"""What the convolution's kernels share: sequences of a row of tokens, taps, and the inputs before a token.

A program owns BC channels and walks over a range of tokens, row by row, with the last W-1 inputs in registers: each
input is read once. A *segment* is the part of its range that lies in one sequence; a tap's *lag* is the distance of its
input, so that y[t] = act(bias + sum over lag of w_lag x[t - lag]) and w_lag = weight[:, W-1-lag].

Dense input is B sequences of T tokens, packed input N sequences from the offsets alone; both are rows 0 .. B*T of one
axis here. All of a row's arithmetic is in fp32, in the same order wherever the row lies, so outputs and token gradients
do not depend on how tokens are cut into ranges.
"""

from __future__ import annotations

import triton
import triton.language as tl

from openkda.kda.kernels.common import INTERPRETED, LOG2_E


@triton.jit
def slot_of(cu_seqlens, t, N):
    """The last slot n in [0, N) with cu[n] <= t, by bisection: the one that holds token t, or the last before it."""
    low = tl.full((), 0, tl.int32)
    high = low + N
    while high - low > 1:
        middle = (low + high) // 2
        starts = tl.load(cu_seqlens + middle) <= t
        low = tl.where(starts, middle, low)
        high = tl.where(starts, high, middle)
    return low


@triton.jit
def sequence_at(cu_seqlens, t, T, N, PACKED: tl.constexpr):
    """(n, begin, end) of the sequence at row t; in the tail of packed input end <= t."""
    if PACKED:
        n = slot_of(cu_seqlens, t, N)
        return n, tl.load(cu_seqlens + n).to(tl.int32), tl.load(cu_seqlens + n + 1).to(tl.int32)
    n = t // T
    return n, n * T, n * T + T


@triton.jit
def locate(n, t, begin, stride_b, stride_t, PACKED: tl.constexpr):
    """Offset in elements of row t, which lies in sequence n: dense ones are rows of a batch."""
    if PACKED:
        return t.to(tl.int64) * stride_t
    return n.to(tl.int64) * stride_b + (t - begin).to(tl.int64) * stride_t


@triton.jit
def taps_of(weight, i_c, C, W: tl.constexpr, BC: tl.constexpr):
    """w_0 .. w_3 [BC] by lag, fp32; 0 beyond W-1. weight [C, W] is read in whole rows."""
    o_c = i_c * BC + tl.arange(0, BC)
    j = tl.arange(0, 4)[None, :]
    w = tl.load(weight + o_c[:, None] * W + j, mask=(o_c < C)[:, None] & (j < W), other=0.0).to(tl.float32)
    w0 = tl.sum(tl.where(j == W - 1, w, 0.0), 1)
    w1 = tl.sum(tl.where(j == W - 2, w, 0.0), 1)
    w2 = tl.sum(tl.where(j == W - 3, w, 0.0), 1)
    w3 = tl.sum(tl.where(j == W - 4, w, 0.0), 1)
    return w0, w1, w2, w3


@triton.jit
def row(p_x, valid, in_c):
    """A row at pointers p_x; zeros where it is not valid, which is then not read."""
    return tl.load(p_x, mask=in_c & valid, other=0.0)


@triton.jit
def before(p_x, state, stride_t, place, valid, in_c, LAG: tl.constexpr, W: tl.constexpr, INITIAL: tl.constexpr):
    """The input LAG rows before p_x, in fp32; where it lies before the sequence, its column of the state, or 0."""
    value = row(p_x - LAG * stride_t, valid & (place >= LAG), in_c)
    if INITIAL:
        old = tl.load(state + (place + (W - 1 - LAG)), mask=in_c & valid & (place < LAG), other=0.0)
        value = tl.where(place >= LAG, value, old)
    return value.to(tl.float32)


@triton.jit
def history(p_x, state, stride_t, place, valid, in_c, W: tl.constexpr, INITIAL: tl.constexpr):
    """The W-1 inputs before p_x, latest first; place is that of p_x in its sequence."""
    p1 = before(p_x, state, stride_t, place, valid, in_c, 1, W, INITIAL)
    p2 = p1
    p3 = p1
    if W > 2:
        p2 = before(p_x, state, stride_t, place, valid, in_c, 2, W, INITIAL)
    if W > 3:
        p3 = before(p_x, state, stride_t, place, valid, in_c, 3, W, INITIAL)
    return p1, p2, p3


# Products and sums below are fused by hand: where a compiler fuses them is its choice, place by place, and a row's bits
# would depend on where in a range it lies.
@triton.jit
def weighted(x0, x1, x2, x3, w0, w1, w2, w3, bias, W: tl.constexpr):
    """bias + sum over lag of w_lag x_lag."""
    z = tl.fma(w0, x0, tl.fma(w1, x1, bias))
    if W > 2:
        z = tl.fma(w2, x2, z)
    if W > 3:
        z = tl.fma(w3, x3, z)
    return z


@triton.jit
def logistic(z):
    """sigmoid(z) with the hardware's reciprocal: 1 + 2^-z' is in [1, inf], where it needs no care, 1 ulp off."""
    if INTERPRETED:
        return 1.0 / (1.0 + tl.exp2(z * -LOG2_E))
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 u; mul.f32 u, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 u, u; add.f32 u, u, 0f3F800000; "
            "rcp.approx.ftz.f32 $0, u; }",
            "=f,f", [z], tl.float32, True, 1,
        )  # fmt: skip


@triton.jit
def silu_derivative(z):
    """silu'(z) = s + z s (1 - s), s = sigmoid(z)."""
    s = logistic(z)
    return tl.fma(z * s, 1.0 - s, s)
