"""Multi-head latent attention without rotation, as a torchtitan module.

Suffixes of tensor names: B batch, L tokens of a row, T tokens in the cache, D model width, N attention heads,
H width of a head, C compressed latent (kv_lora_rank), S key slice shared by the heads (qk_rope_head_dim).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import spmd_types as spmd
import torch
import torch.nn.functional as F
from torchtitan.models.common import Linear, RMSNorm
from torchtitan.models.common.attention import BaseAttention

from openkda.integrations.torchtitan.decode import GrowingMLACache, MLACache
from openkda.integrations.torchtitan.kda import split_heads


class MLA(BaseAttention):
    """Multi-head latent attention without rotation (NoPE), as in the full-attention layers of Kimi Linear.

    Keys and values are expanded from a normed latent of kv_lora_rank numbers per token; qk_rope_head_dim further key
    channels are shared by all heads. Checkpoints call that slice "rope" although nothing rotates it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseAttention.Config):
        kv_lora_rank: int
        qk_nope_head_dim: int
        qk_rope_head_dim: int
        v_head_dim: int
        wq: Linear.Config
        wkv_a: Linear.Config
        kv_norm: RMSNorm.Config
        wkv_b: Linear.Config
        wo: Linear.Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.kv_lora_rank = config.kv_lora_rank
        self.qk_nope_head_dim = config.qk_nope_head_dim
        self.qk_rope_head_dim = config.qk_rope_head_dim
        self.qk_head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        self.v_head_dim = config.v_head_dim
        self.scale = self.qk_head_dim**-0.5
        self.wq = config.wq.build()
        self.wkv_a = config.wkv_a.build()
        self.kv_norm = config.kv_norm.build()
        self.wkv_b = config.wkv_b.build()
        self.wo = config.wo.build()
        self.inner_attention = config.inner_attention.build()

    def forward(
        self, x_BLD: torch.Tensor, attention_masks: Any = None, *, cache: MLACache | GrowingMLACache | None = None
    ) -> torch.Tensor:
        q_BLNH = split_heads(self.wq(x_BLD), self.qk_head_dim)
        latent_BLC, k_shared_BLS = torch.split(self.wkv_a(x_BLD), [self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        latent_BLC = self.kv_norm(latent_BLC)
        if cache is not None:
            return self.wo(self._attend_to_cache(q_BLNH, *cache.append(latent_BLC, k_shared_BLS)).flatten(2))
        k_BLNH, v_BLNH = self._expand(self.wkv_b(latent_BLC), k_shared_BLS)
        o_BLNH = self.inner_attention(q_BLNH, k_BLNH, v_BLNH, attention_masks=attention_masks, scale=self.scale)
        return self.wo(o_BLNH.contiguous().flatten(2))

    def _expand(self, kv_BLP: torch.Tensor, k_shared_BLS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with spmd.local():  # the heads divide evenly, and expanding the shared slice is local
            kv_BLNH = kv_BLP.view(*kv_BLP.shape[:2], -1, self.qk_nope_head_dim + self.v_head_dim)
            k_BLNH, v_BLNH = torch.split(kv_BLNH, [self.qk_nope_head_dim, self.v_head_dim], dim=-1)
            shared_BLNS = k_shared_BLS.unsqueeze(2).expand(-1, -1, k_BLNH.shape[2], -1)
            k_BLNH = torch.cat([k_BLNH, shared_BLNS], dim=-1)
            if spmd.is_type_checking():
                for tensor in (k_BLNH, v_BLNH):
                    spmd.assert_type(tensor, {"dp": spmd.S(0), "cp": spmd.S(1), "tp": spmd.S(2)})
        return k_BLNH, v_BLNH

    def _attend_to_cache(
        self, q_BLNH: torch.Tensor, latent_BTC: torch.Tensor, k_shared_BTS: torch.Tensor
    ) -> torch.Tensor:
        """Attention of the last L tokens to all T, on the compressed cache itself.

        wkv_b is linear, so q^T (W_k c) = (W_k^T q)^T c: keys and values of old tokens are never expanded, and the cache
        acts as one shared head.
        """
        w_k_NHC, w_v_NHC = self.wkv_b.weight.view(q_BLNH.shape[2], -1, self.kv_lora_rank).split(
            [self.qk_nope_head_dim, self.v_head_dim], dim=1
        )
        q_nope_BLNH, q_shared_BLNS = q_BLNH.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        q_latent_BLNC = torch.einsum("blnh,nhc->blnc", q_nope_BLNH, w_k_NHC)
        q = torch.cat([q_latent_BLNC, q_shared_BLNS], dim=-1).transpose(1, 2)
        k = torch.cat([latent_BTC, k_shared_BTS], dim=-1)
        L, N, T = q_BLNH.shape[1], q_BLNH.shape[2], latent_BTC.shape[1]
        mask_LT = torch.ones(L, T, dtype=torch.bool, device=q.device).tril(T - L)
        o_BNLC = F.scaled_dot_product_attention(
            q,
            k.unsqueeze(1).expand(-1, N, -1, -1),
            latent_BTC.unsqueeze(1).expand(-1, N, -1, -1),
            attn_mask=mask_LT,
            scale=self.scale,
        )
        return torch.einsum("bnlc,nvc->blnv", o_BNLC, w_v_NHC)
