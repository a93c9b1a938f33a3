"""The eager operator against the definition: outputs, state, every gradient, at lengths, gates, layouts that hurt."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from openkda import chunk_kda, testing
from openkda.kda import eager

# One token, one short of / equal to / one past a 16-row sub-block and a 64-row chunk, two chunks and one, eight chunks.
LENGTHS = [1, 15, 16, 17, 63, 64, 65, 129, 500]
# Each family at ordinary strength, the three constant gates, and the two mixtures.
GATES = ["softplus", "bounded", "none", "strong", "beside"]
EVERY_GATE = sorted(testing.GATES)
PACKED = {
    "empty first and middle": ([0, 0, 64, 64, 65], 65),
    "partial chunks": ([0, 15, 100, 300], 300),
    "one token": ([0, 1], 1),
    "one token each": ([0, 1, 2, 3], 3),
    "ends inside chunks": ([0, 63, 127, 191], 191),
    "all empty": ([0, 0, 0], 0),
    "all empty, tail": ([0, 0, 0], 20),
    "tail": ([0, 30, 30, 95], 150),
    "tail of one token": ([0, 64], 65),
    "127 short sequences": ([0, *torch.tensor([1 + (7 * i) % 5 for i in range(127)]).cumsum(0).tolist()], 400),
}


def check(inputs: testing.KDAInputs, limit: float) -> None:
    testing.assert_close(testing.run(eager.chunk_kda, inputs), testing.oracle(inputs), limit)


# ---- against the definition
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("T", LENGTHS)
def test_eager_equals_the_reference_in_fp64(T, gate):
    check(testing.make_inputs(T=T, H=1, HV=2, K=24, V=40, gate=gate), testing.FP64_LIMIT)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("T", [17, 65, 500])
def test_eager_meets_the_fp32_limit(T, gate):
    check(testing.make_inputs(T=T, H=1, HV=2, K=24, V=40, gate=gate, dtype="float32"), testing.FP32_LIMIT)


@pytest.mark.parametrize("gate", sorted(set(testing.GATES) - set(GATES)))
@pytest.mark.parametrize("dtype, limit", [("float64", testing.FP64_LIMIT), ("float32", testing.FP32_LIMIT)])
def test_eager_is_exact_for_every_gate(gate, dtype, limit):
    check(testing.make_inputs(T=150, H=1, HV=2, K=24, V=40, gate=gate, dtype=dtype), limit)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("weak", [0.0, -1e-4])
def test_eager_is_exact_when_minus_1000_meets_almost_no_decay(share, weak):
    inputs = testing.make_inputs(T=130, K=24, V=40, gate="none", dtype="float32")
    strong = torch.rand(inputs.g.shape, generator=torch.Generator().manual_seed(1)) < share
    check(replace(inputs, g=torch.where(strong, -1000.0, weak)), testing.FP32_LIMIT)


@pytest.mark.parametrize("strength", [-0.01, -1.0, -5.0, -100.0])
def test_eager_is_exact_at_constant_gates(strength):
    inputs = testing.make_inputs(T=130, K=24, V=40, gate="none", dtype="float32")
    check(replace(inputs, g=torch.full_like(inputs.g, strength)), testing.FP32_LIMIT)


@pytest.mark.parametrize("gate", ["softplus", "beside"])
@pytest.mark.parametrize("offsets, T", PACKED.values(), ids=PACKED.keys())
def test_eager_equals_the_reference_on_packed_sequences(offsets, T, gate):
    check(testing.make_inputs(T=T, H=1, HV=2, K=12, V=20, gate=gate, cu_seqlens=offsets), testing.FP64_LIMIT)


@pytest.mark.slow
def test_eager_equals_the_reference_on_127_sequences_of_16_32_and_64():
    lengths = [(16, 32, 64)[i % 3] for i in range(127)]
    offsets = testing.packed_offsets(lengths)
    inputs = testing.make_inputs(T=sum(lengths), H=2, K=16, cu_seqlens=offsets)
    want = testing.run(
        testing.oracles.reference.chunk_kda, inputs
    )  # beyond oracle's limit for the token loop, on purpose
    testing.assert_close(testing.run(eager.chunk_kda, inputs), want, testing.FP64_LIMIT)


@pytest.mark.parametrize("K, V", [(1, 1), (16, 256), (256, 16), (60, 100), (100, 60), (17, 33), (128, 128)])
def test_eager_takes_any_head_sizes(K, V):
    check(testing.make_inputs(T=70, H=1, HV=1, K=K, V=V), testing.FP64_LIMIT)


@pytest.mark.parametrize("H, HV", [(1, 1), (2, 4), (1, 4), (3, 3), (2, 8)])
def test_eager_takes_grouped_value_heads(H, HV):
    check(testing.make_inputs(B=2, T=70, H=H, HV=HV, K=8, V=12), testing.FP64_LIMIT)


@pytest.mark.parametrize(
    "options",
    [
        {"use_qk_l2norm_in_kernel": True},
        {"use_beta_sigmoid_in_kernel": True},
        {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True},
        {"state_v_first": True},
        {"scale": 1},
        {"scale": 0.1},
        {
            "use_qk_l2norm_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "allow_neg_eigval": True,
            "state_v_first": True,
        },
    ],
    ids=lambda options: "+".join(f"{name}={value}" for name, value in options.items()),
)
@pytest.mark.parametrize("gate", ["bounded", "given"])
def test_eager_honours_every_option(options, gate):
    check(testing.make_inputs(B=2, T=70, H=1, HV=2, K=12, V=20, gate=gate, **options), testing.FP64_LIMIT)


@pytest.mark.parametrize("initial_state", [True, False], ids=["initial state", "no initial state"])
def test_eager_carries_the_state_between_two_calls(initial_state):
    # A sequence cut anywhere, also inside a chunk, is one sequence.
    inputs = testing.make_inputs(T=130, K=12, V=20, initial_state=initial_state)
    o, final = eager.chunk_kda(*inputs.args, **inputs.kwargs)
    for cut in (1, 64, 75, 129):
        first, mid = eager.chunk_kda(*(x[:, :cut] for x in inputs.args), **inputs.kwargs)
        second, last = eager.chunk_kda(*(x[:, cut:] for x in inputs.args), **inputs.kwargs | {"initial_state": mid})
        got = {"o": torch.cat([first, second], 1), "final_state": last}
        testing.assert_close(got, {"o": o, "final_state": final}, testing.FP64_LIMIT)


def test_eager_in_fp64_is_an_oracle_for_long_sequences():
    # The recurrence ends at 2048 tokens in testing.oracle; here both are run at that length.
    check(testing.make_inputs(T=2048, H=1, HV=1, K=8, V=8, gate="layer_init"), testing.FP64_LIMIT)


# ---- keys that strain the triangular inverse
ALIKE = {"cos 0.5": 1.0, "cos 0.9": 3.0, "cos 0.99": 10.0, "equal keys": 1e6}


@pytest.mark.parametrize("gate", ["none", "slow"])
@pytest.mark.parametrize("alike", ALIKE.values(), ids=ALIKE.keys())
def test_eager_inverts_accurately_for_keys_that_are_alike(alike, gate):
    check(testing.make_inputs(T=130, K=64, V=32, gate=gate, alike=alike, beta=1.0, dtype="float32"), testing.FP32_LIMIT)


@pytest.mark.parametrize("alike", ALIKE.values(), ids=ALIKE.keys())
def test_eager_is_stable_when_equal_keys_reflect_the_state(alike):
    # beta = 2 along one key: 64 reflections a chunk. The inverse has entries of +-2, so an error e in Akk, a rounding,
    # becomes about 64 * 4 * e whatever the algorithm: 1e-5 a chunk in fp32, beyond its limit from cosine 0.9 on. fp64
    # shows that nothing else is lost.
    check(testing.make_inputs(T=130, K=64, V=32, gate="slow", alike=alike, beta=2.0), testing.FP64_LIMIT)


@pytest.mark.parametrize("alike", [0.0, 1.0])
def test_eager_takes_write_strengths_up_to_two(alike):
    inputs = testing.make_inputs(
        T=130,
        K=32,
        V=16,
        gate="slow",
        alike=alike,
        dtype="float32",
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=True,
    )
    inputs = replace(inputs, beta=3 * inputs.beta)
    assert (2 * inputs.beta.sigmoid()).max() > 1.98
    check(inputs, testing.FP32_LIMIT)


# ---- 16-bit inputs
@pytest.mark.parametrize("gate", EVERY_GATE)
def test_eager_is_within_the_budget_on_bf16_inputs(gate):
    inputs = testing.make_inputs(T=130, H=1, HV=2, K=32, V=32, gate=gate, dtype="bfloat16")
    testing.assert_within_budget(testing.run(eager.chunk_kda, inputs), testing.oracle(inputs), testing.rounded(inputs))


@pytest.mark.parametrize("gate", EVERY_GATE)
def test_rounded_operands_cost_what_16_bits_cost(gate):
    # fp32 inputs, so that all of the error comes from the operands: a bf16 operand is off by 2**-9 at most, about 1e-3
    # RMS. An error far below means that operands were not rounded, far above that a cancelling sum or the inverse was.
    inputs = testing.make_inputs(T=130, H=1, HV=2, K=32, V=32, gate=gate, dtype="float32")
    exact, rounded = testing.oracle(inputs), testing.rounded(inputs)
    for name in ("o", "dq", "dk", "dv", "dbeta"):
        assert testing.relative_rms(rounded[name], exact[name]) < 2e-2, name
    assert testing.relative_rms(rounded["o"], exact["o"]) > 1e-4 or gate == "strong"


class _Matmuls(TorchDispatchMode):
    """Records the operands of every matrix product, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.operands: list[Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.baddbmm, torch.ops.aten.addmm):
            self.operands += list(args[-2:])
        return func(*args, **kwargs or {})


