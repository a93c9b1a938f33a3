"""Vectors of unit length.

    forward     y = r x, r = 1 / sqrt(sum x^2 + eps)          over the last axis, in fp32
    backward    dx = r (dy - y sum(dy y))                     r and y recomputed from x

in / out  x, dy [.., D] any 16-bit type or fp32, rows anywhere; y, dx contiguous, in the type of x
cost      forward reads and writes, backward reads twice and writes once, sizeof(x) an entry: bandwidth-bound
program   BR whole rows; grid (ceil(rows / BR))
oracle    openkda.norm.eager.l2norm
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl

from openkda import frameworks
from openkda.norm.kernels import tuning
from openkda.norm.kernels.rows import offsets, rows_of


@triton.jit(do_not_specialize=["R"])
def _l2norm_fwd_kernel(
    x, y, R, eps, x_inner, stride_xo, stride_xi, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr
):
    o_r = tl.program_id(0) * BR + tl.arange(0, BR)
    o_d = tl.arange(0, BD)[None, :]
    mask = (o_r < R)[:, None] & (o_d < D)
    b_x = tl.load(x + offsets(o_r, x_inner, stride_xo, stride_xi) + o_d, mask=mask, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(b_x * b_x, 1) + eps)
    tl.store(y + o_r.to(tl.int64)[:, None] * D + o_d, (b_x * r[:, None]).to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["R"])
def _l2norm_bwd_kernel(
    x, dy, dx, R, eps, x_inner, stride_xo, stride_xi, dy_inner, stride_dyo, stride_dyi,
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    o_r = tl.program_id(0) * BR + tl.arange(0, BR)
    o_d = tl.arange(0, BD)[None, :]
    mask = (o_r < R)[:, None] & (o_d < D)
    b_x = tl.load(x + offsets(o_r, x_inner, stride_xo, stride_xi) + o_d, mask=mask, other=0.0).to(tl.float32)
    b_dy = tl.load(dy + offsets(o_r, dy_inner, stride_dyo, stride_dyi) + o_d, mask=mask, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(b_x * b_x, 1) + eps)
    along = tl.sum(b_dy * b_x, 1) * r  # sum(dy y)
    b_dx = (b_dy - b_x * (r * along)[:, None]) * r[:, None]
    tl.store(dx + o_r.to(tl.int64)[:, None] * D + o_d, b_dx.to(dx.dtype.element_ty), mask=mask)


def l2norm_fwd(*, x: Any, y: Any, eps: float) -> None:
    """Write y, contiguous, shaped like x."""
    fw = frameworks.of(x)
    *lead, D = fw.shape(x)
    if (R := math.prod(lead)) == 0:
        return
    programs, options = tuning.plan("l2norm_fwd", x, rows=R, width=D)
    x, *x_grid = rows_of(x)
    with fw.on_device(x):
        _l2norm_fwd_kernel[(programs,)](x, y, R, eps, *x_grid, D=D, **options)


def l2norm_bwd(*, x: Any, dy: Any, dx: Any, eps: float) -> None:
    """Write dx, contiguous, shaped like x."""
    fw = frameworks.of(x)
    *lead, D = fw.shape(x)
    if (R := math.prod(lead)) == 0:
        return
    programs, options = tuning.plan("l2norm_bwd", x, rows=R, width=D)
    (x, *x_grid), (dy, *dy_grid) = rows_of(x), rows_of(dy)
    with fw.on_device(x):
        _l2norm_bwd_kernel[(programs,)](x, dy, dx, R, eps, *x_grid, *dy_grid, D=D, **options)
