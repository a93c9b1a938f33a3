"""The definition against numbers worked out by hand. Every case is small enough to be checked with a pencil.

S <- diag(exp(g)) S;   S <- S + beta k (v - S^T k)^T;   o = scale * S^T q
"""

import math

import pytest
import torch
from torch import Tensor

from openkda import testing
from openkda.kda import reference


def tokens(*values: float | list[float]) -> Tensor:
    """One sequence and one head: [1, T, 1, D] from a list per token, or D = 1 from a number per token."""
    rows = [value if isinstance(value, list) else [value] for value in values]
    return torch.tensor(rows, dtype=torch.float64)[None, :, None, :]


def strengths(*values: float) -> Tensor:
    """beta [1, T, 1]."""
    return torch.tensor(values, dtype=torch.float64)[None, :, None]


def state(rows: list[list[float]]) -> Tensor:
    """[1, 1, K, V]."""
    return torch.tensor(rows, dtype=torch.float64)[None, None]


def kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    return reference.chunk_kda(q, k, v, g, beta, output_final_state=True, **options)


def assert_equal(got: Tensor, want: list | float | Tensor) -> None:
    torch.testing.assert_close(got.squeeze(), torch.as_tensor(want, dtype=got.dtype).squeeze(), rtol=1e-14, atol=1e-15)


# ---- the recurrence
def test_reference_writes_and_reads_one_token():
    # S = 0.5 * 3 * 5 = 7.5, whatever the decay of an empty state; o = 2 * 7.5: the output reads the updated state.
    o, final = kda(tokens(2), tokens(3), tokens(5), tokens(-1), strengths(0.5))
    assert_equal(o, 15.0)
    assert_equal(final, 7.5)


def test_reference_decays_before_the_delta_rule():
    # Decay first: S = 4/2 = 2, prediction 3 * 2 = 6, S = 2 + 0.5 * 3 * (5 - 6) = 0.5.
    # (Delta first would give 4 + 1.5 * (5 - 12) = -6.5, then -3.25.)
    o, final = kda(tokens(2), tokens(3), tokens(5), tokens(math.log(0.5)), strengths(0.5), initial_state=state([[4]]))
    assert_equal(final, 0.5)
    assert_equal(o, 1.0)


def test_reference_decays_each_key_channel_by_itself():
    # Token 1: S = 1 * (1, 0) * 2 = (2, 0).         q = (1, 1) reads 2.
    # Token 2: decay (1/2, 1) gives (1, 0); prediction 0.6 * 1; step 0.5 * (5 - 0.6) = 2.2;
    #          S = (1 + 0.6 * 2.2, 0.8 * 2.2) = (2.32, 1.76).  q = (1, -1) reads 0.56.
    o, final = kda(
        tokens([1, 1], [1, -1]),
        tokens([1, 0], [0.6, 0.8]),
        tokens(2, 5),
        tokens([-7, -7], [math.log(0.5), 0]),
        strengths(1, 0.5),
        scale=1.0,
    )
    assert_equal(o, [2.0, 0.56])
    assert_equal(final, [2.32, 1.76])


def test_reference_keeps_value_channels_apart():
    # K = 1, V = 2: S = 0.5 * (10, 20) = (5, 10), then 0.5 * S + 1 * ((1, 2) - 0.5 * S) = (1, 2).
    o, final = kda(tokens(1, 3), tokens(1, 1), tokens([10, 20], [1, 2]), tokens(0, math.log(0.5)), strengths(0.5, 1))
    assert_equal(o, [[5, 10], [3, 6]])
    assert_equal(final, [1, 2])


def test_reference_follows_the_closed_form_of_a_scalar_state():
    # K = V = 1, constant inputs: S_t = c S_(t-1) + b k v with c = e^g (1 - b k^2), so
    # S_T = c^T S_0 + b k v (1 - c^T) / (1 - c).
    T, k, v, b, g, S0 = 20, 0.7, 3.0, 0.9, -0.25, 2.0
    c = math.exp(g) * (1 - b * k * k)
    want = c**T * S0 + b * k * v * (1 - c**T) / (1 - c)
    o, final = kda(
        tokens(*[1.0] * T),
        tokens(*[k] * T),
        tokens(*[v] * T),
        tokens(*[g] * T),
        strengths(*[b] * T),
        initial_state=state([[S0]]),
    )
    assert_equal(final, want)
    assert_equal(o[0, -1], want)


