"""Decoding with the bits of `chunk_kda`: the unfinished chunk of every sequence is kept, and run again at every step.

    kept        S after the last full chunk, and the raw rows (q, k, v, g, beta) of the chunk that is not full yet
    a step      appends its rows, runs the chunk from S through `chunk_kda(batch_invariant=True)`, and gives out the
                outputs of the new rows; a chunk that is full moves S on

A chunk gives the same bits whatever stands behind its last row and wherever it comes from, so outputs and states are
those of one call on the whole sequence, however it is cut into calls. A step computes 64 rows instead of one: the state
is read as by `recurrent_kda`, but written only once in 64 steps.

All sizes come from shapes; how far each sequence has come is on the device. A recorded CUDA graph replays.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from openkda import checks, frameworks, packing
from openkda.kda.contract import Sizes, check_state

CHUNK = 64  # C, tokens of a chunk, as in every backend of chunk_kda


class ReplayState(NamedTuple):
    """What N sequences leave behind: `recurrent_kda(batch_invariant=True)` returns it and takes it back."""

    state: Any  # [N, HV, K, V] ([N, HV, V, K] with state_v_first), after the last full chunk
    q: Any  # [N, C, H, K]: rows of the unfinished chunk as they were given; 0 behind the last one
    k: Any  # [N, C, H, K]
    v: Any  # [N, C, HV, V]
    g: Any  # [N, C, HV, K]
    beta: Any  # [N, C, HV]
    length: Any  # int64 [N], 0 .. C - 1: rows so far

    def select(self, index: Any) -> ReplayState:
        """The sequences named by index (int64 `[N']`), in its order."""
        return ReplayState._make(frameworks.of(x).take(x, index, 0) for x in self)


def check_replay_state(op: str, before: Any, tokens: tuple, sizes: Sizes, *, v_first: bool) -> None:
    """A ReplayState, or a plain state where a chunk begins, that fits the tokens."""
    if not isinstance(before, ReplayState):
        return check_state(op, "initial_state", before, tokens[0], sizes, v_first=v_first)
    check_state(op, "initial_state.state", before.state, tokens[0], sizes, v_first=v_first)
    fw = frameworks.of(tokens[0])
    for name, rows, x in zip("q k v g beta".split(), before[1:6], tokens, strict=True):
        name = f"initial_state.{name}"
        checks.dtype(op, name, rows, (fw.dtype_name(x),), "the rows of a chunk share one dtype")
        checks.shape(op, name, rows, (sizes.N, CHUNK, *x.shape[2:]), f"[N, {CHUNK}, ..]")
    checks.dtype(op, "initial_state.length", before.length, ("int64",))
    checks.shape(op, "initial_state.length", before.length, (sizes.N,), "[N]")


def replay(
    chunk_kda: Callable[..., Any], tokens: tuple, before: Any | None, sizes: Sizes, cu_seqlens: Any | None,
    v_first: bool, dtype: str,
) -> tuple[Any, ReplayState]:  # fmt: skip
    """Outputs of the new tokens, and what is left behind.

    Args:
        chunk_kda: Takes tokens, initial_state, output_final_state and cu_seqlens; batch invariant.
        tokens: q, k, v, g, beta, new ones only; dense, or packed with cu_seqlens.
        before: A ReplayState, a plain state [N, HV, K, V] where a chunk begins, or None for zeros.
        dtype: Of states.
    """
    fw = frameworks.of(tokens[0])
    before = _begin(fw, before, tokens, sizes, v_first, dtype)
    if sizes.N == 0 or sizes.B * sizes.T == 0:
        return tokens[2] * 1.0, before
    if cu_seqlens is None and sizes.T == 1:
        return _one_token_each(fw, chunk_kda, tokens, before)
    return _any_number(fw, chunk_kda, tokens, before, sizes, cu_seqlens)


def _begin(fw: ModuleType, before: Any | None, tokens: tuple, sizes: Sizes, v_first: bool, dtype: str) -> ReplayState:
    if isinstance(before, ReplayState):
        return before
    if before is None:
        inner = (sizes.V, sizes.K) if v_first else (sizes.K, sizes.V)
        before = fw.zeros((sizes.N, sizes.HV, *inner), like=tokens[2], dtype=dtype)
    rows = (fw.zeros((sizes.N, CHUNK, *fw.shape(x)[2:]), like=x) for x in tokens)
    return ReplayState._make((before, *rows, fw.zeros((sizes.N,), like=tokens[2], dtype="int64")))


def _over(fw: ModuleType, mask: Any, x: Any) -> Any:
    """mask [N, C] with as many axes as x [N, C, ..]."""
    return fw.reshape(mask, (*fw.shape(mask), *(1,) * (len(fw.shape(x)) - 2)))


def _one_token_each(
    fw: ModuleType, chunk_kda: Callable[..., Any], tokens: tuple, before: ReplayState
) -> tuple[Any, ReplayState]:
    """Without gathering: the new row of sequence n is row length[n] of its chunk."""
    length, row = before.length, fw.arange(CHUNK, like=before.length)[None]
    here = length[:, None] == row  # [N, C]
    rows = [fw.where(_over(fw, here, x), x, old) for x, old in zip(tokens, before[1:6], strict=True)]
    o, after = chunk_kda(*rows, initial_state=before.state, output_final_state=True, cu_seqlens=None)
    N = fw.shape(length)[0]
    o = fw.take(fw.reshape(o, (N * CHUNK, *fw.shape(o)[2:])), fw.arange(N, like=length) * CHUNK + length, 0)[:, None]
    full = length == CHUNK - 1
    state = fw.where(full[:, None, None, None], after, before.state)
    rows = [fw.where(_over(fw, full[:, None], x), fw.zeros((), like=x), x) for x in rows]
    return o, ReplayState._make((state, *rows, fw.where(full, fw.zeros((), like=length), length + 1)))


def _any_number(
    fw: ModuleType, chunk_kda: Callable[..., Any], tokens: tuple, before: ReplayState, sizes: Sizes,
    cu_seqlens: Any | None,
) -> tuple[Any, ReplayState]:  # fmt: skip
    """Full chunks in one packed call, what is left over in a second one, [N, C].

    Position p of a sequence counts from the start of its unfinished chunk: kept rows first, then the new ones. Sources
    are N*C kept rows, then B*T new ones, then a row of zeros.
    """
    N, M, length = sizes.N, sizes.B * sizes.T, before.length
    slots = fw.arange(N, like=length)
    starts = slots * sizes.T if cu_seqlens is None else fw.cast(cu_seqlens[:-1], "int64")
    ends = starts + sizes.T if cu_seqlens is None else fw.cast(cu_seqlens[1:], "int64")
    total = length + (ends - starts)
    full = total // CHUNK * CHUNK

    def source(n: Any, p: Any) -> Any:
        kept = fw.take(length, n, 0)
        return fw.where(p < kept, n * CHUNK + p, p + (N * CHUNK + fw.take(starts, n, 0) - kept))

    flat = []
    for x, old in zip(tokens, before[1:6], strict=True):
        rest = fw.shape(x)[2:]
        parts = [fw.reshape(old, (N * CHUNK, *rest)), fw.reshape(x, (M, *rest)), fw.zeros((1, *rest), like=x)]
        flat.append(fw.concat(parts, 0))
    nothing = N * CHUNK + M

    # Full chunks.
    state, outputs = before.state, []
    full_ends = fw.cumsum(full, 0)  # [N]
    capacity = (M + N * (CHUNK - 1)) // CHUNK * CHUNK
    if capacity > 0:
        place = fw.arange(capacity, like=length)
        owner = fw.searchsorted(full_ends, place)
        n = fw.minimum(owner, N - 1)
        index = fw.where(owner < N, source(n, place - fw.take(full_ends - full, n, 0)), nothing)
        rows = [fw.take(x, index, 0)[None] for x in flat]
        offsets = fw.pad(full_ends, 0, 1, 0)
        o, state = chunk_kda(*rows, initial_state=state, output_final_state=True, cu_seqlens=offsets)
        outputs.append(o[0])

    # The chunks that are not full.
    p = fw.arange(CHUNK, like=length)[None] + full[:, None]  # [N, C]
    n = fw.reshape(slots[:, None] + fw.zeros((1, CHUNK), like=slots), (N * CHUNK,))
    index = fw.where(fw.reshape(p < total[:, None], (N * CHUNK,)), source(n, fw.reshape(p, (N * CHUNK,))), nothing)
    rows = [fw.reshape(fw.take(x, index, 0), (N, CHUNK, *fw.shape(x)[1:])) for x in flat]
    o, _ = chunk_kda(*rows, initial_state=state, output_final_state=False, cu_seqlens=None)
    outputs += [fw.reshape(o, (N * CHUNK, *fw.shape(o)[2:])), fw.zeros((1, *fw.shape(o)[2:]), like=o)]

    # Outputs of the new tokens, in their order.
    token = fw.arange(M, like=length)
    owner = token // sizes.T if cu_seqlens is None else packing.sequence_ids(cu_seqlens, M)
    n = fw.minimum(owner, N - 1)
    p, whole = token - fw.take(starts - length, n, 0), fw.take(full, n, 0)
    index = fw.where(p < whole, p + fw.take(full_ends - full, n, 0), p + (capacity + n * CHUNK - whole))
    index = fw.where(owner < N, index, capacity + N * CHUNK)
    o = fw.reshape(fw.take(fw.concat(outputs, 0), index, 0), (sizes.B, sizes.T, *fw.shape(o)[2:]))
    return o, ReplayState._make((state, *rows, total - full))
