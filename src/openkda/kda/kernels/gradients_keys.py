"""Gradients of q, k and the gate inside a chunk: the second kernel of the gradient stage.

A program takes a chunk of 64 rows and a head, KC channels at a time; a warp owns 16 channels of all 64 rows, so warps
exchange nothing. Tiles are [channels, 16 rows of a block]: factors, operands and results of one matrix product are the
operands of the next without leaving their registers, and every sum over rows stays in a warp. With E the decay from a
point of the chunk to a row (or from a row to it), P and Y those from the start and to the end of the row's block:

    blocks m > n     row i meets column j with the decay P_i T_{m-1} .. T_{n+1} Y_j, T_n = decay of block n:
                         h_q = dQg, then for n = 0 .. m-1   h_q = T_n h_q + dAqk_mn (k Y)_n         dq = P h_q
                         h_k = dXs, likewise with dL        D = P h_k, and the row part of dk is b D
                         h_c = dKg, then for m = 3 .. n+1   h_c = T_m h_c + dAqk_mn^T (q P)_m + dL_mn^T (b k P)_m
                     and the column part of dk is Y h_c
    inside a block   level h = 8, 4, 2 (common.py): upper rows meet lower rows of 2h rows, both decay to the middle, E:
                         dq = E (dAqk_h (k E))      dk = E ((b dL_h + (b dL_h)^T) (k E) + dAqk_h^T (q E))
                     and neighbours (level 1), which one thread holds, one by one
    i = j            meets no decay

dg_s gets a pair (i, j) only if j < s <= i, and only such terms are added, so nothing cancels where a strong decay
leaves dg_s tiny. With r = q dq + k dk of the pairs of one level, or of a block's rows, or of its columns, they are

    dg += keep^T r        keep [i, s] of 0 and 1: `select_level`, s <= i for rows, s > i for columns

and what passes all of a block (`straddle`): rows behind it with what lies before it, T applied on the way.

With a sigmoid's beta (FOLD) dL and dXs come times b of their row; a given beta is applied to operands and results
instead, as k . D is wanted. Operands of 16-bit inputs are bf16, g_log2 in exponents fp16; those of fp32 are two tf32
numbers each.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
# ruff: noqa: RUF005
# (device functions are no plain Python; tuples grow by +, the only way that Triton knows)
from __future__ import annotations

import triton.language as tl  # noqa: F401  # the interpreter looks for it here

from openkda.kda.kernels.common import FLOOR_LOG2, INTERPRETED, LOG2_E
from openkda.kda.kernels.gluon import constexpr_function, gl, jit, mma_v2

constexpr = gl.constexpr  # the interpreter looks for this name at arguments
C = constexpr(64)
LN_2 = constexpr(0.6931471805599453)
UP_TO, BEHIND = constexpr(0), constexpr(1)  # 0/1 matrices: rows up to a row, rows behind it
OPERAND = constexpr(gl.SwizzledSharedLayout(8, 4, 2, [1, 0]))  # of [.., 16] numbers of 16 bits: no bank conflicts
VECTOR = constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
FRAGMENTS = constexpr(gl.SwizzledSharedLayout(4, 2, 4, [1, 0]))


# ---- layouts of [KC, ..], KC / 16 warps
@constexpr_function
def _acc(KC):
    """[KC, 16] as products leave it: lane 4 l + t holds channels l, l + 8 of rows 2 t, 2 t + 1, 2 t + 8, 2 t + 9."""
    return gl.NVMMADistributedLayout([2, 0], [KC // 16, 1], [16, 8])


@constexpr_function
def _operand(side, KC, dtype):
    return gl.DotOperandLayout(side, _acc(KC), 32 // dtype.primitive_bitwidth)


@constexpr_function
def _linear(registers, lanes, KC, columns):
    warps = [[16 << w, 0] for w in range((KC // 16).bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [KC, columns])


@constexpr_function
def _mem(KC):
    """[KC, 16] of memory: a thread holds two neighbouring channels, 2 l and 2 l + 1, of the rows it has in `_acc`."""
    return _linear([[1, 0], [0, 1], [0, 8]], [[0, 2], [0, 4], [2, 0], [4, 0], [8, 0]], KC, 16)


@constexpr_function
def _eight(KC):
    """[KC, 8]: every other row of `_acc`."""
    return _linear([[8, 0], [0, 4]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], KC, 8)


@constexpr_function
def _half(KC):
    """[KC, 8]: the first or the second half of the rows of `_acc`."""
    return _linear([[0, 1], [8, 0]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], KC, 8)


@constexpr_function
def _four(KC):
    """[KC, 4]: a number a thread and channel of `_acc`."""
    return _linear([[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], KC, 4)


@constexpr_function
def _rows(layout):
    return gl.SliceLayout(0, layout)


@constexpr_function
def _channels(layout):
    return gl.SliceLayout(1, layout)


@constexpr_function
def _staged(KC):
    """[.., 16], eight neighbouring numbers a thread."""
    return gl.BlockedLayout([1, 8], [16, 2], [KC // 16, 1], [1, 0])


@constexpr_function
def _one(KC):
    return gl.BlockedLayout([1], [32], [KC // 16], [0])


@constexpr_function
def _lines(KC):
    return gl.BlockedLayout([1, 1], [16, 2], [KC // 16, 1], [1, 0])


@constexpr_function
def _lines_of(K, LINE):
    """A power of two."""
    return 1 << (max(K, LINE) // LINE - 1).bit_length()


@jit
def _channel(x):
    """Channel of a row of `_acc`: of 16 w + 8 m + l it is 16 w + 2 l + m, as neighbours in memory share a thread."""
    return (x // 16) * 16 + (x % 8) * 2 + (x // 8) % 2


@jit
def _to_acc(x):
    """A tile of memory, in fp32; moves nothing between threads, as all below."""
    if INTERPRETED or x.dtype != gl.bfloat16:
        x = x.to(gl.float32)
    else:  # two numbers in two instructions
        x = gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], gl.float32, True, 2
        )
    KC: constexpr = x.shape[0]
    x = x.reshape([KC // 16, 8, 2, 16]).permute((0, 2, 1, 3)).reshape([KC, 16])
    return gl.convert_layout(x, _acc(KC))


@jit
def _to_mem(x):
    KC: constexpr = x.shape[0]
    x = x.reshape([KC // 16, 2, 8, 16]).permute((0, 2, 1, 3)).reshape([KC, 16])
    return gl.convert_layout(x, _mem(KC))


@jit
def _partial(x):
    """Sums over the rows that a thread holds, [KC, 4]; the rest of the sum, over the last axis, takes shuffles."""
    KC: constexpr = x.shape[0]
    return gl.convert_layout(gl.sum(gl.sum(x.reshape([KC, 2, 4, 2]), 3), 1), _four(KC))


@jit
def _all_rows(x):
    """[KC, 4] -> [KC, 16]: each thread's number in all rows that it holds."""
    KC: constexpr = x.shape[0]
    x = gl.join(x, x).reshape([KC, 8])
    return gl.convert_layout(gl.join(x, x).permute((0, 2, 1)).reshape([KC, 16]), _acc(KC))


