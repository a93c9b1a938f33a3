"""Which rank holds which tokens: torchtitan's split of a row and ours are the same. No processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.experimental._attention import _HeadTailLoadBalancer

from openkda.integrations.torchtitan.builders import SIZES, model_config
from openkda.integrations.torchtitan.context_parallel import ORDERS, ContextParallel
from openkda.integrations.torchtitan.cpu import block_causal_mask

SIZE, L = 2, 16
POSITIONS = torch.tensor([[*range(7), *range(9)], [*range(16)]])


def split(row_BT: torch.Tensor, balancer: str | None) -> list[torch.Tensor]:
    """What torchtitan gives each rank."""
    if balancer == "headtail":
        row_BT = row_BT[:, _HeadTailLoadBalancer(L, SIZE, "cpu")._generate_indices()[0]]
    return list(row_BT.chunk(SIZE, 1))


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ContextParallel]:
    """A rank of a group of two, whose positions are those above."""

    def of(rank: int, balancer: str | None) -> ContextParallel:
        def all_gather(gathered: list[torch.Tensor], x: torch.Tensor, group: Any) -> None:
            assert torch.equal(x, split(POSITIONS, balancer)[rank])
            for mine, theirs in zip(gathered, split(POSITIONS, balancer), strict=True):
                mine.copy_(theirs)

        monkeypatch.setattr(dist, "get_world_size", lambda group=None: SIZE)
        monkeypatch.setattr(dist, "get_rank", lambda group=None: rank)
        monkeypatch.setattr(dist, "all_gather", all_gather)
        return ContextParallel(None, ORDERS[balancer])

    return of


@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize("balancer", ORDERS)
def test_split_agrees_with_torchtitan(as_rank: Callable[..., ContextParallel], rank: int, balancer: str | None) -> None:
    spread = as_rank(rank, balancer)
    everywhere = spread.gather_positions(split(POSITIONS, balancer)[rank])
    assert torch.equal(everywhere, POSITIONS)
    context = spread.context(everywhere)
    assert context.offsets == (0, 7, 16, 32)
    tokens = torch.arange(2 * L).view(2, L)
    mine = split(tokens, balancer)[rank]
    assert torch.equal(context.local_tokens(tokens.view(1, -1)), mine.reshape(1, -1))


@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize("balancer", ORDERS)
def test_mask_has_rows_of_the_rank_and_columns_as_gathered(
    as_rank: Callable[..., ContextParallel], rank: int, balancer: str | None
) -> None:
    places = split(torch.arange(L)[None], balancer)
    mask = as_rank(rank, balancer).masked_attention(POSITIONS)
    whole = block_causal_mask(POSITIONS)
    assert torch.equal(mask, whole[:, :, places[rank][0]][..., torch.cat(places, 1)[0]])


def test_trainer_splits_block_masks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = model_config(SIZES["tiny"], attention_backend="flex").build()
    model.context_parallel = ContextParallel(None, "zigzag")
    make = "_create_flex_attention_mask_for_document"  # compiles, which takes long
    monkeypatch.setattr(type(model), make, lambda self, positions, mla: "block mask")
    assert model.get_attention_masks(torch.arange(128)[None] % 50) == {"attention": "block mask"}


def test_positions_must_be_given() -> None:
    with torch.device("meta"):
        model = model_config(SIZES["tiny"], attention_backend="masked").build()
    model.context_parallel = ContextParallel(None, "zigzag")
    assert model.get_attention_masks(torch.arange(8)[None]) is None
    with pytest.raises(ValueError, match="positions must be given under context parallelism"):
        model(torch.zeros(1, 8, dtype=torch.int64))
