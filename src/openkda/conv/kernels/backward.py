"""The causal depthwise convolution, backward.

    z[t]     recomputed                                                        dz = dy act'(z)
    dx[t]    sum over lag of w_lag dz[t + lag]        within the sequence      + dfinal_state where t is in its last W-1
    dw_lag   sum over t of dz[t] x[t - lag]                                    dbias = sum over t of dz[t]
    dinitial_state    the same as dx, for the inputs before the sequence

in        dy [B, T, C] rows of adjacent channels; x, weight, bias, initial_state, cu_seqlens as in the forward
out       dx [B, T, C] in the type of x; dweight, dbias, dinitial_state in the types of theirs
cost      reads 2 and writes 1 of sizeof(x) * B*T*C bytes; 6W + 9 flops an element: bandwidth-bound
program   BC channels x `rows` tokens, W-1 of them read three times; sums of dw and dbias in registers, written once as
          partial sums [ranges, W+1, C] that `sum_partials` adds in a fixed order: the same bits in every run
oracle    openkda.conv.eager.causal_conv1d
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from openkda import frameworks
from openkda.conv.kernels import tuning
from openkda.conv.kernels.common import history, locate, row, sequence_at, silu_derivative, taps_of, weighted
from openkda.kda.kernels.partials import sum_partials


@triton.jit
def _dz(dy, x0, x1, x2, x3, w0, w1, w2, w3, bias, W: tl.constexpr, SILU: tl.constexpr):
    """dy act'(z) of a row. Of a row behind its sequence dy is 0, and z has no input that the last row does not have: it
    is NaN only where the last row's is.
    """
    dz = dy.to(tl.float32)
    if SILU:
        dz *= silu_derivative(weighted(x0, x1, x2, x3, w0, w1, w2, w3, bias, W))
    return dz


@triton.jit
def _spread(e0, e1, e2, e3, w0, w1, w2, w3, W: tl.constexpr):
    """dx[r - (W-1)] = sum over lag of w_lag dz[r - (W-1) + lag]; e_i is dz[r - i]."""
    if W == 2:
        return tl.fma(w0, e1, w1 * e0)
    elif W == 3:
        return tl.fma(w0, e2, tl.fma(w1, e1, w2 * e0))
    else:
        return tl.fma(w0, e3, tl.fma(w1, e2, tl.fma(w2, e1, w3 * e0)))


@triton.jit
def _state_gradient(dfinal_state, column, inside, in_c, W: tl.constexpr):
    mask = in_c & inside & (column >= 0) & (column < W - 1)
    return tl.load(dfinal_state + column, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _segment(
    p_x, p_dy, state, dfinal_state, p_dx, w0, w1, w2, w3, bias, s0, s1, s2, s3, s_bias, count, place, behind, inside,
    in_c, stride_xt, stride_dt, C, W: tl.constexpr, SILU: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr,
    DW: tl.constexpr, DBIAS: tl.constexpr,
):  # fmt: skip
    """dx of `count` rows from p_x on; `behind` rows of the sequence are left, p_x counted.

    That takes dz of W-1 rows more, whose sums belong to this segment; those of its first W-1 rows to the one before,
    unless the sequence begins here.
    """
    p1, p2, p3 = history(p_x, state, stride_xt, place, inside, in_c, W, INITIAL)
    left = tl.where(inside, tl.minimum(count + (W - 1), behind), 0)  # rows to read
    own = place == 0
    e1 = tl.zeros_like(w0)
    e2 = e1
    e3 = e1
    for _ in tl.static_range(W - 1):
        x0 = row(p_x, left > 0, in_c).to(tl.float32)
        e0 = _dz(row(p_dy, left > 0, in_c), x0, p1, p2, p3, w0, w1, w2, w3, bias, W, SILU)
        p_x += stride_xt
        p_dy += stride_dt
        left -= 1
        counted = tl.where(own, e0, 0.0)
        if DW:
            s0 += counted * x0
            s1 += counted * p1
            if W > 2:
                s2 += counted * p2
            if W > 3:
                s3 += counted * p3
        if DBIAS:
            s_bias += counted
        e3 = e2
        e2 = e1
        e1 = e0
        p3 = p2
        p2 = p1
        p1 = x0

    b0 = row(p_x, left > 0, in_c)
    b1 = row(p_x + stride_xt, left > 1, in_c)
    b2 = row(p_x + 2 * stride_xt, left > 2, in_c)
    b3 = row(p_x + 3 * stride_xt, left > 3, in_c)
    g0 = row(p_dy, left > 0, in_c)
    g1 = row(p_dy + stride_dt, left > 1, in_c)
    g2 = row(p_dy + 2 * stride_dt, left > 2, in_c)
    g3 = row(p_dy + 3 * stride_dt, left > 3, in_c)
    behind -= W - 1  # from here on: of the row at p_x
    for _ in range(tl.cdiv(count, 4)):  # dz of four rows at p_x, dx of those W-1 before them
        x0, x1, x2, x3 = b0.to(tl.float32), b1.to(tl.float32), b2.to(tl.float32), b3.to(tl.float32)
        d0 = _dz(g0, x0, p1, p2, p3, w0, w1, w2, w3, bias, W, SILU)
        d1 = _dz(g1, x1, x0, p1, p2, w0, w1, w2, w3, bias, W, SILU)
        d2 = _dz(g2, x2, x1, x0, p1, w0, w1, w2, w3, bias, W, SILU)
        d3 = _dz(g3, x3, x2, x1, x0, w0, w1, w2, w3, bias, W, SILU)
        p_x += 4 * stride_xt
        p_dy += 4 * stride_dt
        left -= 4
        b0 = row(p_x, left > 0, in_c)
        b1 = row(p_x + stride_xt, left > 1, in_c)
        b2 = row(p_x + 2 * stride_xt, left > 2, in_c)
        b3 = row(p_x + 3 * stride_xt, left > 3, in_c)
        g0 = row(p_dy, left > 0, in_c)
        g1 = row(p_dy + stride_dt, left > 1, in_c)
        g2 = row(p_dy + 2 * stride_dt, left > 2, in_c)
        g3 = row(p_dy + 3 * stride_dt, left > 3, in_c)
        if DW:
            s0 = s0 + d0 * x0 + d1 * x1 + d2 * x2 + d3 * x3
            s1 = s1 + d0 * p1 + d1 * x0 + d2 * x1 + d3 * x2
            if W > 2:
                s2 = s2 + d0 * p2 + d1 * p1 + d2 * x0 + d3 * x1
            if W > 3:
                s3 = s3 + d0 * p3 + d1 * p2 + d2 * p1 + d3 * x0
        if DBIAS:
            s_bias += (d0 + d1) + (d2 + d3)
        o0 = _spread(d0, e1, e2, e3, w0, w1, w2, w3, W)
        o1 = _spread(d1, d0, e1, e2, w0, w1, w2, w3, W)
        o2 = _spread(d2, d1, d0, e1, w0, w1, w2, w3, W)
        o3 = _spread(d3, d2, d1, d0, w0, w1, w2, w3, W)
        if FINAL:
            if behind <= 3:  # the row W-1 before the first that does not exist is column 0 of the final state
                o0 += _state_gradient(dfinal_state, 0 - behind, inside, in_c, W)
                o1 += _state_gradient(dfinal_state, 1 - behind, inside, in_c, W)
                o2 += _state_gradient(dfinal_state, 2 - behind, inside, in_c, W)
                o3 += _state_gradient(dfinal_state, 3 - behind, inside, in_c, W)
            behind -= 4
        tl.store(p_dx, o0.to(p_dx.dtype.element_ty), mask=in_c & (count > 0))
        tl.store(p_dx + C, o1.to(p_dx.dtype.element_ty), mask=in_c & (count > 1))
        tl.store(p_dx + 2 * C, o2.to(p_dx.dtype.element_ty), mask=in_c & (count > 2))
        tl.store(p_dx + 3 * C, o3.to(p_dx.dtype.element_ty), mask=in_c & (count > 3))
        p_dx += 4 * C
        count -= 4
        e1, e2, e3 = d3, d2, d1
        p1, p2, p3 = x3, x2, x1
    return s0, s1, s2, s3, s_bias


@triton.jit(do_not_specialize=["T", "N", "total", "rows"])
def _conv_bwd_kernel(
    x, dy, weight, bias, initial_state, dfinal_state, dx, partials, cu_seqlens, T, N, total, rows, C,
    stride_xb, stride_xt, stride_db, stride_dt,
    W: tl.constexpr, BC: tl.constexpr, SILU: tl.constexpr, PACKED: tl.constexpr, DBIAS: tl.constexpr,
):  # fmt: skip
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
    s0 = tl.zeros([BC], tl.float32)  # of dw by lag
    s1 = tl.zeros([BC], tl.float32)
    s2 = tl.zeros([BC], tl.float32)
    s3 = tl.zeros([BC], tl.float32)
    s_bias = tl.zeros([BC], tl.float32)

    while t < last:
        n, begin, end = sequence_at(cu_seqlens, t, T, N, PACKED)
        inside = t < end
        stop = tl.where(inside, tl.minimum(end, last), last)
        p_x = x + locate(n, t, begin, stride_xb, stride_xt, PACKED) + o_c
        p_dy = dy + locate(n, t, begin, stride_db, stride_dt, PACKED) + o_c
        p_dx = dx + t.to(tl.int64) * C + o_c
        p_state = x
        p_dfinal = x
        if initial_state is not None:
            p_state = initial_state + (n.to(tl.int64) * C + o_c) * (W - 1)
        if dfinal_state is not None:
            p_dfinal = dfinal_state + (n.to(tl.int64) * C + o_c) * (W - 1)
        s0, s1, s2, s3, s_bias = _segment(
            p_x, p_dy, p_state, p_dfinal, p_dx, w0, w1, w2, w3, b_bias, s0, s1, s2, s3, s_bias,
            stop - t, t - begin, end - t, inside, in_c, stride_xt, stride_dt, C,
            W, SILU, initial_state is not None, dfinal_state is not None, partials is not None, DBIAS,
        )  # fmt: skip
        t = stop

    if partials is not None:
        p_sums = partials + i_r.to(tl.int64) * (W + 1) * C + o_c
        tl.store(p_sums + (W - 1) * C, s0, mask=in_c)
        tl.store(p_sums + (W - 2) * C, s1, mask=in_c)
        if W > 2:
            tl.store(p_sums + (W - 3) * C, s2, mask=in_c)
        if W > 3:
            tl.store(p_sums + (W - 4) * C, s3, mask=in_c)
        if DBIAS:
            tl.store(p_sums + W * C, s_bias, mask=in_c)


@triton.jit(do_not_specialize=["T"])
def _initial_state_bwd_kernel(
    x, dy, weight, bias, initial_state, dfinal_state, dinitial_state, cu_seqlens, T, C,
    stride_xb, stride_xt, stride_db, stride_dt,
    W: tl.constexpr, BC: tl.constexpr, SILU: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Column m meets rows r <= m with lag W-1-m+r; of a sequence of L < W-1 tokens column L + i ends as column i."""
    num_c = tl.cdiv(C, BC)
    i_c = tl.program_id(0) % num_c
    o_c = i_c * BC + tl.arange(0, BC)
    in_c = o_c < C
    n = (tl.program_id(0) // num_c).to(tl.int64)
    begin, end, p_x, p_dy = T * 0, T, x + n * stride_xb + o_c, dy + n * stride_db + o_c
    if PACKED:
        begin, end = tl.load(cu_seqlens + n).to(tl.int32), tl.load(cu_seqlens + n + 1).to(tl.int32)
        p_x, p_dy = x + o_c, dy + o_c
    p_state = (n * C + o_c) * (W - 1)

    w0, w1, w2, w3 = taps_of(weight, i_c, C, W, BC)
    b_bias = tl.zeros([BC], tl.float32)
    if bias is not None:
        b_bias = tl.load(bias + o_c, mask=in_c, other=0.0).to(tl.float32)
    e1 = tl.zeros([BC], tl.float32)
    e2 = e1
    p1 = tl.load(initial_state + p_state + (W - 2), mask=in_c, other=0.0).to(tl.float32)
    p2 = p1
    p3 = p1
    if W > 2:
        p2 = tl.load(initial_state + p_state + (W - 3), mask=in_c, other=0.0).to(tl.float32)
    if W > 3:
        p3 = tl.load(initial_state + p_state + (W - 4), mask=in_c, other=0.0).to(tl.float32)
    for m in tl.static_range(W - 1):
        t = begin + m
        x0 = row(p_x + t.to(tl.int64) * stride_xt, t < end, in_c).to(tl.float32)
        b_dy = row(p_dy + t.to(tl.int64) * stride_dt, t < end, in_c)
        e0 = tl.where(t < end, _dz(b_dy, x0, p1, p2, p3, w0, w1, w2, w3, b_bias, W, SILU), 0.0)
        d = _spread(e0, e1, e2, tl.zeros_like(e0), w0, w1, w2, w3, W)  # of tokens alone: e1, e2 begin as zeros
        if dfinal_state is not None:
            d += _state_gradient(dfinal_state + p_state, t - end, True, in_c, W)
        tl.store(dinitial_state + p_state + m, d.to(dinitial_state.dtype.element_ty), mask=in_c)
        e2 = e1
        e1 = e0
        p3 = p2
        p2 = p1
        p1 = x0


def conv_bwd(
    *, x: Any, dy: Any, weight: Any, bias: Any | None, initial_state: Any | None, cu_seqlens: Any | None,
    dfinal_state: Any | None, dx: Any, dweight: Any | None, dbias: Any | None, silu: bool,
) -> None:  # fmt: skip
    """Write dx, and what is not None of dweight and dbias. x and dy have rows of adjacent channels, everything else is
    contiguous.
    """
    fw = frameworks.of(x)
    (B, T, C), W = fw.shape(x), fw.shape(weight)[1]
    N = B if cu_seqlens is None else fw.shape(cu_seqlens)[0] - 1
    sums = dweight is not None or dbias is not None
    if B * T * C == 0:
        partials = fw.zeros((1, W + 1, C), like=x, dtype="float32") if sums else None
    else:
        stage = "conv_bwd" if initial_state is None and dfinal_state is None else "conv_bwd_more"
        plan = tuning.plan(stage, x, tokens=B * T, channels=C)
        partials = fw.empty((plan.ranges, W + 1, C), like=x, dtype="float32") if sums else None
        with fw.on_device(x):
            _conv_bwd_kernel[(plan.programs,)](
                x, dy, weight, bias, initial_state, dfinal_state, dx, partials, cu_seqlens, T, N, B * T, plan.rows, C,
                *fw.strides(x)[:2], *fw.strides(dy)[:2],
                W=W, SILU=silu, PACKED=cu_seqlens is not None, DBIAS=dbias is not None, **plan.options,
            )  # fmt: skip
    if dweight is not None:
        sum_partials(partials, dweight, first=0, interleave=W)
    if dbias is not None:
        sum_partials(partials, dbias, first=W, interleave=1)


def initial_state_bwd(
    *, x: Any, dy: Any, weight: Any, bias: Any | None, initial_state: Any, cu_seqlens: Any | None,
    dfinal_state: Any | None, dinitial_state: Any, silu: bool,
) -> None:  # fmt: skip
    """Write dinitial_state [N, C, W-1]: the gradient through y, and through the final state of short sequences."""
    fw = frameworks.of(x)
    N, C, columns = fw.shape(initial_state)
    if N * C == 0:
        return
    block = min(512, triton.next_power_of_2(C))
    with fw.on_device(x):
        _initial_state_bwd_kernel[(N * -(-C // block),)](
            x, dy, weight, bias, initial_state, dfinal_state, dinitial_state, cu_seqlens, fw.shape(x)[1], C,
            *fw.strides(x)[:2], *fw.strides(dy)[:2],
            W=columns + 1, BC=block, SILU=silu, PACKED=cu_seqlens is not None,
        )  # fmt: skip
