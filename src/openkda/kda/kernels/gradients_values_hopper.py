"""The values half of the gradient stage again, for Hopper, in Gluon: equations and results of `gradients_values.py`.

The bytes are what takes the time, so all of them move by TMA, each once, and something is always on its way. One
program a multiprocessor walks over its share of chunks and heads, with two kinds of warps:

    load     1 warp     fetches the nine tiles of an item, each into a buffer of its own, as soon as the item before
                        has left that buffer
    chain    4 warps    all arithmetic, in the order in which tiles come; sends results off by TMA from three buffers

X stays in registers: as accumulator for dv and the sums over a row, rounded as operand of the products with Vn and S.

Parity: a buffer in its n-th use is full at parity n & 1 and was emptied at parity (n & 1) ^ 1, which passes at n = 0.

needs    sm_90; bf16; K = V = 128; token tensors of V with heads side by side and a regular distance between tokens
oracle   gradients_values.py
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
# (a launch passes plain values for constexpr parameters; device functions are no plain Python)
from __future__ import annotations

from typing import Any

import triton.language as tl  # noqa: F401  # the interpreter looks for it here

from openkda import frameworks
from openkda.kda.kernels.common import LOG2_E, as_matrix, is_matrix
from openkda.kda.kernels.gluon import (
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from openkda.kda.kernels.hopper import C, D, place, token_tiles, workspace
from openkda.kda.kernels.launch import launch
from openkda.kda.kernels.tables import CHUNK, Layout

# Barriers, in the order in which tiles come: A and dVn, v, Vn, dO, Aqk, dS', S, Qg
AT, VALUES, WRITTEN, OUTPUTS, SCORES, AFTER, BEFORE, QUERIES = (gl.constexpr(i) for i in range(8))


# ---------------------------------------------------------------- device helpers
@jit
def _pack64(low, high):
    low, high = low.to(gl.int32, bitcast=True).to(gl.int64), high.to(gl.int32, bitcast=True).to(gl.int64)
    return (low & 0xFFFFFFFF) | (high << 32)


@jit
def _send(out, m, value, desc, row, column):
    """Result number m on its way to global memory. Its buffer was last used by number m - 3: that one has left."""
    tma.store_wait(2)
    buffer = out.index(m % 3)
    buffer.store(value.to(gl.bfloat16))
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [row, column], buffer)


@jit
def _store_rows(buffer, p, stride, rows):
    """The first rows of a tile [C, D], through pointers: those behind them belong to others."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])  # 16 bytes a lane
    r = gl.arange(0, C, layout=gl.SliceLayout(1, layout))
    v = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    gl.store(p + r[:, None] * stride + v[None, :], buffer.load(layout), mask=(r < rows)[:, None])


