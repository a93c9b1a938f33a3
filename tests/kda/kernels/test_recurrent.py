"""recurrent_kda on its kernel: every line of its contract, in the interpreter and on a GPU."""

import math

import pytest
import torch

pytest.importorskip("triton")

from openkda import chunk_kda, recurrent_kda, testing
from openkda.kda import fused_recurrent

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("poisoned")]

FUSED = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
NAMES = ("o", "final_state")


def kernel(*args, **kwargs):
    return recurrent_kda(*args, **kwargs, backend="triton")


def results(inputs, **options):
    return dict(zip(NAMES, kernel(*inputs.args, **inputs.kwargs | options), strict=True))


def judge(inputs):
    exact = testing.oracle(inputs)
    got = results(inputs)
    testing.assert_close(got, {name: exact[name] for name in NAMES}, testing.FP32_LIMIT)
    return got


def pool_of(states, rows, size):
    """A pool [size, ..] of sevens with states in these rows."""
    pool = states.new_full((size, *states.shape[1:]), 7.0)
    pool[rows] = states
    return pool


# ---- the function
@pytest.mark.parametrize("gate", ["softplus", "bounded", "none", "strong", "beside", "log_uniform", "layer_init"])
@pytest.mark.parametrize("T", [1, 5])
def test_recurrent_kernel_matches_fp64(gate, T, device):
    judge(testing.make_inputs(B=2, T=T, H=1, HV=2, K=12, V=20, gate=gate, dtype="float32", device=device, **FUSED))


@pytest.mark.gpu
@pytest.mark.parametrize("gate", ["softplus", "bounded", "log_uniform"])
@pytest.mark.parametrize("sizes", [(128, 128), (256, 200), (96, 64), (16, 256)], ids=str)
def test_recurrent_kernel_matches_fp64_at_real_sizes(sizes, gate, device):
    K, V = sizes
    judge(testing.make_inputs(B=3, T=70, H=2, HV=4, K=K, V=V, gate=gate, dtype="float32", device=device, **FUSED))


@pytest.mark.parametrize(
    "options",
    [
        {"state_v_first": True},
        {"scale": 0.7},
        {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True},
        {"initial_state": False},
        {"layout": "strided"},
    ],
    ids=lambda options: "+".join(options),
)
def test_recurrent_kernel_honours_every_option(options, device):
    judge(testing.make_inputs(B=2, T=3, H=1, HV=2, K=8, V=4, gate="bounded", dtype="float32", device=device, **options))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_recurrent_kernel_computes_16_bit_inputs_in_fp32(dtype, device):
    inputs = testing.make_inputs(T=4, K=16, dtype=dtype, device=device, **FUSED)
    got, want = results(inputs), results(inputs.to(torch.float32))
    assert torch.equal(got["o"], want["o"].to(inputs.v.dtype))
    assert torch.equal(got["final_state"], want["final_state"])


def test_recurrent_kernel_does_not_drift_over_4096_steps_of_slow_decay(device):
    # A multiplication by exp(-1e-4) rounded to fp32 would be off by 1.2e-4 here (2**-25 a step, all of one sign).
    steps = 4096 if device == "cuda" else 256
    shape = {"B": 1, "T": steps, "H": 1, "K": 4, "V": 4}
    inputs = testing.make_inputs(**shape, gate="slow", beta=0.0, dtype="float32", device=device)
    got, exact = results(inputs), testing.oracle(inputs)
    assert testing.relative_rms(got["final_state"], exact["final_state"]) < 5e-7


@pytest.mark.parametrize("nats", [-0.3, -0.69, -0.7, -1.0, -20.0, -80.0])
def test_recurrent_kernel_decays_to_the_last_digit(nats, device):
    # Both sides of the switch, and where exp(g) - 1 is -1: what is left of a state must still be right.
    state = torch.randn(1, 1, 8, 8, device=device)
    zeros = torch.zeros(1, 1, 1, 8, device=device)
    _, got = kernel(*(zeros,) * 3, zeros + nats, zeros[..., 0], initial_state=state, output_final_state=True)
    # exp2 of x in fp32: x = g log2(e) is rounded, 2**-24 |g|; then two units in the last place
    assert testing.relative_rms(got, state.double() * math.exp(nats)) < 2**-22 + 2**-24 * abs(nats)


