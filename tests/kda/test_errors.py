"""What the operators refuse, and the sentence: `<op>: <argument> must <rule>, got <value>; <what to do>`.

Both public operators share one contract, so every case runs on both. Sizes: B 1, T 5, H 2, HV 4, K 8, V 6.
"""

from __future__ import annotations

import math
from array import array

import pytest
import torch

from openkda import chunk_kda, recurrent_kda, testing
from openkda.errors import BackendUnavailable

B, T, H, HV, K, V = 1, 5, 2, 4, 8, 6
OFFSETS = torch.tensor([0, 2, 5])


def valid() -> dict[str, object]:
    return {
        "q": torch.zeros(B, T, H, K),
        "k": torch.zeros(B, T, H, K),
        "v": torch.zeros(B, T, HV, V),
        "g": torch.zeros(B, T, HV, K),
        "beta": torch.zeros(B, T, HV),
    }


def gated(**more: object) -> dict[str, object]:
    return {"use_gate_in_kernel": True, "A_log": torch.zeros(HV)} | more


def batch_of_two() -> dict[str, object]:
    return {name: x.repeat(2, *[1] * (x.dim() - 1)) for name, x in valid().items()}


# name: (changed arguments, error, message after "<op>: ")
REFUSED: dict[str, tuple[dict[str, object], type[Exception], str]] = {
    # ---- kinds and ranks
    "q is a list": ({"q": [1.0]}, TypeError, "q must be a tensor, got list"),
    "q is a buffer": ({"q": array("f", [1.0])}, TypeError, "q must be a tensor, got array"),
    "v is None": ({"v": None}, TypeError, "v must be a tensor, got NoneType"),
    "8-bit floats": (
        {name: x.to(torch.float8_e4m3fn) for name, x in valid().items()},
        TypeError,
        "q must have dtype float32 or float64 or float16 or bfloat16, got float8_e4m3fn; cast it first",
    ),
    "q has no batch": ({"q": torch.zeros(T, H, K)}, ValueError, r"q must have shape \[B, T, H, K\], got \[5, 2, 8\]"),
    "k has no heads": ({"k": torch.zeros(B, T, K)}, ValueError, r"k must have shape \[B, T, H, K\], got \[1, 5, 8\]"),
    "v has no heads": ({"v": torch.zeros(B, T, V)}, ValueError, r"v must have shape \[B, T, HV, V\], got \[1, 5, 6\]"),
    # ---- shapes that must agree
    "k of another K": (
        {"k": torch.zeros(B, T, H, K + 1)},
        ValueError,
        r"k must have shape \[B, T, H, K\] = \[1, 5, 2, 8\], got \[1, 5, 2, 9\]; k follows q",
    ),
    "k of other heads": (
        {"k": torch.zeros(B, T, 1, K)},
        ValueError,
        r"k must have shape .* = \[1, 5, 2, 8\], got \[1, 5, 1, 8\]",
    ),
    "v of another T": (
        {"v": torch.zeros(B, T + 1, HV, V)},
        ValueError,
        r"v must have shape \[B, T, HV, V\] = \[1, 5, 4, 6\], got \[1, 6, 4, 6\]",
    ),
    "heads that do not divide": (
        {"v": torch.zeros(B, T, 3, V), "g": torch.zeros(B, T, 3, K), "beta": torch.zeros(B, T, 3)},
        ValueError,
        "v must have a number of heads HV that is a multiple of q's H = 2, got 3",
    ),
    "fewer value heads": (
        {"v": torch.zeros(B, T, 1, V), "g": torch.zeros(B, T, 1, K), "beta": torch.zeros(B, T, 1)},
        ValueError,
        "v must have a number of heads HV that is a multiple of q's H = 2, got 1",
    ),
    "g by token and head": (
        {"g": torch.zeros(B, T, HV)},
        ValueError,
        r"g must have shape \[B, T, HV, K\] = \[1, 5, 4, 8\], got \[1, 5, 4\]; one log-decay per token, value head",
    ),
    "g of q's heads": (
        {"g": torch.zeros(B, T, H, K)},
        ValueError,
        r"g must have shape .* = \[1, 5, 4, 8\], got \[1, 5, 2, 8\]",
    ),
    "beta of q's heads": (
        {"beta": torch.zeros(B, T, H)},
        ValueError,
        r"beta must have shape \[B, T, HV\] = \[1, 5, 4\], got \[1, 5, 2\]; beta follows the heads of v, not of q",
    ),
    "beta by channel": (
        {"beta": torch.zeros(B, T, HV, V)},
        ValueError,
        r"beta must have shape .* = \[1, 5, 4\], got \[1, 5, 4, 6\]",
    ),
    "K above 256": (
        {"q": torch.zeros(B, T, H, 257), "k": torch.zeros(B, T, H, 257), "g": torch.zeros(B, T, HV, 257)},
        ValueError,
        "K .*must be between 1 and 256, got 257",
    ),
    "V above 256": ({"v": torch.zeros(B, T, HV, 512)}, ValueError, "V .*must be between 1 and 256, got 512"),
    "K of 0": (
        {"q": torch.zeros(B, T, H, 0), "k": torch.zeros(B, T, H, 0), "g": torch.zeros(B, T, HV, 0)},
        ValueError,
        "K .*must be between 1 and 256, got 0",
    ),
    # ---- dtypes and devices
    "q of integers": (
        {"q": torch.zeros(B, T, H, K, dtype=torch.int64)},
        TypeError,
        "q must have a floating dtype, got int64",
    ),
    "beta of integers": (
        {"beta": torch.zeros(B, T, HV, dtype=torch.int32)},
        TypeError,
        "beta must have a floating dtype, got int32",
    ),
    "g of booleans": (
        {"g": torch.zeros(B, T, HV, K, dtype=torch.bool)},
        TypeError,
        "g must have a floating dtype, got bool",
    ),
    "k of another dtype": (
        {"k": torch.zeros(B, T, H, K, dtype=torch.bfloat16)},
        TypeError,
        "k must have dtype float32, got bfloat16; q, k and v share one dtype",
    ),
    "v of another dtype": (
        {"v": torch.zeros(B, T, HV, V, dtype=torch.float64)},
        TypeError,
        "v must have dtype float32, got float64",
    ),
    "v on another device": (
        {"v": torch.zeros(B, T, HV, V, device="meta")},
        ValueError,
        "v must be on q's device cpu, got meta",
    ),
    "beta on another device": (
        {"beta": torch.zeros(B, T, HV, device="meta")},
        ValueError,
        "beta must be on q's device cpu, got meta",
    ),
    "offsets on another device": (
        {"cu_seqlens": OFFSETS.to("meta")},
        ValueError,
        "cu_seqlens must be on q's device cpu, got meta; move it there first",
    ),
    # ---- packed offsets
    "offsets as a list": ({"cu_seqlens": [0, 5]}, TypeError, "cu_seqlens must be a tensor, got list"),
    "offsets of floats": (
        {"cu_seqlens": OFFSETS.float()},
        TypeError,
        "cu_seqlens must have dtype int32 or int64, got float32",
    ),
    "offsets of rank 2": (
        {"cu_seqlens": OFFSETS[None]},
        ValueError,
        r"cu_seqlens must have shape \[N\+1\], got \[1, 3\]",
    ),
    "one offset": ({"cu_seqlens": OFFSETS[:1]}, ValueError, r"cu_seqlens must hold at least 2 offsets \[N\+1\], got 1"),
    "a batch with offsets": (
        batch_of_two() | {"cu_seqlens": OFFSETS},
        ValueError,
        "batch size must be 1 with cu_seqlens, got 2; fold the batch into the token axis",
    ),
    # ---- state
    "state in bf16": (
        {"initial_state": torch.zeros(B, HV, K, V, dtype=torch.bfloat16)},
        TypeError,
        "initial_state must have dtype float32, got bfloat16; states are kept in fp32",
    ),
    "state in fp64 beside fp32": (
        {"initial_state": torch.zeros(B, HV, K, V, dtype=torch.float64)},
        TypeError,
        "initial_state must have dtype float32, got float64",
    ),
    "state is a number": ({"initial_state": 0.0}, TypeError, "initial_state must be a tensor, got float"),
    "state with V first": (
        {"initial_state": torch.zeros(B, HV, V, K)},
        ValueError,
        r"initial_state must have shape \[N, HV, K, V\] = \[1, 4, 8, 6\], got \[1, 4, 6, 8\]",
    ),
    "state with K first": (
        {"initial_state": torch.zeros(B, HV, K, V), "state_v_first": True},
        ValueError,
        r"initial_state must have shape \[N, HV, V, K\] = \[1, 4, 6, 8\], got \[1, 4, 8, 6\]",
    ),
    "one state for two sequences": (
        {"initial_state": torch.zeros(1, HV, K, V), "cu_seqlens": OFFSETS},
        ValueError,
        r"initial_state must have shape .* = \[2, 4, 8, 6\], got \[1, 4, 8, 6\]",
    ),
    "state of q's heads": (
        {"initial_state": torch.zeros(B, H, K, V)},
        ValueError,
        r"initial_state must have shape .* = \[1, 4, 8, 6\], got \[1, 2, 8, 6\]",
    ),
    "state on another device": (
        {"initial_state": torch.zeros(B, HV, K, V, device="meta")},
        ValueError,
        "initial_state must be on q's device cpu, got meta",
    ),
    # ---- numbers and switches
    "scale 0": ({"scale": 0}, ValueError, "scale must be finite and above 0, got 0"),
    "scale negative": ({"scale": -0.5}, ValueError, "scale must be finite and above 0, got -0.5"),
    "scale NaN": ({"scale": math.nan}, ValueError, "scale must be finite and above 0, got nan"),
    "scale infinite": ({"scale": math.inf}, ValueError, "scale must be finite and above 0, got inf"),
    "scale a string": ({"scale": "1"}, TypeError, "scale must be a number, got str"),
    "scale a tensor": ({"scale": torch.tensor(1.0)}, TypeError, "scale must be a number, got Tensor"),
    "scale True": ({"scale": True}, TypeError, "scale must be a number, got bool"),
    "a switch of None": (
        {"use_qk_l2norm_in_kernel": None},
        TypeError,
        "use_qk_l2norm_in_kernel must be a bool, got NoneType",
    ),
    "a switch of 1": ({"state_v_first": 1}, TypeError, "state_v_first must be a bool, got int"),
    "output_final_state of 1": ({"output_final_state": 1}, TypeError, "output_final_state must be a bool, got int"),
    "negative eigenvalues of a ready beta": (
        {"allow_neg_eigval": True},
        ValueError,
        "allow_neg_eigval must be False without use_beta_sigmoid_in_kernel, got True",
    ),
    # ---- gate
    "A_log without the gate": (
        {"A_log": torch.zeros(HV)},
        ValueError,
        "A_log must be None without use_gate_in_kernel, got Tensor; .*use_gate_in_kernel=True",
    ),
    "dt_bias without the gate": (
        {"dt_bias": torch.zeros(HV, K)},
        ValueError,
        "dt_bias must be None without use_gate_in_kernel",
    ),
    "lower_bound without the gate": (
        {"lower_bound": -5.0},
        ValueError,
        "lower_bound must be None without use_gate_in_kernel, got -5.0",
    ),
    "the gate without A_log": ({"use_gate_in_kernel": True}, TypeError, "A_log must be a tensor, got NoneType"),
    "the bounded gate without A_log": (
        {"use_gate_in_kernel": True, "lower_bound": -5.0},
        TypeError,
        "A_log must be a tensor, got NoneType",
    ),
    "A_log of q's heads": (gated(A_log=torch.zeros(H)), ValueError, r"A_log must have shape \[HV\] = \[4\], got \[2\]"),
    "A_log in bf16": (
        gated(A_log=torch.zeros(HV).bfloat16()),
        TypeError,
        "A_log must have dtype float32, got bfloat16",
    ),
    "dt_bias by head": (
        gated(dt_bias=torch.zeros(HV)),
        ValueError,
        r"dt_bias must have shape \[HV, K\] = \[4, 8\] or \[HV\*K\] = \[32\], got \[4\]",
    ),
    "dt_bias in bf16": (
        gated(dt_bias=torch.zeros(HV, K).bfloat16()),
        TypeError,
        "dt_bias must have dtype float32, got bfloat16",
    ),
    "dt_bias on another device": (
        gated(dt_bias=torch.zeros(HV, K, device="meta")),
        ValueError,
        "dt_bias must be on g's device cpu, got meta",
    ),
    "lower_bound 0": (gated(lower_bound=0), ValueError, "lower_bound must be finite and below 0, got 0"),
    "lower_bound positive": (gated(lower_bound=5.0), ValueError, "lower_bound must be finite and below 0, got 5.0"),
    "lower_bound a string": (gated(lower_bound="-5"), TypeError, "lower_bound must be a number or None, got str"),
    # ---- backend
    "an unknown backend": (
        {"backend": "cuda"},
        ValueError,
        "backend must be one of 'auto', 'triton', 'eager', 'reference', got 'cuda'",
    ),
}


