"""`chunk_kda` and `recurrent_kda` on Paddle tensors.

Judged against the token-by-token recurrence, on Paddle tensors too and in fp64, on the same rounded inputs; and against
torch, number by number, in one process.
"""

import gc
import os

import paddle
import pytest
import torch

import openkda
from openkda import testing
from openkda.kda import eager, reference
from openkda.testing import paddle as on_paddle
from openkda.testing.paddle import to_paddle, to_torch

#: Relative RMS to the fp64 recurrence: one for fp32, one a tensor for bf16.
FP32 = 5e-6
BF16 = {"o": 0.006, "final_state": 0.008, "dq": 0.008, "dk": 0.008, "dv": 0.008}
BF16_OTHERS = 0.02  # dg, dbeta, and what is summed up from them
TORCH = 2e-6

CASES = {
    "dense": {"gate": "given", "B": 2, "T": 65},
    "one_token": {"gate": "given", "T": 1},
    "no_initial_state": {"gate": "given", "initial_state": False},
    "state_v_first": {"gate": "given", "state_v_first": True, "V": 24},
    "scale": {"gate": "given", "scale": 0.3},
    "gva": {"gate": "softplus", "H": 2, "HV": 6, "V": 24, "T": 70},
    "softplus": {"gate": "softplus", "B": 2},
    "bounded": {"gate": "bounded", "T": 130},
    "layer": {
        "gate": "layer_init",
        "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": True,
    },
    "beta_sigmoid": {"gate": "given", "use_beta_sigmoid_in_kernel": True},
    "strong_beside_weak": {"gate": "beside", "T": 100},
    "alike_keys": {"gate": "slow", "alike": 10.0, "beta": 1.0},
    "packed": {"gate": "softplus", "T": 150, "cu_seqlens": [0, 5, 5, 70, 140]},
    "packed_bounded": {"gate": "bounded", "T": 67, "cu_seqlens": [0, 66, 67]},
    "strided": {"gate": "softplus", "layout": "strided"},
}


def oracle(inputs):
    return on_paddle.run(reference.chunk_kda, inputs.to(torch.float64))


@pytest.mark.parametrize("case", CASES)
def test_fp32_agrees_with_the_recurrence(case):
    inputs = testing.make_inputs(dtype="float32", **CASES[case])
    testing.assert_close(on_paddle.run(openkda.chunk_kda, inputs), oracle(inputs), FP32)


@pytest.mark.parametrize("case", CASES)
def test_bf16_agrees_with_the_recurrence(case):
    inputs = testing.make_inputs(dtype="bfloat16", **CASES[case])
    got, want = on_paddle.run(openkda.chunk_kda, inputs), oracle(inputs)
    errors = {name: testing.relative_rms(got[name], want[name]) for name in want}
    over = {name: error for name, error in errors.items() if not error <= BF16.get(name, BF16_OTHERS)}
    assert not over, f"{over} of {errors}"


@pytest.mark.parametrize("case", CASES)
def test_fp64_agrees_with_the_recurrence(case):
    inputs = testing.make_inputs(dtype="float64", **CASES[case])
    testing.assert_close(on_paddle.run(openkda.chunk_kda, inputs), oracle(inputs), testing.FP64_LIMIT)


@pytest.mark.parametrize("backend", ["eager", "reference"])
@pytest.mark.parametrize("case", CASES)
def test_paddle_and_torch_agree(case, backend):
    inputs = testing.make_inputs(dtype="float32", **CASES[case])
    got = on_paddle.run(openkda.chunk_kda, inputs, backend=backend)
    testing.assert_close(got, testing.run(openkda.chunk_kda, inputs, backend=backend), TORCH)


def test_rounded_operands_agree_with_torch():
    # The measure of the 16-bit error budget is the same on both sides.
    inputs = testing.make_inputs(dtype="bfloat16", gate="softplus", T=70)
    exact = testing.oracle(inputs)
    on_torch, got = testing.rounded(inputs), on_paddle.run(eager.chunk_kda, inputs, operand_dtype="bfloat16")
    for name in exact:
        ratio = testing.relative_rms(got[name], exact[name]) / testing.relative_rms(on_torch[name], exact[name])
        assert 0.8 < ratio < 1.25, name


