"""The input makers: what they promise about numbers, dtypes and layouts."""

import math

import pytest
import torch

from openkda import kda_gate, testing


def log_decay(inputs: testing.KDAInputs) -> torch.Tensor:
    if not inputs.options.get("use_gate_in_kernel"):
        return inputs.g
    return kda_gate(inputs.g, inputs.A_log, inputs.dt_bias, lower_bound=inputs.options.get("lower_bound"))


def test_the_same_seed_gives_the_same_numbers_in_every_dtype():
    exact = testing.make_inputs(seed=3)
    assert torch.equal(exact.q, testing.make_inputs(seed=3).q)
    assert not torch.equal(exact.q, testing.make_inputs(seed=4).q)
    assert torch.equal(exact.q.bfloat16(), testing.make_inputs(seed=3, dtype="bfloat16").q)
    assert torch.equal(exact.q.float(), testing.make_inputs(seed=3, dtype=torch.float32).q)


@pytest.mark.parametrize("gate", sorted(testing.GATES))
def test_every_gate_is_a_log_decay(gate):
    g = log_decay(testing.make_inputs(T=100, gate=gate))
    assert g.isfinite().all()
    assert (g <= 0).all()


@pytest.mark.parametrize(
    "gate, weakest, strongest",
    [
        ("none", 0.0, 0.0),
        ("slow", -1e-4, -1e-4),
        ("strong", -1000.0, -1000.0),
        ("beside", -0.01, -1000.0),
        ("log_uniform", -2e-4, -500.0),
        ("softplus_strong", -0.02, -5000.0),
        ("bounded_strong", -1.0, -990.0),
    ],
)
def test_gates_reach_the_strengths_they_are_named_for(gate, weakest, strongest):
    g = log_decay(testing.make_inputs(T=200, gate=gate))
    assert g.max() >= weakest
    assert g.min() <= strongest


def test_the_layer_gate_starts_as_a_new_layer_does():
    inputs = testing.make_inputs(T=1, H=64, K=64, gate="layer_init")
    rate, dt = inputs.A_log.exp(), torch.nn.functional.softplus(inputs.dt_bias)
    assert 1 <= rate.min() < 2
    assert 15 < rate.max() <= 16
    assert dt.min() == pytest.approx(1e-3, rel=0.05)
    assert dt.max() == pytest.approx(0.1, rel=0.05)
    assert dt.log().mean() == pytest.approx(math.log(1e-2), rel=0.05)


@pytest.mark.parametrize("alike, cosine", [(0.0, 0.0), (1.0, 0.5), (3.0, 0.9), (10.0, 0.99), (1e6, 1.0)])
def test_keys_are_as_alike_as_asked(alike, cosine):
    k = testing.make_inputs(T=100, H=1, K=128, alike=alike).k[0, :, 0]
    assert torch.allclose(k.norm(dim=-1), torch.ones(100, dtype=k.dtype))
    pairs = (k @ k.T)[torch.triu(torch.ones(100, 100), 1).bool()]
    assert pairs.mean() == pytest.approx(cosine, abs=0.06)


def test_16_bit_inputs_round_tokens_and_nothing_else():
    raw, given = (testing.make_inputs(gate=gate, dtype="bfloat16") for gate in ("softplus", "given"))
    assert {raw.q.dtype, raw.v.dtype, raw.beta.dtype, raw.g.dtype} == {torch.bfloat16}
    assert {raw.A_log.dtype, raw.dt_bias.dtype, raw.initial_state.dtype, given.g.dtype} == {torch.float32}
    assert torch.equal(raw.to(torch.float64).q, raw.q.double())


def test_the_tail_is_nan_and_only_the_tail():
    inputs = testing.make_inputs(T=10, cu_seqlens=[0, 3, 7])
    assert inputs.num_tokens == 7
    for x in (*inputs.args, inputs.grad_o):
        assert x[:, 7:].isnan().all()
        assert x[:, :7].isfinite().all()
    assert testing.make_inputs(T=10, cu_seqlens=[0, 3, 7], nan_tail=False).q.isfinite().all()


def test_strided_inputs_hold_the_same_numbers():
    plain, strided = testing.make_inputs(B=2, T=10), testing.make_inputs(B=2, T=10, layout="strided")
    for name in ("q", "k", "v", "g", "beta", "grad_o"):
        assert torch.equal(getattr(plain, name), getattr(strided, name))
        assert not getattr(strided, name).is_contiguous()


def test_packed_offsets_by_hand():
    assert testing.packed_offsets([0, 3, 0, 4]).tolist() == [0, 0, 3, 3, 7]
    assert testing.packed_offsets([2]).dtype == torch.int32


@pytest.mark.parametrize(
    "change, message",
    [
        ({"gate": "hard"}, "make_inputs: gate must be one of softplus, .*, got 'hard'"),
        ({"layout": "packed"}, "make_inputs: layout must be .*, got 'packed'"),
    ],
)
def test_make_inputs_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        testing.make_inputs(**change)


def test_run_names_every_gradient():
    result = testing.run(testing.oracles.reference.chunk_kda, testing.make_inputs(T=3))
    assert tuple(result) == testing.TENSORS


def test_the_oracle_is_fp64_whatever_the_inputs():
    result = testing.oracle(testing.make_inputs(T=3, dtype="bfloat16"))
    assert {x.dtype for x in result.values()} == {torch.float64}


def test_the_oracle_goes_on_where_the_recurrence_is_too_slow():
    inputs = testing.make_inputs(T=testing.oracles.RECURRENCE_LIMIT + 1, H=1, K=2, V=2)
    assert testing.oracle(inputs)["o"].isfinite().all()
