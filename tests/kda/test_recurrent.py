"""recurrent_kda, token by token with a state that is carried: what decoding does must be what training did."""

from __future__ import annotations

import math

import pytest
import torch

from openkda import chunk_kda, recurrent_kda, testing


def results(fn, inputs: testing.KDAInputs, **options: object) -> dict[str, torch.Tensor]:
    o, final = fn(*inputs.args, **inputs.kwargs, **options)
    return {"o": o, "final_state": final}


def wanted(inputs: testing.KDAInputs) -> dict[str, torch.Tensor]:
    exact = testing.oracle(inputs)
    return {name: exact[name] for name in ("o", "final_state")}


def pool_of(states: torch.Tensor, rows: list[int], size: int) -> torch.Tensor:
    """A pool [size, HV, K, V] of sevens with states in these rows."""
    pool = torch.full((size, *states.shape[1:]), 7.0, dtype=states.dtype)
    pool[rows] = states
    return pool


# ---- the same function as chunk_kda
@pytest.mark.parametrize("gate", ["softplus", "bounded", "none", "strong", "beside", "log_uniform"])
@pytest.mark.parametrize("T", [1, 17, 130])
def test_recurrent_kda_meets_the_fp32_limit(T, gate):
    inputs = testing.make_inputs(T=T, H=1, HV=2, K=12, V=20, gate=gate, dtype="float32")
    testing.assert_close(results(recurrent_kda, inputs), wanted(inputs), testing.FP32_LIMIT)


@pytest.mark.parametrize(
    "offsets, T", [([0, 0, 64, 64, 65], 65), ([0, 15, 100], 120), ([0, 1, 2, 3], 3)], ids=["empty", "tail", "ones"]
)
def test_recurrent_kda_equals_chunk_kda_on_packed_sequences(offsets, T):
    inputs = testing.make_inputs(T=T, H=1, HV=2, K=12, V=20, cu_seqlens=offsets, dtype="float32")
    testing.assert_close(results(recurrent_kda, inputs), wanted(inputs), testing.FP32_LIMIT)
    testing.assert_close(results(recurrent_kda, inputs), results(chunk_kda, inputs), 2 * testing.FP32_LIMIT)


@pytest.mark.parametrize(
    "options",
    [
        {"use_qk_l2norm_in_kernel": True},
        {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True},
        {"state_v_first": True},
        {"scale": 1},
    ],
    ids=lambda options: "+".join(options),
)
def test_recurrent_kda_honours_every_option(options):
    inputs = testing.make_inputs(B=2, T=20, H=1, HV=2, K=12, V=20, gate="bounded", dtype="float32", **options)
    testing.assert_close(results(recurrent_kda, inputs), wanted(inputs), testing.FP32_LIMIT)


def test_recurrent_kda_computes_16_bit_inputs_in_fp32():
    inputs = testing.make_inputs(T=40, dtype="bfloat16")
    wide = inputs.to(torch.float32)
    o, final = recurrent_kda(*inputs.args, **inputs.kwargs)
    want, state = recurrent_kda(*wide.args, **wide.kwargs)
    assert torch.equal(o, want.bfloat16())
    assert torch.equal(final, state)
    assert final.dtype == torch.float32


@pytest.mark.parametrize("beta", [0.0, 0.01])
@pytest.mark.parametrize("nats", [-1e-4, -1e-3, -1e-2])
def test_recurrent_kda_does_not_drift_over_4096_steps_of_slow_decay(nats, beta):
    # A state times exp(-1e-4), rounded to fp32, would be off by half a unit in the last place, 2**-25, the same way at
    # every step: up to 1.2e-4 in the end (the reference: 8.8e-5). What is left here are roundings of either sign.
    inputs = testing.make_inputs(T=4096, H=1, K=4, V=4, gate="slow", dtype="float32")
    inputs.g.fill_(nats)
    inputs.beta.fill_(beta)
    got, exact = results(recurrent_kda, inputs), wanted(inputs)
    assert testing.relative_rms(got["final_state"], exact["final_state"]) < 4e-6


