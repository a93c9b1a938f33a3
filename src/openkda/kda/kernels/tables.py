"""Where every chunk lies: the layout that all kernel stages share, with sizes from shapes alone.

Workspaces are chunk-major, [NC, HV, C, width]: row r of chunk c is one token of one sequence. Dense needs no table:

    chunk c of [B, T, ..]     batch b = c // ceil(T/C), rows from token (c % ceil(T/C)) * C of it; NC = B * ceil(T/C)

Packed input (B = 1, offsets cu) is laid out without a prefix sum; a chunk finds its place from the offsets alone:

    first chunk of slot n     f(n) = cu[n] // C + n            NC = T // C + N

f leaves room for ceil(L / C) chunks of every slot: with cu[n] = aC + r and L = bC + s, 0 < s <= C, f(n+1) - f(n) is
at least b + 1. What is left over, at most one chunk a slot, has no rows: kernels skip it, nothing reads its workspace.

A group is up to m consecutive chunks of one sequence, the unit of the parallel re-scan in the backward. The state
before a group is its checkpoint; the first group of a sequence starts from the initial state and has none:

    checkpoint of group j >= 1 of slot n     f(n) // m + j - 1             (dense: f(n) = n * ceil(T/C))
    first group of slot n                    f(n) // m + n                 groups = NC // m + N

cost of the tables      one launch, reads the offsets log2(N) times a chunk, writes 16 * (NC + groups) bytes
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# (a launch passes plain values for constexpr parameters, and loops over tl.range)
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from openkda import frameworks
from openkda.kda.kernels.launch import launch

CHUNK = 64  # C, tokens in a chunk: the size for which maths.md counts flops and bytes
GROUP = 4  # m, chunks in a group: bf16 checkpoints then take 128 bytes a token and head (K = V = 128)


@dataclass(frozen=True)
class Layout:
    """Sizes and tables of one call. B, T: of the input; N: sequences (B when dense)."""

    B: int
    T: int
    N: int
    num_chunks: int  # NC, by capacity
    num_groups: int  # by capacity
    num_checkpoints: int  # by capacity
    chunks_per_sequence: int  # ceil(T / C) when dense
    cu_seqlens: Any | None  # [N+1] int32 or int64; None when dense
    chunks: Any | None  # int32 [NC, 4]: first token, valid rows, sequence, index within the sequence; None when dense
    groups: Any | None  # int32 [num_groups, 4]: first chunk, chunks in it, sequence, index within it; None when dense

    @property
    def packed(self) -> bool:
        return self.cu_seqlens is not None


@triton.jit
def _slot_of(cu_seqlens, at, N, C: tl.constexpr, M: tl.constexpr, STEPS: tl.constexpr):
    """The last slot n in [0, N) with f(n) // M + (n if M > 1) <= at, by bisection: that grows with n."""
    low = tl.zeros_like(at)
    high = tl.zeros_like(at) + N
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        start = (tl.load(cu_seqlens + middle) // C).to(tl.int32) + middle
        if M > 1:
            start = start // M + middle
        low = tl.where((high - low > 1) & (start <= at), middle, low)
        high = tl.where((high - low > 1) & (start > at), middle, high)
    return low


@triton.jit(do_not_specialize=["N", "num_chunks", "num_groups"])
def _tables_kernel(
    cu_seqlens, chunks, groups, N, num_chunks, num_groups, C: tl.constexpr, M: tl.constexpr, STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)

    # Chunk `at`: its slot n, and rows up to the end of n; none in the room that f leaves behind a slot.
    n = _slot_of(cu_seqlens, at, N, C, 1, STEPS)
    begin, end = tl.load(cu_seqlens + n), tl.load(cu_seqlens + n + 1)
    index = at - ((begin // C).to(tl.int32) + n)
    first = begin + index * C
    rows = tl.minimum(tl.maximum(end - first, 0), C)
    p_chunk = chunks + at * 4
    tl.store(p_chunk, tl.minimum(first, end).to(tl.int32), mask=at < num_chunks)
    tl.store(p_chunk + 1, rows.to(tl.int32), mask=at < num_chunks)
    tl.store(p_chunk + 2, n, mask=at < num_chunks)
    tl.store(p_chunk + 3, index, mask=at < num_chunks)

    # Group `at`: the same with groups of M chunks.
    n = _slot_of(cu_seqlens, at, N, C, M, STEPS)
    begin, end = tl.load(cu_seqlens + n), tl.load(cu_seqlens + n + 1)
    first = (begin // C).to(tl.int32) + n
    group = at - (first // M + n)
    size = tl.minimum(tl.maximum(tl.cdiv(end - begin, C).to(tl.int32) - group * M, 0), M)
    p_group = groups + at * 4
    tl.store(p_group, first + group * M, mask=at < num_groups)
    tl.store(p_group + 1, size, mask=at < num_groups)
    tl.store(p_group + 2, n, mask=at < num_groups)
    tl.store(p_group + 3, group, mask=at < num_groups)


def dense_layout(B: int, T: int, *, chunk_size: int = CHUNK, group: int = GROUP) -> Layout:
    """The layout of B sequences of T tokens each."""
    per_sequence = -(-T // chunk_size)
    chunks = B * per_sequence
    return Layout(B, T, B, chunks, B * -(-per_sequence // group), chunks // group, per_sequence, None, None, None)


def make_layout(x: Any, cu_seqlens: Any | None, *, chunk_size: int = CHUNK, group: int = GROUP) -> Layout:
    """The layout of x [B, T, ..]; with offsets, one launch and no host synchronisation.

    A grid made from `num_chunks` covers every chunk; so does one from `num_groups` for groups.
    """
    B, T = int(x.shape[0]), int(x.shape[1])
    if cu_seqlens is None:
        return dense_layout(B, T, chunk_size=chunk_size, group=group)
    fw = frameworks.of(cu_seqlens)
    N = int(cu_seqlens.shape[0]) - 1
    num_chunks = T // chunk_size + N
    num_groups = num_chunks // group + N
    chunks = fw.empty((num_chunks, 4), like=cu_seqlens, dtype="int32")
    groups = fw.empty((num_groups, 4), like=cu_seqlens, dtype="int32")
    if N > 0:
        block = 128
        with fw.on_device(cu_seqlens):
            launch(
                _tables_kernel, -(-max(num_groups, num_chunks) // block), cu_seqlens, chunks, groups,
                N, num_chunks, num_groups, C=chunk_size, M=group,
                STEPS=max(N - 1, 1).bit_length() + 1, BLOCK=block,
            )  # fmt: skip
    return Layout(B, T, N, num_chunks, num_groups, num_chunks // group, 0, cu_seqlens, chunks, groups)


@triton.jit
def _zero_tail_kernel(x, cu_seqlens, N, numel, ROW: tl.constexpr, BLOCK: tl.constexpr):
    num_programs = tl.num_programs(0)
    start = tl.load(cu_seqlens + N).to(tl.int64) * ROW + tl.program_id(0).to(tl.int64) * BLOCK
    while start < numel:
        at = start + tl.arange(0, BLOCK)
        tl.store(x + at, tl.zeros([BLOCK], x.dtype.element_ty), mask=at < numel)
        start += num_programs.to(tl.int64) * BLOCK


def zero_tail(x: Any, layout: Layout) -> None:
    """Write 0 to the rows of x [1, T, ..] (contiguous) that lie at or behind the last offset. Nothing to do when dense.

    cost       writes only the tail; grid at most 1024 programs, each of which walks over it
    """
    numel = math.prod(int(n) for n in x.shape)
    if not layout.packed or numel == 0:
        return
    fw = frameworks.of(x)
    block = 2048
    with fw.on_device(x):
        launch(
            _zero_tail_kernel,
            min(-(-numel // block), 1024),
            x,
            layout.cu_seqlens,
            layout.N,
            numel,
            ROW=numel // layout.T,
            BLOCK=block,
        )
