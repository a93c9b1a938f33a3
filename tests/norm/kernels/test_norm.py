"""l2norm and rms_norm_gated on their Triton kernels: results and gradients against fp64, views, compilers, autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

pytest.importorskip("triton")

from openkda import testing
from openkda.norm import fused, l2norm, reference, rms_norm_gated
from openkda.norm.kernels import tuning
from openkda.norm.kernels.rows import rows_of

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("poisoned")]
F64 = torch.float64
# Rows that fill no tile, more rows than a program of the backward has at once, and no row at all. D = 1 is left out: y
# is 1 or -1 there, and a derivative of the size of eps has few digits in any form.
SHAPES = [(2, 5, 3, 16), (7, 2), (3, 60), (0, 8), (64,), (130, 128)]
# Each function with its definition, the names of its tensor arguments, and options.
L2 = (l2norm, reference.l2norm, ("x",), {})
GATED = {
    name: (rms_norm_gated, reference.rms_norm_gated, ("x", "gate", "weight"), {"activation": name})
    for name in ("sigmoid", "silu")
}
OPERATORS = {"l2norm": L2} | {f"rms_norm_gated_{name}": row for name, row in GATED.items()}


def draw(shape: tuple[int, ...], device: str) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs in fp64 with values that bf16 holds, and the cotangent."""

    def normal(*size: int) -> Tensor:
        return torch.randn(size, dtype=F64).bfloat16().double().to(device)

    return {"x": normal(*shape), "gate": 3 * normal(*shape), "weight": normal(shape[-1])}, normal(*shape)


def run(fn: Any, names: tuple[str, ...], options: dict[str, Any], inputs: dict[str, Tensor], dy: Tensor) -> dict:
    """y and the gradient of every input of fn."""
    leaves = [inputs[name].detach().requires_grad_() for name in names]
    y = fn(*leaves, **options)
    grads = torch.autograd.grad(y, leaves, dy)
    return {"y": y.detach()} | {f"d{name}": grad for name, grad in zip(names, grads, strict=True)}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("op", OPERATORS)
def test_triton_matches_fp64_within_the_fp32_limit(op, shape, device):
    fn, definition, names, options = OPERATORS[op]
    inputs, dy = draw(shape, device)
    want = run(definition, names, options, inputs, dy)
    got = run(fn, names, options | {"backend": "triton"}, {n: t.float() for n, t in inputs.items()}, dy.float())
    testing.assert_close(got, want, testing.FP32_LIMIT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op", OPERATORS)
def test_triton_keeps_the_16_bit_budget(op, dtype, device):
    # Nothing but the results is rounded: the budget is that of the exact results, rounded.
    fn, definition, names, options = OPERATORS[op]
    inputs, dy = draw((40, 3, 64), device)
    want = run(definition, names, options, inputs, dy)
    got = run(fn, names, options | {"backend": "triton"}, {n: t.to(dtype) for n, t in inputs.items()}, dy.to(dtype))
    assert {t.dtype for t in got.values()} == {dtype}
    testing.assert_within_budget(got, want, {n: t.to(dtype) for n, t in want.items()})


def test_mixed_types_keep_their_own(device):
    inputs, dy = draw((10, 16), device)
    mixed = {"x": inputs["x"].bfloat16(), "gate": inputs["gate"].float(), "weight": inputs["weight"].float()}
    names, options = GATED["silu"][2], GATED["silu"][3] | {"backend": "triton"}
    got = run(rms_norm_gated, names, options, mixed, dy.bfloat16())
    assert [t.dtype for t in got.values()] == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]


def test_a_vector_of_zeros_stays_zero_and_has_a_finite_gradient(device):
    x = torch.zeros(2, 8, device=device, requires_grad=True)
    y = l2norm(x, backend="triton")
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(x))
    assert not y.any()
    torch.testing.assert_close(dx, torch.full_like(x, 1e3))


