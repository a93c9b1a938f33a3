"""Caches and token-by-token generation for the Kimi Linear decoder.

A KDA layer remembers a fixed amount whatever the length: the last W-1 inputs of its three short convolutions and the
state [K, V] of every head. An MLA layer remembers one compressed latent and one shared key slice per token.

    cache = model.init_cache(batch_size=1, max_length=512)
    logits = model(prompt, cache=cache)        # [1, L, vocabulary]: prefill, any number of tokens
    logits = model(next_token, cache=cache)    # [1, 1, vocabulary]: one recurrent step

Every row of a batch advances by the same number of tokens; rows of different lengths are separate caches.

A model with batch_invariant=True keeps a BlockCache instead: see `KimiLinearModel`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from openkda.nn.blocks import BlockState

if TYPE_CHECKING:
    from openkda.integrations.torchtitan.model import KimiLinearModel
    from openkda.kda.replay import ReplayState


@dataclass(slots=True)
class KDACache:
    """What one KDA layer carries from token to token; None before the first token means zeros.

    q_conv, k_conv, v_conv: the last W-1 convolution inputs, `[B, C, W-1]`.
    state: `[B, H, K, V]` fp32; a ReplayState where the operator is batch invariant.
    """

    q_conv: torch.Tensor | None = None
    k_conv: torch.Tensor | None = None
    v_conv: torch.Tensor | None = None
    state: torch.Tensor | ReplayState | None = None


@dataclass(slots=True)
class MLACache:
    """Compressed keys and values of one MLA layer, in buffers of fixed length.

    latent: `[B, max_length, kv_lora_rank]`, after its norm.
    k_shared: `[B, max_length, qk_rope_head_dim]`, the key slice that all heads share.
    length: tokens stored so far.
    """

    latent: torch.Tensor
    k_shared: torch.Tensor
    length: int = 0

    def append(self, latent: torch.Tensor, k_shared: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store L new tokens; return all latents `[B, T, R]` and shared keys `[B, T, S]` seen so far."""
        end = self.length + latent.shape[1]
        if end > self.latent.shape[1]:
            raise ValueError(
                f"cache: the sequence must fit max_length = {self.latent.shape[1]}, got {end} tokens; "
                "pass a larger max_length to init_cache"
            )
        self.latent[:, self.length : end] = latent
        self.k_shared[:, self.length : end] = k_shared
        self.length = end
        return self.latent[:, :end], self.k_shared[:, :end]


@dataclass(slots=True)
class GrowingMLACache:
    """The same without a limit. An append makes new tensors: copies of the cache, and autograd, keep the old ones."""

    latent: torch.Tensor | None = None
    k_shared: torch.Tensor | None = None

    def append(self, latent: torch.Tensor, k_shared: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store L new tokens; return all latents `[B, T, R]` and shared keys `[B, T, S]` seen so far."""
        if self.latent is not None and self.k_shared is not None:
            latent, k_shared = torch.cat([self.latent, latent], 1), torch.cat([self.k_shared, k_shared], 1)
        self.latent, self.k_shared = latent, k_shared
        return latent, k_shared


@dataclass(slots=True)
class DecodeCache:
    """One entry per layer, in order, and the number of tokens that went in."""

    layers: list[KDACache | MLACache]
    length: int = 0


@dataclass(slots=True)
class BlockCache:
    """For batch_invariant: of every row the tokens of its unfinished block and the layers' caches before that block."""

    rows: list[BlockState] = field(default_factory=list)
    length: int = 0


@torch.no_grad()
def stream(
    model: KimiLinearModel,
    prompt: torch.Tensor,
    *,
    max_new_tokens: int,
    choose: Callable[[torch.Tensor], torch.Tensor] | None = None,
    stop: int | None = None,
) -> Iterator[torch.Tensor]:
    """Generate one token at a time after a prompt.

    Args:
        model: A Kimi Linear decoder; put it into eval mode first.
        prompt: Token ids, `[B, L]` with L >= 1.
        max_new_tokens: Upper limit of the tokens generated.
        choose: From logits `[B, vocabulary]` to token ids `[B]`; None takes the most likely token (greedy).
        stop: Token id that ends the generation once every row of the batch has produced it at some step.

    Yields: Token ids `[B]`, one tensor per step.
    Raises: ValueError for a prompt that is not `[B, L]` or is empty.
    """
    if prompt.ndim != 2 or prompt.shape[1] == 0:
        raise ValueError(f"stream: prompt must be token ids [B, L] with L >= 1, got shape {list(prompt.shape)}")
    choose = choose or (lambda logits: logits.argmax(-1))
    cache = model.init_cache(prompt.shape[0], max_length=prompt.shape[1] + max_new_tokens)
    ended = torch.zeros(prompt.shape[0], dtype=torch.bool, device=prompt.device)
    tokens = prompt
    for _ in range(max_new_tokens):
        next_token = choose(model(tokens, cache=cache)[:, -1])
        yield next_token
        if stop is not None:
            ended |= next_token == stop
            if bool(ended.all()):
                return
        tokens = next_token[:, None]
