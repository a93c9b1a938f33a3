"""Configs of Kimi Linear modules from a handful of sizes, one function a module, and the named models.

torchtitan wants every module described by a config with its dimensions and initialisers filled in. The sizes of a model
are gathered in `Sizes`; the functions below spread them over the tree.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import nn
from torchtitan.components.optimizer import register_moe_load_balancing_hook
from torchtitan.models.common import Conv1d, Embedding, Linear, RMSNorm
from torchtitan.models.common.config_utils import (
    get_attention_config,
    make_ffn_config,
    make_moe_config,
    make_router_config,
    make_token_dispatcher_config,
)
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.moe import MoE
from torchtitan.models.common.param_init import depth_scaled_std
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module

from openkda.integrations.torchtitan.cpu import MaskedAttention
from openkda.integrations.torchtitan.kda import KDA, DecayParameters, InnerKDA, RMSNormGated
from openkda.integrations.torchtitan.mla import MLA
from openkda.integrations.torchtitan.model import Experts, KimiLinearBlock, KimiLinearModel, RoutedTokens, RouterGate
from openkda.integrations.torchtitan.parallelize import parallelize_kimi_linear
from openkda.integrations.torchtitan.pipeline import pipeline_kimi_linear
from openkda.integrations.torchtitan.state_dict_adapter import KimiLinearStateDictAdapter

Init = dict[str, Callable]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Everything that tells one Kimi Linear model from another; names follow the published configuration."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    mla_layers: tuple[int, ...]
    """Layers with full attention, counted from 1 as in published configurations; the others have KDA."""
    num_heads: int
    kda_num_heads: int | None = None
    """Heads of a KDA layer, where they are not as many as those of an MLA layer."""
    head_dim: int
    """Key and value width of a KDA head, and rank of the two low-rank gates."""
    conv_kernel_size: int = 4
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    """Width of the dense feed-forward of the first layers."""
    first_k_dense: int = 1
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int = 1
    routed_scaling_factor: float = 2.446
    rms_norm_eps: float = 1e-5
    kv_norm_eps: float = 1e-6
    """The norm of the MLA latent does not use rms_norm_eps: published models run it with this one."""
    gate_lower_bound: float | None = None
    """None: the softplus gate of Kimi Linear. Negative: the bounded gate of Kimi K3."""
    expert_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    init_std: float = 0.02
    embedding_std: float = 1.0


TINY = Sizes(
    vocab_size=260,  # 256 bytes, begin, end, padding, one unused
    hidden_size=128,
    num_layers=4,
    mla_layers=(4,),
    num_heads=4,
    head_dim=32,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    intermediate_size=384,
    moe_intermediate_size=128,
    num_experts=8,
    num_experts_per_token=2,
    expert_dtype="float32",
)

SIZES: dict[str, Sizes] = {
    "tiny": TINY,
    "tiny-bounded": replace(TINY, gate_lower_bound=-5.0),
    "debug": Sizes(
        vocab_size=260,
        hidden_size=256,
        num_layers=6,
        mla_layers=(4, 6),
        num_heads=4,
        head_dim=64,
        kv_lora_rank=128,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        intermediate_size=1024,
        moe_intermediate_size=256,
        num_experts=16,
        num_experts_per_token=4,
    ),
    # Source: configuration of Kimi-Linear-48B-A3B as published.
    "48B-A3B": Sizes(
        vocab_size=163840,
        hidden_size=2304,
        num_layers=27,
        mla_layers=(4, 8, 12, 16, 20, 24, 27),
        num_heads=32,
        head_dim=128,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        intermediate_size=9216,
        moe_intermediate_size=1024,
        num_experts=256,
        num_experts_per_token=8,
    ),
}


def model_registry(flavor: str, *, attention_backend: str = "flex", moe_comm_backend: str = "standard") -> ModelSpec:
    """The torchtitan model specification of a named size.

    Args:
        flavor: A key of SIZES.
        attention_backend: "flex", "flex_flash" or "varlen" as in torchtitan, or "masked" (any device, quadratic mask).
        moe_comm_backend: How tokens travel to experts; torchtitan's names.
    Raises: ValueError for an unknown flavor or backend.
    """
    if flavor not in SIZES:
        raise ValueError(f"model_registry: flavor must be one of {sorted(SIZES)}, got {flavor!r}")
    return ModelSpec(
        name="kimi_linear",
        flavor=flavor,
        model=model_config(SIZES[flavor], attention_backend=attention_backend, moe_comm_backend=moe_comm_backend),
        parallelize_fn=parallelize_kimi_linear,
        pipelining_fn=pipeline_kimi_linear,
        post_optimizer_build_fn=register_moe_load_balancing_hook,
        state_dict_adapter=KimiLinearStateDictAdapter,
    )


def model_config(
    sizes: Sizes, *, attention_backend: str = "flex", moe_comm_backend: str = "standard"
) -> KimiLinearModel.Config:
    """Config of a whole decoder."""
    _check(sizes)
    return KimiLinearModel.Config(
        vocab_size=sizes.vocab_size,
        dim=sizes.hidden_size,
        tok_embeddings=Embedding.Config(
            num_embeddings=sizes.vocab_size,
            embedding_dim=sizes.hidden_size,
            param_init={"weight": partial(nn.init.normal_, std=sizes.embedding_std)},
        ),
        norm=_norm(sizes),
        lm_head=_linear(sizes.hidden_size, sizes.vocab_size, std=sizes.hidden_size**-0.5),
        layers=[_block(sizes, i, attention_backend, moe_comm_backend) for i in range(sizes.num_layers)],
    )


def _check(sizes: Sizes) -> None:
    if any(not 1 <= layer <= sizes.num_layers for layer in sizes.mla_layers):
        raise ValueError(
            f"kimi_linear: mla_layers must lie between 1 and num_layers = {sizes.num_layers}, got {sizes.mla_layers}; "
            "layers are counted from 1"
        )
    if sizes.gate_lower_bound is not None and sizes.gate_lower_bound >= 0:
        raise ValueError(
            f"kimi_linear: gate_lower_bound must be below 0, got {sizes.gate_lower_bound}; None gives the softplus gate"
        )


def _block(sizes: Sizes, index: int, attention_backend: str, moe_comm_backend: str) -> KimiLinearBlock.Config:
    is_mla, is_dense = index + 1 in sizes.mla_layers, index < sizes.first_k_dense
    return KimiLinearBlock.Config(
        attention_norm=_norm(sizes),
        kda=None if is_mla else _kda(sizes, index),
        attention=_mla(sizes, index, attention_backend) if is_mla else None,
        ffn_norm=_norm(sizes),
        feed_forward=_ffn(sizes, index, sizes.intermediate_size) if is_dense else None,
        moe=None if is_dense else _moe(sizes, index, moe_comm_backend),
    )


def _kda(sizes: Sizes, index: int) -> KDA.Config:
    dim, rank, std = sizes.hidden_size, sizes.head_dim, sizes.init_std
    heads = sizes.kda_num_heads or sizes.num_heads
    width = heads * sizes.head_dim
    conv = Conv1d.Config(
        in_channels=width,
        out_channels=width,
        kernel_size=sizes.conv_kernel_size,
        groups=width,
        bias=False,
        param_init={"weight": partial(_uniform, bound=sizes.conv_kernel_size**-0.5)},
    )
    return KDA.Config(
        num_heads=heads,
        head_dim=sizes.head_dim,
        q_proj=_linear(dim, width, std=std),
        k_proj=_linear(dim, width, std=std),
        v_proj=_linear(dim, width, std=std),
        q_conv1d=replace(conv),
        k_conv1d=replace(conv),
        v_conv1d=replace(conv),
        f_a_proj=_linear(dim, rank, std=std),
        f_b_proj=_linear(rank, width, std=std),
        b_proj=_linear(dim, heads, std=std),
        g_a_proj=_linear(dim, rank, std=std),
        g_b_proj=_linear(rank, width, std=std),
        decay=DecayParameters.Config(
            num_heads=heads, head_dim=sizes.head_dim, param_init=_decay_init(sizes.gate_lower_bound)
        ),
        inner_kda=InnerKDA.Config(head_dim=sizes.head_dim, lower_bound=sizes.gate_lower_bound),
        o_norm=RMSNormGated.Config(dim=sizes.head_dim, eps=sizes.rms_norm_eps, param_init={"weight": nn.init.ones_}),
        o_proj=_linear(width, dim, std=depth_scaled_std(std, index)),
    )


def _mla(sizes: Sizes, index: int, attention_backend: str) -> MLA.Config:
    dim, heads, std = sizes.hidden_size, sizes.num_heads, sizes.init_std
    qk_head_dim = sizes.qk_nope_head_dim + sizes.qk_rope_head_dim
    return MLA.Config(
        n_heads=heads,
        kv_lora_rank=sizes.kv_lora_rank,
        qk_nope_head_dim=sizes.qk_nope_head_dim,
        qk_rope_head_dim=sizes.qk_rope_head_dim,
        v_head_dim=sizes.v_head_dim,
        wq=_linear(dim, heads * qk_head_dim, std=std),
        wkv_a=_linear(dim, sizes.kv_lora_rank + sizes.qk_rope_head_dim, std=std),
        kv_norm=RMSNorm.Config(
            normalized_shape=sizes.kv_lora_rank, eps=sizes.kv_norm_eps, param_init={"weight": nn.init.ones_}
        ),
        wkv_b=_linear(sizes.kv_lora_rank, heads * (sizes.qk_nope_head_dim + sizes.v_head_dim), std=std),
        wo=_linear(heads * sizes.v_head_dim, dim, std=depth_scaled_std(std, index)),
        inner_attention=_inner_attention(attention_backend),
    )


def _inner_attention(backend: str) -> Module.Config:
    return MaskedAttention.Config() if backend == "masked" else get_attention_config(backend)


def _ffn(sizes: Sizes, index: int, width: int) -> FeedForward.Config:
    return make_ffn_config(
        dim=sizes.hidden_size,
        hidden_dim=width,
        w1_param_init=_normal(sizes.init_std),
        w2w3_param_init=_normal(depth_scaled_std(sizes.init_std, index)),
    )


def _moe(sizes: Sizes, index: int, comm_backend: str) -> MoE.Config:
    dim, std, deep_std = sizes.hidden_size, sizes.init_std, depth_scaled_std(sizes.init_std, index)
    router = make_router_config(
        dim=dim,
        num_experts=sizes.num_experts,
        gate_param_init=_normal(std),
        top_k=sizes.num_experts_per_token,
        score_func="sigmoid",
        route_norm=True,
        route_scale=sizes.routed_scaling_factor,
    )
    router.gate = RouterGate.Config(in_features=dim, out_features=sizes.num_experts, param_init=_normal(std))
    return make_moe_config(
        num_experts=sizes.num_experts,
        router=router,
        routed_experts=RoutedTokens.Config(
            inner_experts=Experts.Config(
                dim=dim,
                hidden_dim=sizes.moe_intermediate_size,
                num_experts=sizes.num_experts,
                expert_dtype=sizes.expert_dtype,
                param_init={
                    "w1_EFD": partial(_trunc_normal, std=std),
                    "w2_EDF": partial(_trunc_normal, std=deep_std),
                    "w3_EFD": partial(_trunc_normal, std=deep_std),
                },
            ),
            token_dispatcher=make_token_dispatcher_config(
                num_experts=sizes.num_experts,
                top_k=sizes.num_experts_per_token,
                comm_backend=comm_backend,
                hidden_dim=dim,
            ),
        ),
        shared_experts=_ffn(sizes, index, sizes.moe_intermediate_size * sizes.num_shared_experts),
    )


def _norm(sizes: Sizes) -> RMSNorm.Config:
    return RMSNorm.Config(
        normalized_shape=sizes.hidden_size, eps=sizes.rms_norm_eps, param_init={"weight": nn.init.ones_}
    )


def _linear(in_features: int, out_features: int, *, std: float) -> Linear.Config:
    return Linear.Config(in_features=in_features, out_features=out_features, param_init=_normal(std))


def _normal(std: float) -> Init:
    return {"weight": partial(_trunc_normal, std=std)}


def _trunc_normal(parameter: torch.Tensor, std: float) -> None:
    nn.init.trunc_normal_(parameter, std=std, a=-3 * std, b=3 * std)


def _uniform(parameter: torch.Tensor, bound: float) -> None:
    nn.init.uniform_(parameter, -bound, bound)


def _decay_init(lower_bound: float | None) -> Init:
    """Initial decay, only in-place element-wise steps so that sharded parameters draw the same numbers.

    Softplus gate, as in the published model: rate exp(A_log) uniform in [1, 16], softplus(dt_bias) log-uniform in
    [0.001, 0.1], so a zero logit decays by between 0.001 and 1.6 nats a token.
    Bounded gate: rate 1 and dt_bias such that a zero logit decays by a log-uniform 0.001 to 1 nats a token. This one is
    openkda's choice; it gives both families the same spread of memory lengths at the start.
    """
    if lower_bound is None:
        return {"A_log": lambda p: p.uniform_(1.0, 16.0).log_(), "dt_bias": _init_softplus_bias}
    return {"A_log": nn.init.zeros_, "dt_bias": partial(_init_bounded_bias, lower_bound=lower_bound)}


def _log_uniform(parameter: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return parameter.uniform_(math.log(low), math.log(high)).exp_()


def _init_softplus_bias(dt_bias: torch.Tensor) -> None:
    step = _log_uniform(dt_bias, 1e-3, 1e-1).clamp_(min=1e-4)
    step.add_(torch.log(-torch.expm1(-step)))  # the inverse of softplus


def _init_bounded_bias(dt_bias: torch.Tensor, lower_bound: float) -> None:
    share = _log_uniform(dt_bias, 1e-3, min(1.0, -0.5 * lower_bound)).div_(-lower_bound)
    share.copy_(torch.log(share) - torch.log1p(-share))  # the inverse of the sigmoid
