"""The recomputation of `prepare.py` again, for Hopper, in Gluon: the same equations, workspaces and results.

The bytes are what should take the time, so all tiles move by TMA. One program a multiprocessor walks over its share of
chunks and heads, with two kinds of warps:

    load     1 warp     fetches g, q, k, A and v of an item into one of two sets of buffers, each tile as soon as the
                        item before the last has left its buffer
    chain    8 warps    all arithmetic, a warpgroup for each half of the channels; sends results off by TMA

What is needed more than once (q, k, A) goes to registers at once, so that its buffer is free early. Log-decays become
exponents by products with 0/1 matrices, as in `prepare.py`, here 64 x 64.

Parity: a buffer in its i-th use is full at parity i & 1 and was emptied at parity (i & 1) ^ 1, which passes at i = 0.

needs    sm_90; bf16; K = V = 128; token tensors with heads side by side and a regular distance between tokens
oracle   prepare.py
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
# (a launch passes plain values for constexpr parameters; device functions are no plain Python)
from __future__ import annotations

from typing import Any

import triton.language as tl  # noqa: F401  # the interpreter looks for it here

from openkda import frameworks
from openkda.kda.kernels.common import FLOOR_LOG2, LOG2_E, NORM_EPS, is_matrix
from openkda.kda.kernels.gluon import (
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from openkda.kda.kernels.hopper import C, D, decay_log2, place, token_tiles, workspace
from openkda.kda.kernels.launch import launch
from openkda.kda.kernels.tables import CHUNK, Layout

GATES, ROWS, VALUES = (gl.constexpr(2 * i) for i in range(3))  # barriers of g; q and k; A and v: one a set of buffers


# ---------------------------------------------------------------- device helpers
@jit
def _send(out, m, value, desc, row):
    """Result number m on its way to global memory. Its buffer was last used by number m - 3: that one has left."""
    tma.store_wait(2)
    buffer = out.index(m % 3)
    buffer.store(value.to(gl.bfloat16))
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [row, 0], buffer)


@jit
def _exponents(keep, terms, acc: gl.constexpr):
    """sum over s of keep[i, s] terms[s, :], fp32"""
    zeros = gl.zeros([C, D], gl.float32, acc)
    x = warpgroup_mma(keep, terms, zeros, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=[x])


# ---------------------------------------------------------------- the two kinds of warps
@jit
def _load(
    items, T, HV, group, chunks, q_desc, k_desc, v_desc, g_desc, a_desc, q_ring, k_ring, v_ring, g_ring, a_ring,
    full, empty, PACKED: gl.constexpr,
):  # fmt: skip
    n = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        i_h, token, rows = place(chunks, item, T, HV, PACKED)
        if rows > 0:
            slot, free = n % 2, ((n // 2) & 1) ^ 1
            i_hk = i_h // group
            mbarrier.wait(empty.index(GATES + slot), free)
            mbarrier.expect(full.index(GATES + slot), 2 * C * D)
            tma.async_copy_global_to_shared(g_desc, [token, i_h * D], full.index(GATES + slot), g_ring.index(slot))
            mbarrier.wait(empty.index(ROWS + slot), free)
            mbarrier.expect(full.index(ROWS + slot), 4 * C * D)
            tma.async_copy_global_to_shared(q_desc, [token, i_hk * D], full.index(ROWS + slot), q_ring.index(slot))
            tma.async_copy_global_to_shared(k_desc, [token, i_hk * D], full.index(ROWS + slot), k_ring.index(slot))
            mbarrier.wait(empty.index(VALUES + slot), free)
            mbarrier.expect(full.index(VALUES + slot), 2 * C * (C + D))
            tma.async_copy_global_to_shared(a_desc, [item * C, 0], full.index(VALUES + slot), a_ring.index(slot))
            tma.async_copy_global_to_shared(v_desc, [token, i_h * D], full.index(VALUES + slot), v_ring.index(slot))
            n += 1


@jit
def _chain(
    items, T, HV, chunks, scale, lower_bound, beta_scale, beta, b_b, b_t, b_h, A_log, dt_bias, decay, norms,
    w_desc, u_desc, kg_desc, qg_desc, q_ring, k_ring, v_ring, g_ring, a_ring, terms, kd, out, full, empty,
    GATE: gl.constexpr, L2NORM: gl.constexpr, BETA_SIGMOID: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 64, 16])  # fp32 [C, D]
    lhs: gl.constexpr = gl.DotOperandLayout(0, acc, 2)  # [C, C]
    r = gl.arange(0, C, layout=gl.SliceLayout(1, acc))
    c = gl.arange(0, D, layout=gl.SliceLayout(0, acc))
    i = gl.arange(0, C, layout=gl.SliceLayout(1, lhs))[:, None]
    s = gl.arange(0, C, layout=gl.SliceLayout(0, lhs))
    up_to = gl.where(s[None, :] <= i, 1.0, 0.0).to(gl.float16)
    behind = gl.where(s[None, :] > i, 1.0, 0.0).to(gl.float16)
    n = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        i_h, token, rows = place(chunks, item, T, HV, PACKED)
        if rows > 0:
            slot, ready = n % 2, (n // 2) & 1
            i_ch = gl.cast(item, gl.int64)
            i_b = 0
            if not PACKED:
                i_b = item // HV // ((T + C - 1) // C)
            p_b = beta + i_b.to(gl.int64) * b_b + (token - i_b * T).to(gl.int64) * b_t + i_h * b_h
            b = gl.load(p_b + s * b_t, mask=s < rows, other=0.0).to(gl.float32)
            rate = gl.where(r < rows, 1.0, 0.0)[:, None]  # rows without a token do not decay
            bound = rate * lower_bound
            bias = gl.zeros([D], gl.float32, gl.SliceLayout(0, acc))
            if GATE != "none":
                speed = gl.exp2(gl.load(A_log + i_h) * LOG2_E)
                rate = speed * (rate if GATE == "softplus" else 1.0 + 0.0 * rate)
                if dt_bias is not None:
                    bias = gl.load(dt_bias + i_h * D + c)

            # log2 decays: their sum over the chunk, and as operand
            mbarrier.wait(full.index(GATES + slot), ready)
            raw = g_ring.index(slot).load(acc)
            mbarrier.arrive(empty.index(GATES + slot), count=1)
            raw = gl.where((r < rows)[:, None], raw.to(gl.float32), 0.0)
            b_g = gl.maximum(decay_log2(raw, bias[None, :], rate, bound, GATE), FLOOR_LOG2)
            terms.store(b_g.to(gl.float16))
            fence_async_shared()
            gl.store(decay + i_ch * D + c, gl.exp2(gl.sum(b_g, 0)))

            # normalised rows
            mbarrier.wait(full.index(ROWS + slot), ready)
            b_q = q_ring.index(slot).load(acc)
            b_k = k_ring.index(slot).load(acc)
            mbarrier.arrive(empty.index(ROWS + slot), count=1)
            b_q = gl.where((r < rows)[:, None], b_q.to(gl.float32), 0.0)
            b_k = gl.where((r < rows)[:, None], b_k.to(gl.float32), 0.0)
            if L2NORM:
                r_q = gl.rsqrt(gl.sum(b_q * b_q, 1) + NORM_EPS)
                r_k = gl.rsqrt(gl.sum(b_k * b_k, 1) + NORM_EPS)
                gl.store(norms + i_ch * (2 * C) + r, r_q)
                gl.store(norms + i_ch * (2 * C) + C + r, r_k)
                b_q *= r_q[:, None]
                b_k *= r_k[:, None]

            # Kg, Qg and k * Din
            f = gl.exp2(_exponents(behind, terms, acc))
            _send(out, 4 * n, b_k * f, kg_desc, item * C)
            f = gl.exp2(_exponents(up_to, terms, acc))
            kd.store((b_k * f).to(gl.bfloat16))
            fence_async_shared()
            _send(out, 4 * n + 1, b_q * f * scale, qg_desc, item * C)

            # W = A diag(b) (k * Din), U = A diag(b) v
            mbarrier.wait(full.index(VALUES + slot), ready)
            if BETA_SIGMOID:
                b = beta_scale / (1.0 + gl.exp2(b * -LOG2_E))
            b = gl.where(s < rows, b, 0.0)
            ab = (a_ring.index(slot).load(lhs).to(gl.float32) * b[None, :]).to(gl.bfloat16)
            b_v = v_ring.index(slot)
            if rows < C:  # what lies behind the sequence may be NaN
                b_v.store(gl.where((r < rows)[:, None], b_v.load(acc), 0.0).to(gl.bfloat16))
                fence_async_shared()
            zeros = gl.zeros([C, D], gl.float32, acc)
            b_w = warpgroup_mma(ab, kd, zeros, use_acc=False, is_async=True)
            b_u = warpgroup_mma(ab, b_v, zeros, use_acc=False, is_async=True)
            b_w, b_u = warpgroup_mma_wait(0, deps=[b_w, b_u])
            mbarrier.arrive(empty.index(VALUES + slot), count=1)
            _send(out, 4 * n + 2, b_w, w_desc, item * C)
            _send(out, 4 * n + 3, b_u, u_desc, item * C)
            n += 1
    tma.store_wait(0)


@jit(do_not_specialize=["items", "T", "HV", "group"])
def _recompute_fwd_hopper_kernel(
    q_desc, k_desc, v_desc, g_desc, a_desc, w_desc, u_desc, kg_desc, qg_desc,
    beta, A_log, dt_bias, decay, norms, chunks,
    items, T, HV, group, scale, lower_bound, beta_scale, b_b, b_t, b_h,
    GATE: gl.constexpr, L2NORM: gl.constexpr, BETA_SIGMOID: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    q_ring = gl.allocate_shared_memory(gl.bfloat16, [2, C, D], q_desc.layout)
    k_ring = gl.allocate_shared_memory(gl.bfloat16, [2, C, D], k_desc.layout)
    v_ring = gl.allocate_shared_memory(gl.bfloat16, [2, C, D], v_desc.layout)
    g_ring = gl.allocate_shared_memory(gl.bfloat16, [2, C, D], g_desc.layout)
    a_ring = gl.allocate_shared_memory(gl.bfloat16, [2, C, C], a_desc.layout)
    terms = gl.allocate_shared_memory(gl.float16, [C, D], gl.NVMMASharedLayout.get_default_for([C, D], gl.float16))
    kd = gl.allocate_shared_memory(gl.bfloat16, [C, D], kg_desc.layout)
    out = gl.allocate_shared_memory(gl.bfloat16, [3, C, D], kg_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [6, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [6, 1], mbarrier.MBarrierLayout())
    for b in gl.static_range(6):
        mbarrier.init(full.index(b), count=1)
        mbarrier.init(empty.index(b), count=1)
    fence_async_shared()  # the TMA must see initialised barriers
    gl.warp_specialize([
        (_chain, (items, T, HV, chunks, scale, lower_bound, beta_scale, beta, b_b, b_t, b_h, A_log, dt_bias, decay,
                  norms, w_desc, u_desc, kg_desc, qg_desc, q_ring, k_ring, v_ring, g_ring, a_ring, terms, kd, out,
                  full, empty, GATE, L2NORM, BETA_SIGMOID, PACKED)),
        (_load, (items, T, HV, group, chunks, q_desc, k_desc, v_desc, g_desc, a_desc,
                 q_ring, k_ring, v_ring, g_ring, a_ring, full, empty, PACKED)),
    ], [1], [40])  # fmt: skip  # warps, then registers a thread, of load


# ---------------------------------------------------------------- launcher
def takes(a: Any, *token_tensors: Any) -> bool:
    """Whether this kernel is for a call: sizes, dtypes, GPU, and q, k, v, g that are matrices as they stand."""
    fw = frameworks.of(a)
    if fw.dtype_name(a) != "bfloat16" or fw.compute_capability(a) != 90 or fw.shape(a)[0] == 0:
        return False
    return all(fw.shape(x)[3] == 128 and fw.dtype_name(x) == "bfloat16" and is_matrix(x) for x in token_tensors)


def recompute_fwd(
    *, q: Any, k: Any, v: Any, g: Any, beta: Any, a: Any, w: Any, u: Any, kg: Any, qg: Any, decay: Any, norms: Any,
    act: Any, layout: Layout, PROGRAMS: int,
) -> None:  # fmt: skip
    """As `prepare.recompute_fwd`, for what `takes` accepts."""
    fw = frameworks.of(a)
    NC, HV = (int(n) for n in a.shape[:2])
    with fw.on_device(a):
        launch(
            _recompute_fwd_hopper_kernel, min(NC * HV, PROGRAMS),
            *(token_tiles(x, 128) for x in (q, k, v, g)), workspace(a, CHUNK),
            *(workspace(x, 128) for x in (w, u, kg, qg)), beta, act.A_log, act.dt_bias, decay, norms, layout.chunks,
            NC * HV, layout.T, HV, HV // int(q.shape[2]), float(act.scale), float(act.lower_bound or 0.0),
            float(act.beta_scale), *(int(s) for s in fw.strides(beta)[:3]),
            GATE=act.gate, L2NORM=act.l2norm, BETA_SIGMOID=act.beta_sigmoid, PACKED=layout.packed, num_warps=8,
        )  # fmt: skip
