"""The prepare stage again, for Hopper, in Gluon: the same equations, workspaces and results as `prepare.py`.

A program is a chunk of one head, four warps, warp n owns rows 16 n .. 16 n + 15 of everything. All channels of q, k and
of the log-decays are fetched by TMA once, and then stay in registers, as fragments of `mma` operands: a level's
exponents, factors, rows and columns never leave the thread, because a product of 16 x 16 blocks gives rows as the next
product wants them, and columns too. What passes between threads: columns for blocks that lie above, sums over a block,
operands of the 64 x 64 products, results on their way to memory.

Scores of different blocks m < n: k_j is decayed to the end of its block, q_i or k_i from the start of its own, and what
lies between is applied to the row: nothing for m = n - 1, else one factor for column block 0 and one for block 1.
The inverse inside blocks is carried together with its transpose, so that its operands need not be transposed.

needs    sm_90; bf16; K = V = 128; l2norm; token tensors with heads side by side and a regular distance between tokens
oracle   prepare.py
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false
# ruff: noqa: RUF005
# (a launch passes plain values for constexpr parameters; device functions are no plain Python; tuples grow by +)
from __future__ import annotations

from typing import Any

import triton.language as tl  # noqa: F401  # the interpreter looks for it here

from openkda import frameworks
from openkda.kda.kernels.common import FLOOR_LOG2, LOG2_E, NORM_EPS
from openkda.kda.kernels.gluon import (
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    mma_v2,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from openkda.kda.kernels.hopper import C, D, decay_log2, place, token_tiles, workspace
from openkda.kda.kernels.launch import launch
from openkda.kda.kernels.recompute_hopper import takes
from openkda.kda.kernels.tables import CHUNK, Layout

__all__ = ["prepare_fwd", "takes"]

PIECE = gl.constexpr(32)  # channels at a time
# [4, 16, N], a block a warp: results, and operands of further products
BLOCKS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]))
LHS = gl.constexpr(gl.DotOperandLayout(0, BLOCKS, 2))
RHS = gl.constexpr(gl.DotOperandLayout(1, BLOCKS, 2))
# [64, N], the same places seen as one matrix; accumulators of 16, 64 and 128 columns
ROWS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
NARROW = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))
SQUARE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
WIDE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
# [64, 128], 16 rows a warp, where the second operand of a product of blocks wants them
TERMS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[1, 0], [8, 0], [0, 8], [0, 16], [0, 32], [0, 64]],
        [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]],
        [[16, 0], [32, 0]],
        [],
        [64, 128],
    )
)
LINE = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0]))  # [1, 128], a channel a thread
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


# ---------------------------------------------------------------- pieces
@jit
def _times(x, y):
    """x * y, in fp16, two products an instruction."""
    return gl.inline_asm_elementwise("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [x, y], gl.float16, True, 2)


@jit
def _half(x):
    """fp32 to fp16, two numbers an instruction."""
    return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.float16, True, 2)


@jit
def _halves(x, layout: gl.constexpr):
    """Channels of [4, 16, N]: the first half and the second."""
    N: gl.constexpr = x.shape[2]
    low, high = x.reshape([4, 16, 2, N // 2]).permute((0, 1, 3, 2)).split()
    return gl.convert_layout(low, layout), gl.convert_layout(high, layout)


@jit
def _quarters(x, layout: gl.constexpr):
    low, high = _halves(x, layout)
    a, b = _halves(low, layout)
    c, d = _halves(high, layout)
    return (a, b, c, d)


@jit
def _joined(x):
    """Two pieces [4, 16, N] -> [4, 16, 2 N]"""
    N: gl.constexpr = x[0].shape[2]
    return gl.convert_layout(gl.join(x[0], x[1]).permute((0, 1, 3, 2)).reshape([4, 16, 2 * N]), BLOCKS)


@jit
def _matrix(x, layout: gl.constexpr):
    """[4, 16, N] -> [64, N]"""
    return gl.convert_layout(x.reshape([64, x.shape[2]]), layout)


@jit
def _columns(x):
    """Rows [4, 16, N] as the columns [4, N, 16] of a product."""
    return gl.convert_layout(x.permute((0, 2, 1)), RHS)


@jit
def _product(x, y, acc):
    """acc + x y for blocks; x in the places of a result."""
    return mma_v2(gl.convert_layout(x, LHS), y, acc)


@jit
def _exponents(keep, terms):
    """sum over s of keep[.., i, s] terms[.., s, :], fp32"""
    return mma_v2(keep, terms, gl.zeros([4, 16, terms.shape[2]], gl.float32, BLOCKS))


@jit
def _row_products(x, y, diagonal):
    """sum_d x[i, d] y[i, d], [4, 16]: the diagonal of a product."""
    z = gl.zeros([4, 16, 16], gl.float32, BLOCKS)
    for c in gl.static_range(4):
        z = _product(x[c], _columns(y[c]), z)
    return gl.sum(gl.where(diagonal, z, 0.0), 2)


@jit
def _normalised(x, norm):
    results = ()
    for c in gl.static_range(4):
        results = results + (_half(x[c].to(gl.float32) * norm[:, :, None]),)
    return results


@jit
def _square_product(x, y, acc: gl.constexpr):
    """x y, [64, 64]; x in registers, y in shared memory"""
    zeros = gl.zeros([C, C], gl.float32, acc)
    z = warpgroup_mma(gl.convert_layout(x, gl.DotOperandLayout(0, acc, 2)), y, zeros, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=[z])


@jit
def _send(buffer, value, desc, row):
    buffer.store(value)
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [row, 0], buffer)


# ---------------------------------------------------------------- steps
@jit
def _decays(g_buf, bias_at, speed, rows, lower_bound, sums, tables, decay, GATE: gl.constexpr):
    """log2 decays in fp16 as second operands of products of blocks; sums over blocks, in fp32, become `tables`.

    tables [4 x 4, 128]: decay of the blocks before block n; of those behind it; between block n and block 0; and 1.
    """
    r = gl.arange(0, C, layout=gl.SliceLayout(1, TERMS))
    c = gl.arange(0, D, layout=gl.SliceLayout(0, TERMS))
    valid = (r < rows)[:, None]
    bias = gl.zeros([D], gl.float32, gl.SliceLayout(0, TERMS))
    if bias_at is not None:
        bias = gl.load(bias_at + c)
    rate = gl.where(valid, 1.0, 0.0)  # rows without a token do not decay
    bound = rate * lower_bound
    if GATE == "softplus":
        rate = rate * speed
    else:
        rate = speed + 0.0 * rate
    b_g = gl.maximum(decay_log2(g_buf.load(TERMS).to(gl.float32), bias[None, :], rate, bound, GATE), FLOOR_LOG2)
    sums.store(gl.sum(b_g.reshape([4, 16, D]), 1))
    t0, t1 = sums.slice(0, 1, 0).load(LINE), sums.slice(1, 1, 0).load(LINE)
    t2, t3 = sums.slice(2, 1, 0).load(LINE), sums.slice(3, 1, 0).load(LINE)
    one = gl.full([1, D], 1.0, gl.float32, LINE)
    e1, e2 = gl.exp2(t1), gl.exp2(t2)
    lines = (
        one, gl.exp2(t0), gl.exp2(t0 + t1), gl.exp2(t0 + t1 + t2),
        gl.exp2(t1 + t2 + t3), gl.exp2(t2 + t3), gl.exp2(t3), one,
        0.0 * one, 0.0 * one, e1, gl.exp2(t1 + t2),
        0.0 * one, 0.0 * one, 0.0 * one, e2,
    )  # fmt: skip
    for n in gl.static_range(16):
        tables.slice(n, 1, 0).store(lines[n])
    at = gl.arange(0, D, layout=gl.SliceLayout(0, LINE))[None, :]
    gl.store(decay + at, gl.exp2(t0 + t1 + (t2 + t3)))
    return gl.convert_layout(_half(b_g).reshape([4, 16, D]), RHS)


@jit
def _table(tables, which: gl.constexpr, c: gl.constexpr):
    """Piece c of a table, [4, 1, PIECE]."""
    x = tables.slice(4 * which, 4, 0).slice(PIECE * c, PIECE, 1).load(gl.SliceLayout(1, BLOCKS))
    return gl.expand_dims(x, 1)


@jit
def _factor(tables, which: gl.constexpr, c: gl.constexpr):
    """The same in fp16, for all rows of a block."""
    return _half(_table(tables, which, c)).broadcast_to([4, 16, PIECE])


@jit
def _inner_scores(q, k, terms, i, s):
    """Scores of pairs within blocks, [4, 16, 16], level by level; k's are symmetric."""
    sq = gl.zeros([4, 16, 16], gl.float32, BLOCKS)
    sk = gl.zeros([4, 16, 16], gl.float32, BLOCKS)
    i_op = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, LHS)))[None, :, None]
    s_op = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, LHS)))[None, None, :]
    for level in range(4):  # no unrolling: the instructions of four levels do not fit their cache
        keep = _all_blocks(_select_level(i_op, s_op, level))
        zq = gl.zeros([4, 16, 16], gl.float32, BLOCKS)
        zk = gl.zeros([4, 16, 16], gl.float32, BLOCKS)
        for c in gl.static_range(4):
            f = _half(gl.exp2(_exponents(keep, terms[c])))
            kf = _times(k[c], f)
            columns = _columns(kf)
            zq = _product(_times(q[c], f), columns, zq)
            zk = _product(kf, columns, zk)
        mine = (i ^ s) >> level == 1
        sq = gl.where(mine, zq, sq)
        sk = gl.where(mine, zk, sk)
    return sq, sk


