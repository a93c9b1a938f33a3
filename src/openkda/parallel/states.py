"""Between states of whole sequences, which every rank has, and states of the pieces that a rank holds.

A slot is a piece in the order of the rank's tokens. Operators start a slot with the sequence's initial state where the
piece begins it, with what enters from other ranks elsewhere, and end with the sequence's final state in some slots.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from openkda.parallel.context import CPContext


def slot_starts(fw: ModuleType, cp: CPContext, initial_state: Any | None, zero: Any, entering: dict[int, Any]) -> Any:
    """Initial states of this rank's slots [slots, ..].

    Args:
        initial_state: [N, ..], or None for zeros.
        zero: One state of zeros, [..].
        entering: {slot: state [..]}, for slots that continue a sequence.
    """
    if initial_state is None:
        starts = fw.zeros((cp.num_slots, *fw.shape(zero)), like=zero)
    else:
        sequences = [piece.sequence for piece in cp.pieces] or [0]
        starts = fw.take(initial_state, cp.numbers(sequences, like=zero), 0)
    return with_rows(fw, starts, entering)


def with_rows(fw: ModuleType, x: Any, rows: dict[int, Any]) -> Any:
    """x [n, ..] with rows [..] in place of some of its own; differentiable, also where nothing of x is left: every rank
    then has a gradient, of zeros, of what all share.
    """
    blocks, done = [], 0
    for i in sorted(rows):
        blocks += [x[done:i]] * (i > done) + [rows[i][None]]
        done = i + 1
    if not blocks:
        return x
    return fw.concat([*blocks, x[done:]], 0)


def final_states(fw: ModuleType, cp: CPContext, ends: Any, initial_state: Any | None) -> Any:
    """Final states of all sequences [N, ..], the same on every rank, from those of this rank's slots.

    An empty sequence passes its initial state through. One all_gather, forward and backward.
    """
    gathered = fw.custom(GatherEnds, ends, cp)  # [size * most, ..]
    size = (cp.num_sequences, *fw.shape(ends)[1:])
    through = fw.zeros(size, like=ends) if initial_state is None else initial_state
    most, count = _most(cp), fw.shape(gathered)[0]
    index = [count + n for n in range(cp.num_sequences)]
    for sequence, (rank, i) in cp.sequence_ends.items():
        index[sequence] = rank * most + i
    return fw.take(fw.concat([gathered, through], 0), cp.numbers(index, like=ends), 0)


def _most(cp: CPContext) -> int:
    """Ends of sequences on the rank that has the most: what every rank sends."""
    return max(len(slots) for slots in cp.ending_slots)


class GatherEnds:
    """Slots [slots, ..] that hold the end of a sequence, of all ranks: [size * most, ..], zeros where a rank has fewer.

    Backward: every rank's gradient of all of them, summed in the order of the ranks.
    """

    @staticmethod
    def forward(fw: ModuleType, ctx: Any, ends: Any, cp: CPContext) -> Any:
        ctx.cp, ctx.num_slots = cp, fw.shape(ends)[0]
        mine, most = cp.ending_slots[cp.rank], _most(cp)
        rest = fw.shape(ends)[1:]
        if not most:
            return fw.zeros((0, *rest), like=ends)
        block = fw.zeros((most, *rest), like=ends)
        if mine:
            block = fw.concat([fw.take(ends, cp.numbers(mine, like=ends), 0), block[len(mine) :]], 0)
        return fw.reshape(fw.all_gather(block, cp.group), (cp.size * most, *rest))

    @staticmethod
    def backward(fw: ModuleType, ctx: Any, grad: Any) -> Any:
        cp: CPContext = ctx.cp
        mine, most = cp.ending_slots[cp.rank], _most(cp)
        slots = fw.zeros((ctx.num_slots, *fw.shape(grad)[1:]), like=grad)
        if not most:
            return slots, None
        everything = fw.all_gather(fw.contiguous(grad), cp.group)  # [size, size * most, ..]
        own = fw.sum(everything[:, cp.rank * most : cp.rank * most + len(mine)], 0)
        return with_rows(fw, slots, {slot: own[i] for i, slot in enumerate(mine)}), None