@pytest.mark.parametrize("nats", [-0.49, -0.51, -1.0, -20.0, -80.0])
def test_recurrent_kda_decays_to_the_last_digit(nats):
    # Both sides of the switch, and where exp(g) - 1 is -1: what is left of a state must still be right.
    state, zeros = torch.randn(1, 1, 8, 8), torch.zeros(1, 1, 1, 8)
    _, got = recurrent_kda(
        *(zeros,) * 3, zeros + nats, zeros[..., 0], initial_state=state, output_final_state=True, backend="eager"
    )
    g = torch.tensor(nats).double().item()  # as fp32 holds it
    assert testing.relative_rms(got, state.double() * math.exp(g)) < 2e-7


def test_recurrent_kda_returns_no_state_unless_asked():
    inputs = testing.make_inputs(T=3, gate="given", dtype="float32", initial_state=False)
    o, final = recurrent_kda(*inputs.args)
    assert o.shape == (1, 3, 2, 16)
    assert final is None


def test_recurrent_kda_leaves_the_initial_state_alone():
    inputs = testing.make_inputs(T=3, dtype="float32")
    before = inputs.initial_state.clone()
    recurrent_kda(*inputs.args, **inputs.kwargs)
    assert torch.equal(inputs.initial_state, before)


# ---- prefill, then decode
@pytest.mark.parametrize("v_first", [False, True], ids=["K first", "V first"])
@pytest.mark.parametrize("split", [0, 1, 15, 16, 63, 64, 65, 69, 70])
def test_prefill_and_decode_equal_one_call_at_any_split(split, v_first):
    inputs = testing.make_inputs(T=70, H=1, HV=2, K=12, V=20, dtype="float32", state_v_first=v_first)
    o, state = chunk_kda(*(x[:, :split] for x in inputs.args), **inputs.kwargs)
    outputs = [o]
    for t in range(split, 70):
        o, state = recurrent_kda(*(x[:, t : t + 1] for x in inputs.args), **inputs.kwargs | {"initial_state": state})
        outputs.append(o)
    testing.assert_close({"o": torch.cat(outputs, 1), "final_state": state}, wanted(inputs), testing.FP32_LIMIT)


def test_decoding_token_by_token_is_one_recurrent_call_bitwise():
    inputs = testing.make_inputs(B=2, T=20, dtype="bfloat16")
    o, final = recurrent_kda(*inputs.args, **inputs.kwargs)
    state, outputs = inputs.initial_state, []
    for t in range(20):
        step, state = recurrent_kda(*(x[:, t : t + 1] for x in inputs.args), **inputs.kwargs | {"initial_state": state})
        outputs.append(step)
    assert torch.equal(torch.cat(outputs, 1), o)
    assert torch.equal(state, final)


# ---- a pool of states
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_recurrent_kda_updates_the_rows_of_a_pool_in_place(packed, index_dtype):
    # Three sequences in rows 4, 0 and 2 of six; the others keep their sevens.
    if packed:
        inputs = testing.make_inputs(T=9, K=12, V=20, dtype="float32", cu_seqlens=[0, 2, 3, 9])
    else:
        inputs = testing.make_inputs(B=3, T=2, K=12, V=20, dtype="float32")
    rows = [4, 0, 2]
    want = results(recurrent_kda, inputs)
    pool = pool_of(inputs.initial_state, rows, 6)
    kwargs = inputs.kwargs | {"initial_state": pool, "state_indices": torch.tensor(rows, dtype=index_dtype)}
    o, _ = recurrent_kda(*inputs.args, **kwargs)
    assert torch.equal(o, want["o"])
    assert torch.equal(pool, pool_of(want["final_state"], rows, 6))


