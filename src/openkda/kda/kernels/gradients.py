"""The gradient stage: gradients of all token inputs and of the gate's parameters, chunks and heads in parallel.

Per chunk and value head, names as in maths.md (b = beta, S the state before the chunk, dS' the gradient after it):

    values      X = A^T dVn     dv = b * X     dAqk = tril(dO Vn^T)     dL = -stril(X Vn^T)
                dQg = dO S^T    dXs = -X S^T   dKg = Vn dS'^T           end = sum_e S dS'
    keys        dq, dk, dg from these, through the decays between rows: gradients_keys.py

and what the activations make of them: l2norm, gate and sigmoid are differentiated in the same kernels.

No sum over all channels of a key is formed from the gradients. The projections of the l2norm backward and dbeta follow
from the recurrence, where o_i is linear in q_i, and u_i = Vn_i is what token i writes, with gradient X_i:

    q_i . dq_i = dO_i . O_i = (q Din)_i . dQg_i + sum_j Aqk_ij dAqk_ij
    k_i . dk_i = 2 X_i . Vn_i - b_i X_i . v_i         of it X_i . Vn_i as column; as row, b_i k_i . D_i
    dbeta_i    = X_i . Vn_i / b_i                     the sigmoid's derivative b (1 - b) cancels the division;
               = X_i . v_i + k_i . D_i                for a given b, which may be 0

in / out    q, k [B, T, H, K]; v, do [B, T, HV, V]; g [B, T, HV, K]; beta [B, T, HV]; workspaces -> their gradients
sums        dA_log, ddt_bias: a partial for each chunk, head and slice of channels, then a fixed order; no atomics
heads       with HV > H, dq and dk are fp32 per value head, then summed over the group in a fixed order, rounded once
cost        K = V = 128, bf16, a token and head: values reads 2570 bytes, writes 1310, 164 kflop in matmuls; keys reads
            2080, writes 770, 106 kflop in products of 16 x 16, some 160 instructions a channel
oracle      autograd through openkda.kda.eager in fp64
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportCallIssue=false
# (a launch passes plain values for constexpr parameters, and loops over tl.range)
from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl

from openkda import frameworks
from openkda.kda.kernels import gradients_values, tuning
from openkda.kda.kernels.common import Activations, locate_chunk
from openkda.kda.kernels.gradients_keys import _keys_bwd_kernel
from openkda.kda.kernels.launch import launch
from openkda.kda.kernels.tables import CHUNK, Layout

FP32 = {"BK": 32, "BV": 32, "KC": 32}  # tiles where operands take twice the room


# ---- small sums
@triton.jit(do_not_specialize=["T"])
def _beta_bwd_kernel(
    x_v, k_dk, dbeta, chunks, T, db_b, HV: tl.constexpr, SLICES: tl.constexpr, PACKED: tl.constexpr
):  # fmt: skip
    """dbeta_i = X_i . v_i + k_i . D_i, the second over slices of channels: for a beta that was given."""
    C: tl.constexpr = 64
    i_ch = tl.program_id(0).to(tl.int64)
    i_r = tl.arange(0, C)
    o_db, rows = locate_chunk(chunks, i_ch // HV, T, db_b, HV, C, PACKED)
    db = tl.load(x_v + i_ch * C + i_r, mask=i_r < rows, other=0.0)
    for s in tl.static_range(SLICES):
        db += tl.load(k_dk + (i_ch * SLICES + s) * C + i_r, mask=i_r < rows, other=0.0)
    tl.store(dbeta + o_db + i_r * HV + i_ch % HV, db.to(dbeta.dtype.element_ty), mask=i_r < rows)


@triton.jit
def _group_sum_kernel(x, y, numel, K: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """y [.., H, K] = sum over the group of x [.., H, GROUP, K], first value head first."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    p_x = x + (at // K) * (GROUP * K) + at % K
    total = tl.zeros([BLOCK], tl.float32)
    for n in tl.static_range(GROUP):
        total += tl.load(p_x + n * K, mask=at < numel, other=0.0)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=at < numel)


