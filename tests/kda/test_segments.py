"""Segments cover a call once, in order, and start where chunks and checkpoints do."""

import pytest

pytest.importorskip("triton")

from openkda.kda.kernels.tables import CHUNK, GROUP, dense_layout
from openkda.kda.segments import FEW, PARTS, WORK, num_starts, parts_of, split

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
    seen = [t for s in segments for t in range(0, T, CHUNK) if t in range(T)[s.tokens]]
    assert seen == list(range(0, T, CHUNK))
    chunks = 0
    for s in segments:
        assert s.first_chunk == chunks
        chunks += B * -(-len(range(T)[s.tokens]) // CHUNK)
        assert s.tokens.start % (CHUNK * GROUP) == 0
        assert s.last == (s.tokens.stop == T)
    assert max(s.index for s in segments) <= num_starts(B, T, HV, packed=False, batch_invariant=False)
    assert len(segments) <= 4


@pytest.mark.parametrize("B, T, HV", CALLS)
def test_segments_are_worth_their_launches(B, T, HV):
    segments = split(B, T, HV, packed=False, batch_invariant=False)
    for s in segments[:-1]:
        assert len(range(T)[s.tokens]) * HV >= WORK


@pytest.mark.parametrize("B, T, HV", CALLS)
def test_parts_cover_every_token_and_chunk_of_a_segment_once(B, T, HV):
    for s in split(B, T, HV, packed=False, batch_invariant=False):
        tokens = range(T)[s.tokens]
        layout = dense_layout(B, len(tokens))
        parts = parts_of(s, layout, HV, HV)
        assert [c for part in parts for c in range(layout.num_chunks)[part.chunks]] == list(range(layout.num_chunks))
        rows = [(b, t) for p in parts for b in range(B)[p.batch] for t in range(0, T, CHUNK) if t in range(T)[p.tokens]]
        assert rows == [(b, t) for b in range(B) for t in range(0, T, CHUNK) if t in tokens]
        assert len(parts) <= PARTS[0][1]
        for part in parts:
            assert part.layout.num_chunks == len(range(layout.num_chunks)[part.chunks])


def test_packed_and_batch_invariant_calls_are_not_split():
    for flags in ({"packed": True, "batch_invariant": False}, {"packed": False, "batch_invariant": True}):
        assert len(split(1, 1 << 20, 32, **flags)) == 1
        assert num_starts(1, 1 << 20, 32, **flags) == 0


def test_only_few_heads_take_segments():
    assert len(split(1, 1 << 16, FEW, packed=False, batch_invariant=False)) == 4
    assert len(split(1, 1 << 16, FEW + 1, packed=False, batch_invariant=False)) == 1
    assert len(split(2, 1 << 16, 1, packed=False, batch_invariant=False)) == 1