def test_recurrent_kernel_keeps_the_digits_of_a_softplus_at_minus_20(device):
    # log(1 + exp(-20)) is 0 in fp32, and so would the decay be.
    raw = torch.full((1, 1, 1, 8), -20.0, device=device)
    state, zeros = torch.ones(1, 1, 8, 8, device=device), torch.zeros(1, 1, 1, 8, device=device)
    A_log = torch.full((1,), 10.0, device=device)
    options = {"use_gate_in_kernel": True, "A_log": A_log, "output_final_state": True}
    _, got = kernel(zeros, zeros, zeros, raw, zeros[..., 0], initial_state=state, **options)
    g = -math.exp(10.0) * math.log1p(math.exp(-20.0))  # -4.5e-5
    assert testing.relative_rms(1 - got, torch.full_like(got, -math.expm1(g), dtype=torch.float64)) < 2e-3
    assert testing.relative_rms(got, torch.full_like(got, math.exp(g), dtype=torch.float64)) < 1e-7


def test_decoding_is_one_call_and_a_batch_is_its_rows(device):
    inputs = testing.make_inputs(B=3, T=6, H=1, HV=2, K=16, V=40, dtype="bfloat16", device=device, **FUSED)
    want = results(inputs)
    state, outputs = inputs.initial_state, []
    for t in range(6):
        o, state = kernel(*(x[:, t : t + 1] for x in inputs.args), **inputs.kwargs | {"initial_state": state})
        outputs.append(o)
    if device == "cpu":
        assert torch.equal(torch.cat(outputs, 1), want["o"])
        assert torch.equal(state, want["final_state"])
    else:  # a token alone is another kernel than a loop, and its compiler may fuse other products and sums
        assert testing.relative_rms(state, want["final_state"].double()) < 2**-22
    o, state = kernel(*(x[1:2] for x in inputs.args), **inputs.kwargs | {"initial_state": inputs.initial_state[1:2]})
    assert torch.equal(o, want["o"][1:2])
    assert torch.equal(state, want["final_state"][1:2])


@pytest.mark.parametrize("split", [1, 63, 64, 69])
def test_hand_off_from_chunks_to_tokens_and_to_chunks_equals_one_call(split, device):
    inputs = testing.make_inputs(T=70, H=1, HV=2, K=16, dtype="float32", device=device, **FUSED)
    exact = {name: testing.oracle(inputs)[name] for name in NAMES}
    head, state = chunk_kda(*(x[:, :split] for x in inputs.args), **inputs.kwargs, backend="triton")
    for operator in (recurrent_kda, chunk_kda):
        rest = inputs.kwargs | {"initial_state": state, "backend": "triton"}
        o, final = operator(*(x[:, split:] for x in inputs.args), **rest)
        testing.assert_close({"o": torch.cat([head, o], 1), "final_state": final}, exact, testing.FP32_LIMIT)


# ---- packed
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_packed_equals_each_sequence_alone_and_slots_and_tail_are_padding(index_dtype, device):
    offsets = [0, 0, 2, 2, 5]
    inputs = testing.make_inputs(T=9, H=1, HV=2, K=8, V=20, dtype="float32", cu_seqlens=offsets, device=device)
    for x in inputs.args:
        x[:, 5:] = float("nan")
    inputs.initial_state[2] = float("nan")  # a state that nobody may touch, only hand on
    got = results(inputs, cu_seqlens=torch.tensor(offsets, dtype=index_dtype, device=device))
    for n in (1, 3):
        rows = slice(offsets[n], offsets[n + 1])
        alone = inputs.kwargs | {"initial_state": inputs.initial_state[n : n + 1], "cu_seqlens": None}
        o, state = kernel(*(x[:, rows] for x in inputs.args), **alone)
        assert torch.equal(got["o"][:, rows], o)
        assert torch.equal(got["final_state"][n : n + 1], state)
    assert torch.equal(got["final_state"][[0, 2]].view(torch.int32), inputs.initial_state[[0, 2]].view(torch.int32))
    assert not got["o"][:, 5:].any()


def test_empty_slots_without_initial_state_end_at_zero(device):
    inputs = testing.make_inputs(
        T=2, K=8, dtype="float32", cu_seqlens=[0, 0, 2], initial_state=False, gate="given", device=device
    )
    assert not results(inputs)["final_state"][0].any()


