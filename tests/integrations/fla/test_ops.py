"""Operators with fla's signatures: the same arguments, openkda's results, and no flag that is silently dropped."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import openkda
from openkda.integrations import fla
from openkda.integrations.fla import ops

#: Parameters of fla-core 0.6.0, in order; all may be given by place.
SIGNATURES = {
    "chunk_kda": "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel "
    "use_beta_sigmoid_in_kernel allow_neg_eigval safe_gate lower_bound disable_recompute return_intermediate_states "
    "state_v_first cu_seqlens cu_seqlens_cpu cp_context use_graph max_num_seqs kwargs",
    "fused_recurrent_kda": "q k v g beta A_log dt_bias scale initial_state output_final_state use_qk_l2norm_in_kernel "
    "use_gate_in_kernel use_beta_sigmoid_in_kernel allow_neg_eigval lower_bound state_v_first cu_seqlens kwargs",
    "fused_kda_gate": "g A_log dt_bias lower_bound output_dtype",
}


@pytest.fixture
def inputs() -> tuple[Tensor, ...]:
    """q, k, v, raw gate, raw beta: two key heads, four value heads, K != V, packed length."""
    B, T, H, HV, K, V = 1, 90, 2, 4, 8, 12
    sizes = ((B, T, H, K), (B, T, H, K), (B, T, HV, V), (B, T, HV, K), (B, T, HV))
    return tuple(torch.randn(size) for size in sizes)


@pytest.fixture
def gate() -> dict[str, Tensor]:
    return {"A_log": torch.rand(4), "dt_bias": torch.randn(4 * 8)}


IN_KERNEL = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_flas(name: str):
    assert " ".join(inspect.signature(getattr(fla, name)).parameters) == SIGNATURES[name]


def test_chunk_kda_means_what_openkda_means(inputs: Any, gate: Any):
    state, cu = torch.randn(3, 4, 12, 8), torch.tensor([0, 30, 30, 90])
    leaves = [x.requires_grad_() for x in (*inputs, *gate.values(), state)]
    common = {"state_v_first": True, "cu_seqlens": cu, "lower_bound": -5.0, **IN_KERNEL, **gate}
    want, want_state = openkda.chunk_kda(*inputs, scale=0.3, initial_state=state, output_final_state=True, **common)
    got, got_state = fla.chunk_kda(
        *inputs, 0.3, state, True, safe_gate=True, cu_seqlens_cpu=cu, use_graph=True, max_num_seqs=8, **common
    )
    assert torch.equal(got, want)
    assert torch.equal(got_state, want_state)
    grads = torch.autograd.grad(got.sum() + got_state.sum(), leaves)
    for a, b in zip(grads, torch.autograd.grad(want.sum() + want_state.sum(), leaves), strict=True):
        assert torch.equal(a, b)


@torch.no_grad()
def test_fused_recurrent_kda_means_what_openkda_means(inputs: Any, gate: Any):
    state = torch.randn(1, 4, 8, 12)
    want = openkda.recurrent_kda(
        *inputs, scale=0.3, initial_state=state, output_final_state=True, **IN_KERNEL, **gate, allow_neg_eigval=True
    )
    got = fla.fused_recurrent_kda(*inputs, *gate.values(), 0.3, state, True, True, True, True, True)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def test_disable_recompute_is_save_intermediates(inputs: Any, monkeypatch: pytest.MonkeyPatch):
    seen: dict[str, Any] = {}
    monkeypatch.setattr(ops.chunk, "chunk_kda", lambda *_, **options: seen.update(options))
    fla.chunk_kda(*inputs, disable_recompute=True)
    assert seen["save_intermediates"] is True


def test_gate_parameters_come_in_any_shape_and_float(inputs: Any, gate: Any):
    want, _ = openkda.chunk_kda(*inputs, **IN_KERNEL, A_log=gate["A_log"].bfloat16().float(), dt_bias=gate["dt_bias"])
    got, _ = fla.chunk_kda(
        *inputs, **IN_KERNEL, A_log=gate["A_log"].bfloat16().view(1, 1, 4, 1), dt_bias=gate["dt_bias"].view(4, 8)
    )
    assert torch.equal(got, want)


def test_without_a_log_the_rate_is_1(inputs: Any):
    g = -4.0 * inputs[3].sigmoid()
    want, _ = openkda.chunk_kda(*inputs[:3], g, inputs[4], use_qk_l2norm_in_kernel=True)
    got, _ = fla.chunk_kda(*inputs, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, lower_bound=-4.0)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(fla.fused_kda_gate(inputs[3], lower_bound=-4.0), g)


def test_fused_kda_gate_is_the_formula(inputs: Any, gate: Any):
    raw = inputs[3][0, 0].bfloat16()  # [HV, K]
    z = raw.float() + gate["dt_bias"].view(4, 8)
    want = -gate["A_log"].exp()[:, None] * torch.nn.functional.softplus(z)
    got = fla.fused_kda_gate(raw, gate["A_log"], gate["dt_bias"])
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want)
    assert fla.fused_kda_gate(raw, gate["A_log"], output_dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "error, text, options",
    [
        (NotImplementedError, "return_intermediate_states must be False", {"return_intermediate_states": True}),
        (TypeError, "cp_context must come from build_cp_context", {"cp_context": object()}),
        (ValueError, "chunk_size must be one of 32, 64", {"chunk_size": 16}),
        (ValueError, r"lower_bound must be in \[-5, 0\) with safe_gate", {"safe_gate": True, **IN_KERNEL}),
        (ValueError, r"lower_bound must", {"lower_bound": -5.0}),
        (TypeError, "A_log", IN_KERNEL),
        (TypeError, "head_first must be left out", {"head_first": True}),
        (ValueError, "transpose_state_layout", {"transpose_state_layout": True, "state_v_first": True}),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
def test_chunk_kda_refuses_and_names(error: type[Exception], text: str, options: dict[str, Any], inputs: Any):
    with pytest.raises(error, match=text):
        fla.chunk_kda(*inputs, **options)


def test_old_name_of_state_v_first(inputs: Any):
    assert fla.chunk_kda(*inputs, output_final_state=True, transpose_state_layout=True)[1].shape == (1, 4, 12, 8)


def test_fused_recurrent_kda_refuses_gradients_and_strengths_per_channel(inputs: Any):
    with pytest.raises(ValueError, match="train with chunk_kda"):
        fla.fused_recurrent_kda(inputs[0].requires_grad_(), *inputs[1:])
    with pytest.raises(ValueError, match="beta must have shape"):
        fla.fused_recurrent_kda(*(x.detach() for x in inputs[:4]), torch.rand(1, 90, 4, 12))
    with pytest.raises(TypeError, match="ssm_state_indices must be left out"):
        fla.fused_recurrent_kda(*inputs, ssm_state_indices=None)


def test_fused_kda_gate_refuses_a_vector():
    with pytest.raises(ValueError, match=r"g must have shape \[.., HV, K\]"):
        fla.fused_kda_gate(torch.randn(3))


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'chunk_gla'"):
        fla.chunk_gla  # noqa: B018