@triton.jit(do_not_specialize=["NC", "HV"])
def _sum_over_chunks_kernel(
    dA, dbias, dA_log, ddt_bias, NC, HV, K: tl.constexpr, SLICES: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr
):  # fmt: skip
    """dA_log [HV] = sum of dA [NC, HV, SLICES] over chunks and slices, ddt_bias [HV, K] = sum of dbias [NC, HV, K].

    64 chunks at a time, then one after the other. A program sums BLOCK channels of a head, or all of dA for it.
    """
    BLOCKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    i_h, i_b = tl.program_id(0) // (BLOCKS + 1), tl.program_id(0) % (BLOCKS + 1)
    o_c, o_n = tl.arange(0, 64)[:, None], tl.arange(0, BLOCK)
    if i_b < BLOCKS:
        if ddt_bias is not None:
            o_k = i_b * BLOCK + o_n
            total = tl.zeros([BLOCK], tl.float32)
            for first in range(0, NC, 64):
                at = dbias + ((first + o_c).to(tl.int64) * HV + i_h) * K + o_k[None, :]
                total += tl.sum(tl.load(at, mask=(first + o_c < NC) & (o_k < K)[None, :], other=0.0), 0)
            p_out = ddt_bias + i_h * K + o_k
            if ADD:
                total += tl.load(p_out, mask=o_k < K, other=0.0)
            tl.store(p_out, total, mask=o_k < K)
    elif dA_log is not None:
        total = tl.zeros([BLOCK], tl.float32)
        for first in range(0, NC, 64):
            at = dA + ((first + o_c).to(tl.int64) * HV + i_h) * SLICES + o_n[None, :]
            total += tl.sum(tl.load(at, mask=(first + o_c < NC) & (o_n < SLICES)[None, :], other=0.0), 0)
        all_slices = tl.sum(total, 0)
        if ADD:
            all_slices += tl.load(dA_log + i_h)
        tl.store(dA_log + i_h, all_slices)


