"""Kimi Linear as a torchtitan model: experts, the block, the decoder.

The configuration tree equals the module tree, so `layers.0.kda.q_proj` names both. Attention is in kda.py and mla.py.

Suffixes of tensor names: B batch, L tokens of a row, D model width, E experts, F width of an expert, R tokens routed to
experts.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.models.common import Linear, RMSNorm
from torchtitan.models.common.attention import (
    BaseAttention,
    VarlenAttention,
    create_varlen_metadata_for_document,
)
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts
from torchtitan.models.common.token_dispatcher import update_ep_token_dispatcher_config
from torchtitan.models.utils import get_moe_model_nparams_and_flops
from torchtitan.protocols.module import Module

from openkda.integrations.torchtitan import require_torchtitan
from openkda.integrations.torchtitan.context_parallel import ContextParallel
from openkda.integrations.torchtitan.cpu import MaskedAttention, block_causal_mask
from openkda.integrations.torchtitan.decode import (
    BlockCache,
    DecodeCache,
    GrowingMLACache,
    KDACache,
    MLACache,
)
from openkda.integrations.torchtitan.kda import KDA, InnerKDA, document_offsets
from openkda.integrations.torchtitan.mla import MLA
from openkda.nn.blocks import BlockState, walk

require_torchtitan()

# Keys of the mask dictionary, one for each kind of layer, and names of the two mixers in a block.
ATTENTION = "attention"
KDA_LAYER = "kda"


class Experts(GroupedExperts):
    """Grouped experts with a choice of dtype.

    torchtitan computes routed experts in bf16 even when everything else is fp32. expert_dtype "float32" computes them
    in the dtype of the weights instead: slower, and what comparisons with other implementations need.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        expert_dtype: Literal["bfloat16", "float32"] = "bfloat16"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.expert_dtype = config.expert_dtype

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        if self.expert_dtype == "bfloat16":
            return super().forward(x_RD, num_tokens_per_expert_E)
        w1_EFD, w2_EDF, w3_EFD = (
            (w.to_local() if isinstance(w, DTensor) else w).float() for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        )
        offsets_E = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)
        x = x_RD.float()
        h_RF = F.silu(self._grouped_mm(A=x, B_t=w1_EFD.transpose(-2, -1), offs=offsets_E))
        h_RF = h_RF * self._grouped_mm(A=x, B_t=w3_EFD.transpose(-2, -1), offs=offsets_E)
        return self._grouped_mm(A=h_RF, B_t=w2_EDF.transpose(-2, -1), offs=offsets_E).type_as(x_RD)

    def one(self, x_BLD: torch.Tensor, expert: int) -> torch.Tensor:
        """What one expert makes of every row."""
        dtype = torch.bfloat16 if self.expert_dtype == "bfloat16" else torch.float32
        w1_FD, w2_DF, w3_FD = (w[expert].to(dtype) for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD))
        x = x_BLD.to(dtype)
        return F.linear(F.silu(F.linear(x, w1_FD)) * F.linear(x, w3_FD), w2_DF).type_as(x_BLD)


