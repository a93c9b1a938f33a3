"""Root-mean-square normalisation with a weight and a gate.

    forward     y = n w a,  n = r x,  r = 1 / sqrt(mean x^2 + eps),  a = act(gate)          act = sigmoid or silu
    backward    dn = dy w a    dx = r (dn - n mean(dn n))    dgate = dy n w act'(gate)    dw = sum over rows of dy n a

in / out  x, gate, dy [.., D] any 16-bit type or fp32, rows anywhere; weight [D]; y, dx, dgate contiguous; fp32 inside
kept      nothing: mean(dn n) = r sum(dn x) / D, so r costs the backward a second sum beside the one it needs
cost      forward 3, backward 5 times sizeof(x) an entry: bandwidth-bound
program   forward: BR whole rows. Backward: tiles of BR rows, one after another, dw in registers; its sums are written
          once, as partial sums [programs, 1, D] that `sum_partials` adds in a fixed order
oracle    openkda.norm.eager.rms_norm_gated
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl

from openkda import frameworks
from openkda.kda.kernels.common import sigmoid
from openkda.kda.kernels.partials import sum_partials
from openkda.norm.kernels import tuning
from openkda.norm.kernels.rows import offsets, rows_of


@triton.jit(do_not_specialize=["R"])
def _rms_norm_gated_fwd_kernel(
    x, gate, weight, y, R, eps, x_inner, stride_xo, stride_xi, gate_inner, stride_go, stride_gi,
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    o_r = tl.program_id(0) * BR + tl.arange(0, BR)
    o_d = tl.arange(0, BD)[None, :]
    mask = (o_r < R)[:, None] & (o_d < D)
    b_x = tl.load(x + offsets(o_r, x_inner, stride_xo, stride_xi) + o_d, mask=mask, other=0.0).to(tl.float32)
    b_g = tl.load(gate + offsets(o_r, gate_inner, stride_go, stride_gi) + o_d, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(weight + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(b_x * b_x, 1) / D + eps)
    a = sigmoid(b_g)
    if SILU:
        a *= b_g
    b_y = b_x * r[:, None] * w * a
    tl.store(y + o_r.to(tl.int64)[:, None] * D + o_d, b_y.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["R"])
def _rms_norm_gated_bwd_kernel(
    x, gate, weight, dy, dx, dgate, partials, R, eps, x_inner, stride_xo, stride_xi, gate_inner, stride_go, stride_gi,
    dy_inner, stride_dyo, stride_dyi, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    i_p, num_programs = tl.program_id(0), tl.num_programs(0)
    o_d = tl.arange(0, BD)[None, :]
    in_d = o_d < D
    w = tl.load(weight + o_d, mask=in_d, other=0.0).to(tl.float32)
    b_dw = tl.zeros([BR, BD], tl.float32)
    for i in range(i_p, tl.cdiv(R, BR), num_programs):
        o_r = i * BR + tl.arange(0, BR)
        mask = (o_r < R)[:, None] & in_d
        b_x = tl.load(x + offsets(o_r, x_inner, stride_xo, stride_xi) + o_d, mask=mask, other=0.0).to(tl.float32)
        b_g = tl.load(gate + offsets(o_r, gate_inner, stride_go, stride_gi) + o_d, mask=mask, other=0.0).to(tl.float32)
        b_dy = tl.load(dy + offsets(o_r, dy_inner, stride_dyo, stride_dyi) + o_d, mask=mask, other=0.0).to(tl.float32)
        s = sigmoid(b_g)
        if SILU:
            a = b_g * s
            slope = s * (1.0 + b_g * (1.0 - s))
        else:
            a = s
            slope = s * (1.0 - s)
        b_dn = b_dy * w * a
        r = tl.rsqrt(tl.sum(b_x * b_x, 1) / D + eps)
        along = tl.sum(b_dn * b_x, 1) * (r / D)  # mean(dn n)
        b_n = b_x * r[:, None]
        b_dx = (b_dn - b_n * along[:, None]) * r[:, None]
        b_dy_n = b_dy * b_n
        b_dw += b_dy_n * a
        at = o_r.to(tl.int64)[:, None] * D + o_d
        tl.store(dx + at, b_dx.to(dx.dtype.element_ty), mask=mask)
        tl.store(dgate + at, (b_dy_n * w * slope).to(dgate.dtype.element_ty), mask=mask)
    o_1d = tl.arange(0, BD)
    tl.store(partials + i_p.to(tl.int64) * D + o_1d, tl.sum(b_dw, 0), mask=o_1d < D)


def rms_norm_gated_fwd(*, x: Any, gate: Any, weight: Any, y: Any, eps: float, silu: bool) -> None:
    """Write y, contiguous, shaped like x."""
    fw = frameworks.of(x)
    *lead, D = fw.shape(x)
    if (R := math.prod(lead)) == 0:
        return
    programs, options = tuning.plan("rms_norm_gated_fwd", x, rows=R, width=D)
    (x, *x_grid), (gate, *gate_grid) = rows_of(x), rows_of(gate)
    with fw.on_device(x):
        _rms_norm_gated_fwd_kernel[(programs,)](
            x, gate, weight, y, R, eps, *x_grid, *gate_grid, D=D, SILU=silu, **options
        )


def rms_norm_gated_bwd(
    *, x: Any, gate: Any, weight: Any, dy: Any, dx: Any, dgate: Any, dweight: Any, eps: float, silu: bool
) -> None:
    """Write dx and dgate, contiguous, shaped like x, and dweight [D]."""
    fw = frameworks.of(x)
    *lead, D = fw.shape(x)
    R = math.prod(lead)
    programs, options = tuning.plan("rms_norm_gated_bwd", x, rows=R, width=D)
    partials = (fw.empty if R else fw.zeros)((max(programs, 1), 1, D), like=x, dtype="float32")
    if R:
        (x, *x_grid), (gate, *gate_grid), (dy, *dy_grid) = rows_of(x), rows_of(gate), rows_of(dy)
        with fw.on_device(x):
            _rms_norm_gated_bwd_kernel[(programs,)](
                x, gate, weight, dy, dx, dgate, partials, R, eps, *x_grid, *gate_grid, *dy_grid,
                D=D, SILU=silu, **options,
            )  # fmt: skip
    sum_partials(partials, dweight)
