"""How a call passes through the stages: whole, or in segments that take the workspaces in turn.

A segment is a run of batch rows, or of tokens of the only row. Segments in time hand the fp32 state on, forward, and
its gradient, backward; they start at multiples of the chunks that share a checkpoint, so the chunks are the same as
without. A call of up to WORK tokens x value heads is one segment. Packed and batch-invariant calls are never split.

What it saves (K = V = 128, bf16): the backward's workspaces are about 1.7 KB a token and head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from openkda.kda.kernels.tables import CHUNK, GROUP, Layout

# Tokens x value heads of a segment: 2048 chunks of one head each, 15 and more for every multiprocessor.
WORK = 131072
# Sequences x value heads that fill a GPU in the serial scans, two programs each: fewer are not taken apart.
FULL = 66


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


def _step(HV: int) -> int:
    """Tokens of a segment in time, at most."""
    return max(WORK // HV // (CHUNK * GROUP), 1) * (CHUNK * GROUP)


def _in_time(B: int, packed: bool, batch_invariant: bool) -> bool:
    return not packed and not batch_invariant and B == 1


def num_starts(B: int, T: int, HV: int, *, packed: bool, batch_invariant: bool) -> int:
    """Room for the states between segments in time. T may be a symbol."""
    return T // _step(HV) if _in_time(B, packed, batch_invariant) else 0


def split(B: int, T: int, HV: int, *, packed: bool, batch_invariant: bool) -> list[Segment]:
    """The segments of a call, in order."""
    everything = slice(None)
    if _in_time(B, packed, batch_invariant):
        unit = CHUNK * GROUP
        count = max(-(-T // _step(HV)), 1)
        step = max(-(-T // (count * unit)), 1) * unit  # of about equal length
        begins = range(0, max(T, 1), step)
        return [
            Segment(everything, slice(t, min(t + step, T)), t // CHUNK, i, t + step >= T) for i, t in enumerate(begins)
        ]
    rows = B
    if not packed and not batch_invariant and T > 0:
        rows = min(B, max(-(-FULL // HV), WORK // (T * HV), 1))
    per_row = -(-T // CHUNK)
    return [
        Segment(slice(b, min(b + rows, B)), everything, b * per_row, 0, True) for b in range(0, max(B, 1), max(rows, 1))
    ]
