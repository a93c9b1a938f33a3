"""The values half of the gradient stage (gradients.py): products of what tokens wrote and states, chunk by chunk.

Names as there:

    X = A^T dVn     dv = b * X     dAqk = tril(dO Vn^T)     dL = -stril(X Vn^T)
    dQg = dO S^T    dXs = -X S^T   dKg = Vn dS'^T           end = sum_e S dS'

Where a sigmoid made beta, dL and dXs are of b * X: the keys kernel wants them times b.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportCallIssue=false
# (a launch passes plain values for constexpr parameters, and loops over tl.range)
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from openkda import frameworks
from openkda.kda.kernels import tuning
from openkda.kda.kernels.common import Activations, hopper_module, locate_chunk, sigmoid
from openkda.kda.kernels.launch import launch
from openkda.kda.kernels.tables import CHUNK, Layout

RESULTS = ("dqg", "dxs", "dkg", "ends", "w_q", "w_k", "row_norms", "row_beta")


@triton.jit
def _pack64(low, high):
    """Two fp32 in an int64: one load where every lane wants both."""
    low, high = low.to(tl.int32, bitcast=True).to(tl.int64), high.to(tl.int32, bitcast=True).to(tl.int64)
    return (low & 0xFFFFFFFF) | (high << 32)


@triton.jit(do_not_specialize=["T"])
def _values_bwd_kernel(
    v, beta, do, a, aqk, qg, v_new, dv_new, states, dstates, norms,
    x, dqg, dxs, dkg, ends, w_q, w_k, row_norms, row_beta, dv, dbeta, chunks,
    T, scale, beta_scale,
    v_b, v_t, v_h, b_b, b_t, b_h, do_b, do_t, do_h, dv_b, db_b,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    L2NORM: tl.constexpr, BETA_SIGMOID: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = 64
    WS: tl.constexpr = x.dtype.element_ty
    i_c = (tl.program_id(0) // HV).to(tl.int64)
    i_h = tl.program_id(0) % HV
    i_ch = i_c * HV + i_h
    o_v, rows = locate_chunk(chunks, i_c, T, v_b, v_t, C, PACKED)
    if rows > 0:
        i_r = tl.arange(0, C)
        m_r = i_r < rows
        o_b, _ = locate_chunk(chunks, i_c, T, b_b, b_t, C, PACKED)
        o_do, _ = locate_chunk(chunks, i_c, T, do_b, do_t, C, PACKED)
        o_dv, _ = locate_chunk(chunks, i_c, T, dv_b, HV * V, C, PACKED)
        b = tl.load(beta + o_b + i_h * b_h + i_r * b_t, mask=m_r, other=0.0).to(tl.float32)
        if BETA_SIGMOID:
            b = beta_scale * sigmoid(b)
        b = tl.where(m_r, b, 0.0)
        tl.store(row_beta + i_ch * C + i_r, b)
        p_v = v + o_v + i_h * v_h + i_r[:, None] * v_t
        p_do = do + o_do + i_h * do_h + i_r[:, None] * do_t
        p_dv = dv + o_dv + i_h * V + i_r[:, None] * (HV * V)
        i, j = i_r[:, None], i_r[None, :]
        square = i_ch * (C * C) + i * C + j
        value = i_ch * (C * V) + i * V
        b_at = tl.trans(tl.load(a + square))

        # X = A^T dVn, dv, dAqk, dL
        dw_q = tl.zeros([C, C], tl.float32)
        dw_k = tl.zeros([C, C], tl.float32)
        x_v = tl.zeros([C], tl.float32)
        x_vn = tl.zeros([C], tl.float32)
        for i_v in range(0, V, BV):
            o_v_ = i_v + tl.arange(0, BV)[None, :]
            m_v = o_v_ < V
            m = m_r[:, None] & m_v
            b_dvn = tl.load(dv_new + value + o_v_, mask=m_v, other=0.0)
            b_vn = tl.load(v_new + value + o_v_, mask=m_v, other=0.0)
            b_do = tl.load(p_do + o_v_, mask=m, other=0.0).to(WS)
            b_v = tl.load(p_v + o_v_, mask=m, other=0.0)
            b_x = tl.dot(b_at, b_dvn, input_precision=PRECISION)
            x_v += tl.sum(b_x * b_v.to(tl.float32), 1)
            x_vn += tl.sum(b_x * b_vn.to(tl.float32), 1)
            b_dv = b_x * b[:, None]
            if BETA_SIGMOID:
                b_xw = b_dv.to(WS)
            else:
                b_xw = b_x.to(WS)
            dw_q = tl.dot(b_do, tl.trans(b_vn), dw_q, input_precision=PRECISION)
            dw_k = tl.dot(b_xw, tl.trans(b_vn), dw_k, input_precision=PRECISION)
            tl.store(x + value + o_v_, b_xw, mask=m_v)
            tl.store(p_dv + o_v_, b_dv.to(dv.dtype.element_ty), mask=m)

        tl.store(w_q + square, tl.where(j <= i, dw_q, 0.0).to(WS))
        tl.store(w_k + square, tl.where(j < i, -dw_k, 0.0).to(WS))
        q_dq = tl.zeros([C], tl.float32)
        if L2NORM:
            q_dq += tl.sum(tl.load(aqk + square).to(tl.float32) * tl.where(i >= j, dw_q, 0.0), 1)

        # against the states
        tl.debug_barrier()
        for i_k in range(0, K, BK):
            o_k = i_k + tl.arange(0, BK)
            m_k = o_k < K
            s_q = tl.zeros([C, BK], tl.float32)
            s_k = tl.zeros([C, BK], tl.float32)
            s_c = tl.zeros([C, BK], tl.float32)
            end = tl.zeros([BK], tl.float32)
            for i_v in range(0, V, BV):
                o_v_ = i_v + tl.arange(0, BV)[None, :]
                m_v = o_v_ < V
                at = i_ch * (K * V) + o_k[:, None] * V + o_v_
                b_s = tl.load(states + at, mask=m_k[:, None] & m_v, other=0.0)
                b_ds = tl.load(dstates + at, mask=m_k[:, None] & m_v, other=0.0)
                b_do = tl.load(p_do + o_v_, mask=m_r[:, None] & m_v, other=0.0).to(WS)
                b_x = tl.load(x + value + o_v_, mask=m_v, other=0.0)
                b_vn = tl.load(v_new + value + o_v_, mask=m_v, other=0.0)
                end += tl.sum(b_s.to(tl.float32) * b_ds.to(tl.float32), 1)
                s_q = tl.dot(b_do, tl.trans(b_s), s_q, input_precision=PRECISION)
                s_k = tl.dot(b_x, tl.trans(b_s), s_k, input_precision=PRECISION)
                s_c = tl.dot(b_vn, tl.trans(b_ds), s_c, input_precision=PRECISION)
            key = i_ch * (C * K) + i * K + o_k[None, :]
            if L2NORM:
                q_dq += tl.sum(tl.load(qg + key, mask=m_k[None, :], other=0.0).to(tl.float32) * s_q, 1)
            tl.store(dqg + key, s_q.to(WS), mask=m_k[None, :])
            tl.store(dxs + key, (-s_k).to(WS), mask=m_k[None, :])
            tl.store(dkg + key, s_c.to(WS), mask=m_k[None, :])
            tl.store(ends + i_ch * K + o_k, end, mask=m_k)

        if BETA_SIGMOID:  # dbeta_i = X_i . Vn_i / b_i, and the sigmoid's derivative cancels the division
            o_db, _ = locate_chunk(chunks, i_c, T, db_b, HV, C, PACKED)
            db = x_vn * (1.0 - b / beta_scale)
            tl.store(dbeta + o_db + i_r * HV + i_h, db.to(dbeta.dtype.element_ty), mask=m_r)
        else:
            tl.store(dbeta + i_ch * C + i_r, x_v)  # `_beta_bwd_kernel` adds k_i . D_i
        if L2NORM:
            rq = tl.load(norms + i_ch * (2 * C) + i_r)
            rk = tl.load(norms + i_ch * (2 * C) + C + i_r)
            p_norm = row_norms + i_ch * (2 * C) + i_r
            tl.store(p_norm, _pack64(rq * scale, rq * q_dq / scale))
            tl.store(p_norm + C, _pack64(rk, rk * (2.0 * x_vn - b * x_v)))


# ---- launcher
def values_bwd(
    *, v: Any, beta: Any, do: Any, a: Any, aqk: Any, qg: Any, v_new: Any, dv_new: Any, states: Any, dstates: Any,
    norms: Any, work: dict[str, Any], dv: Any, dbeta: Any, act: Activations, layout: Layout, BK: int, BV: int,
    hopper: bool = True,
) -> None:  # fmt: skip
    """dv, what the keys kernel reads (work), and dbeta: complete if a sigmoid made beta, else X_i . v_i.

    Args: as in `gradients_bwd`, and
        work: Workspaces by name, written.
        dbeta: [B, T, HV], or fp32 [NC, HV, C] for X_i . v_i.
        hopper: Whether `gradients_values_hopper.py` may take the call.
    """
    fw = frameworks.of(a)
    NC, HV, K, V = (int(n) for n in states.shape)
    flags = {"L2NORM": act.l2norm, "BETA_SIGMOID": act.beta_sigmoid, "PACKED": layout.packed}
    if hopper and (module := hopper_module("gradients_values_hopper", a, v, do, dv)) is not None:
        module.values_bwd(
            v=v, beta=beta, do=do, a=a, aqk=aqk, qg=qg, v_new=v_new, dv_new=dv_new, states=states, dstates=dstates,
            norms=norms, work=work, dv=dv, dbeta=dbeta, layout=layout, scale=act.scale, beta_scale=act.beta_scale,
            flags=flags, **tuning.lookup("values_bwd_hopper", 90, work=NC * HV),
        )  # fmt: skip
        return
    x = fw.empty((NC, HV, CHUNK, V), like=a)
    results = (work[n] for n in RESULTS)
    with fw.on_device(a):
        launch(
            _values_bwd_kernel, NC * HV,
            v, beta, do, a, aqk, qg, v_new, dv_new, states, dstates, norms, x, *results, dv, dbeta, layout.chunks,
            layout.T, float(act.scale), float(act.beta_scale),
            *(int(s) for i in (v, beta, do) for s in fw.strides(i)[:3]), int(fw.strides(dv)[0]),
            int(fw.strides(dbeta)[0]), HV=HV, K=K, V=V, BK=BK, BV=BV, **flags,
            PRECISION="tf32x3" if fw.dtype_name(a) == "float32" else "tf32", num_warps=4, num_stages=1,
        )  # fmt: skip
