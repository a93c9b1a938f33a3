"""What KimiDeltaAttention keeps for its backward: projections' outputs and what the operator keeps, and no more."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import openkda.nn.attention as home
from openkda import causal_conv1d, rms_norm_gated, testing
from openkda.nn import KimiDeltaAttention
from openkda.nn.recompute import Recipe, recomputed

#: What may be kept besides the operator's own, in projections' output bytes; o is 0.13 of them here.
LIMIT = 1.15


class Kept:
    """Memory that autograd keeps, each storage once: the layer's, and what the operator made and keeps."""

    def __init__(self, layer: KimiDeltaAttention, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
        self.known = {address(t) for t in (x, *layer.parameters())}  # alive in any case
        self.tensors: dict[int, Tensor] = {}
        self.own: dict[int, Tensor] = {}  # the operator's
        self.given: set[int] | None = None  # inputs of the operator while it runs
        self.outputs: list[Tensor] = []  # of projections
        for name, module in layer.named_modules():
            if name.endswith("_proj"):
                module.register_forward_hook(lambda _module, _args, y: self.outputs.append(y))
        operator = home.chunk_kda

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.given = {address(t) for t in (*args, *kwargs.values()) if isinstance(t, Tensor)}
            result = operator(*args, **kwargs)
            self.given = None
            return result

        monkeypatch.setattr(home, "chunk_kda", watched)

    def pack(self, x: Tensor) -> Tensor:
        if address(x) not in self.known:
            own = self.given is not None and address(x) not in self.given
            (self.own if own else self.tensors)[address(x)] = x
        return x

    def ratio(self) -> float:
        """Bytes kept besides the operator's own, in bytes of all projections' outputs."""
        kept = sum(t.untyped_storage().nbytes() for t in self.tensors.values())
        return kept / sum(y.numel() * y.element_size() for y in self.outputs)


def conv(x: Tensor, weight: Tensor) -> Tensor:
    return causal_conv1d(x, weight, activation="silu", backend="eager")[0]


def address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


CASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "packed": {"cu_seqlens": torch.tensor([0, 5, 5, 60])},
    "bf16": {"dtype": torch.bfloat16},
}


@pytest.mark.parametrize("case", CASES)
def test_layer_keeps_little_besides_the_outputs_of_its_projections(case: str, monkeypatch: pytest.MonkeyPatch):
    options = dict(CASES[case])
    layer = KimiDeltaAttention(48, 2, 16, dtype=options.pop("dtype", torch.float32))
    x = torch.randn(1, 64, 48, dtype=layer.q_proj.weight.dtype, requires_grad=True)
    kept = Kept(layer, x, monkeypatch)
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda t: t):
        y = layer(x, **options)
    assert kept.ratio() <= LIMIT
    projected = {address(t) for t in kept.outputs}
    more = [t.shape for n, t in kept.tensors.items() if n not in projected and t.numel() > 64]
    assert more == [(1, 64, 2, 16)]  # o, which no projection made
    y.sum().backward()


def test_results_that_are_computed_again_are_let_go(monkeypatch: pytest.MonkeyPatch):
    results = []

    def noted(result: Tensor, *rest: Any) -> Recipe:
        results.append(weakref.ref(result))
        return Recipe(result, *rest)

    monkeypatch.setattr(home, "Recipe", noted)
    layer = KimiDeltaAttention(48, 2, 16)
    gc.collect()
    gc.disable()  # at once, not when a cycle is found
    y = layer(torch.randn(1, 70, 48))
    gc.enable()
    assert [alive() for alive in results] == [None] * 4
    y.sum().backward()


