"""KimiDeltaAttention on Triton kernels: the gradients of the eager layer, and what is kept for them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from openkda import testing
from openkda.nn import KimiDeltaAttention

pytestmark = pytest.mark.interpreter


def make(device: str) -> KimiDeltaAttention:
    return KimiDeltaAttention(24, 1, 16, device=device, backend="triton")


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_layer_has_the_gradients_of_the_eager_one(packed, device):
    layer = make(device)
    exact = copy.deepcopy(layer).double()
    for module in exact.modules():
        if hasattr(module, "backend"):
            module.backend = "eager"
    x, dy = torch.randn(2, 1, 70, 24, device=device)
    cu = torch.tensor([0, 3, 3, 66], device=device) if packed else None

    def run(layer: KimiDeltaAttention, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
        names, leaves = zip(*layer.named_parameters(), strict=True)
        x = x.detach().requires_grad_()
        y = layer(x, cu_seqlens=cu)
        grads = torch.autograd.grad(y, (x, *leaves), dy)
        return {"y": y.detach()} | dict(zip(("dx", *names), grads, strict=True))

    want = run(exact, x.double(), dy.double())
    testing.assert_close(run(layer, x, dy), want, testing.FP32_LIMIT)


def test_layer_keeps_projections_and_what_the_operator_keeps(device):
    layer, x = make(device), torch.randn(1, 70, 24, device=device, requires_grad=True)
    outputs: list[Tensor] = []
    for name, module in layer.named_modules():
        if name.endswith("_proj"):
            module.register_forward_hook(lambda _module, _args, y: outputs.append(y))
    kept: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = layer(x)
    known = {t.untyped_storage().data_ptr() for t in (x, *layer.parameters(), *outputs)}
    rest = sum(t.untyped_storage().nbytes() for address, t in kept.items() if address not in known)
    # o [B, T, HV, V], and of the operator a and aqk [NC, HV, C, C]; two chunks are one group, without a checkpoint
    o, own = 4 * 70 * 16, 2 * 4 * 2 * 64 * 64
    assert o + own <= rest <= o + own + 1024
    y.sum().backward()