# ---------------------------------------------------------------- the two kinds of warps
@jit
def _load(
    items, T, HV, chunks, a_desc, dvn_desc, v_desc, vn_desc, do_desc, aqk_desc, ds_desc, s_desc, qg_desc,
    a_buf, dvn_buf, v_buf, vn_buf, do_buf, aqk_buf, ds_buf, s_buf, qg_buf, full, empty,
    L2NORM: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    n = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        i_h, token, rows = place(chunks, item, T, HV, PACKED)
        if rows > 0:
            free = (n & 1) ^ 1
            mbarrier.wait(empty.index(AT), free)
            mbarrier.expect(full.index(AT), 2 * C * (C + D))
            tma.async_copy_global_to_shared(a_desc, [item * C, 0], full.index(AT), a_buf)
            tma.async_copy_global_to_shared(dvn_desc, [item * C, 0], full.index(AT), dvn_buf)
            mbarrier.wait(empty.index(VALUES), free)
            mbarrier.expect(full.index(VALUES), 2 * C * D)
            tma.async_copy_global_to_shared(v_desc, [token, i_h * D], full.index(VALUES), v_buf)
            mbarrier.wait(empty.index(WRITTEN), free)
            mbarrier.expect(full.index(WRITTEN), 2 * C * D)
            tma.async_copy_global_to_shared(vn_desc, [item * C, 0], full.index(WRITTEN), vn_buf)
            mbarrier.wait(empty.index(OUTPUTS), free)
            mbarrier.expect(full.index(OUTPUTS), 2 * C * D)
            tma.async_copy_global_to_shared(do_desc, [token, i_h * D], full.index(OUTPUTS), do_buf)
            if L2NORM:
                mbarrier.wait(empty.index(SCORES), free)
                mbarrier.expect(full.index(SCORES), 2 * C * C)
                tma.async_copy_global_to_shared(aqk_desc, [item * C, 0], full.index(SCORES), aqk_buf)
            mbarrier.wait(empty.index(AFTER), free)
            mbarrier.expect(full.index(AFTER), 2 * D * D)
            tma.async_copy_global_to_shared(ds_desc, [item * D, 0], full.index(AFTER), ds_buf)
            mbarrier.wait(empty.index(BEFORE), free)
            mbarrier.expect(full.index(BEFORE), 2 * D * D)
            tma.async_copy_global_to_shared(s_desc, [item * D, 0], full.index(BEFORE), s_buf)
            if L2NORM:
                mbarrier.wait(empty.index(QUERIES), free)
                mbarrier.expect(full.index(QUERIES), 2 * C * D)
                tma.async_copy_global_to_shared(qg_desc, [item * C, 0], full.index(QUERIES), qg_buf)
            n += 1


@jit
def _chain(
    items, T, HV, chunks, scale, beta_scale, beta, b_b, b_t, b_h, norms, dv, dv_desc, dqg_desc, dxs_desc, dkg_desc,
    wq_desc, wk_desc, ends, row_norms, row_beta, dbeta, db_b,
    a_buf, dvn_buf, v_buf, vn_buf, do_buf, aqk_buf, ds_buf, s_buf, qg_buf, out, w_buf, full, empty,
    L2NORM: gl.constexpr, BETA_SIGMOID: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])  # fp32 [C, D]
    acc_c: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])  # fp32 [C, C]
    lhs: gl.constexpr = gl.DotOperandLayout(0, acc, 2)
    lhs_c: gl.constexpr = gl.DotOperandLayout(0, acc_c, 2)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    zeros = gl.zeros([C, D], gl.float32, acc)
    zeros_c = gl.zeros([C, C], gl.float32, acc_c)
    r = gl.arange(0, C, layout=gl.SliceLayout(1, acc))
    r_do = gl.arange(0, C, layout=gl.SliceLayout(1, lhs))
    i = gl.arange(0, C, layout=gl.SliceLayout(1, acc_c))[:, None]
    j = gl.arange(0, C, layout=gl.SliceLayout(0, acc_c))[None, :]
    n = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        i_h, token, rows = place(chunks, item, T, HV, PACKED)
        if rows > 0:
            ready = n & 1
            i_ch = gl.cast(item, gl.int64)
            i_b = 0
            if not PACKED:
                i_b = item // HV // ((T + C - 1) // C)
            i_t = token - i_b * T
            valid = r < rows
            p_b = beta + i_b.to(gl.int64) * b_b + i_t.to(gl.int64) * b_t + i_h * b_h
            b = gl.load(p_b + r * b_t, mask=valid, other=0.0).to(gl.float32)
            if L2NORM:
                r_q = gl.load(norms + i_ch * (2 * C) + r)
                r_k = gl.load(norms + i_ch * (2 * C) + C + r)
            if BETA_SIGMOID:
                b = beta_scale / (1.0 + gl.exp2(b * -LOG2_E))
            b = gl.where(valid, b, 0.0)
            gl.store(row_beta + i_ch * C + r, b)

            # X = A^T dVn
            mbarrier.wait(full.index(AT), ready)
            x = warpgroup_mma(a_buf.permute((1, 0)), dvn_buf, zeros, use_acc=False, is_async=True)
            x = warpgroup_mma_wait(0, deps=[x])
            mbarrier.arrive(empty.index(AT), count=1)

            # dv = b X; rows behind the sequence may hold anything, NaN too: they are selected away
            mbarrier.wait(full.index(VALUES), ready)
            b_v = v_buf.load(acc)
            mbarrier.arrive(empty.index(VALUES), count=1)
            x_v = gl.where(valid, gl.sum(x * b_v.to(gl.float32), 1), 0.0)
            b_dv = x * b[:, None]
            if BETA_SIGMOID:
                x_ws = b_dv.to(gl.bfloat16)
            else:
                x_ws = x.to(gl.bfloat16)
            if rows == C:
                _send(out, 4 * n, b_dv, dv_desc, token, i_h * D)
            else:
                tma.store_wait(0)
                buffer = out.index((4 * n) % 3)
                buffer.store(b_dv.to(gl.bfloat16))
                _store_rows(buffer, dv + token.to(gl.int64) * (HV * D) + i_h * D, HV * D, rows)

            # dO Vn^T, X Vn^T
            mbarrier.wait(full.index(WRITTEN), ready)
            x_vn = gl.sum(x * vn_buf.load(acc).to(gl.float32), 1)
            mbarrier.wait(full.index(OUTPUTS), ready)
            do = do_buf.load(lhs)
            mbarrier.arrive(empty.index(OUTPUTS), count=1)
            do = gl.where((r_do < rows)[:, None], do, gl.zeros_like(do))
            vn_t = vn_buf.permute((1, 0))
            dw_q = warpgroup_mma(gl.convert_layout(do, lhs_c), vn_t, zeros_c, use_acc=False, is_async=True)
            dw_k = warpgroup_mma(gl.convert_layout(x_ws, lhs_c), vn_t, zeros_c, use_acc=False, is_async=True)
            dw_q, dw_k = warpgroup_mma_wait(0, deps=[dw_q, dw_k])

            # Vn dS'^T, and in its shadow the triangles
            mbarrier.wait(full.index(AFTER), ready)
            s_c = warpgroup_mma(vn_buf, ds_buf.permute((1, 0)), zeros, use_acc=False, is_async=True)
            tma.store_wait(2)
            w_buf.index(0).store(gl.where(j <= i, dw_q, 0.0).to(gl.bfloat16))
            w_buf.index(1).store(gl.where(j < i, -dw_k, 0.0).to(gl.bfloat16))
            fence_async_shared()
            tma.async_copy_shared_to_global(wq_desc, [item * C, 0], w_buf.index(0))
            tma.async_copy_shared_to_global(wk_desc, [item * C, 0], w_buf.index(1))
            if L2NORM:
                mbarrier.wait(full.index(SCORES), ready)
                b_aqk = aqk_buf.load(acc_c)
                mbarrier.arrive(empty.index(SCORES), count=1)
                q_dq = gl.sum(b_aqk.to(gl.float32) * gl.where(j <= i, dw_q, 0.0), 1)
                q_dq = gl.convert_layout(q_dq, gl.SliceLayout(1, acc))
            s_c = warpgroup_mma_wait(0, deps=[s_c])
            mbarrier.arrive(empty.index(WRITTEN), count=1)

            # dO S^T, and in its shadow Kg's gradient leaves; then X S^T, and in its shadow that of Qg, and the end
            mbarrier.wait(full.index(BEFORE), ready)
            s_t = s_buf.permute((1, 0))
            s_q = warpgroup_mma(do, s_t, zeros, use_acc=False, is_async=True)
            _send(out, 4 * n + 1, s_c, dkg_desc, item * C, 0)
            s_q = warpgroup_mma_wait(0, deps=[s_q])
            s_k = warpgroup_mma(gl.convert_layout(x_ws, lhs), s_t, zeros, use_acc=False, is_async=True)
            _send(out, 4 * n + 2, s_q, dqg_desc, item * C, 0)
            if L2NORM:
                mbarrier.wait(full.index(QUERIES), ready)
                b_qg = qg_buf.load(acc)
                mbarrier.arrive(empty.index(QUERIES), count=1)
                q_dq += gl.sum(b_qg.to(gl.float32) * s_q, 1)
            for part in gl.static_range(4):
                b_s = s_buf.slice(32 * part, 32, 0).load(wide).to(gl.float32)
                b_ds = ds_buf.slice(32 * part, 32, 0).load(wide).to(gl.float32)
                o_k = 32 * part + gl.arange(0, 32, layout=gl.SliceLayout(1, wide))
                gl.store(ends + i_ch * D + o_k, gl.sum(b_s * b_ds, 1))
            mbarrier.arrive(empty.index(AFTER), count=1)
            s_k = warpgroup_mma_wait(0, deps=[s_k])
            mbarrier.arrive(empty.index(BEFORE), count=1)
            _send(out, 4 * n + 3, -s_k, dxs_desc, item * C, 0)

            # sums over a row, as `gradients.py` derives them
            p_db = dbeta + i_ch * C + r
            if BETA_SIGMOID:
                p_db = dbeta + i_b.to(gl.int64) * db_b + i_t.to(gl.int64) * HV + i_h + r * HV
                gl.store(p_db, (x_vn * (1.0 - b / beta_scale)).to(dbeta.dtype.element_ty), mask=valid)
            else:
                gl.store(p_db, x_v)
            if L2NORM:
                p_norm = row_norms + i_ch * (2 * C) + r
                gl.store(p_norm, _pack64(r_q * scale, r_q * q_dq / scale))
                gl.store(p_norm + C, _pack64(r_k, r_k * (2.0 * x_vn - b * x_v)))
            n += 1
    tma.store_wait(0)


