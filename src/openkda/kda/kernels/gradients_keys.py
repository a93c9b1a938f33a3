"""Gradients of q, k and the gate inside a chunk: the second kernel of the gradient stage, and the one that costs most.

A program takes a chunk of 64 rows, a head and KC channels, in three steps that meet in a scratch of its own (in L2):

    factors     a thread owns a channel of a block of 16 rows and walks over the rows. P_i = decay from the start of
                the block up to row i, Y_i = decay behind row i up to its end: products of factors <= 1. Writes the
                operands q P, b k P, k Y, and the same inside the upper and lower 8 rows of a block
    products    matrix products of blocks of 16 x 16. Row i of block m meets row j of block n < m with the decay
                P_i T_{m-1} .. T_{n+1} Y_j, T_n = decay of block n. What stands between P_i and Y_j is applied here:
                    h_q_i = sum over n of T .. (dAqk_mn (k Y)_n) + T .. dQg_i        dq_i = P_i h_q_i + the block's own
                and likewise h_k (k as a row, before beta) and h_c_j (k as a column)
    finish      a thread owns a channel again: pairs inside 8 rows one by one in fp32, P and Y, the norm and the gate

dg_s gets a pair (i, j) only if j < s <= i. Only such terms are added, so nothing cancels where a strong decay leaves
dg_s tiny: for row s of block m, rows behind s in m with what lies before m, columns before s in m with what lies
behind m, pairs inside m by halves and then one by one, and from `products` what straddles m as a whole.

Loads of all rows come before the first store: behind a store the compiler would keep them, one latency a row.
The steps are functions of their own (noinline): Triton's layout passes take minutes over all of them in one.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false
# ruff: noqa: RUF005
# (tuples of rows grow by +, the only way that Triton knows)
from __future__ import annotations

import triton
import triton.language as tl

from openkda.kda.kernels.common import INTERPRETED, LOG2_E, locate_chunk


@triton.jit
def _pack64(low, high):
    """Two fp32 in an int64: one load where every lane wants both."""
    low, high = low.to(tl.int32, bitcast=True).to(tl.int64), high.to(tl.int32, bitcast=True).to(tl.int64)
    return (low & 0xFFFFFFFF) | (high << 32)


@triton.jit
def _unpack64(x):
    return x.to(tl.int32).to(tl.float32, bitcast=True), (x >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _pack(low, high, WORD: tl.constexpr):
    """Two fp32 in a word: rounded to bf16 in an int32, as they are in an int64."""
    if WORD == tl.int64:
        return _pack64(low, high)
    elif INTERPRETED:
        low = low.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return low | (high.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        return tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], tl.int32, True, 1)


@triton.jit
def _unpack(x, WORD: tl.constexpr):
    if WORD == tl.int64:
        return _unpack64(x)
    else:
        return (x << 16).to(tl.float32, bitcast=True), (x & -65536).to(tl.float32, bitcast=True)


LN_2 = tl.constexpr(0.6931471805599453)
# Scratch of a program, in tiles of [64, KC]. WS: operands. Words: two numbers each. fp32: log2 of decays, d g / d raw,
# then vectors of [4, KC], a row for each block: P at row 7 and at row 15; sums over the block's rows, see `_products`.
QP, BKP, KY, QP8, MIXED = (tl.constexpr(i) for i in range(5))
ROWS, ROWS8, COLUMNS = (tl.constexpr(i) for i in range(3))
LOG2, RAW, VECTORS = (tl.constexpr(i) for i in range(3))
HALF, TOTAL, ROW_SUM, ROW_SUM_2, ROW_SUM_3, COLUMN_SUM, LOWER_SUM = (tl.constexpr(4 * i) for i in range(7))
SCRATCH = (5 * 64, 3 * 64, 2 * 64 + 7 * 4)  # numbers a channel: operands, words, fp32


@triton.jit
def _gate(raw, bias, rate, lower_bound, GATE: tl.constexpr):
    """log2 of the decay, and d g / d raw with g in nats."""
    if GATE == "softplus":
        y = (raw + bias) * LOG2_E
        u = tl.exp2(-tl.abs(y))
        n = 0.06274843357141435 - 0.012077020269316563 * u
        n = -0.1541520064325823 + u * n
        n = 0.2551763492142669 + u * n
        n = -0.3530963533412672 + u * n
        n = 0.48001246079524296 + u * n
        n = -0.7213067574280009 + u * n
        n = 1.442694724590345 + u * n
        g2 = -rate * (tl.maximum(y, 0.0) + u * n)
        r = 1.0 / (1.0 + u)
        return g2, -rate * tl.where(y > 0, r, u * r)
    elif GATE == "bounded":
        z = raw + bias
        u = tl.exp2(-tl.abs(z) * (rate * LOG2_E))
        r = 1.0 / (1.0 + u)
        s = u * r
        g2 = (lower_bound * LOG2_E) * tl.where(z > 0, r, s)
        return g2, (lower_bound * rate) * r * s
    else:
        return raw * LOG2_E, 1.0


@triton.jit(noinline=True)
def _factors(
    q, k, g, row_norms, row_beta, tiles, fp32, dt_bias, rate, rows, lower_bound, k0, SCALE,
    Q_T: tl.constexpr, K_T: tl.constexpr, G_T: tl.constexpr, K: tl.constexpr, KC: tl.constexpr,
    GATE: tl.constexpr, L2NORM: tl.constexpr,
):  # fmt: skip
    """q P, b k P, k Y as operands, and the decay of every block: P up to a row of its block of 16, Y behind it."""
    WS: tl.constexpr = tiles.dtype.element_ty
    TILE: tl.constexpr = 64 * KC
    blk = tl.arange(0, 4 * KC) // KC
    ch = tl.arange(0, 4 * KC) % KC
    bias = 0.0
    if dt_bias is not None:
        bias = tl.load(dt_bias + ch, mask=k0 + ch < K, other=0.0)
    left = tl.where(k0 + ch < K, rows - blk * 16, 0)  # rows of the block that are tokens
    q += blk * (16 * Q_T) + ch
    k += blk * (16 * K_T) + ch
    g += blk * (16 * G_T) + ch
    row_norms += blk * 16
    row_beta += blk * 16
    tiles += blk * (16 * KC) + ch
    fp32 += blk * (16 * KC) + ch
    vectors = fp32 + VECTORS * TILE - blk * (15 * KC)
    one = tl.zeros([4 * KC], tl.float32) + 1.0
    p = one
    p8 = one
    keys, decays, loads = (), (), ()
    for r in tl.static_range(16):  # all loads before the first store, behind which the compiler would keep them
        m = left > r
        r_q = tl.load(q + r * Q_T, mask=m, other=0.0)
        r_k = tl.load(k + r * K_T, mask=m, other=0.0)
        loads = loads + ((r_q, r_k, tl.load(g + r * G_T, mask=m, other=0.0)),)
    for r in tl.static_range(16):
        m = left > r
        b_q = loads[r][0].to(tl.float32)
        b_k = loads[r][1].to(tl.float32)
        if L2NORM:
            f_q, _ = _unpack64(tl.load(row_norms + r))
            f_k, _ = _unpack64(tl.load(row_norms + 64 + r))
            b_q = b_q * f_q
            b_k = b_k * f_k
        else:
            b_q = b_q * SCALE
        b_bk = tl.load(row_beta + r) * b_k
        g2, d_raw = _gate(loads[r][2].to(tl.float32), bias, rate, lower_bound, GATE)
        g2 = tl.where(m, g2, 0.0)
        tl.store(fp32 + LOG2 * TILE + r * KC, g2)
        if GATE != "none":
            tl.store(fp32 + RAW * TILE + r * KC, tl.where(m, d_raw, 0.0))
        alpha = tl.exp2(g2)
        p = p * alpha
        tl.store(tiles + QP * TILE + r * KC, (b_q * p).to(WS))
        tl.store(tiles + BKP * TILE + r * KC, (b_bk * p).to(WS))
        if r == 7:
            tl.store(vectors + HALF * KC, p)
        if r >= 8:
            p8 = p8 * alpha
            tl.store(tiles + QP8 * TILE + r * KC, (b_q * p8).to(WS))
            tl.store(tiles + MIXED * TILE + r * KC, (b_bk * p8).to(WS))
        keys = keys + (b_k,)
        decays = decays + (alpha,)
    tl.store(vectors + TOTAL * KC, p)
    y = one
    y8 = one
    for r in tl.static_range(15, -1, -1):
        tl.store(tiles + KY * TILE + r * KC, (keys[r] * y).to(WS))
        y = y * decays[r]
        if r < 8:
            tl.store(tiles + MIXED * TILE + r * KC, (keys[r] * y8).to(WS))
            y8 = y8 * decays[r]


@triton.jit(noinline=True)
def _products(
    dqg, dxs, dkg, w_q, w_k, tiles, words, fp32, k0, K: tl.constexpr, KC: tl.constexpr, PRECISION: tl.constexpr
):
    """h_q, h_k, h_c: what P and Y of a row still have to scale; and the sums that dg needs across blocks."""
    WORD: tl.constexpr = words.dtype.element_ty
    C: tl.constexpr = 64
    TILE: tl.constexpr = C * KC
    b3 = tl.arange(0, 4)[:, None, None]
    r3 = tl.arange(0, 16)[None, :, None]
    s3 = tl.arange(0, 16)[None, None, :]
    c3 = tl.arange(0, KC)[None, None, :]
    m3 = (k0 + c3 < K) & (r3 >= 0) & (b3 >= 0)
    p3 = (b3 * 16 + r3) * KC + c3
    tiles += p3
    words += p3
    pair = (b3 * 16 + r3) * C + b3 * 16 + s3
    w_q += pair
    w_k += pair
    state = (b3 * 16 + r3) * K + c3
    vectors = fp32 + VECTORS * TILE
    total = vectors + TOTAL * KC + b3 * KC + c3
    sums = vectors + tl.arange(0, 4)[:, None] * KC + tl.arange(0, KC)[None, :]

    # level 8: halves of a block of 16 rows; their factors start and end in the middle
    b_q, b_k = tl.load(w_q), tl.load(w_k)
    mixed = tl.load(tiles + MIXED * TILE)
    upper = tl.load(tiles + QP8 * TILE, mask=r3 >= 8, other=0.0)
    h_q = tl.dot(b_q, mixed, input_precision=PRECISION)
    h_k = tl.dot(b_k, mixed, input_precision=PRECISION)
    h_c8 = tl.dot(tl.permute(b_q, (0, 2, 1)), upper, input_precision=PRECISION)
    h_c8 = tl.dot(tl.permute(b_k, (0, 2, 1)), mixed, h_c8, input_precision=PRECISION)
    tl.store(words + ROWS8 * TILE, _pack(h_q, h_k, WORD))

    # rows: earlier blocks, n blocks away, then the state
    row_q = tl.load(tiles + QP * TILE).to(tl.float32)
    row_k = tl.load(tiles + BKP * TILE).to(tl.float32)
    m = b3 >= 1
    column = tl.load(tiles + (KY * TILE - 16 * KC), mask=m, other=0.0)
    h_q = tl.dot(tl.load(w_q - 16, mask=m, other=0.0), column, input_precision=PRECISION)
    h_k = tl.dot(tl.load(w_k - 16, mask=m, other=0.0), column, input_precision=PRECISION)
    far = tl.load(total - KC, mask=m, other=1.0)
    for n in tl.static_range(2, 4):
        m = b3 >= n
        column = tl.load(tiles + (KY * TILE - n * 16 * KC), mask=m, other=0.0)
        n_q = far * tl.dot(tl.load(w_q - n * 16, mask=m, other=0.0), column, input_precision=PRECISION)
        n_k = far * tl.dot(tl.load(w_k - n * 16, mask=m, other=0.0), column, input_precision=PRECISION)
        tl.store(sums + (ROW_SUM + 4 * (n - 1)) * KC, tl.sum(row_q * n_q + row_k * n_k, 1))
        h_q += n_q
        h_k += n_k
        far *= tl.load(total - n * KC, mask=m, other=1.0)
    n_q = far * tl.load(dqg + state, mask=m3, other=0.0).to(tl.float32)
    n_k = far * tl.load(dxs + state, mask=m3, other=0.0).to(tl.float32)
    tl.store(sums + ROW_SUM * KC, tl.sum(row_q * n_q + row_k * n_k, 1))
    tl.store(words + ROWS * TILE, _pack(h_q + n_q, h_k + n_k, WORD))

    # columns: later blocks, then the state behind the chunk
    h_c = tl.zeros([4, 16, KC], tl.float32)
    far = tl.zeros([4, 1, KC], tl.float32) + 1.0
    for n in tl.static_range(1, 4):
        m = b3 < 4 - n
        b_q = tl.permute(tl.load(w_q + n * 16 * C, mask=m, other=0.0), (0, 2, 1))
        b_k = tl.permute(tl.load(w_k + n * 16 * C, mask=m, other=0.0), (0, 2, 1))
        n_c = tl.dot(b_q, tl.load(tiles + (QP * TILE + n * 16 * KC), mask=m, other=0.0), input_precision=PRECISION)
        b_r = tl.load(tiles + (BKP * TILE + n * 16 * KC), mask=m, other=0.0)
        h_c += far * tl.dot(b_k, b_r, n_c, input_precision=PRECISION)
        far *= tl.load(total + n * KC, mask=m, other=1.0)
    n_c = far * tl.load(dkg + state, mask=m3, other=0.0).to(tl.float32)
    h_c += n_c
    tl.store(words + COLUMNS * TILE, _pack(h_c, h_c8, WORD))
    column = tl.load(tiles + KY * TILE).to(tl.float32)
    tl.store(sums + COLUMN_SUM * KC, tl.sum(column * n_c, 1))
    tl.store(sums + LOWER_SUM * KC, tl.sum(tl.where(r3 < 8, column * h_c, 0.0), 1))


@triton.jit
def _finish_half(
    q, k, g, row_norms, row_beta, pairs, words, fp32, dq, dk, dg, k_dk,
    bias, p, y, across, passed, s_bias, s_A, left, SCALE,
    Q_T: tl.constexpr, K_T: tl.constexpr, G_T: tl.constexpr, OUT_T: tl.constexpr, KC: tl.constexpr,
    GATE: tl.constexpr, L2NORM: tl.constexpr, BETA_SIGMOID: tl.constexpr,
):  # fmt: skip
    """Half a block, 8 rows, of each block: its pairs one by one, then dq, dk and dg.

    across: what dg of all these rows gets from rows outside of the half. passed: what rows of this half give to dg of
    all earlier rows of the block.
    """
    WORD: tl.constexpr = words.dtype.element_ty
    TILE: tl.constexpr = 64 * KC
    zero = tl.zeros([4 * KC], tl.float32)
    loads, columns = (), ()
    for r in tl.static_range(8):  # all loads before the first store, behind which the compiler would keep them
        m = left > r
        b_q, b_k = tl.load(q + r * Q_T, mask=m, other=0.0), tl.load(k + r * K_T, mask=m, other=0.0)
        h, h8 = tl.load(words + ROWS * TILE + r * KC), tl.load(words + ROWS8 * TILE + r * KC)
        loads = loads + ((b_q, b_k, tl.load(fp32 + LOG2 * TILE + r * KC), h, h8),)
    p8 = zero + 1.0
    keys, reach, cols, rows, dks, dqs, dgs = (), (), (), (), (), (), ()
    for r in tl.static_range(8):
        b_q, b_k, alpha = loads[r][0].to(tl.float32), loads[r][1].to(tl.float32), tl.exp2(loads[r][2])
        h_q, h_k = _unpack(loads[r][3], WORD)
        h_q8, h_k8 = _unpack(loads[r][4], WORD)
        if L2NORM:
            f_q, c_q = _unpack64(tl.load(row_norms + r))
            f_k, _ = _unpack64(tl.load(row_norms + 64 + r))
            b_q = b_q * f_q
            b_k = b_k * f_k
        else:
            b_q = b_q * SCALE
        beta = tl.load(row_beta + r)
        b_bk = beta * b_k
        p = p * alpha
        p8 = p8 * alpha

        # pairs (r, j): reach[j] is the decay from j to r. dg of row s gets the pairs with j < s <= r: sum them up to j
        i_q, i_k, flow = zero, zero, zero
        n_reach, n_cols, n_dgs = (), (), (zero,)
        for j in tl.static_range(r):
            w_q, w_k = _unpack64(tl.load(pairs + r * 8 + j))
            e = reach[j] * alpha
            ke = keys[j] * e
            i_q += w_q * ke
            i_k += w_k * ke
            both = w_q * b_q + w_k * b_bk
            n_cols = n_cols + (cols[j] + both * e,)
            n_reach = n_reach + (e,)
            flow += both * ke
            if j + 1 < r:
                n_dgs = n_dgs + (dgs[j + 1] + flow,)
            else:
                n_dgs = n_dgs + (flow,)
        w_q, _ = _unpack64(tl.load(pairs + r * 9))
        reach = n_reach + (zero + 1.0,)
        cols = n_cols + (zero,)
        keys = keys + (b_k,)
        dgs = n_dgs

        p_q, p_k, p_q8, p_k8 = p * h_q, p * h_k, p8 * h_q8, p8 * h_k8
        passed_r = b_q * p_q + b_bk * p_k
        passed += passed_r
        rows = rows + (passed_r + b_q * p_q8 + b_bk * p_k8,)
        d_q = p_q + p_q8 + i_q + w_q * b_k
        d_k = p_k + p_k8 + i_k
        if L2NORM:
            d_q = f_q * d_q - b_q * c_q
        else:
            d_q = SCALE * d_q
        dqs = dqs + (d_q,)
        if not BETA_SIGMOID:
            tl.store(k_dk + tl.arange(0, 4) * 16 + r, tl.sum(tl.reshape(b_k * d_k, (4, KC)), 1))
        dks = dks + (beta * d_k + w_q * b_q,)

    for r in tl.static_range(8):
        d_raw, b_g = 1.0, 0.0
        if GATE != "none":
            d_raw = tl.load(fp32 + RAW * TILE + r * KC)
        if GATE == "bounded":
            b_g = tl.load(g + r * G_T, mask=left > r, other=0.0)
        columns = columns + ((tl.load(words + COLUMNS * TILE + r * KC), d_raw, b_g),)
    for r in tl.static_range(8):
        tl.store(dq + r * OUT_T, dqs[r].to(dq.dtype.element_ty), mask=left > r)

    # columns and sums of rows, last row first
    y8 = zero + 1.0
    suffix = across
    outs = ()
    for r in tl.static_range(7, -1, -1):
        h_c, h_c8 = _unpack(columns[r][0], WORD)  # h_c8 is 0 in the upper half, h_q8 and h_k8 in the lower
        d_c = y * h_c + y8 * h_c8
        d_k = dks[r] + d_c + cols[r]
        if L2NORM:
            f_k, c_k = _unpack64(tl.load(row_norms + 64 + r))
            d_k = d_k * f_k - keys[r] * c_k
        tl.store(dk + r * OUT_T, d_k.to(dk.dtype.element_ty), mask=left > r)
        suffix += rows[r]
        outs = outs + ((suffix, keys[r] * d_c),)
        alpha = tl.exp2(loads[r][2])
        y = y * alpha
        y8 = y8 * alpha
    # dg, with the sums of columns, first row first
    prefix = zero
    for r in tl.static_range(8):
        d_g = outs[7 - r][0] + prefix + dgs[r]
        prefix += outs[7 - r][1]
        d_z = d_g
        if GATE != "none":
            d_z = d_g * columns[r][1]
            s_bias += d_z
        if GATE == "softplus":
            s_A += d_g * (loads[r][2] * LN_2)
        elif GATE == "bounded":
            s_A += d_z * (columns[r][2].to(tl.float32) + bias)
        tl.store(dg + r * OUT_T, d_z.to(dg.dtype.element_ty), mask=left > r)
    return y, passed, s_bias, s_A


@triton.jit(noinline=True)
def _finish(
    q, k, g, row_norms, row_beta, pairs, words, fp32, dq, dk, dg, k_dk, p_dA, p_dbias, dt_bias, ends, rows, k0, SCALE,
    Q_T: tl.constexpr, K_T: tl.constexpr, G_T: tl.constexpr, OUT_T: tl.constexpr, K: tl.constexpr, KC: tl.constexpr,
    GATE: tl.constexpr, L2NORM: tl.constexpr, BETA_SIGMOID: tl.constexpr,
):  # fmt: skip
    TILE: tl.constexpr = 64 * KC
    blk = tl.arange(0, 4 * KC) // KC
    ch = tl.arange(0, 4 * KC) % KC
    left = tl.where(k0 + ch < K, rows - blk * 16, 0)
    bias = 0.0
    if dt_bias is not None:
        bias = tl.load(dt_bias + ch, mask=k0 + ch < K, other=0.0)
    q += blk * (16 * Q_T) + ch
    k += blk * (16 * K_T) + ch
    g += blk * (16 * G_T) + ch
    dq += blk * (16 * OUT_T) + ch
    dk += blk * (16 * OUT_T) + ch
    dg += blk * (16 * OUT_T) + ch
    row_norms += blk * 16
    row_beta += blk * 16
    pairs += blk * 128
    words += blk * (16 * KC) + ch
    fp32 += blk * (16 * KC) + ch
    vectors = fp32 + VECTORS * TILE - blk * (15 * KC)
    # dg of every row of block m, from pairs that straddle all of m: rows of later blocks with the state before the
    # chunk, columns of earlier blocks with the state behind it, both states, rows of later with earlier blocks
    straddle = tl.load(ends + ch, mask=k0 + ch < K, other=0.0)
    own = vectors - blk * KC  # of block 0
    for n in tl.static_range(4):
        straddle *= tl.load(own + (TOTAL + n) * KC)
    for n in tl.static_range(1, 4):
        straddle += tl.load(own + (ROW_SUM + n) * KC, mask=blk < n, other=0.0)
        straddle += tl.load(own + (COLUMN_SUM + n - 1) * KC, mask=blk >= n, other=0.0)
    inner = (blk == 1) | (blk == 2)
    straddle += tl.load(vectors + (ROW_SUM_2 + 1) * KC, mask=inner, other=0.0)  # (2, 0) over 1, (3, 1) over 2
    straddle += tl.load(own + (ROW_SUM_3 + 3) * KC, mask=inner, other=0.0)  # (3, 0) over 1 and 2
    s_bias = tl.zeros([4 * KC], tl.float32)
    s_A = tl.zeros([4 * KC], tl.float32)
    passed = tl.zeros([4 * KC], tl.float32)
    y = s_A + 1.0
    for s in tl.range(0, 2, num_stages=1):  # upper half, lower half
        h = 8 - 8 * s
        is_upper = (blk >= 0) & (s == 0)
        p = tl.load(vectors + HALF * KC, mask=is_upper, other=1.0)
        across = straddle + passed + tl.load(vectors + LOWER_SUM * KC, mask=is_upper, other=0.0)
        y, passed, s_bias, s_A = _finish_half(
            q + h * Q_T, k + h * K_T, g + h * G_T, row_norms + h, row_beta + h, pairs + h * 8, words + h * KC,
            fp32 + h * KC, dq + h * OUT_T, dk + h * OUT_T, dg + h * OUT_T, k_dk + h,
            bias, p, y, across, passed, s_bias, s_A, left - h, SCALE,
            Q_T, K_T, G_T, OUT_T, KC, GATE, L2NORM, BETA_SIGMOID,
        )  # fmt: skip
    if GATE != "none":
        tl.store(p_dA, tl.sum(s_A, 0))
        c1 = tl.arange(0, KC)
        tl.store(p_dbias + c1, tl.sum(tl.reshape(s_bias, (4, KC)), 0), mask=k0 + c1 < K)


@triton.jit(do_not_specialize=["T", "total"])
def _keys_bwd_kernel(
    q, k, g, dqg, dxs, dkg, ends, w_q, w_k, pairs, row_norms, row_beta, A_log, dt_bias,
    dq, dk, dg, k_dk, dA, dbias, tiles, words, fp32, chunks,
    total, T, scale, lower_bound,
    q_b, q_h, k_b, k_h, g_b, g_h, out_b,
    Q_T: tl.constexpr, K_T: tl.constexpr, G_T: tl.constexpr,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KC: tl.constexpr,
    GATE: tl.constexpr, L2NORM: tl.constexpr, BETA_SIGMOID: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = 64
    SLICES: tl.constexpr = (K + KC - 1) // KC
    tiles += tl.program_id(0).to(tl.int64) * (5 * C * KC)
    words += tl.program_id(0).to(tl.int64) * (3 * C * KC)
    fp32 += tl.program_id(0).to(tl.int64) * ((2 * C + 28) * KC)
    for start in tl.range(0, total - tl.program_id(0), tl.num_programs(0), num_stages=1):
        item = tl.program_id(0).to(tl.int64) + start
        k0 = (item % SLICES).to(tl.int32) * KC
        i_ch = item // SLICES
        i_c = i_ch // HV
        i_h = (i_ch % HV).to(tl.int32)
        i_hk = i_h // (HV // H)
        o_q, rows = locate_chunk(chunks, i_c, T, q_b, Q_T, C, PACKED)
        p_bias = dt_bias
        if dt_bias is not None:
            p_bias = dt_bias + i_h * K + k0
        p_dA = dA + item
        p_dbias = dbias + i_ch * K + k0
        if rows > 0:
            o_k, _ = locate_chunk(chunks, i_c, T, k_b, K_T, C, PACKED)
            o_g, _ = locate_chunk(chunks, i_c, T, g_b, G_T, C, PACKED)
            o_out, _ = locate_chunk(chunks, i_c, T, out_b, HV * K, C, PACKED)
            p_q = q + o_q + i_hk * q_h + k0
            p_k = k + o_k + i_hk * k_h + k0
            p_g = g + o_g + i_h * g_h + k0
            o_out += i_h * K + k0
            o_state = i_ch * (C * K) + k0
            p_norms = row_norms + i_ch * (2 * C)
            p_beta = row_beta + i_ch * C
            rate = 1.0
            if GATE != "none":
                rate = tl.exp2(tl.load(A_log + i_h) * LOG2_E)
            # Barriers: every step reads what other warps wrote in the step before it, or overwrites what they read.
            _factors(p_q, p_k, p_g, p_norms, p_beta, tiles, fp32, p_bias, rate, rows, lower_bound, k0, scale,
                     Q_T, K_T, G_T, K, KC, GATE, L2NORM)  # fmt: skip
            tl.debug_barrier()
            _products(dqg + o_state, dxs + o_state, dkg + o_state, w_q + i_ch * (C * C),
                      w_k + i_ch * (C * C), tiles, words, fp32, k0, K, KC, PRECISION)  # fmt: skip
            tl.debug_barrier()
            _finish(p_q, p_k, p_g, p_norms, p_beta, pairs + i_ch * (C * 8), words, fp32, dq + o_out, dk + o_out,
                    dg + o_out, k_dk + item * C, p_dA, p_dbias, p_bias, ends + i_ch * K + k0, rows, k0, scale,
                    Q_T, K_T, G_T, HV * K, K, KC, GATE, L2NORM, BETA_SIGMOID)  # fmt: skip
            tl.debug_barrier()
        elif GATE != "none":  # a chunk without tokens
            c1 = tl.arange(0, KC)
            tl.store(p_dA, 0.0)
            tl.store(p_dbias + c1, tl.zeros([KC], tl.float32), mask=k0 + c1 < K)
