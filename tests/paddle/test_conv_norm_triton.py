"""The convolution's and the norms' kernels on Paddle tensors: in Triton's interpreter the same bits as on torch's."""

import paddle
import pytest
import torch

import openkda
from openkda.conv import causal_conv1d_update
from openkda.testing import interpreter
from openkda.testing.paddle import to_paddle, to_torch

if interpreter.is_on():
    interpreter.install()

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("interpreted")]


@pytest.fixture
def interpreted():
    if not interpreter.is_on():
        pytest.skip("launches kernels on a CPU: needs TRITON_INTERPRET=1")


def on_torch(fn, leaves, cotangents, **options):
    leaves = {n: t.clone().requires_grad_() for n, t in leaves.items()}
    results = fn(**leaves, **options)
    results = results if isinstance(results, tuple) else (results,)
    grads = torch.autograd.grad(results, list(leaves.values()), cotangents)
    return [*(r.detach() for r in results), *grads]


def on_paddle(fn, leaves, cotangents, **options):
    leaves = {n: to_paddle(t) for n, t in leaves.items()}
    for leaf in leaves.values():
        leaf.stop_gradient = False
    results = fn(**leaves, **{n: to_paddle(v) for n, v in options.items()})
    results = results if isinstance(results, tuple) else (results,)
    grads = paddle.grad(list(results), list(leaves.values()), [to_paddle(t) for t in cotangents])
    return [to_torch(t) for t in (*results, *grads)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("offsets", [None, [0, 2, 2, 9]], ids=["dense", "packed"])
def test_convolution_gives_the_bits_of_torch(offsets, dtype):
    N = 1 if offsets is None else 3
    sizes = {"x": (1, 12, 8), "weight": (8, 4), "bias": (8,), "initial_state": (N, 8, 3)}
    leaves = {n: torch.randn(size).to(dtype) for n, size in sizes.items()}
    cotangents = [torch.randn(1, 12, 8).to(dtype), torch.randn(N, 8, 3).to(dtype)]
    options = {"activation": "silu", "output_final_state": True, "backend": "triton"}
    if offsets is not None:
        options["cu_seqlens"] = torch.tensor(offsets)
    got, want = (run(openkda.causal_conv1d, leaves, cotangents, **options) for run in (on_paddle, on_torch))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_convolution_without_states_gives_the_bits_of_torch():
    leaves = {"x": torch.randn(2, 5, 8), "weight": torch.randn(8, 3)}
    cotangents = [torch.randn(2, 5, 8)]

    def conv(**call):
        return openkda.causal_conv1d(**call, backend="triton")[0]

    got, want = (run(conv, leaves, cotangents) for run in (on_paddle, on_torch))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_gated_norm_gives_the_bits_of_torch():
    leaves = {"x": torch.randn(3, 5, 16), "gate": torch.randn(3, 5, 16), "weight": torch.randn(16)}
    options = {"activation": "sigmoid", "backend": "triton"}
    got, want = (run(openkda.rms_norm_gated, leaves, [leaves["x"]], **options) for run in (on_paddle, on_torch))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_l2norm_gives_the_bits_of_torch():
    leaves = {"x": torch.randn(3, 5, 16)}
    got, want = (run(openkda.l2norm, leaves, [leaves["x"] * 2], backend="triton") for run in (on_paddle, on_torch))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("backend", ["triton", "eager"])
def test_update_edits_a_pool_of_paddle(backend):
    x, weight, pool, indices = torch.randn(3, 8), torch.randn(8, 4), torch.randn(4, 8, 3), torch.tensor([2, -1, 0])
    mine = to_paddle(pool)
    got = causal_conv1d_update(
        to_paddle(x), mine, to_paddle(weight), state_indices=to_paddle(indices), activation="silu", backend=backend
    )
    want = causal_conv1d_update(x, pool, weight, state_indices=indices, activation="silu", backend=backend)
    torch.testing.assert_close(to_torch(got), want)
    assert torch.equal(to_torch(mine), pool)
