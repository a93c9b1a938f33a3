"""`build_cp_context`: how the tokens of one step are spread over a group of ranks, seen from one of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from openkda import checks, frameworks
from openkda.parallel import layout
from openkda.parallel.layout import Part, Piece

_OP = "build_cp_context"


class CPContext:
    """The layout of one step. Made by `build_cp_context`; operators take it as `cp_context`.

    Attributes: rank, size: of this process in the group. num_tokens: of all ranks. num_sequences: N, of all ranks.
        order, rows, conv_width: as given. parts: this rank's (`parallel.layout`).
    """

    def __init__(
        self,
        offsets: Sequence[int],
        num_tokens: int,
        *,
        group: Any,
        rank: int,
        size: int,
        order: str,
        rows: int,
        conv_width: int | None,
    ) -> None:
        self.offsets, self.num_tokens, self.num_sequences = tuple(offsets), num_tokens, len(offsets) - 1
        self.group, self.rank, self.size = group, rank, size
        self.order, self.rows, self.conv_width = order, rows, conv_width
        self.parts_of_ranks = layout.cut(offsets, num_tokens, size, order, rows)
        self._timelines = layout.in_time(self.parts_of_ranks)
        self._tensors: dict[Any, Any] = {}

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.parts_of_ranks[self.rank]

    @property
    def num_local_tokens(self) -> int:
        return self.num_tokens // self.size

    @cached_property
    def pieces(self) -> list[Piece]:
        """Of this rank, in the order of its tokens: the slots of its local offsets."""
        return [piece for part in self.parts for piece in part.pieces]

    @cached_property
    def num_slots(self) -> int:
        """Slots of the local offsets: at least one, as operators want it."""
        return max(len(self.pieces), 1)

    @cached_property
    def entering_slots(self) -> dict[int, int]:
        """{part index: slot of its first piece}, for parts that a sequence enters."""
        return {p.index: self._first_slot(p) for p in self.parts if p.enters}

    @cached_property
    def leaving_slots(self) -> dict[int, int]:
        """{part index: slot of its last piece}, for parts that a sequence leaves."""
        return {p.index: self._first_slot(p) + len(p.pieces) - 1 for p in self.parts if p.leaves}

    def _first_slot(self, part: Part) -> int:
        return sum(len(p.pieces) for p in self.parts[: part.index])

    def earlier(self, part: Part) -> list[Part]:
        """Parts of the same row before this one, nearest first."""
        return self._timelines[part.row][: part.position][::-1]

    def later(self, part: Part) -> list[Part]:
        """Parts of the same row after this one, nearest first."""
        return self._timelines[part.row][part.position + 1 :]

    def place(self, part: Part) -> int:
        """Where a part is in what `all_gather` of one entry a part returns, ranks and parts in one axis."""
        return part.rank * len(self.parts) + part.index

    @cached_property
    def ending_slots(self) -> list[list[int]]:
        """For every rank, its slots that hold the end of a sequence."""
        slots = []
        for parts in self.parts_of_ranks:
            pieces = itertools.chain.from_iterable(p.pieces for p in parts)
            slots.append([slot for slot, piece in enumerate(pieces) if piece.ends])
        return slots

    @cached_property
    def sequence_ends(self) -> dict[int, tuple[int, int]]:
        """{sequence: (rank, place in ending_slots[rank])} of every sequence with tokens."""
        ends = {}
        for rank, (parts, slots) in enumerate(zip(self.parts_of_ranks, self.ending_slots, strict=True)):
            pieces = [piece for part in parts for piece in part.pieces]
            ends |= {pieces[slot].sequence: (rank, i) for i, slot in enumerate(slots)}
        return ends

    def numbers(self, values: Sequence[int], *, like: Any, dtype: str = "int64") -> Any:
        """A host list as a tensor on the device of `like`; made once."""
        fw = frameworks.of(like)
        key = (fw.NAME, fw.device_name(like), dtype, tuple(values))
        if key not in self._tensors:
            self._tensors[key] = fw.from_list(values, like=like, dtype=dtype)
        return self._tensors[key]

    def local_offsets(self, *, like: Any) -> Any:
        """cu_seqlens of this rank's pieces, int32 [num_slots + 1]."""
        return self.offsets_of([piece.length for piece in self.pieces], like=like)

    def offsets_of(self, lengths: Sequence[int], *, like: Any) -> Any:
        return self.numbers([0, *itertools.accumulate(lengths or [0])], like=like, dtype="int32")

    def local_tokens(self, x: Any) -> Any:
        """This rank's tokens [1, T / size, ..] of x [1, T, ..], which holds those of all ranks."""
        blocks = [x[:, part.first : part.first + part.length] for part in self.parts]
        return blocks[0] if len(blocks) == 1 else frameworks.of(x).concat(blocks, 1)

    def check(self, op: str, x_name: str, x: Any) -> None:
        """The shape of a token tensor [1, T, ..] against this layout."""
        if int(x.shape[0]) != 1:
            hint = "fold the batch into the token axis, and give its rows to build_cp_context"
            checks.bad_value(op, "batch size", "be 1 with cp_context", int(x.shape[0]), hint)
        if int(x.shape[1]) != self.num_local_tokens:
            rule = f"have T = {self.num_local_tokens} tokens a rank ({self.num_tokens} over {self.size} ranks)"
            checks.bad_value(op, x_name, rule, int(x.shape[1]), "cp_context was built for another length")

    def __repr__(self) -> str:
        shared = f"{self.num_tokens} tokens in {self.num_sequences} sequences"
        return f"CPContext(rank {self.rank} of {self.size}, {shared}, {self.order}, rows={self.rows})"


