"""chunk_kda on its fused kernels inside torch: torch.compile, activation checkpointing, CUDA graphs, streams, plans."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from openkda import chunk_kda, testing
from openkda.kda import stages

pytestmark = pytest.mark.interpreter

FLAGS = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}


def fused(*args, **kwargs):
    return chunk_kda(*args, **kwargs, backend="triton")


def draw(device, **options):
    return testing.make_inputs(H=1, K=16, gate="bounded", dtype="float32", device=device, **FLAGS | options)


def same(got, want):
    return [name for name in want if not torch.equal(got[name], want[name])] == []


# Of torch itself: Dynamo makes an instance of an autograd.Function while tracing one, and imports torch.jit.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning", "ignore:.*torch.jit.script")
@pytest.mark.parametrize("offsets", [None, [0, 3, 3, 9]], ids=["dense", "packed"])
def test_fused_compiles_without_a_graph_break(offsets, device):
    inputs = draw(device, T=10, cu_seqlens=offsets)
    torch._dynamo.reset()
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    assert same(testing.run(compiled, inputs), testing.run(fused, inputs))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning", "ignore:.*torch.jit.script")
def test_another_length_and_other_offsets_compile_nothing_anew(device):
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(fused, fullgraph=True, backend=backend, dynamic=True)
    for T, offsets in ((10, [0, 3, 3, 9]), (12, [0, 1, 5, 12]), (9, [0, 0, 2, 9])):
        inputs = draw(device, T=T, cu_seqlens=offsets)
        args = {n: t.detach() for n, t in inputs.tensors.items()} | {"cu_seqlens": inputs.kwargs["cu_seqlens"]}
        flags = {n: v for n, v in inputs.kwargs.items() if not isinstance(v, torch.Tensor)}
        with torch.no_grad():
            got, want = (f(**flags | args)[0] for f in (compiled, fused))
        assert torch.equal(got, want)
    assert len(graphs) == 1


def test_fused_under_activation_checkpointing(device):
    inputs = draw(device, T=10)

    def checkpointed(*args, **kwargs):
        return checkpoint(lambda *xs: fused(*xs, **kwargs), *args, use_reentrant=False)

    assert same(testing.run(checkpointed, inputs), testing.run(fused, inputs))


def test_a_call_of_another_signature_has_a_plan_of_its_own(device):
    stages.forget_plans()
    inputs = draw(device, T=10)
    want = testing.run(fused, inputs)
    testing.run(fused, draw(device, T=12))
    assert stages.plan_forward.cache_info().misses == stages.plan_backward.cache_info().misses == 2
    assert same(testing.run(fused, inputs), want)
    assert stages.plan_forward.cache_info().misses == stages.plan_backward.cache_info().misses == 2


def test_inputs_at_odd_addresses(device):
    inputs = draw(device, T=10)
    testing.run(fused, inputs)  # leaves kernels compiled for aligned ones

    def moved(t):
        return torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:].view(t.shape).copy_(t)

    def odd(*args, **kwargs):
        return fused(*(moved(x) for x in args), **kwargs)

    assert moved(inputs.q).data_ptr() % 16 == 4
    testing.assert_close(testing.run(odd, inputs), testing.oracle(inputs), testing.FP32_LIMIT)


# ---- on a GPU: what the interpreter has no word for
@pytest.fixture
def tuned():
    return testing.make_inputs(T=500, H=4, K=128, gate="bounded", dtype="bfloat16", device="cuda", **FLAGS)


@pytest.mark.gpu
def test_later_runs_of_a_plan_have_the_bits_of_the_first(tuned):
    stages.forget_plans()
    first = testing.run(fused, tuned)
    junk = torch.full((1 << 26,), float("nan"), device="cuda")
    del junk  # what is allocated next holds NaN
    for _ in range(3):
        assert same(testing.run(fused, tuned), first)


@pytest.mark.gpu
def test_a_graph_of_packed_calls_follows_its_offsets():
    inputs = testing.make_inputs(
        T=600, H=2, K=128, gate="bounded", dtype="bfloat16", cu_seqlens=[0, 64, 200, 600], device="cuda", **FLAGS
    )
    cu = inputs.kwargs["cu_seqlens"]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        testing.run(fused, inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = testing.run(fused, inputs)
    for offsets in ([0, 1, 1, 599], [0, 300, 301, 302]):
        cu.copy_(torch.tensor(offsets))
        graph.replay()
        assert same(got, testing.run(fused, inputs))


@pytest.mark.gpu
def test_fused_on_another_stream(tuned):
    want = testing.run(fused, tuned)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        got = testing.run(fused, tuned)
    torch.cuda.synchronize()
    assert same(got, want)


@pytest.mark.gpu
def test_the_backward_needs_what_decision_006_says():
    B, T, H = 1, 8192, 8
    x = {n: torch.randn(B, T, H, 128, device="cuda", dtype=torch.bfloat16) for n in ("q", "k", "v", "g")}
    x |= {"beta": torch.rand(B, T, H, device="cuda", dtype=torch.bfloat16), "A_log": torch.zeros(H, device="cuda")}
    leaves = {n: t.requires_grad_() for n, t in x.items()}
    do = torch.randn_like(x["v"])

    def call():
        o, _ = fused(**leaves, use_gate_in_kernel=True, lower_bound=-5.0, **FLAGS)
        return torch.autograd.grad(o, list(leaves.values()), do)

    call()
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    assert (torch.cuda.max_memory_allocated() - base) / (B * T * H) < 3300  # bytes a token and head; do is in base