@jit
def _first_row(x):
    """[KC, 16] -> [KC, 4]: each thread's first row."""
    KC: constexpr = x.shape[0]
    x, _ = x.reshape([KC, 8, 2]).split()
    x, _ = x.reshape([KC, 2, 4]).permute((0, 2, 1)).split()
    return gl.convert_layout(x, _four(KC))


@jit
def _even_odd(x):
    """[KC, 16] -> rows 0, 2, .. and rows 1, 3, .., [KC, 8] each."""
    KC: constexpr = x.shape[0]
    even, odd = x.reshape([KC, 8, 2]).split()
    return gl.convert_layout(even, _eight(KC)), gl.convert_layout(odd, _eight(KC))


@jit
def _add_pairs(x, even, odd):
    """x + (even, odd); even may be None."""
    KC: constexpr = x.shape[0]
    x_even, x_odd = _even_odd(x)
    if even is not None:
        x_even += even
    return gl.convert_layout(gl.join(x_even, x_odd + odd).reshape([KC, 16]), _acc(KC))


@jit
def _square(x, n: constexpr):
    """The n-th of matrices [16, 16] in shared memory, one below the other."""
    return x.slice(16 * n, 16, 0)


@jit
def _right(x, KC: constexpr):
    """Load a right operand."""
    return x.load(_operand(1, KC, x.dtype))


@jit
def _left(x):
    """Load a left operand."""
    return x.load(_operand(0, x.shape[0], x.dtype))


@jit
def _as_left(x, DTYPE: constexpr):
    return gl.convert_layout(x.to(DTYPE), _operand(0, x.shape[0], DTYPE))


@jit
def _tf32(x):
    """fp32 rounded to what tf32 holds: matrix units would cut the rest off, always towards zero."""
    return ((x.to(gl.int32, bitcast=True) + 4096) & -8192).to(gl.float32, bitcast=True)


@jit
def _mma(x, y, acc):
    """acc + x y; of fp32 operands all but the product of their second halves."""
    if x.dtype == gl.float32:
        x1, y1 = _tf32(x), _tf32(y)
        acc = mma_v2(_tf32(x - x1), y1, acc, input_precision="tf32")
        acc = mma_v2(x1, _tf32(y - y1), acc, input_precision="tf32")
        return mma_v2(x1, y1, acc, input_precision="tf32")
    else:
        return mma_v2(x, y, acc)