def test_operand_dtype_rounds_every_matmul_operand_forward_and_backward():
    # K and V are no size of a chunk or sub-block, so a product with such an axis is not one of the inverse, which stays
    # in fp32.
    inputs = testing.make_inputs(T=130, H=1, HV=2, K=24, V=40, dtype="float32")
    with _Matmuls() as matmuls:
        testing.rounded(inputs)
    with_heads = [x for x in matmuls.operands if {24, 40} & set(x.shape[-2:])]
    assert len(with_heads) > 20
    assert all(torch.equal(x, x.bfloat16().to(x.dtype)) for x in with_heads)


def test_operand_dtype_rounds_to_fp16_as_well():
    inputs = testing.make_inputs(T=65, dtype="float32", gate="given")
    exact = testing.oracle(inputs)
    bf16, fp16 = (
        testing.relative_rms(testing.rounded(inputs, dtype)["o"], exact["o"]) for dtype in ("bfloat16", "float16")
    )
    assert fp16 < bf16 / 4  # three more bits


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_eager_returns_the_dtypes_it_was_given(dtype):
    inputs = testing.make_inputs(T=20, dtype=dtype)
    result = testing.run(eager.chunk_kda, inputs)
    wide = torch.float64 if dtype == "float64" else torch.float32
    assert result["o"].dtype == inputs.v.dtype
    assert result["final_state"].dtype == wide
    for name, tensor in inputs.tensors.items():
        assert result[f"d{name}"].dtype == tensor.dtype, name


