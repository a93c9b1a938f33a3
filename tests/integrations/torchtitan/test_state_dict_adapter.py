"""Conversion between names on disk and names here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file, save_file

from openkda.integrations.torchtitan.model import KimiLinearModel
from openkda.integrations.torchtitan.state_dict_adapter import KimiLinearStateDictAdapter

MakeModel = Callable[..., KimiLinearModel]


def adapter_of(model: KimiLinearModel) -> KimiLinearStateDictAdapter:
    return KimiLinearStateDictAdapter(model.config, None)


def expected_disk_shapes() -> dict[str, list[int]]:
    """Every tensor of the tiny model as a published checkpoint would hold it."""
    D, P, E, F = 128, 128, 8, 128
    shapes = {"model.embed_tokens.weight": [260, D], "model.norm.weight": [D], "lm_head.weight": [260, D]}
    kda = {
        **{f"{x}_proj.weight": [P, D] for x in "qkv"},
        **{f"{x}_conv1d.weight": [P, 1, 4] for x in "qkv"},
        **{f"{x}_a_proj.weight": [32, D] for x in "fg"},
        **{f"{x}_b_proj.weight": [P, 32] for x in "fg"},
        "b_proj.weight": [4, D],
        "A_log": [1, 1, 4, 1],
        "dt_bias": [P],
        "o_norm.weight": [32],
        "o_proj.weight": [D, P],
    }
    mla = {
        "q_proj.weight": [4 * 48, D],
        "kv_a_proj_with_mqa.weight": [64 + 16, D],
        "kv_a_layernorm.weight": [64],
        "kv_b_proj.weight": [4 * 64, 64],
        "o_proj.weight": [D, P],
    }
    dense = {"gate_proj.weight": [384, D], "up_proj.weight": [384, D], "down_proj.weight": [D, 384]}
    moe = {
        "gate.weight": [E, D],
        "gate.e_score_correction_bias": [E],
        **{f"shared_experts.{x}_proj.weight": [F, D] for x in ("gate", "up")},
        "shared_experts.down_proj.weight": [D, F],
        **{f"experts.{e}.{w}.weight": [D, F] if w == "w2" else [F, D] for e in range(E) for w in ("w1", "w2", "w3")},
    }
    for i in range(4):
        prefix = f"model.layers.{i}."
        shapes |= {prefix + name: [D] for name in ("input_layernorm.weight", "post_attention_layernorm.weight")}
        shapes |= {f"{prefix}self_attn.{name}": shape for name, shape in (mla if i == 3 else kda).items()}
        ffn = dense.items() if i == 0 else moe.items()
        shapes |= {f"{prefix}{'mlp' if i == 0 else 'block_sparse_moe'}.{name}": shape for name, shape in ffn}
    return shapes


def test_to_hf_writes_the_names_and_shapes_of_published_checkpoints(make_model: MakeModel) -> None:
    model = make_model()
    disk = adapter_of(model).to_hf(model.state_dict())
    assert {name: list(value.shape) for name, value in disk.items()} == expected_disk_shapes()


def test_round_trip_through_a_file_gives_the_same_model(make_model: MakeModel, tmp_path) -> None:
    model, other = make_model(), make_model()
    with torch.no_grad():
        for value in [*other.parameters(), *(layer.moe.expert_bias_E for layer in list(other.layers.values())[1:])]:
            value.normal_()
    adapter = adapter_of(model)
    save_file({k: v.contiguous() for k, v in adapter.to_hf(other.state_dict()).items()}, tmp_path / "model.safetensors")
    model.load_state_dict(adapter.from_hf(load_file(tmp_path / "model.safetensors")))
    for name, value in other.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_experts_keep_their_order(make_model: MakeModel) -> None:
    model = make_model()
    disk = adapter_of(model).to_hf(model.state_dict())
    experts = model.layers["2"].moe.routed_experts.inner_experts
    for weight, parameter in (("w1", experts.w1_EFD), ("w2", experts.w2_EDF), ("w3", experts.w3_EFD)):
        assert torch.equal(disk[f"model.layers.2.block_sparse_moe.experts.5.{weight}.weight"], parameter[5])


def test_dense_layer_is_read_under_either_name(make_model: MakeModel) -> None:
    model = make_model()
    adapter = adapter_of(model)
    disk = adapter.to_hf(model.state_dict())
    renamed = {name.replace("layers.0.mlp.", "layers.0.block_sparse_moe."): value for name, value in disk.items()}
    assert renamed.keys() != disk.keys()
    model.load_state_dict(adapter.from_hf(renamed))


def test_missing_experts_and_unknown_names_are_reported(make_model: MakeModel) -> None:
    model = make_model()
    adapter = adapter_of(model)
    disk = adapter.to_hf(model.state_dict())
    del disk["model.layers.1.block_sparse_moe.experts.6.w3.weight"]
    with pytest.raises(ValueError, match=r"layer 1 must have w3 of 8 experts, got none for \[6\]"):
        adapter.from_hf(disk)
    with pytest.raises(KeyError, match=r"no counterpart for the parameter 'self_attn\.rotary\.inv_freq'"):
        adapter.from_hf({"model.layers.0.self_attn.rotary.inv_freq": torch.zeros(1)})
    with pytest.raises(KeyError, match=r"no counterpart for the parameter 'vision\.weight'"):
        adapter.to_hf({"vision.weight": torch.zeros(1)})
