"""Decoding on Paddle tensors: the kernel gives the bits of torch, and batch-invariant decoding those of one call."""

import paddle
import pytest
import torch

import openkda
from openkda import testing
from openkda.testing import interpreter
from openkda.testing.paddle import to_paddle, to_torch

if interpreter.is_on():
    interpreter.install()

FUSED = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
CASES = {
    "dense": {"B": 2, "T": 1, "gate": "softplus", **FUSED},
    "packed": {"T": 6, "gate": "bounded", "cu_seqlens": [0, 2, 2, 5], "H": 1, "HV": 2, **FUSED},
    "v_first": {"B": 2, "T": 2, "gate": "given", "K": 12, "V": 20, "state_v_first": True},
}


def call(inputs, **options):
    args = [to_paddle(x) for x in inputs.args]
    kwargs = {name: to_paddle(value) for name, value in (inputs.kwargs | options).items()}
    return openkda.recurrent_kda(*args, **kwargs)


@pytest.fixture
def interpreted():
    if not interpreter.is_on():
        pytest.skip("launches kernels on a CPU: needs TRITON_INTERPRET=1")


@pytest.mark.interpreter
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("case", CASES)
def test_recurrent_kernel_gives_the_bits_of_torch(case):
    inputs = testing.make_inputs(dtype="float32", **CASES[case])
    o, final = call(inputs, backend="triton")
    want = openkda.recurrent_kda(*inputs.args, **inputs.kwargs, backend="triton")
    assert torch.equal(to_torch(o), want[0])
    assert torch.equal(to_torch(final), want[1])


@pytest.mark.interpreter
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recurrent_kernel_updates_a_pool_in_place(dtype):
    inputs = testing.make_inputs(B=3, T=1, dtype="float32")
    pool = torch.full((5, 2, 16, 16), 7.0, dtype=getattr(torch, dtype))
    pool[[4, 1]] = inputs.initial_state[[0, 2]].to(pool.dtype)
    mine = to_paddle(pool.clone())
    slots = torch.tensor([4, -1, 1])
    o, none = call(inputs, initial_state=mine, state_indices=slots, backend="triton")
    want, _ = openkda.recurrent_kda(
        *inputs.args, **inputs.kwargs | {"initial_state": pool}, state_indices=slots, backend="triton"
    )
    assert none is None
    assert torch.equal(to_torch(o), want)
    assert torch.equal(to_torch(mine), pool)
    assert not to_torch(o)[1].any()


@pytest.mark.parametrize("case", CASES)
def test_eager_recurrence_gives_what_torch_gives(case):
    inputs = testing.make_inputs(dtype="float32", **CASES[case])
    o, final = call(inputs, backend="eager")
    want = openkda.recurrent_kda(*inputs.args, **inputs.kwargs, backend="eager")
    assert testing.relative_rms(to_torch(o), want[0].double()) < testing.FP32_LIMIT
    assert testing.relative_rms(to_torch(final), want[1].double()) < testing.FP32_LIMIT


def test_batch_invariant_decoding_gives_the_bits_of_one_call():
    inputs = testing.make_inputs(B=2, T=70, H=1, HV=2, K=12, V=20, dtype="float32", **FUSED)
    args = [to_paddle(x) for x in inputs.args]
    kwargs = {name: to_paddle(value) for name, value in inputs.kwargs.items()}
    want, _ = openkda.chunk_kda(*args, **kwargs, batch_invariant=True)
    state, outputs = kwargs["initial_state"], []
    for start, end in ((0, 3), (3, 61), *((t, t + 1) for t in range(61, 68)), (68, 70)):
        pieces = [x[:, start:end] for x in args]
        o, state = openkda.recurrent_kda(*pieces, **kwargs | {"initial_state": state}, batch_invariant=True)
        outputs.append(o)
    assert bool((paddle.concat(outputs, 1) == want).all())
    alone, _ = openkda.chunk_kda(
        *(x[1:] for x in args), **kwargs | {"initial_state": kwargs["initial_state"][1:]}, batch_invariant=True
    )
    assert bool((alone[0] == want[1]).all())