def test_reference_overwrites_the_value_of_a_key_written_twice():
    # beta = 1, unit key, no decay: the second write replaces the first, and a read with the key gives it back.
    key = [0.6, 0.8]
    o, _ = kda(
        tokens(key, key), tokens(key, key), tokens([1, 2], [30, 40]), tokens([0, 0], [0, 0]), strengths(1, 1), scale=1.0
    )
    assert_equal(o, [[1, 2], [30, 40]])


def test_reference_keeps_the_value_of_an_orthogonal_key():
    o, _ = kda(
        tokens([1, 0], [0, 1], [1, 0]),
        tokens([1, 0], [0, 1], [0, 1]),
        tokens(7, 11, 13),
        tokens([0, 0], [0, 0], [0, 0]),
        strengths(1, 1, 1),
        scale=1.0,
    )
    assert_equal(o, [7, 11, 7])


def test_reference_writes_nothing_when_beta_is_zero():
    o, final = kda(tokens(3), tokens(5), tokens(7), tokens(math.log(0.25)), strengths(0), initial_state=state([[8]]))
    assert_equal(final, 2.0)
    assert_equal(o, 6.0)


def test_reference_reflects_the_state_when_beta_is_two():
    # beta = 2 along a unit key: S^T k = 3 becomes 3 + 2 * (5 - 3) = 7, the mirror image of 3 in 5.
    _, final = kda(tokens(1), tokens(1), tokens(5), tokens(0), strengths(2), initial_state=state([[3]]))
    assert_equal(final, 7.0)


def test_reference_forgets_everything_at_a_gate_of_minus_1000():
    _, final = kda(tokens(1), tokens(1), tokens(5), tokens(-1000), strengths(0.5), initial_state=state([[1e30]]))
    assert_equal(final, 2.5)


# ---- options
def test_reference_scales_by_the_root_of_K_by_default():
    # K = 4, q = k = (1, 1, 1, 1), v = 6, beta = 1: S = 6 in each row, S^T q = 24, scale 1/2.
    ones = tokens([1.0] * 4)
    o, _ = kda(ones, ones, tokens(6), 0 * ones, strengths(1))
    assert_equal(o, 12.0)


@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0])
def test_reference_scales_the_output_alone(scale):
    inputs = testing.make_inputs(T=5)
    o, final = reference.chunk_kda(*inputs.args, **inputs.kwargs, scale=1.0)
    scaled, same = reference.chunk_kda(*inputs.args, **inputs.kwargs, scale=scale)
    torch.testing.assert_close(scaled, scale * o, rtol=1e-14, atol=1e-15)
    assert torch.equal(final, same)


def test_reference_takes_an_integer_scale():
    inputs = testing.make_inputs(T=5)
    (o, _), (same, _) = (reference.chunk_kda(*inputs.args, **inputs.kwargs, scale=scale) for scale in (1, 1.0))
    assert torch.equal(o, same)


def test_reference_turns_raw_logits_into_the_softplus_gate():
    # raw 1 + bias -1 = 0, softplus(0) = ln 2, A = 2: g = -2 ln 2, decay 1/4. Second head: A = 1, decay 1/2.
    q = torch.ones(1, 1, 2, 1, dtype=torch.float64)
    _, final = reference.chunk_kda(
        q,
        q,
        q,
        q,
        torch.zeros(1, 1, 2, dtype=torch.float64),
        initial_state=torch.full((1, 2, 1, 1), 8.0, dtype=torch.float64),
        output_final_state=True,
        use_gate_in_kernel=True,
        A_log=torch.tensor([math.log(2), 0.0], dtype=torch.float64),
        dt_bias=torch.full((2, 1), -1.0, dtype=torch.float64),
    )
    assert_equal(final, [2.0, 4.0])


def test_reference_turns_raw_logits_into_the_bounded_gate():
    # A (raw + bias) = 3 * (1 - 1 + ln(3) / 3) = ln 3, sigmoid = 3/4, lower_bound -4 ln 2: g = -3 ln 2, decay 1/8.
    one = tokens(1)
    _, final = kda(
        one,
        one,
        one,
        one,
        strengths(0),
        initial_state=state([[8]]),
        use_gate_in_kernel=True,
        lower_bound=-4 * math.log(2),
        A_log=torch.tensor([math.log(3)], dtype=torch.float64),
        dt_bias=torch.tensor([[math.log(3) / 3 - 1]], dtype=torch.float64),
    )
    assert_equal(final, 1.0)


