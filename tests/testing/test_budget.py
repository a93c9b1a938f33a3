"""The error budget itself: it must fail for what is wrong, and say which tensor by how much."""

import math

import pytest
import torch
from torch import Tensor

from openkda import testing
from openkda.kda import eager


def test_relative_rms_by_hand():
    # Errors 3 and 4 beside values 6 and 8: root of (9 + 16) / (36 + 64).
    assert testing.relative_rms(torch.tensor([9.0, 12.0]), torch.tensor([6.0, 8.0])) == pytest.approx(0.5)


def test_relative_rms_of_equal_tensors_is_zero():
    x = torch.randn(5)
    assert testing.relative_rms(x, x) == 0
    assert testing.relative_rms(torch.zeros(3), torch.zeros(3)) == 0
    assert testing.relative_rms(torch.zeros(0), torch.zeros(0)) == 0


def test_relative_rms_asks_for_zeros_where_the_exact_value_is_zero():
    assert testing.relative_rms(torch.full((3,), 1e-20), torch.zeros(3)) > 1e10


def test_relative_rms_lets_fp32_underflow():
    # 1e-60 is 0 in fp32, and that is right.
    assert testing.relative_rms(torch.zeros(3), torch.full((3,), 1e-60, dtype=torch.float64)) < 1e-20


def test_relative_rms_is_nan_for_nan():
    assert math.isnan(testing.relative_rms(torch.tensor([1.0, math.nan]), torch.ones(2)))


def test_relative_rms_refuses_other_shapes():
    # Broadcasting would hide a wrong shape.
    with pytest.raises(ValueError, match=r"shapes must agree, got \(3,\) and \(1, 3\)"):
        testing.relative_rms(torch.ones(3), torch.ones(1, 3))


@pytest.mark.parametrize("bad", [1.0 + 1e-4, math.nan, math.inf])
def test_assert_close_names_the_tensor_that_is_off(bad):
    exact = {"o": torch.ones(4), "dq": torch.ones(4)}
    with pytest.raises(AssertionError, match=r"over budget: dq .*\n(.*\n)*.*dq .*<-- over"):
        testing.assert_close(exact | {"dq": torch.full((4,), bad)}, exact, testing.FP32_LIMIT)


def test_assert_close_misses_no_tensor():
    with pytest.raises(AssertionError, match="no value for dk; the implementation gave o"):
        testing.assert_close({"o": torch.ones(1)}, {"o": torch.ones(1), "dk": torch.ones(1)}, 1.0)


@pytest.mark.parametrize("error, fits", [(1.4e-3, True), (1.6e-3, False), (math.nan, False)])
def test_the_16_bit_budget_is_one_and_a_half_times_the_rounded_error(error, fits):
    exact = {"o": torch.ones(100, dtype=torch.float64)}
    got, rounded = ({"o": exact["o"] + e} for e in (error, 1e-3))
    if fits:
        testing.assert_within_budget(got, exact, rounded)
    else:
        with pytest.raises(AssertionError, match=r"over budget: o .*1\.5 times"):
            testing.assert_within_budget(got, exact, rounded)


def test_a_pool_judges_several_draws_together():
    # Alone, the first draw is over; the budget of both is not.
    exact = {"dA_log": torch.ones(2, dtype=torch.float64)}
    pool = testing.ErrorPool()
    pool.add({"dA_log": exact["dA_log"] + 2e-3}, exact, {"dA_log": exact["dA_log"] + 1e-3})
    with pytest.raises(AssertionError, match="dA_log"):
        pool.check()
    pool.add({"dA_log": exact["dA_log"] + 1e-3}, exact, {"dA_log": exact["dA_log"] + 3e-3})
    pool.check()
    got, rounded = pool.errors()["dA_log"]
    assert got == pytest.approx(math.sqrt((2e-3**2 + 1e-3**2) / 2))
    assert rounded == pytest.approx(math.sqrt((1e-3**2 + 3e-3**2) / 2))


# ---- does the budget see the faults of real implementations?
def faulty(**change: object):
    """The eager operator, called with something slightly wrong."""

    def fn(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **kwargs: object) -> object:
        if change.get("decay") == "bf16":
            g = g.exp().bfloat16().float().log()  # exp(-1e-4) becomes 1
        if change.get("values") == "fp8":
            v = v.to(torch.float8_e4m3fn).to(v.dtype)
        if change.get("output") == "late":
            o, state = eager.chunk_kda(q, k, v, g, beta, **kwargs)
            return torch.cat([o[:, :1], o[:, :-1]], 1), state
        return eager.chunk_kda(q, k, v, g, beta, **kwargs)

    return fn


@pytest.mark.parametrize("change", [{"decay": "bf16"}, {"values": "fp8"}, {"output": "late"}], ids=str)
def test_the_budget_catches(change):
    inputs = testing.make_inputs(T=500, K=32, gate="slow", dtype="bfloat16")
    exact, rounded = testing.oracle(inputs), testing.rounded(inputs)
    testing.assert_within_budget(testing.run(eager.chunk_kda, inputs), exact, rounded)
    with pytest.raises(AssertionError, match="over budget"):
        testing.assert_within_budget(testing.run(faulty(**change), inputs), exact, rounded)


def test_a_lost_gradient_is_over_budget():
    inputs = testing.make_inputs(T=20, gate="given", dtype="float32")

    def no_dbeta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **kwargs: object) -> object:
        return eager.chunk_kda(q, k, v, g, beta.detach(), **kwargs)

    with pytest.raises(AssertionError, match="over budget: dbeta "):
        testing.assert_close(testing.run(no_dbeta, inputs), testing.oracle(inputs), testing.FP32_LIMIT)
