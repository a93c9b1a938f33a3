"""The causal depthwise convolution, forward.

    y[t] = act(bias + sum over lag of w_lag x[t - lag])        act = silu or nothing; lag from 0 to W-1, W = 2 to 4

in        x [B, T, C] any 16-bit type or fp32, channels side by side, rows anywhere; weight [C, W], bias [C];
          initial_state [N, C, W-1] in the type of x; cu_seqlens [N+1]
out       y [B, T, C] in the type of x; 0 behind the last offset
cost      reads and writes sizeof(x) * B*T*C bytes; 2W + 4 flops an element: bandwidth-bound
program   BC channels x `rows` tokens, W-1 of them read twice; grid (ranges * ceil(C / BC))
oracle    openkda.conv.eager.causal_conv1d
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from openkda import frameworks
from openkda.conv.kernels import tuning
from openkda.conv.kernels.common import history, locate, logistic, row, sequence_at, taps_of, weighted


@triton.jit
def _put(p_y, valid, in_c, z, SILU: tl.constexpr):
    if SILU:
        z = z * logistic(z)
    tl.store(p_y, z.to(p_y.dtype.element_ty), mask=in_c & valid)


@triton.jit
def _segment(
    p_x, state, p_y, w0, w1, w2, w3, bias, count, place, inside, in_c, stride_xt, C,
    W: tl.constexpr, SILU: tl.constexpr, INITIAL: tl.constexpr,
):  # fmt: skip
    """`count` rows of one sequence from p_x on, four at a time; the next four are on their way meanwhile."""
    p1, p2, p3 = history(p_x, state, stride_xt, place, inside, in_c, W, INITIAL)
    left = tl.where(inside, count, 0)  # rows to read
    b0 = row(p_x, left > 0, in_c)
    b1 = row(p_x + stride_xt, left > 1, in_c)
    b2 = row(p_x + 2 * stride_xt, left > 2, in_c)
    b3 = row(p_x + 3 * stride_xt, left > 3, in_c)
    for _ in range(tl.cdiv(count, 4)):
        x0, x1, x2, x3 = b0.to(tl.float32), b1.to(tl.float32), b2.to(tl.float32), b3.to(tl.float32)
        p_x += 4 * stride_xt
        left -= 4
        b0 = row(p_x, left > 0, in_c)
        b1 = row(p_x + stride_xt, left > 1, in_c)
        b2 = row(p_x + 2 * stride_xt, left > 2, in_c)
        b3 = row(p_x + 3 * stride_xt, left > 3, in_c)
        _put(p_y, count > 0, in_c, weighted(x0, p1, p2, p3, w0, w1, w2, w3, bias, W), SILU)
        _put(p_y + C, count > 1, in_c, weighted(x1, x0, p1, p2, w0, w1, w2, w3, bias, W), SILU)
        _put(p_y + 2 * C, count > 2, in_c, weighted(x2, x1, x0, p1, w0, w1, w2, w3, bias, W), SILU)
        _put(p_y + 3 * C, count > 3, in_c, weighted(x3, x2, x1, x0, w0, w1, w2, w3, bias, W), SILU)
        p_y += 4 * C
        count -= 4
        p1, p2, p3 = x3, x2, x1


@triton.jit(do_not_specialize=["T", "N", "total", "rows"])
def _conv_fwd_kernel(
    x, weight, bias, initial_state, y, cu_seqlens, T, N, total, rows, C, stride_xb, stride_xt,
    W: tl.constexpr, BC: tl.constexpr, SILU: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    # Which work: channels vary fastest, so that programs that run together read whole rows.
    num_c = tl.cdiv(C, BC)
    i_c, i_r = tl.program_id(0) % num_c, tl.program_id(0) // num_c
    o_c = i_c * BC + tl.arange(0, BC)
    in_c = o_c < C
    t = i_r * rows
    last = tl.minimum(t + rows, total)

    w0, w1, w2, w3 = taps_of(weight, i_c, C, W, BC)
    b_bias = tl.zeros([BC], tl.float32)
    if bias is not None:
        b_bias = tl.load(bias + o_c, mask=in_c, other=0.0).to(tl.float32)

    while t < last:
        n, begin, end = sequence_at(cu_seqlens, t, T, N, PACKED)
        inside = t < end
        stop = tl.where(inside, tl.minimum(end, last), last)
        # In the tail nothing is read, and z = 0 where the bias is.
        p_x = x + locate(n, t, begin, stride_xb, stride_xt, PACKED) + o_c
        p_y = y + t.to(tl.int64) * C + o_c
        p_state = x
        if initial_state is not None:
            p_state = initial_state + (n.to(tl.int64) * C + o_c) * (W - 1)
        _segment(
            p_x, p_state, p_y, w0, w1, w2, w3, tl.where(inside, b_bias, 0.0), stop - t, t - begin, inside, in_c,
            stride_xt, C, W, SILU, initial_state is not None,
        )  # fmt: skip
        t = stop


@triton.jit(do_not_specialize=["T"])
def _final_state_kernel(
    x, initial_state, final_state, cu_seqlens, T, C, stride_xb, stride_xt,
    W: tl.constexpr, BC: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The last W-1 of (initial state, tokens) of one sequence, bit for bit."""
    num_c = tl.cdiv(C, BC)
    o_c = tl.program_id(0) % num_c * BC + tl.arange(0, BC)
    in_c = o_c < C
    n = (tl.program_id(0) // num_c).to(tl.int64)
    begin, end, p_x = T * 0, T, x + n * stride_xb + o_c
    if PACKED:
        begin, end, p_x = tl.load(cu_seqlens + n).to(tl.int32), tl.load(cu_seqlens + n + 1).to(tl.int32), x + o_c
    p_state = (n * C + o_c) * (W - 1)
    for m in tl.static_range(W - 1):
        t = end - (W - 1) + m
        value = row(p_x + t.to(tl.int64) * stride_xt, t >= begin, in_c)
        if initial_state is not None:
            old = tl.load(initial_state + p_state + (end - begin + m), mask=in_c & (t < begin), other=0.0)
            value = tl.where(t >= begin, value, old)
        tl.store(final_state + p_state + m, value, mask=in_c)


def conv_fwd(
    *, x: Any, weight: Any, bias: Any | None, initial_state: Any | None, cu_seqlens: Any | None, y: Any, silu: bool
) -> None:
    """Write y. x has rows of adjacent channels, everything else is contiguous."""
    fw = frameworks.of(x)
    (B, T, C), W = fw.shape(x), fw.shape(weight)[1]
    if B * T * C == 0:
        return
    N = B if cu_seqlens is None else fw.shape(cu_seqlens)[0] - 1
    stage = "conv_fwd" if initial_state is None and cu_seqlens is None else "conv_fwd_more"
    plan = tuning.plan(stage, x, tokens=B * T, channels=C)
    with fw.on_device(x):
        _conv_fwd_kernel[(plan.programs,)](
            x, weight, bias, initial_state, y, cu_seqlens, T, N, B * T, plan.rows, C, *fw.strides(x)[:2],
            W=W, SILU=silu, PACKED=cu_seqlens is not None, **plan.options,
        )  # fmt: skip


def final_state(*, x: Any, initial_state: Any | None, cu_seqlens: Any | None, final_state: Any) -> None:
    """Write final_state [N, C, W-1], in the type of x."""
    fw = frameworks.of(x)
    N, C, columns = fw.shape(final_state)
    if N * C == 0:
        return
    block = min(1024, triton.next_power_of_2(C))
    with fw.on_device(x):
        _final_state_kernel[(N * -(-C // block),)](
            x, initial_state, final_state, cu_seqlens, fw.shape(x)[1], C, *fw.strides(x)[:2],
            W=columns + 1, BC=block, PACKED=cu_seqlens is not None,
        )  # fmt: skip
