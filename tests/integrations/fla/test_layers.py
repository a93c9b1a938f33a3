"""Layers with fla's signatures and state of W columns."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from openkda.integrations import fla

C, W = 6, 4


@pytest.fixture
def conv() -> Any:
    return fla.ShortConvolution(C, W, bias=True, activation="swish")


def separately(conv: Any, x: Tensor) -> Tensor:
    """The convolution of one sequence [T, C] from nothing, by PyTorch."""
    if not len(x):
        return x
    y = F.conv1d(F.pad(x.T, (W - 1, 0))[None], conv.weight, conv.bias, groups=C)
    return F.silu(y[0].T)


def test_signatures_are_flas():
    def names(function: Any) -> str:
        return " ".join(inspect.signature(function).parameters)

    conv, norm = fla.ShortConvolution, fla.FusedRMSNormGated
    assert names(conv) == "hidden_size kernel_size bias activation backend device dtype kwargs"
    assert names(conv.forward) == "self x residual mask cache output_final_state cu_seqlens chunk_indices kwargs"
    assert names(norm) == "hidden_size elementwise_affine eps activation device dtype"
    assert names(norm.forward) == "self x g residual prenorm residual_in_fp32"
    assert inspect.signature(norm).parameters["activation"].default == "swish"


def test_convolution_has_flas_parameters(conv: Any):
    assert {n: tuple(p.shape) for n, p in conv.named_parameters()} == {"weight": (C, 1, W), "bias": (C,)}
    assert isinstance(conv, torch.nn.Conv1d)  # initialisers of models look for it
    assert conv.kernel_size == (W,)
    assert conv.state_size == C * W


def test_convolution_with_residual_and_mask(conv: Any):
    x, residual = torch.randn(2, 2, 9, C)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, :3] = False
    kept = x.clone()
    y, state = conv(x, residual=residual, mask=mask)
    assert state is None
    assert torch.equal(x, kept)
    torch.testing.assert_close(y[0, 3:], separately(conv, x[0, 3:]) + residual[0, 3:])
    torch.testing.assert_close(y[1], separately(conv, x[1]) + residual[1])


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_state_goes_on_where_the_last_call_ended(packed: bool, conv: Any):
    # Sequences shorter and longer than the convolution, and an empty one whose state passes through.
    lengths = [1, 2, 0, 3, 11] if packed else [5, 5]
    first, second = ([torch.randn(n, C) for n in lengths] for _ in range(2))

    def run(parts: list[Tensor], cache: Tensor | None) -> tuple[list[Tensor], Tensor]:
        if not packed:
            y, state = conv(torch.stack(parts), cache=cache, output_final_state=True)
            return list(y), state
        cu = torch.tensor([0, *lengths]).cumsum(0)
        y, state = conv(torch.cat(parts)[None], cache=cache, output_final_state=True, cu_seqlens=cu)
        return list(y[0].split(lengths)), state

    y1, state = run(first, None)
    assert state.shape == (len(lengths), C, W)
    y2, last = run(second, state)
    for n in range(len(lengths)):
        whole = torch.cat([first[n], second[n]])
        torch.testing.assert_close(torch.cat([y1[n], y2[n]]), separately(conv, whole))
        torch.testing.assert_close(last[n], F.pad(whole.T, (W, 0))[:, len(whole) :])


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@torch.no_grad()
def test_single_tokens_edit_the_cache_in_place(packed: bool, conv: Any):
    x = torch.randn(3, 8, C)
    _, cache = conv(x[:, :7], output_final_state=True)
    before = cache.clone()
    token, cu = (x[:, 7:].transpose(0, 1), torch.arange(4)) if packed else (x[:, 7:], None)
    y, state = conv(token, cache=cache, output_final_state=True, cu_seqlens=cu)
    assert state is cache
    torch.testing.assert_close(cache, torch.cat([before[..., 1:], x[:, 7:].transpose(1, 2)], -1))
    torch.testing.assert_close(y.reshape(3, C), torch.stack([separately(conv, s)[-1] for s in x]))
    again, _ = conv.step(token, None, before, cu_seqlens=cu)
    torch.testing.assert_close(again, y)
    torch.testing.assert_close(before, cache)


def test_gradients_leave_the_cache_alone(conv: Any):
    cache = torch.randn(2, C, W)
    kept = cache.clone()
    y, state = conv(torch.randn(2, 1, C), cache=cache, output_final_state=True)
    y.sum().backward()
    assert torch.equal(cache, kept)
    assert state is not cache


@pytest.mark.parametrize(
    "error, text, options",
    [
        (ValueError, "mask must be None with", {"mask": torch.ones(1, 5), "cu_seqlens": torch.tensor([0, 5])}),
        (ValueError, r"cache must have shape \[N, D, W\] = \[1, 6, 4\]", {"cache": torch.zeros(1, C, W - 1)}),
        (TypeError, "cp_context", {"cp_context": object()}),
        (TypeError, "seq_idx must be left out", {"seq_idx": None}),
    ],
    ids=["mask", "cache", "cp_context", "seq_idx"],
)  # fmt: skip
def test_convolution_refuses_and_names(error: type[Exception], text: str, options: dict[str, Any], conv: Any):
    with pytest.raises(error, match=text):
        conv(torch.randn(1, 5, C), **options)


def test_constructors_refuse_and_name():
    with pytest.raises(ValueError, match="activation must be one of None, 'silu', 'swish'"):
        fla.ShortConvolution(C, W, activation="relu")
    with pytest.raises(ValueError, match="backend must be one of"):
        fla.ShortConvolution(C, W, backend="mix")
    with pytest.raises(TypeError, match="stride must be left out"):
        fla.ShortConvolution(C, W, stride=2)
    with pytest.raises(ValueError, match="activation must be one of"):
        fla.FusedRMSNormGated(C, activation="relu")


@pytest.mark.parametrize("activation", ["swish", "silu", "sigmoid"])
def test_norm_is_the_formula(activation: str):
    layer: Any = fla.FusedRMSNormGated(C, activation=activation, eps=1e-3)
    torch.nn.init.normal_(layer.weight)
    x, g = torch.randn(2, 3, 5, C)
    act = torch.sigmoid if activation == "sigmoid" else F.silu
    want = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * layer.weight * act(g)
    torch.testing.assert_close(layer(x, g), want)
    assert set(layer.state_dict()) == {"weight"}


def test_norm_without_weight():
    layer: Any = fla.FusedRMSNormGated(C, elementwise_affine=False)
    x, g = torch.randn(2, 3, C)
    torch.testing.assert_close(layer(x, g), F.rms_norm(x, (C,), eps=1e-5) * F.silu(g))
    assert list(layer.parameters()) == []


@pytest.mark.parametrize("residual_dtype", [torch.float32, torch.bfloat16, None], ids=str)
def test_norm_adds_the_residual_in_fp32_and_hands_it_on(residual_dtype: torch.dtype | None):
    layer: Any = fla.FusedRMSNormGated(C)
    x, g = torch.randn(2, 3, C).bfloat16()
    residual = None if residual_dtype is None else torch.randn(3, C).to(residual_dtype)
    y, kept = layer(x, g, residual=residual, prenorm=True, residual_in_fp32=True)
    total = x.float() + (0 if residual is None else residual.float())
    assert kept.dtype == (residual_dtype or torch.float32)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(kept, total.to(kept.dtype))
    torch.testing.assert_close(y, (F.rms_norm(total, (C,), eps=1e-5) * F.silu(g.float())).bfloat16())


def test_norm_names_a_residual_of_another_shape():
    layer: Any = fla.FusedRMSNormGated(C)
    with pytest.raises(ValueError, match="residual must have shape"):
        layer(torch.randn(3, C), torch.randn(3, C), residual=torch.randn(C))