@jit
def _select(x, keep, acc):
    """acc + x keep, keep of 0 and 1: fp32 is three tf32 numbers, so nothing is lost."""
    if x.dtype == gl.float32:
        x1 = _tf32(x)
        x2 = _tf32(x - x1)
        acc = mma_v2((x - x1) - x2, keep, acc, input_precision="tf32")
        acc = mma_v2(x2, keep, acc, input_precision="tf32")
        return mma_v2(x1, keep, acc, input_precision="tf32")
    else:
        return mma_v2(x, keep, acc)


# ---- shared memory
@jit
def _prefetch(x, rows, stride, KC: constexpr, K: constexpr):
    """Ask for x[0 : rows, 0 : K] in L2, 128 bytes a thread: see common.prefetch_rows."""
    if not INTERPRETED:
        LINE: constexpr = 1024 // x.dtype.element_ty.primitive_bitwidth
        LAYOUT: constexpr = _lines(KC)
        i = gl.maximum(gl.minimum(gl.arange(0, C, layout=_channels(LAYOUT)), rows - 1), 0)[:, None]
        j = gl.minimum(gl.arange(0, _lines_of(K, LINE), layout=_rows(LAYOUT)) * LINE, K - 1)[None, :]
        gl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [x + (i * stride + j)], gl.int32, False, 1
        )


