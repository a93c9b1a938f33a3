"""One token for each of N sequences: the step of the convolution while decoding.

    y[n] = act(bias + w_0 x[n] + sum over lag >= 1 of w_lag state[.., W-1-lag])        state of slot n, or indices[n]
    state[.., 0 : W-2] = state[.., 1 : W-1]    state[.., W-2] = x[n]                   in place

in        x [N, C], pool [slots, C, W-1] in the type of x, both contiguous but for x's rows; weight [C, W], bias [C];
          indices [N], below 0 for padding: y is 0 there and no slot is read or written
out       y [N, C]; the pool
cost      moves 2 (W-1) + 2 entries of x's type a channel: bound by launch, then by bytes
program   BC channels of one sequence; grid (N * ceil(C / BC))
oracle    openkda.conv.eager.causal_conv1d, one token at a time
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from openkda import frameworks
from openkda.conv.kernels.common import logistic, taps_of, weighted


@triton.jit
def _conv_update_kernel(
    x, pool, weight, bias, indices, y, C, stride_xn, W: tl.constexpr, BC: tl.constexpr, SILU: tl.constexpr
):
    num_c = tl.cdiv(C, BC)
    i_c, n = tl.program_id(0) % num_c, (tl.program_id(0) // num_c).to(tl.int64)
    o_c = i_c * BC + tl.arange(0, BC)
    in_c = o_c < C
    slot = n
    if indices is not None:
        slot = tl.load(indices + n).to(tl.int64)
    live = in_c & (slot >= 0)
    p_pool = pool + (slot * C + o_c) * (W - 1)

    w0, w1, w2, w3 = taps_of(weight, i_c, C, W, BC)
    z = tl.zeros([BC], tl.float32)
    if bias is not None:
        z = tl.load(bias + o_c, mask=in_c, other=0.0).to(tl.float32)
    x0 = tl.load(x + n * stride_xn + o_c, mask=live, other=0.0)
    x1 = tl.load(p_pool + (W - 2), mask=live, other=0.0)
    x2 = x1
    x3 = x1
    if W > 2:
        x2 = tl.load(p_pool + (W - 3), mask=live, other=0.0)
    if W > 3:
        x3 = tl.load(p_pool + (W - 4), mask=live, other=0.0)
    z = weighted(
        x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32), w0, w1, w2, w3, z, W
    )  # fmt: skip
    if SILU:
        z = z * logistic(z)
    tl.store(y + n * C + o_c, tl.where(live, z, 0.0).to(y.dtype.element_ty), mask=in_c)

    tl.store(p_pool + (W - 2), x0, mask=live)
    if W > 2:
        tl.store(p_pool + (W - 3), x1, mask=live)
    if W > 3:
        tl.store(p_pool + (W - 4), x2, mask=live)


def conv_update(*, x: Any, pool: Any, weight: Any, bias: Any | None, indices: Any | None, y: Any, silu: bool) -> None:
    """Write y [N, C], and the pool in place."""
    fw = frameworks.of(x)
    (N, C), W = fw.shape(x), fw.shape(weight)[1]
    if N * C == 0:
        return
    block = min(512, triton.next_power_of_2(C))
    with fw.on_device(x):
        _conv_update_kernel[(N * -(-C // block),)](
            x, pool, weight, bias, indices, y, C, fw.strides(x)[0], W=W, BC=block, SILU=silu
        )
