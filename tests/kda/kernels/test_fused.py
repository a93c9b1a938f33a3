"""chunk_kda on its fused kernels: every output and gradient against fp64, and the rules of the operator."""

import pytest
import torch

pytest.importorskip("triton")

from openkda import chunk_kda, testing

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("poisoned")]

FUSED = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
PACKED = [0, 0, 64, 64, 65, 130]


def fused(*args, **kwargs):
    return chunk_kda(*args, **kwargs, backend="triton")


def judge(inputs, **options):
    """The fp32 limit, or the 16-bit budget, for all results and gradients."""
    got, exact = testing.run(fused, inputs, **options), testing.oracle(inputs)
    if inputs.q.dtype == torch.float32:
        testing.assert_close(got, exact, testing.FP32_LIMIT)
    else:
        testing.assert_within_budget(got, exact, testing.rounded(inputs))
    return got


def test_fused_matches_fp64_with_every_activation_and_grouped_heads(device):
    pool = testing.ErrorPool()
    for seed in range(3):
        shape = {"B": 1 if seed else 2, "T": 66 if seed else 10, "H": 1, "HV": 2, "K": 16, "V": 32, "seed": seed}
        inputs = testing.make_inputs(**shape, dtype="bfloat16", device=device, **FUSED)
        exact = testing.oracle(inputs)
        del exact["dA_log"]  # two sums that cancel: judged over many draws on a GPU
        pool.add(testing.run(fused, inputs), exact, testing.rounded(inputs))
    pool.check()


@pytest.mark.gpu
@pytest.mark.parametrize("gate", ["softplus", "bounded", "layer_init"])
def test_fused_matches_fp64_at_the_tuned_size_over_many_draws(gate, device):
    pool = testing.ErrorPool()
    for seed in range(8):
        inputs = testing.make_inputs(T=500, H=4, K=128, gate=gate, dtype="bfloat16", seed=seed, device=device, **FUSED)
        pool.add(testing.run(fused, inputs), testing.oracle(inputs), testing.rounded(inputs))
    pool.check()


def test_fused_matches_fp64_for_packed_fp32_with_a_nan_tail(device):
    inputs = testing.make_inputs(
        T=137, H=1, HV=2, K=16, gate="bounded", dtype="float32", cu_seqlens=PACKED, state_v_first=True, device=device
    )
    got = judge(inputs)
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert bool((got[name][:, PACKED[-1] :] == 0).all()), name


@pytest.mark.parametrize("gate", ["log_uniform", "beside"])
def test_fused_matches_fp64_for_any_decay_and_sizes_that_are_no_powers_of_two(gate, device):
    judge(testing.make_inputs(T=70, H=1, K=24, V=40, gate=gate, dtype="float32", device=device))


def test_fused_matches_fp64_when_values_are_given_ready_in_bf16(device):
    judge(testing.make_inputs(T=70, H=1, K=32, V=16, gate="given", dtype="bfloat16", device=device))


def test_fused_reads_strided_inputs(device):
    options = {"T": 70, "H": 2, "K": 16, "dtype": "float32", "device": device}
    flat, strided = (testing.make_inputs(layout=layout, **options) for layout in ("contiguous", "strided"))
    assert not strided.q.is_contiguous()
    want, got = testing.run(fused, flat), testing.run(fused, strided)
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.fixture
def in_pieces(monkeypatch):
    """Segments and parts that are as small as can be."""
    from openkda.kda import segments, stages

    monkeypatch.setattr(segments, "WORK", 1)
    monkeypatch.setattr(segments, "PARTS", ((1, 4),))
    stages.forget_plans()
    yield segments
    stages.forget_plans()


def test_fused_in_segments_matches_fp64(in_pieces, device):
    inputs = testing.make_inputs(T=300, H=1, K=16, gate="bounded", dtype="float32", device=device, **FUSED)
    assert len(in_pieces.split(1, 300, 1, packed=False, batch_invariant=False)) == 2
    judge(inputs)


@pytest.mark.parametrize("offsets", [None, [0, 3, 3, 70, 140]], ids=["batch", "packed"])
def test_fused_gradients_in_parts_match_fp64(offsets, in_pieces, device):
    shape = {"B": 2, "T": 20} if offsets is None else {"T": 140, "cu_seqlens": offsets}
    heads = {"H": 1, "HV": 2} if offsets is None else {"H": 2}
    judge(testing.make_inputs(**shape, **heads, K=16, gate="softplus", dtype="float32", device=device, **FUSED))


def test_save_intermediates_stays_in_the_budget(device):
    inputs = testing.make_inputs(T=70, H=1, K=16, gate="given", dtype="bfloat16", device=device, **FUSED)
    judge(inputs, save_intermediates=True)


@pytest.mark.parametrize("name", ["q", "v", "g", "beta", "initial_state", "A_log"])
def test_fused_gives_the_gradient_that_is_asked_for(name, device):
    inputs = testing.make_inputs(T=10, H=1, K=16, dtype="float32", device=device, **FUSED)
    want = testing.run(fused, inputs)["d" + name]
    tensors = {n: t.detach() for n, t in inputs.tensors.items()}
    tensors[name].requires_grad_()
    args = [tensors[n] for n in ("q", "k", "v", "g", "beta")]
    o, final = fused(*args, **inputs.kwargs | {n: t for n, t in tensors.items() if n in inputs.kwargs})
    (got,) = torch.autograd.grad((o, final), tensors[name], (inputs.grad_o, inputs.grad_final_state))
    assert torch.equal(got, want)


def test_fused_takes_a_loss_of_the_final_state_alone(device):
    inputs = testing.make_inputs(T=10, H=1, K=16, dtype="float32", device=device)
    inputs.grad_o.zero_()
    want = testing.run(fused, inputs)
    leaves = {n: t.detach().requires_grad_() for n, t in inputs.tensors.items()}
    args = [leaves[n] for n in ("q", "k", "v", "g", "beta")]
    _, final = fused(*args, **inputs.kwargs | {n: t for n, t in leaves.items() if n in inputs.kwargs})
    grads = torch.autograd.grad(final, list(leaves.values()), inputs.grad_final_state)
    assert all(torch.equal(grad, want["d" + n]) for n, grad in zip(leaves, grads, strict=True))


def test_fused_refuses_a_second_derivative(device):
    q = torch.randn(1, 3, 1, 16, device=device, requires_grad=True)
    o, _ = fused(q, q, q, -q.detach().abs(), torch.ones(1, 3, 1, device=device))
    (dq,) = torch.autograd.grad(o.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"^chunk_kda: a second derivative must not be asked for"):
        dq.sum().backward()


@pytest.mark.parametrize("T", [0, 1], ids=["no_token", "one_token"])
def test_fused_takes_short_inputs(T, device):
    judge(testing.make_inputs(T=T, H=1, K=16, dtype="float32", device=device))


def test_fused_passes_opcheck(device):
    import openkda.kda.fused as plan
    from openkda.frameworks import torch as fw

    inputs = testing.make_inputs(T=3, H=1, K=16, dtype="float32", device=device)
    tensors = [t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)]
    state, A_log, dt_bias = (inputs.tensors[n].detach() for n in ("initial_state", "A_log", "dt_bias"))
    options = plan.Options(1.0, None, False, True, False, False, False, False)
    arguments = (*tensors, state, A_log, dt_bias, None, *options, True, True, True)
    fw._register(plan.ChunkKDA)
    torch.library.opcheck(torch.ops.openkda.chunk_kda.default, arguments)