@pytest.mark.parametrize("op", OPERATORS)
def test_views_of_a_fused_projection_are_read_in_place(op, device, monkeypatch):
    from openkda.frameworks import torch as fw

    fn, _, names, options = OPERATORS[op]
    inputs, dy = draw((2, 5, 3, 16), device)
    inputs, dy = {n: t.float() for n, t in inputs.items()}, dy.float()
    wide = torch.randn(2, 5, 3 * 48, device=device)
    view = wide[..., 48:96].unflatten(-1, (3, 16)).copy_(inputs["x"])
    assert not view.is_contiguous()
    want = run(fn, names, options | {"backend": "triton"}, inputs, dy)
    monkeypatch.setattr(fw, "copy", lambda x: pytest.fail("copied"))
    got = run(fn, names, options | {"backend": "triton"}, inputs | {"x": view}, dy)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_rows_are_found_in_any_strides(device):
    x = torch.arange(2 * 3 * 4 * 5, device=device, dtype=torch.float32).view(2, 3, 4, 5)
    for view in (x, x[:, 1:], x.transpose(0, 1), x.transpose(-1, -2), x[:1], x[0, 0, 0], x[:, :, ::2], x[..., 1:3]):
        rows, inner, outer_stride, inner_stride = rows_of(view)
        flat, D = view.reshape(-1, view.shape[-1]), view.shape[-1]
        for i, want in enumerate(flat):
            start = rows.storage_offset() + (i // inner) * outer_stride + (i % inner) * inner_stride
            assert torch.equal(rows.as_strided((D,), (1,), start), want)


def test_programs_change_only_the_sum_over_rows(device, monkeypatch):
    names, options = GATED["silu"][2], GATED["silu"][3] | {"backend": "triton"}
    inputs, dy = draw((150, 8), device)
    inputs, dy = {n: t.float() for n, t in inputs.items()}, dy.float()
    results = []
    for programs in (1, 5, 200):
        monkeypatch.setitem(
            tuning.TABLES["rms_norm_gated_bwd"], tuning.family_of(dy), tuning._row(16, 1, programs=programs)
        )
        results.append(run(rms_norm_gated, names, options, inputs, dy))
        assert torch.equal(run(rms_norm_gated, names, options, inputs, dy)["dweight"], results[-1]["dweight"])
    want = run(reference.rms_norm_gated, names, GATED["silu"][3], widened(inputs), dy.double())
    for got in results:
        assert torch.equal(got["dx"], results[0]["dx"])
        assert torch.equal(got["dgate"], results[0]["dgate"])
        testing.assert_close(got, want, testing.FP32_LIMIT)


def widened(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.double() for n, t in inputs.items()}


@pytest.mark.parametrize("op", OPERATORS)
def test_triton_refuses_a_second_derivative(op, device):
    fn, _, names, options = OPERATORS[op]
    inputs = [torch.randn(size, device=device, requires_grad=True) for size in ((3, 8), (3, 8), (8,))][: len(names)]
    y = fn(*inputs, **options, backend="triton")
    (dx,) = torch.autograd.grad(y.sum(), inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match=r': a second derivative must not be asked for.* use backend="eager"'):
        dx.sum().backward()


@pytest.mark.parametrize("spec", [fused.L2Norm, fused.RMSNormGated], ids=lambda spec: spec.NAME)
def test_triton_passes_opcheck(spec, device):
    from openkda.frameworks import torch as fw

    x, gate = (torch.randn(2, 3, 8, device=device, requires_grad=True) for _ in range(2))
    weight = torch.randn(8, device=device, requires_grad=True)
    fw._register(spec)
    arguments = (x, 1e-6) if spec is fused.L2Norm else (x, gate, weight, 1e-5, True)
    torch.library.opcheck(getattr(torch.ops.openkda, spec.NAME).default, arguments)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch 2.11's own, where it imports inductor
def test_triton_compiles_once_for_any_number_of_rows(device):
    weight = torch.randn(8, device=device)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def fn(x: Tensor) -> Tensor:
        unit = l2norm(x, backend="triton")
        return rms_norm_gated(unit, x, weight, activation="silu", backend="triton").sin()

    compiled = torch.compile(fn, fullgraph=True, backend=counter, dynamic=True)
    counts = []
    for T in (5, 9, 12):
        x = torch.randn(2, T, 8, device=device, requires_grad=True)
        got, want = compiled(x), fn(x)
        torch.testing.assert_close(got, want)
        (dx, dwant) = (torch.autograd.grad(y.sum(), x)[0] for y in (got, want))
        torch.testing.assert_close(dx, dwant)
        counts.append(counter.frame_count)
    assert counts[-1] == counts[0]


@pytest.mark.gpu
def test_triton_takes_more_than_2_to_the_31_elements(device):
    x = torch.randn(2**31 // 128 + 1000, 128, device=device, dtype=torch.bfloat16)
    got, end = l2norm(x, backend="triton")[-1000:], x[-1000:].double()
    want = reference.l2norm(end)
    testing.assert_within_budget({"y": got}, {"y": want}, {"y": want.bfloat16()})


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPERATORS)
def test_triton_at_the_tuned_size_agrees_with_eager_and_repeats_to_the_bit(op, device):
    fn, _, names, options = OPERATORS[op]
    inputs = {n: torch.randn(2000, 32, 128, device=device).bfloat16() for n in ("x", "gate")}
    inputs["weight"], dy = torch.randn(128, device=device).bfloat16(), torch.randn_like(inputs["x"])
    got, again = (run(fn, names, options | {"backend": "triton"}, inputs, dy) for _ in range(2))
    want = run(fn, names, options | {"backend": "eager"}, widened(inputs), dy.double())
    testing.assert_within_budget(got, want, {n: t.bfloat16() for n, t in want.items()})
    assert all(torch.equal(got[name], again[name]) for name in got)