@pytest.mark.parametrize("op", [chunk_kda, recurrent_kda], ids=lambda op: op.__name__)
@pytest.mark.parametrize("change, error, message", REFUSED.values(), ids=REFUSED.keys())
def test_operator_refuses(op, change, error, message):
    with pytest.raises(error, match=f"^{op.__name__}: {message}"):
        op(**valid() | change)


@pytest.mark.parametrize("op", [chunk_kda, recurrent_kda], ids=lambda op: op.__name__)
@pytest.mark.parametrize("backend", ["auto", "eager", "reference"])
def test_every_backend_refuses_the_same(op, backend):
    with pytest.raises(ValueError, match=f"^{op.__name__}: beta must have shape"):
        op(**valid() | {"beta": torch.zeros(B, T, H)}, backend=backend)


@pytest.mark.parametrize("op", [chunk_kda, recurrent_kda], ids=lambda op: op.__name__)
@pytest.mark.parametrize("name", ["A_Log", "use_gate", "chunk_size", "safe_gate", "head_first", "operand_dtype"])
def test_operator_refuses_unknown_keywords(op, name):
    # A misspelt A_Log= beside lower_bound= must not drop the parameter in silence.
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        op(**valid(), **{name: None})


@pytest.mark.parametrize("op", [chunk_kda, recurrent_kda], ids=lambda op: op.__name__)
def test_operator_takes_keywords_only_after_beta(op):
    with pytest.raises(TypeError, match="positional"):
        op(*valid().values(), 1.0)


