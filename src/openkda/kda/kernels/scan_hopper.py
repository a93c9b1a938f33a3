"""The two serial scans again, for Hopper, in Gluon: the same equations, workspaces and results as `scan.py`.

The chain from chunk to chunk is what takes the time, so nothing else runs in it. Three kinds of warps work side by side
and talk through mbarriers only:

    load    1 warp            fetches the tiles of chunk after chunk by TMA into a ring of RING stages
    chain   BV / 16 warps     all arithmetic, in order
    store   1 warp            moves finished tiles to global memory by TMA

The chain keeps the TRANSPOSED state, S^T [BV, K], as two fp32 halves over K in registers: S^T, Vn^T and dO^T are then
register operands of wgmma, so the state never passes through shared memory; tiles from memory are its shared operands.

    forward    Vn^T = u^T - S^T w^T             O^T = S^T qg^T + Vn^T aqk^T         S'^T = decay * S^T + Vn^T kg
    reverse    dVn^T = dS'^T kg^T + dO^T aqk    dS^T = decay * dS'^T + dO^T qg - dVn^T w

Rules that the code follows, each found by measurement: an accumulator is never touched while a wgmma on it is in
flight, and none is in flight over the back edge of the loop, else ptxas serialises them without a word; products go to
fresh accumulators, to which the decayed state is added afterwards; stores leave the chain; a buffer that the TMA reads
is fenced by the threads that wrote it, before they arrive; the ring's barriers are initialised last.

Parity: a buffer in its i-th use is full at parity i & 1 and was emptied at parity (i & 1) ^ 1, which passes at i = 0.

needs    sm_90; bf16; K = V = 128; dO with heads side by side and a regular distance between tokens, else it is copied
oracle   scan.py
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
# (a launch passes plain values for constexpr parameters; device functions are no plain Python)
from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from openkda import frameworks
from openkda.kda.kernels.common import as_matrix
from openkda.kda.kernels.hopper import C, D, shared, token_tiles, workspace
from openkda.kda.kernels.launch import launch
from openkda.kda.kernels.tables import CHUNK, GROUP, Layout

HALF = gl.constexpr(64)  # S^T is kept as two [BV, HALF] accumulators


# ---------------------------------------------------------------- device helpers
@gluon.jit
def _place(cu_seqlens, T, HV, BV: gl.constexpr, PACKED: gl.constexpr):
    """Of this program: sequence * HV + head, head, first column, first chunk, chunks, first token, tokens."""
    NV: gl.constexpr = D // BV
    i_head = gl.program_id(0) // NV
    i_n, i_h, i_v = i_head // HV, i_head % HV, (gl.program_id(0) % NV) * BV
    if PACKED:
        begin = gl.load(cu_seqlens + i_n).to(gl.int32)
        tokens = gl.load(cu_seqlens + i_n + 1).to(gl.int32) - begin
        first = begin // C + i_n
    else:
        begin, tokens, first = i_n * T, T, i_n * ((T + C - 1) // C)
    return i_head, i_h, i_v, first, (tokens + C - 1) // C, begin, tokens


@gluon.jit
def _state_pointers(state, i_head, i_v, acc: gl.constexpr, BV: gl.constexpr, V_FIRST: gl.constexpr):
    """Pointers to S^T[:, :HALF] of one state, and the distance from there to S^T[:, HALF:]."""
    v = i_v + gl.arange(0, BV, layout=gl.SliceLayout(1, acc))
    k = gl.arange(0, HALF, layout=gl.SliceLayout(0, acc))
    base = state + i_head.to(gl.int64) * (D * D)
    if V_FIRST:
        return base + gl.expand_dims(v, 1) * D + gl.expand_dims(k, 0), HALF
    else:
        return base + gl.expand_dims(k, 0) * D + gl.expand_dims(v, 1), HALF * D


@gluon.jit
def _hand_over(full):
    """Tell the store warp that a buffer is complete: every thread that wrote fences, then arrives."""
    fence_async_shared()
    mbarrier.arrive(full, count=1)


# ---------------------------------------------------------------- forward
@gluon.jit
def _scan_load(
    num_chunks, HV, i_h, i_v, first, w_desc, u_desc, kg_desc, decay_desc, qg_desc, aqk_desc,
    w_ring, u_ring, kg_ring, decay_ring, qg_ring, aqk_ring, ring_full, ring_empty,
    BV: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    for n in range(num_chunks):
        slot = n % RING
        full = ring_full.index(slot)
        i_ch = (first + n) * HV + i_h
        mbarrier.wait(ring_empty.index(slot), ((n // RING) & 1) ^ 1)
        mbarrier.expect(full, 2 * C * (3 * D + BV + C) + 4 * D)
        # in the order in which the chain needs them
        tma.async_copy_global_to_shared(w_desc, [i_ch * C, 0], full, w_ring.index(slot))
        tma.async_copy_global_to_shared(u_desc, [i_ch * C, i_v], full, u_ring.index(slot))
        tma.async_copy_global_to_shared(decay_desc, [i_ch * D], full, decay_ring.index(slot))
        tma.async_copy_global_to_shared(kg_desc, [i_ch * C, 0], full, kg_ring.index(slot))
        tma.async_copy_global_to_shared(qg_desc, [i_ch * C, 0], full, qg_ring.index(slot))
        tma.async_copy_global_to_shared(aqk_desc, [i_ch * C, 0], full, aqk_ring.index(slot))


@gluon.jit
def _scan_chain(
    num_chunks, i_head, i_v, initial_state, final_state, w_ring, u_ring, kg_ring, decay_ring, qg_ring, aqk_ring,
    ring_full, ring_empty, o_buf, o_full, o_empty, s_buf, s_full, s_empty,
    BV: gl.constexpr, RING: gl.constexpr, M: gl.constexpr, INITIAL: gl.constexpr, FINAL: gl.constexpr,
    CHECKPOINTS: gl.constexpr, V_FIRST: gl.constexpr,
):  # fmt: skip
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [BV // 16, 1], [16, 64, 16])  # fp32 [BV, 64]
    lhs: gl.constexpr = gl.DotOperandLayout(0, acc, 2)  # the same as a bf16 register operand
    zeros = gl.zeros([BV, HALF], gl.float32, acc)
    s_lo, s_hi = zeros, zeros
    if INITIAL:
        p_s, half = _state_pointers(initial_state, i_head, i_v, acc, BV, V_FIRST)
        s_lo, s_hi = gl.load(p_s), gl.load(p_s + half)
    s_lo_ws = s_lo.to(gl.bfloat16)
    o_ws = zeros.to(gl.bfloat16)  # O^T of the chunk before, handed over during this one
    for n in range(num_chunks):
        slot = n % RING
        mbarrier.wait(ring_full.index(slot), (n // RING) & 1)
        w, kg, qg = w_ring.index(slot), kg_ring.index(slot), qg_ring.index(slot)  # [C, K] each

        # S^T w^T, then S^T qg^T behind it
        a_lo = gl.convert_layout(s_lo_ws, lhs)
        ws = warpgroup_mma(a_lo, w.slice(0, HALF, 1).permute((1, 0)), zeros, use_acc=False, is_async=True)
        s_hi_ws = s_hi.to(gl.bfloat16)
        a_hi = gl.convert_layout(s_hi_ws, lhs)
        ws = warpgroup_mma(a_hi, w.slice(HALF, HALF, 1).permute((1, 0)), ws, is_async=True)
        o = warpgroup_mma(a_lo, qg.slice(0, HALF, 1).permute((1, 0)), zeros, use_acc=False, is_async=True)
        o = warpgroup_mma(a_hi, qg.slice(HALF, HALF, 1).permute((1, 0)), o, is_async=True)

        # in the shadow of those: fetch u^T, pass the last outputs on
        u = u_ring.index(slot).permute((1, 0)).load(acc)
        if n > 0:
            buf = (n - 1) % 2
            mbarrier.wait(o_empty.index(buf), (((n - 1) // 2) & 1) ^ 1)
            o_buf.index(buf).permute((1, 0)).store(o_ws)
            _hand_over(o_full.index(buf))
        ws = warpgroup_mma_wait(2, deps=[ws])  # the two products with qg stay in flight
        vn = (u.to(gl.float32) - ws).to(gl.bfloat16)

        # Vn^T kg into fresh accumulators, Vn^T aqk^T onto O^T
        a_vn = gl.convert_layout(vn, lhs)
        up_lo = warpgroup_mma(a_vn, kg.slice(0, HALF, 1), zeros, use_acc=False, is_async=True)
        up_hi = warpgroup_mma(a_vn, kg.slice(HALF, HALF, 1), zeros, use_acc=False, is_async=True)
        o = warpgroup_mma(a_vn, aqk_ring.index(slot).permute((1, 0)), o, is_async=True)
        d_lo = decay_ring.index(slot).slice(0, HALF).load(gl.SliceLayout(0, acc))
        d_hi = decay_ring.index(slot).slice(HALF, HALF).load(gl.SliceLayout(0, acc))
        up_lo = warpgroup_mma_wait(2, deps=[up_lo])
        s_lo = s_lo * gl.expand_dims(d_lo, 0) + up_lo
        s_lo_ws = s_lo.to(gl.bfloat16)
        up_hi = warpgroup_mma_wait(1, deps=[up_hi])
        s_hi = s_hi * gl.expand_dims(d_hi, 0) + up_hi
        o_ws = warpgroup_mma_wait(0, deps=[o]).to(gl.bfloat16)
        mbarrier.arrive(ring_empty.index(slot), count=1)
        if CHECKPOINTS:
            if ((n + 1) % M == 0) & (n + 1 < num_chunks):
                mbarrier.wait(s_empty.index(0), (((n + 1) // M - 1) & 1) ^ 1)
                s_buf.slice(0, HALF, 0).permute((1, 0)).store(s_lo_ws)
                s_buf.slice(HALF, HALF, 0).permute((1, 0)).store(s_hi.to(gl.bfloat16))
                _hand_over(s_full.index(0))

    if num_chunks > 0:
        last = num_chunks - 1
        mbarrier.wait(o_empty.index(last % 2), ((last // 2) & 1) ^ 1)
        o_buf.index(last % 2).permute((1, 0)).store(o_ws)
        _hand_over(o_full.index(last % 2))
    if FINAL:
        p_f, half_f = _state_pointers(final_state, i_head, i_v, acc, BV, V_FIRST)
        gl.store(p_f, s_lo)
        gl.store(p_f + half_f, s_hi)


@gluon.jit
def _scan_store(
    num_chunks, HV, i_h, i_v, first, begin, tokens, o, o_desc, checkpoints_desc,
    o_buf, o_full, o_empty, s_buf, s_full, s_empty,
    BV: gl.constexpr, M: gl.constexpr, CHECKPOINTS: gl.constexpr,
):  # fmt: skip
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BV, BV // 8], [1, 1], [1, 0])  # 16 bytes a lane
    for n in range(num_chunks):
        buf = n % 2
        mbarrier.wait(o_full.index(buf), (n // 2) & 1)
        if (n + 1) * C <= tokens:
            tma.async_copy_shared_to_global(o_desc, [begin + n * C, i_h * D + i_v], o_buf.index(buf))
        else:  # the rows behind the last token belong to others
            v = gl.arange(0, BV, layout=gl.SliceLayout(0, rows))
            for r in gl.static_range(0, C, 16):
                t = n * C + r + gl.arange(0, 16, layout=gl.SliceLayout(1, rows))
                p = o + (begin + t).to(gl.int64)[:, None] * (HV * D) + (i_h * D + i_v + v)[None, :]
                gl.store(p, o_buf.index(buf).slice(r, 16, 0).load(rows), mask=(t < tokens)[:, None])
        if CHECKPOINTS:
            if ((n + 1) % M == 0) & (n + 1 < num_chunks):
                i_slot = (first // M + (n + 1) // M - 1) * HV + i_h
                mbarrier.wait(s_full.index(0), ((n + 1) // M - 1) & 1)
                tma.async_copy_shared_to_global(checkpoints_desc, [i_slot * D, i_v], s_buf)
        tma.store_wait(0)  # the buffers have been read and may be written again
        mbarrier.arrive(o_empty.index(buf), count=1)
        if CHECKPOINTS:
            if ((n + 1) % M == 0) & (n + 1 < num_chunks):
                mbarrier.arrive(s_empty.index(0), count=1)


@gluon.jit(do_not_specialize=["T", "HV"])
def _scan_fwd_hopper_kernel(
    w_desc, u_desc, kg_desc, decay_desc, qg_desc, aqk_desc, o_desc, checkpoints_desc,
    initial_state, o, final_state, cu_seqlens, T, HV,
    BV: gl.constexpr, RING: gl.constexpr, M: gl.constexpr, INITIAL: gl.constexpr, FINAL: gl.constexpr,
    CHECKPOINTS: gl.constexpr, V_FIRST: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    i_head, i_h, i_v, first, num_chunks, begin, tokens = _place(cu_seqlens, T, HV, BV, PACKED)
    w_ring = gl.allocate_shared_memory(gl.bfloat16, [RING, C, D], w_desc.layout)
    u_ring = gl.allocate_shared_memory(gl.bfloat16, [RING, C, BV], u_desc.layout)
    kg_ring = gl.allocate_shared_memory(gl.bfloat16, [RING, C, D], kg_desc.layout)
    decay_ring = gl.allocate_shared_memory(gl.float32, [RING, D], decay_desc.layout)
    qg_ring = gl.allocate_shared_memory(gl.bfloat16, [RING, C, D], qg_desc.layout)
    aqk_ring = gl.allocate_shared_memory(gl.bfloat16, [RING, C, C], aqk_desc.layout)
    o_buf = gl.allocate_shared_memory(gl.bfloat16, [2, C, BV], o_desc.layout)
    if CHECKPOINTS:
        s_buf = gl.allocate_shared_memory(gl.bfloat16, [D, BV], checkpoints_desc.layout)
    else:  # a partition's arguments must exist
        s_buf = w_ring.index(0)

    o_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    o_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    s_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    s_empty = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    ring_full = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    ring_empty = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(o_full.index(i), count=1)
        mbarrier.init(o_empty.index(i), count=1)
    mbarrier.init(s_full.index(0), count=1)
    mbarrier.init(s_empty.index(0), count=1)
    for i in gl.static_range(RING):
        mbarrier.init(ring_full.index(i), count=1)
        mbarrier.init(ring_empty.index(i), count=1)
    fence_async_shared()  # the TMA must see initialised barriers
    gl.warp_specialize([
        (_scan_chain, (num_chunks, i_head, i_v, initial_state, final_state,
                       w_ring, u_ring, kg_ring, decay_ring, qg_ring, aqk_ring, ring_full, ring_empty,
                       o_buf, o_full, o_empty, s_buf, s_full, s_empty,
                       BV, RING, M, INITIAL, FINAL, CHECKPOINTS, V_FIRST)),
        (_scan_load, (num_chunks, HV, i_h, i_v, first, w_desc, u_desc, kg_desc, decay_desc, qg_desc, aqk_desc,
                      w_ring, u_ring, kg_ring, decay_ring, qg_ring, aqk_ring, ring_full, ring_empty, BV, RING)),
        (_scan_store, (num_chunks, HV, i_h, i_v, first, begin, tokens, o, o_desc, checkpoints_desc,
                       o_buf, o_full, o_empty, s_buf, s_full, s_empty, BV, M, CHECKPOINTS)),
    ], [1, 1], [24, 24])  # fmt: skip  # warps, then registers a thread, of load and store


# ---------------------------------------------------------------- reverse
@gluon.jit
def _reverse_load(
    num_chunks, HV, i_h, i_v, first, begin, w_desc, kg_desc, qg_desc, aqk_desc, decay_desc, do_desc,
    w_ring, kg_ring, qg_ring, aqk_ring, decay_ring, do_ring, ring_full, ring_empty,
    BV: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    for j in range(num_chunks):
        slot = j % RING
        full = ring_full.index(slot)
        n = num_chunks - 1 - j
        i_ch = (first + n) * HV + i_h
        mbarrier.wait(ring_empty.index(slot), ((j // RING) & 1) ^ 1)
        mbarrier.expect(full, 2 * C * (3 * D + BV + C) + 4 * D)
        tma.async_copy_global_to_shared(kg_desc, [i_ch * C, 0], full, kg_ring.index(slot))
        tma.async_copy_global_to_shared(do_desc, [begin + n * C, i_h * D + i_v], full, do_ring.index(slot))
        tma.async_copy_global_to_shared(aqk_desc, [i_ch * C, 0], full, aqk_ring.index(slot))
        tma.async_copy_global_to_shared(qg_desc, [i_ch * C, 0], full, qg_ring.index(slot))
        tma.async_copy_global_to_shared(decay_desc, [i_ch * D], full, decay_ring.index(slot))
        tma.async_copy_global_to_shared(w_desc, [i_ch * C, 0], full, w_ring.index(slot))


@gluon.jit
def _reverse_chain(
    num_chunks, tokens, i_head, i_v, dfinal_state, dinitial_state,
    w_ring, kg_ring, qg_ring, aqk_ring, decay_ring, do_ring, ring_full, ring_empty,
    ds_buf, dv_buf, ds_full, dv_full, ds_empty, dv_empty,
    BV: gl.constexpr, RING: gl.constexpr, INITIAL: gl.constexpr, FINAL: gl.constexpr, V_FIRST: gl.constexpr,
):  # fmt: skip
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [BV // 16, 1], [16, 64, 16])
    lhs: gl.constexpr = gl.DotOperandLayout(0, acc, 2)
    zeros = gl.zeros([BV, HALF], gl.float32, acc)
    s_lo, s_hi = zeros, zeros  # dS'^T
    if FINAL:
        p_s, half = _state_pointers(dfinal_state, i_head, i_v, acc, BV, V_FIRST)
        s_lo, s_hi = gl.load(p_s), gl.load(p_s + half)
    row = gl.arange(0, C, layout=gl.SliceLayout(0, lhs))
    s_lo_ws = s_lo.to(gl.bfloat16)
    for j in range(num_chunks):
        slot = j % RING
        left = tokens - (num_chunks - 1 - j) * C  # rows of this chunk and of all behind it
        mbarrier.wait(ring_full.index(slot), (j // RING) & 1)
        w, kg, qg = w_ring.index(slot), kg_ring.index(slot), qg_ring.index(slot)

        # rows behind the sequence may hold anything, NaN too: they are selected away
        do = do_ring.index(slot).permute((1, 0)).load(lhs)  # dO^T [BV, C]
        do = gl.where((row < left)[None, :], do, gl.zeros_like(do))

        # dS'^T kg^T + dO^T aqk, then dO^T qg behind it
        a_lo = gl.convert_layout(s_lo_ws, lhs)
        dvn = warpgroup_mma(a_lo, kg.slice(0, HALF, 1).permute((1, 0)), zeros, use_acc=False, is_async=True)
        s_hi_ws = s_hi.to(gl.bfloat16)
        a_hi = gl.convert_layout(s_hi_ws, lhs)
        dvn = warpgroup_mma(a_hi, kg.slice(HALF, HALF, 1).permute((1, 0)), dvn, is_async=True)
        dvn = warpgroup_mma(do, aqk_ring.index(slot), dvn, is_async=True)
        up_lo = warpgroup_mma(do, qg.slice(0, HALF, 1), zeros, use_acc=False, is_async=True)
        up_hi = warpgroup_mma(do, qg.slice(HALF, HALF, 1), zeros, use_acc=False, is_async=True)

        # in the shadow of those: pass dS' on
        mbarrier.wait(ds_empty.index(0), (j & 1) ^ 1)
        ds_buf.slice(0, HALF, 0).permute((1, 0)).store(s_lo_ws)
        ds_buf.slice(HALF, HALF, 0).permute((1, 0)).store(s_hi_ws)
        _hand_over(ds_full.index(0))
        dvn = warpgroup_mma_wait(2, deps=[dvn])  # the two products with qg stay in flight
        a_dvn = gl.convert_layout((-dvn).to(gl.bfloat16), lhs)

        # - dVn^T w
        up_lo = warpgroup_mma(a_dvn, w.slice(0, HALF, 1), up_lo, is_async=True)
        up_hi = warpgroup_mma(a_dvn, w.slice(HALF, HALF, 1), up_hi, is_async=True)
        mbarrier.wait(dv_empty.index(0), (j & 1) ^ 1)
        dv_buf.permute((1, 0)).store(dvn.to(gl.bfloat16))
        _hand_over(dv_full.index(0))
        d_lo = decay_ring.index(slot).slice(0, HALF).load(gl.SliceLayout(0, acc))
        d_hi = decay_ring.index(slot).slice(HALF, HALF).load(gl.SliceLayout(0, acc))
        up_lo = warpgroup_mma_wait(1, deps=[up_lo])
        s_lo = s_lo * gl.expand_dims(d_lo, 0) + up_lo
        s_lo_ws = s_lo.to(gl.bfloat16)
        up_hi = warpgroup_mma_wait(0, deps=[up_hi])
        s_hi = s_hi * gl.expand_dims(d_hi, 0) + up_hi
        mbarrier.arrive(ring_empty.index(slot), count=1)

    if INITIAL:
        p_i, half_i = _state_pointers(dinitial_state, i_head, i_v, acc, BV, V_FIRST)
        gl.store(p_i, s_lo)
        gl.store(p_i + half_i, s_hi)


@gluon.jit
def _reverse_store(
    num_chunks, HV, i_h, i_v, first, ds_desc, dv_desc, ds_buf, dv_buf, ds_full, dv_full, ds_empty, dv_empty
):
    for j in range(num_chunks):
        i_ch = (first + num_chunks - 1 - j) * HV + i_h
        mbarrier.wait(ds_full.index(0), j & 1)
        tma.async_copy_shared_to_global(ds_desc, [i_ch * D, i_v], ds_buf)
        tma.store_wait(0)
        mbarrier.arrive(ds_empty.index(0), count=1)
        mbarrier.wait(dv_full.index(0), j & 1)
        tma.async_copy_shared_to_global(dv_desc, [i_ch * C, i_v], dv_buf)
        tma.store_wait(0)
        mbarrier.arrive(dv_empty.index(0), count=1)


@gluon.jit(do_not_specialize=["T", "HV"])
def _reverse_scan_bwd_hopper_kernel(
    w_desc, kg_desc, qg_desc, aqk_desc, decay_desc, do_desc, dv_desc, ds_desc,
    dfinal_state, dinitial_state, cu_seqlens, T, HV,
    BV: gl.constexpr, RING: gl.constexpr, INITIAL: gl.constexpr, FINAL: gl.constexpr, V_FIRST: gl.constexpr,
    PACKED: gl.constexpr,
):  # fmt: skip
    i_head, i_h, i_v, first, num_chunks, begin, tokens = _place(cu_seqlens, T, HV, BV, PACKED)
    w_ring = gl.allocate_shared_memory(gl.bfloat16, [RING, C, D], w_desc.layout)
    kg_ring = gl.allocate_shared_memory(gl.bfloat16, [RING, C, D], kg_desc.layout)
    qg_ring = gl.allocate_shared_memory(gl.bfloat16, [RING, C, D], qg_desc.layout)
    aqk_ring = gl.allocate_shared_memory(gl.bfloat16, [RING, C, C], aqk_desc.layout)
    decay_ring = gl.allocate_shared_memory(gl.float32, [RING, D], decay_desc.layout)
    do_ring = gl.allocate_shared_memory(gl.bfloat16, [RING, C, BV], do_desc.layout)
    ds_buf = gl.allocate_shared_memory(gl.bfloat16, [D, BV], ds_desc.layout)
    dv_buf = gl.allocate_shared_memory(gl.bfloat16, [C, BV], dv_desc.layout)
    ds_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    dv_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    ds_empty = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    dv_empty = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    ring_full = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    ring_empty = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ds_full.index(0), count=1)
    mbarrier.init(dv_full.index(0), count=1)
    mbarrier.init(ds_empty.index(0), count=1)
    mbarrier.init(dv_empty.index(0), count=1)
    for i in gl.static_range(RING):
        mbarrier.init(ring_full.index(i), count=1)
        mbarrier.init(ring_empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize([
        (_reverse_chain, (num_chunks, tokens, i_head, i_v, dfinal_state, dinitial_state,
                          w_ring, kg_ring, qg_ring, aqk_ring, decay_ring, do_ring, ring_full, ring_empty,
                          ds_buf, dv_buf, ds_full, dv_full, ds_empty, dv_empty, BV, RING, INITIAL, FINAL, V_FIRST)),
        (_reverse_load, (num_chunks, HV, i_h, i_v, first, begin,
                         w_desc, kg_desc, qg_desc, aqk_desc, decay_desc, do_desc,
                         w_ring, kg_ring, qg_ring, aqk_ring, decay_ring, do_ring, ring_full, ring_empty, BV, RING)),
        (_reverse_store, (num_chunks, HV, i_h, i_v, first, ds_desc, dv_desc, ds_buf, dv_buf,
                          ds_full, dv_full, ds_empty, dv_empty)),
    ], [1, 1], [24, 24])  # fmt: skip


# ---------------------------------------------------------------- launchers
def _decay(decay: Any) -> TensorDescriptor:
    NC, HV, K = decay.shape
    return TensorDescriptor(frameworks.of(decay).descriptor_base(decay), [NC * HV * K], [1], [K], shared(K))


def takes(w: Any, token_tensor: Any) -> bool:
    """Whether these kernels are for a call: sizes, dtypes and GPU. Strides are not asked, see `as_matrix`."""
    fw = frameworks.of(w)
    sizes = (fw.shape(w)[3], fw.shape(token_tensor)[3], fw.dtype_name(w), fw.dtype_name(token_tensor))
    return sizes == (128, 128, "bfloat16", "bfloat16") and fw.compute_capability(w) == 90 and fw.shape(w)[0] > 0


def scan_fwd(
    *, w: Any, u: Any, kg: Any, qg: Any, aqk: Any, decay: Any, o: Any, layout: Layout, initial_state: Any,
    final_state: Any, checkpoints: Any, state_v_first: bool, BV: int, RING: int,
) -> None:  # fmt: skip
    """As `scan.scan_fwd`, for what `takes` accepts. Cost: as there; the chain is about 0.9 us a chunk."""
    HV = int(w.shape[1])
    kept = checkpoints is not None and int(checkpoints.shape[0]) > 0
    with frameworks.of(w).on_device(w):
        launch(
            _scan_fwd_hopper_kernel, layout.N * HV * (128 // BV),
            workspace(w, 128), workspace(u, BV), workspace(kg, 128), _decay(decay), workspace(qg, 128),
            workspace(aqk, CHUNK), token_tiles(o, BV), workspace(checkpoints if kept else w, BV, 128),
            initial_state, o, final_state, layout.cu_seqlens, layout.T, HV, BV=BV, RING=RING, M=GROUP,
            INITIAL=initial_state is not None, FINAL=final_state is not None, CHECKPOINTS=kept,
            V_FIRST=state_v_first, PACKED=layout.packed, num_warps=BV // 16,
        )  # fmt: skip


def reverse_scan_bwd(
    *, w: Any, kg: Any, qg: Any, aqk: Any, decay: Any, do: Any, dv_new: Any, dstates: Any, layout: Layout,
    dfinal_state: Any, dinitial_state: Any, state_v_first: bool, BV: int, RING: int,
) -> None:  # fmt: skip
    """As `scan.reverse_scan_bwd`, for what `takes` accepts."""
    HV = int(w.shape[1])
    with frameworks.of(w).on_device(w):
        launch(
            _reverse_scan_bwd_hopper_kernel, layout.N * HV * (128 // BV),
            workspace(w, 128), workspace(kg, 128), workspace(qg, 128), workspace(aqk, CHUNK), _decay(decay),
            token_tiles(as_matrix(do), BV), workspace(dv_new, BV), workspace(dstates, BV, 128),
            dfinal_state, dinitial_state, layout.cu_seqlens, layout.T, HV, BV=BV, RING=RING,
            INITIAL=dinitial_state is not None, FINAL=dfinal_state is not None, V_FIRST=state_v_first,
            PACKED=layout.packed, num_warps=BV // 16,
        )  # fmt: skip