@jit
def _select_level(i, s, level):
    """Which rows s add to the exponent of row i at a level, as `common.select_level`, h = 2^level."""
    return (i >> level == s >> level) & ((s <= i) == ((i >> level) % 2 == 1))


@jit
def _of_level(pair, level: gl.constexpr):
    """The highest set bit of i ^ s is the level at which rows i and s meet."""
    return pair >> level == 1


@jit
def _clear_tail(buffer, rows):
    """Rows behind the last token become zeros: they belong to others, or are NaN."""
    r = gl.arange(0, C, layout=gl.SliceLayout(1, ROWS))
    x = buffer.load(ROWS)
    buffer.store(gl.where((r < rows)[:, None], x, gl.zeros_like(x)))


@jit
def _all_blocks(keep):
    return gl.where(keep, gl.full([4, 16, 16], 1.0, gl.float16, LHS), gl.full([4, 16, 16], 0.0, gl.float16, LHS))


@jit
def _inner_inverse(n, n_t, pair):
    """(I + N)^-1 within blocks, and that of N^T: X_2h = X_h - X_h N_h X_h."""
    x = gl.where(pair == 0, 1.0, gl.where(pair == 1, -n, 0.0))
    x_t = gl.where(pair == 0, 1.0, gl.where(pair == 1, -n_t, 0.0))
    zeros = gl.zeros([4, 16, 16], gl.float32, BLOCKS)
    for level in gl.static_range(1, 4):
        mine = _of_level(pair, level)
        n_h = gl.where(mine, n, 0.0).to(gl.float16)
        n_th = gl.where(mine, n_t, 0.0).to(gl.float16)
        x_h, x_th = x.to(gl.float16), x_t.to(gl.float16)
        y = _product(x_h, _columns(n_th), zeros).to(gl.float16)
        y_t = _product(x_th, _columns(n_h), zeros).to(gl.float16)
        x = x - _product(y, _columns(x_th), zeros)
        x_t = x_t - _product(y_t, _columns(x_h), zeros)
    return x