@pytest.mark.parametrize("op", [chunk_kda, recurrent_kda], ids=lambda op: op.__name__)
def test_operator_takes_what_is_valid(op):
    # The cases above fail for the one thing that they change.
    for more in ({}, gated(dt_bias=torch.zeros(HV, K)), gated(lower_bound=-5), {"cu_seqlens": OFFSETS}, {"scale": 1}):
        o, final = op(**valid() | more)
        assert o.shape == (B, T, HV, V)
        assert final is None


@pytest.mark.parametrize("op", [chunk_kda, recurrent_kda], ids=lambda op: op.__name__)
def test_operator_takes_a_numpy_scale(op):
    # np.float64 is a float, and what head_dim ** -0.5 gives when head_dim came from numpy.
    np = pytest.importorskip("numpy")
    o, _ = op(**valid(), scale=np.float64(0.5))
    assert o.shape == (B, T, HV, V)


def test_chunk_kda_refuses_triton_on_a_cpu_with_the_reason():
    with pytest.raises(
        BackendUnavailable, match=r'^chunk_kda: backend="triton" (cannot run|needs a GPU).*; use backend="eager"'
    ):
        chunk_kda(**valid(), backend="triton")


def test_a_state_pool_belongs_to_recurrent_kda():
    with pytest.raises(TypeError, match="unexpected keyword argument 'state_indices'"):
        chunk_kda(**valid(), state_indices=torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias"])
def test_recurrent_kda_refuses_what_needs_a_gradient(name):
    arguments = valid() | {"initial_state": torch.zeros(B, HV, K, V)} | gated(dt_bias=torch.zeros(HV, K))
    arguments[name].requires_grad_()
    with pytest.raises(
        ValueError, match=f"^recurrent_kda: {name} must not need a gradient, got requires_grad=True; .*chunk_kda"
    ):
        recurrent_kda(**arguments)


def test_recurrent_kda_takes_parameters_where_no_gradient_is_recorded():
    arguments = valid() | gated(dt_bias=torch.zeros(HV, K).requires_grad_())
    with torch.no_grad():
        o, _ = recurrent_kda(**arguments)
    assert not o.requires_grad


def test_a_call_like_one_that_passed_is_still_checked_where_it_differs(monkeypatch):
    inputs = testing.make_inputs(T=3, H=1, K=8, gate="softplus", dtype="float32")
    call = inputs.kwargs | inputs.tensors
    chunk_kda(**call)
    with pytest.raises(TypeError, match="use_gate_in_kernel must be a bool, got int"):
        chunk_kda(**call | {"use_gate_in_kernel": 1})
    with pytest.raises(TypeError, match="scale must be a number, got bool"):
        chunk_kda(**call | {"scale": True})
    with pytest.raises(TypeError, match="v must have dtype"):
        chunk_kda(**call | {"v": call["v"].double()})
    ready = testing.make_inputs(T=3, H=1, K=8, gate="given", dtype="float32")
    call = ready.kwargs | ready.tensors
    chunk_kda(**call)
    monkeypatch.setenv("OPENKDA_CHECK", "1")
    with pytest.raises(ValueError, match="g must be <= 0 everywhere"):
        chunk_kda(**call | {"g": -call["g"]})