def test_reference_gives_each_channel_its_own_dt_bias():
    # softplus(raw + bias) with raw = 0; bias chosen so that softplus is ln 2 and ln 4: decays 1/2 and 1/4.
    zero = tokens([0, 0])
    bias = torch.tensor([[0.0, math.log(3.0)]], dtype=torch.float64)  # log(1 + e^0) = ln 2, log(1 + 3) = ln 4
    options = {
        "use_gate_in_kernel": True,
        "A_log": torch.zeros(1, dtype=torch.float64),
        "initial_state": state([[4], [4]]),
    }
    for dt_bias in (bias, bias.flatten()):
        _, final = kda(zero, zero, tokens(1), zero, strengths(0), dt_bias=dt_bias, **options)
        assert_equal(final, [2.0, 1.0])


@pytest.mark.parametrize("neg_eigval, want", [(False, 0.75), (True, 1.5)], ids=["sigmoid", "twice the sigmoid"])
def test_reference_turns_beta_logits_into_write_strength(neg_eigval, want):
    # sigmoid(ln 3) = 3/4; S = beta * 1 * 1 from an empty state.
    _, final = kda(
        tokens(1),
        tokens(1),
        tokens(1),
        tokens(0),
        strengths(math.log(3)),
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=neg_eigval,
    )
    assert_equal(final, want)


def test_reference_normalises_q_and_k():
    # (3, 4) / sqrt(25 + 1e-6): S = k v, o = q . k v = 25 / (25 + 1e-6) * v.
    o, final = kda(
        tokens([3, 4]),
        tokens([3, 4]),
        tokens(10),
        tokens([0, 0]),
        strengths(1),
        use_qk_l2norm_in_kernel=True,
        scale=1.0,
    )
    norm = math.sqrt(25 + 1e-6)
    assert_equal(final, [30 / norm, 40 / norm])
    assert_equal(o, 250 / (25 + 1e-6))


def test_reference_keeps_an_all_zero_key_finite_when_it_normalises():
    zero = tokens([0, 0]).requires_grad_()
    o, final = kda(zero, zero, tokens(10), tokens([0, 0]), strengths(1), use_qk_l2norm_in_kernel=True)
    (o.sum() + final.sum()).backward()
    assert_equal(final, [0.0, 0.0])
    assert zero.grad.isfinite().all()


@pytest.mark.parametrize("groups", [2, 4])
def test_reference_gives_value_heads_of_a_group_one_key(groups):
    # Value head h reads query and key head h // groups, as if they were repeated.
    inputs = testing.make_inputs(T=6, H=2, HV=2 * groups)
    o, final = reference.chunk_kda(*inputs.args, **inputs.kwargs)
    q, k = (x.repeat_interleave(groups, 2) for x in (inputs.q, inputs.k))
    same_o, same_final = reference.chunk_kda(q, k, *inputs.args[2:], **inputs.kwargs)
    assert torch.equal(o, same_o)
    assert torch.equal(final, same_final)


def test_reference_gives_the_second_key_head_to_the_second_group():
    # H = 2, HV = 4, keys 1 and 10: final states are beta k v = 1, 1, 10, 10.
    key = torch.tensor([1.0, 10.0], dtype=torch.float64).view(1, 1, 2, 1)
    value, beta = torch.ones(1, 1, 4, 1, dtype=torch.float64), torch.ones(1, 1, 4, dtype=torch.float64)
    _, final = kda(key, key, value, torch.zeros_like(value), beta)
    assert_equal(final, [1, 1, 10, 10])


def test_reference_swaps_the_state_when_value_comes_first():
    inputs = testing.make_inputs(T=6, K=3, V=5)
    o, final = reference.chunk_kda(*inputs.args, **inputs.kwargs)
    swapped = inputs.kwargs | {
        "initial_state": inputs.initial_state.transpose(-1, -2).contiguous(),
        "state_v_first": True,
    }
    same_o, v_first = reference.chunk_kda(*inputs.args, **swapped)
    assert v_first.shape == (1, 2, 5, 3)
    assert torch.equal(o, same_o)
    assert torch.equal(v_first.transpose(-1, -2), final)


def test_reference_returns_no_state_unless_asked():
    inputs = testing.make_inputs(T=3)
    o, final = reference.chunk_kda(*inputs.args, A_log=inputs.A_log, dt_bias=inputs.dt_bias, use_gate_in_kernel=True)
    assert o.shape == (1, 3, 2, 16)
    assert final is None


