"""The two normalisations: the definitions by hand-worked numbers, eager against them, the contract, the messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from openkda import testing
from openkda.errors import BackendUnavailable
from openkda.norm import eager, l2norm, reference, rms_norm_gated

F64 = torch.float64
# D = 1 is left out: y is 1 or -1 there, and a derivative of the size of eps has few digits in any form.
SHAPES = [(2, 5, 3, 16), (7, 2), (3, 60), (0, 8), (64,)]
# Each function with the names of its tensor arguments.
L2 = (reference.l2norm, eager.l2norm, ("x",), {})
GATED = {
    name: (reference.rms_norm_gated, eager.rms_norm_gated, ("x", "gate", "weight"), {"activation": name})
    for name in ("sigmoid", "silu")
}
OPERATORS = {"l2norm": L2} | {f"rms_norm_gated_{name}": row for name, row in GATED.items()}


def draw(shape: tuple[int, ...]) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs in fp64 with values that bf16 holds, and the cotangent."""

    def normal(*size: int) -> Tensor:
        return torch.randn(size, dtype=F64).bfloat16().double()

    return {"x": normal(*shape), "gate": 3 * normal(*shape), "weight": normal(shape[-1])}, normal(*shape)


def run(
    fn: Callable[..., Tensor], names: tuple[str, ...], options: dict[str, Any], inputs: dict[str, Tensor], dy: Tensor
) -> dict[str, Tensor]:
    """y and the gradient of every input of fn."""
    leaves = [inputs[name].detach().requires_grad_() for name in names]
    y = fn(*leaves, **options)
    grads = torch.autograd.grad(y, leaves, dy)
    return {"y": y.detach()} | {f"d{name}": grad for name, grad in zip(names, grads, strict=True)}


def cast(inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: x.to(dtype) for name, x in inputs.items()}


# ---- the definitions
def test_l2norm_adds_eps_inside_the_root():
    # sqrt(9 + 16 + 11) = 6
    assert reference.l2norm(torch.tensor([3.0, 4.0], dtype=F64), eps=11.0).tolist() == [0.5, 4 / 6]


def test_rms_norm_gated_matches_hand_worked_numbers():
    # mean of squares (9 + 16) / 2 = 12.5, eps 3.5, root 4; sigmoid(0) = 1/2, and silu(0) = 0
    x, gate = torch.tensor([3.0, 4.0], dtype=F64), torch.zeros(2, dtype=F64)
    weight = torch.tensor([2.0, 10.0], dtype=F64)
    assert reference.rms_norm_gated(x, gate, weight, activation="sigmoid", eps=3.5).tolist() == [0.75, 5.0]
    assert reference.rms_norm_gated(x, gate, weight, activation="silu", eps=3.5).tolist() == [0.0, 0.0]


def test_rms_norm_gated_agrees_with_the_library():
    x, gate, weight = torch.randn(4, 8, dtype=F64), torch.randn(4, 8, dtype=F64), torch.randn(8, dtype=F64)
    plain = torch.nn.functional.rms_norm(x, (8,), weight, 1e-5)
    got = reference.rms_norm_gated(x, gate, weight, activation="silu")
    torch.testing.assert_close(got, plain * torch.nn.functional.silu(gate))


# ---- eager against the definition
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_eager_matches_reference_in_fp64(name: str, shape: tuple[int, ...]):
    slow, fast, names, options = OPERATORS[name]
    inputs, dy = draw(shape)
    want = run(slow, names, options, inputs, dy)
    testing.assert_close(run(fast, names, options, inputs, dy), want, testing.FP64_LIMIT)


@pytest.mark.parametrize("name", OPERATORS)
def test_eager_matches_fp64_within_the_fp32_limit(name: str):
    slow, fast, names, options = OPERATORS[name]
    inputs, dy = draw((64, 128))
    want = run(slow, names, options, inputs, dy)
    testing.assert_close(run(fast, names, options, cast(inputs, torch.float32), dy.float()), want, testing.FP32_LIMIT)


@pytest.mark.parametrize("name", OPERATORS)
def test_eager_keeps_the_16_bit_budget(name: str):
    # Nothing but the results is rounded: the budget is that of the exact results, rounded.
    slow, fast, names, options = OPERATORS[name]
    inputs, dy = draw((64, 128))
    want = run(slow, names, options, inputs, dy)
    got = run(fast, names, options, cast(inputs, torch.bfloat16), dy.bfloat16())
    assert {t.dtype for t in got.values()} == {torch.bfloat16}
    testing.assert_within_budget(got, want, {n: t.bfloat16() for n, t in want.items()})


@pytest.mark.parametrize("name", OPERATORS)
def test_eager_has_right_first_and_second_derivatives(name: str):
    _, fast, names, options = OPERATORS[name]
    inputs, _ = draw((2, 3, 4))
    leaves = [inputs[n].requires_grad_() for n in names]
    assert torch.autograd.gradcheck(lambda *xs: fast(*xs, **options), leaves)
    assert torch.autograd.gradgradcheck(lambda *xs: fast(*xs, **options), leaves)


@pytest.mark.parametrize("name", OPERATORS)
def test_eager_gives_strided_views_the_values_of_copies(name: str):
    _, fast, names, options = OPERATORS[name]
    inputs, dy = draw((4, 6, 8))
    inputs["x"], inputs["gate"] = (torch.randn(4, 8, 12, dtype=F64).mT[:, 3:9] for _ in range(2))
    want = run(fast, names, options, {n: t.contiguous() for n, t in inputs.items()}, dy)
    got = run(fast, names, options, inputs, dy.mT.contiguous().mT)
    testing.assert_close(got, want, testing.FP64_LIMIT)


