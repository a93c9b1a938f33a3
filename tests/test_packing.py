"""Offsets, masks and tables of packed sequences, and the cache that is never stale."""

from __future__ import annotations

import gc
import itertools
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from openkda import packing
from openkda.packing import (
    prepare_chunk_indices,
    prepare_cu_seqlens_from_mask,
    prepare_lens_from_mask,
    sequence_ids,
    tensor_cache,
)

# Offsets with empty sequences at the start, in the middle and at the end; a single one; tails.
OFFSETS = {
    "one": ([0, 5], 5),
    "empty": ([0, 0, 3, 3, 9, 9], 9),
    "tail": ([0, 4, 6], 9),
    "all_empty": ([0, 0, 0], 4),
    "no_token": ([0, 0], 0),
    "long": ([0, 64, 129, 130, 300], 310),
}


def owners(offsets: list[int], tokens: int) -> list[int]:
    """The sequence of each token, counted one by one."""
    ids = [n for n, (a, b) in enumerate(itertools.pairwise(offsets)) for _ in range(a, b)]
    return ids + [len(offsets) - 1] * (tokens - len(ids))


# ---- inside
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("case", OFFSETS)
def test_sequence_ids_names_the_owner_of_each_token(case: str, dtype: torch.dtype):
    offsets, tokens = OFFSETS[case]
    ids = sequence_ids(torch.tensor(offsets, dtype=dtype), tokens)
    assert ids.dtype == torch.int64
    assert ids.tolist() == owners(offsets, tokens)


@pytest.mark.parametrize("chunk_size", [1, 4, 64])
@pytest.mark.parametrize("case", OFFSETS)
def test_chunk_table_holds_every_token_once_and_in_order(case: str, chunk_size: int):
    offsets, tokens = OFFSETS[case]
    table = packing.chunk_table(torch.tensor(offsets), tokens, chunk_size)
    ids, NC = owners(offsets, tokens), table.tokens.shape[0]
    assert table.tokens[table.valid].tolist() == list(range(offsets[-1]))
    assert (table.tokens[~table.valid] == tokens).all()
    flat = table.tokens.flatten()
    for token, row in enumerate(table.rows.tolist()):
        assert row == NC * chunk_size if ids[token] == len(offsets) - 1 else flat[row] == token
    for n, (a, b) in enumerate(itertools.pairwise(offsets)):
        mine = [c for c in range(NC) if table.valid[c].any() and table.sequence[c] == n]
        assert len(mine) == -(-(b - a) // chunk_size)
        assert [bool(table.first[c]) for c in mine] == [c == mine[0] for c in mine]
        assert int(table.last_chunk[n]) == (mine[-1] if mine else NC + n)


# ---- masks
MASKS = {
    "right": ([[1, 1, 1], [1, 0, 0]], [3, 1]),
    "left": ([[0, 0, 1], [1, 1, 1]], [1, 3]),
    "holes": ([[1, 0, 1], [0, 1, 0]], [2, 1]),
    "empty_row": ([[1, 1, 0], [0, 0, 0], [1, 1, 1]], [2, 0, 3]),
    "all_padding": ([[0, 0], [0, 0]], [0, 0]),
    "no_token": ([[], []], [0, 0]),
}


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.uint8, torch.float32], ids=str)
@pytest.mark.parametrize("case", MASKS)
def test_lengths_and_offsets_of_a_mask(case: str, dtype: torch.dtype):
    rows, lens = MASKS[case]
    mask = torch.tensor(rows, dtype=dtype)
    got, cu = prepare_lens_from_mask(mask), prepare_cu_seqlens_from_mask(mask)
    assert got.dtype == cu.dtype == torch.int32
    assert got.tolist() == lens
    assert cu.tolist() == [sum(lens[:n]) for n in range(len(lens) + 1)]


def test_mask_counts_entries_and_does_not_add_them_up():
    assert prepare_lens_from_mask(torch.tensor([[2, 0, -1]])).tolist() == [2]


def test_lengths_above_255_do_not_wrap_in_a_byte_mask():
    assert prepare_cu_seqlens_from_mask(torch.ones(2, 300, dtype=torch.uint8)).tolist() == [0, 300, 600]


# ---- chunks
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_chunk_indices_list_sequence_and_chunk(dtype: torch.dtype):
    got = prepare_chunk_indices(torch.tensor([0, 0, 64, 129, 130, 130], dtype=dtype), 64)
    assert got.dtype == dtype
    assert got.tolist() == [[1, 0], [2, 0], [2, 1], [3, 0]]