@jit
def _selected(i, s, n):
    """Rows s that count for row i: n = 0 .. 3 is `select_level` at level 8 >> n, 4 those up to i, 5 those behind."""
    h = 8 >> (n % 4)
    level = (i // h == s // h) & ((s <= i) == ((i // h) % 2 == 1))
    return gl.where(n < 4, level, (s <= i) == (n == 4))


@jit
def _stage_selections(terms, keeps, first: constexpr, KC: constexpr):
    """0/1 matrices as right operands: terms [s, i] of exponents, keeps [i, s] of dg."""
    x = gl.arange(0, terms.shape[0], layout=_channels(_staged(KC)))[:, None]
    y = gl.arange(0, 16, layout=_rows(_staged(KC)))[None, :]
    n = first + x // 16
    terms.store(gl.where(_selected(y, x % 16, n), 1.0, 0.0).to(terms.dtype))
    keeps.store(gl.where(_selected(x % 16, y, n), 1.0, 0.0).to(keeps.dtype))


@jit
def _unpack64(x):
    return x.to(gl.int32).to(gl.float32, bitcast=True), (x >> 32).to(gl.int32).to(gl.float32, bitcast=True)


@jit
def _load_weights(w_q, w_k, KC: constexpr):
    """dAqk, dL [64, 16] by columns n of blocks; their diagonal blocks, and those of dL transposed."""
    i = gl.arange(0, 64, layout=_channels(_staged(KC)))[:, None]
    j = gl.arange(0, 16, layout=_rows(_staged(KC)))[None, :]
    at = i * C + j
    own = (i // 16) * 16
    return (
        (gl.load(w_q + at), gl.load(w_q + at + 16), gl.load(w_q + at + 32)),
        (gl.load(w_k + at), gl.load(w_k + at + 16), gl.load(w_k + at + 32)),
        gl.load(w_q + (i * C + own + j)), gl.load(w_k + (i * C + own + j)), gl.load(w_k + ((own + j) * C + i)),
    )  # fmt: skip


@jit
def _stage_weights(weights, off_q, off_k, lvl_q, lvl_k, KC: constexpr):
    """Right operands [16, 16]: off [n], blocks (m, n); lvl [n], pairs of level 8 >> n in block m, of dL both halves."""
    i = gl.arange(0, 64, layout=_channels(_staged(KC)))[:, None] % 16
    j = gl.arange(0, 16, layout=_rows(_staged(KC)))[None, :]
    b_q = weights[2]
    b_k = gl.where(i > j, weights[3], weights[4])
    for n in gl.static_range(3):
        off_q[n].store(weights[0][n])
        off_k[n].store(weights[1][n])
        mine = ((i ^ j) >= (8 >> n)) & ((i ^ j) < (16 >> n))
        lvl_q[n].store(gl.where(mine & (i > j), b_q, 0.0).to(b_q.dtype))
        lvl_k[n].store(gl.where(mine, b_k, 0.0).to(b_k.dtype))


@jit
def _load_rows(w_q, w_k, row_norms, KC: constexpr, L2NORM: constexpr):
    """Of every row: norms of q and of k, the diagonal of dAqk; of every other row its neighbour's dAqk and dL."""
    i = gl.arange(0, 64, layout=_one(KC))
    odd = gl.arange(0, 32, layout=_one(KC)) * 2 + 1
    norm_q, norm_k = i.to(gl.int64), i.to(gl.int64)
    if L2NORM:
        norm_q, norm_k = gl.load(row_norms + i), gl.load(row_norms + C + i)
    at = odd * (C + 1) - 1
    return norm_q, norm_k, gl.load(w_q + i * (C + 1)), gl.load(w_q + at), gl.load(w_k + at)


@jit
def _stage_rows(values, s_rows):
    f_q, c_q = _unpack64(values[0])
    f_k, c_k = _unpack64(values[1])
    s_rows[0].store(f_q)
    s_rows[1].store(c_q)
    s_rows[2].store(f_k)
    s_rows[3].store(c_k)
    for n in gl.static_range(3):
        s_rows[4 + n].store(values[2 + n].to(gl.float32))


# ---- rows
@jit
def _row(x, b: constexpr, LAYOUT: constexpr):
    """Numbers of the rows of block b, [1, 16] or [1, 8]."""
    N: constexpr = x.shape[0] // 4
    return x.slice(N * b, N, 0).load(LAYOUT)[None, :]


@jit
def _reciprocal(x):
    if INTERPRETED:
        return 1.0 / x
    else:
        return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@jit
def _gate(raw, bias, rate, bound, GATE: constexpr, PRECISE: constexpr):
    """log2 of the decay as common.decay_log2, and d g / d raw with g in nats; both 0 where rate (softplus) or bound is.

    softplus, not PRECISE: the polynomial has degree 4, 6e-5 of itself, as exponents are rounded to fp16 anyway; and the
    sigmoid of raw + bias is 2^(min(y, 0) - log2(1 + u)).
    """
    if GATE == "softplus":
        y = raw * LOG2_E + bias * LOG2_E
        u = gl.exp2(-gl.abs(y))
        if PRECISE:
            p = 0.06274843357141435 - 0.012077020269316563 * u
            p = -0.1541520064325823 + u * p
            p = 0.2551763492142669 + u * p
            p = -0.3530963533412672 + u * p
            p = 0.48001246079524296 + u * p
            p = -0.7213067574280009 + u * p
            p = 1.442694724590345 + u * p
        else:
            p = -0.22510302549825303 + 0.058664939715638555 * u
            p = 0.44059903295531755 + u * p
            p = -0.716714663167644 + u * p
            p = 1.442603894242359 + u * p
        n = u * p
        g2 = -rate * (gl.maximum(y, 0.0) + n)
        if PRECISE:
            r = _reciprocal(1.0 + u)
            return g2, -rate * gl.where(y > 0, r, u * r)
        else:
            return g2, -rate * gl.exp2(gl.minimum(y, 0.0) - n)
    elif GATE == "bounded":
        z = raw + bias
        u = gl.exp2(-gl.abs(z) * (rate * LOG2_E))
        r = _reciprocal(1.0 + u)
        s = u * r
        return (bound * LOG2_E) * gl.where(z > 0, r, s), (bound * rate) * (r * s)
    else:
        return raw * LOG2_E, raw


# ---- pairs inside a block
@jit
def _level_pairs(b_q, b_k, terms, select, keep, weight_q, weight_k, up, d_q, d_k, d_g, WS: constexpr, FOLD: constexpr):
    """Add the pairs of a level to dq, dk and dg; also k . D of its rows, up to a factor of beta that is not there.

    up [1, 16]: beta in upper rows, 1 in lower ones, where the weights do not contain it.
    """
    KC: constexpr = b_q.shape[0]
    zero = gl.zeros([KC, 16], gl.float32, _acc(KC))
    e = gl.exp2(_select(terms, _right(select, KC), zero))
    e_k = e
    if not FOLD:
        e_k = e * up
    qe = b_q * e
    ke = b_k * e_k
    left_k = _as_left(ke, WS)
    y_q = _mma(left_k, _right(weight_q.permute((1, 0)), KC), zero)
    y_k = _mma(left_k, _right(weight_k, KC), zero)
    y_k = _mma(_as_left(qe, WS), _right(weight_q, KC), y_k)
    d_g = _select(_as_left(qe * y_q + ke * y_k, WS), _right(keep, KC), d_g)
    return d_q + e * y_q, d_k + e_k * y_k, d_g, b_k * e * y_k


@jit
def _halves(x):
    """[KC, 16] -> rows 0 .. 7 and rows 8 .. 15, [KC, 8] each."""
    KC: constexpr = x.shape[0]
    low, high = x.reshape([KC, 2, 8]).permute((0, 2, 1)).split()
    return gl.convert_layout(low, _half(KC)), gl.convert_layout(high, _half(KC))


@jit
def _whole(low, high):
    KC: constexpr = low.shape[0]
    return gl.convert_layout(gl.join(low, high).permute((0, 2, 1)).reshape([KC, 16]), _acc(KC))


@jit
def _half_pairs(b_q, b_k, terms, select, keep, weight_q, weight_k, up, d_q, d_k, d_g, WS: constexpr, FOLD: constexpr):
    """`_level_pairs` for level 8, whose upper rows are registers of their own: the others are spared what is theirs."""
    KC: constexpr = b_q.shape[0]
    zero = gl.zeros([KC, 16], gl.float32, _acc(KC))
    nil = gl.zeros([KC, 8], gl.float32, _half(KC))
    e = gl.exp2(_select(terms, _right(select, KC), zero))
    e_k = e
    if not FOLD:
        e_k = e * up
    _, q_upper = _halves(b_q)
    _, e_upper = _halves(e)
    qe = q_upper * e_upper
    ke = b_k * e_k
    left_k = _as_left(ke, WS)
    _, y_q = _halves(_mma(left_k, _right(weight_q.permute((1, 0)), KC), zero))
    y_k = _mma(left_k, _right(weight_k, KC), zero)
    y_k = _mma(_as_left(_whole(nil, qe), WS), _right(weight_q, KC), y_k)
    r_lower, r_upper = _halves(ke * y_k)
    d_g = _select(_as_left(_whole(r_lower, r_upper + qe * y_q), WS), _right(keep, KC), d_g)
    d_lower, d_upper = _halves(d_q)
    return _whole(d_lower, d_upper + e_upper * y_q), d_k + e_k * y_k, d_g, b_k * e * y_k


@jit
def _neighbour_pairs(b_q, b_k, terms, w_q, w_k, beta, d_q, d_k, d_g, FOLD: constexpr):
    """The same for rows 2 i + 1 with rows 2 i; w_q, w_k, beta [1, 8]."""
    _, e = _even_odd(terms)
    e = gl.exp2(e.to(gl.float32))
    k_even, k_odd = _even_odd(b_k)
    _, q_odd = _even_odd(b_q)
    bw_k = w_k
    if not FOLD:
        bw_k = beta * w_k
    ke = k_even * e
    both = w_q * q_odd + bw_k * k_odd
    d_k = _add_pairs(d_k, e * both, bw_k * ke)
    return _add_pairs(d_q, None, w_q * ke), d_k, _add_pairs(d_g, None, ke * both), w_k * ke * k_odd


@jit
def _keys_bwd_kernel(
    q, k, g, dqg, dxs, dkg, ends, w_q, w_k, row_norms, row_beta, A_log, dt_bias,
    dq, dk, dg, k_dk, dA, dbias, chunks,
    T, scale, lower_bound,
    q_b, q_h, k_b, k_h, g_b, g_h, out_b,
    Q_T: constexpr, K_T: constexpr, G_T: constexpr,
    H: constexpr, HV: constexpr, K: constexpr, KC: constexpr, TERM: constexpr,
    GATE: constexpr, L2NORM: constexpr, BETA_SIGMOID: constexpr, PACKED: constexpr,
):  # fmt: skip
    # Which work: a chunk of a head. Neighbours are heads of one chunk, whose rows lie side by side.
    WS: constexpr = dqg.dtype.element_ty
    SLICES: constexpr = (K + KC - 1) // KC
    OUT_T: constexpr = HV * K
    ACC: constexpr = _acc(KC)
    FOUR: constexpr = _four(KC)
    i_ch = gl.program_id(0).to(gl.int64)
    i_c = i_ch // HV
    i_h = (i_ch % HV).to(gl.int32)
    i_hk = (i_h // (HV // H)).to(gl.int64)
    if PACKED:
        first = gl.load(chunks + i_c * 4).to(gl.int64)
        rows = gl.load(chunks + i_c * 4 + 1)
        i_b = first * 0
    else:
        per_sequence = (T + C - 1) // C
        i_b = i_c // per_sequence
        first = (i_c - i_b * per_sequence) * C
        rows = gl.minimum(T - first.to(gl.int32), C)
    o_c = _channel(gl.arange(0, KC, layout=_channels(FOUR)))
    if rows > 0:
        off_q, off_k, lvl_q, lvl_k, s_rows = (), (), (), (), ()
        for _ in gl.static_range(3):
            off_q = off_q + (gl.allocate_shared_memory(WS, [64, 16], OPERAND),)
            off_k = off_k + (gl.allocate_shared_memory(WS, [64, 16], OPERAND),)
            lvl_q = lvl_q + (gl.allocate_shared_memory(WS, [64, 16], OPERAND),)
            lvl_k = lvl_k + (gl.allocate_shared_memory(WS, [64, 16], OPERAND),)
        for _ in gl.static_range(5):
            s_rows = s_rows + (gl.allocate_shared_memory(gl.float32, [64], VECTOR),)
        for _ in gl.static_range(2):
            s_rows = s_rows + (gl.allocate_shared_memory(gl.float32, [32], VECTOR),)
        terms_level = gl.allocate_shared_memory(TERM, [64, 16], OPERAND)
        keeps_level = gl.allocate_shared_memory(WS, [64, 16], OPERAND)
        terms_side = gl.allocate_shared_memory(TERM, [32, 16], OPERAND)
        keeps_side = gl.allocate_shared_memory(WS, [32, 16], OPERAND)
        s_qp, s_kp, s_ky, s_g, s_raw = (), (), (), (), ()
        for b in gl.static_range(4):
            s_g = s_g + (gl.allocate_shared_memory(TERM, [KC, 16], OPERAND),)
            s_raw = s_raw + (gl.allocate_shared_memory(gl.float32, [KC, 16], FRAGMENTS),)
            if b < 3:  # of blocks 1, 2, 3 as rows, of 0, 1, 2 as columns
                s_qp = s_qp + (gl.allocate_shared_memory(WS, [KC, 16], OPERAND),)
                s_kp = s_kp + (gl.allocate_shared_memory(WS, [KC, 16], OPERAND),)
                s_ky = s_ky + (gl.allocate_shared_memory(WS, [KC, 16], OPERAND),)
        q += i_b * q_b + first * Q_T + i_hk * q_h
        k += i_b * k_b + first * K_T + i_hk * k_h
        g += i_b * g_b + first * G_T + i_h.to(gl.int64) * g_h
        dqg += i_ch * (C * K)
        dxs += i_ch * (C * K)
        dkg += i_ch * (C * K)
        _prefetch(q, rows, Q_T, KC, K)
        _prefetch(k, rows, K_T, KC, K)
        _prefetch(g, rows, G_T, KC, K)
        _prefetch(dkg, C, K, KC, K)
        _prefetch(dqg, C, K, KC, K)
        _prefetch(dxs, C, K, KC, K)
        w_q += i_ch * (C * C)
        w_k += i_ch * (C * C)
        r = gl.arange(0, 16, layout=_rows(ACC))
        r_mem = gl.arange(0, 16, layout=_rows(_mem(KC)))[None, :]
        c_mem = gl.arange(0, KC, layout=_channels(_mem(KC)))[:, None]
        p_beta = row_beta + i_ch * C + r
        p_odd = row_beta + i_ch * C + gl.arange(0, 8, layout=_rows(_eight(KC))) * 2 + 1
        o_out = i_b * out_b + first * OUT_T + i_h * K

        # loads that nothing needs yet: weights, rows, the first columns
        weights = _load_weights(w_q, w_k, KC)
        values = _load_rows(w_q, w_k, row_norms + i_ch * (2 * C), KC, L2NORM)
        rate = 1.0
        if GATE != "none":
            rate = gl.exp2(gl.load(A_log + i_h) * LOG2_E)
        m_k = c_mem < K
        m = (r_mem < rows) & m_k
        raw_k = gl.load(k + (r_mem * K_T + c_mem), mask=m, other=0.0)
        raw_g = gl.load(g + (r_mem * G_T + c_mem), mask=m, other=0.0)
        raw_kg = gl.load(dkg + (r_mem * K + c_mem), mask=m_k, other=0.0)
        _stage_selections(terms_level, keeps_level, 0, KC)
        _stage_selections(terms_side, keeps_side, 4, KC)
        _stage_weights(weights, off_q, off_k, lvl_q, lvl_k, KC)
        _stage_rows(values, s_rows)

        lead = gl.arange(0, 4, layout=_rows(FOUR))[None, :] == 0  # one of the threads that share a channel
        zero = gl.zeros([KC, 16], gl.float32, ACC)
        none = gl.zeros([KC, 4], gl.float32, FOUR)
        for i_s in range(SLICES):
            k0 = i_s * KC
            left = K - k0
            if K % KC == 0:
                left = KC
            m_k = c_mem < left
            p_q, p_k = (q + k0) + (r_mem * Q_T + c_mem), (k + k0) + (r_mem * K_T + c_mem)
            p_g, p_kg = (g + k0) + (r_mem * G_T + c_mem), (dkg + k0) + (r_mem * K + c_mem)
            p_qg, p_xs = (dqg + k0) + (r_mem * K + c_mem), (dxs + k0) + (r_mem * K + c_mem)
            at_out = (o_out + k0) + (r_mem * OUT_T + c_mem)
            end = gl.load(ends + i_ch * K + k0 + o_c, mask=o_c < left, other=0.0)
            bias = gl.zeros([KC, 16], gl.float32, ACC)
            if dt_bias is not None:
                bias = gl.load(dt_bias + i_h * K + k0 + o_c, mask=o_c < left, other=0.0)
                bias = gl.convert_layout(bias, _channels(ACC))[:, None]

            # decays and columns of all blocks
            decays = ()  # of the four blocks
            fluxes = ()  # of the state behind the chunk with columns before block m, up to block m
            flux = none
            for b in gl.static_range(4):
                b_k, b_g, b_kg = _to_acc(raw_k), _to_acc(raw_g), _to_acc(raw_kg)
                if b < 3:  # the next block's
                    m = (r_mem + (b + 1) * 16 < rows) & m_k
                    raw_k = gl.load(p_k + (b + 1) * 16 * K_T, mask=m, other=0.0)
                    raw_g = gl.load(p_g + (b + 1) * 16 * G_T, mask=m, other=0.0)
                    raw_kg = gl.load(p_kg + (b + 1) * 16 * K, mask=m_k, other=0.0)
                else:
                    m = (r_mem + b * 16 < rows) & m_k
                    raw_q = gl.load(p_q + b * 16 * Q_T, mask=m, other=0.0)
                    raw_qg = gl.load(p_qg + b * 16 * K, mask=m_k, other=0.0)
                    raw_xs = gl.load(p_xs + b * 16 * K, mask=m_k, other=0.0)
                valid = gl.where(r + b * 16 < rows, 1.0, 0.0)[None, :]  # rows without a token do not decay
                if GATE == "softplus":
                    g2, d_raw = _gate(b_g, bias, rate * valid, 0.0, GATE, WS == gl.float32)
                else:
                    g2, d_raw = _gate(b_g, bias, rate, lower_bound * valid, GATE, WS == gl.float32)
                terms = gl.maximum(g2, FLOOR_LOG2).to(TERM)
                s_g[b].store(terms)
                if GATE != "none":
                    s_raw[b].store(d_raw)
                terms = _as_left(terms, TERM)
                p = gl.exp2(_select(terms, _right(_square(terms_side, UP_TO), KC), zero))
                y = gl.exp2(_select(terms, _right(_square(terms_side, BEHIND), KC), zero))
                t = _first_row(p) * _first_row(y)
                if L2NORM:
                    b_k *= _row(s_rows[2], b, _rows(ACC))
                b_ky = b_k * y
                if b < 3:
                    s_ky[b].store(b_ky.to(WS))
                decays = decays + (t,)
                fluxes = fluxes + (flux,)
                flux = flux * t + _partial(b_ky * b_kg)

            # blocks, last first
            behind = none + 1.0  # decay of the blocks behind this one
            end = gl.where(lead, end[:, None] + none, 0.0) * (decays[0] * decays[1]) * (decays[2] * decays[3])
            straddles = (end, end, end, end)
            s_bias = none
            s_A = none
            for b in gl.static_range(3, -1, -1):
                m = (r_mem + b * 16 < rows) & m_k
                b_q, b_k = _to_acc(raw_q), _to_acc(raw_k)
                h_q, h_k, h_c = _to_acc(raw_qg), _to_acc(raw_xs), _to_acc(raw_kg)
                if GATE == "bounded":
                    b_z = _to_acc(raw_g) + bias
                if b > 0:  # the next block's
                    m_next = (r_mem + (b - 1) * 16 < rows) & m_k
                    raw_q = gl.load(p_q + (b - 1) * 16 * Q_T, mask=m_next, other=0.0)
                    raw_k = gl.load(p_k + (b - 1) * 16 * K_T, mask=m_next, other=0.0)
                    raw_qg = gl.load(p_qg + (b - 1) * 16 * K, mask=m_k, other=0.0)
                    raw_xs = gl.load(p_xs + (b - 1) * 16 * K, mask=m_k, other=0.0)
                    raw_kg = gl.load(p_kg + (b - 1) * 16 * K, mask=m_k, other=0.0)
                    if GATE == "bounded":
                        raw_g = gl.load(p_g + (b - 1) * 16 * G_T, mask=m_next, other=0.0)
                elif SLICES > 1:  # the next slice's first columns
                    m_next = (r_mem < rows) & (c_mem < K - k0 - KC)
                    raw_k = gl.load(p_k + KC, mask=m_next, other=0.0)
                    raw_g = gl.load(p_g + KC, mask=m_next, other=0.0)
                    raw_kg = gl.load(p_kg + KC, mask=c_mem < K - k0 - KC, other=0.0)
                if L2NORM:
                    b_q *= _row(s_rows[0], b, _rows(ACC))
                    b_k *= _row(s_rows[2], b, _rows(ACC))
                else:
                    b_q *= scale
                beta = 1.0
                if not BETA_SIGMOID:
                    beta = gl.load(p_beta + b * 16)[None, :]
                terms = _left(s_g[b])
                p = gl.exp2(_select(terms, _right(_square(terms_side, UP_TO), KC), zero))
                y = gl.exp2(_select(terms, _right(_square(terms_side, BEHIND), KC), zero))
                b_qp = b_q * p
                b_kp = b_k * p
                if not BETA_SIGMOID:
                    b_kp *= beta
                if b > 0:
                    s_qp[b - 1].store(b_qp.to(WS))
                    s_kp[b - 1].store(b_kp.to(WS))

                # rows of this block with what lies before it
                passed = (none, none, none)
                for n in gl.static_range(b):
                    h_q *= _all_rows(decays[n])
                    h_k *= _all_rows(decays[n])
                    f = _partial(b_qp * h_q + b_kp * h_k)
                    passed = (passed[0] * decays[n], passed[1] * decays[n], passed[2] * decays[n])
                    if n == 0:
                        passed = (f, passed[1], passed[2])
                    elif n == 1:
                        passed = (passed[0], f, passed[2])
                    else:
                        passed = (passed[0], passed[1], f)
                    column = _left(s_ky[n])
                    h_q = _mma(column, _right(_square(off_q[n], b).permute((1, 0)), KC), h_q)
                    h_k = _mma(column, _right(_square(off_k[n], b).permute((1, 0)), KC), h_k)
                straddle = straddles[b] + fluxes[b] * (decays[b] * behind)
                straddles = (straddles[0] + passed[0], straddles[1] + passed[1], straddles[2] + passed[2], end)
                behind *= decays[b]
                d_g = zero + gl.convert_layout(gl.sum(straddle, 1), _channels(ACC))[:, None]
                row = _as_left(b_qp * h_q + b_kp * h_k, WS)
                d_g = _select(row, _right(_square(keeps_side, UP_TO), KC), d_g)
                d_q = p * h_q
                d_k = p * h_k
                if not BETA_SIGMOID:
                    k_d = b_k * d_k
                    d_k *= beta

                # columns of this block with what lies behind it
                for n in gl.static_range(3, b, -1):
                    h_c *= _all_rows(decays[n])
                    h_c = _mma(_left(s_qp[n - 1]), _right(_square(off_q[b], n), KC), h_c)
                    h_c = _mma(_left(s_kp[n - 1]), _right(_square(off_k[b], n), KC), h_c)
                h_c *= y
                d_k += h_c
                d_g = _select(_as_left(b_k * h_c, WS), _right(_square(keeps_side, BEHIND), KC), d_g)

                # pairs inside this block
                upper = (r >= 8)[None, :]
                d_q, d_k, d_g, x = _half_pairs(
                    b_q, b_k, terms, _square(terms_level, 0), _square(keeps_level, 0), _square(lvl_q[0], b),
                    _square(lvl_k[0], b), gl.where(upper, beta, 1.0), d_q, d_k, d_g, WS, BETA_SIGMOID,
                )  # fmt: skip
                if not BETA_SIGMOID:
                    k_d += gl.where(upper, x, 0.0)
                for n in gl.static_range(1, 3):
                    upper = ((r // (8 >> n)) % 2 == 1)[None, :]
                    d_q, d_k, d_g, x = _level_pairs(
                        b_q, b_k, terms, _square(terms_level, n), _square(keeps_level, n), _square(lvl_q[n], b),
                        _square(lvl_k[n], b), gl.where(upper, beta, 1.0), d_q, d_k, d_g, WS, BETA_SIGMOID,
                    )  # fmt: skip
                    if not BETA_SIGMOID:
                        k_d += gl.where(upper, x, 0.0)
                terms = gl.convert_layout(terms, ACC)
                b_odd = 1.0
                if not BETA_SIGMOID:
                    b_odd = gl.load(p_odd + b * 16)[None, :]
                d_q, d_k, d_g, x = _neighbour_pairs(
                    b_q, b_k, terms, _row(s_rows[5], b, _rows(_eight(KC))), _row(s_rows[6], b, _rows(_eight(KC))),
                    b_odd, d_q, d_k, d_g, BETA_SIGMOID,
                )  # fmt: skip
                if not BETA_SIGMOID:
                    k_d = gl.sum(_add_pairs(k_d, None, x), 0)
                    gl.store(k_dk + (i_ch * SLICES + i_s) * C + b * 16 + r, k_d)
                w_ii = _row(s_rows[4], b, _rows(ACC))
                d_q += w_ii * b_k
                d_k += w_ii * b_q

                # norm and gate
                if L2NORM:
                    d_q = d_q * _row(s_rows[0], b, _rows(ACC)) - b_q * _row(s_rows[1], b, _rows(ACC))
                    d_k = d_k * _row(s_rows[2], b, _rows(ACC)) - b_k * _row(s_rows[3], b, _rows(ACC))
                else:
                    d_q *= scale
                d_raw = d_g
                if GATE != "none":
                    d_raw = d_g * s_raw[b].load(ACC)
                    s_bias += _partial(d_raw)
                if GATE == "softplus":
                    s_A += _partial(d_g * terms.to(gl.float32))
                elif GATE == "bounded":
                    s_A += _partial(d_raw * b_z)
                at = at_out + b * 16 * OUT_T
                gl.store(dq + at, _to_mem(d_q).to(dq.dtype.element_ty), mask=m)
                gl.store(dk + at, _to_mem(d_k).to(dk.dtype.element_ty), mask=m)
                gl.store(dg + at, _to_mem(d_raw).to(dg.dtype.element_ty), mask=m)
            if GATE != "none":
                if GATE == "softplus":
                    s_A *= LN_2
                gl.store(dA + i_ch * SLICES + i_s, gl.sum(gl.sum(s_A, 1), 0))
                gl.store(dbias + i_ch * K + k0 + o_c, gl.sum(s_bias, 1), mask=o_c < left)
    elif GATE != "none":  # a chunk without tokens
        for i_s in range(SLICES):
            gl.store(dA + i_ch * SLICES + i_s, 0.0)
            gl.store(dbias + i_ch * K + i_s * KC + o_c, o_c * 0.0, mask=o_c < K - i_s * KC)