@jit
def _outer_scores(rows, col, tables):
    """Scores of rows [64, 2 x 64] with columns of lower blocks: one tile [64, 16] a column block, m = 0, 1, 2.

    The result of warp n < m + 1 means nothing.
    """
    lhs: gl.constexpr = gl.DotOperandLayout(0, NARROW, 2)
    zeros = gl.zeros([C, 16], gl.float32, NARROW)
    z0, z1, z2, y0, y1 = zeros, zeros, zeros, zeros, zeros
    for half in gl.static_range(2):
        columns = col.slice(64 * half, 64, 1)
        c0 = columns.slice(0, 16, 0).permute((1, 0))
        c1 = columns.slice(16, 16, 0).permute((1, 0))
        c2 = columns.slice(32, 16, 0).permute((1, 0))
        between = _matrix(_apply(rows[half], tables, 2, half), lhs)
        y0 = warpgroup_mma(between, c0, y0, use_acc=half > 0, is_async=True)
        y0 = warpgroup_mma_wait(0, deps=[y0])
        between = _matrix(_apply(rows[half], tables, 3, half), lhs)
        y1 = warpgroup_mma(between, c1, y1, use_acc=half > 0, is_async=True)
        y1 = warpgroup_mma_wait(0, deps=[y1])
        near = _matrix(rows[half], lhs)
        z0 = warpgroup_mma(near, c0, z0, use_acc=half > 0, is_async=True)
        z1 = warpgroup_mma(near, c1, z1, use_acc=half > 0, is_async=True)
        z2 = warpgroup_mma(near, c2, z2, use_acc=half > 0, is_async=True)
        z0, z1, z2 = warpgroup_mma_wait(0, deps=[z0, z1, z2])
    return z0, z1, z2, y0, y1


