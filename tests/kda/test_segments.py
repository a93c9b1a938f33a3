"""Segments cover a call once, in order, and start where chunks and checkpoints do."""

import pytest

pytest.importorskip("triton")

from openkda.kda.kernels.tables import CHUNK, GROUP
from openkda.kda.segments import FEW, FULL, WORK, num_starts, split

CALLS = [
    (1, 8192, 32),
    (1, 8192, 96),
    (1, 65536, 16),
    (8, 2048, 32),
    (2, 65536, 16),
    (1, 4096, 16),
    (1, 1, 1),
    (3, 0, 2),
]
CALLS += [(1, 12345, 40), (1, 0, 4), (512, 64, 4), (1, 1 << 20, 1), (7, 1 << 14, 64)]


@pytest.mark.parametrize("B, T, HV", CALLS)
def test_segments_cover_every_token_once(B, T, HV):
    segments = split(B, T, HV, packed=False, batch_invariant=False)
    seen = [(b, t) for s in segments for b in range(B)[s.batch] for t in range(0, T, CHUNK) if t in range(T)[s.tokens]]
    assert seen == [(b, t) for b in range(B) for t in range(0, T, CHUNK)]
    chunks = 0
    for s in segments:
        assert s.first_chunk == chunks
        chunks += len(range(B)[s.batch]) * -(-len(range(T)[s.tokens]) // CHUNK)
        start = s.tokens.start or 0
        assert start % (CHUNK * GROUP) == 0
        assert s.last == (s.tokens.stop is None or s.tokens.stop == T)
    assert max(s.index for s in segments) <= num_starts(B, T, HV, packed=False, batch_invariant=False)
    assert len(segments) <= 4


@pytest.mark.parametrize("B, T, HV", CALLS)
def test_segments_are_worth_their_launches(B, T, HV):
    segments = split(B, T, HV, packed=False, batch_invariant=False)
    for s in segments[:-1]:
        rows, tokens = len(range(B)[s.batch]), len(range(T)[s.tokens])
        assert rows * tokens * HV >= WORK
        assert B == 1 or rows * HV >= FULL


def test_packed_and_batch_invariant_calls_are_not_split():
    for flags in ({"packed": True, "batch_invariant": False}, {"packed": False, "batch_invariant": True}):
        assert len(split(1, 1 << 20, 32, **flags)) == 1
        assert num_starts(1, 1 << 20, 32, **flags) == 0


def test_few_heads_take_more_segments():
    assert len(split(1, 1 << 16, FEW, packed=False, batch_invariant=False)) == 4
    assert len(split(1, 1 << 16, FEW + 1, packed=False, batch_invariant=False)) == 2
