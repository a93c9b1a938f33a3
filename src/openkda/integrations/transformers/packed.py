"""Packed sequences as transformers describes them, turned into offsets.

    cu_seqlens     int32 or int64 [N+1], token offsets in a batch of one row; flash attention's name cu_seq_lens_q too
    seq_idx        integer [B, T], a number per token, another one for another sequence
    position_ids   integer [B, T], positions that do not go on by 1 where a new sequence starts

The first of these that is there counts. Offsets count tokens of the batch folded into one row, [1, B*T]; a row of the
batch always starts a sequence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from openkda import checks, packing

#: Names of the offsets among the keyword arguments of a model or a layer.
OFFSETS = ("cu_seqlens", "cu_seq_lens_q")


class Packed(NamedTuple):
    """Where the sequences of a batch [B, T] lie."""

    cu_seqlens: Tensor  # [N+1], offsets in [1, B*T]
    starts: Tensor  # bool [B, T], the token is the first of a sequence

    def sequence_ids(self) -> Tensor:
        """A number per token, int64 [B, T], the same for tokens of one sequence and row."""
        return self.starts.long().cumsum(-1)

    def position_ids(self) -> Tensor:
        """Positions that start at 0 in every sequence, int64 [B, T]: transformers' masks keep such sequences apart."""
        place = torch.arange(self.starts.shape[1], device=self.starts.device).expand(self.starts.shape)
        return place - torch.where(self.starts, place, 0).cummax(-1).values


def from_keywords(op: str, kwargs: dict[str, Any], batch: int, tokens: int) -> Packed | None:
    """The sequences that keyword arguments describe, by offsets or by seq_idx; None if they describe none."""
    for name in OFFSETS:
        cu_seqlens = kwargs.get(name)
        if cu_seqlens is not None:
            checks.cu_seqlens(op, cu_seqlens, batch=batch, tokens=tokens)
            return Packed(cu_seqlens, _changes(packing.sequence_ids(cu_seqlens, tokens)[None]))
    seq_idx = kwargs.get("seq_idx")
    if seq_idx is None:
        return None
    checks.shape(op, "seq_idx", seq_idx, (batch, tokens), "[B, T]", "one number per token")
    return _from_starts(_changes(seq_idx))


def from_positions(position_ids: Tensor, attention_mask: Tensor | None, batch: int) -> Packed | None:
    """The sequences that positions `[1 or B, T]` describe; None if every row is one sequence. Waits for the device.

    Positions of padding (0 in attention_mask `[B, T]`) are skipped, as generation fills them in with anything.
    """
    positions = position_ids.expand(batch, -1)
    real = torch.ones_like(positions, dtype=torch.bool) if attention_mask is None else attention_mask != 0
    place = torch.arange(positions.shape[1], device=positions.device).expand(positions.shape)
    before = F.pad(torch.where(real, place, -1).cummax(-1).values[:, :-1], (1, 0), value=-1)  # last real token before
    follows = positions == positions.gather(1, before.clamp(min=0)) + 1
    starts = (real & ~follows & (before >= 0)) | (place == 0)
    return _from_starts(starts) if bool(starts[:, 1:].any()) else None


def _changes(ids: Tensor) -> Tensor:
    """Where ids [B, T] differ from their left neighbour, and the first column: bool [B, T]."""
    return F.pad(ids[:, 1:] != ids[:, :-1], (1, 0), value=True)


def _from_starts(starts: Tensor) -> Packed:
    """The number of sequences depends on values, so this waits for the device, as transformers' own masks do."""
    places = starts.flatten().nonzero().flatten()
    return Packed(F.pad(places, (0, 1), value=starts.numel()).int(), starts)