def test_recomputed_gradients_have_the_bits_of_kept_ones(monkeypatch: pytest.MonkeyPatch):
    layer = KimiDeltaAttention(48, 2, 16)
    x, dy = torch.randn(2, 70, 48, requires_grad=True), torch.randn(2, 70, 48)
    leaves = [x, *layer.parameters()]
    got = torch.autograd.grad(layer(x), leaves, dy)
    monkeypatch.setattr(home, "recomputed", lambda *_: nullcontext())
    want = torch.autograd.grad(layer(x), leaves, dy)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_layer_under_activation_checkpointing_keeps_its_input_alone_and_gives_the_same_bits():
    layer = KimiDeltaAttention(48, 2, 16)
    x, dy = torch.randn(1, 70, 48, requires_grad=True), torch.randn(1, 70, 48)
    leaves = [x, *layer.parameters()]
    want = torch.autograd.grad(layer(x), leaves, dy)
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = checkpoint(layer, x, use_reentrant=False)
    assert all(address(t) == address(x) for t in saved)
    got = torch.autograd.grad(y, leaves, dy)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_hooks_around_the_layer_see_everything_else():
    layer, x = KimiDeltaAttention(48, 2, 16), torch.randn(1, 70, 48, requires_grad=True)
    want = torch.autograd.grad(layer(x).sum(), x)[0]
    with torch.autograd.graph.save_on_cpu():
        y = layer(x)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], want)


def test_second_derivatives_pass_through_what_is_recomputed():
    x = torch.randn(1, 6, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)

    def fn(x: Tensor, weight: Tensor) -> Tensor:
        y = conv(x, weight)
        with recomputed(Recipe(y, conv, (x, weight))):
            return y * y.sin()

    assert torch.autograd.gradcheck(fn, (x, weight))
    assert torch.autograd.gradgradcheck(fn, (x, weight))


def test_a_view_of_a_result_is_recomputed_and_other_tensors_are_kept():
    x, weight = torch.randn(1, 6, 4, requires_grad=True), torch.randn(4, 4)
    y = conv(x, weight)
    kept: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    other = torch.randn(4, 6)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), recomputed(Recipe(y, conv, (x, weight))):
        z = y.transpose(1, 2)[:, 1:] * other[1:]
        z = z * y.transpose(1, 2)[:, 1:]
    assert all(address(t) != address(y) for t in kept)
    assert any(address(t) == address(other) for t in kept)
    (got,) = torch.autograd.grad(z.sum(), x)
    again = conv(x, weight).transpose(1, 2)[:, 1:]
    (want,) = torch.autograd.grad((again.square() * other[1:]).sum(), x)
    testing.assert_close({"dx": got}, {"dx": want.double()}, testing.FP32_LIMIT)


def test_an_input_that_was_edited_in_place_is_noticed():
    x, weight = torch.randn(1, 6, 4), torch.randn(4, 4, requires_grad=True)
    y = conv(x, weight)
    with recomputed(Recipe(y, conv, (x, weight))):
        z = y * y
    x.zero_()
    with pytest.raises(RuntimeError, match="must not be edited in place, got a newer version"):
        z.sum().backward()


def test_inputs_may_come_back_in_other_strides():
    gate, weight = torch.randn(4, 2, 3), torch.randn(3)
    x = torch.randn(2, 4, 3, requires_grad=True)

    def norm(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        return rms_norm_gated(x, gate, weight, activation="silu", backend="eager")

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.tolist(), torch.tensor):
        y = norm(x.transpose(0, 1), gate, weight)
        assert not y.is_contiguous()
        with recomputed(Recipe(y, norm, (x.transpose(0, 1), gate, weight))):
            z = y[1:] * y[1:]
    (got,) = torch.autograd.grad(z.sum(), x)
    (want,) = torch.autograd.grad(norm(x.transpose(0, 1), gate, weight)[1:].square().sum(), x)
    torch.testing.assert_close(got, want)


def test_nothing_is_wrapped_where_no_gradient_is_wanted():
    x, weight = torch.randn(1, 6, 4), torch.randn(4, 4)
    y = conv(x, weight)
    with torch.no_grad(), recomputed(Recipe(y, conv, (x, weight))):
        assert not torch._C._autograd._top_saved_tensors_default_hooks(False)
    with recomputed(Recipe(y, conv, (x, weight))):
        w = torch.ones(1, requires_grad=True)
        z = w * y
    assert torch.equal(torch.autograd.grad(z.sum(), w)[0], y.sum().reshape(1))