@jit(do_not_specialize=["items", "T", "HV"])
def _values_bwd_hopper_kernel(
    a_desc, dvn_desc, v_desc, vn_desc, do_desc, aqk_desc, ds_desc, s_desc, qg_desc,
    dv_desc, dqg_desc, dxs_desc, dkg_desc, wq_desc, wk_desc,
    beta, norms, dv, ends, row_norms, row_beta, dbeta, chunks,
    items, T, HV, scale, beta_scale, b_b, b_t, b_h, db_b,
    L2NORM: gl.constexpr, BETA_SIGMOID: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    a_buf = gl.allocate_shared_memory(gl.bfloat16, [C, C], a_desc.layout)
    dvn_buf = gl.allocate_shared_memory(gl.bfloat16, [C, D], dvn_desc.layout)
    v_buf = gl.allocate_shared_memory(gl.bfloat16, [C, D], v_desc.layout)
    do_buf = gl.allocate_shared_memory(gl.bfloat16, [C, D], do_desc.layout)
    vn_buf = gl.allocate_shared_memory(gl.bfloat16, [C, D], vn_desc.layout)
    aqk_buf = gl.allocate_shared_memory(gl.bfloat16, [C, C], aqk_desc.layout)
    ds_buf = gl.allocate_shared_memory(gl.bfloat16, [D, D], ds_desc.layout)
    s_buf = gl.allocate_shared_memory(gl.bfloat16, [D, D], s_desc.layout)
    qg_buf = gl.allocate_shared_memory(gl.bfloat16, [C, D], qg_desc.layout)
    out = gl.allocate_shared_memory(gl.bfloat16, [3, C, D], dqg_desc.layout)
    w_buf = gl.allocate_shared_memory(gl.bfloat16, [2, C, C], wq_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [8, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [8, 1], mbarrier.MBarrierLayout())
    for b in gl.static_range(8):
        mbarrier.init(full.index(b), count=1)
        mbarrier.init(empty.index(b), count=1)
    fence_async_shared()  # the TMA must see initialised barriers
    gl.warp_specialize([
        (_chain, (items, T, HV, chunks, scale, beta_scale, beta, b_b, b_t, b_h, norms, dv, dv_desc, dqg_desc, dxs_desc,
                  dkg_desc, wq_desc, wk_desc, ends, row_norms, row_beta, dbeta,
                  db_b, a_buf, dvn_buf, v_buf, vn_buf, do_buf, aqk_buf, ds_buf, s_buf, qg_buf, out, w_buf, full, empty,
                  L2NORM, BETA_SIGMOID, PACKED)),
        (_load, (items, T, HV, chunks, a_desc, dvn_desc, v_desc, vn_desc, do_desc, aqk_desc, ds_desc, s_desc, qg_desc,
                 a_buf, dvn_buf, v_buf, vn_buf, do_buf, aqk_buf, ds_buf, s_buf, qg_buf, full, empty, L2NORM, PACKED)),
    ], [1], [40])  # fmt: skip  # warps, then registers a thread, of load


# ---------------------------------------------------------------- launcher
def takes(a: Any, *token_tensors: Any) -> bool:
    """Whether this kernel is for a call: sizes, dtypes and GPU; dv, the last, must be a matrix as it stands."""
    fw = frameworks.of(a)
    wide = all(fw.shape(x)[3] == 128 and fw.dtype_name(x) == "bfloat16" for x in token_tensors)
    if not wide or fw.dtype_name(a) != "bfloat16" or fw.compute_capability(a) != 90 or fw.shape(a)[0] == 0:
        return False
    return is_matrix(token_tensors[-1])


def values_bwd(
    *, v: Any, beta: Any, do: Any, a: Any, aqk: Any, qg: Any, v_new: Any, dv_new: Any, states: Any, dstates: Any,
    norms: Any, work: dict[str, Any], dv: Any, dbeta: Any, layout: Layout, scale: float, beta_scale: float,
    flags: dict[str, bool], PROGRAMS: int,
) -> None:  # fmt: skip
    """As `gradients_values.values_bwd`, for what `takes` accepts."""
    fw = frameworks.of(a)
    NC, HV = (int(n) for n in a.shape[:2])
    with fw.on_device(a):
        launch(
            _values_bwd_hopper_kernel, min(NC * HV, PROGRAMS),
            workspace(a, CHUNK), workspace(dv_new, 128), token_tiles(as_matrix(v), 128),
            workspace(v_new, 128), token_tiles(as_matrix(do), 128), workspace(aqk, CHUNK),
            workspace(dstates, 128, 128), workspace(states, 128, 128), workspace(qg, 128),
            token_tiles(dv, 128), *(workspace(work[n], 128) for n in ("dqg", "dxs", "dkg")),
            *(workspace(work[n], CHUNK) for n in ("w_q", "w_k")),
            beta, norms, dv, work["ends"], work["row_norms"], work["row_beta"], dbeta, layout.chunks,
            NC * HV, layout.T, HV, float(scale), float(beta_scale), *(int(s) for s in fw.strides(beta)[:3]),
            int(fw.strides(dbeta)[0]),
            **flags, num_warps=4,
        )  # fmt: skip