# ---- the contract
def test_l2norm_of_zero_is_zero_with_a_finite_gradient():
    x = torch.zeros(3, 4, requires_grad=True)
    y = l2norm(x)
    y.sum().backward()
    assert not y.any()
    torch.testing.assert_close(x.grad, torch.full((3, 4), 1e3))  # 1 / sqrt(eps)


def test_l2norm_has_no_gradient_along_the_vector():
    # y does not change when x is scaled: d(y . x)/dx along x is of the size of eps.
    x = torch.randn(5, 16, dtype=F64, requires_grad=True)
    y = l2norm(x)
    (dx,) = torch.autograd.grad(y, x, x.detach())
    assert (dx * x).sum(-1).abs().max() < 1e-5


@pytest.mark.parametrize("activation", ["sigmoid", "silu"])
def test_rms_norm_gated_is_finite_for_huge_gates(activation: str):
    inputs, dy = draw((2, 8))
    inputs["gate"] = torch.tensor([-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4, 1.0], dtype=F64).expand(2, 8)
    got = run(
        eager.rms_norm_gated,
        ("x", "gate", "weight"),
        {"activation": activation},
        cast(inputs, torch.float32),
        dy.float(),
    )
    assert all(t.isfinite().all() for t in got.values())


def test_fp32_weight_serves_bf16_inputs():
    x, weight = torch.randn(3, 8).bfloat16(), torch.randn(8, requires_grad=True)
    y = rms_norm_gated(x, x.float(), weight, activation="sigmoid")
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


def test_backward_keeps_the_inputs_alone():
    kept = []
    x, gate, weight = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8), torch.randn(8)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        rms_norm_gated(x, gate, weight, activation="sigmoid")
        l2norm(x)
    assert set(kept) == {x.data_ptr(), gate.data_ptr(), weight.data_ptr()}


def test_backends_agree_through_the_public_functions():
    inputs, _ = draw((5, 16))
    for fn, names, options in ((l2norm, ("x",), {}), (rms_norm_gated, ("x", "gate", "weight"), {"activation": "silu"})):
        auto, fast, slow = (
            fn(*(inputs[n] for n in names), **options, backend=backend) for backend in ("auto", "eager", "reference")
        )
        assert torch.equal(auto, fast)
        torch.testing.assert_close(fast, slow, rtol=1e-14, atol=1e-14)


# Dynamo itself (torch 2.13) makes the object that it warns about, for every custom derivative that it traces.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_norms_compile_without_a_graph_break():
    x, gate, weight = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8), torch.randn(8)

    def fn(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        return rms_norm_gated(l2norm(x), gate, weight, activation="sigmoid")

    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, gate, weight), fn(x, gate, weight))
    (got,), (want,) = (torch.autograd.grad(f(x, gate, weight).sum(), x) for f in (compiled, fn))
    torch.testing.assert_close(got, want)


# ---- messages
X, WEIGHT = torch.zeros(2, 5, 8), torch.zeros(8)
BAD = {
    "x_kind": (TypeError, r"rms_norm_gated: x must be a tensor, got float", {"x": 1.0}),
    "x_dtype": (TypeError, r"x must have a floating dtype, got int32", {"x": X.int()}),
    "x_scalar": (ValueError, r"x must have a last axis of at least 1 entry, got \[\]", {"x": torch.zeros(())}),
    "gate": (
        ValueError,
        r"rms_norm_gated: gate must have shape \[\.\., D\] = \[2, 5, 8\], got \[2, 5, 4\]; one gate per entry of x",
        {"gate": torch.zeros(2, 5, 4)},
    ),
    "weight": (
        ValueError,
        r"weight must have shape \[D\] = \[8\], got \[5\]; one entry per channel of x's last axis",
        {"weight": torch.zeros(5)},
    ),
    "activation": (
        ValueError,
        r"rms_norm_gated: activation must be one of 'sigmoid', 'silu', got 'swish'",
        {"activation": "swish"},
    ),
    "no_activation": (ValueError, r"must be one of 'sigmoid', 'silu', got None", {"activation": None}),
    "eps": (ValueError, r"rms_norm_gated: eps must be finite and above 0, got 0", {"eps": 0}),
    "device": (ValueError, r"gate must be on x's device cpu, got meta", {"gate": X.to("meta")}),
    "backend": (ValueError, r"backend must be one of 'auto', 'triton', 'eager', 'reference', got ''", {"backend": ""}),
    "triton": (
        BackendUnavailable,
        r'rms_norm_gated: backend="triton" needs a GPU tensor, got device cpu',
        {"backend": "triton"},
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_argument_is_named_with_rule_and_value(case: str):
    error, message, change = BAD[case]
    with pytest.raises(error, match=message):
        rms_norm_gated(**({"x": X, "gate": X, "weight": WEIGHT, "activation": "silu"} | change))


def test_activation_has_no_default():
    with pytest.raises(TypeError, match="activation"):
        rms_norm_gated(X, X, WEIGHT)  # type: ignore[call-arg]


def test_l2norm_names_its_bad_arguments():
    with pytest.raises(ValueError, match=r"l2norm: eps must be finite and above 0, got -1.0"):
        l2norm(X, -1.0)
    with pytest.raises(TypeError, match=r"l2norm: x must have a floating dtype, got int64"):
        l2norm(torch.zeros(3, dtype=torch.long))
    with pytest.raises(BackendUnavailable, match=r'l2norm: backend="triton" needs a GPU tensor'):
        l2norm(X, backend="triton")


def test_triton_refuses_rows_that_do_not_fit_its_registers(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # a CPU tensor is then no reason to refuse
    with pytest.raises(BackendUnavailable, match=r"needs a last axis of at most 4096 entries, got 4097"):
        l2norm(torch.ones(1, 4097), backend="triton")
    assert l2norm(torch.ones(1, 4097)).shape == (1, 4097)