@jit
def _apply(rows, tables, which: gl.constexpr, half: gl.constexpr):
    """Rows [4, 16, 64] times a table's factors, in fp16."""
    low, high = _halves(rows, BLOCKS)
    low = _times(low, _factor(tables, which, 2 * half))
    high = _times(high, _factor(tables, which, 2 * half + 1))
    return _joined((low, high))


@jit
def _assemble(diagonal, z, block):
    """[64, 64] from tiles of column blocks; block: of a row, [64, 1]."""
    z0, z1, z2, y0, y1 = z
    t0 = gl.where(block == 0, diagonal, gl.where(block == 1, z0, y0))
    t1 = gl.where(block == 1, diagonal, gl.where(block == 2, z1, gl.where(block == 3, y1, 0.0)))
    t2 = gl.where(block == 2, diagonal, gl.where(block == 3, z2, 0.0))
    t3 = gl.where(block == 3, diagonal, 0.0)
    low = gl.join(t0, t1).permute((0, 2, 1)).reshape([64, 32])
    high = gl.join(t2, t3).permute((0, 2, 1)).reshape([64, 32])
    return gl.convert_layout(gl.join(low, high).permute((0, 2, 1)).reshape([64, 64]), SQUARE)


# ---------------------------------------------------------------- the kernel
@jit(do_not_specialize=["T", "HV", "group"])
def _prepare_fwd_hopper_kernel(
    q_desc, k_desc, v_desc, g_desc, w_desc, u_desc, kg_desc, qg_desc, aqk_desc, a_desc,
    beta, A_log, dt_bias, decay, norms, chunks, T, HV, group, scale, lower_bound, beta_scale, b_b, b_t, b_h,
    GATE: gl.constexpr, BETA_SIGMOID: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    tiles = gl.allocate_shared_memory(gl.bfloat16, [3, C, D], q_desc.layout)
    col = gl.allocate_shared_memory(gl.float16, [C, D], gl.NVMMASharedLayout.get_default_for([C, D], gl.float16))
    sums = gl.allocate_shared_memory(gl.float32, [4, D], PLAIN)
    tables = gl.allocate_shared_memory(gl.float32, [16, D], PLAIN)
    betas = gl.allocate_shared_memory(gl.float32, [1, C], PLAIN)
    bars = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for bar in gl.static_range(3):
        mbarrier.init(bars.index(bar), count=1)
    fence_async_shared()
    item = gl.program_id(0)
    i_h, token, rows = place(chunks, item, T, HV, PACKED)
    if rows > 0:
        i_ch = gl.cast(item, gl.int64)
        i_hk = i_h // group
        mbarrier.expect(bars.index(0), 2 * C * D)
        tma.async_copy_global_to_shared(g_desc, [token, i_h * D], bars.index(0), tiles.index(2))
        mbarrier.expect(bars.index(1), 4 * C * D)
        tma.async_copy_global_to_shared(q_desc, [token, i_hk * D], bars.index(1), tiles.index(0))
        tma.async_copy_global_to_shared(k_desc, [token, i_hk * D], bars.index(1), tiles.index(1))

        # places, beta by rows and by columns of blocks
        n3 = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, BLOCKS)))[:, None, None]
        i3 = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, BLOCKS)))[None, :, None]
        s3 = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, BLOCKS)))[None, None, :]
        i_b = 0
        if not PACKED:
            i_b = item // HV // ((T + C - 1) // C)
        p_b = beta + i_b.to(gl.int64) * b_b + (token - i_b * T).to(gl.int64) * b_t + i_h * b_h
        at = gl.arange(0, C, layout=gl.SliceLayout(0, LINE))[None, :]
        b = gl.load(p_b + at * b_t, mask=at < rows, other=0.0).to(gl.float32)
        if BETA_SIGMOID:
            b = beta_scale / (1.0 + gl.exp2(b * -LOG2_E))
        betas.store(gl.where(at < rows, b, 0.0))
        speed = 1.0
        if GATE != "none":
            speed = gl.exp2(gl.load(A_log + i_h) * LOG2_E)
        bias_at = dt_bias
        if dt_bias is not None:
            bias_at = dt_bias + i_h * D
        mbarrier.wait(bars.index(0), 0)
        if rows < C:
            _clear_tail(tiles.index(2), rows)
        terms = _decays(tiles.index(2), bias_at, speed, rows, lower_bound, sums, tables, decay + i_ch * D, GATE)
        terms = _quarters(terms, RHS)

        # normalised rows
        mbarrier.wait(bars.index(1), 0)
        if rows < C:
            _clear_tail(tiles.index(0), rows)
            _clear_tail(tiles.index(1), rows)
        raw_q = tiles.index(0).load(ROWS).reshape([4, 16, D])
        raw_k = tiles.index(1).load(ROWS).reshape([4, 16, D])
        raw_q, raw_k = gl.convert_layout(raw_q, BLOCKS), gl.convert_layout(raw_k, BLOCKS)
        q, k = _quarters(raw_q, BLOCKS), _quarters(raw_k, BLOCKS)
        diagonal = i3 + 0 * n3 == s3
        r_q = gl.rsqrt(_row_products(q, q, diagonal) + NORM_EPS)
        r_k = gl.rsqrt(_row_products(k, k, diagonal) + NORM_EPS)
        qk = _row_products(q, k, diagonal) * r_q * r_k  # of a row with itself, which meets no decay
        p_norm = (
            norms + i_ch * (2 * C) + gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, BLOCKS)))[:, None] * 16
        )
        p_norm += gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, BLOCKS)))[None, :]
        gl.store(p_norm, r_q)
        gl.store(p_norm + C, r_k)
        q, k = _normalised(q, r_q), _normalised(k, r_k)

        sq, sk = _inner_scores(q, k, terms, i3, s3)

        # k to the end of its block: columns, and from there to the end of the chunk: Kg
        # q and k from the start of their block: rows, and from the start of the chunk: Qg, k * Din
        i_op = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, LHS)))[None, :, None]
        s_op = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, LHS)))[None, None, :]
        behind, up_to = _all_blocks(s_op > i_op), _all_blocks(s_op <= i_op)
        q_rows, k_rows = (), ()
        for half in gl.static_range(2):
            x_col, x_kg, x_q, x_k, x_qg, x_kd = (), (), (), (), (), ()
            for part in gl.static_range(2):
                wide_k = k[2 * half + part].to(gl.float32)
                f = gl.exp2(_exponents(behind, terms[2 * half + part]))
                x_col = x_col + (_times(k[2 * half + part], _half(f)),)
                x_kg = x_kg + ((wide_k * (f * _table(tables, 1, 2 * half + part))).to(gl.bfloat16),)
                f = gl.exp2(_exponents(up_to, terms[2 * half + part]))
                f_op = _half(f)
                x_q = x_q + (_times(q[2 * half + part], f_op),)
                x_k = x_k + (_times(k[2 * half + part], f_op),)
                f *= _table(tables, 0, 2 * half + part)
                x_qg = x_qg + ((q[2 * half + part].to(gl.float32) * f * scale).to(gl.bfloat16),)
                x_kd = x_kd + ((wide_k * f).to(gl.bfloat16),)
            q_rows = q_rows + (_joined(x_q),)
            k_rows = k_rows + (_joined(x_k),)
            col.slice(64 * half, 64, 1).store(_matrix(_joined(x_col), ROWS))
            tiles.index(0).slice(64 * half, 64, 1).store(_matrix(_joined(x_kg), ROWS))
            tiles.index(1).slice(64 * half, 64, 1).store(_matrix(_joined(x_qg), ROWS))
            tiles.index(2).slice(64 * half, 64, 1).store(_matrix(_joined(x_kd), ROWS))
        fence_async_shared()
        tma.async_copy_shared_to_global(kg_desc, [item * C, 0], tiles.index(0))
        tma.async_copy_shared_to_global(qg_desc, [item * C, 0], tiles.index(1))

        # scores of the chunk
        block = gl.arange(0, C, layout=gl.SliceLayout(1, NARROW))[:, None] // 16
        z = _outer_scores(q_rows, col, tables)
        inner = gl.where(i3 > s3, sq, 0.0)
        inner = gl.where(diagonal, gl.expand_dims(qk, 2), inner)
        aq = _assemble(_matrix(inner, NARROW), z, block) * scale
        z = _outer_scores(k_rows, col, tables)
        tma.store_wait(1)  # Kg has left
        squares = tiles.index(0)._reinterpret(gl.bfloat16, [2, C, C], aqk_desc.layout)
        _send(squares.index(0), aq.to(gl.bfloat16), aqk_desc, item * C)

        # v on its way, where Qg has left
        tma.store_wait(1)
        mbarrier.expect(bars.index(2), 2 * C * D)
        tma.async_copy_global_to_shared(v_desc, [token, i_h * D], bars.index(2), tiles.index(1))

        # A
        b_row = gl.expand_dims(betas.reshape([4, 16]).load(gl.SliceLayout(2, BLOCKS)), 2)
        b_col = gl.expand_dims(betas.reshape([4, 16]).load(gl.SliceLayout(1, BLOCKS)), 1)
        n = gl.where(i3 > s3, sk, 0.0) * b_row
        n_t = gl.where(i3 < s3, sk, 0.0) * b_col
        inverse = _matrix(_inner_inverse(n, n_t, i3 ^ s3), NARROW)
        zeros = gl.zeros([C, 16], gl.float32, NARROW)
        x = _assemble(inverse, (zeros, zeros, zeros, zeros, zeros), block)
        rows_b = gl.convert_layout(b_row.reshape([64, 1]), SQUARE)
        n = _assemble(zeros, z, block) * rows_b
        i2 = gl.arange(0, C, layout=gl.SliceLayout(1, SQUARE))[:, None]
        s2 = gl.arange(0, C, layout=gl.SliceLayout(0, SQUARE))[None, :]
        operands = col._reinterpret(gl.float16, [2, C, C], gl.NVMMASharedLayout.get_default_for([C, C], gl.float16))
        for level in gl.static_range(4, 6):
            mine = _of_level(i2 ^ s2, level)
            x_h = x.to(gl.float16)
            operands.index(0).store(gl.where(mine, n, 0.0).to(gl.float16))
            operands.index(1).store(x_h)
            fence_async_shared()
            y = _square_product(x_h, operands.index(0), SQUARE)
            x = x - _square_product(y.to(gl.float16), operands.index(1), SQUARE)
        _send(squares.index(1), x.to(gl.bfloat16), a_desc, item * C)

        # W = A diag(b) (k * Din), U = A diag(b) v
        b = betas.reshape([C]).load(gl.SliceLayout(0, SQUARE))
        ab = gl.convert_layout((x * b[None, :]).to(gl.bfloat16), gl.DotOperandLayout(0, WIDE, 2))
        wide = gl.zeros([C, D], gl.float32, WIDE)
        b_w = warpgroup_mma(ab, tiles.index(2), wide, use_acc=False, is_async=True)
        b_w = warpgroup_mma_wait(0, deps=[b_w])
        result = col._reinterpret(gl.bfloat16, [C, D], w_desc.layout)
        _send(result, b_w.to(gl.bfloat16), w_desc, item * C)
        mbarrier.wait(bars.index(2), 0)
        b_v = tiles.index(1)
        if rows < C:
            _clear_tail(b_v, rows)
            fence_async_shared()
        b_u = warpgroup_mma(ab, b_v, wide, use_acc=False, is_async=True)
        b_u = warpgroup_mma_wait(0, deps=[b_u])
        _send(tiles.index(2), b_u.to(gl.bfloat16), u_desc, item * C)
        tma.store_wait(0)


# ---------------------------------------------------------------- launcher
def prepare_fwd(
    *, q: Any, k: Any, v: Any, g: Any, beta: Any, w: Any, u: Any, kg: Any, qg: Any, aqk: Any, a: Any, decay: Any,
    norms: Any, act: Any, layout: Layout,
) -> None:  # fmt: skip
    """As `prepare.prepare_fwd`, for what `takes` accepts, with l2norm."""
    fw = frameworks.of(a)
    NC, HV = (int(n) for n in a.shape[:2])
    with fw.on_device(a):
        launch(
            _prepare_fwd_hopper_kernel, NC * HV,
            *(token_tiles(x, 128) for x in (q, k, v, g)), *(workspace(x, 128) for x in (w, u, kg, qg)),
            workspace(aqk, CHUNK), workspace(a, CHUNK), beta, act.A_log, act.dt_bias, decay, norms, layout.chunks,
            layout.T, HV, HV // int(q.shape[2]), float(act.scale), float(act.lower_bound or 0.0), float(act.beta_scale),
            *(int(s) for s in fw.strides(beta)[:3]), GATE=act.gate, BETA_SIGMOID=act.beta_sigmoid,
            PACKED=layout.packed, num_warps=4,
        )  # fmt: skip