def test_chunk_indices_of_nothing_are_empty():
    assert prepare_chunk_indices(torch.tensor([0, 0]), 64).shape == (0, 2)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: prepare_lens_from_mask([[1]]), TypeError, r"prepare_lens_from_mask: mask must be a tensor, got list"),
        (
            lambda: prepare_lens_from_mask(torch.ones(3)),
            ValueError,
            r"prepare_lens_from_mask: mask must have shape \[B, T\], got \[3\]",
        ),
        (
            lambda: prepare_cu_seqlens_from_mask(torch.ones(1, 2, 3)),
            ValueError,
            r"prepare_cu_seqlens_from_mask: mask must have shape",
        ),
        (
            lambda: prepare_cu_seqlens_from_mask(None),
            TypeError,
            r"prepare_cu_seqlens_from_mask: mask must be a tensor, got None",
        ),
        (
            lambda: prepare_chunk_indices(torch.zeros(3), 64),
            TypeError,
            r"prepare_chunk_indices: cu_seqlens must have dtype int32 or int64, got float32",
        ),
        (
            lambda: prepare_chunk_indices(torch.zeros(2, 3, dtype=torch.int32), 64),
            ValueError,
            r"cu_seqlens must have shape \[N\+1\], got \[2, 3\]",
        ),
        (
            lambda: prepare_chunk_indices(torch.tensor([0, 3]), 0),
            ValueError,
            r"prepare_chunk_indices: chunk_size must be at least 1, got 0",
        ),
        (
            lambda: prepare_chunk_indices(torch.tensor([0, 3]), 2.5),
            TypeError,
            r"prepare_chunk_indices: chunk_size must be an int, got float",
        ),
        (lambda: prepare_chunk_indices(torch.tensor([0, 3])), TypeError, "chunk_size"),
    ],
)
def test_bad_argument_is_named(call: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        call()


# ---- tensor_cache
class Counted:
    """A cached function that counts how often it really ran."""

    def __init__(self) -> None:
        self.runs = 0

        @tensor_cache
        def total(x: Tensor, factor: int = 1) -> Tensor:
            self.runs += 1
            return x.sum() * factor

        self.total = total


def test_cache_runs_once_for_the_same_tensor_however_arguments_are_passed():
    fn, x = Counted(), torch.arange(4)
    assert fn.total(x) is fn.total(x)
    assert fn.total(x, 1) is fn.total(x=x, factor=1)
    assert fn.runs == 1
    assert fn.total(x, 2) == 12
    assert fn.total(x.clone()) == 6
    assert fn.runs == 3


@pytest.mark.parametrize(
    "edit",
    [
        lambda x: x.add_(1),
        lambda x: x.__setitem__(0, 9),
        lambda x: x[1:].zero_(),  # through a view
        lambda x: x.view(2, 2).copy_(torch.ones(2, 2)),
    ],
)
def test_cache_is_not_stale_after_an_edit_in_place(edit: Any):
    fn, x = Counted(), torch.arange(4)
    fn.total(x)
    edit(x)
    assert fn.total(x) == x.sum()
    assert fn.runs == 2


def test_cache_sees_an_edit_of_the_base_of_a_view():
    fn, base = Counted(), torch.arange(4)
    view = base[1:]
    fn.total(view)
    base.zero_()
    assert fn.total(view) == 0


def test_cache_does_not_return_a_result_that_was_edited():
    mask = torch.ones(2, 3, dtype=torch.bool)
    prepare_cu_seqlens_from_mask(mask)[-1] = 99
    prepare_lens_from_mask(mask).zero_()
    assert prepare_cu_seqlens_from_mask(mask).tolist() == [0, 3, 6]
    assert prepare_lens_from_mask(mask).tolist() == [3, 3]


@pytest.mark.parametrize("helper", [prepare_lens_from_mask, prepare_cu_seqlens_from_mask])
def test_mask_helpers_follow_edits_of_the_mask(helper: Any):
    mask = torch.ones(2, 3, dtype=torch.bool)
    assert helper(mask) is helper(mask)
    mask[1, 1:] = False
    assert helper(mask)[-1] == {prepare_lens_from_mask: 1, prepare_cu_seqlens_from_mask: 4}[helper]


def test_chunk_indices_follow_edits_of_the_offsets():
    cu = torch.tensor([0, 64, 128])
    assert prepare_chunk_indices(cu, 64).tolist() == [[0, 0], [1, 0]]
    cu[1] = 65
    assert prepare_chunk_indices(cu, 64).tolist() == [[0, 0], [0, 1], [1, 0]]


def test_cache_does_not_confuse_a_tensor_with_one_that_took_its_place_in_memory():
    fn = Counted()
    for value in range(10):
        assert fn.total(torch.full((3,), value)) == 3 * value
        gc.collect()


def test_cache_keeps_eight_results_and_drops_the_oldest():
    fn, xs = Counted(), [torch.full((1,), n) for n in range(9)]
    for x in xs:
        fn.total(x)
    fn.total(xs[8])
    fn.total(xs[1])
    assert fn.runs == 9
    fn.total(xs[0])
    assert fn.runs == 10


def test_cache_keeps_nothing_of_inference_mode():
    fn, x = Counted(), torch.arange(4)
    with torch.inference_mode():
        assert fn.total(x) == 6  # an inference tensor: autograd could not save it
        y = torch.arange(3)
        assert fn.total(y) == 3
        y.zero_()
        assert fn.total(y) == 0
    assert not fn.total(x).is_inference()
    assert fn.runs == 4


def test_cache_passes_errors_and_unhashable_arguments_through():
    fn = Counted()
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        fn.total()
    with pytest.raises(AttributeError, match="list"):
        fn.total([1, 2])


def test_cache_survives_many_threads():
    fn, failures = Counted(), []
    shared = [torch.full((1,), n) for n in range(12)]

    def work() -> None:
        for _ in range(200):
            failures.extend(n for n, x in enumerate(shared) if fn.total(x) != n)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
