"""How a call passes through the stages: whole, or in a few segments and parts that take memory in turn.

A segment is a run of tokens of the only sequence of a call. Segments hand the fp32 state on, forward, and its
gradient, backward; they start at multiples of the chunks that share a checkpoint, so chunks are the same as without.
Where the serial scans leave most of a GPU idle (few heads), the other stages work on the next segment meanwhile; two of
four segments then have workspaces at any time. Packed and batch-invariant calls, and those of more than one sequence,
are one segment.

The gradient stage, which needs most memory, takes a segment in parts: runs of chunks, whatever sequence they are of.

Why (K = V = 128, bf16, bytes a token and head): the backward needs 0.9 KB for what is kept, o and dO, 1 KB for the
gradients, and 1 KB for states and their gradients. All other workspaces of it, 2.2 KB, find room in the memory of
gradients that are not written yet, and in 0.3, 0.5 or 1.1 KB besides if the gradient stage has four parts, two or one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from openkda.kda.kernels.tables import CHUNK, GROUP, Layout, dense_layout

# Tokens x value heads of a segment, at least: 2048 chunks of one head, 15 for every multiprocessor of an H200.
WORK = 131072
# Sequences x value heads up to which the scans leave two thirds of a GPU to the other stages.
FEW = 22
SEGMENTS = 4
# Parts of a segment of at least so many chunks x value heads. Two cost nothing from 512 each on; four cost 2 % at 1024
# each, on an H200.
PARTS = ((8192, 4), (1024, 2))


class Segment(NamedTuple):
    tokens: slice
    first_chunk: int  # in the tensors that are kept for the whole call
    index: int
    last: bool

    def chunks(self, layout: Layout) -> slice:
        return slice(self.first_chunk, self.first_chunk + layout.num_chunks)

    def checkpoints(self, layout: Layout) -> slice:
        first = self.first_chunk // GROUP
        return slice(first, first + layout.num_checkpoints)

    def state_before(self, initial_state: Any | None, starts: Any) -> Any | None:
        """Where the state before this segment is; starts holds those before all segments but the first."""
        return starts[self.index - 1] if self.index > 0 else initial_state

    def state_after(self, final_state: Any | None, starts: Any) -> Any | None:
        """Where the state after this segment goes; None if nobody wants it."""
        return final_state if self.last else starts[self.index]


class Part(NamedTuple):
    batch: slice
    tokens: slice
    chunks: slice  # in the workspaces of the segment
    layout: Layout


def overlaps(B: int, HV: int) -> bool:
    """Whether other stages shall run beside the serial scans."""
    return B * HV <= FEW


def _least(HV: int) -> int:
    """Tokens of a segment, at least."""
    unit = CHUNK * GROUP
    return -(-WORK // (HV * unit)) * unit


def num_starts(B: int, T: int, HV: int, *, packed: bool, batch_invariant: bool) -> int:
    """Room for the states between segments. T may be a symbol, of which one comparison is made."""
    if packed or batch_invariant or B != 1 or not overlaps(B, HV) or T <= _least(HV):
        return 0
    return SEGMENTS - 1


def split(B: int, T: int, HV: int, *, packed: bool, batch_invariant: bool) -> list[Segment]:
    """The segments of a call, in order."""
    if num_starts(B, T, HV, packed=packed, batch_invariant=batch_invariant) == 0:
        return [Segment(slice(0, T), 0, 0, True)]
    unit = CHUNK * GROUP
    step = max(-(-T // (SEGMENTS * unit)) * unit, _least(HV))
    begins = range(0, T, step)
    return [Segment(slice(t, min(t + step, T)), t // CHUNK, i, t + step >= T) for i, t in enumerate(begins)]


def parts_of(s: Segment, layout: Layout, H: int, HV: int) -> list[Part]:
    """The parts of a segment, in order, at least one; layout: of the segment.

    A packed call with grouped heads has one: the sums over groups go over all tokens at a time.
    """
    everything, NC = slice(None), layout.num_chunks
    count = next((n for work, n in PARTS if NC * HV >= work), 1)
    if NC == 0 or (layout.packed and H != HV):
        return [Part(everything, s.tokens, everything, layout)]
    if layout.chunks is not None:
        step = max(-(-NC // count), 1)
        runs = [slice(c, min(c + step, NC)) for c in range(0, NC, step)]
        return [
            Part(everything, s.tokens, run, replace(layout, num_chunks=run.stop - run.start, chunks=layout.chunks[run]))
            for run in runs
        ]
    if layout.B > 1:
        step, per = -(-layout.B // count), layout.chunks_per_sequence
        rows = [slice(b, min(b + step, layout.B)) for b in range(0, layout.B, step)]
        return [
            Part(row, s.tokens, slice(row.start * per, row.stop * per), dense_layout(row.stop - row.start, layout.T))
            for row in rows
        ]
    step = max(-(-NC // count), 1) * CHUNK
    parts = []
    for t in range(0, layout.T, step):
        part = dense_layout(layout.B, min(step, layout.T - t))
        chunks = slice(t // CHUNK, t // CHUNK + part.num_chunks)
        parts.append(Part(everything, slice(s.tokens.start + t, s.tokens.start + t + part.T), chunks, part))
    return parts