@pytest.mark.parametrize("padding", [[0], [1], [2], [0, 1, 2]], ids=str)
def test_a_padded_slot_never_touches_live_states(padding):
    # Index -1 is Python's last row: nothing may be read from there or written to it, and the slot's output is 0.
    inputs = testing.make_inputs(B=3, T=2, dtype="float32")
    rows = [-1 if n in padding else row for n, row in enumerate([5, 0, 2])]
    live = [n for n in range(3) if n not in padding]
    want = results(recurrent_kda, inputs)
    pool = pool_of(inputs.initial_state[live], [rows[n] for n in live], 6)
    untouched = pool.clone()
    o, _ = recurrent_kda(*inputs.args, **inputs.kwargs | {"initial_state": pool, "state_indices": torch.tensor(rows)})
    untouched[[rows[n] for n in live]] = want["final_state"][live]
    assert torch.equal(pool, untouched)
    assert torch.equal(o[live], want["o"][live])
    assert not o[padding].any()


def test_junk_in_a_padded_slot_is_harmless():
    inputs = testing.make_inputs(B=2, T=1, dtype="float32")
    want = results(recurrent_kda, inputs)
    for x in inputs.args:
        x[1] = float("nan")
    pool = pool_of(inputs.initial_state[:1], [1], 2)
    o, _ = recurrent_kda(
        *inputs.args, **inputs.kwargs | {"initial_state": pool, "state_indices": torch.tensor([1, -1])}
    )
    assert torch.equal(o[:1], want["o"][:1])
    assert not o[1].any()
    assert torch.equal(pool, pool_of(want["final_state"][:1], [1], 2))


def test_an_empty_sequence_leaves_its_pool_row_alone():
    inputs = testing.make_inputs(T=3, dtype="float32", cu_seqlens=[0, 0, 3])
    pool = pool_of(inputs.initial_state, [3, 1], 4)
    before = pool.clone()
    recurrent_kda(*inputs.args, **inputs.kwargs | {"initial_state": pool, "state_indices": torch.tensor([3, 1])})
    assert torch.equal(pool[[0, 2, 3]], before[[0, 2, 3]])
    assert not torch.equal(pool[1], before[1])


def test_a_pool_may_be_kept_in_bf16():
    # Computed in fp32, rounded once when it is stored.
    inputs = testing.make_inputs(B=2, T=1, dtype="bfloat16")
    states = inputs.initial_state.bfloat16()
    o, final = recurrent_kda(*inputs.args, **inputs.kwargs | {"initial_state": states.float()})
    pool = pool_of(states, [2, 0], 3)
    same, _ = recurrent_kda(
        *inputs.args, **inputs.kwargs | {"initial_state": pool, "state_indices": torch.tensor([2, 0])}
    )
    assert torch.equal(same, o)
    assert torch.equal(pool, pool_of(final.bfloat16(), [2, 0], 3))


def test_a_pool_may_have_the_value_axis_first():
    inputs = testing.make_inputs(B=2, T=2, K=12, V=20, dtype="float32", state_v_first=True)
    want = results(recurrent_kda, inputs)
    pool = pool_of(inputs.initial_state, [1, 3], 4)
    recurrent_kda(*inputs.args, **inputs.kwargs | {"initial_state": pool, "state_indices": torch.tensor([1, 3])})
    assert torch.equal(pool, pool_of(want["final_state"], [1, 3], 4))


