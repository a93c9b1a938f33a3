"""Causality to the bit: whatever happens at t >= P, nothing before P changes, nor a gradient of a loss on it."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from openkda import testing
from openkda.kda import eager, reference

# Cuts at every kind of place: last token, first token of a sub-block or chunk, inside one.
CUTS = [(22, 21), (17, 16), (33, 32), (49, 48), (64, 5), (65, 64), (130, 63), (130, 75), (130, 128)]


def prefix_loss(fn, inputs: testing.KDAInputs, P: int) -> dict[str, Tensor]:
    """o[:P], and every gradient of a loss that looks at o[:P] alone."""
    loss = torch.where(torch.arange(inputs.q.shape[1])[:, None, None] < P, inputs.grad_o.nan_to_num(), 0)
    silent = replace(inputs, grad_o=loss, grad_final_state=torch.zeros_like(inputs.grad_final_state))
    result = testing.run(fn, silent)
    return {"o": result["o"][:, :P]} | {n: x for n, x in result.items() if n.startswith("d")}


def changed_after(inputs: testing.KDAInputs, P: int, names: str) -> testing.KDAInputs:
    """Other numbers at t >= P, far from the old ones: other keys, values 1000 times as large, decays up to -1000."""
    other = testing.make_inputs(T=inputs.q.shape[1], K=inputs.q.shape[-1], dtype=inputs.q.dtype, seed=99)
    edits = {"q": 50 * other.q, "k": other.k, "v": 1000 * other.v, "g": -300 * other.g.abs(), "beta": 2 * other.beta}
    edited = {}
    for name in names.split():
        edited[name] = getattr(inputs, name).clone()
        edited[name][:, P:] = edits[name][:, P:]
    return replace(inputs, **edited)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("gate", ["bounded", "beside", "slow"])
@pytest.mark.parametrize("T, P", CUTS)
def test_eager_is_causal_to_the_bit(T, P, gate, dtype):
    inputs = testing.make_inputs(T=T, gate=gate, dtype=getattr(torch, dtype))
    before = prefix_loss(eager.chunk_kda, inputs, P)
    after = prefix_loss(eager.chunk_kda, changed_after(inputs, P, "q k v g beta"), P)
    for name, value in before.items():
        assert torch.equal(value, after[name]), name
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        assert not before[name][:, P:].any(), f"{name} reaches tokens that the loss does not see"


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_eager_is_causal_in_each_input(name):
    # The published fault: only the last gate is edited, and a loss on the tokens before it changes.
    inputs = testing.make_inputs(T=22, gate="bounded", dtype="float32", beta=1.0)
    before = prefix_loss(eager.chunk_kda, inputs, 21)
    after = prefix_loss(eager.chunk_kda, changed_after(inputs, 21, name), 21)
    assert all(torch.equal(value, after[n]) for n, value in before.items())


def test_eager_is_causal_with_rounded_operands():
    inputs = testing.make_inputs(T=130, gate="bounded", dtype="bfloat16")

    def rounded(*args: Tensor, **kwargs: object) -> object:
        return eager.chunk_kda(*args, **kwargs, operand_dtype="bfloat16")

    before, after = (prefix_loss(rounded, x, 75) for x in (inputs, changed_after(inputs, 75, "q k v g beta")))
    assert all(torch.equal(value, after[n]) for n, value in before.items())


def test_a_sequence_is_not_disturbed_by_the_next_one():
    # Outputs, final states and gradients of the first sequence, bit for bit, whatever the second one holds.
    inputs = testing.make_inputs(T=100, gate="beside", dtype="float32", cu_seqlens=[0, 37, 100])
    other = changed_after(inputs, 37, "q k v g beta")
    before, after = testing.run(eager.chunk_kda, inputs), testing.run(eager.chunk_kda, other)
    for name in ("final_state", "dinitial_state"):
        assert torch.equal(before[name][0], after[name][0]), name
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert torch.equal(before[name][:, :37], after[name][:, :37]), name


def test_reference_is_causal_to_the_bit():
    inputs = testing.make_inputs(T=22, gate="bounded", dtype="float32")
    before = prefix_loss(reference.chunk_kda, inputs, 21)
    after = prefix_loss(reference.chunk_kda, changed_after(inputs, 21, "q k v g beta"), 21)
    assert all(torch.equal(value, after[n]) for n, value in before.items())
