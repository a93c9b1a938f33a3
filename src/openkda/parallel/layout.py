"""Which rank holds which tokens of a packed row, and where sequences are cut. Plain Python: no tensors, no processes.

    row        T tokens of packed sequences; several batch rows may be folded into one, and none is crossed
    part       a run of a row that one rank holds: 1 a row and rank ("contiguous"), or 2 ("zigzag")
    piece      the tokens of one sequence within one part; empty sequences have none
    enters     of a part: its first piece continues a sequence that an earlier part has begun
    leaves     of a part: its last piece is continued in the next part

A rank's tokens are its parts one after another, row by row.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ORDERS = ("contiguous", "zigzag")


@dataclass(frozen=True)
class Piece:
    sequence: int
    start: int
    """First token, counted within its rank."""
    length: int
    before: int
    """Tokens of the sequence in earlier parts."""
    ends: bool
    """The sequence's last token is here."""

    @property
    def stop(self) -> int:
        return self.start + self.length

    @property
    def begins(self) -> bool:
        return self.before == 0


@dataclass(frozen=True)
class Part:
    rank: int
    index: int
    """Place among the parts of its rank."""
    row: int
    position: int
    """Place among the parts of its row, in time."""
    start: int
    """First token, counted within its rank."""
    length: int
    first: int
    """First token, counted within the whole row of all ranks."""
    pieces: tuple[Piece, ...]

    @property
    def enters(self) -> bool:
        return bool(self.pieces) and not self.pieces[0].begins

    @property
    def leaves(self) -> bool:
        return bool(self.pieces) and not self.pieces[-1].ends

    @property
    def passes(self) -> bool:
        """One sequence fills the part and goes on at both ends."""
        return self.enters and self.leaves and len(self.pieces) == 1


def ranks_in_time(size: int, order: str) -> list[int]:
    """The ranks that hold the parts of a row, in time: 0 1 .. or, zigzag, 0 1 .. 1 0."""
    ranks = list(range(size))
    return ranks + ranks[::-1] if order == "zigzag" else ranks


def cut(offsets: Sequence[int], tokens: int, size: int, order: str, rows: int) -> tuple[tuple[Part, ...], ...]:
    """The parts of every rank, in the order of its tokens.

    Args:
        offsets: Of all sequences in the folded row, from 0 on, never decreasing, at most `tokens`.
        tokens: Of all rows together; divisible by rows * size (twice that for zigzag).
        size: Ranks.
    """
    owners = ranks_in_time(size, order)
    length = tokens // (rows * len(owners))
    parts: list[list[Part]] = [[] for _ in range(size)]
    for row, (position, rank) in itertools.product(range(rows), enumerate(owners)):
        mine = parts[rank]
        first = (row * len(owners) + position) * length
        start = len(mine) * length
        pieces = tuple(_pieces(offsets, first, first + length, start))
        mine.append(Part(rank, len(mine), row, position, start, length, first, pieces))
    return tuple(tuple(mine) for mine in parts)


def _pieces(offsets: Sequence[int], first: int, last: int, start: int) -> Iterator[Piece]:
    """Pieces of tokens [first, last) of the folded row; the rank counts token `first` as `start`."""
    sequence = max(bisect_right(offsets, first) - 1, 0)  # of equal offsets the last: empty sequences lie before it
    while sequence < len(offsets) - 1 and offsets[sequence] < last:
        begin, end = offsets[sequence], offsets[sequence + 1]
        low, high = max(begin, first), min(end, last)
        if low < high:
            yield Piece(sequence, start + low - first, high - low, low - begin, end <= last)
        sequence += 1


def in_time(parts: Sequence[Sequence[Part]]) -> list[list[Part]]:
    """All parts, row by row, each row in time."""
    everything = sorted(itertools.chain.from_iterable(parts), key=lambda p: (p.row, p.position))
    return [list(row) for _, row in itertools.groupby(everything, key=lambda p: p.row)]
