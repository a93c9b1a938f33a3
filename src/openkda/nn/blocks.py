"""A layer or a model block by block: 64 tokens of one sequence at a time, always in the same shape.

Matmuls, attention and elementwise functions of a tensor library may give other bits to the same row when the number of
rows changes. Here it never changes: a sequence is cut into blocks of 64 tokens from its first one on, the last block is
filled up with zeros, and every block runs alone, in memory of its own, from what the block before it left behind. So a
token's result depends on the tokens before it and on nothing else: not on the length of the sequence, not on the other
sequences of the call, not on how the sequence was cut into calls. While decoding, the tokens of the unfinished block
are kept and the block runs again at every step.

The price: as many calls of the layer as there are blocks, one after another, and 64 rows of work for a decoded token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

BLOCK = 64  # tokens: a chunk of chunk_kda


class BlockState(NamedTuple):
    """What one sequence leaves behind."""

    rows: Tensor | None = None  # [0 .. 63, ..]: tokens of the unfinished block
    state: Any | None = None  # of the layer, after the last full block; None before the first one


def walk(
    step: Callable[[Tensor, Any | None], tuple[Tensor, Any]], rows: Tensor, before: BlockState
) -> tuple[Tensor, BlockState]:
    """Run new tokens of one sequence.

    Args:
        step: (block [1, 64, ..], state or None) -> (result [1, 64, ..], state after it). Causal.
        rows: [L, ..], the new tokens, L >= 1.
        before: What the tokens before them left.
    Returns: Results of the new tokens [L, ..], and what is left behind now.
    """
    kept = 0 if before.rows is None else before.rows.shape[0]
    rows = rows if before.rows is None else torch.cat([before.rows, rows])
    state, outputs = before.state, []
    for start in range(0, rows.shape[0], BLOCK):
        block = rows[start : start + BLOCK]
        size = block.shape[0]
        y, after = step(torch.cat([block, block.new_zeros(BLOCK - size, *block.shape[1:])])[None], state)
        outputs.append(y[0, max(kept - start, 0) : size])
        if size == BLOCK:
            state = after
    unfinished = rows.shape[0] // BLOCK * BLOCK
    return torch.cat(outputs), BlockState(rows[unfinished:].clone(), state)