@pytest.mark.parametrize("save_intermediates", [False, True], ids=["recompute", "save"])
def test_save_and_recompute_give_the_same_bits(save_intermediates):
    inputs = testing.make_inputs(dtype="float32", gate="softplus")
    got = on_paddle.run(openkda.chunk_kda, inputs, save_intermediates=save_intermediates)
    want = on_paddle.run(openkda.chunk_kda, inputs)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_same_inputs_same_bits():
    inputs = testing.make_inputs(dtype="bfloat16", gate="bounded", T=130)
    first, second = (on_paddle.run(openkda.chunk_kda, inputs) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_future_tokens_change_nothing():
    inputs = testing.make_inputs(dtype="float32", gate="softplus", T=130)
    tensors = [to_paddle(x) for x in inputs.args]
    options = {"A_log": to_paddle(inputs.A_log), "dt_bias": to_paddle(inputs.dt_bias), "use_gate_in_kernel": True}
    o, _ = openkda.chunk_kda(*tensors, **options)
    later = [paddle.concat([x[:, :77], x[:, 77:] * 3 - 1], 1) for x in tensors]
    changed, _ = openkda.chunk_kda(*later, **options)
    assert bool((o[:, :77] == changed[:, :77]).all())
    assert not bool((o[:, 77:] == changed[:, 77:]).all())


def test_packed_tail_is_zero_and_an_empty_slot_passes_its_state():
    inputs = testing.make_inputs(dtype="float32", gate="softplus", T=80, cu_seqlens=[0, 30, 30, 70])
    got = on_paddle.run(openkda.chunk_kda, inputs)
    assert torch.equal(got["final_state"][1], inputs.initial_state[1])
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert got[name][:, 70:].count_nonzero() == 0, name


def test_no_tokens():
    q, v, g = (paddle.zeros([2, 0, 2, D]) for D in (8, 4, 8))
    state = paddle.randn([2, 2, 8, 4])
    o, final = openkda.chunk_kda(q, q, v, g, paddle.zeros([2, 0, 2]), initial_state=state, output_final_state=True)
    assert tuple(o.shape) == (2, 0, 2, 4)
    assert bool((final == state).all())


# ---- what stop_gradient asks for
@pytest.mark.parametrize("wanted", ["q", "v", "g", "beta", "A_log", "initial_state"])
def test_only_what_is_wanted_gets_a_gradient(wanted):
    inputs = testing.make_inputs(dtype="float32", gate="softplus")
    tensors = {name: to_paddle(x) for name, x in inputs.tensors.items()}
    tensors[wanted].stop_gradient = False
    kwargs = {name: to_paddle(value) for name, value in inputs.kwargs.items()} | tensors
    o, final = openkda.chunk_kda(**kwargs)
    (o.sum() + final.sum()).backward()
    assert {name for name, x in tensors.items() if x.grad is not None} == {wanted}
    full = on_paddle.run(openkda.chunk_kda, inputs.__class__(**{
        **vars(inputs),
        "grad_o": torch.ones_like(inputs.grad_o),
        "grad_final_state": torch.ones_like(inputs.grad_final_state),
    }))  # fmt: skip
    assert testing.relative_rms(to_torch(tensors[wanted].grad), full[f"d{wanted}"]) < 1e-6


def test_without_gradients_nothing_is_recorded():
    inputs = testing.make_inputs(dtype="float32", gate="softplus")
    tensors = {name: to_paddle(x) for name, x in inputs.tensors.items()}
    kwargs = {name: to_paddle(value) for name, value in inputs.kwargs.items()} | tensors
    o, final = openkda.chunk_kda(**kwargs)
    assert o.stop_gradient
    assert final.stop_gradient
    for x in tensors.values():
        x.stop_gradient = False
    with paddle.no_grad():
        o, _ = openkda.chunk_kda(**kwargs)
    assert o.stop_gradient


def test_a_forward_whose_backward_never_runs_is_freed():
    def resident() -> float:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    def forward() -> None:
        q = paddle.randn([1, 1024, 4, 32])
        q.stop_gradient = False
        openkda.chunk_kda(q, q, q, -paddle.abs(q), q[..., 0].sigmoid())

    for _ in range(3):
        forward()
    gc.collect()
    before = resident()
    for _ in range(10):
        forward()
    gc.collect()
    assert resident() - before < 10  # MiB; one call keeps about 10


def test_a_second_derivative_is_refused():
    q = paddle.randn([1, 8, 1, 8])
    q.stop_gradient = False
    o, _ = openkda.chunk_kda(q, q, q, -paddle.abs(q), q[..., 0].sigmoid())
    message = r"second derivative must not be asked for on Paddle.*only backend=.reference. has one"
    with pytest.raises(OSError, match=message):  # as Paddle passes it on
        paddle.grad(o.sum(), [q], create_graph=True)


# ---- recurrent_kda
@pytest.mark.parametrize("case", ["dense", "gva", "layer", "packed", "state_v_first", "bounded"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recurrent_agrees_with_torch(case, dtype):
    inputs = testing.make_inputs(dtype=dtype, **CASES[case])
    args, kwargs = [to_paddle(x) for x in inputs.args], {n: to_paddle(x) for n, x in inputs.kwargs.items()}
    got = openkda.recurrent_kda(*args, **kwargs)
    want = openkda.recurrent_kda(*inputs.args, **inputs.kwargs)
    limit = TORCH if dtype == "float32" else 1e-4  # bf16: o is rounded, and may be rounded the other way
    testing.assert_close(
        {name: to_torch(x) for name, x in zip(("o", "final_state"), got, strict=True)},
        dict(zip(("o", "final_state"), want, strict=True)),
        limit,
    )


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16])
def test_recurrent_with_a_pool_of_states(pool_dtype):
    inputs = testing.make_inputs(dtype="bfloat16", gate="given", B=3, T=2, initial_state=False)
    pool, slots = torch.randn(6, 2, 16, 16).to(pool_dtype), torch.tensor([4, -1, 1])
    on_torch, mine = pool.clone(), to_paddle(pool)
    want, _ = openkda.recurrent_kda(*inputs.args, initial_state=on_torch, state_indices=slots)
    args = [to_paddle(x) for x in inputs.args]
    got, none = openkda.recurrent_kda(*args, initial_state=mine, state_indices=to_paddle(slots))
    assert none is None
    testing.assert_close({"o": to_torch(got), "pool": to_torch(mine)}, {"o": want, "pool": on_torch}, 1e-4)
    untouched = [0, 2, 3, 5]
    assert torch.equal(to_torch(mine)[untouched], pool[untouched])
    assert not torch.equal(to_torch(mine)[[1, 4]], pool[[1, 4]])
    assert to_torch(got)[1].count_nonzero() == 0


def test_recurrent_refuses_gradients():
    q = paddle.randn([1, 2, 1, 8])
    q.stop_gradient = False
    with pytest.raises(ValueError, match=r"^recurrent_kda: q must not need a gradient"):
        openkda.recurrent_kda(q, q, q, -paddle.abs(q), q[..., 0])


# ---- wrong use
def test_torch_and_paddle_tensors_in_one_call_are_refused():
    q, other = paddle.zeros([1, 4, 1, 8]), torch.zeros(1, 4, 1, 8)
    with pytest.raises(TypeError, match=r"^chunk_kda: k must be a paddle tensor like q, got a torch tensor$"):
        openkda.chunk_kda(q, other, q, q, q[..., 0])
    with pytest.raises(TypeError, match=r"^chunk_kda: beta must be a torch tensor like q, got a paddle tensor$"):
        openkda.chunk_kda(other, other, other, other, q[..., 0])


def test_triton_on_a_cpu_is_refused():
    q = paddle.zeros([1, 4, 1, 8])
    with pytest.raises(openkda.BackendUnavailable, match=r'^chunk_kda: backend="triton" needs a GPU tensor, got .*cpu'):
        openkda.chunk_kda(q, q, q, q, q[..., 0], backend="triton")


def test_wrong_shapes_are_refused():
    q = paddle.zeros([1, 4, 1, 8])
    with pytest.raises(ValueError, match=r"^chunk_kda: beta must have shape \[B, T, HV\] = \[1, 4, 1\], got \[1, 4\]"):
        openkda.chunk_kda(q, q, q, q, q[:, :, 0, 0])
    with pytest.raises(TypeError, match=r"^chunk_kda: q must have a floating dtype, got int64"):
        openkda.chunk_kda(*[q.astype("int64")] * 4, q[..., 0])


@pytest.mark.parametrize("offsets", [[1, 4], [0, 3, 2, 4], [0, 5]])
def test_values_of_offsets_are_checked_on_demand(offsets, monkeypatch):
    monkeypatch.setenv("OPENKDA_CHECK", "1")
    q = paddle.zeros([1, 4, 1, 8])
    with pytest.raises(ValueError, match=r"^chunk_kda: cu_seqlens must"):
        openkda.chunk_kda(q, q, q, q, q[..., 0], cu_seqlens=paddle.to_tensor(offsets, dtype="int32"))


def test_an_old_paddle_is_refused():
    from openkda.frameworks.paddle import _check_version

    with pytest.raises(ImportError, match=r"^openkda: paddle must be version 3\.3 or newer, got 2\.6\.2; install "):
        _check_version("2.6.2")
    for version in ("3.3.0", "3.3.1", "3.10.0", "4.0.0rc1", "0.0.0"):
        _check_version(version)


def test_explain_names_the_library():
    lines = openkda.explain(paddle.zeros([1]))
    assert lines.startswith("paddle tensor, float32, on cpu")
    assert "chunk_kda            auto -> eager" in lines