# ---- launcher
def gradients_bwd(
    *, q: Any, k: Any, v: Any, g: Any, beta: Any, do: Any, a: Any, aqk: Any, qg: Any, v_new: Any, dv_new: Any,
    states: Any, dstates: Any, norms: Any, dq: Any, dk: Any, dv: Any, dg: Any, dbeta: Any, act: Activations,
    layout: Layout, partials: dict[str, Any] | None = None, keys: bool = True, tile: dict | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Gradients of all token inputs, from the workspaces that the scans of the backward left.

    Args:
        q, k, v, g, beta, do: As given; strides are free but for a contiguous last axis of all but beta.
        a, aqk: WS [NC, HV, C, C]; qg: WS [NC, HV, C, K]; v_new, dv_new: WS [NC, HV, C, V]; states, dstates: WS
            [NC, HV, K, V], before and behind each chunk; norms: fp32 [NC, HV, 2, C], with l2norm. Rows behind a chunk's
            last token hold zeros.
        dq, dk, dv, dg, dbeta: Written, shaped like their inputs, contiguous within a batch row; rows behind the last
            offset hold nothing of use.
        partials: Written, see `parameter_partials`; None means that they are made and summed here.
        keys: False writes dv and, of a sigmoid, dbeta; nothing else.
    Returns: {"A_log": fp32 [HV], "dt_bias": fp32 [HV, K]}, gradients of the gate's parameters; each None without a
        gate, or if partials are given.
    """
    fw = frameworks.of(q)
    (H, K), HV, NC = fw.shape(q)[2:], fw.shape(v)[2], layout.num_chunks
    t = _settings(q, v, act, layout, tile)
    KC = t.pop("KC")
    slices = -(-K // KC)
    work = _workspaces(fw, a, HV, K, NC)
    dq_heads, dk_heads = (dq, dk) if H == HV else (fw.empty(fw.shape(g), like=g, dtype="float32") for _ in range(2))
    x_v = dbeta if act.beta_sigmoid else fw.empty((NC, HV, CHUNK), like=a, dtype="float32")
    k_dk = x_v if act.beta_sigmoid else fw.empty((NC * HV * slices, CHUNK), like=a, dtype="float32")
    parts = partials or parameter_partials(q, v, act, layout, tile)
    dA, dbias = parts["A_log"], parts["dt_bias"]
    flags = {"L2NORM": act.l2norm, "BETA_SIGMOID": act.beta_sigmoid, "PACKED": layout.packed}
    term = tl.float32 if fw.dtype_name(a) == "float32" else tl.float16
    flags |= {"H": H, "HV": HV, "K": K, "KC": KC, "TERM": term, "num_warps": KC // 16}
    gradients_values.values_bwd(
        v=v, beta=beta, do=do, a=a, aqk=aqk, qg=qg, v_new=v_new, dv_new=dv_new, states=states, dstates=dstates,
        norms=norms, work=work, dv=dv, dbeta=x_v, act=act, layout=layout, **t,
    )  # fmt: skip
    sums: dict[str, Any] = {"A_log": None, "dt_bias": None}
    if not keys:
        return sums
    with fw.on_device(q):
        (q_b, q_t, q_h), (k_b, k_t, k_h), (g_b, g_t, g_h) = (fw.strides(i)[:3] for i in (q, k, g))
        launch(
            _keys_bwd_kernel, NC * HV, q, k, g, *work.values(), act.A_log, act.dt_bias, dq_heads, dk_heads, dg, k_dk,
            dA, dbias, layout.chunks, layout.T, float(act.scale), float(act.lower_bound or 0.0),
            q_b, q_h, k_b, k_h, g_b, g_h, int(fw.strides(dg)[0]), Q_T=q_t, K_T=k_t, G_T=g_t, GATE=act.gate, **flags,
        )  # fmt: skip
        if not act.beta_sigmoid:
            launch(
                _beta_bwd_kernel, NC * HV, x_v, k_dk, dbeta, layout.chunks, layout.T, int(fw.strides(dbeta)[0]), HV=HV,
                SLICES=slices, PACKED=layout.packed,
            )  # fmt: skip
        if H != HV:
            for per_head, total in ((dq_heads, dq), (dk_heads, dk)):
                numel = math.prod(fw.shape(total))
                launch(_group_sum_kernel, -(-numel // 1024), per_head, total, numel, K=K, GROUP=HV // H, BLOCK=1024)
    if partials is None and act.gate != "none":
        sums = {"A_log": fw.empty((HV,), like=dA), "dt_bias": fw.empty((HV, K), like=dA)}
        sum_over_chunks(parts, sums)
    return sums


def parameter_partials(q: Any, v: Any, act: Activations, layout: Layout, tile: dict | None = None) -> dict[str, Any]:
    """Unwritten parts of dA_log, fp32 [NC, HV, slices of channels], and of ddt_bias, fp32 [NC, HV, K]."""
    fw = frameworks.of(q)
    HV, K = fw.shape(v)[2], fw.shape(q)[3]
    slices = -(-K // _settings(q, v, act, layout, tile)["KC"])
    return {
        name: fw.empty((layout.num_chunks, HV, n), like=q, dtype="float32")
        for name, n in (("A_log", slices), ("dt_bias", K))
    }


def sum_over_chunks(partials: dict[str, Any], sums: dict[str, Any], *, add: bool = False) -> None:
    """dA_log [HV] and ddt_bias [HV, K] or flat, fp32, contiguous; what is None is not wanted. add: to what is there."""
    dA, dbias = partials["A_log"], partials["dt_bias"]
    fw = frameworks.of(dA)
    (NC, HV, slices), K = fw.shape(dA), fw.shape(dbias)[2]
    block = max(32, triton.next_power_of_2(slices))
    with fw.on_device(dA):
        launch(
            _sum_over_chunks_kernel, HV * (-(-K // block) + 1), dA, dbias, sums["A_log"], sums["dt_bias"], NC, HV,
            K=K, SLICES=slices, BLOCK=block, ADD=add,
        )  # fmt: skip


def _settings(q: Any, v: Any, act: Activations, layout: Layout, tile: dict | None) -> dict[str, Any]:
    """Tile sizes, cut down to the sizes of this call."""
    fw = frameworks.of(q)
    K, (HV, V) = fw.shape(q)[3], fw.shape(v)[2:]
    t = dict(tile or tuning.lookup("gradients_bwd", tuning.family_of(q), work=layout.num_chunks * HV))
    if fw.dtype_name(q) == "float32":
        t |= FP32
    for name, size in (("BK", K), ("KC", K), ("BV", V)):
        t[name] = min(t[name], max(16, triton.next_power_of_2(size)))
    return t


def _workspaces(fw: Any, a: Any, HV: int, K: int, NC: int) -> dict[str, Any]:
    """What the values kernel leaves for the keys kernel, in the order of their arguments."""
    ws, C = fw.dtype_name(a), CHUNK
    sizes: dict[str, tuple[tuple[int, ...], str]] = {name: ((C, K), ws) for name in ("dqg", "dxs", "dkg")}
    sizes |= {"ends": ((K,), "float32")}
    sizes |= {name: ((C, C), ws) for name in ("w_q", "w_k")}
    sizes |= {"row_norms": ((2, C), "int64"), "row_beta": ((C,), "float32")}
    return {name: fw.empty((NC, HV, *size), like=a, dtype=dtype) for name, (size, dtype) in sizes.items()}
