"""FusedRMSNormGated: the layer around `rms_norm_gated`."""

from typing import Any

import pytest
import torch

from openkda.nn import FusedRMSNormGated
from openkda.norm import rms_norm_gated


@pytest.mark.parametrize("activation", ["sigmoid", "silu"])
def test_gated_norm_calls_the_operator_with_its_weight(activation: str):
    layer = FusedRMSNormGated(8, activation=activation, eps=0.5)
    torch.nn.init.normal_(layer.weight)
    x, gate = torch.randn(2, 5, 3, 8), torch.randn(2, 5, 3, 8)
    assert torch.equal(layer(x, gate), rms_norm_gated(x, gate, layer.weight, activation=activation, eps=0.5))


def test_gated_norm_has_a_weight_of_ones_and_survives_a_meta_build():
    layer = FusedRMSNormGated(8, activation="sigmoid", device="meta", dtype=torch.bfloat16).to_empty(device="cpu")
    layer.reset_parameters()
    assert {n: p.dtype for n, p in layer.named_parameters()} == {"weight": torch.bfloat16}
    assert torch.equal(layer.weight, torch.ones(8, dtype=torch.bfloat16))


def test_gated_norm_has_no_default_activation():
    with pytest.raises(TypeError, match="activation"):
        FusedRMSNormGated(8)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"activation": "swish"}, r"FusedRMSNormGated: activation must be one of 'sigmoid', 'silu', got 'swish'"),
        ({"eps": 0.0}, r"FusedRMSNormGated: eps must be finite and above 0, got 0.0"),
        ({"backend": "cuda"}, r"FusedRMSNormGated: backend must be one of 'auto', 'triton', 'eager', 'reference'"),
    ],
)
def test_gated_norm_names_what_is_wrong(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        FusedRMSNormGated(8, **({"activation": "silu"} | options))
