"""The Kimi Linear decoder: its tree, its parameter counts, its gradients, and where one document ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.module import Module

import openkda
from openkda.integrations.torchtitan import config_registry
from openkda.integrations.torchtitan.builders import SIZES, model_config, model_registry
from openkda.integrations.torchtitan.kda import document_offsets
from openkda.integrations.torchtitan.model import Experts, KimiLinearBlock, KimiLinearModel

MakeModel = Callable[..., KimiLinearModel]

KDA_NAMES = {
    *(f"kda.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "q_conv1d", "k_conv1d", "v_conv1d")),
    *(f"kda.{name}.weight" for name in ("f_a_proj", "f_b_proj", "b_proj", "g_a_proj", "g_b_proj", "o_norm", "o_proj")),
    *("kda.decay.A_log", "kda.decay.dt_bias"),
}
MLA_NAMES = {f"attention.{name}.weight" for name in ("wq", "wkv_a", "kv_norm", "wkv_b", "wo")}
DENSE_NAMES = {f"feed_forward.{name}.weight" for name in ("w1", "w2", "w3")}
MOE_NAMES = {
    "moe.router.gate.weight",
    *(f"moe.routed_experts.inner_experts.{name}" for name in ("w1_EFD", "w2_EDF", "w3_EFD")),
    *(f"moe.shared_experts.{name}.weight" for name in ("w1", "w2", "w3")),
}
NORM_NAMES = {"attention_norm.weight", "ffn_norm.weight"}


def positions_of(*lengths: int) -> torch.Tensor:
    """Positions `[1, sum of lengths]` of documents laid side by side."""
    return torch.cat([torch.arange(n) for n in lengths])[None]


def test_tiny_has_the_documented_parameter_names(make_model: MakeModel) -> None:
    expected = {"tok_embeddings.weight", "norm.weight", "lm_head.weight"}
    for layer in range(4):
        names = NORM_NAMES | (MLA_NAMES if layer == 3 else KDA_NAMES) | (DENSE_NAMES if layer == 0 else MOE_NAMES)
        expected |= {f"layers.{layer}.{name}" for name in names}
    assert {name for name, _ in make_model().named_parameters()} == expected


def test_config_tree_equals_module_tree(make_model: MakeModel) -> None:
    config = model_config(SIZES["tiny"], attention_backend="masked")
    from_config = {name for name, *_ in config.traverse(Module.Config, recurse=True) if name}
    from_modules = {name for name, _ in make_model().named_modules() if name} - {"layers"}
    assert from_config == from_modules


def test_every_module_follows_torchtitans_protocol(make_model: MakeModel) -> None:
    make_model().verify_module_protocol()


def count_48b() -> tuple[int, int]:
    """All parameters of Kimi Linear 48B-A3B, and those a token uses, from the published configuration by hand."""
    D, H, K, V = 2304, 32, 128, 163840
    P, rank = H * K, 128
    kda = 3 * D * P + 3 * P * 4 + 2 * (D * rank + rank * P) + D * H + H + P + K + P * D
    mla = D * H * (128 + 64) + D * (512 + 64) + 512 + 512 * H * (128 + 128) + H * 128 * D
    expert = 3 * D * 1024
    shared_and_router = expert + 256 * D
    dense = 3 * D * 9216
    norms = 27 * 2 * D + D
    everywhere = 20 * kda + 7 * mla + dense + 26 * shared_and_router + norms + 2 * V * D
    return everywhere + 26 * 256 * expert, everywhere + 26 * 8 * expert


def test_48b_builds_on_the_meta_device_with_the_published_parameter_count() -> None:
    config = model_registry("48B-A3B").model
    with torch.device("meta"):
        model = config.build()
    total, active = count_48b()
    assert sum(p.numel() for p in model.parameters()) == total
    assert total / 1e9 == pytest.approx(49.1, abs=0.1)  # "48B": the name leaves out the embeddings
    assert active / 1e9 == pytest.approx(3.5, abs=0.1)  # "A3B": without embeddings 2.7
    assert [i + 1 for i, layer in enumerate(model.layers.values()) if hasattr(layer, "attention")] == [
        *(4, 8, 12, 16, 20, 24, 27)
    ]


def test_flops_count_kda_layers_once_a_token_whatever_the_length(make_model: MakeModel) -> None:
    model = make_model()
    config = model.config
    total, short = config.get_nparams_and_flops(model, 1024)
    _, long = config.get_nparams_and_flops(model, 2048)
    assert total == sum(p.numel() for p in model.parameters())
    attention_a_token = 6 * 4 * (32 + 16 + 32)  # one MLA layer of 4 heads, per key
    assert long - short == 1024 * attention_a_token
    without_kda = replace(config, layers=[config.layers[3]])
    _, fewer = without_kda.get_nparams_and_flops(model, 1024)
    assert short - fewer == 3 * 18 * 4 * 32 * 32


@pytest.mark.parametrize("flavor", ["tiny", "tiny-bounded"])
def test_every_parameter_gets_a_finite_gradient_that_is_not_zero(make_model: MakeModel, flavor: str) -> None:
    model = make_model(flavor)
    tokens = torch.randint(0, 256, (2, 96))
    positions = torch.cat([positions_of(40, 56), positions_of(7, 89)])
    F.cross_entropy(model(tokens, positions).flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("flavor", ["tiny", "tiny-bounded"])
def test_packed_documents_do_not_see_each_other(make_model: MakeModel, flavor: str) -> None:
    # 3 tokens are fewer than the convolution sees; 64 is a whole chunk of the operator.
    model, lengths = make_model(flavor), (3, 64, 41)
    tokens = torch.randint(0, 256, (1, sum(lengths)))
    with torch.no_grad():
        packed = model(tokens, positions_of(*lengths))
        alone = torch.cat([model(part) for part in tokens.split(lengths, dim=1)], dim=1)
        unpacked = model(tokens)
    assert relative_error(packed, alone) < 1e-5
    assert relative_error(packed, unpacked) > 1e-2  # the boundary matters, so the first comparison can fail


def test_rows_of_a_batch_do_not_see_each_other_even_when_a_row_starts_inside_a_document(make_model: MakeModel) -> None:
    model = make_model()
    tokens = torch.randint(0, 256, (2, 48))
    positions = torch.stack([torch.arange(48), torch.arange(48) + 10])
    with torch.no_grad():
        batch = model(tokens, positions)
        rows = torch.cat([model(tokens[i : i + 1]) for i in range(2)])
    assert relative_error(batch, rows) < 1e-5


def test_gradient_stays_inside_its_document(make_model: MakeModel) -> None:
    model = make_model()
    tokens = torch.randint(0, 256, (1, 60))
    embedded = model.tok_embeddings(tokens).detach().requires_grad_()
    model.tok_embeddings.forward = lambda tokens: embedded
    model(tokens, positions_of(20, 40))[:, 30].sum().backward()
    assert embedded.grad is not None
    per_token = embedded.grad.abs().amax(-1)[0]
    assert (per_token[:20] == 0).all()
    assert (per_token[20:31] > 0).all()
    assert (per_token[31:] == 0).all()


def test_document_offsets_start_a_document_at_every_row_and_zero() -> None:
    positions = torch.tensor([[0, 1, 0, 1], [5, 6, 0, 0]])
    offsets = document_offsets(positions)
    assert offsets.dtype == torch.int32
    assert offsets.tolist() == [0, 2, 4, 6, 7, 8]
    assert positions.tolist() == [[0, 1, 0, 1], [5, 6, 0, 0]]


def test_masks_are_built_from_positions_when_the_caller_brings_none(make_model: MakeModel) -> None:
    model, tokens, positions = make_model(), torch.randint(0, 256, (1, 50)), positions_of(20, 30)
    with torch.no_grad():
        assert torch.equal(model(tokens, positions), model(tokens, positions, model.get_attention_masks(positions)))


def test_gate_families_are_different_models_with_equal_weights(make_model: MakeModel) -> None:
    softplus, bounded = make_model("tiny"), make_model("tiny-bounded")
    bounded.load_state_dict(softplus.state_dict())
    tokens = torch.randint(0, 256, (1, 64))
    with torch.no_grad():
        assert relative_error(bounded(tokens), softplus(tokens)) > 1e-3


def test_initial_decay_lies_in_the_published_range(make_model: MakeModel) -> None:
    decay = make_model(num_heads=64).layers["0"].kda.decay
    zero = torch.zeros(1, 1, 64, 32)
    g = openkda.kda_gate(zero, decay.A_log.detach(), decay.dt_bias.detach())
    assert g.min() > -1.61
    assert g.max() < -0.0009
    assert g.min() < -1.0  # the range is used
    assert g.max() > -0.003
    bounded = make_model("tiny-bounded", num_heads=64).layers["0"].kda.decay
    g = openkda.kda_gate(zero, bounded.A_log.detach(), bounded.dt_bias.detach(), lower_bound=-5.0)
    assert g.min() > -1.01
    assert g.max() < -0.0009


def test_recurrent_backend_gives_the_same_logits_and_refuses_gradients(make_model: MakeModel) -> None:
    model, tokens, positions = make_model(), torch.randint(0, 256, (1, 90)), positions_of(25, 65)
    with torch.no_grad():
        chunked = model(tokens, positions)
        for layer in model.layers.values():
            if hasattr(layer, "kda"):
                layer.kda.inner_kda.backend = "recurrent"
        recurrent = model(tokens, positions)
    assert relative_error(recurrent, chunked) < 1e-5
    assert not torch.equal(recurrent, chunked)
    with pytest.raises(ValueError, match="chunk_kda"):
        model(tokens, positions)


def dense_experts(experts: Experts, x_RD: torch.Tensor, counts: list[int]) -> torch.Tensor:
    weights = zip(experts.w1_EFD, experts.w2_EDF, experts.w3_EFD, strict=True)
    parts = zip(x_RD.split(counts), weights, strict=True)
    return torch.cat([(F.silu(x @ w1.T) * (x @ w3.T)) @ w2.T for x, (w1, w2, w3) in parts])


def test_fp32_experts_equal_a_loop_over_experts_with_gradients() -> None:
    experts = Experts.Config(dim=24, hidden_dim=40, num_experts=4, expert_dtype="float32").build()
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.3)
    counts = [5, 0, 9, 2]  # one expert without a token
    x = torch.randn(16, 24, requires_grad=True)
    grad = torch.randn(16, 24)
    inputs = [x, *experts.parameters()]
    got = torch.autograd.grad(out := experts(x, torch.tensor(counts)), inputs, grad)
    wanted = torch.autograd.grad(reference := dense_experts(experts, x, counts), inputs, grad)
    assert relative_error(out, reference) < 1e-6
    for g, w in zip(got, wanted, strict=True):
        assert relative_error(g, w) < 1e-6


def test_bf16_experts_are_torchtitans() -> None:
    torch.manual_seed(0)
    experts = Experts.Config(dim=24, hidden_dim=40, num_experts=2).build()
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.3)
    x, counts = torch.randn(8, 24), torch.tensor([3, 5])
    low = experts(x, counts)
    exact = dense_experts(experts, x, [3, 5])
    # One bf16 rounding is 2**-8; three of them in a row, and a factor of two for the sums.
    assert 1e-4 < relative_error(low, exact) < 3 * 2**-8 * 2


def test_update_from_config_works_without_rotary_embeddings_at_any_length() -> None:
    config = config_registry.kimi_linear_tiny()
    config.training.seq_len = 1 << 20
    config.debug.moe_force_load_balance = True
    config.model_spec.model.update_from_config(config=config)
    routers = [layer.moe.router for layer in config.model_spec.model.layers if layer.moe is not None]
    assert all(router._debug_force_load_balance for router in routers)


def test_update_from_config_rejects_a_tensor_parallel_degree_that_does_not_divide_the_heads() -> None:
    config = config_registry.kimi_linear_tiny()
    config.parallelism.tensor_parallel_degree = 3
    with pytest.raises(ValueError, match="tensor_parallel_degree must divide the number of heads 4, got 3"):
        config.model_spec.model.update_from_config(config=config)


def test_block_rejects_two_mixers_and_none() -> None:
    kda, mla = (model_config(SIZES["tiny"], attention_backend="masked").layers[i] for i in (1, 3))
    with pytest.raises(ValueError, match="exactly one of kda and attention"):
        replace(kda, attention=mla.attention)
    with pytest.raises(ValueError, match="exactly one of kda and attention"):
        replace(kda, kda=None)
    with pytest.raises(ValueError, match="exactly one of feed_forward and moe"):
        replace(kda, moe=None)


def test_builders_reject_layers_outside_the_model_and_a_positive_bound() -> None:
    with pytest.raises(ValueError, match="mla_layers must lie between 1 and num_layers = 4, got \\(0, 3\\)"):
        model_config(replace(SIZES["tiny"], mla_layers=(0, 3)))
    with pytest.raises(ValueError, match="gate_lower_bound must be below 0, got 5"):
        model_config(replace(SIZES["tiny"], gate_lower_bound=5.0))
    with pytest.raises(ValueError, match=r"flavor must be one of .* got 'nano'"):
        model_registry("nano")


def test_every_linear_of_the_model_has_an_initialiser() -> None:
    layers: list[KimiLinearBlock.Config] = model_config(SIZES["48B-A3B"]).layers
    for layer in layers:
        for name, linear, *_ in layer.traverse(Linear.Config):
            assert linear.param_init, name


def relative_error(x: torch.Tensor, reference: torch.Tensor) -> float:
    return ((x - reference).norm() / reference.norm()).item()
