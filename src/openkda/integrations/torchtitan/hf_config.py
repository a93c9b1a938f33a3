"""config.json of a Hugging Face checkpoint <-> sizes of our model.

Two spellings are read: that of published Kimi Linear checkpoints (`linear_attn_config`, layers counted from 1) and that
of transformers (`layer_types`, `mlp_layer_types`). Both are written. What our model cannot express is an error that
names the key; a key that does not change the function computed is ignored.

The bounded gate is `linear_attn_config.gate_lower_bound`, where transformers' glm5_next has it. transformers'
kimi_linear has no such gate and would run the other one without a word, so a model with it is written with a model type
of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openkda.integrations.torchtitan.builders import Sizes
from openkda.integrations.torchtitan.model import KimiLinearModel

SOFTPLUS_TYPE, BOUNDED_TYPE = "kimi_linear", "kimi_linear_bounded"

# Ours -> the names in config.json, the published one first.
_NAMES = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size",),
    "num_layers": ("num_hidden_layers",),
    "num_heads": ("num_attention_heads",),
    "kv_lora_rank": ("kv_lora_rank",),
    "qk_nope_head_dim": ("qk_nope_head_dim",),
    "qk_rope_head_dim": ("qk_rope_head_dim",),
    "v_head_dim": ("v_head_dim",),
    "intermediate_size": ("intermediate_size",),
    "moe_intermediate_size": ("moe_intermediate_size",),
    "num_experts": ("num_experts", "num_local_experts"),
    "num_experts_per_token": ("num_experts_per_token", "num_experts_per_tok"),
    "num_shared_experts": ("num_shared_experts", "n_shared_experts"),
    "routed_scaling_factor": ("routed_scaling_factor",),
    "rms_norm_eps": ("rms_norm_eps",),
}
# Ours -> (name in linear_attn_config, name at the top level).
_LINEAR_NAMES = {
    "kda_num_heads": ("num_heads", "linear_num_heads"),
    "head_dim": ("head_dim", "linear_head_dim"),
    "conv_kernel_size": ("short_conv_kernel_size", "linear_conv_kernel_dim"),
}
# Keys that must have this value, where they are given: anything else is another model.
_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "q_lora_rank": None,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "num_expert_group": 1,
    "n_group": 1,
    "moe_renormalize": True,
    "norm_topk_prob": True,
    "moe_router_activation_func": "sigmoid",
    "mla_use_nope": True,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
}


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a folder, or the file itself.

    Raises: ValueError when there is none, or it is no JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{path}: must hold a config.json")
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file}: is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file}: must be a JSON object, got {type(config).__name__}")
    return config


def sizes_from_config(config: Mapping[str, Any]) -> Sizes:
    """Sizes of our model from a config.json; experts are computed in fp32, which is what the dtype then decides.

    Raises: ValueError naming a key that is missing, or whose value our model has no counterpart for.
    """
    if config.get("model_type") not in (SOFTPLUS_TYPE, BOUNDED_TYPE):
        _refuse("model_type", f"be {SOFTPLUS_TYPE!r} or {BOUNDED_TYPE!r}", config.get("model_type"))
    for key, value in _FIXED.items():
        if config.get(key, value) != value:
            _refuse(key, f"be {value!r}", config[key])
    linear = config.get("linear_attn_config") or {}
    values = {ours: _get(config, names) for ours, names in _NAMES.items()}
    values |= {ours: linear.get(inner, config.get(outer)) for ours, (inner, outer) in _LINEAR_NAMES.items()}
    for ours, (inner, _) in _LINEAR_NAMES.items():
        if values[ours] is None:
            _refuse(f"linear_attn_config.{inner}", "be given", None)
    if config.get("num_key_value_heads", values["num_heads"]) != values["num_heads"]:
        _refuse(
            "num_key_value_heads", f"equal num_attention_heads = {values['num_heads']}", config["num_key_value_heads"]
        )
    bound = linear.get("gate_lower_bound")
    if (bound is not None) != (config["model_type"] == BOUNDED_TYPE):
        _refuse("linear_attn_config.gate_lower_bound", f"go together with model_type {BOUNDED_TYPE!r}", bound)
    return Sizes(
        **values,
        mla_layers=_mla_layers(config, linear, values["num_layers"]),
        first_k_dense=_first_k_dense(config, values["num_layers"]),
        gate_lower_bound=bound,
        expert_dtype="float32",
    )


def config_from_model(model: KimiLinearModel.Config, dtype: str = "bfloat16") -> dict[str, Any]:
    """config.json that describes our model, in both spellings, so that published code and transformers read it.

    Args:
        model: Config of a decoder whose layers have the same sizes throughout, as `builders.model_config` makes it.
        dtype: Of the weights: "float32" or "bfloat16".
    Raises: ValueError for a model that config.json cannot describe.
    """
    sizes = sizes_from_model(model)
    out: dict[str, Any] = {names[0]: getattr(sizes, ours) for ours, names in _NAMES.items()}
    mla = list(sizes.mla_layers)
    kda = [i for i in range(1, sizes.num_layers + 1) if i not in mla]
    linear: dict[str, Any] = {inner: getattr(sizes, ours) for ours, (inner, _) in _LINEAR_NAMES.items()}
    linear |= {"kda_layers": kda, "full_attn_layers": mla}
    if sizes.gate_lower_bound is not None:
        linear["gate_lower_bound"] = sizes.gate_lower_bound
    bounded = sizes.gate_lower_bound is not None
    out |= {outer: getattr(sizes, ours) for ours, (_, outer) in _LINEAR_NAMES.items()}
    out |= {
        "model_type": BOUNDED_TYPE if bounded else SOFTPLUS_TYPE,
        "architectures": ["KimiLinearForCausalLM"],
        "dtype": dtype,
        "num_key_value_heads": sizes.num_heads,
        "linear_attn_config": linear,
        "layer_types": ["full_attention" if i in mla else "linear_attention" for i in range(1, sizes.num_layers + 1)],
        "mlp_layer_types": ["dense" if i < sizes.first_k_dense else "sparse" for i in range(sizes.num_layers)],
        "first_k_dense_replace": sizes.first_k_dense,
        "moe_renormalize": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "q_lora_rank": None,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        # transformers' defaults are token ids of the published tokenizer, which a smaller vocabulary does not have.
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return out


def sizes_from_model(model: KimiLinearModel.Config) -> Sizes:
    """The sizes that `builders.model_config` would make this model from.

    Raises: ValueError unless the model has at least one KDA layer, one MLA layer and one layer of experts.
    """
    kda = next((layer.kda for layer in model.layers if layer.kda is not None), None)
    mla = next((layer.attention for layer in model.layers if layer.attention is not None), None)
    moe = next((layer.moe for layer in model.layers if layer.moe is not None), None)
    dense = [layer.feed_forward for layer in model.layers if layer.feed_forward is not None]
    if kda is None or mla is None or moe is None:
        raise ValueError("config.json: the model must have a layer of every kind: KDA, MLA and experts")
    experts, shared = moe.routed_experts.inner_experts, moe.shared_experts
    router: Any = moe.router
    return Sizes(
        vocab_size=model.vocab_size,
        hidden_size=model.dim,
        num_layers=len(model.layers),
        mla_layers=tuple(i for i, layer in enumerate(model.layers, 1) if layer.attention is not None),
        num_heads=mla.n_heads,
        kda_num_heads=kda.num_heads,
        head_dim=kda.head_dim,
        conv_kernel_size=kda.q_conv1d.kernel_size,
        kv_lora_rank=mla.kv_lora_rank,
        qk_nope_head_dim=mla.qk_nope_head_dim,
        qk_rope_head_dim=mla.qk_rope_head_dim,
        v_head_dim=mla.v_head_dim,
        intermediate_size=dense[0].w1.out_features if dense else experts.hidden_dim,
        first_k_dense=len(dense),
        moe_intermediate_size=experts.hidden_dim,
        num_experts=moe.num_experts,
        num_experts_per_token=router.top_k,
        num_shared_experts=0 if shared is None else shared.w1.out_features // experts.hidden_dim,
        routed_scaling_factor=router.route_scale,
        rms_norm_eps=model.norm.eps,
        kv_norm_eps=mla.kv_norm.eps,
        gate_lower_bound=kda.inner_kda.lower_bound,
        expert_dtype=getattr(experts, "expert_dtype", "bfloat16"),
    )


def _mla_layers(config: Mapping[str, Any], linear: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    types = config.get("layer_types")
    if types is not None:
        known = {"linear_attention", "full_attention"}
        if len(types) != num_layers or not set(types) <= known:
            _refuse("layer_types", f"name one of {sorted(known)} for each of {num_layers} layers", types)
        return tuple(i for i, kind in enumerate(types, 1) if kind == "full_attention")
    if "full_attn_layers" not in linear:
        _refuse("linear_attn_config.full_attn_layers", "be given where layer_types is not", None)
    return tuple(linear["full_attn_layers"])


def _first_k_dense(config: Mapping[str, Any], num_layers: int) -> int:
    types = config.get("mlp_layer_types")
    if types is None:
        return config.get("first_k_dense_replace", 1)
    first = types.index("sparse") if "sparse" in types else len(types)
    if len(types) != num_layers or list(types) != ["dense"] * first + ["sparse"] * (num_layers - first):
        _refuse("mlp_layer_types", f"be dense layers followed by sparse ones, {num_layers} in all", types)
    return first


def _get(config: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    for name in names:
        if config.get(name) is not None:
            return config[name]
    _refuse(names[0], "be given", None)


def _refuse(key: str, rule: str, got: Any) -> Any:
    raise ValueError(f"config.json: {key} must {rule}, got {got!r}")
