"""One KDA layer of ours, as a torch layer and as a torchtitan module, against each of transformers' two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from openkda.testing import relative_rms

D, H, K, T = 64, 4, 16, 150
LIMIT = 1e-5  # fp32; transformers' chunked fallback, with its differences of cumulative sums, is the coarser of the two
GATES = {"kimi_linear": None, "glm5_next": -5.0}


def reference_layer(kind: str) -> nn.Module:
    """transformers' layer with its own initial values, the convolution and norm weights drawn as well."""
    if kind == "kimi_linear":
        from transformers import KimiLinearConfig, KimiLinearForCausalLM

        from openkda.parity.reference import tiny_config

        config = {k: v for k, v in tiny_config().items() if k != "model_type"}
        layer = KimiLinearForCausalLM(KimiLinearConfig(**config)).model.layers[1].self_attn
    else:
        from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
        from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextLinearAttention

        config = Glm5NextTextConfig(
            hidden_size=D,
            num_hidden_layers=4,
            linear_head_dim=K,
            linear_num_heads=H,
            linear_lower_bound=GATES[kind],
            rms_norm_eps=1e-5,
        )
        layer = Glm5NextTextLinearAttention(config, layer_idx=0)
        assert layer.forget_gate.safe_gate_lower_bound == -5.0
        with torch.no_grad():
            layer.forget_gate.A_log.uniform_(-1.0, 1.0)
            layer.forget_gate.dt_bias.uniform_(-4.0, 1.0)
    with torch.no_grad():
        layer.o_norm.weight.uniform_(0.5, 1.5)
    return layer.eval()


def disk_parameters(layer: nn.Module) -> dict[str, Tensor]:
    """The reference's parameters under the names on disk."""
    from openkda.integrations.torchtitan.state_dict_adapter import disk_names

    named = disk_names({f"self_attn.{name}": p.detach() for name, p in layer.named_parameters()})
    return {name.removeprefix("self_attn."): value for name, value in named.items()}


def torch_layer(parameters: dict[str, Tensor], lower_bound: float | None) -> tuple[nn.Module, dict[str, str]]:
    """KimiDeltaAttention, and the names of its parameters on disk."""
    import openkda

    layer = openkda.KimiDeltaAttention(D, H, K, lower_bound=lower_bound)
    layer.load_state_dict({name: value.clone() for name, value in parameters.items()})
    return layer, {name: name for name, _ in layer.named_parameters()}


def titan_layer(parameters: dict[str, Tensor], lower_bound: float | None) -> tuple[nn.Module, dict[str, str]]:
    """KDA of the torchtitan model, and the names of its parameters on disk."""
    from dataclasses import replace

    from openkda.integrations.torchtitan.builders import SIZES, _kda

    sizes = replace(SIZES["tiny"], hidden_size=D, num_heads=H, head_dim=K, gate_lower_bound=lower_bound)
    layer: Any = _kda(sizes, 0).build()
    names = {name: name.removeprefix("decay.") for name, _ in layer.named_parameters()}
    layer.load_state_dict(
        {
            n: parameters[disk].reshape(p.shape)
            for (n, p), disk in zip(layer.named_parameters(), names.values(), strict=True)
        }
    )
    return layer, names


@pytest.mark.parametrize("make", [torch_layer, titan_layer], ids=["KimiDeltaAttention", "KDA"])
@pytest.mark.parametrize("kind", GATES)
def test_layer_agrees_forward_and_backward(kind: str, make: Callable[..., tuple[nn.Module, dict[str, str]]]) -> None:
    reference = reference_layer(kind)
    ours, names = make(disk_parameters(reference), GATES[kind])
    x, dy = torch.randn(2, T, D), torch.randn(2, T, D)
    grads: list[dict[str, Tensor]] = []
    outputs = []
    for layer in (reference, ours):
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        y.backward(dy)
        outputs.append(y.detach())
        assert leaf.grad is not None
        grads.append({"x": leaf.grad})
    from openkda.integrations.torchtitan.state_dict_adapter import disk_names

    raw = {f"self_attn.{name}": p.grad for name, p in reference.named_parameters()}
    grads[0] |= {name.removeprefix("self_attn."): value for name, value in disk_names(raw).items()}
    grads[1] |= {disk: dict(ours.named_parameters())[name].grad for name, disk in names.items()}
    assert relative_rms(outputs[1], outputs[0]) <= LIMIT
    errors = {name: relative_rms(value.flatten(), grads[0][name].flatten()) for name, value in grads[1].items()}
    assert len(errors) == 16
    assert {name: error for name, error in errors.items() if not error <= LIMIT} == {}


@pytest.mark.parametrize("kind", GATES)
def test_the_other_gate_does_not_agree(kind: str) -> None:
    reference = reference_layer(kind)
    other = -5.0 if GATES[kind] is None else None
    ours, _ = torch_layer(disk_parameters(reference), other)
    x = torch.randn(1, T, D)
    with torch.no_grad():
        assert relative_rms(ours(x), reference(x)) > 1e-3
