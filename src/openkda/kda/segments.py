"""How a call passes through the stages: whole, or in a few segments that take the workspaces in turn.

A segment is a run of batch rows, or of tokens of the only row. Segments in time hand the fp32 state on, forward, and
its gradient, backward; they start at multiples of the chunks that share a checkpoint, so the chunks are the same as
without. Packed and batch-invariant calls are never split.

Why (K = V = 128, bf16, bytes a token and head): the backward needs 0.9 KB for what is kept, o and dO, 1 KB for the
gradients, and up to 2.6 KB of workspaces, which two segments halve. Where the scans leave most of a GPU idle, the
other stages work on the next segment meanwhile; two of four segments then have workspaces at any time. More segments
cost time: on H200 at T 8192 and 32 heads, forward + backward takes 4% longer in two, 7% in four.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from openkda.kda.kernels.tables import CHUNK, GROUP, Layout

# Tokens x value heads of a segment, at least: 2048 chunks of one head, 15 for every multiprocessor of an H200.
WORK = 131072
# Sequences x value heads that fill a GPU in the serial scans, two programs each: fewer are not taken apart.
FULL = 66
# Up to so many, the scans leave two thirds of a GPU to the other stages.
FEW = 22


class Segment(NamedTuple):
    batch: slice
    tokens: slice
    first_chunk: int  # in the tensors that are kept for the whole call
    index: int  # in time
    last: bool  # in time

    def chunks(self, layout: Layout) -> slice:
        return slice(self.first_chunk, self.first_chunk + layout.num_chunks)

    def checkpoints(self, layout: Layout) -> slice:
        first = self.first_chunk // GROUP
        return slice(first, first + layout.num_checkpoints)

    def state_before(self, initial_state: Any | None, starts: Any) -> Any | None:
        """Where the state before this segment is; starts holds those before all segments in time but the first."""
        if self.index > 0:
            return starts[self.index - 1]
        return None if initial_state is None else initial_state[self.batch]

    def state_after(self, final_state: Any | None, starts: Any) -> Any | None:
        """Where the state after this segment goes; None if nobody wants it."""
        if not self.last:
            return starts[self.index]
        return None if final_state is None else final_state[self.batch]


def overlaps(B: int, HV: int) -> bool:
    """Whether other stages shall run beside the serial scans."""
    return B * HV <= FEW


def _in_time(B: int, packed: bool, batch_invariant: bool) -> bool:
    return not packed and not batch_invariant and B == 1


def _count(HV: int) -> int:
    return 4 if overlaps(1, HV) else 2


def _least(HV: int) -> int:
    """Tokens of a segment in time, at least."""
    unit = CHUNK * GROUP
    return -(-WORK // (HV * unit)) * unit


def num_starts(B: int, T: int, HV: int, *, packed: bool, batch_invariant: bool) -> int:
    """Room for the states between segments in time. T may be a symbol, of which one comparison is made."""
    if not _in_time(B, packed, batch_invariant) or T <= _least(HV):
        return 0
    return _count(HV) - 1


def split(B: int, T: int, HV: int, *, packed: bool, batch_invariant: bool) -> list[Segment]:
    """The segments of a call, in order."""
    everything = slice(None)
    if _in_time(B, packed, batch_invariant):
        unit = CHUNK * GROUP
        step = max(-(-T // (_count(HV) * unit)) * unit, _least(HV))
        begins = range(0, max(T, 1), step)
        return [
            Segment(everything, slice(t, min(t + step, T)), t // CHUNK, i, t + step >= T) for i, t in enumerate(begins)
        ]
    rows = max(B, 1)
    if not packed and not batch_invariant and T > 0:
        rows = min(rows, max(-(-B // 2), -(-FULL // HV), -(-WORK // (T * HV))))
    per_row = -(-T // CHUNK)
    return [Segment(slice(b, min(b + rows, B)), everything, b * per_row, 0, True) for b in range(0, max(B, 1), rows)]
