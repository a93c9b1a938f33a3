"""Context parallelism of the whole model: every rank of the cp mesh has some tokens of every row.

torchtitan's trainer splits tokens, labels and positions, in order or head and tail ("zigzag" here), and gathers keys
and values for attention. What a layer needs to know beyond its own tokens are the positions of all of them: they are
gathered by the model, once a step. KDA layers then exchange states (`openkda.build_cp_context`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import openkda
from openkda.integrations.torchtitan.cpu import block_causal_mask
from openkda.integrations.torchtitan.kda import document_offsets
from openkda.parallel.context import CPContext
from openkda.parallel.layout import ranks_in_time

#: torchtitan's names of how tokens are spread, and ours.
ORDERS = {None: "contiguous", "headtail": "zigzag"}


@dataclass(frozen=True)
class ContextParallel:
    """The cp mesh of a model, and how a row is spread over it."""

    group: Any
    order: str

    def gather_positions(self, local_BL: torch.Tensor) -> torch.Tensor:
        """Positions of all tokens `[B, size * L]` in time, from those of every rank `[B, L]`."""
        size = dist.get_world_size(self.group)
        gathered = [torch.empty_like(local_BL) for _ in range(size)]
        dist.all_gather(gathered, local_BL.contiguous(), group=self.group)
        if self.order == "contiguous":
            return torch.cat(gathered, 1)
        halves = [rank.chunk(2, 1) for rank in gathered]
        return torch.cat([halves[r][i >= size] for i, r in enumerate(ranks_in_time(size, self.order))], 1)

    def context(self, positions_BT: torch.Tensor) -> CPContext:
        """For KDA layers; reads the offsets of the documents on the host."""
        offsets = document_offsets(positions_BT)
        return openkda.build_cp_context(offsets, self.group, order=self.order, rows=positions_BT.shape[0])

    def masked_attention(self, positions_BT: torch.Tensor) -> torch.Tensor:
        """The mask of MaskedAttention: rows of this rank's tokens, columns of all tokens as torchtitan gathers them,
        rank after rank. Bool `[B, 1, L, T]`.
        """
        size, T = dist.get_world_size(self.group), positions_BT.shape[1]
        owners = ranks_in_time(size, self.order)
        places = torch.arange(T, device=positions_BT.device).chunk(len(owners))
        of_rank = [torch.cat([p for p, owner in zip(places, owners, strict=True) if owner == r]) for r in range(size)]
        mask = block_causal_mask(positions_BT)
        return mask[:, :, of_rank[dist.get_rank(self.group)]][..., torch.cat(of_rank)]
