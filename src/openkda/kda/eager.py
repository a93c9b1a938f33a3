"""Kimi Delta Attention in chunks of 64 tokens, matmuls only, on any device: the fast definition.

Gradients are the library's autograd around three derivatives by hand: `IntraChunk`, `Scan` and `RoundedMatmul`.

Names are those of docs/maths.md; q stands for scale * q, b for beta, * is elementwise. Per chunk and value head:

    F_h, Din, Dout, Dall    decay factors, every exponent <= 0           `decay_factors`, `IntraChunk`
    Akk, Aqk [C, C]         k_i . k_j and q_i . k_j under the decay      `intra_chunk_scores`, `IntraChunk`
    A = (I + diag(b) Akk)^-1                                             `triangular_inverse`
    Vn = A (b * (v - (k * Din) S))       the written values [C, V]       `chunk_states`: serial over chunks
    S' = Dall * S + (k * Dout)^T Vn      the state after the chunk       `chunk_states`
    O  = (q * Din) S + Aqk Vn                                            `chunk_kda`

Exact for any finite g <= 0. A decay between two tokens is exp of a sum of terms of one sign, never of a difference of
cumulative sums: those lose 5e-4 in fp32 where -1000 meets -0.01. Chunks are halved again and again for that
(`decay_factors`): pairs of tokens in different 16-row blocks meet at levels 32 and 16, pairs inside one at levels 8, 4,
2 and 1. Memory is linear in T; the largest tensors are [T, HV, K], and [T / 64, HV, K, V] for the states.

Errors of 16-bit kernels are judged against this file with operand_dtype="bfloat16": every matmul operand rounded,
forward and backward; accumulation, exponents, inverse and the residual v - S^T k stay in fp32.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from openkda import frameworks, packing
from openkda.kda import gate
from openkda.kda.contract import state_dtype
from openkda.norm.eager import l2norm

CHUNK = 64  # tokens of a chunk, C
LEVELS = (1, 2, 4, 8, 16, 32)  # a chunk is halved until one row is left


def chunk_kda(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    *,
    scale: float | None = None,
    initial_state: Any | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    A_log: Any | None = None,
    dt_bias: Any | None = None,
    lower_bound: float | None = None,
    cu_seqlens: Any | None = None,
    state_v_first: bool = False,
    operand_dtype: str | None = None,
    valid: Any | None = None,
) -> tuple[Any, Any | None]:
    """`openkda.chunk_kda` on the eager path, arguments unchecked; see there.

    operand_dtype ("bfloat16" or "float16") rounds the operands of every matmul, forward and backward; None does not
    round. valid (bool [64], for dense input of 64 tokens) tells which rows are tokens.
    """
    fw = frameworks.of(q)
    dtype, out_dtype, (B, T, H, K), HV = state_dtype(fw, q), fw.dtype_name(v), fw.shape(q), fw.shape(v)[2]
    if B * T == 0:
        N = B if cu_seqlens is None else fw.shape(cu_seqlens)[0] - 1
        size = (N, HV, fw.shape(v)[3], K) if state_v_first else (N, HV, K, fw.shape(v)[3])
        state = fw.zeros(size, like=v, dtype=dtype) if initial_state is None else initial_state * 1.0
        return v * 1.0, state if output_final_state else None
    chunks = Chunks(fw, v, T, cu_seqlens)
    if valid is not None:
        chunks.valid = fw.reshape(valid, (1, 1, CHUNK, 1, 1))
    q, k, v, g, beta = (fw.cast(chunks.split(x), dtype) for x in (q, k, v, g, fw.reshape(beta, (B, T, HV, 1))))

    # Activations, [R, NC, C, heads, ..]. Rows of padding hold zeros here, whatever the tail of the inputs holds.
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    if use_gate_in_kernel:
        g = gate.activate(g, A_log, dt_bias, lower_bound, dtype)
    if use_beta_sigmoid_in_kernel:
        beta = (2 if allow_neg_eigval else 1) * fw.sigmoid(beta)
    if chunks.valid is not None:  # a row of padding neither decays nor writes
        g, beta = (fw.where(chunks.valid, x, 0.0) for x in (g, beta))
    q = q * (K**-0.5 if scale is None else scale)
    q, k = (fw.repeat(x, HV // H, 3) for x in (q, k))
    # [R, NC, HV, C, ..], each chunk's rows in order: all that follows works on whole chunks
    q, k, v, g, beta = (fw.contiguous(fw.permute(x, (0, 1, 3, 2, 4))) for x in (q, k, v, g, beta))

    mm = Matmul(fw, operand_dtype)
    aqk, akk, d_in, d_out, d_all = fw.custom(IntraChunk, q, k, g, operand_dtype)
    inverse = triangular_inverse(fw, beta, level_blocks(fw, akk))
    S0 = fw.swap(initial_state) if state_v_first and initial_state is not None else initial_state
    operands = (inverse, beta * akk, beta, v, k * d_in, k * d_out, d_all)
    S, v_new, S_last = chunk_states(fw, chunks, S0, operands, operand_dtype)
    o = mm(q * d_in, S) + mm(aqk, v_new)  # [R, NC, HV, C, V]

    o = fw.cast(chunks.join(o), out_dtype)
    return o, (fw.swap(S_last) if state_v_first else S_last) if output_final_state else None


# ---------------------------------------------------------------- tokens <-> chunks
class Chunks:
    """Cuts [B, T, ..] into R rows of NC chunks: R = B where dense; R = 1 where packed, and NC is then a capacity.

    valid is bool, broadcasting to [R, NC, C, 1, 1], or None where every row of every chunk is a token.
    """

    def __init__(self, fw: ModuleType, like: Any, T: int, cu_seqlens: Any | None) -> None:
        self.fw, self.T, self.NC = fw, T, -(-T // CHUNK)
        self.table: packing.ChunkTable | None = None
        self.valid: Any | None = None
        if cu_seqlens is not None:
            self.table = packing.chunk_table(cu_seqlens, T, CHUNK)
            self.NC = fw.shape(self.table.valid)[0]
            self.valid = self.table.valid[None, :, :, None, None]
        elif T % CHUNK:
            self.valid = fw.reshape(fw.arange(self.NC * CHUNK, like=like) < T, (1, self.NC, CHUNK, 1, 1))

    def split(self, x: Any) -> Any:
        """[B, T, heads, D] -> [R, NC, C, heads, D]; rows of padding are 0."""
        fw, (B, T, heads, D) = self.fw, self.fw.shape(x)
        if self.table is None:
            return fw.reshape(fw.pad(x, 1, 0, self.NC * CHUNK - T), (B, self.NC, CHUNK, heads, D))
        rows = fw.take(fw.pad(x[0], 0, 0, 1), fw.reshape(self.table.tokens, (self.NC * CHUNK,)), 0)
        return fw.reshape(rows, (1, self.NC, CHUNK, heads, D))

    def join(self, x: Any) -> Any:
        """[R, NC, heads, C, D] -> [B, T, heads, D]; the tail is 0."""
        fw, (R, _, heads, _, D) = self.fw, self.fw.shape(x)
        rows = fw.reshape(fw.permute(x, (0, 1, 3, 2, 4)), (R, self.NC * CHUNK, heads, D))
        if self.table is None:
            return rows[:, : self.T]
        return fw.take(fw.pad(rows[0], 0, 0, 1), self.table.rows, 0)[None]


# ---------------------------------------------------------------- matmuls, rounded on demand
class Matmul:
    """mm(x, y) = x @ y, with both operands rounded to operand_dtype first if one is given."""

    def __init__(self, fw: ModuleType, operand_dtype: str | None) -> None:
        self.fw, self.operand_dtype = fw, operand_dtype

    def __call__(self, x: Any, y: Any) -> Any:
        if self.operand_dtype is None:
            return self.fw.matmul(x, y)
        return self.fw.custom(RoundedMatmul, x, y, self.operand_dtype)


def rounded_product(fw: ModuleType, x: Any, y: Any, operand_dtype: str | None) -> Any:
    if operand_dtype is not None:
        x, y = (fw.cast(fw.cast(t, operand_dtype), fw.dtype_name(t)) for t in (x, y))
    if fw.shape(y)[-2] == 1:  # the blocks of levels 1 and 2: outer products, for which a matmul is many times slower
        return x * y
    if fw.shape(y)[-2] == 2:
        return x[..., :1] * y[..., :1, :] + x[..., 1:] * y[..., 1:, :]
    return fw.matmul(x, y)


class RoundedMatmul:
    """x @ y whose operands are rounded, forward and backward, and whose sums are not."""

    @staticmethod
    def forward(fw: ModuleType, ctx: Any, x: Any, y: Any, operand_dtype: str) -> Any:
        ctx.save_for_backward(x, y)
        ctx.operand_dtype = operand_dtype
        return rounded_product(fw, x, y, operand_dtype)

    @staticmethod
    def backward(fw: ModuleType, ctx: Any, dz: Any) -> tuple:
        x, y = ctx.saved_tensors
        dx = rounded_product(fw, dz, fw.swap(y), ctx.operand_dtype) if ctx.needs_input_grad[0] else None
        dy = rounded_product(fw, fw.swap(x), dz, ctx.operand_dtype) if ctx.needs_input_grad[1] else None
        return dx, dy, None


# ---------------------------------------------------------------- decay
def _halves(fw: ModuleType, x: Any, h: int) -> tuple[Any, Any]:
    """[.., C, D] -> lower and upper halves [.., C / 2h, h, D] of every block of 2h rows."""
    *lead, C, D = fw.shape(x)
    lower, upper = fw.unstack(fw.reshape(x, (*lead, C // (2 * h), 2, h, D)), -3)
    return lower, upper


def decay_factors(fw: ModuleType, g: Any) -> tuple[dict[int, tuple[Any, Any]], Any, Any, Any]:
    """Log-decay g [.., C, K] -> ({h: F_h}, Din [.., C, K], Dout [.., C, K], Dall [.., K]); no autograd.

    At level h the chunk falls into blocks of 2h rows, cut in the middle at row m. A pair (i upper, j lower) decays by
    F_h(i) F_h(j):

        upper half   F_h(i) = exp(g_m + .. + g_i)                lower half   F_h(j) = exp(g_{j+1} + .. + g_{m-1})

    Levels 32, 16, .. 1 cover every pair j < i once. Din(i) = exp(g_0 + .. + g_i) carries the state to row i, Dout(j) =
    exp(g_{j+1} + .. + g_{C-1}) carries row j to the end, Dall = exp of the whole sum. F_h comes as (lower, upper),
    [.., C / 2h, h, K]. All sums come from one tree: each is made of shorter ones, so every exponent is <= 0 and no
    difference is ever formed.
    """
    # Sums up to a row, and after it, within its block of h rows; a step of the loop makes blocks of 2h rows.
    prefix, suffix, levels = fw.copy(g), fw.zeros(fw.shape(g), like=g), {}
    for h in LEVELS:
        (prefix_l, prefix_u), (suffix_l, _) = _halves(fw, prefix, h), _halves(fw, suffix, h)
        levels[h] = fw.exp(suffix_l), fw.exp(prefix_u)
        total_l, total_u = fw.copy(prefix_l[..., -1:, :]), fw.copy(prefix_u[..., -1:, :])
        fw.add_to_half_(prefix, h, 1, total_l)
        fw.add_to_half_(suffix, h, 0, total_u)
    d_in = fw.exp(prefix)
    return levels, d_in, fw.exp(suffix), fw.copy(d_in[..., -1, :])


def decay_gradient(fw: ModuleType, d_levels: dict[int, tuple[Any, Any]], d_prefix: Any, d_suffix: Any) -> Any:
    """dg [.., C, K] from the gradients of the exponents: of every level (lower, upper), of Din's and of Dout's.

    The tree of `decay_factors` from its root down. It only adds: a small dg is never what a cancellation left over.
    Writes to d_prefix and d_suffix.
    """
    for h in reversed(LEVELS):
        lower, upper = d_levels[h]
        d_total_l = fw.sum(_halves(fw, d_prefix, h)[1], -2)  # [.., C / 2h, K]
        d_total_u = fw.sum(_halves(fw, d_suffix, h)[0], -2)
        fw.add_to_half_(d_prefix, h, 1, upper)
        fw.add_to_half_(d_suffix, h, 0, lower)
        totals = fw.stack([d_total_l, d_total_u], -2)
        fw.add_to_last_rows_(d_prefix, h, fw.reshape(totals, (*fw.shape(d_prefix)[:-2], -1, fw.shape(d_prefix)[-1])))
    return d_prefix


# ---------------------------------------------------------------- inside a chunk
def _merge(fw: ModuleType, diagonal: Any, low: Any) -> Any:
    """Blocks on the diagonal [.., 2n, h, h] and the ones below them [.., n, h, h] -> [.., n, 2h, 2h]."""
    *lead, n, h, _ = fw.shape(low)
    first, second = fw.unstack(fw.reshape(diagonal, (*lead, n, 2, h, h)), -3)
    return fw.concat([fw.concat([first, fw.zeros(fw.shape(low), like=low)], -1), fw.concat([low, second], -1)], -2)


def level_blocks(fw: ModuleType, a: Any) -> dict[int, Any]:
    """The blocks {h: [.., C / 2h, h, h]} of a strictly lower triangle [.., C, C], by level: `_merge` undone."""
    blocks, rest = {}, a[..., None, :, :]
    for h in reversed(LEVELS):
        *lead, n, _, _ = fw.shape(rest)
        upper, lower = fw.split(rest, [h, h], -2)
        first, _ = fw.split(upper, [h, h], -1)
        blocks[h], second = fw.split(lower, [h, h], -1)
        rest = fw.reshape(fw.stack([first, second], -3), (*lead, 2 * n, h, h))
    return {h: blocks[h] for h in LEVELS}


def intra_chunk_scores(mm: Matmul, q: Any, k: Any, levels: dict[int, tuple[Any, Any]]) -> tuple[Any, Any]:
    """Aqk [.., C, C] (i >= j) and Akk [.., C, C] (i > j).

        Aqk_ij = sum_d q_id k_jd exp(g_{j+1,d} + .. + g_{i,d})        and Akk with k_i in place of q_i

    On the diagonal of Aqk no decay acts: it is q_i . k_i, elementwise, and never meets a factor.
    """
    fw = mm.fw
    aqk = fw.sum(q * k, -1)[..., None, None]  # [.., C, 1, 1]: blocks of one row
    akk = fw.zeros(fw.shape(aqk), like=aqk)
    for h, (lower, upper) in levels.items():
        (_, q_upper), (k_lower, k_upper) = _halves(fw, q, h), _halves(fw, k, h)
        columns = fw.swap(k_lower * lower)  # [.., C / 2h, K, h]
        aqk = _merge(fw, aqk, mm(q_upper * upper, columns))
        akk = _merge(fw, akk, mm(k_upper * upper, columns))
    return aqk[..., 0, :, :], akk[..., 0, :, :]


class IntraChunk:
    """All of a chunk that needs no state: q, k [.., C, K] and log-decay g -> Aqk, Akk [.., C, C]; Din, Dout, Dall.

    Per level, with Qr = q F, Kr = k F on the upper rows, Kc = k F on the lower ones, and da, dl the level's blocks of
    dAqk, dAkk:

        dQr = da Kc    dKr = dl Kc    dKc = da^T Qr + dl^T Kr          dq, dk: times F, on their own rows
        the gradient of F's exponent is Qr * dQr + Kr * dKr (upper) and Kc * dKc (lower)
    """

    ONCE = "chunk_kda"

    @staticmethod
    def forward(fw: ModuleType, ctx: Any, q: Any, k: Any, g: Any, operand_dtype: str | None) -> tuple:
        levels, d_in, d_out, d_all = decay_factors(fw, g)
        aqk, akk = intra_chunk_scores(Matmul(fw, operand_dtype), q, k, levels)
        ctx.save_for_backward(q, k, d_in, d_out, *(factor for pair in levels.values() for factor in pair))
        ctx.operand_dtype = operand_dtype
        return aqk, akk, d_in, d_out, d_all

    @staticmethod
    def backward(fw: ModuleType, ctx: Any, d_aqk: Any, d_akk: Any, d_din: Any, d_dout: Any, d_dall: Any) -> tuple:
        q, k, d_in, d_out, *factors = ctx.saved_tensors
        q_blocks, k_blocks = level_blocks(fw, d_aqk), level_blocks(fw, d_akk)

        def product(x: Any, y: Any) -> Any:
            return rounded_product(fw, x, y, ctx.operand_dtype)

        diagonal = fw.diagonal(d_aqk)[..., None]
        dq, dk, d_levels = diagonal * k, diagonal * q, {}
        for h, lower, upper in zip(LEVELS, factors[::2], factors[1::2], strict=True):
            (_, q_upper), (k_lower, k_upper) = _halves(fw, q, h), _halves(fw, k, h)
            da, dl = q_blocks[h], k_blocks[h]
            qr, kr, kc = q_upper * upper, k_upper * upper, k_lower * lower
            dqr, dkr = product(da, kc), product(dl, kc)
            dkc = product(fw.swap(da), qr) + product(fw.swap(dl), kr)
            d_levels[h] = kc * dkc, qr * dqr + kr * dkr
            fw.add_to_half_(dq, h, 1, dqr, upper)
            fw.add_to_half_(dk, h, 1, dkr, upper)
            fw.add_to_half_(dk, h, 0, dkc, lower)
        d_prefix, d_suffix = (fw.contiguous(x * dx) for x, dx in ((d_in, d_din), (d_out, d_dout)))
        fw.add_to_last_rows_(d_prefix, CHUNK, (d_in[..., -1, :] * d_dall)[..., None, :])  # Dall is Din's last row
        return dq, dk, decay_gradient(fw, d_levels, d_prefix, d_suffix), None


def triangular_inverse(fw: ModuleType, beta: Any, akk_blocks: dict[int, Any]) -> Any:
    """(I + diag(beta) Akk)^-1 [.., C, C], unrounded, outside autograd (`Scan` has the derivative).

    By doubling: the inverse of [[P, 0], [N, Q]] is [[P^-1, 0], [-Q^-1 N P^-1, Q^-1]]. Only true inverses are
    multiplied, so equal keys with beta = 1 and slow decay do no harm; a Neumann series loses all digits there.
    """
    with fw.no_grad():
        inverse = fw.ones((*fw.shape(beta), 1), like=beta)  # [.., C, 1, 1]
        for h, block in akk_blocks.items():
            n = _halves(fw, beta, h)[1] * block  # rows of the block belong to the upper half
            *lead, count, _, _ = fw.shape(n)
            first, second = fw.unstack(fw.reshape(inverse, (*lead, count, 2, h, h)), -3)
            low = -fw.matmul(second, fw.matmul(n, first))
            inverse = _merge(fw, inverse, low)
    return inverse[..., 0, :, :]


# ---------------------------------------------------------------- across chunks
def chunk_states(
    fw: ModuleType, chunks: Chunks, S0: Any | None, operands: tuple[Any, ...], operand_dtype: str | None
) -> tuple[Any, Any, Any]:
    """Carry the state over the chunks, in order.

    operands: inverse, n [R, NC, HV, C, C]; beta [.., C, 1]; v [.., C, V]; kd = k Din, kg = k Dout [.., C, K]; Dall
        [.., K].
    S0: [N, HV, K, V] or None for zeros.
    Returns S before every chunk [R, NC, HV, K, V], the written values Vn [R, NC, HV, C, V], the final states
        [N, HV, K, V].
    """
    table, first, starts = chunks.table, None, S0
    if table is not None:
        first = table.first
        starts = None if S0 is None else fw.take(S0, table.sequence, 0)  # [NC, HV, K, V]
    before, v_new, after = fw.custom(Scan, starts, *operands, first, operand_dtype)
    if table is None:
        return before, v_new, after
    # An empty slot has no chunk: it passes its initial state through, bit for bit.
    N = fw.shape(table.last_chunk)[0]
    through = fw.zeros((N, *fw.shape(after)[1:]), like=after) if S0 is None else S0
    return before, v_new, fw.take(fw.concat([after, through], 0), table.last_chunk, 0)


class Scan:
    """Per chunk, from the state S before it:  Vn = A (b * (v - Kd S)),  S' = Dall * S + Kg^T Vn.

    Backwards, with dS' the gradient of the state after the chunk and L = I + n = A^-1:

        dVn += Kg dS'    X = A^T dVn    dS += Dall * dS' - Kd^T (b * X)                         in order
        dn = -stril(X Vn^T)    db = X . (v - Kd S)    dv = b * X    dKd = -(b * X) S^T          all chunks at once
        dKg = Vn dS'^T         dDall = S . dS'

    A itself needs no derivative, as Vn = L^-1 R gives dL = -(L^-T dVn) Vn^T.
    """

    ONCE = "chunk_kda"

    @staticmethod
    def forward(
        fw: ModuleType,
        ctx: Any,
        starts: Any | None,  # dense: [R, HV, K, V]; packed: [NC, HV, K, V], read where a chunk begins a sequence
        inverse: Any,
        n: Any,
        beta: Any,
        v: Any,
        kd: Any,
        kg: Any,
        d_all: Any,
        first: Any | None,  # packed: bool [NC], the chunk begins a sequence
        operand_dtype: str | None,
    ) -> tuple:
        R, NC, HV, _, K = fw.shape(kd)
        zeros = fw.zeros((R, HV, K, fw.shape(v)[-1]), like=v)
        S = zeros if starts is None or first is not None else starts
        before, residuals, values, after = [], [], [], []
        for c in range(NC):
            if first is not None:
                S = fw.where(first[c], zeros if starts is None else starts[c][None], S)
            residual = v[:, c] - rounded_product(fw, kd[:, c], S, operand_dtype)
            v_new = rounded_product(fw, inverse[:, c], beta[:, c] * residual, operand_dtype)
            before.append(S)
            residuals.append(residual)
            values.append(v_new)
            S = d_all[:, c, ..., None] * S + rounded_product(fw, fw.swap(kg[:, c]), v_new, operand_dtype)
            after.append(S)
        before, residuals, values = (fw.stack(x, 1) for x in (before, residuals, values))
        packed = () if first is None else (first,)
        ctx.save_for_backward(inverse, beta, kd, kg, d_all, before, residuals, values, *packed)
        ctx.operand_dtype, ctx.has_starts = operand_dtype, starts is not None
        return before, values, fw.copy(S) if first is None else fw.concat(after, 0)

    @staticmethod
    def backward(fw: ModuleType, ctx: Any, d_before: Any, d_values: Any, d_after: Any) -> tuple:
        inverse, beta, kd, kg, d_all, before, residuals, values, *packed = ctx.saved_tensors
        first = packed[0] if packed else None
        zeros, operand_dtype = fw.zeros(fw.shape(before[:, 0]), like=before), ctx.operand_dtype
        dS = d_after if first is None else zeros
        xs, d_states, d_starts = [], [], []
        for c in reversed(range(fw.shape(kd)[1])):
            if first is not None:
                dS = dS + d_after[c][None]
            d_v_new = d_values[:, c] + rounded_product(fw, kg[:, c], dS, operand_dtype)
            x = rounded_product(fw, fw.swap(inverse[:, c]), d_v_new, operand_dtype)
            xs.append(x)
            d_states.append(dS)
            back = rounded_product(fw, fw.swap(kd[:, c]), beta[:, c] * x, operand_dtype)
            dS = d_before[:, c] + d_all[:, c, ..., None] * dS - back
            if first is not None:
                d_starts.append(fw.where(first[c], dS, zeros))
                dS = fw.where(first[c], zeros, dS)
        x, d_state = fw.stack(xs[::-1], 1), fw.stack(d_states[::-1], 1)
        dv = beta * x
        dn = fw.tril(-rounded_product(fw, x, fw.swap(values), operand_dtype), -1)
        dkd = -rounded_product(fw, dv, fw.swap(before), operand_dtype)
        dkg = rounded_product(fw, values, fw.swap(d_state), operand_dtype)
        d_beta, d_dall = fw.sum(x * residuals, -1, keepdim=True), fw.sum(before * d_state, -1)
        d_start = None
        if ctx.has_starts:
            d_start = dS if first is None else fw.concat(d_starts[::-1], 0)
        return d_start, None, dn, d_beta, dv, dkd, dkg, d_dall, None, None
