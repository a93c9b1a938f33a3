"""config.json and the sizes of our model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from openkda.integrations.torchtitan.builders import SIZES, Sizes, model_config
from openkda.integrations.torchtitan.hf_config import (
    config_from_model,
    read_config,
    sizes_from_config,
    sizes_from_model,
)

# config.json of Kimi-Linear-48B-A3B as published, without what does not change the function computed.
PUBLISHED = {
    "model_type": "kimi_linear",
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}


def normalized(sizes: Sizes) -> Sizes:
    """Without what config.json does not hold: how weights are drawn, and the dtype of experts."""
    plain = Sizes(**{**vars(SIZES["tiny"]), "init_std": 0.02, "embedding_std": 1.0})
    return replace(
        sizes,
        kda_num_heads=sizes.kda_num_heads or sizes.num_heads,
        init_std=plain.init_std,
        embedding_std=plain.embedding_std,
        expert_dtype="float32",
    )


def test_published_config_gives_the_48b_model() -> None:
    assert normalized(sizes_from_config(PUBLISHED)) == normalized(SIZES["48B-A3B"])


@pytest.mark.parametrize("flavor", SIZES)
def test_sizes_go_through_config_json(flavor: str) -> None:
    config = config_from_model(model_config(SIZES[flavor], attention_backend="masked"))
    assert normalized(sizes_from_config(json.loads(json.dumps(config)))) == normalized(SIZES[flavor])


def test_kda_and_mla_may_have_different_numbers_of_heads() -> None:
    sizes = replace(SIZES["tiny"], kda_num_heads=2)
    config = config_from_model(model_config(sizes, attention_backend="masked"))
    assert config["linear_attn_config"]["num_heads"] == 2
    assert config["num_attention_heads"] == 4
    assert sizes_from_config(config).kda_num_heads == 2


def test_sizes_of_a_model_make_the_same_model() -> None:
    config = model_config(SIZES["debug"], attention_backend="masked")
    again = model_config(sizes_from_model(config), attention_backend="masked")
    assert {n: v.shape for n, v in config.build().state_dict().items()} == {
        n: v.shape for n, v in again.build().state_dict().items()
    }


def test_transformers_reads_the_config_as_meant() -> None:
    transformers = pytest.importorskip("transformers")
    config = config_from_model(model_config(SIZES["debug"], attention_backend="masked"))
    theirs = transformers.KimiLinearConfig(**{k: v for k, v in config.items() if k != "model_type"})
    assert theirs.layer_types == [*["linear_attention"] * 3, "full_attention", "linear_attention", "full_attention"]
    assert theirs.mlp_layer_types == ["dense"] + ["sparse"] * 5
    assert (theirs.linear_num_heads, theirs.linear_head_dim, theirs.linear_conv_kernel_dim) == (4, 64, 4)
    assert (theirs.num_local_experts, theirs.num_experts_per_tok, theirs.n_shared_experts) == (16, 4, 1)
    assert theirs.rms_norm_eps == 1e-5


def test_bounded_model_has_a_model_type_that_transformers_does_not_run_with_the_other_gate(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = config_from_model(model_config(SIZES["tiny-bounded"], attention_backend="masked"))
    assert config["linear_attn_config"]["gate_lower_bound"] == -5.0
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="kimi_linear_bounded"):
        transformers.AutoConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "llama"}, "model_type must be 'kimi_linear' or 'kimi_linear_bounded', got 'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"q_lora_rank": 8}, "q_lora_rank must be None, got 8"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings must be False, got True"),
        ({"num_expert_group": 4}, "num_expert_group must be 1, got 4"),
        ({"num_key_value_heads": 8}, "num_key_value_heads must equal num_attention_heads = 32, got 8"),
        ({"hidden_size": None}, "hidden_size must be given, got None"),
        ({"linear_attn_config": {"num_heads": 32}}, "linear_attn_config.head_dim must be given, got None"),
        ({"layer_types": ["linear_attention"]}, "layer_types must name one of"),
        (
            {"mlp_layer_types": ["sparse"] * 26 + ["dense"]},
            "mlp_layer_types must be dense layers followed by sparse ones, 27 in all",
        ),
        (
            {"linear_attn_config": {**PUBLISHED["linear_attn_config"], "gate_lower_bound": -5.0}},  # type: ignore[dict-item]
            "gate_lower_bound must go together with model_type 'kimi_linear_bounded', got -5.0",
        ),
        ({"model_type": "kimi_linear_bounded"}, "gate_lower_bound must go together with model_type"),
    ],
)
def test_what_our_model_cannot_express_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"config\.json: ") as error:
        sizes_from_config({**PUBLISHED, **change})
    assert message in str(error.value)


def test_unreadable_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must hold a config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: is not JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="must be a JSON object, got list"):
        read_config(tmp_path)