# ---- dtypes
@pytest.mark.parametrize(
    "dtype, inside",
    [("float64", torch.float64), ("float32", torch.float32), ("bfloat16", torch.float32), ("float16", torch.float32)],
)
def test_reference_returns_o_like_v_and_a_wide_state(dtype, inside):
    inputs = testing.make_inputs(T=3, dtype=dtype)
    o, final = reference.chunk_kda(*inputs.args, **inputs.kwargs)
    assert o.dtype == inputs.v.dtype
    assert final.dtype == inside


def test_reference_computes_16_bit_inputs_in_fp32():
    inputs = testing.make_inputs(T=40, dtype="bfloat16")
    wide = reference.chunk_kda(*inputs.to(torch.float32).args, **inputs.kwargs)
    o, final = reference.chunk_kda(*inputs.args, **inputs.kwargs)
    assert torch.equal(o, wide[0].bfloat16())
    assert torch.equal(final, wide[1])


@pytest.mark.parametrize(
    "gate", ["none", "slow", "beside", "log_uniform", "softplus", "bounded", "softplus_strong", "bounded_strong"]
)
def test_reference_meets_the_fp32_limit(gate):
    inputs = testing.make_inputs(T=100, HV=4, V=8, gate=gate, dtype="float32")
    testing.assert_close(testing.run(reference.chunk_kda, inputs), testing.oracle(inputs), testing.FP32_LIMIT)


# ---- packed sequences and empty ones
def test_reference_starts_every_packed_sequence_from_its_own_state():
    # Three sequences of one channel: 2 tokens from 8, none from 5, 1 token from 0. beta = 0, decay 1/2 each token.
    one, half = tokens(1, 1, 1), tokens(*[math.log(0.5)] * 3)
    o, final = kda(
        one,
        one,
        one,
        half,
        strengths(0, 0, 0),
        initial_state=torch.tensor([8.0, 5.0, 0.0]).double().view(3, 1, 1, 1),
        cu_seqlens=torch.tensor([0, 2, 2, 3]),
    )
    assert_equal(o, [4, 2, 0])
    assert_equal(final, [2, 5, 0])


def test_reference_of_no_tokens_returns_the_state_it_was_given():
    inputs = testing.make_inputs(B=2, T=0)
    o, final = reference.chunk_kda(*inputs.args, **inputs.kwargs)
    assert o.shape == (2, 0, 2, 16)
    assert torch.equal(final, inputs.initial_state)


def test_reference_of_no_tokens_returns_zeros_without_a_state():
    inputs = testing.make_inputs(B=2, T=0, K=4, V=6, initial_state=False)
    _, final = reference.chunk_kda(*inputs.args, **inputs.kwargs)
    assert torch.equal(final, torch.zeros(2, 2, 4, 6, dtype=torch.float64))


# ---- gradients
@pytest.mark.parametrize("gate", ["softplus", "bounded"])
def test_reference_gradients_agree_with_finite_differences(gate):
    inputs = testing.make_inputs(
        T=3,
        H=1,
        HV=2,
        K=2,
        V=3,
        gate=gate,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=True,
    )
    names = list(inputs.tensors)

    def call(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        given = dict(zip(names, tensors, strict=True))
        args = [given.pop(name) for name in ("q", "k", "v", "g", "beta")]
        return reference.chunk_kda(*args, **inputs.kwargs | given)

    assert len(names) == 8
    assert torch.autograd.gradcheck(call, [x.requires_grad_() for x in inputs.tensors.values()])


def test_reference_gradient_of_one_token_by_hand():
    # o = q S, S = a S0 + b k (v - a S0 k) with a = e^g. At q=2, k=3, v=5, b=1/2, a=1/2, S0=4: S = 1/2, o = 1.
    # dS = q = 2.  dq = S = 0.5.  dv = dS b k = 3.  db = dS k (v - a S0 k) = 2 * 3 * -1 = -6.
    # dk = dS b (v - 2 a S0 k) = 1 * (5 - 12) = -7.  da = dS S0 (1 - b k^2) = 2 * 4 * -3.5 = -28; dg = a da = -14.
    # dS0 = dS a (1 - b k^2) = 2 * 0.5 * -3.5 = -3.5.
    leaves = [tokens(2), tokens(3), tokens(5), tokens(math.log(0.5)), strengths(0.5), state([[4]])]
    q, k, v, g, beta, S0 = (x.requires_grad_() for x in leaves)
    kda(q, k, v, g, beta, initial_state=S0)[0].backward()
    for leaf, want in zip((q, k, v, g, beta, S0), (0.5, -7.0, 3.0, -14.0, -6.0, -3.5), strict=True):
        assert_equal(leaf.grad, want)