def test_a_strided_pool_is_updated_in_place():
    inputs = testing.make_inputs(B=2, T=1, K=12, V=20, dtype="float32")
    want = results(recurrent_kda, inputs)
    wide = torch.full((4, 2, 12, 40), 7.0)
    pool = wide[..., ::2]
    pool[[1, 3]] = inputs.initial_state
    recurrent_kda(*inputs.args, **inputs.kwargs | {"initial_state": pool, "state_indices": torch.tensor([1, 3])})
    assert torch.equal(pool[[1, 3]], want["final_state"])
    assert (wide[..., 1::2] == 7).all()


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"state_indices": torch.tensor([0])}, ValueError, r"state_indices must have shape \[N\] = \[2\], got \[1\]"),
        (
            {"state_indices": torch.tensor([[0, 1]])},
            ValueError,
            r"state_indices must have shape \[N\] = \[2\], got \[1, 2\]",
        ),
        (
            {"state_indices": torch.tensor([0.0, 1.0])},
            TypeError,
            "state_indices must have dtype int32 or int64, got float32",
        ),
        ({"state_indices": [0, 1]}, TypeError, "state_indices must be a tensor, got list"),
        (
            {"state_indices": torch.tensor([0, 1], device="meta")},
            ValueError,
            "state_indices must be on q's device cpu, got meta",
        ),
        ({"initial_state": None}, ValueError, "initial_state must be the pool of states with state_indices, got None"),
        (
            {"initial_state": torch.zeros(4, 2, 8, 16)},
            ValueError,
            r"initial_state must have shape .*, got \[4, 2, 8, 16\]",
        ),
        (
            {"initial_state": torch.zeros(4, 2, 16, 16, dtype=torch.float16)},
            TypeError,
            "initial_state must have dtype float32 or bfloat16, got float16",
        ),
    ],
    ids=["too few", "rank 2", "floats", "a list", "another device", "no pool", "pool of another K", "pool in fp16"],
)
def test_recurrent_kda_refuses_a_bad_pool(change, error, message):
    inputs = testing.make_inputs(B=2, T=1, dtype="float32", gate="given")
    arguments = {"initial_state": torch.randn(4, 2, 16, 16), "state_indices": torch.tensor([0, 1])} | change
    pool = arguments["initial_state"]
    before = None if pool is None else pool.clone()
    with pytest.raises(error, match=f"^recurrent_kda: {message}"):
        recurrent_kda(*inputs.args, **arguments)
    assert pool is None or torch.equal(pool, before)


@pytest.mark.parametrize(
    "indices, message",
    [
        ([0, 4], "state_indices must be below the pool's 4 slots, got 4"),
        ([2, 2], r"state_indices must name every slot at most once, got \[2, 2\]"),
    ],
    ids=["beyond the pool", "twice"],
)
def test_pool_rows_are_checked_on_request(indices, message, monkeypatch):
    monkeypatch.setenv("OPENKDA_CHECK", "1")
    inputs = testing.make_inputs(B=2, T=1, dtype="float32", gate="given")
    pool = torch.randn(4, 2, 16, 16)
    before = pool.clone()
    with pytest.raises(ValueError, match=f"^recurrent_kda: {message}"):
        recurrent_kda(*inputs.args, initial_state=pool, state_indices=torch.tensor(indices))
    assert torch.equal(pool, before)


def test_padding_may_come_more_than_once_when_checked(monkeypatch):
    monkeypatch.setenv("OPENKDA_CHECK", "1")
    inputs = testing.make_inputs(B=3, T=1, dtype="float32", gate="given")
    pool = torch.ones(1, 2, 16, 16)
    o, _ = recurrent_kda(*inputs.args, initial_state=pool, state_indices=torch.tensor([-1, -1, -1]))
    assert not o.any()
    assert (pool == 1).all()


def test_a_call_like_one_that_passed_is_still_checked_where_it_differs(monkeypatch):
    inputs = testing.make_inputs(B=2, T=1, dtype="float32", gate="given")
    call = {"initial_state": torch.zeros(4, 2, 16, 16), "state_indices": torch.tensor([0, 1])}
    recurrent_kda(*inputs.args, **call)
    with pytest.raises(TypeError, match=r"^recurrent_kda: initial_state must have dtype"):
        recurrent_kda(*inputs.args, **call | {"initial_state": call["initial_state"].half()})
    with pytest.raises(ValueError, match=r"^recurrent_kda: state_indices must have shape"):
        recurrent_kda(*inputs.args, **call | {"state_indices": torch.tensor([0])})
    with pytest.raises(ValueError, match=r"^recurrent_kda: q must not need a gradient"):
        recurrent_kda(inputs.q.clone().requires_grad_(), *inputs.args[1:], **call)
    with pytest.raises(TypeError, match=r"^recurrent_kda: output_final_state must be a bool"):
        recurrent_kda(*inputs.args, **call, output_final_state=1)
    monkeypatch.setenv("OPENKDA_CHECK", "1")
    with pytest.raises(ValueError, match=r"^recurrent_kda: state_indices must be below the pool's 4 slots, got 4"):
        recurrent_kda(*inputs.args, **call | {"state_indices": torch.tensor([0, 4])})
