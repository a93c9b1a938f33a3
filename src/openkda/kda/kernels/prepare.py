"""What the scans need of every chunk, from raw inputs, and again in the backward from what was kept.

C = 64 rows a chunk, q and k normalised rows, b = beta, D(i, j) [K] the decay between two rows, <= 1 (maths.md sections
2 and 4 to 6; Din = D(i, start), Dout = D(end, i)):

    Akk[i, j] = sum_d k[i] k[j] D(i, j)   j <  i           Aqk[i, j] = scale * sum_d q[i] k[j] D(i, j)   j <= i
    A  = (I + diag(b) Akk)^-1             W = A diag(b) (k * Din)         U = A diag(b) v
    Kg = k * Dout      Qg = scale * q * Din      decay = D(end, start)      norms = 1 / |q[i]|, 1 / |k[i]|

    in         q, k [B, T, H, K], v [B, T, HV, V], g [B, T, HV, K] (raw or log-decay), beta [B, T, HV]; strides are free
               but for the last axis, which is contiguous
    out        w, kg, qg WS [NC, HV, C, K], u WS [NC, HV, C, V], aqk, a WS [NC, HV, C, C], decay fp32 [NC, HV, K],
               norms fp32 [NC, HV, 2, C], with l2norm only
    program    one chunk of one value head, 4 warps, warp n owns rows 16 n .. 16 n + 15

Rows in different 16-row blocks meet at level 32 or 16, rows of one block at level 8, 4, 2 or 1 (common.py).
Tiles are [4, 16, channels]: the products within blocks are batches of four, one a warp, whose results (factors, scores)
are operands of the next product without leaving their registers. Operands of scores are fp16 where that is safe
(normalised keys, or fp16 inputs): as exact as tf32, at the price of bf16.

On Hopper with bf16 and K = V = 128 both run in Gluon, `prepare_hopper.py` (with l2norm) and `recompute_hopper.py`, in
0.63 and 0.79 times the time.

oracle: openkda.kda.eager, `decay_factors`, `intra_chunk_scores`, `triangular_inverse`
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from openkda import frameworks
from openkda.kda.kernels import tuning
from openkda.kda.kernels.common import (
    FLOOR_LOG2,
    LOG2_E,
    NORM_EPS,
    Activations,
    decay_log2,
    exponents,
    hopper_module,
    locate_chunk,
    packed_product,
    prefetch_rows,
    scaled,
    select_level,
    sigmoid,
    to_operand,
)
from openkda.kda.kernels.launch import launch
from openkda.kda.kernels.tables import CHUNK, Layout


# ---- pieces
@triton.jit
def _row_products(x, y, diagonal):
    """sum_d x[i, d] y[i, d], [4, 16], of tiles [4, 16, K]; in 16 bits the diagonal of a product, cheaper than a sum."""
    if x.dtype == tl.float32:
        return tl.sum(x * y, 2)
    else:
        z = tl.dot(x, tl.permute(y, (0, 2, 1)))
        return tl.sum(tl.where(diagonal, z, 0.0), 2)


@triton.jit
def _row_beta(beta, stride, i, s, rows, beta_scale, BETA_SIGMOID: tl.constexpr):
    """Activated beta [4, 16], 0 on rows without a token; a sum of one term, lest every use loads it anew."""
    b = tl.load(beta + s * stride, mask=s < rows, other=0.0).to(tl.float32)
    if BETA_SIGMOID:
        b = beta_scale * sigmoid(b)
    return tl.sum(tl.where((i == s) & (s < rows), b, 0.0), 2)


@triton.jit
def _spread(x):
    """Blocks [4, 16, 16] on the diagonal of [64, 64]; what lies elsewhere means nothing.

    In 16 bits a product with four unit matrices side by side does it without moving a register between threads.
    """
    if x.dtype == tl.float16:
        unit = (tl.arange(0, 16)[:, None] == tl.arange(0, 64)[None, :] % 16).to(tl.float16)
        return tl.dot(tl.reshape(x, (64, 16)), unit)
    else:
        return tl.reshape(tl.broadcast_to(x[:, :, None, :], (4, 16, 4, 16)), (64, 64))


@triton.jit
def _masked(x, keep):
    """x where keep, else 0, for finite x: a packed product costs half a select."""
    return packed_product(x, tl.broadcast_to(tl.where(keep, 1.0, 0.0).to(x.dtype), x.shape))


@triton.jit
def _matrix(x):
    """[4, 16, N] -> [64, N]"""
    return tl.reshape(x, (64, x.shape[2]))


@triton.jit
def _level_scores(q, k, g_log2, sq, sk, i, s, h: tl.constexpr, PRECISION: tl.constexpr):
    """Add these channels to the scores of the pairs of level h; q, k, g_log2 [4, 16, BK], sq, sk [4, 16, 16]."""
    qf, kf = scaled(q, k, tl.exp2(exponents(select_level(i, s, h), g_log2, PRECISION)))
    columns = tl.permute(kf, (0, 2, 1))
    pair = i ^ s  # its highest set bit is the level of the pair
    mine = (pair >= h) & (pair < 2 * h)
    sq = tl.where(mine, sq + tl.dot(qf, columns, input_precision=PRECISION), sq)
    sk = tl.where(mine, sk + tl.dot(kf, columns, input_precision=PRECISION), sk)
    return sq, sk


@triton.jit
def _inverse_level(x, n, pair, h: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """X_2h = X_h - X_h N_h X_h, N_h the blocks of N at level h: only true inverses are multiplied, so nothing grows."""
    n_h = to_operand(tl.where((pair >= h) & (pair < 2 * h), n, 0.0), DTYPE)
    x_h = to_operand(x, DTYPE)
    y = tl.dot(x_h, n_h, input_precision=PRECISION)
    return x - tl.dot(to_operand(y, DTYPE), x_h, input_precision=PRECISION)


@triton.jit
def _gate_rows(A_log, i_h, valid, lower_bound, GATE: tl.constexpr):
    """exp(A_log) and the lower bound for every row, such that rows without a token do not decay."""
    rate = tl.where(valid, 1.0, 0.0)
    if GATE == "softplus":
        rate *= tl.exp2(tl.load(A_log + i_h) * LOG2_E)
        return rate, rate
    elif GATE == "bounded":
        return tl.exp2(tl.load(A_log + i_h) * LOG2_E), rate * lower_bound
    else:
        return rate, rate


@triton.jit
def _park_gate(
    b_raw, A_log, dt_bias, parked, blocks, decay, i_h, i3, rows, lower_bound,
    K: tl.constexpr, KW: tl.constexpr, GATE: tl.constexpr, TERM: tl.constexpr,
):  # fmt: skip
    """Write log2 decays [C, K] as exponents take them (TERM), decays of 16-row blocks to `blocks` [3, 4, K], decay [K].

    blocks: product of the blocks up to this one; of this one and those behind; this one alone. One-signed sums in fp32.
    """
    o_k = tl.arange(0, KW)
    m_k = o_k < K
    rate, bound = _gate_rows(A_log, i_h, i3 < rows, lower_bound, GATE)
    bias = tl.zeros([KW], tl.float32)
    if dt_bias is not None:
        bias = tl.load(dt_bias + i_h * K + o_k, mask=m_k, other=0.0)
    b_g = decay_log2(b_raw.to(tl.float32), bias[None, None, :], rate, bound, GATE)
    b_g = tl.maximum(b_g, FLOOR_LOG2)
    tl.store(parked + (i3 * K + o_k[None, None, :]), to_operand(b_g, TERM), mask=m_k[None, None, :])

    total = tl.sum(b_g, 1)  # [4, KW]
    o_4 = tl.arange(0, 4)[:, None]
    m_4 = m_k[None, :]
    up_to = tl.exp2(tl.cumsum(total, 0))
    p = blocks + (o_4 * K + o_k[None, :])
    tl.store(p, up_to, mask=m_4)
    tl.store(p + 4 * K, tl.exp2(tl.cumsum(total, 0, reverse=True)), mask=m_4)
    tl.store(p + 8 * K, tl.exp2(total), mask=m_4)
    tl.store(decay + (o_4 * 0 + o_k[None, :]), up_to, mask=m_4 & (o_4 == 3))


@triton.jit
def _load_slice(q, k, parked, blocks, o_q, o_k, o_p, i_k, m_r, K: tl.constexpr, BK: tl.constexpr):
    """Channels i_k .. of q, k, parked terms [4, 16, BK], and decays of blocks [4, 1, BK]: before, behind, between."""
    n = tl.arange(0, 4)[:, None, None]
    o_c = tl.arange(0, BK)[None, None, :]
    m_c = o_c < K - i_k
    b_q = tl.load(q + i_k + o_q, mask=m_r & m_c, other=0.0)
    b_k = tl.load(k + i_k + o_k, mask=m_r & m_c, other=0.0)
    b_g = tl.load(parked + i_k + o_p, mask=m_c, other=0.0)
    p = blocks + i_k + o_c
    before = tl.load(p + (n - 1) * K, mask=m_c & (n > 0), other=1.0)
    behind = tl.load(p + (n + 5) * K, mask=m_c & (n < 3), other=1.0)
    # level 32 cuts between blocks 1 and 2: from block 0 to the cut lies block 1, from the cut to block 3 lies block 2
    between = tl.load(p + tl.where(n < 2, 9, 10) * K, mask=m_c & ((n == 0) | (n == 3)), other=1.0)
    return b_q, b_k, b_g, before, behind, between


# ---- forward
@triton.jit(do_not_specialize=["T", "HV", "group"])
def _prepare_fwd_kernel(
    q, k, v, g, beta, A_log, dt_bias, w, u, kg, qg, aqk, a, decay, norms, blocks, chunks,
    T, HV, group, scale, lower_bound, beta_scale,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, b_b, b_t, b_h,
    K: tl.constexpr, V: tl.constexpr, KW: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    GATE: tl.constexpr, L2NORM: tl.constexpr, BETA_SIGMOID: tl.constexpr, PACKED: tl.constexpr,
    OPERAND: tl.constexpr, TERM: tl.constexpr, INVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Which work: neighbours are heads of one chunk, whose rows lie side by side. One axis, as y and z end at 65535.
    WS: tl.constexpr = w.dtype.element_ty
    i_c = (tl.program_id(0) // HV).to(tl.int64)
    i_h = (tl.program_id(0) % HV).to(tl.int64)
    i_ch = i_c * HV + i_h
    o_b, rows = locate_chunk(chunks, i_c, T, b_b, b_t, C, PACKED)
    if rows == 0:
        return
    q += locate_chunk(chunks, i_c, T, q_b, q_t, C, PACKED)[0] + (i_h // group) * q_h
    k += locate_chunk(chunks, i_c, T, k_b, k_t, C, PACKED)[0] + (i_h // group) * k_h
    v += locate_chunk(chunks, i_c, T, v_b, v_t, C, PACKED)[0] + i_h * v_h
    g += locate_chunk(chunks, i_c, T, g_b, g_t, C, PACKED)[0] + i_h * g_h
    w += i_ch * (C * K)
    u += i_ch * (C * V)
    kg += i_ch * (C * K)
    qg += i_ch * (C * K)
    blocks += i_ch * (12 * K)
    parked = kg.to(tl.pointer_type(TERM), bitcast=True)  # each slice of kg holds terms of exponents until it is written
    i_r = tl.arange(0, C)
    i2, s2 = i_r[:, None], i_r[None, :]
    n3 = tl.arange(0, 4)[:, None, None]
    i3 = n3 * 16 + tl.arange(0, 16)[None, :, None]
    s3 = n3 * 16 + tl.arange(0, 16)[None, None, :]
    m_r, m_r3 = i_r < rows, i3 < rows

    # Load, all at once. Rows that hold no token are selected away; v is needed last.
    o_w = tl.arange(0, KW)[None, None, :]
    prefetch_rows(q, rows, q_t, C, K)
    prefetch_rows(k, rows, k_t, C, K)
    w_g = tl.load(g + i3 * g_t + o_w, mask=m_r3 & (o_w < K), other=0.0)
    b = _row_beta(beta + o_b + i_h * b_h, b_t, i3, s3, rows, beta_scale, BETA_SIGMOID)
    prefetch_rows(v, rows, v_t, C, V)
    _park_gate(w_g, A_log, dt_bias, parked, blocks, decay + i_ch * K, i_h, i3, rows, lower_bound, K, KW, GATE, TERM)
    w_q = tl.load(q + i3 * q_t + o_w, mask=m_r3 & (o_w < K), other=0.0)
    w_k = tl.load(k + i3 * k_t + o_w, mask=m_r3 & (o_w < K), other=0.0)
    qk = _row_products(w_q, w_k, i3 == s3)  # of a row with itself, which meets no decay
    if L2NORM:
        r_q = tl.rsqrt(_row_products(w_q, w_q, i3 == s3) + NORM_EPS)
        r_k = tl.rsqrt(_row_products(w_k, w_k, i3 == s3) + NORM_EPS)
        qk *= r_q * r_k
        tl.store(norms + i_ch * (2 * C) + i_r, tl.reshape(r_q, (C,)))
        tl.store(norms + i_ch * (2 * C) + C + i_r, tl.reshape(r_k, (C,)))
    tl.debug_barrier()  # terms and blocks are read by other threads than wrote them

    # Scores, BK channels at a time.
    sq = tl.zeros([4, 16, 16], tl.float32)  # within blocks
    sk = tl.zeros([4, 16, 16], tl.float32)
    aq = tl.zeros([C, C], tl.float32)  # between blocks
    ak = tl.zeros([C, C], tl.float32)
    o_c = tl.arange(0, BK)[None, None, :]
    o_q, o_k, o_p = i3 * q_t + o_c, i3 * k_t + o_c, i3 * K + o_c
    for i_k in range(0, K, BK):
        raw_q, raw_k, b_g, before, behind, b_between = _load_slice(
            q, k, parked, blocks, o_q, o_k, o_p, i_k, m_r3, K, BK
        )
        if L2NORM:
            b_q = to_operand(raw_q.to(tl.float32) * r_q[:, :, None], OPERAND)
            b_k = to_operand(raw_k.to(tl.float32) * r_k[:, :, None], OPERAND)
        else:
            b_q, b_k = raw_q.to(OPERAND), raw_k.to(OPERAND)
        for level in tl.static_range(4):
            sq, sk = _level_scores(b_q, b_k, b_g, sq, sk, i3, s3, 1 << level, PRECISION)

        # decay from the start of the 16-row block, and to its end: for levels 16 and 32, and the outputs
        f = tl.exp2(exponents(s3 <= i3, b_g, PRECISION))
        q_row, k_row = scaled(b_q, b_k, f)
        f *= before
        b_qg = (b_q.to(tl.float32) * f * scale).to(WS)
        b_kd = (b_k.to(tl.float32) * f).to(WS)
        f = tl.exp2(exponents(s3 > i3, b_g, PRECISION))
        k_col = packed_product(b_k, to_operand(f, OPERAND))
        b_kg = (b_k.to(tl.float32) * (f * behind)).to(WS)
        m_c = o_c < K - i_k
        tl.debug_barrier()  # every thread has its terms
        tl.store(kg + i_k + o_p, b_kg, mask=m_c)
        tl.store(qg + i_k + o_p, b_qg, mask=m_c)
        tl.store(w + i_k + o_p, b_kd, mask=m_c)  # until A is known

        # level 16: block 1 with 0, block 3 with 2. Masks keep the products out of each other's way in one accumulator.
        for p in tl.static_range(2):
            columns = tl.trans(_matrix(_masked(k_col, n3 == 2 * p)))
            aq = tl.dot(_matrix(_masked(q_row, n3 == 2 * p + 1)), columns, aq, input_precision=PRECISION)
            ak = tl.dot(_matrix(_masked(k_row, n3 == 2 * p + 1)), columns, ak, input_precision=PRECISION)
        # level 32: blocks 2 and 3 with 0 and 1
        between = to_operand(tl.broadcast_to(b_between, (4, 16, BK)), OPERAND)
        columns = tl.trans(_matrix(packed_product(k_col, _masked(between, n3 < 2))))
        upper = _masked(between, n3 >= 2)
        aq = tl.dot(_matrix(packed_product(q_row, upper)), columns, aq, input_precision=PRECISION)
        ak = tl.dot(_matrix(packed_product(k_row, upper)), columns, ak, input_precision=PRECISION)

    # What the last products need is on its way while the inverse is made.
    tl.debug_barrier()
    o_v = tl.arange(0, BV)[None, :]
    b_v = tl.load(v + i2 * v_t + o_v, mask=m_r[:, None] & (o_v < V), other=0.0)
    same = i2 // 16 == s2 // 16
    aq = tl.where(same, _spread(tl.where(i3 > s3, sq, 0.0).to(INVERSE)), aq) * scale
    aq = tl.where(i2 == s2, (tl.reshape(qk, (C,)) * scale)[:, None], aq)
    square = i_ch * (C * C) + i2 * C + s2
    tl.store(aqk + square, aq.to(WS))

    n_diag = tl.where(i3 > s3, sk, 0.0) * b[:, :, None]
    pair = i3 ^ s3
    x_diag = tl.where(pair == 0, 1.0, tl.where(pair == 1, -n_diag, 0.0))
    for level in tl.static_range(1, 4):
        x_diag = _inverse_level(x_diag, n_diag, pair, 1 << level, INVERSE, PRECISION)
    b_kd = tl.load(w + i2 * K + o_v, mask=o_v < K, other=0.0)
    b = tl.reshape(b, (C,))
    n = ak * b[:, None]
    x = tl.where(same, _spread(x_diag.to(INVERSE)), 0.0)
    for level in tl.static_range(4, 6):
        x = _inverse_level(x, n, i2 ^ s2, 1 << level, INVERSE, PRECISION)
    tl.store(a + square, x.to(WS))

    # W = A diag(b) (k * Din), U = A diag(b) v
    ab = (x * b[None, :]).to(WS)
    b_u = tl.dot(ab, b_v.to(WS), input_precision=PRECISION)
    tl.store(u + i2 * V + o_v, b_u.to(WS), mask=o_v < V)
    b_w = tl.dot(ab, b_kd, input_precision=PRECISION)
    tl.debug_barrier()  # every thread has its k * Din
    tl.store(w + i2 * K + o_v, b_w.to(WS), mask=o_v < K)
    for i_v in range(BV, V, BV):
        b_v = tl.load(v + i2 * v_t + (i_v + o_v), mask=m_r[:, None] & (o_v < V - i_v), other=0.0)
        b_u = tl.dot(ab, b_v.to(WS), input_precision=PRECISION)
        tl.store(u + i2 * V + (i_v + o_v), b_u.to(WS), mask=o_v < V - i_v)
    for i_k in range(BV, K, BV):
        b_w = tl.dot(ab, tl.load(w + i2 * K + (i_k + o_v), mask=o_v < K - i_k, other=0.0), input_precision=PRECISION)
        tl.debug_barrier()
        tl.store(w + i2 * K + (i_k + o_v), b_w.to(WS), mask=o_v < K - i_k)


# ---- again, for the backward
@triton.jit(do_not_specialize=["T", "HV", "group"])
def _recompute_fwd_kernel(
    q, k, v, g, beta, A_log, dt_bias, a, w, u, kg, qg, decay, norms, chunks,
    T, HV, group, scale, lower_bound, beta_scale,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, b_b, b_t, b_h,
    K: tl.constexpr, V: tl.constexpr, KW: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    GATE: tl.constexpr, L2NORM: tl.constexpr, BETA_SIGMOID: tl.constexpr, PACKED: tl.constexpr,
    TERM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    WS: tl.constexpr = w.dtype.element_ty
    i_c = (tl.program_id(0) // HV).to(tl.int64)
    i_h = (tl.program_id(0) % HV).to(tl.int64)
    i_ch = i_c * HV + i_h
    o_b, rows = locate_chunk(chunks, i_c, T, b_b, b_t, C, PACKED)
    if rows == 0:
        return
    q += locate_chunk(chunks, i_c, T, q_b, q_t, C, PACKED)[0] + (i_h // group) * q_h
    k += locate_chunk(chunks, i_c, T, k_b, k_t, C, PACKED)[0] + (i_h // group) * k_h
    v += locate_chunk(chunks, i_c, T, v_b, v_t, C, PACKED)[0] + i_h * v_h
    g += locate_chunk(chunks, i_c, T, g_b, g_t, C, PACKED)[0] + i_h * g_h
    i_r = tl.arange(0, C)
    i2, s2 = i_r[:, None], i_r[None, :]
    m_r = i_r < rows
    m_r2 = m_r[:, None]

    b = tl.load(beta + o_b + i_h * b_h + i_r * b_t, mask=m_r, other=0.0).to(tl.float32)
    if BETA_SIGMOID:
        b = beta_scale * sigmoid(b)
    b = tl.where(m_r, b, 0.0)
    rate, bound = _gate_rows(A_log, i_h, m_r2, lower_bound, GATE)
    if L2NORM:
        i3 = tl.arange(0, 4)[:, None, None] * 16 + tl.arange(0, 16)[None, :, None]
        diagonal = tl.arange(0, 16)[None, :, None] == tl.arange(0, 16)[None, None, :]
        o_w = tl.arange(0, KW)[None, None, :]
        w_q = tl.load(q + i3 * q_t + o_w, mask=(i3 < rows) & (o_w < K), other=0.0)
        w_k = tl.load(k + i3 * k_t + o_w, mask=(i3 < rows) & (o_w < K), other=0.0)
        r_q = tl.reshape(tl.rsqrt(_row_products(w_q, w_q, diagonal) + NORM_EPS), (C, 1))
        r_k = tl.reshape(tl.rsqrt(_row_products(w_k, w_k, diagonal) + NORM_EPS), (C, 1))
        tl.store(norms + i_ch * (2 * C) + i2, r_q)
        tl.store(norms + i_ch * (2 * C) + C + i2, r_k)
    ab = (tl.load(a + i_ch * (C * C) + i2 * C + s2).to(tl.float32) * b[None, :]).to(WS)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)[None, :]
        b_v = tl.load(v + i2 * v_t + o_v, mask=m_r2 & (o_v < V), other=0.0)
        b_u = tl.dot(ab, b_v.to(WS), input_precision=PRECISION)
        tl.store(u + i_ch * (C * V) + i2 * V + o_v, b_u.to(WS), mask=o_v < V)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        m_k = (o_k < K)[None, :]
        raw_q = tl.load(q + i2 * q_t + o_k[None, :], mask=m_r2 & m_k, other=0.0)
        raw_k = tl.load(k + i2 * k_t + o_k[None, :], mask=m_r2 & m_k, other=0.0)
        raw_g = tl.load(g + i2 * g_t + o_k[None, :], mask=m_r2 & m_k, other=0.0).to(tl.float32)
        bias = tl.zeros([BK], tl.float32)
        if dt_bias is not None:
            bias = tl.load(dt_bias + i_h * K + o_k, mask=o_k < K, other=0.0)
        b_g = tl.maximum(decay_log2(raw_g, bias[None, :], rate, bound, GATE), FLOOR_LOG2)
        tl.store(decay + i_ch * K + o_k, tl.exp2(tl.sum(b_g, 0)), mask=o_k < K)
        terms = to_operand(b_g, TERM)
        b_q, b_k = raw_q.to(tl.float32), raw_k.to(tl.float32)
        if L2NORM:
            b_q *= r_q
            b_k *= r_k
        p = i_ch * (C * K) + i2 * K + o_k[None, :]
        f = tl.exp2(exponents(s2 > i2, terms, PRECISION))
        tl.store(kg + p, (b_k * f).to(WS), mask=m_k)
        f = tl.exp2(exponents(s2 <= i2, terms, PRECISION))
        tl.store(qg + p, (b_q * f * scale).to(WS), mask=m_k)
        b_w = tl.dot(ab, (b_k * f).to(WS), input_precision=PRECISION)
        tl.store(w + p, b_w.to(WS), mask=m_k)


# ---- launchers
def _settings(stage: str, q: Any, v: Any, act: Activations, layout: Layout, tile: dict | None) -> dict[str, Any]:
    """Tile sizes and flags of one launch."""
    fw = frameworks.of(q)
    K, V, dtype = int(q.shape[3]), int(v.shape[3]), fw.dtype_name(q)
    settings = dict(tile or tuning.lookup(stage, tuning.family_of(q), work=layout.num_chunks * int(v.shape[2])))
    width = max(16, triton.next_power_of_2(K))
    settings["BK"] = min(settings["BK"], width)
    settings["BV"] = min(settings["BV"], max(width, triton.next_power_of_2(V)))
    if stage == "recompute_fwd" and settings["BK"] >= K:
        # ptxas 12.8 (of Triton 3.6) takes the address of an operand of W from a register that nobody wrote, where the
        # products for U and for W differ in width and W's is not in a loop. Can go when such a compile passes
        # test_recompute_takes_no_address_from_a_register_that_nobody_wrote.
        settings["BV"] = settings["BK"]
    fp32 = dtype == "float32"
    if fp32:
        settings.pop("maxnreg", None)
    settings |= {"K": K, "V": V, "KW": width, "C": CHUNK, "PACKED": layout.packed}
    settings |= {"GATE": act.gate, "L2NORM": act.l2norm, "BETA_SIGMOID": act.beta_sigmoid}
    settings |= {"TERM": tl.float32 if fp32 else tl.float16, "PRECISION": "tf32x3" if fp32 else "tf32"}
    if stage == "prepare_fwd":
        if fp32:  # 32 channels a slice spill 5 KB a thread, and gave wrong diagonal blocks on sm_90
            settings["BK"] = 16
        small = act.l2norm or dtype == "float16"  # scores cannot leave the range of fp16
        settings["OPERAND"] = tl.float32 if fp32 else tl.float16 if small else tl.bfloat16
        settings["INVERSE"] = tl.float16 if small and not fp32 else tl.float32
    return settings


def _token_strides(*xs: Any) -> list[int]:
    """Strides of [B, T, heads, ..] over B, T and heads, of one tensor after the other, in elements."""
    return [int(s) for x in xs for s in frameworks.of(x).strides(x)[:3]]


def prepare_fwd(
    *, q: Any, k: Any, v: Any, g: Any, beta: Any, w: Any, u: Any, kg: Any, qg: Any, aqk: Any, a: Any, decay: Any,
    norms: Any, act: Activations, layout: Layout, tile: dict | None = None,
) -> None:  # fmt: skip
    """Aqk, A = (I + diag(b) Akk)^-1, W = A diag(b) (k Din), U = A diag(b) v, Kg = k Dout, Qg = scale q Din, decay.

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V]; g: [B, T, HV, K]; beta: [B, T, HV]. Strides are
            free but for a contiguous last axis of all but beta; raw where `act` says so. q, k, v of one dtype.
        w, kg, qg: Written, WS [NC, HV, C, K]; u: WS [NC, HV, C, V]; aqk, a: WS [NC, HV, C, C]; decay: fp32 [NC, HV, K];
            norms: fp32 [NC, HV, 2, C], what rows of q and of k are multiplied with; left as it is without l2norm.
            WS is bf16 for 16-bit inputs, fp32 for fp32. aqk and qg include the scale. Rows behind a chunk's last token
            are 0 (of a: those of the identity); chunks without rows are left as they are.
    Cost (K = V = 128, bf16, a token and head): reads 1026 bytes, writes 1296; 85 kflop in matmuls, 7 exp2 a channel.
    """
    fw = frameworks.of(q)
    HV, K = int(v.shape[2]), int(q.shape[3])
    if tile is None and act.l2norm and (module := hopper_module("prepare_hopper", a, q, k, v, g)) is not None:
        module.prepare_fwd(
            q=q, k=k, v=v, g=g, beta=beta, w=w, u=u, kg=kg, qg=qg, aqk=aqk, a=a, decay=decay, norms=norms, act=act,
            layout=layout,
        )  # fmt: skip
        return
    blocks = fw.empty((layout.num_chunks, HV, 3, 4, K), like=decay)
    with fw.on_device(q):
        launch(
            _prepare_fwd_kernel, layout.num_chunks * HV,
            q, k, v, g, beta, act.A_log, act.dt_bias, w, u, kg, qg, aqk, a, decay, norms, blocks, layout.chunks,
            layout.T, HV, HV // int(q.shape[2]), float(act.scale), float(act.lower_bound or 0.0), float(act.beta_scale),
            *_token_strides(q, k, v, g, beta), **_settings("prepare_fwd", q, v, act, layout, tile),
        )  # fmt: skip


def recompute_fwd(
    *, q: Any, k: Any, v: Any, g: Any, beta: Any, a: Any, w: Any, u: Any, kg: Any, qg: Any, decay: Any,
    norms: Any, act: Activations, layout: Layout, tile: dict | None = None,
) -> None:  # fmt: skip
    """w, u, kg, qg, decay and norms once more, from the inputs and the kept inverse: no scores, levels, inversion.

    Args: As `prepare_fwd`; a: WS [NC, HV, C, C], read.
    Cost (K = V = 128, bf16, a token and head): reads 1154 bytes, writes 1040; 66 kflop in matmuls, 3 exp2 a channel.
    """
    fw = frameworks.of(q)
    HV = int(v.shape[2])
    if tile is None and (module := hopper_module("recompute_hopper", a, q, k, v, g)) is not None:
        module.recompute_fwd(
            q=q, k=k, v=v, g=g, beta=beta, a=a, w=w, u=u, kg=kg, qg=qg, decay=decay, norms=norms, act=act,
            layout=layout, **tuning.lookup("recompute_fwd_hopper", 90, work=layout.num_chunks * HV),
        )  # fmt: skip
        return
    with fw.on_device(q):
        launch(
            _recompute_fwd_kernel, layout.num_chunks * HV,
            q, k, v, g, beta, act.A_log, act.dt_bias, a, w, u, kg, qg, decay, norms, layout.chunks,
            layout.T, HV, HV // int(q.shape[2]), float(act.scale), float(act.lower_bound or 0.0), float(act.beta_scale),
            *_token_strides(q, k, v, g, beta), **_settings("recompute_fwd", q, v, act, layout, tile),
        )  # fmt: skip
