"""The other operators on Paddle tensors, against torch on the same numbers: values and every gradient."""

import paddle
import pytest
import torch

import openkda
from openkda import testing
from openkda.testing.paddle import to_paddle, to_torch

FP32 = 2e-6
BF16 = 2e-3  # both sides compute in fp32 and round once: now and then to the other neighbour


def both(fn, tensors, others=None, dtype=torch.float32):
    """Outputs and gradients of fn on torch and on Paddle: two dictionaries of torch tensors."""
    results = []
    for convert in (lambda x: x.detach().clone(), to_paddle):
        leaves = {name: convert(x) for name, x in tensors.items()}
        for x in leaves.values():
            if isinstance(x, torch.Tensor):
                x.requires_grad_()
            else:
                x.stop_gradient = False
        fixed = {n: convert(x) if isinstance(x, torch.Tensor) else x for n, x in (others or {}).items()}
        out = fn(**leaves, **fixed)
        outs = [x for x in (out if isinstance(out, tuple) else (out,)) if x is not None]
        generator = torch.Generator().manual_seed(1)
        grads = [torch.randn(tuple(x.shape), generator=generator, dtype=torch.float64) for x in outs]
        if isinstance(outs[0], torch.Tensor):
            pairs = [g.to(x.dtype) for g, x in zip(grads, outs, strict=True)]
            got = torch.autograd.grad(outs, list(leaves.values()), pairs)
        else:
            pairs = [to_paddle(g).astype(x.dtype) for g, x in zip(grads, outs, strict=True)]
            got = [to_torch(x) for x in paddle.grad(outs, list(leaves.values()), pairs)]
            outs = [to_torch(x) for x in outs]
        result = {f"out{i}": x.detach() for i, x in enumerate(outs)}
        results.append(result | {f"d{name}": g for name, g in zip(leaves, got, strict=True)})
    want, got = results
    assert {n: x.dtype for n, x in want.items()} == {n: x.dtype for n, x in got.items()}
    testing.assert_close(got, want, BF16 if dtype == torch.bfloat16 else FP32)


def randn(*size, dtype=torch.float32):
    return torch.randn(*size).to(dtype)


dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@dtypes
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_kda_gate(dtype, lower_bound):
    tensors = {"raw": 3 * randn(2, 7, 3, 8, dtype=dtype), "A_log": randn(3), "dt_bias": randn(24)}
    both(openkda.kda_gate, tensors, {"lower_bound": lower_bound}, dtype)


def test_kda_gate_far_out():
    raw = torch.tensor([-200.0, -30.0, 0.0, 30.0, 200.0]).reshape(1, 1, 1, 5)
    both(openkda.kda_gate, {"raw": raw, "A_log": torch.tensor([1.0])})
    both(openkda.kda_gate, {"raw": raw, "A_log": torch.tensor([1.0])}, {"lower_bound": -1000.0})


@pytest.mark.parametrize("cu_seqlens", [None, [0, 3, 3, 70, 75]])
def test_kda_gate_cumsum(cu_seqlens):
    offsets = None if cu_seqlens is None else torch.tensor(cu_seqlens)
    tensors = {"raw": randn(1, 80, 2, 4), "A_log": randn(2), "dt_bias": randn(2, 4)}
    both(openkda.kda_gate_cumsum, tensors, {"cu_seqlens": offsets})


@dtypes
@pytest.mark.parametrize("backend", ["eager", "reference"])
def test_l2norm(dtype, backend):
    both(openkda.l2norm, {"x": randn(2, 5, 3, 16, dtype=dtype)}, {"backend": backend}, dtype)


@dtypes
@pytest.mark.parametrize("activation", ["sigmoid", "silu"])
@pytest.mark.parametrize("backend", ["eager", "reference"])
def test_rms_norm_gated(dtype, activation, backend):
    tensors = {"x": randn(2, 5, 16, dtype=dtype), "gate": randn(2, 5, 16, dtype=dtype), "weight": randn(16)}
    both(openkda.rms_norm_gated, tensors, {"activation": activation, "backend": backend}, dtype)


def test_norms_have_second_derivatives():
    x = paddle.randn([3, 8]).astype("float64")
    x.stop_gradient = False
    (first,) = paddle.grad((openkda.l2norm(x) ** 3).sum(), [x], create_graph=True)
    (second,) = paddle.grad((first**2).sum(), [x])
    y = to_torch(x).clone().requires_grad_()
    (want,) = torch.autograd.grad((openkda.l2norm(y) ** 3).sum(), y, create_graph=True)
    (want,) = torch.autograd.grad((want**2).sum(), y)
    testing.assert_close({"second": to_torch(second)}, {"second": want}, testing.FP64_LIMIT)


# The reference adds up a 16-bit weight's gradient token by token, in 16 bits: there is nothing to compare.
@pytest.mark.parametrize(
    "backend, dtype", [("eager", torch.float32), ("eager", torch.bfloat16), ("reference", torch.float32)]
)
@pytest.mark.parametrize("cu_seqlens", [None, [0, 1, 1, 6, 9]], ids=["dense", "packed"])
@pytest.mark.parametrize("state", [False, True], ids=["", "state"])
def test_causal_conv1d(dtype, backend, cu_seqlens, state):
    B, N = (2, 2) if cu_seqlens is None else (1, len(cu_seqlens) - 1)
    tensors = {"x": randn(B, 11, 6, dtype=dtype), "weight": randn(6, 4, dtype=dtype), "bias": randn(6)}
    others = {"activation": "silu", "output_final_state": state, "backend": backend}
    if state:
        tensors["initial_state"] = randn(N, 6, 3, dtype=dtype)
    if cu_seqlens is not None:
        others["cu_seqlens"] = torch.tensor(cu_seqlens, dtype=torch.int32)
    both(openkda.causal_conv1d, tensors, others, dtype)


def test_packing_helpers():
    mask = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]])
    for fn in (openkda.prepare_lens_from_mask, openkda.prepare_cu_seqlens_from_mask):
        got = fn(to_paddle(mask))
        assert to_torch(got).equal(fn(mask))
        assert fn(to_paddle(mask.bool())).dtype == paddle.int32
    offsets = torch.tensor([0, 3, 3, 130], dtype=torch.int32)
    got = openkda.prepare_chunk_indices(to_paddle(offsets), 64)
    assert to_torch(got).equal(openkda.prepare_chunk_indices(offsets, 64))


def test_tensor_cache_sees_edits_in_place():
    calls = []

    @openkda.tensor_cache
    def double(x):
        calls.append(1)
        return x * 2

    x = paddle.arange(4)
    assert double(x) is double(x)
    assert len(calls) == 1
    x.add_(paddle.ones_like(x))
    assert double(x).tolist() == [2, 4, 6, 8]
    x[0] = 7
    assert double(x).tolist() == [14, 4, 6, 8]
