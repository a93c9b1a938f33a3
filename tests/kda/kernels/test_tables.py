"""The chunk layout of packed sequences: every token has one row, and checkpoints do not collide."""

import pytest
import torch

pytest.importorskip("triton")

from openkda.kda.kernels import tables

pytestmark = pytest.mark.interpreter

OFFSETS = [
    [0, 0, 64, 64, 65, 130],
    [0, 1, 2, 3, 4, 5, 6, 7],
    [0, 700],
    [0, 0, 0, 0],
    [0, 63, 127, 128, 400, 657, 657, 1000],
]


@pytest.mark.parametrize("offsets", OFFSETS, ids=lambda cu: "-".join(map(str, cu)))
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("tail", [0, 5, 100])
def test_tables_give_every_token_one_row(offsets, dtype, tail, device):
    C, M = tables.CHUNK, tables.GROUP
    cu = torch.tensor(offsets, dtype=dtype, device=device)
    layout = tables.make_layout(torch.empty(1, offsets[-1] + tail, 1, device=device), cu)
    chunks, groups = layout.chunks.tolist(), layout.groups.tolist()
    tokens, checkpoints = [], set()
    for first, rows, n, index in chunks:
        assert rows == 0 or first == offsets[n] + index * C
        tokens += [(n, t) for t in range(first, first + rows)]
    assert tokens == [(n, t) for n in range(layout.N) for t in range(offsets[n], offsets[n + 1])]
    seen = set()
    for first, size, n, j in groups:
        f = offsets[n] // C + n
        assert size == 0 or first == f + j * M
        seen |= {(n, chunk) for chunk in range(first, first + size)}
        if size and j:
            slot = f // M + j - 1
            assert slot not in checkpoints
            assert 0 <= slot < layout.num_checkpoints
            checkpoints.add(slot)
    assert seen == {(n, c) for c, (_, rows, n, _) in enumerate(chunks) if rows}


def test_zero_tail_writes_the_tail_only(device):
    x = torch.full((1, 5000, 3, 2), float("nan"), device=device)
    cu = torch.tensor([0, 7, 11], device=device)
    tables.zero_tail(x, tables.make_layout(x, cu))
    assert bool(x[:, :11].isnan().all())
    assert bool((x[:, 11:] == 0).all())
