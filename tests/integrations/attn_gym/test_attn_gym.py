"""attention-gym's calls give what openkda gives for the same decay; the reference is written out in `oracle`."""

import enum
import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import openkda
from openkda.integrations import attn_gym

LOG2_E = math.log2(math.e)
#: Parameters of attention-gym at 7fdb85d.
SIGNATURES = {
    "chunk_kda": "q k v cumulative_gate beta initial_state cu_seqlens output_final_state fastmath autotune impl",
    "recurrent_kda": "q k v gate beta initial_state cu_seqlens output_final_state state_indices autotune impl",
    "bounded_gate_cumsum": "raw_gate A_log dt_bias chunk_size lower_bound fastmath profile_ranges cu_seqlens",
}


@pytest.fixture
def inputs() -> dict[str, Tensor]:
    B, T, H, K, V = 1, 150, 2, 8, 12
    q, k, raw = torch.randn(3, B, T, H, K).unbind(0)
    k = torch.nn.functional.normalize(k, dim=-1)
    A_log, dt_bias = torch.rand(H), torch.randn(H, K)
    return {"q": q, "k": k, "v": torch.randn(B, T, H, V), "raw": raw, "A_log": A_log, "dt_bias": dt_bias,
            "beta": torch.rand(B, T, H), "state": torch.randn(3, H, K, V)}  # fmt: skip


CU = torch.tensor([0, 70, 70, 140], dtype=torch.int32)  # longer than a chunk, empty, and a tail


def decay(x: dict[str, Tensor]) -> Tensor:
    """The bounded gate in nats, by its formula."""
    return -5.0 * torch.sigmoid(x["A_log"].exp()[:, None] * (x["raw"] + x["dt_bias"]))


