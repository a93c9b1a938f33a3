"""Where sequences are cut: read off without processes, and by brute force."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

import openkda
from openkda.parallel import layout
from openkda.parallel.context import CPContext


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, Any]:
    order, size, rows = draw(st.sampled_from(layout.ORDERS)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    length = draw(st.integers(0, 6))
    row = size * (2 if order == "zigzag" else 1) * length
    tokens = rows * row
    inner = draw(st.lists(st.integers(0, tokens), max_size=8))
    offsets = sorted([0, *inner, *range(0, tokens + 1, max(row, 1))][: None if tokens else 3])
    used = draw(st.integers(0, tokens)) if rows == 1 else tokens  # the rest is padding
    offsets = [min(offset, used) for offset in offsets]
    return {"offsets": offsets, "tokens": tokens, "size": size, "order": order, "rows": rows}


@given(layouts())
@settings(deadline=None, max_examples=300)
def test_every_token_is_on_one_rank_with_its_sequence(case: dict[str, Any]) -> None:
    offsets, tokens = case["offsets"], case["tokens"]
    owner = [sum(o <= t for o in offsets) - 1 for t in range(tokens)]  # len(offsets) - 1 is padding
    seen = []
    for parts in layout.cut(**case):
        for part in parts:
            held = {}
            for piece in part.pieces:
                assert piece.length > 0
                for i in range(piece.start, piece.stop):
                    token = part.first + i - part.start
                    held[i] = piece.sequence
                    assert token - offsets[piece.sequence] == piece.before + i - piece.start
                assert piece.ends == (offsets[piece.sequence + 1] == part.first + piece.stop - part.start)
            for i in range(part.start, part.start + part.length):
                token = part.first + i - part.start
                seen.append(token)
                assert held.get(i, len(offsets) - 1) == owner[token]
    assert sorted(seen) == list(range(tokens))


@given(layouts())
@settings(deadline=None, max_examples=100)
def test_what_leaves_a_part_enters_the_next(case: dict[str, Any]) -> None:
    for row in layout.in_time(layout.cut(**case)):
        assert not row[0].enters
        assert not row[-1].leaves
        for earlier, later in itertools.pairwise(row):
            assert earlier.leaves == later.enters
            if later.enters:
                assert earlier.pieces[-1].sequence == later.pieces[0].sequence


def test_zigzag_gives_a_rank_one_part_of_each_half() -> None:
    parts = layout.cut([0, 12], 12, 3, "zigzag", 1)
    assert [[p.position for p in mine] for mine in parts] == [[0, 5], [1, 4], [2, 3]]


@pytest.fixture
def four_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openkda.frameworks.torch.group_size", lambda group: 4)
    monkeypatch.setattr("openkda.frameworks.torch.group_rank", lambda group: 1)


BAD = {
    "divides": ({}, [0, 10], ValueError, "the number of tokens must divide by 4 (4 ranks, contiguous), got 10"),
    "zigzag": ({"order": "zigzag"}, [0, 12], ValueError, "must divide by 8 (4 ranks, zigzag), got 12; pad the row"),
    "rows": ({"rows": 3}, [0, 4, 12], ValueError, "cu_seqlens must have an offset where row 2 begins, at 8, got none"),
    "rows_divide": ({"rows": 2}, [0, 4], ValueError, "must divide by 4 in each of 2 rows (4 ranks, contiguous), got 4"),
    "padding": ({"num_tokens": 8}, [0, 12], ValueError, "cu_seqlens must end at or below T = 8, got 12"),
    "start": ({}, [1, 12], ValueError, "cu_seqlens must start at 0, got 1"),
    "falls": ({}, [0, 8, 4, 12], ValueError, "cu_seqlens must never decrease, got 8 then 4"),
    "short": ({}, [0], ValueError, "cu_seqlens must hold at least 2 offsets [N+1], got 1"),
    "order": ({"order": "ring"}, [0, 12], ValueError, "order must be one of 'contiguous', 'zigzag', got 'ring'"),
    "width": ({"conv_width": 0}, [0, 12], ValueError, "conv_width must be at least 1, got 0"),
    "kind": ({"rows": 2.0}, [0, 12], TypeError, "rows must be an int, got float"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.usefixtures("four_ranks")
def test_bad_layout_is_named_with_rule_and_value(case: str) -> None:
    options, offsets, error, message = BAD[case]
    with pytest.raises(error, match=f"^build_cp_context: .*{re.escape(message)}"):
        openkda.build_cp_context(torch.tensor(offsets), None, **options)


def context(tokens: int = 12, **options: Any) -> CPContext:
    where = {"group": None, "rank": 0, "size": 2, "order": "contiguous", "rows": 1, "conv_width": None}
    return CPContext([0, tokens], tokens, **where | options)


X = torch.zeros(1, 6, 2, 4)
BAD_CALLS = {
    "length": ((X[:, :5],) * 4, {}, "q must have T = 6 tokens a rank (12 over 2 ranks), got 5"),
    "batch": ((X.expand(2, -1, -1, -1),) * 4, {}, "batch size must be 1 with cp_context, got 2; fold the batch"),
    "offsets": ((X,) * 4, {"cu_seqlens": torch.tensor([0, 6])}, "cu_seqlens must be None with cp_context, got [2]"),
    "invariant": ((X,) * 4, {"batch_invariant": True}, "batch_invariant must be False with cp_context, got True"),
    "state": ((X,) * 4, {"initial_state": torch.zeros(2, 2, 4, 4)}, "initial_state must have shape [N, HV, K, V] = [1"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_call_is_named_with_rule_and_value(case: str) -> None:
    tokens, options, message = BAD_CALLS[case]
    with pytest.raises(ValueError, match=f"^chunk_kda: .*{re.escape(message)}"):
        openkda.chunk_kda(*tokens, tokens[0][..., 0], cp_context=context(), **options)


def test_bad_convolution_is_named_with_rule_and_value() -> None:
    x, weight = torch.zeros(1, 6, 3), torch.zeros(3, 4)
    with pytest.raises(ValueError, match=r"weight must have the width W = 3 of cp_context, got 4"):
        openkda.causal_conv1d(x, weight, cp_context=context(conv_width=3))
    with pytest.raises(ValueError, match=r"x must have T = 6 tokens a rank \(12 over 2 ranks\), got 4"):
        openkda.causal_conv1d(x[:, :4], weight, cp_context=context())
    with pytest.raises(ValueError, match=r"cu_seqlens must be None with cp_context"):
        openkda.causal_conv1d(x, weight, cp_context=context(), cu_seqlens=torch.tensor([0, 6]))