class RoutedTokens(RoutedExperts):
    """torchtitan's routed experts; with batch_invariant every chosen expert sees all rows, each at its own place.

    Usually an expert sees the rows that chose it, one after another: how many they are, and where one stands, depends
    on the others, and with it the last bits.
    """

    inner_experts: Experts
    batch_invariant = False  # KimiLinearModel sets it

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        pass

    def forward(
        self,
        x_BLD: torch.Tensor,
        topk_scores_BLK: torch.Tensor,
        topk_expert_ids_BLK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> torch.Tensor:
        if not self.batch_invariant:
            return super().forward(x_BLD, topk_scores_BLK, topk_expert_ids_BLK, num_local_tokens_per_expert_E)
        out_BLD = torch.zeros_like(x_BLD)
        for expert in topk_expert_ids_BLK.unique().tolist():
            mine_BLK = topk_expert_ids_BLK == expert
            score_BL1 = torch.where(mine_BLK, topk_scores_BLK, 0.0).sum(-1, keepdim=True)
            y_BLD = (self.inner_experts.one(x_BLD, expert).float() * score_BL1).type_as(x_BLD)
            out_BLD = torch.where(mine_BLK.any(-1, keepdim=True), out_BLD + y_BLD, out_BLD)
        return out_BLD


class RouterGate(Linear):
    """The router's projection, in fp32 whatever the dtype of its input.

    torchtitan asks autocast for that, which on a CPU does not offer fp32; scores in bf16 send tokens to other experts.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        return F.linear(x_BLD.float(), self.weight.float())


class KimiLinearBlock(Module):
    """x + mixer(norm(x)), then x + ffn(norm(x)); the mixer is `kda` or `attention`, the ffn `feed_forward` or `moe`."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        attention_norm: RMSNorm.Config
        kda: KDA.Config | None = None
        attention: MLA.Config | None = None
        ffn_norm: RMSNorm.Config
        feed_forward: FeedForward.Config | None = None
        moe: MoE.Config | None = None

        def __post_init__(self) -> None:
            if (self.kda is None) == (self.attention is None):
                raise ValueError("KimiLinearBlock: exactly one of kda and attention must be set")
            if (self.feed_forward is None) == (self.moe is None):
                raise ValueError("KimiLinearBlock: exactly one of feed_forward and moe must be set")

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = config.attention_norm.build()
        if config.kda is not None:
            self.kda = config.kda.build()
        if config.attention is not None:
            self.attention = config.attention.build()
        self.ffn_norm = config.ffn_norm.build()
        if config.feed_forward is not None:
            self.feed_forward = config.feed_forward.build()
        self.moe_enabled = config.moe is not None  # read by torchtitan's FSDP and load-balancing code
        if config.moe is not None:
            self.moe = config.moe.build()
        self.mixer_name = ATTENTION if config.kda is None else KDA_LAYER

    def forward(
        self,
        x_BLD: torch.Tensor,
        attention_masks: Mapping[str, Any] | None = None,
        positions: torch.Tensor | None = None,
        *,
        cache: KDACache | MLACache | GrowingMLACache | None = None,
    ) -> torch.Tensor:
        mask = None if attention_masks is None else attention_masks[self.mixer_name]
        mixer = getattr(self, self.mixer_name)
        x_BLD = x_BLD + mixer(self.attention_norm(x_BLD), mask, cache=cache)
        ffn = self.moe if self.moe_enabled else self.feed_forward
        return x_BLD + ffn(self.ffn_norm(x_BLD))


class KimiLinearModel(Decoder):
    """The decoder; which layer has KDA and which MLA is decided by the layer configs.

    With batch_invariant a token's logits have the same bits however its document is batched, packed, padded or decoded:
    the whole model runs on 64 tokens of one document at a time, always in the same shape, and while decoding the
    unfinished block runs again at every step (`openkda.nn.blocks`). Log-probabilities of a rollout are then those of
    training. It is slow (blocks run one after another), needs the whole model on one device (ValueError with tensor,
    pipeline, context or expert parallelism), and holds for the logits the model itself returns.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Decoder.Config):
        batch_invariant: bool = False

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """Apply run-time settings.

            Replaces Decoder.Config.update_from_config, which reads and resizes the rotary embedding of every attention
            layer and fails on a model that has none. Without rotation no sequence length is built into the model.
            """
            # Here, not at the top: sharding.py needs the classes of this file.
            from openkda.integrations.torchtitan.sharding import set_kimi_linear_sharding_config

            parallelism = config.parallelism
            if self.batch_invariant:
                _check_one_device(parallelism)
            update_ep_token_dispatcher_config(self, config)
            force_balance = getattr(getattr(config, "debug", None), "moe_force_load_balance", False)
            for layer in self.layers:
                _check_heads(layer, parallelism.tensor_parallel_degree)
                if layer.moe is not None:
                    layer.moe.router._debug_force_load_balance = force_balance
            set_kimi_linear_sharding_config(
                self,
                enable_sp=parallelism.enable_sequence_parallel,
                enable_ep=parallelism.expert_parallel_degree > 1,
            )

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Parameters in all, and floating-point operations a token for forward and backward.

            torchtitan's count covers weights and the quadratic attention of the MLA layers. A KDA layer adds, per token
            and head, S^T k, the rank-one update and S^T q: 6 K V forward, three times that with the backward.
            """
            mla = cast(MLA.Config | None, self.first_attention)
            head_dims = 0 if mla is None else mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim
            num_params, flops = get_moe_model_nparams_and_flops(
                self, model, 0 if mla is None else mla.n_heads, head_dims, seq_len
            )
            kda_layers = [layer.kda for layer in self.layers if layer.kda is not None]
            return num_params, flops + sum(3 * 6 * kda.num_heads * kda.head_dim**2 for kda in kda_layers)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.batch_invariant = config.batch_invariant
        for module in self.modules():
            if config.batch_invariant and isinstance(module, (InnerKDA, RoutedTokens)):
                module.batch_invariant = True

    context_parallel: ContextParallel | None = None
    """Set by parallelize: every rank then has its part of each row."""

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        attention_masks: Mapping[str, Any] | None = None,
        *,
        cache: DecodeCache | BlockCache | None = None,
    ) -> torch.Tensor:
        """Logits `[B, L, vocabulary]`.

        Args:
            tokens: Token ids, `[B, L]` (hidden states on later pipeline stages).
            positions: Position of every token in its document, `[B, L]`; None makes each row one document.
            attention_masks: From get_attention_masks; built here when positions are given and this is not.
            cache: From init_cache; the tokens then continue what the cache has seen, and it is updated in place.
        """
        if self.batch_invariant:
            return self._forward_blocks(tokens, positions, attention_masks, cache)
        if cache is not None:
            return self._forward_cached(tokens, cast(DecodeCache, cache))
        if self.context_parallel is not None:
            attention_masks = self._spread_masks(self.context_parallel, positions, attention_masks)
        elif attention_masks is None and positions is not None:
            attention_masks = self.get_attention_masks(positions)
        return super().forward(tokens, positions, attention_masks)  # pyright: ignore[reportArgumentType]

    def _forward_cached(self, tokens: torch.Tensor, cache: DecodeCache) -> torch.Tensor:
        h_BLD = self.tok_embeddings(tokens)
        for layer, layer_cache in zip(self.layers.values(), cache.layers, strict=True):
            h_BLD = layer(h_BLD, cache=layer_cache)
        cache.length += tokens.shape[1]
        return self.lm_head(self.norm(h_BLD))

    def _forward_blocks(
        self,
        tokens_BL: torch.Tensor,
        positions_BL: torch.Tensor | None,
        attention_masks: Mapping[str, Any] | None,
        cache: Any | None,
    ) -> torch.Tensor:
        """`forward`, every block of every document alone. Reads where documents begin on the host."""
        B, L = tokens_BL.shape[:2]
        if B * L == 0:
            return self.lm_head(self.norm(self.tok_embeddings(tokens_BL)))
        offsets = list(range(0, B * L + 1, L))
        if cache is None and positions_BL is not None:
            offsets = document_offsets(positions_BL).tolist()
        elif cache is None and attention_masks is not None:
            offsets = attention_masks[KDA_LAYER].tolist()
        documents = [tokens_BL.flatten()[a:b] for a, b in itertools.pairwise(offsets)]
        states = cache.rows if cache is not None else [BlockState()] * len(documents)
        results = [walk(self._block, doc, state) for doc, state in zip(documents, states, strict=True)]
        if cache is not None:
            cache.rows, cache.length = [state for _, state in results], cache.length + L
        return torch.cat([logits for logits, _ in results]).view(B, L, -1)

    def _block(self, tokens: torch.Tensor, before: list[Any] | None) -> tuple[torch.Tensor, list[Any]]:
        """Logits of 64 tokens `[1, 64]`, and the layers' caches after them; those before them are left alone."""
        new = (KDACache() if layer.attention is None else GrowingMLACache() for layer in self.config.layers)
        caches = list(new) if before is None else [copy.copy(cache) for cache in before]
        h_BLD = self.tok_embeddings(tokens)
        for layer, cache in zip(self.layers.values(), caches, strict=True):
            h_BLD = layer(h_BLD, cache=cache)
        h_BLD = self.norm(h_BLD)
        return (h_BLD if self._skip_lm_head else self.lm_head(h_BLD)), caches

    def init_cache(self, batch_size: int, *, max_length: int) -> DecodeCache | BlockCache:
        """An empty cache for batch_size rows of at most max_length tokens each (only MLA layers need the limit)."""
        if self.batch_invariant:
            return BlockCache([BlockState()] * batch_size)
        weight = self.tok_embeddings.weight

        def buffer(width: int) -> torch.Tensor:
            return torch.zeros(batch_size, max_length, width, dtype=weight.dtype, device=weight.device)

        return DecodeCache(
            layers=[
                KDACache()
                if layer.attention is None
                else MLACache(buffer(layer.attention.kv_lora_rank), buffer(layer.attention.qk_rope_head_dim))
                for layer in self.config.layers
            ]
        )

    def get_attention_masks(self, positions: torch.Tensor) -> Mapping[str, Any] | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One mask for each kind of layer: block-causal for MLA, document offsets for KDA.

        Under context parallelism positions are those of whole rows, and the trainer splits what comes back, which can
        be a block mask only: the others are made by `forward`.
        """
        mla = self.config.first_attention
        if self.context_parallel is not None and (mla is None or _is_masked(mla)):
            return None
        if mla is None:
            mask = None
        elif _is_masked(mla):
            mask = block_causal_mask(positions)
        elif isinstance(mla.inner_attention, VarlenAttention.Config):
            mask = create_varlen_metadata_for_document(positions)
        else:
            mask = self._create_flex_attention_mask_for_document(positions, mla)
        if self.context_parallel is not None:
            return {ATTENTION: mask}
        return {ATTENTION: mask, KDA_LAYER: document_offsets(positions)}

    def _spread_masks(
        self, spread: ContextParallel, positions: torch.Tensor | None, masks: Mapping[str, Any] | None
    ) -> Mapping[str, Any]:
        """The masks of this rank's tokens; `masks` has that of MLA where the trainer has split it."""
        if positions is None:
            raise ValueError("kimi_linear: positions must be given under context parallelism, got None")
        everywhere = spread.gather_positions(positions)
        mla = self.config.first_attention
        mask = None if masks is None else masks[ATTENTION]
        if mla is not None and _is_masked(mla):
            mask = spread.masked_attention(everywhere)
        return {ATTENTION: mask, KDA_LAYER: spread.context(everywhere)}


def _is_masked(mla: BaseAttention.Config) -> bool:
    return isinstance(mla.inner_attention, MaskedAttention.Config)


def _check_one_device(parallelism: Any) -> None:
    """batch_invariant: a model that is cut computes in other shapes, or in another order."""
    for kind in ("tensor", "pipeline", "context", "expert"):
        degree = getattr(parallelism, f"{kind}_parallel_degree")
        if degree > 1:
            raise ValueError(
                f"kimi_linear: {kind}_parallel_degree must be 1 with batch_invariant, got {degree}; "
                "copies of the whole model (data parallelism) are fine"
            )


def _check_heads(layer: KimiLinearBlock.Config, tensor_parallel_degree: int) -> None:
    heads = layer.kda.num_heads if layer.kda is not None else layer.attention.n_heads  # pyright: ignore[reportOptionalMemberAccess]
    if heads % tensor_parallel_degree != 0:
        raise ValueError(
            f"kimi_linear: tensor_parallel_degree must divide the number of heads {heads}, got {tensor_parallel_degree}"
        )
