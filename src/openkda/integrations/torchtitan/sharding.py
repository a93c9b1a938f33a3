"""Where parameters and activations of Kimi Linear live on a device mesh, as torchtitan writes such plans.

KDA under tensor parallelism is split by heads:

    column-wise   q_proj k_proj v_proj f_b_proj b_proj g_b_proj       output channels are heads
    by channel    the three convolution weights, A_log, dt_bias       dimension 0 is heads
    replicated    f_a_proj g_a_proj o_norm                            a rank of all heads, and one weight for every head
    row-wise      o_proj                                              partial sums are reduced

x is gathered once at the border of the layer. InnerKDA is the one region that works on local tensors; every head is
independent there, so it needs no communication. MLA, feed-forward and experts follow torchtitan's deepseek_v3.

The plan is attached to the configs by KimiLinearModel.Config.update_from_config; parallelize.py says which degrees run.
"""

from __future__ import annotations

import spmd_types as spmd
from torchtitan.models.common.decoder_sharding import (
    colwise_config,
    dense_activation_placement,
    dense_param_placement,
    dense_sequence_parallel_placement,
    norm_config,
    rowwise_config,
    set_decoder_sharding_config,
    set_dense_ffn_sharding,
    set_gqa_inner_attention_local_map,
)
from torchtitan.models.common.moe_sharding import set_moe_sharding_config
from torchtitan.protocols.sharding import LocalMapConfig, ShardingConfig, SpmdLayout

from openkda.integrations.torchtitan.kda import KDA
from openkda.integrations.torchtitan.mla import MLA
from openkda.integrations.torchtitan.model import KimiLinearBlock, KimiLinearModel

_EXPERT_LAYOUT: dict[str, spmd.PerMeshAxisSpmdType] = {"w1_EFD": spmd.S(1), "w2_EDF": spmd.S(2), "w3_EFD": spmd.S(1)}


def set_kimi_linear_sharding_config(config: KimiLinearModel.Config, *, enable_sp: bool, enable_ep: bool) -> None:
    """Attach a sharding plan to every module config; axes that are not in use are dropped when it is applied."""
    set_decoder_sharding_config(config, enable_sp=enable_sp)
    for layer in config.layers:
        _set_block(layer, enable_sp=enable_sp, enable_ep=enable_ep)


def _set_block(layer: KimiLinearBlock.Config, *, enable_sp: bool, enable_ep: bool) -> None:
    layer.attention_norm.sharding_config = norm_config(enable_sp=enable_sp)
    layer.ffn_norm.sharding_config = norm_config(enable_sp=enable_sp)
    x_layout = dense_sequence_parallel_placement() if enable_sp else dense_activation_placement(tp=spmd.I)
    if layer.kda is not None:
        _set_kda(layer.kda, x_layout, enable_sp=enable_sp)
    if layer.attention is not None:
        _set_mla(layer.attention, x_layout, enable_sp=enable_sp)
    if layer.feed_forward is not None:
        set_dense_ffn_sharding(layer.feed_forward, attn_x_layout=x_layout, enable_sp=enable_sp)
    if layer.moe is not None:
        set_moe_sharding_config(layer.moe, enable_ep=enable_ep, enable_sp=enable_sp, expert_param_layout=_EXPERT_LAYOUT)


def _state(**layouts: spmd.PerMeshAxisSpmdType) -> ShardingConfig:
    return ShardingConfig(state_shardings={name: dense_param_placement(tp=tp) for name, tp in layouts.items()})


def _gathered(x_layout: SpmdLayout) -> ShardingConfig:
    return ShardingConfig(
        in_src_shardings={"x_BLD": x_layout}, in_dst_shardings={"x_BLD": dense_activation_placement(tp=spmd.R)}
    )


def _set_kda(kda: KDA.Config, x_layout: SpmdLayout, *, enable_sp: bool) -> None:
    kda.sharding_config = _gathered(x_layout)
    for projection in (kda.q_proj, kda.k_proj, kda.v_proj, kda.f_b_proj, kda.b_proj, kda.g_b_proj):
        projection.sharding_config = colwise_config()
    for conv in (kda.q_conv1d, kda.k_conv1d, kda.v_conv1d):
        conv.sharding_config = _state(weight=spmd.S(0))
    for projection in (kda.f_a_proj, kda.g_a_proj):
        projection.sharding_config = _state(weight=spmd.R)
    kda.decay.sharding_config = _state(A_log=spmd.S(0), dt_bias=spmd.S(0))
    kda.o_norm.sharding_config = _state(weight=spmd.R)
    kda.o_proj.sharding_config = rowwise_config(output_sp=enable_sp)

    heads = dense_activation_placement(tp=spmd.S(2))  # [B, L, heads or channels, ..]
    weight = dense_param_placement(tp=spmd.S(0))
    activations = ("q_BLP", "k_BLP", "v_BLP", "raw_gate_BLP", "raw_beta_BLH")
    weights = ("q_conv_P1W", "k_conv_P1W", "v_conv_P1W", "A_log_H", "dt_bias_HK")
    layouts = {**dict.fromkeys(activations, heads), **dict.fromkeys(weights, weight)}
    kda.inner_kda.sharding_config = ShardingConfig(
        in_src_shardings=layouts,
        in_dst_shardings=layouts,
        out_src_shardings=heads,
        local_map=LocalMapConfig(in_grad_placements=tuple(layouts.values())),
    )


def _set_mla(mla: MLA.Config, x_layout: SpmdLayout, *, enable_sp: bool) -> None:
    mla.sharding_config = _gathered(x_layout)
    mla.wq.sharding_config = colwise_config()
    mla.wkv_a.sharding_config = _state(weight=spmd.R)
    mla.kv_norm.sharding_config = _state(weight=spmd.R)
    mla.wkv_b.sharding_config = colwise_config()
    mla.wo.sharding_config = rowwise_config(output_sp=enable_sp)
    set_gqa_inner_attention_local_map(mla.inner_attention)