@pytest.mark.parametrize("shape", [(0, 1), (2, 0)], ids=["no_row", "no_token"])
def test_recurrent_kernel_takes_empty_inputs(shape, device):
    x = torch.randn(*shape, 2, 8, device=device)
    state = torch.randn(shape[0], 2, 8, 8, device=device)
    o, final = kernel(x, x, x, -x.abs(), x[..., 0], initial_state=state, output_final_state=True)
    assert o.shape == x.shape
    assert torch.equal(final, state)


# ---- pools
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("v_first", [False, True], ids=["K_first", "V_first"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_pool_is_updated_in_place_and_padding_touches_nothing(index_dtype, v_first, pool_dtype, device):
    inputs = testing.make_inputs(B=4, T=2, K=8, V=12, dtype="float32", state_v_first=v_first, device=device)
    states = inputs.initial_state.to(pool_dtype)
    want = results(inputs, initial_state=states.float())
    for x in inputs.args:
        x[1] = float("nan")
    rows, live = [5, -1, 0, 2], [0, 2, 3]
    pool = pool_of(states[live], [5, 0, 2], 7)
    o, none = kernel(
        *inputs.args,
        **inputs.kwargs | {"initial_state": pool},
        state_indices=torch.tensor(rows, dtype=index_dtype, device=device),
    )
    assert none is None
    assert not o[1].any()
    expected = pool_of(want["final_state"][live].to(pool_dtype), [5, 0, 2], 7)
    assert torch.equal(pool[[1, 3, 4, 6]], expected[[1, 3, 4, 6]])
    if pool_dtype == torch.float32:
        assert torch.equal(o[live], want["o"][live])
        assert torch.equal(pool, expected)
    else:  # another kernel: it may sum in another order, and round the other way in the end
        assert testing.relative_rms(o[live], want["o"][live].double()) < testing.FP32_LIMIT
        assert testing.relative_rms(pool[[5, 0, 2]], want["final_state"][live].double()) < 2**-8


def test_packed_pool_with_padding_slots_and_a_tail(device):
    inputs = testing.make_inputs(T=8, K=8, dtype="float32", cu_seqlens=[0, 2, 3, 3, 6], device=device)
    want = results(inputs)
    pool = pool_of(inputs.initial_state[[0, 2, 3]], [1, 3, 4], 5)
    for x in inputs.args:
        x[:, 2:3] = x[:, 6:] = float("nan")
    slots = torch.tensor([1, -7, 3, 4], device=device)
    o, _ = kernel(*inputs.args, **inputs.kwargs | {"initial_state": pool}, state_indices=slots)
    assert torch.equal(o[:, [0, 1, 3, 4, 5]], want["o"][:, [0, 1, 3, 4, 5]])
    assert not o[:, [2, 6, 7]].any()
    assert torch.equal(pool, pool_of(want["final_state"][[0, 2, 3]], [1, 3, 4], 5))


def test_strided_pool_is_updated_in_place(device):
    inputs = testing.make_inputs(B=2, T=1, K=8, V=12, dtype="float32", device=device)
    want = results(inputs)
    wide = torch.full((4, 2, 8, 24), 7.0, device=device)
    pool = wide[..., ::2]
    pool[[1, 3]] = inputs.initial_state
    slots = torch.tensor([9, 1, 9, 3], device=device)[1::2]  # strided itself
    kernel(*inputs.args, **inputs.kwargs | {"initial_state": pool}, state_indices=slots)
    # another kernel, compiled for these strides: it may sum in another order
    assert testing.relative_rms(pool[[1, 3]], want["final_state"].double()) < testing.FP32_LIMIT
    assert (wide[..., 1::2] == 7).all()
    assert (pool[[0, 2]] == 7).all()


@pytest.mark.gpu
def test_recurrent_kernel_takes_more_than_65535_sequences_times_heads(device):
    inputs = testing.make_inputs(B=70001, T=1, H=1, HV=1, K=16, V=8, gate="given", dtype="float32", device=device)
    rows = [0, 65535, 65536, 70000]
    got = results(inputs)
    o, state = kernel(*(x[rows] for x in inputs.args), **inputs.kwargs | {"initial_state": inputs.initial_state[rows]})
    assert torch.equal(got["o"][rows], o)
    assert torch.equal(got["final_state"][rows], state)


@pytest.mark.gpu
def test_recurrent_kernel_takes_a_pool_of_more_than_2_to_the_31_elements(device):
    inputs = testing.make_inputs(B=1, T=1, H=1, HV=1, K=128, V=128, gate="given", dtype="float32", device=device)
    want = results(inputs, initial_state=inputs.initial_state.bfloat16().float())
    pool = torch.zeros(140_000, 1, 128, 128, dtype=torch.bfloat16, device=device)
    pool[-1] = inputs.initial_state[0].bfloat16()
    slots = torch.tensor([139_999], device=device)
    o, _ = kernel(*inputs.args, **inputs.kwargs | {"initial_state": pool}, state_indices=slots)
    testing.assert_close({"o": o}, {"o": want["o"].double()}, testing.FP32_LIMIT)
    assert testing.relative_rms(pool[-1], want["final_state"][0].double()) < 2**-8
    assert not pool[:-1].any()


# ---- compilers and graphs
def operator_arguments(inputs, pool):
    gate = (inputs.A_log, inputs.dt_bias, inputs.cu_seqlens)
    options = (0.25, inputs.options.get("lower_bound"), True, inputs.A_log is not None, True, False, False)
    if pool is None:
        return (*inputs.args, inputs.initial_state, *gate, *options, True)
    return (*inputs.args, *pool, *gate, *options)


@pytest.mark.parametrize("cu_seqlens", [None, [0, 1, 1]], ids=["dense", "packed"])
@pytest.mark.parametrize("pooled", [False, True], ids=["states", "pool"])
def test_operators_keep_the_rules_of_torch_library(pooled, cu_seqlens, device):
    from openkda.frameworks import torch as fw

    shape = {"B": 1, "T": 2} if cu_seqlens else {"B": 2, "T": 1}
    inputs = testing.make_inputs(**shape, K=8, dtype="float32", cu_seqlens=cu_seqlens, device=device)
    pool = (torch.randn(3, 2, 8, 8, device=device), torch.tensor([2, -1], device=device)) if pooled else None
    spec = fused_recurrent.RecurrentKDAPool if pooled else fused_recurrent.RecurrentKDA
    fw._register(spec)
    torch.library.opcheck(getattr(torch.ops.openkda, spec.NAME), operator_arguments(inputs, pool))


@pytest.mark.parametrize("pooled", [False, True], ids=["states", "pool"])
def test_recurrent_kernel_compiles_as_a_full_graph(pooled, device):
    inputs = testing.make_inputs(B=2, T=1, K=8, dtype="float32", device=device, **FUSED)
    kwargs = dict(inputs.kwargs)
    want = results(inputs)
    if pooled:
        kwargs |= {"initial_state": pool_of(inputs.initial_state, [2, 0], 3)}
        kwargs |= {"state_indices": torch.tensor([2, 0], device=device)}

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(*args, **kwargs):
        o, state = kernel(*args, **kwargs)
        return o * 1.0, state

    with torch.no_grad():
        o, state = compiled(*inputs.args, **kwargs)
    assert torch.equal(o, want["o"])
    state = kwargs["initial_state"][[2, 0]] if pooled else state
    assert torch.equal(state, want["final_state"])


@pytest.mark.gpu
def test_cuda_graph_replays_with_offsets_slots_states_and_tokens_edited_in_place(device):
    inputs = testing.make_inputs(T=8, K=32, dtype="bfloat16", cu_seqlens=[0, 2, 3, 3, 6], device=device, **FUSED)
    pool = pool_of(inputs.initial_state, [1, 2, 3, 4], 6)
    slots = torch.tensor([1, 2, 3, 4], device=device)
    kwargs = inputs.kwargs | {"initial_state": pool, "state_indices": slots}
    kernel(*inputs.args, **kwargs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, _ = kernel(*inputs.args, **kwargs)
    for offsets, places in (([0, 1, 1, 7, 8], [5, -1, 0, 3]), ([0, 0, 0, 0, 3], [-1, -1, 2, 1])):
        for x in inputs.args:
            x.copy_(torch.randn_like(x))
        pool.copy_(torch.randn_like(pool))
        inputs.cu_seqlens.copy_(torch.tensor(offsets))
        slots.copy_(torch.tensor(places))
        before = pool.clone()
        graph.replay()
        after = pool.clone()
        want, _ = kernel(*inputs.args, **kwargs | {"initial_state": before})
        assert torch.equal(o, want)
        assert torch.equal(after, before)


@pytest.mark.gpu
def test_recurrent_kernel_never_waits_for_the_device(device):
    inputs = testing.make_inputs(T=4, K=32, dtype="bfloat16", cu_seqlens=[0, 1, 3], device=device, **FUSED)
    results(inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        results(inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
