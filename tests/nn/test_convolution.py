"""ShortConvolution: the layer around `causal_conv1d`."""

import math
from typing import Any

import pytest
import torch

from openkda.conv import causal_conv1d
from openkda.nn import ShortConvolution


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_short_convolution_calls_the_operator_with_its_parameters(bias: bool, activation: str | None):
    layer = ShortConvolution(6, 3, bias=bias, activation=activation)
    x, state, cu = torch.randn(1, 9, 6), torch.randn(2, 6, 2), torch.tensor([0, 4, 7])
    got = layer(x, initial_state=state, output_final_state=True, cu_seqlens=cu)
    options = {"initial_state": state, "output_final_state": True, "cu_seqlens": cu}
    want = causal_conv1d(x, layer.weight.squeeze(1), layer.bias, activation=activation, **options)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def test_short_convolution_loads_the_weight_of_a_depthwise_conv1d():
    plain = torch.nn.Conv1d(6, 6, 4, groups=6, padding=3)
    layer = ShortConvolution(6, 4, bias=True, activation=None)
    layer.load_state_dict(plain.state_dict())
    x = torch.randn(2, 9, 6)
    torch.testing.assert_close(layer(x)[0], plain(x.mT)[..., :9].mT)


def test_short_convolution_without_bias_has_a_weight_alone():
    assert {n: tuple(p.shape) for n, p in ShortConvolution(6, 4).named_parameters()} == {"weight": (6, 1, 4)}


def test_short_convolution_starts_like_conv1d_and_survives_a_meta_build():
    layer = ShortConvolution(500, 4, bias=True, device="meta", dtype=torch.float64).to_empty(device="cpu")
    layer.reset_parameters()
    for parameter in layer.parameters():  # uniform in +-1/2: standard deviation 1/sqrt(12), 500 draws or more
        assert parameter.dtype == torch.float64
        assert parameter.abs().max() <= 0.5
        assert abs(parameter.std().item() * math.sqrt(12) - 1) < 0.15


def test_short_convolution_passes_messages_on():
    with pytest.raises(ValueError, match=r"causal_conv1d: weight must have shape \[C, W\] = \[8, 4\], got \[6, 4\]"):
        ShortConvolution(6, 4)(torch.zeros(1, 5, 8))
    with pytest.raises(TypeError, match="cp_context must come from build_cp_context, got object"):
        ShortConvolution(6, 4)(torch.zeros(1, 5, 6), cp_context=object())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"activation": "swish"}, r"ShortConvolution: activation must be one of None, 'silu', got 'swish'"),
        ({"kernel_size": 0}, r"ShortConvolution: kernel_size must be at least 1, got 0"),
        ({"backend": "cuda"}, r"ShortConvolution: backend must be one of 'auto', 'triton', 'eager', 'reference'"),
    ],
)
def test_short_convolution_names_what_is_wrong(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        ShortConvolution(6, **({"kernel_size": 4} | options))
