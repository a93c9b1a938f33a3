"""The convolution: the definition by hand-worked numbers, eager against the definition, the contract, the messages."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from openkda import testing
from openkda.conv import causal_conv1d, eager, reference
from openkda.errors import BackendUnavailable

F64 = torch.float64


def run(fn: Callable[..., Any], inputs: dict[str, Any], dy: Tensor, dstate: Tensor) -> dict[str, Tensor]:
    """y, the final state and the gradient of every floating input."""
    is_leaf = {n: isinstance(t, Tensor) and t.is_floating_point() for n, t in inputs.items()}
    call = {n: t.detach().requires_grad_() if is_leaf[n] else t for n, t in inputs.items()}
    leaves = {n: t for n, t in call.items() if is_leaf[n]}
    y, state = fn(call.pop("x"), call.pop("weight"), output_final_state=True, **call)
    # An empty result of the definition is a constant: its gradients are zeros.
    reached = [(result, d) for result, d in ((y, dy), (state, dstate)) if result.requires_grad]
    grads = [torch.zeros_like(t) for t in leaves.values()]
    if reached:
        results, cotangents = zip(*reached, strict=True)
        grads = torch.autograd.grad(results, list(leaves.values()), cotangents, materialize_grads=True)
    return {"y": y.detach(), "state": state.detach()} | dict(zip((f"d{n}" for n in leaves), grads, strict=True))


def draw(
    *shape: int, offsets: list[int] | None = None, W: int = 4, bias: bool = True, state: bool = True, **more: Any
) -> tuple[dict[str, Any], Tensor, Tensor]:
    """Inputs in fp64 with values that bf16 holds, and cotangents of both results."""

    def normal(*size: int) -> Tensor:
        return torch.randn(size, dtype=F64).bfloat16().double()

    B, _, C = shape
    N = B if offsets is None else len(offsets) - 1
    inputs = {"x": normal(*shape), "weight": normal(C, W), **more}
    if bias:
        inputs["bias"] = normal(C)
    if state:
        inputs["initial_state"] = normal(N, C, W - 1)
    if offsets is not None:
        inputs["cu_seqlens"] = torch.tensor(offsets)
    return inputs, normal(*shape), normal(N, C, W - 1)


def cast(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {n: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for n, t in inputs.items()}


# ---- the definition
def test_reference_matches_hand_worked_numbers():
    # One channel, weight (1, 10, 100), state (7, 8): windows (7, 8, 1), (8, 1, 2), (1, 2, 3); bias 0.5.
    x = torch.tensor([1.0, 2.0, 3.0], dtype=F64)[None, :, None]
    weight = torch.tensor([[1.0, 10.0, 100.0]], dtype=F64)
    state = torch.tensor([[[7.0, 8.0]]], dtype=F64)
    y, final = reference.causal_conv1d(
        x, weight, torch.tensor([0.5], dtype=F64), initial_state=state, output_final_state=True
    )
    assert y.flatten().tolist() == [187.5, 218.5, 321.5]
    assert final.tolist() == [[[2.0, 3.0]]]


def test_reference_shifts_the_state_when_the_sequence_is_shorter_than_it():
    x = torch.tensor([5.0], dtype=F64)[None, :, None]
    state = torch.tensor([[[1.0, 2.0, 3.0]]], dtype=F64)
    _, final = reference.causal_conv1d(x, torch.ones(1, 4, dtype=F64), initial_state=state, output_final_state=True)
    assert final.tolist() == [[[2.0, 3.0, 5.0]]]


def test_reference_agrees_with_the_library_convolution():
    x, weight = torch.randn(2, 9, 3, dtype=F64), torch.randn(3, 4, dtype=F64)
    want = torch.nn.functional.conv1d(x.mT, weight[:, None], padding=3, groups=3)[..., :9].mT
    got, _ = reference.causal_conv1d(x, weight, activation="silu")
    torch.testing.assert_close(got, torch.nn.functional.silu(want))


# ---- eager against the definition
# Lengths 0, 1, 2, 3 are shorter than, or equal to, the state of W = 4; 9 is longer. Offsets mix them, with and
# without a tail.
CASES = {
    "T0": (2, 0, 3), "T1": (2, 1, 3), "T2": (2, 2, 3), "T3": (2, 3, 3), "T9": (2, 9, 3),
    "packed": [0, 0, 1, 3, 3, 12], "short": [0, 1, 2, 3, 5], "tail": [0, 2, 9, 9], "all_empty": [0, 0, 0],
}  # fmt: skip


def draw_case(case: str, **options: Any) -> tuple[dict[str, Any], Tensor, Tensor]:
    size = CASES[case]
    if isinstance(size, tuple):
        return draw(*size, **options)
    tail = {"tail": 4, "all_empty": 2}.get(case, 0)
    return draw(1, size[-1] + tail, 3, offsets=size, **options)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize(
    "extras", [{}, {"bias": False, "state": False}, {"W": 1}, {"W": 2}, {"W": 3}, {"W": 6}], ids=str
)
@pytest.mark.parametrize("case", CASES)
def test_eager_matches_reference_in_fp64(case: str, extras: dict[str, Any], activation: str | None):
    inputs, dy, dstate = draw_case(case, activation=activation, **extras)
    want = run(reference.causal_conv1d, inputs, dy, dstate)
    testing.assert_close(run(eager.causal_conv1d, inputs, dy, dstate), want, testing.FP64_LIMIT)


@pytest.mark.parametrize("case", ["T9", "packed", "tail"])
def test_eager_matches_fp64_within_the_fp32_limit(case: str):
    inputs, dy, dstate = draw_case(case, activation="silu")
    want = run(reference.causal_conv1d, inputs, dy, dstate)
    got = run(causal_conv1d, cast(inputs, torch.float32), dy.float(), dstate.float())
    testing.assert_close(got, want, testing.FP32_LIMIT)


@pytest.mark.parametrize("dims", [(2, 64, 32), [0, 1, 30, 30, 120]], ids=["dense", "packed"])
def test_eager_keeps_the_16_bit_budget(dims: Any):
    # Nothing but the results is rounded: the budget is that of the exact results, rounded.
    offsets = dims if isinstance(dims, list) else None
    inputs, dy, dstate = draw(*((1, 128, 32) if offsets else dims), offsets=offsets, activation="silu")
    want = run(reference.causal_conv1d, inputs, dy, dstate)
    got = run(causal_conv1d, cast(inputs, torch.bfloat16), dy.bfloat16(), dstate.bfloat16())
    assert {t.dtype for t in got.values()} == {torch.bfloat16}
    testing.assert_within_budget(got, want, {n: t.bfloat16() for n, t in want.items()})


@pytest.mark.parametrize("offsets", [None, [0, 0, 1, 5]], ids=["dense", "packed"])
def test_eager_has_right_first_and_second_derivatives(offsets: list[int] | None):
    inputs, _, _ = draw(1, 6, 2, offsets=offsets, W=3)
    cu = inputs.pop("cu_seqlens", None)
    leaves = [inputs[n].requires_grad_() for n in ("x", "weight", "bias", "initial_state")]

    def fn(x: Tensor, weight: Tensor, bias: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        options = {"activation": "silu", "initial_state": state, "output_final_state": True, "cu_seqlens": cu}
        return causal_conv1d(x, weight, bias, **options)

    assert torch.autograd.gradcheck(fn, leaves)
    assert torch.autograd.gradgradcheck(fn, leaves)


# ---- the contract
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_sequences_have_the_bits_of_separate_ones(dtype: torch.dtype):
    # Without SiLU: vector lanes and left-over lanes of a library's sigmoid may differ in the last bit.
    offsets = [0, 5, 5, 6, 8, 20]
    inputs, _, _ = draw(1, 20, 3, offsets=offsets)
    x, weight, bias, states, cu = cast(inputs, dtype).values()
    y, final = causal_conv1d(x, weight, bias, initial_state=states, output_final_state=True, cu_seqlens=cu.int())
    for n, (a, b) in enumerate(itertools.pairwise(offsets)):
        alone = causal_conv1d(x[:, a:b], weight, bias, initial_state=states[n : n + 1], output_final_state=True)
        assert torch.equal(alone[0], y[:, a:b])
        assert torch.equal(alone[1][0], final[n])


def test_empty_sequence_passes_its_state_through_bitwise():
    x, weight = torch.randn(1, 4, 3), torch.randn(3, 4)
    state = torch.randn(3, 3, 3)
    state[0, 0] = torch.tensor([float("nan"), -0.0, float("inf")])
    cu = torch.tensor([0, 0, 4, 4])
    _, final = causal_conv1d(x, weight, initial_state=state, output_final_state=True, cu_seqlens=cu)
    for n in (0, 2):
        assert torch.equal(final[n].view(torch.int32), state[n].view(torch.int32))
    _, final = causal_conv1d(x, weight, output_final_state=True, cu_seqlens=cu)
    assert torch.equal(final[0], torch.zeros(3, 3))


def test_tail_is_zero_and_its_nan_reaches_nothing():
    inputs, dy, dstate = draw_case("tail", activation="silu")
    want = run(causal_conv1d, inputs, dy, dstate)
    end = CASES["tail"][-1]
    inputs["x"][:, end:], dy[:, end:] = float("nan"), float("nan")
    got = run(causal_conv1d, inputs, dy, dstate)
    for name in got:
        assert torch.equal(got[name], want[name]), name
    assert not got["y"][:, end:].any()
    assert not got["dx"][:, end:].any()


def test_nan_in_one_sequence_reaches_no_other():
    inputs, dy, dstate = draw(1, 6, 2, offsets=[0, 3, 6])
    inputs["x"][:, :3] = float("nan")
    got = run(causal_conv1d, inputs, dy, dstate)
    assert got["y"][:, 3:].isfinite().all()
    assert got["dx"].isfinite().all()
    assert got["state"][1].isfinite().all()


def test_output_does_not_depend_on_later_tokens():
    x, weight = torch.randn(1, 9, 3), torch.randn(3, 4)
    changed = x.clone()
    changed[:, 5:] = 1e4
    assert torch.equal(causal_conv1d(x, weight)[0][:, :5], causal_conv1d(changed, weight)[0][:, :5])


@pytest.mark.parametrize("offsets", [None, [0, 2, 12]], ids=["dense", "packed"])
def test_strided_views_of_a_fused_projection_give_the_bits_of_copies(offsets: list[int] | None):
    inputs, dy, dstate = draw(1, 12, 3, offsets=offsets)
    fused = torch.randn(1, 12, 9, dtype=F64)
    view = fused[..., 3:6]
    assert not view.is_contiguous()
    want = run(causal_conv1d, inputs | {"x": view.contiguous()}, dy, dstate)
    flipped_dy = dy.transpose(1, 2).contiguous().transpose(1, 2)
    flipped_state = inputs["initial_state"].transpose(1, 2).contiguous().transpose(1, 2)
    got = run(causal_conv1d, inputs | {"x": view, "initial_state": flipped_state}, flipped_dy, dstate)
    for name in got:
        torch.testing.assert_close(got[name], want[name], rtol=1e-14, atol=1e-14, msg=name)
    assert torch.equal(got["y"], want["y"])


@pytest.mark.parametrize("split", [0, 1, 2, 5, 12])
def test_two_calls_joined_by_the_state_equal_one(split: int):
    x, weight = torch.randn(2, 12, 3), torch.randn(3, 4)
    whole, end = causal_conv1d(x, weight, output_final_state=True)
    first, middle = causal_conv1d(x[:, :split], weight, output_final_state=True)
    second, last = causal_conv1d(x[:, split:], weight, initial_state=middle, output_final_state=True)
    assert torch.equal(torch.cat([first, second], 1), whole)
    assert torch.equal(last, end)


def test_offsets_edited_in_place_are_seen():
    x, weight, cu = torch.randn(1, 8, 2), torch.randn(2, 4), torch.tensor([0, 4, 8])
    causal_conv1d(x, weight, cu_seqlens=cu)
    cu[1] = 6
    y, _ = causal_conv1d(x, weight, cu_seqlens=cu)
    assert torch.equal(y, causal_conv1d(x, weight, cu_seqlens=torch.tensor([0, 6, 8]))[0])


def test_fp32_weight_serves_bf16_inputs():
    x, weight = torch.randn(1, 8, 2).bfloat16(), torch.randn(2, 4)
    y, state = causal_conv1d(x, weight, output_final_state=True)
    assert y.dtype == state.dtype == torch.bfloat16


def test_no_state_is_returned_unless_asked_for():
    assert causal_conv1d(torch.randn(1, 8, 2), torch.randn(2, 4))[1] is None


@pytest.mark.parametrize("W", [2, 4])
@pytest.mark.parametrize("offsets", [None, [0, 100]], ids=["dense", "packed"])
def test_final_state_holds_no_more_memory_than_its_own(offsets: list[int] | None, W: int):
    cu = None if offsets is None else torch.tensor(offsets)
    _, state = causal_conv1d(torch.randn(1, 100, 8), torch.randn(8, W), output_final_state=True, cu_seqlens=cu)
    assert state is not None
    assert state.untyped_storage().nbytes() == 8 * (W - 1) * 4


def test_backends_agree_through_the_public_function():
    inputs, dy, dstate = draw_case("packed", activation="silu")
    results = [run(causal_conv1d, inputs | {"backend": name}, dy, dstate) for name in ("auto", "eager", "reference")]
    testing.assert_close(results[1], results[2], testing.FP64_LIMIT)
    for name in results[0]:
        assert torch.equal(results[0][name], results[1][name])


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_conv_compiles_without_a_graph_break():
    x, weight, cu = torch.randn(1, 9, 3), torch.randn(3, 4), torch.tensor([0, 4, 7])
    state = torch.randn(2, 3, 3)
    options = {"activation": "silu", "initial_state": state, "output_final_state": True, "cu_seqlens": cu}
    compiled = torch.compile(causal_conv1d, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(x, weight, **options), causal_conv1d(x, weight, **options), strict=True):
        torch.testing.assert_close(got, want)


# ---- messages
X, WEIGHT = torch.zeros(2, 5, 3), torch.zeros(3, 4)
BAD = {
    "x_kind": (TypeError, r"causal_conv1d: x must be a tensor, got list", {"x": [1.0]}),
    "x_dtype": (TypeError, r"x must have a floating dtype, got int64", {"x": torch.zeros(2, 5, 3, dtype=torch.long)}),
    "x_rank": (ValueError, r"x must have shape \[B, T, C\], got \[5, 3\]", {"x": X[0]}),
    "weight_rank": (ValueError, r"weight must have shape \[C, W\], got \[3, 1, 4\]", {"weight": WEIGHT[:, None]}),
    "weight_shape": (
        ValueError,
        r"weight must have shape \[C, W\] = \[3, 4\], got \[4, 4\]; one filter per channel of x",
        {"weight": torch.zeros(4, 4)},
    ),
    "width": (ValueError, r"weight must have a width W of at least 1, got 0", {"weight": torch.zeros(3, 0)}),
    "bias": (ValueError, r"bias must have shape \[C\] = \[3\], got \[4\]", {"bias": torch.zeros(4)}),
    "activation": (ValueError, r"activation must be one of None, 'silu', got 'gelu'", {"activation": "gelu"}),
    "flag": (TypeError, r"output_final_state must be a bool, got int", {"output_final_state": 1}),
    "state_shape": (
        ValueError,
        r"initial_state must have shape \[N, C, W-1\] = \[2, 3, 3\], got \[2, 3, 4\]; it holds the last W-1 inputs of "
        r"every sequence, oldest first; from a state of W columns drop the first",
        {"initial_state": torch.zeros(2, 3, 4)},
    ),
    "state_dtype": (
        TypeError,
        r"initial_state must have dtype float32, got bfloat16; it holds inputs, so it follows x",
        {"initial_state": torch.zeros(2, 3, 3, dtype=torch.bfloat16)},
    ),
    "batch": (
        ValueError,
        r"batch size must be 1 with cu_seqlens, got 2; fold the batch into the token axis",
        {"cu_seqlens": torch.tensor([0, 5])},
    ),
    "offsets_dtype": (
        TypeError,
        r"cu_seqlens must have dtype int32 or int64, got float32",
        {"x": X[:1], "cu_seqlens": torch.zeros(2)},
    ),
    "device": (ValueError, r"weight must be on x's device cpu, got meta", {"weight": WEIGHT.to("meta")}),
    "context": (
        TypeError,
        r"causal_conv1d: cp_context must come from build_cp_context, got object",
        {"cp_context": object()},
    ),
    "backend": (
        ValueError,
        r"backend must be one of 'auto', 'triton', 'eager', 'reference', got 'cuda'",
        {"backend": "cuda"},
    ),
    "triton": (
        BackendUnavailable,
        r'causal_conv1d: backend="triton" needs a GPU tensor, got device cpu; use backend="eager"',
        {"backend": "triton"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_argument_is_named_with_rule_and_value(case: str):
    error, message, change = BAD[case]
    with pytest.raises(error, match=message):
        causal_conv1d(**({"x": X, "weight": WEIGHT} | change))


def test_triton_refuses_a_width_that_it_has_no_kernel_for(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # a CPU tensor is then no reason to refuse
    with pytest.raises(BackendUnavailable, match=r'^causal_conv1d: backend="triton" needs a width W of 2 to 4, got 5'):
        causal_conv1d(X, torch.zeros(3, 5), backend="triton")
    assert causal_conv1d(X, torch.zeros(3, 5))[0].shape == X.shape


def test_unknown_keyword_is_a_type_error():
    with pytest.raises(TypeError, match="residual"):
        causal_conv1d(X, WEIGHT, residual=X)  # type: ignore[call-arg]


def test_offset_values_are_checked_on_request(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENKDA_CHECK", "1")
    with pytest.raises(ValueError, match=r"causal_conv1d: cu_seqlens must never decrease, got 4 then 2 at index 2"):
        causal_conv1d(X[:1], WEIGHT, cu_seqlens=torch.tensor([0, 4, 2]))
    with pytest.raises(ValueError, match=r"causal_conv1d: cu_seqlens must end at or below T = 5, got 6"):
        causal_conv1d(X[:1], WEIGHT, cu_seqlens=torch.tensor([0, 6]))


@pytest.mark.parametrize("backend", ["eager", "reference"])
@pytest.mark.parametrize("T", [0, 5])
def test_a_batch_of_none(backend: str, T: int):
    y, state = causal_conv1d(torch.ones(0, T, 3), torch.ones(3, 4), output_final_state=True, backend=backend)
    assert (y.shape, state.shape) == ((0, T, 3), (0, 3, 3))