# ---- nothing is formed that grows faster than T
class _Largest(TorchDispatchMode):
    """The largest tensor that any operation returns, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        self.numel = max([self.numel, *(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))])
        return out


def test_eager_forms_no_decay_tensor_of_chunk_by_chunk_by_key():
    T, H, K, chunk = 512, 1, 32, 64
    inputs = testing.make_inputs(T=T, H=H, K=K, V=K, dtype="float32")
    with _Largest() as largest:
        testing.run(eager.chunk_kda, inputs)
    assert largest.numel < T * H * chunk * K // 4


def test_eager_memory_is_linear_in_T():
    def saved(T: int) -> int:
        sizes: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        inputs = testing.make_inputs(T=T, H=1, K=16, V=16, dtype="float32")
        leaves = [x.requires_grad_() for x in inputs.args]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = eager.chunk_kda(*leaves, **inputs.kwargs)
        del out
        gc.collect()
        return sum(sizes.values())

    small, large = saved(512), saved(2048)
    assert small > 0
    assert large < 4.2 * small


# ---- autograd manners
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"])
def test_eager_gives_a_gradient_to_the_one_tensor_that_asks(name):
    inputs = testing.make_inputs(T=70, H=1, HV=2, K=8, V=12)
    want = testing.run(eager.chunk_kda, inputs)[f"d{name}"]
    leaves = {n: x.detach().requires_grad_(n == name) for n, x in inputs.tensors.items()}
    only = replace(inputs, **leaves)
    o, final = eager.chunk_kda(*only.args, **only.kwargs)
    loss = (o * inputs.grad_o).sum() + (final * inputs.grad_final_state).sum()
    loss.backward()
    torch.testing.assert_close(leaves[name].grad, want, rtol=1e-12, atol=1e-14)
    assert [n for n, x in leaves.items() if x.grad is not None] == [name]


def test_eager_records_nothing_when_no_tensor_asks():
    inputs = testing.make_inputs(T=20)
    o, final = eager.chunk_kda(*inputs.args, **inputs.kwargs)
    assert not o.requires_grad
    assert not final.requires_grad


@pytest.mark.parametrize("result", ["o", "final_state"])
def test_eager_gradient_of_one_result_alone(result):
    inputs = testing.make_inputs(T=70, H=1, HV=2, K=8, V=12)
    silent = {"o": "grad_final_state", "final_state": "grad_o"}[result]
    want = testing.oracle(replace(inputs, **{silent: torch.zeros_like(getattr(inputs, silent))}))
    leaves = {n: x.detach().requires_grad_() for n, x in inputs.tensors.items()}
    call = replace(inputs, **leaves)
    o, final = eager.chunk_kda(*call.args, **call.kwargs)
    ((o * inputs.grad_o) if result == "o" else (final * inputs.grad_final_state)).sum().backward()
    got = {f"d{n}": torch.zeros_like(x) if x.grad is None else x.grad for n, x in leaves.items()}
    testing.assert_close(got, {n: want[n] for n in got}, testing.FP64_LIMIT)


def test_eager_leaves_its_inputs_alone():
    inputs = testing.make_inputs(T=70)
    before = {n: x.clone() for n, x in inputs.tensors.items()}
    testing.run(eager.chunk_kda, inputs)
    assert all(torch.equal(x, before[n]) for n, x in inputs.tensors.items())


@pytest.mark.parametrize("offsets", [None, [0, 15, 15, 80]], ids=["dense", "packed"])
def test_eager_takes_non_contiguous_inputs(offsets):
    sizes = {"T": 80, "H": 2, "HV": 4, "K": 8, "V": 12, "cu_seqlens": offsets}
    contiguous, strided = testing.make_inputs(**sizes), testing.make_inputs(**sizes, layout="strided")
    assert not strided.q.is_contiguous()
    want, got = testing.run(eager.chunk_kda, contiguous), testing.run(eager.chunk_kda, strided)
    testing.assert_close(got, want, testing.FP64_LIMIT)


def test_eager_takes_expanded_inputs():
    # One gate for all channels, one beta for all heads: stride 0.
    inputs = testing.make_inputs(B=2, T=70, gate="given")
    g, beta = inputs.g[..., :1].expand_as(inputs.g), inputs.beta[..., :1].expand_as(inputs.beta)
    call = replace(inputs, g=g, beta=beta)
    check(call, testing.FP64_LIMIT)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_eager_of_no_tokens_returns_the_state_bitwise(packed):
    inputs = testing.make_inputs(T=0, cu_seqlens=[0, 0] if packed else None, dtype="float32")
    result = testing.run(eager.chunk_kda, inputs)
    assert result["o"].shape == (1, 0, 2, 16)
    assert torch.equal(result["final_state"], inputs.initial_state)
    assert torch.equal(result["dinitial_state"], inputs.grad_final_state)
    assert not result["dA_log"].any()


@pytest.mark.parametrize("fn", [eager.chunk_kda, testing.oracles.reference.chunk_kda], ids=["eager", "reference"])
@pytest.mark.parametrize("T", [0, 1])
def test_final_state_has_memory_of_its_own(T, fn):
    inputs = testing.make_inputs(T=T, dtype="float32")
    before = inputs.initial_state.clone()
    _, final = fn(*inputs.args, **inputs.kwargs)
    final.fill_(7)
    assert torch.equal(inputs.initial_state, before)


def test_eager_chooses_its_own_precision_inside_autocast():
    # The region holds the forward only, as torch asks for.
    def autocast(*args: Tensor, **kwargs: object) -> object:
        with torch.autocast("cpu", torch.bfloat16):
            return eager.chunk_kda(*args, **kwargs)

    inputs = testing.make_inputs(T=70, dtype="float32")
    inside, outside = testing.run(autocast, inputs), testing.run(eager.chunk_kda, inputs)
    assert all(torch.equal(x, outside[name]) for name, x in inside.items())


# ---- the ends of the number range
def test_fp16_inputs_meet_a_large_state_and_a_tiny_gradient():
    # A state of 65536 is infinite in fp16, a gradient of 2**-25 is 0 there: neither may be narrowed.
    inputs = testing.make_inputs(T=70, gate="slow", dtype="float16", beta=0.01)
    inputs = replace(
        inputs,
        q=1e-4 * inputs.q,
        initial_state=torch.full_like(inputs.initial_state, 65536.0),
        grad_o=torch.zeros_like(inputs.grad_o),
        grad_final_state=torch.full_like(inputs.grad_final_state, 2.0**-25),
    )
    result = testing.run(eager.chunk_kda, inputs)
    assert all(x.isfinite().all() for x in result.values())
    wide = {name: result[name] for name in ("final_state", "dinitial_state")}
    exact = testing.oracle(inputs)
    testing.assert_close(wide, {name: exact[name] for name in wide}, testing.FP32_LIMIT)


def test_eager_takes_minus_infinity_as_the_strongest_gate():
    inputs = testing.make_inputs(T=130, K=12, gate="beside")
    infinite = replace(inputs, g=torch.where(inputs.g < -1, -torch.inf, inputs.g))
    got, want = testing.run(eager.chunk_kda, infinite), testing.run(eager.chunk_kda, inputs)
    assert all(x.isfinite().all() for x in got.values())
    testing.assert_close(got, want, testing.FP64_LIMIT)  # exp(-1000) is 0 in fp64 too


# ---- second derivatives
@pytest.mark.parametrize("cu_seqlens", [None, torch.tensor([0, 3])])
def test_a_second_derivative_is_refused_and_never_wrong(cu_seqlens):
    inputs = testing.make_inputs(T=3, H=1, HV=2, K=4, V=3)
    g = -torch.rand(inputs.g.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def o(g, backend):
        return chunk_kda(
            inputs.q, inputs.k, inputs.v, g, inputs.beta.sigmoid(), cu_seqlens=cu_seqlens, backend=backend
        )[0]

    assert torch.autograd.gradgradcheck(lambda g: o(g, "reference"), g.requires_grad_())
    message = "chunk_kda: a second derivative must not be asked for on a fast backend, got create_graph=True"
    with pytest.raises(RuntimeError, match=message):
        torch.autograd.grad(o(g, "eager").sum(), g, create_graph=True)


# ---- nothing
@pytest.mark.parametrize("backend", ["eager", "reference"])
@pytest.mark.parametrize("T", [0, 1, 65])
def test_a_batch_of_none(T, backend):
    q, v, beta = torch.ones(0, T, 1, 4, requires_grad=True), torch.ones(0, T, 2, 3), torch.ones(0, T, 2)
    g = torch.ones(0, T, 2, 4)
    o, state = chunk_kda(q, q, v, g, beta, output_final_state=True, backend=backend)
    assert (o.shape, state.shape) == ((0, T, 2, 3), (0, 2, 4, 3))
    _, state = chunk_kda(q, q, v, g, beta, output_final_state=True, state_v_first=True, backend=backend)
    assert (state.shape, state.dtype) == ((0, 2, 3, 4), torch.float32)
    start = torch.zeros(0, 2, 4, 3)
    _, state = chunk_kda(q, q, v, g, beta, initial_state=start, output_final_state=True, backend=backend)
    assert state.shape == start.shape