def oracle(x: dict[str, Tensor], g: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return openkda.chunk_kda(
        x["q"], x["k"], x["v"], g, x["beta"], output_final_state=True, backend="reference", **options
    )


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_attention_gyms(name: str):
    assert " ".join(inspect.signature(getattr(attn_gym, name)).parameters) == SIGNATURES[name]


@pytest.mark.parametrize("cu_seqlens", [None, CU], ids=["dense", "packed"])
def test_gate_is_in_log2_and_starts_anew_in_every_chunk(cu_seqlens: Tensor | None, inputs: dict[str, Tensor]):
    x, g = inputs, decay(inputs) * LOG2_E
    got = attn_gym.bounded_gate_cumsum(x["raw"], x["A_log"], x["dt_bias"], cu_seqlens=cu_seqlens)
    starts = [0, 64, 128] if cu_seqlens is None else [0, 64, 70, 134]
    for first, end in zip(starts, [*starts[1:], 150 if cu_seqlens is None else 140], strict=True):
        torch.testing.assert_close(got[:, first:end], g[:, first:end].cumsum(1), rtol=1e-5, atol=1e-4)
    per_token = attn_gym.bounded_gate_cumsum(x["raw"], x["A_log"], x["dt_bias"], chunk_size=1)
    torch.testing.assert_close(per_token, g)


@pytest.mark.parametrize("impl", ["fused", "reference"])
@pytest.mark.parametrize("cu_seqlens", [None, CU], ids=["dense", "packed"])
def test_chunk_kda_takes_the_cumulative_gate(cu_seqlens: Tensor | None, impl: str, inputs: dict[str, Tensor]):
    x = {name: tensor.requires_grad_() for name, tensor in inputs.items()}
    state = x["state"] if cu_seqlens is not None else x["state"][:1]
    gate = attn_gym.bounded_gate_cumsum(x["raw"], x["A_log"], x["dt_bias"], cu_seqlens=cu_seqlens)
    got = attn_gym.chunk_kda(
        x["q"], x["k"], x["v"], gate, x["beta"], state, cu_seqlens=cu_seqlens, output_final_state=True, impl=impl
    )
    want = oracle(x, decay(x), initial_state=state, cu_seqlens=cu_seqlens)
    # 3e-5: what the rounding of sums near -460 costs the differences (see the module).
    for a, b in zip(got, want, strict=True):
        assert (a - b).square().mean().sqrt() <= 3e-5 * b.square().mean().sqrt()
    leaves = list(x.values())
    grads = torch.autograd.grad(got[0].square().sum() + got[1].square().sum(), leaves)
    for a, b in zip(grads, torch.autograd.grad(want[0].square().sum() + want[1].square().sum(), leaves), strict=True):
        assert (a - b).square().mean().sqrt() <= 1e-4 * b.square().mean().sqrt()


@torch.no_grad()
def test_recurrent_kda_takes_the_gate_per_token(inputs: dict[str, Tensor]):
    x = inputs
    gate = attn_gym.bounded_gate_cumsum(x["raw"], x["A_log"], x["dt_bias"], chunk_size=1)
    got = attn_gym.recurrent_kda(
        x["q"], x["k"], x["v"], gate, x["beta"], x["state"], cu_seqlens=CU, output_final_state=True
    )
    for a, b in zip(got, oracle(x, decay(x), initial_state=x["state"], cu_seqlens=CU), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_recurrent_reference_is_differentiable(inputs: dict[str, Tensor]):
    x = {name: tensor.requires_grad_() for name, tensor in inputs.items()}
    gate = decay(x) * LOG2_E
    o, _ = attn_gym.recurrent_kda(x["q"], x["k"], x["v"], gate, x["beta"], impl="reference")
    (got,) = torch.autograd.grad(o.sum(), x["raw"])
    (want,) = torch.autograd.grad(oracle(x, decay(x))[0].sum(), x["raw"])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="train with chunk_kda"):
        attn_gym.recurrent_kda(x["q"], x["k"], x["v"], gate, x["beta"])


@torch.no_grad()
def test_pool_slot_0_and_indices_outside_are_padding(inputs: dict[str, Tensor]):
    x = {name: t[:, :4].reshape(4, 1, *t.shape[2:]) for name, t in inputs.items() if t.ndim == 4 and name != "state"}
    beta, gate = inputs["beta"][:, :4].reshape(4, 1, 2), -torch.rand(4, 1, 2, 8)
    pool = torch.randn(6, 2, 8, 12)
    before = pool.clone()
    indices = torch.tensor([3, 0, 6, -1], dtype=torch.int32)
    o, state = attn_gym.recurrent_kda(x["q"], x["k"], x["v"], gate, beta, pool, state_indices=indices)
    want, want_state = openkda.recurrent_kda(
        x["q"][:1], x["k"][:1], x["v"][:1], gate[:1] * math.log(2), beta[:1], initial_state=before[3:4],
        output_final_state=True,
    )  # fmt: skip
    assert state is None
    assert torch.equal(o[:1], want)
    assert not o[1:].any()
    assert torch.equal(pool[3:4], want_state)
    assert torch.equal(pool[[0, 1, 2, 4, 5]], before[[0, 1, 2, 4, 5]])


def test_impl_may_be_an_enum_of_strings(inputs: dict[str, Tensor]):
    class Impl(enum.StrEnum):
        REFERENCE = "reference"

    args = (inputs["q"], inputs["k"], inputs["v"], decay(inputs), inputs["beta"])
    assert torch.equal(
        attn_gym.chunk_kda(*args, impl=Impl.REFERENCE)[0], attn_gym.chunk_kda(*args, impl="reference")[0]
    )


def test_unsupported_flags_are_named(inputs: dict[str, Tensor]):
    args = (inputs["q"], inputs["k"], inputs["v"], decay(inputs), inputs["beta"])
    gate = (inputs["raw"], inputs["A_log"], inputs["dt_bias"])
    with pytest.raises(ValueError, match="chunk_kda: fastmath must be False"):
        attn_gym.chunk_kda(*args, fastmath=True)
    with pytest.raises(ValueError, match="bounded_gate_cumsum: fastmath must be False"):
        attn_gym.bounded_gate_cumsum(*gate, fastmath=True)
    with pytest.raises(ValueError, match="profile_ranges must be False"):
        attn_gym.bounded_gate_cumsum(*gate, profile_ranges=True)
    with pytest.raises(ValueError, match="impl must be one of 'fused', 'reference'"):
        attn_gym.chunk_kda(*args, impl="cudnn")
    with pytest.raises(TypeError, match="kernel_options"):
        attn_gym.chunk_kda(*args, kernel_options={})  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="lower_bound must be a number"):
        attn_gym.bounded_gate_cumsum(*gate, lower_bound=None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"cumulative_gate must have shape \[B, T, HV, K\]"):
        attn_gym.chunk_kda(*args[:3], args[3][0], args[4])
    pool = {"state_indices": torch.zeros(1, dtype=torch.int32)}
    with pytest.raises(ValueError, match="output_final_state must be False with state_indices"):
        attn_gym.recurrent_kda(*args, inputs["state"], output_final_state=True, **pool)
    with pytest.raises(ValueError, match='impl must be "fused" with state_indices'):
        attn_gym.recurrent_kda(*args, inputs["state"], impl="reference", **pool)
