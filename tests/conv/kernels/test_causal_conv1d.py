"""causal_conv1d on its Triton kernels: every result and gradient against fp64, the contract, compilers and autograd."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

pytest.importorskip("triton")

from openkda import testing
from openkda.conv import causal_conv1d, causal_conv1d_update, fused, reference
from openkda.conv.kernels import tuning

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("poisoned")]
F64 = torch.float64
# (B, T, C), or offsets: lengths 0 to 3 are shorter than, or equal to, the state of W = 4; with and without a tail.
CASES = {
    "T1": (2, 1, 5), "T2": (2, 2, 5), "T9": (2, 9, 20), "T37": (1, 37, 8),
    "packed": [0, 0, 1, 3, 3, 12], "short": [0, 1, 2, 3, 5], "tail": [0, 2, 9, 9], "all_empty": [0, 0, 0],
}  # fmt: skip


def triton(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    return causal_conv1d(*args, **kwargs, backend="triton")


def run(fn: Any, inputs: dict[str, Any], dy: Tensor, dstate: Tensor) -> dict[str, Tensor]:
    """y, the final state and the gradient of every floating input."""
    leaves = {n: t.detach().requires_grad_() for n, t in inputs.items() if is_float(t)}
    y, state = fn(**(inputs | leaves), output_final_state=True)
    reached = [(r, d) for r, d in ((y, dy), (state, dstate)) if r.requires_grad]
    grads = [torch.zeros_like(t) for t in leaves.values()]
    if reached:
        results, cotangents = zip(*reached, strict=True)
        grads = torch.autograd.grad(results, list(leaves.values()), cotangents, materialize_grads=True)
    return {"y": y.detach(), "state": state.detach()} | {f"d{n}": g for n, g in zip(leaves, grads, strict=True)}


def is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def draw(case: Any, device: str, *, W: int = 4, bias: bool = True, state: bool = True, **more: Any) -> tuple:
    """Inputs in fp64 with values that bf16 holds, and cotangents of both results."""

    def normal(*size: int) -> Tensor:
        return torch.randn(size, dtype=F64).bfloat16().double().to(device)

    size = CASES.get(case, case) if isinstance(case, str) else case
    offsets = None if isinstance(size, tuple) else size
    if offsets is not None:
        size = (1, offsets[-1] + {"tail": 4, "all_empty": 2}.get(str(case), 0), 20)
    B, _, C = size
    N = B if offsets is None else len(offsets) - 1
    inputs = {"x": normal(*size), "weight": normal(C, W), **more}
    if bias:
        inputs["bias"] = normal(C)
    if state:
        inputs["initial_state"] = normal(N, C, W - 1)
    if offsets is not None:
        inputs["cu_seqlens"] = torch.tensor(offsets, device=device)
    return inputs, normal(*size), normal(N, C, W - 1)


def cast(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {n: t.to(dtype) if is_float(t) else t for n, t in inputs.items()}


# ---- against the definition
@pytest.mark.parametrize("extras", [{}, {"bias": False, "state": False}, {"W": 2}, {"W": 3}], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_triton_matches_fp64_within_the_fp32_limit(case, extras, device):
    activation = None if extras.get("W") == 3 else "silu"
    inputs, dy, dstate = draw(case, device, activation=activation, **extras)
    want = run(reference.causal_conv1d, inputs, dy, dstate)
    got = run(triton, cast(inputs, torch.float32), dy.float(), dstate.float())
    testing.assert_close(got, want, testing.FP32_LIMIT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [(2, 40, 33), [0, 1, 30, 30, 70]], ids=["dense", "packed"])
def test_triton_keeps_the_16_bit_budget(case, dtype, device):
    # Nothing but the results is rounded: the budget is that of the exact results, rounded.
    inputs, dy, dstate = draw(case, device, activation="silu")
    want = run(reference.causal_conv1d, inputs, dy, dstate)
    got = run(triton, cast(inputs, dtype), dy.to(dtype), dstate.to(dtype))
    assert {t.dtype for t in got.values()} == {dtype}
    testing.assert_within_budget(got, want, {n: t.to(dtype) for n, t in want.items()})


@pytest.mark.parametrize("case", [(1, 60, 8), [0, 3, 20, 21, 60]], ids=["dense", "packed"])
def test_ranges_change_no_bit_of_outputs_and_token_gradients(case, device, monkeypatch):
    inputs, dy, dstate = draw(case, device, activation="silu")
    call = (cast(inputs, torch.float32), dy.float(), dstate.float())
    results = []
    for rows in (60, 7):
        for stage in tuning.TABLES:
            monkeypatch.setitem(tuning.TABLES[stage], tuning.family_of(dy), tuning._row(8, 1, 1, rows, rows))
        results.append(run(triton, *call))
    for name in ("y", "state", "dx", "dinitial_state"):
        assert torch.equal(results[0][name], results[1][name]), name
    assert torch.equal(run(triton, *call)["dweight"], results[1]["dweight"])
    testing.assert_close(results[1], run(reference.causal_conv1d, inputs, dy, dstate), testing.FP32_LIMIT)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_triton_at_the_tuned_size_agrees_with_eager_and_repeats_to_the_bit(packed, device):
    offsets = torch.tensor([0, 5, 5, 6, 1000, 1001, 4096, 8000], device=device, dtype=torch.int32) if packed else None
    N = 7 if packed else 1
    fused_qkv = torch.randn(1, 8192, 3 * 4096, device=device).bfloat16()
    inputs = {"x": fused_qkv[..., 4096:8192], "weight": torch.randn(4096, 4, device=device).bfloat16() / 2}
    inputs |= {"initial_state": torch.randn(N, 4096, 3, device=device).bfloat16(), "cu_seqlens": offsets}
    dy, dstate = torch.randn_like(inputs["x"]), torch.randn_like(inputs["initial_state"])
    inputs["activation"] = "silu"
    got, again = (run(triton, inputs, dy, dstate) for _ in range(2))
    wide = cast(inputs, torch.float32) | {"backend": "eager"}
    want = run(causal_conv1d, wide, dy.float(), dstate.float())
    testing.assert_within_budget(got, want, {n: t.bfloat16() for n, t in want.items()})
    assert all(torch.equal(got[name], again[name]) for name in got)


@pytest.mark.gpu
def test_triton_takes_more_than_2_to_the_31_elements(device):
    T = 2**31 // 4096 + 100
    x = torch.randn(1, T, 4096, device=device, dtype=torch.bfloat16)
    y, _ = triton(x, torch.ones(4096, 4, device=device))
    end = x[0, -103:].float()
    want = end[3:] + end[2:-1] + end[1:-2] + end[:-3]
    testing.assert_within_budget({"y": y[0, -100:]}, {"y": want}, {"y": want.bfloat16()})


@pytest.mark.gpu
def test_triton_takes_more_than_65535_sequences(device):
    x, weight = torch.randn(70000, 1, 8, device=device), torch.randn(8, 4, device=device)
    y, state = triton(x, weight, output_final_state=True)
    torch.testing.assert_close(y, x * weight[:, 3])
    assert torch.equal(state[..., 2], x[:, 0])
    cu = torch.arange(70001, device=device)
    assert torch.equal(triton(x.view(1, 70000, 8), weight, cu_seqlens=cu)[0][0], y[:, 0])


# ---- the contract
def test_packed_sequences_have_the_bits_of_separate_ones(device):
    offsets = [0, 5, 5, 6, 8, 20]
    inputs, _, _ = draw(offsets, device, activation="silu")
    x, weight, _, bias, states, cu = cast(inputs, torch.float32).values()
    y, final = triton(
        x, weight, bias, activation="silu", initial_state=states, output_final_state=True, cu_seqlens=cu.int()
    )
    for n, (a, b) in enumerate(itertools.pairwise(offsets)):
        options = {"activation": "silu", "initial_state": states[n : n + 1], "output_final_state": True}
        alone = triton(x[:, a:b], weight, bias, **options)
        assert torch.equal(alone[0], y[:, a:b])
        assert torch.equal(alone[1][0], final[n])


def test_empty_sequence_passes_state_and_gradient_through_bitwise(device):
    x, weight = torch.randn(1, 4, 3, device=device), torch.randn(3, 4, device=device)
    state, dstate = torch.randn(2, 3, 3, 3, device=device)
    state[0, 0] = torch.tensor([float("nan"), -0.0, float("inf")])
    state.requires_grad_()
    cu = torch.tensor([0, 0, 4, 4], device=device)
    _, final = triton(x, weight, initial_state=state, output_final_state=True, cu_seqlens=cu)
    (grad,) = torch.autograd.grad(final, state, dstate)
    for n in (0, 2):
        assert torch.equal(final[n].view(torch.int32), state[n].view(torch.int32))
        assert torch.equal(grad[n], dstate[n])
    _, final = triton(x, weight, output_final_state=True, cu_seqlens=cu)
    assert torch.equal(final[0], torch.zeros(3, 3, device=device))


def test_tail_is_zero_and_its_nan_reaches_nothing(device):
    inputs, dy, dstate = draw("tail", device, activation="silu")
    call, dy, dstate = cast(inputs, torch.float32), dy.float(), dstate.float()
    want = run(triton, call, dy, dstate)
    end = CASES["tail"][-1]
    call["x"][:, end:], dy[:, end:] = float("nan"), float("nan")
    got = run(triton, call, dy, dstate)
    for name in got:
        assert torch.equal(got[name], want[name]), name
    assert not got["y"][:, end:].any()
    assert not got["dx"][:, end:].any()


def test_nan_in_one_sequence_reaches_no_other(device):
    inputs, dy, dstate = draw([0, 3, 6], device, activation="silu")
    call = cast(inputs, torch.float32)
    call["x"][:, :3] = float("nan")
    got = run(triton, call, dy.float(), dstate.float())
    assert got["y"][:, 3:].isfinite().all()
    assert got["dx"][:, 3:].isfinite().all()
    assert got["state"][1].isfinite().all()
    assert got["dinitial_state"][1].isfinite().all()


@pytest.mark.parametrize("case", [(2, 12, 8), [0, 2, 12]], ids=["dense", "packed"])
def test_strided_views_of_a_fused_projection_are_read_in_place(case, device, monkeypatch):
    from openkda.frameworks import torch as fw

    inputs, dy, dstate = draw(case, device)
    call, dy, dstate = cast(inputs, torch.float32), dy.float(), dstate.float()
    x = call["x"]
    view = torch.randn(*x.shape[:2], 3 * x.shape[2], device=device)[..., x.shape[2] : 2 * x.shape[2]].copy_(x)
    assert not view.is_contiguous()
    want = run(triton, call, dy, dstate)
    with monkeypatch.context() as m:
        m.setattr(fw, "copy", lambda x: pytest.fail("copied"))
        got = run(triton, call | {"x": view}, dy, dstate)
    turned = dy.transpose(1, 2).contiguous().transpose(1, 2)  # channels apart: this one has to be copied
    for result in (got, run(triton, call, turned, dstate)):
        assert all(torch.equal(result[name], want[name]) for name in want)


@pytest.mark.parametrize("wanted", [("x",), ("weight",), ("bias",), ("initial_state",)], ids=str)
def test_triton_gives_the_gradient_that_is_asked_for(wanted, device):
    inputs, dy, dstate = draw("packed", device, activation="silu")
    call, dy, dstate = cast(inputs, torch.float32), dy.float(), dstate.float()
    want = run(triton, call, dy, dstate)
    leaves = {n: call[n].requires_grad_() for n in wanted}
    y, final = triton(**call, output_final_state=True)
    grads = torch.autograd.grad((y, final), list(leaves.values()), (dy, dstate))
    for name, grad in zip(wanted, grads, strict=True):
        assert torch.equal(grad, want["d" + name])


def test_fp32_weight_serves_bf16_inputs(device):
    inputs, dy, dstate = draw("T9", device, activation="silu")
    call = {n: t.bfloat16() if n in ("x", "initial_state") else t for n, t in cast(inputs, torch.float32).items()}
    got = run(triton, call, dy.bfloat16(), dstate.bfloat16())
    assert got["y"].dtype == got["dx"].dtype == torch.bfloat16
    assert got["dweight"].dtype == got["dbias"].dtype == torch.float32


# ---- one token at a time
@pytest.mark.parametrize("W", [2, 3, 4])
def test_update_gives_the_bits_of_the_whole_sequence(W, device):
    inputs, _, _ = draw((3, 6, 20), device, W=W)
    x, weight, bias, state = cast(inputs, torch.bfloat16).values()
    want, last = triton(x, weight, bias, activation="silu", initial_state=state, output_final_state=True)
    for t in range(6):
        y = causal_conv1d_update(x[:, t], state, weight, bias, activation="silu", backend="triton")
        assert torch.equal(y, want[:, t])
    assert torch.equal(state, last)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_update_edits_the_named_slots_of_a_pool_and_no_other(dtype, device):
    x, weight = torch.randn(4, 5, device=device), torch.randn(5, 4, device=device)
    pool = torch.randn(6, 5, 3, device=device)
    indices = torch.tensor([3, -1, 0, -7], device=device, dtype=dtype)
    got, want = pool.clone(), pool.clone()
    y = causal_conv1d_update(x, got, weight, state_indices=indices, backend="triton")
    expected = causal_conv1d_update(x, want, weight, state_indices=indices, backend="reference")
    torch.testing.assert_close(y, expected)
    assert not y[[1, 3]].any()
    assert torch.equal(got, want)
    assert torch.equal(got[[1, 2, 4, 5]], pool[[1, 2, 4, 5]])


# ---- compilers and autograd
def test_triton_refuses_a_second_derivative(device):
    x = torch.randn(1, 3, 4, device=device, requires_grad=True)
    y, _ = triton(x, torch.randn(4, 3, device=device), activation="silu")
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r'^causal_conv1d: a second derivative must not .* use backend="eager"'):
        dx.sum().backward()


@pytest.mark.parametrize("case", ["T9", "packed"])
def test_triton_passes_opcheck(case, device):
    from openkda.frameworks import torch as fw

    inputs, _, _ = draw(case, device)
    call = [t.requires_grad_() for t in cast(inputs, torch.float32).values() if is_float(t)]
    fw._register(fused.CausalConv1d)
    arguments = (*call, inputs.get("cu_seqlens"), True, True)
    torch.library.opcheck(torch.ops.openkda.causal_conv1d.default, arguments)


def test_update_passes_opcheck(device):
    from openkda.frameworks import torch as fw

    x, state = torch.randn(2, 5, device=device), torch.randn(3, 5, 3, device=device)
    weight, indices = torch.randn(5, 4, device=device), torch.tensor([2, -1], device=device)
    fw._register(fused.CausalConv1dUpdate)
    operator = torch.ops.openkda.causal_conv1d_update_.default
    torch.library.opcheck(operator, (x, state, weight, None, indices, True))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch 2.11's own, where it imports inductor
def test_triton_compiles_once_for_any_number_of_tokens(device):
    weight = torch.randn(4, 3, device=device)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def fn(x: Tensor) -> Tensor:
        return triton(x, weight, activation="silu")[0].sin()

    compiled = torch.compile(fn, fullgraph=True, backend=counter, dynamic=True)
    counts = []
    for T in (5, 9, 12):
        x = torch.randn(1, T, 4, device=device, requires_grad=True)
        want = fn(x)
        got = compiled(x)
        torch.testing.assert_close(got, want)
        (dx, dwant) = (torch.autograd.grad(y.sum(), x)[0] for y in (got, want))
        torch.testing.assert_close(dx, dwant)
        counts.append(counter.frame_count)
    assert counts[-1] == counts[0]


@pytest.mark.gpu
def test_a_recorded_graph_follows_offsets_that_are_edited_in_place(device):
    x, weight = torch.randn(1, 64, 256, device=device), torch.randn(256, 4, device=device)
    cu = torch.tensor([0, 10, 64], device=device)
    triton(x, weight, cu_seqlens=cu)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, _ = triton(x, weight, cu_seqlens=cu)
    cu[1] = 33
    graph.replay()
    assert torch.equal(y, triton(x, weight, cu_seqlens=cu)[0])