def check_context(op: str, context: Any) -> CPContext:
    if not isinstance(context, CPContext):
        checks.bad_type(op, "cp_context", "come from build_cp_context", type(context).__name__)
    return context


def build_cp_context(
    cu_seqlens: Any,
    group: Any = None,
    *,
    conv_width: int | None = None,
    order: str = "contiguous",
    rows: int = 1,
    num_tokens: int | None = None,
) -> CPContext:
    """Spread packed sequences over the ranks of a group; once a step, on every rank with the same arguments.

    Every rank holds num_tokens / size tokens: with order "contiguous" the rank-th stretch, with "zigzag" the stretches
    rank and 2 * size - 1 - rank of 2 * size, one after the other, which balances causal attention beside KDA. Cuts may
    fall anywhere, within a chunk or in one sequence several times.

    `chunk_kda` and `causal_conv1d` then take local tokens with cp_context instead of cu_seqlens. Their initial states
    are those of all N sequences, the same on every rank, and so are the final states they return. The loss is the sum
    of what the ranks make of their results: token gradients come back on the rank that holds the token; gradients of
    what every rank holds (parameters, initial states) are each rank's share, to be summed over the group as data
    parallelism does. All ranks must make the same calls in the same order, forward and backward.

    Args:
        cu_seqlens: int32 or int64 `[N+1]`, offsets of all sequences. They are read on the host, here and only here.
        group: Process group of torch or Paddle; None is the default group.
        conv_width: Width W of the convolutions that will use it, to be checked against their weights.
        order: "contiguous" or "zigzag".
        rows: Batch rows that were folded into the packed row. Each row is cut for itself: a rank's tokens are
            [rows, tokens / rows / size] folded. Sequences must not cross rows.
        num_tokens: Of all ranks, padding after the last offset included; None means no padding.
    Raises: ValueError for offsets outside the packed contract, or tokens that do not divide by the ranks (twice the
        ranks for zigzag) and rows; TypeError for a wrong kind.
    """
    checks.dtype(_OP, "cu_seqlens", cu_seqlens, ("int32", "int64"))
    checks.rank(_OP, "cu_seqlens", cu_seqlens, "[N+1]")
    checks.choice(_OP, "order", order, layout.ORDERS)
    for name, value in (("rows", rows), ("conv_width", conv_width), ("num_tokens", num_tokens)):
        _check_count(name, value, optional=name != "rows", least=0 if name == "num_tokens" else 1)
    fw = frameworks.of(cu_seqlens)
    offsets = [int(n) for n in fw.to_list(cu_seqlens)]
    if len(offsets) < 2:
        checks.bad_value(_OP, "cu_seqlens", "hold at least 2 offsets [N+1]", len(offsets))
    total = offsets[-1] if num_tokens is None else num_tokens
    checks.offset_values(_OP, offsets, total)
    size, rank = fw.group_size(group), fw.group_rank(group)
    _check_divides(total, size, order, rows)
    _check_rows(offsets, total, rows)
    return CPContext(
        offsets, total, group=group, rank=rank, size=size, order=order, rows=rows, conv_width=conv_width
    )  # fmt: skip


def _check_count(name: str, value: Any, *, optional: bool, least: int) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        checks.bad_type(_OP, name, "be an int", type(value).__name__)
    if value < least:
        checks.bad_value(_OP, name, f"be at least {least}", value)


def _check_divides(total: int, size: int, order: str, rows: int) -> None:
    parts = size * (2 if order == "zigzag" else 1)
    if total % (parts * rows):
        of_rows = f" in each of {rows} rows" if rows > 1 else ""
        rule = f"divide by {parts}{of_rows} ({size} ranks, {order})"
        checks.bad_value(_OP, "the number of tokens", rule, total, "pad the row, and give num_tokens")


def _check_rows(offsets: Sequence[int], total: int, rows: int) -> None:
    starts = set(offsets)
    for row in range(1, rows):
        edge = row * (total // rows)
        if edge not in starts and edge < offsets[-1]:
            checks.bad_value(_OP, "cu_seqlens", f"have an offset where row {row} begins, at {edge}", "none")
