"""causal_conv1d_update: the step of the convolution, on pools of states; the messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from openkda.conv import causal_conv1d, causal_conv1d_update
from openkda.errors import BackendUnavailable


@pytest.mark.parametrize("backend", ["auto", "eager", "reference"])
@pytest.mark.parametrize("W", [1, 2, 4, 6])
def test_steps_have_the_bits_of_the_whole_sequence(backend: str, W: int):
    x, weight, bias = torch.randn(3, 7, 5), torch.randn(5, W), torch.randn(5)
    state = torch.randn(3, 5, W - 1)
    options = {"initial_state": state.clone(), "output_final_state": True, "backend": backend}
    want, last = causal_conv1d(x, weight, bias, **options)
    for t in range(7):
        assert torch.equal(causal_conv1d_update(x[:, t], state, weight, bias, backend=backend), want[:, t])
    assert torch.equal(state, last)


@pytest.mark.parametrize("backend", ["eager", "reference"])
@pytest.mark.parametrize("indices", [[3, -1, 0, -7], [-1, -2, -3, -4], [5, 4, 3, 2]], ids=str)
def test_named_slots_of_a_pool_are_edited_and_no_other(backend: str, indices: list[int]):
    x, weight, pool = torch.randn(4, 5), torch.randn(5, 4), torch.randn(6, 5, 3)
    pool[5] = float("nan") if 5 not in indices else 1.0  # what nobody names reaches nothing
    got = pool.clone()
    y = causal_conv1d_update(x, got, weight, activation="silu", state_indices=torch.tensor(indices), backend=backend)
    for n, slot in enumerate(indices):
        if slot < 0:
            assert not y[n].any()
            continue
        options = {"activation": "silu", "initial_state": pool[slot : slot + 1], "output_final_state": True}
        want, state = causal_conv1d(x[n : n + 1, None], weight, **options)
        torch.testing.assert_close(y[n], want[0, 0])
        assert torch.equal(got[slot], state[0])
    others = [slot for slot in range(6) if slot not in indices]
    assert torch.equal(got[others].view(torch.int32), pool[others].view(torch.int32))


def test_padding_may_hold_nan():
    x, weight, pool = torch.full((1, 5), float("nan")), torch.randn(5, 4), torch.randn(2, 5, 3)
    before = pool.clone()
    assert not causal_conv1d_update(x, pool, weight, state_indices=torch.tensor([-1])).any()
    assert torch.equal(pool, before)


def test_no_sequence_gives_no_row():
    assert causal_conv1d_update(torch.ones(0, 5), torch.ones(0, 5, 3), torch.ones(5, 4)).shape == (0, 5)


X, STATE, WEIGHT = torch.zeros(2, 3), torch.zeros(2, 3, 3), torch.zeros(3, 4)
BAD = {
    "x_rank": (ValueError, r"x must have shape \[N, C\], got \[2, 1, 3\]", {"x": X[:, None]}),
    "weight": (ValueError, r"weight must have shape \[C, W\] = \[3, 4\], got \[2, 4\]", {"weight": torch.zeros(2, 4)}),
    "state_shape": (
        ValueError,
        r"conv_state must have shape \[N, C, W-1\] = \[2, 3, 3\], got \[2, 3, 4\]; from a state of W columns drop the",
        {"conv_state": torch.zeros(2, 3, 4)},
    ),
    "pool_shape": (
        ValueError,
        r"conv_state must have shape \[slots, C, W-1\] = \[9, 3, 3\], got \[9, 4, 3\]",
        {"conv_state": torch.zeros(9, 4, 3), "state_indices": torch.tensor([0, 1])},
    ),
    "state_dtype": (
        TypeError,
        r"conv_state must have dtype float32, got bfloat16; it holds inputs, so it follows x",
        {"conv_state": STATE.bfloat16()},
    ),
    "state_strides": (
        ValueError,
        r"conv_state must be contiguous, got other strides; it is updated in place",
        {"conv_state": torch.zeros(2, 3, 3).transpose(0, 1).contiguous().transpose(0, 1)},
    ),
    "indices_dtype": (TypeError, r"state_indices must have dtype int32 or int64", {"state_indices": torch.zeros(2)}),
    "indices_shape": (
        ValueError,
        r"state_indices must have shape \[N\] = \[2\], got \[3\]; one slot per sequence; negative for padding",
        {"state_indices": torch.tensor([0, 1, 2])},
    ),
    "activation": (ValueError, r"activation must be one of None, 'silu', got 'gelu'", {"activation": "gelu"}),
    "gradient": (
        ValueError,
        r"x must not need a gradient, got requires_grad=True; this operator is inference only; train with causal_conv",
        {"x": torch.zeros(2, 3, requires_grad=True)},
    ),
    "triton": (BackendUnavailable, r'backend="triton" needs a GPU tensor, got device cpu', {"backend": "triton"}),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_argument_is_named_and_the_state_unchanged(case: str):
    error, message, change = BAD[case]
    call: dict[str, Any] = {"x": X, "conv_state": torch.ones(2, 3, 3), "weight": WEIGHT} | change
    before = call["conv_state"].clone()
    with pytest.raises(error, match="^causal_conv1d_update: " + message):
        causal_conv1d_update(**call)
    assert torch.equal(call["conv_state"], before)


@pytest.mark.parametrize(
    "indices, message",
    [([0, 2], r"state_indices must be below the pool's 2 slots, got 2"), ([1, 1], r"name every slot at most once")],
)
def test_index_values_are_checked_on_request(indices: list[int], message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENKDA_CHECK", "1")
    pool = torch.ones(2, 3, 3)
    with pytest.raises(ValueError, match=message):
        causal_conv1d_update(X, pool, WEIGHT, state_indices=torch.tensor(indices))
    assert torch.equal(pool, torch.ones(2, 3, 3))
