"""Packed sequences: offsets, masks, and tables made from them.

    offset     cu_seqlens[n] is the first token of sequence n; cu_seqlens[N] is where the last sequence ends
    tail       tokens from cu_seqlens[N] to T: padding, they belong to no sequence
    slot       sequence n, even when it is empty (two equal offsets)
    chunk      up to C consecutive tokens of one sequence; a sequence of L tokens has ceil(L / C) of them
    capacity   the number of chunks that fits any offsets of this shape, known without reading them

What operators use inside (`sequence_ids`, `chunk_table`) works on the tensors' device and takes its sizes from shapes
alone, so it never waits for the device and a recorded CUDA graph stays right when the offsets are edited in place. The
`prepare_*` helpers follow fla's names; those whose result has a size that depends on values must read them, and say so.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from openkda import checks, frameworks

Fn = TypeVar("Fn", bound=Callable[..., Any])


class ChunkTable(NamedTuple):
    """Where every chunk lies. NC is the capacity; a chunk that no sequence needs has no valid row."""

    tokens: Any  # int64 [NC, C]  token of each row; T where the row is padding
    valid: Any  # bool [NC, C]
    first: Any  # bool [NC]  the chunk begins a sequence
    sequence: Any  # int64 [NC]  its sequence, clipped to N-1
    last_chunk: Any  # int64 [N]  last chunk of each sequence; NC + n for an empty one
    rows: Any  # int64 [T]  row (chunk * C + row) of each token; NC * C for the tail


def sequence_ids(cu_seqlens: Any, tokens: int) -> Any:
    """Sequence of every token, int64 [T]; N for the tail. No host synchronisation."""
    fw = frameworks.of(cu_seqlens)
    ends = fw.cast(cu_seqlens[1:], "int64")
    return fw.searchsorted(ends, fw.arange(tokens, like=ends))


def num_chunks_capacity(tokens: int, sequences: int, chunk_size: int) -> int:
    """Upper bound of sum(ceil(L_n / chunk_size)) over all offsets with this T and N: each sequence wastes less than one
    chunk.
    """
    return min(tokens // chunk_size + sequences, tokens)


def chunk_table(cu_seqlens: Any, tokens: int, chunk_size: int) -> ChunkTable:
    """The chunks of packed sequences, on their device, with sizes from shapes only."""
    fw, C = frameworks.of(cu_seqlens), chunk_size
    cu = fw.cast(cu_seqlens, "int64")
    N = int(cu.shape[0]) - 1
    NC = num_chunks_capacity(tokens, N, C)
    counts = (cu[1:] - cu[:-1] + (C - 1)) // C  # [N]
    ends = fw.cumsum(counts, 0)  # [N]
    chunk = fw.arange(NC, like=cu)
    owner = fw.searchsorted(ends, chunk)  # [NC], N for unused chunks
    sequence = fw.minimum(owner, N - 1)
    index = chunk - fw.take(ends - counts, sequence, 0)  # within the sequence
    start = fw.take(cu, sequence, 0) + index * C
    token = start[:, None] + fw.arange(C, like=cu)[None]
    used = owner < N
    valid = (token < fw.take(cu, sequence + 1, 0)[:, None]) & used[:, None]
    slots = fw.arange(N, like=cu)
    last = fw.where(counts > 0, ends - 1, slots + NC)
    return ChunkTable(
        fw.where(valid, token, tokens),
        valid,
        (index == 0) & used,
        sequence,
        last,
        _token_rows(cu, ends - counts, tokens, NC, C),
    )


def _token_rows(cu: Any, first_chunk: Any, tokens: int, capacity: int, C: int) -> Any:
    fw = frameworks.of(cu)
    owner = sequence_ids(cu, tokens)
    n = fw.minimum(owner, int(first_chunk.shape[0]) - 1)
    offset = fw.arange(tokens, like=cu) - fw.take(cu, n, 0)
    return fw.where(owner < int(first_chunk.shape[0]), fw.take(first_chunk, n, 0) * C + offset, capacity * C)


def tensor_cache(fn: Fn) -> Fn:
    """Remember the last results of a function of tensors; never stale when a tensor is edited in place.

    A result is reused while every tensor argument is the same object at the same edit count, every other argument is
    equal (passed by place or by name), and nobody has edited the result itself: a tensor or a tuple of tensors. At most
    8 results are kept, and they keep their arguments alive. Where the library counts no edits nothing is kept
    (inference mode); edits behind its back, through `.data` or shared NumPy memory, cannot be seen.
    """
    kept: OrderedDict[Any, tuple[Any, Any, Any]] = OrderedDict()
    lock, signature = threading.Lock(), inspect.signature(fn)

    @functools.wraps(fn)
    def cached(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            values = tuple(bound.arguments.values())
            key = _identity(values)
            hash(key)
        except TypeError:  # arguments that fn itself will refuse
            return fn(*args, **kwargs)
        with lock:
            _, result, edits = kept.get(key, (None, None, None))
            if edits is not None and edits == _identity(result):
                kept.move_to_end(key)
                return result
        result = fn(*args, **kwargs)
        if _counts_edits(values) and _counts_edits(result):
            with lock:
                kept[key] = (
                    values,
                    result,
                    _identity(result),
                )  # its arguments too: their ids must not be given out again
                kept.move_to_end(key)
                while len(kept) > 8:
                    kept.popitem(last=False)
        return result

    return cached  # type: ignore[return-value]


def _identity(value: Any) -> Any:
    """What tells a value from another one, and from itself after an edit."""
    if isinstance(value, tuple):
        return tuple(_identity(v) for v in value)
    if not frameworks.is_tensor(value):
        return (type(value), value)
    return (id(value), frameworks.of(value).version_of(value))


def _counts_edits(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_counts_edits(v) for v in value)
    return not frameworks.is_tensor(value) or frameworks.of(value).version_of(value) >= 0


def _check_mask(op: str, mask: Any) -> None:
    checks.tensor(op, "mask", mask)
    checks.rank(op, "mask", mask, "[B, T]")


@tensor_cache
def prepare_lens_from_mask(mask: Any) -> Any:
    """Number of True (non-zero) entries of each row of a padding mask.

    Args:
        mask: `[B, T]`, bool or integer; 1 marks a token.
    Returns: int32 `[B]`, on the mask's device. No host synchronisation.
    Raises: ValueError if the mask is not two-dimensional.
    """
    _check_mask("prepare_lens_from_mask", mask)
    fw = frameworks.of(mask)
    return fw.cast(fw.sum(fw.cast(mask != 0, "int32"), 1), "int32")


@tensor_cache
def prepare_cu_seqlens_from_mask(mask: Any) -> Any:
    """Packed offsets of the rows of a padding mask, once padding is removed.

    Args:
        mask: `[B, T]`, bool or integer; 1 marks a token.
    Returns: int32 `[B+1]`, on the mask's device. No host synchronisation.
    Raises: ValueError if the mask is not two-dimensional.
    """
    _check_mask("prepare_cu_seqlens_from_mask", mask)
    fw, lens = frameworks.of(mask), prepare_lens_from_mask(mask)
    return fw.pad(fw.cast(fw.cumsum(lens, 0), "int32"), 0, 1, 0)


@tensor_cache
def prepare_chunk_indices(cu_seqlens: Any, chunk_size: int) -> Any:
    """Every chunk of packed sequences as (sequence, chunk within it), in order.

    Args:
        cu_seqlens: int32 or int64 `[N+1]`, token offsets.
        chunk_size: Tokens a chunk, above 0.
    Returns: `[NT, 2]`, cu_seqlens' dtype and device; NT is the exact number of chunks, so the offsets are read on the
        host.
    Raises: ValueError for a chunk_size below 1 or offsets that are not one-dimensional; TypeError for a wrong kind.
    """
    op = "prepare_chunk_indices"
    checks.dtype(op, "cu_seqlens", cu_seqlens, ("int32", "int64"))
    checks.rank(op, "cu_seqlens", cu_seqlens, "[N+1]")
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int):
        checks.bad_type(op, "chunk_size", "be an int", type(chunk_size).__name__)
    if chunk_size < 1:
        checks.bad_value(op, "chunk_size", "be at least 1", chunk_size)
    fw = frameworks.of(cu_seqlens)
    cu = fw.cast(cu_seqlens, "int64")
    counts = (cu[1:] - cu[:-1] + (chunk_size - 1)) // chunk_size
    ends = fw.cumsum(counts, 0)
    chunk = fw.arange(sum(fw.to_list(counts)), like=cu)
    sequence = fw.searchsorted(ends, chunk)
    return fw.cast(fw.stack([sequence, chunk - fw.take(ends - counts, sequence, 0)], 1), fw.dtype_name(cu_seqlens))


def write_slots_(pool: Any, slots: Any, states: Any, live: Any) -> None:
    """pool[slots[n]] = states[n] where live, in place.

    Nobody asks which are live: a padding row repeats the write of a live one, or writes what is there.

    Args:
        pool: `[slots, ..]`; states: `[N, ..]`, in the pool's dtype; slots: int64 `[N]`, >= 0; live: bool `[N]`, N >= 1.
    """
    fw = frameworks.of(pool)
    source = fw.where(live, fw.arange(fw.shape(slots)[0], like=slots), fw.argmax(live))
    slots, states = fw.take(slots, source, 0), fw.take(states, source, 0)
    fw.put_rows_(pool, slots, fw.where(fw.any(live), states, fw.take(pool, slots, 0)))
