"""The gradient stage against autograd through the eager operator, on workspaces that eager functions made in fp64."""

import itertools
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from openkda import frameworks, testing
from openkda.kda import eager, gate
from openkda.kda.kernels import gradients, tables
from openkda.kda.kernels.common import Activations

pytestmark = pytest.mark.interpreter
C = tables.CHUNK
fw = frameworks.of(torch.empty(0))
FUSED = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
PACKED = [0, 0, 64, 64, 65, 130]  # empty slots, one token, two chunks
NAMES = ("dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias")


def rows_of(x):
    """Token of every row of every chunk [NC, C], B * T where there is none; ranges of chunks of the sequences."""
    B, T = x.q.shape[:2]
    cu = x.kwargs.get("cu_seqlens")
    offsets = [n * T for n in range(B + 1)] if cu is None else cu.tolist()
    per = -(-T // C)
    rows = torch.full((B * per if cu is None else T // C + len(offsets) - 1, C), B * T)
    ranges = []
    for n, (a, b) in enumerate(itertools.pairwise(offsets)):
        first = n * per if cu is None else a // C + n
        ranges.append((first, first + -(-(b - a) // C)))
        for t in range(a, b):
            rows[first + (t - a) // C, (t - a) % C] = t
    return rows, ranges, offsets[-1]


def workspaces(x, act):
    """a, aqk, qg, norms, states, v_new, dstates, dv_new [NC, HV, ..] in fp64: maths.md sections 2 and 3."""
    rows, ranges, _ = rows_of(x)
    HV = x.v.shape[2]
    valid = (rows < x.q.shape[0] * x.q.shape[1])[:, None, :, None]

    def chunked(t):
        t = torch.cat([t.double().flatten(0, 1), torch.zeros(1, *t.shape[2:]).double()])[rows]
        return torch.where(valid, t.repeat_interleave(HV // t.shape[2], 2).transpose(1, 2), 0.0)

    q, k, v, g, b, do = (chunked(t) for t in (x.q, x.k, x.v, x.g, x.beta[..., None], x.grad_o))
    norms = [(t.square().sum(-1) + 1e-6).rsqrt() for t in (q, k)]
    if act.l2norm:
        q, k = (t * norm[..., None] for t, norm in zip((q, k), norms, strict=True))
    if act.gate != "none":
        raw = g.transpose(1, 2)  # [NC, C, HV, K], heads as gates want them
        g = gate.activate(raw, act.A_log.double(), act.dt_bias.double(), act.lower_bound, "float64").transpose(1, 2)
    if act.beta_sigmoid:
        b = act.beta_scale * b.sigmoid()
    q, g, b = q * act.scale, torch.where(valid, g, 0.0), torch.where(valid, b, 0.0)
    levels, d_in, d_out, d_all = eager.decay_factors(fw, g)
    aqk, akk = eager.intra_chunk_scores(eager.Matmul(fw, None), q, k, levels)
    a = torch.linalg.inv(torch.eye(C) + b * akk)
    kd, kg, qg = k * d_in, k * d_out, q * d_in
    out = SimpleNamespace(a=a, aqk=aqk, qg=qg, v_new=torch.zeros_like(v), dv_new=torch.zeros_like(v))
    out.norms = torch.stack(norms, 2)
    out.states = v.new_zeros(*d_all.shape, v.shape[-1])
    out.dstates = torch.zeros_like(out.states)
    swap = (lambda t: t.mT) if x.kwargs.get("state_v_first") else (lambda t: t)
    for n, (first, last) in enumerate(ranges):
        S, dS = swap(x.kwargs["initial_state"].double()[n]), swap(x.grad_final_state.double()[n])
        for c in range(first, last):
            out.states[c], out.v_new[c] = S, a[c] @ (b[c] * (v[c] - kd[c] @ S))
            S = d_all[c][..., None] * S + kg[c].mT @ out.v_new[c]
        for c in reversed(range(first, last)):
            out.dstates[c], out.dv_new[c] = dS, aqk[c].mT @ do[c] + kg[c] @ dS
            dS = d_all[c][..., None] * dS + qg[c].mT @ do[c] - kd[c].mT @ (b[c] * (a[c].mT @ out.dv_new[c]))
    return vars(out)


def activations(x, device):
    """What the flags of the call ask for."""
    kind = "bounded" if x.kwargs.get("lower_bound") is not None else "softplus"
    kind = kind if x.kwargs.get("use_gate_in_kernel") else "none"
    A_log, dt_bias = ((x.kwargs[n].to(device) if kind != "none" else None) for n in ("A_log", "dt_bias"))
    scale = x.kwargs.get("scale") or x.q.shape[-1] ** -0.5
    beta_scale = 2.0 if x.kwargs.get("allow_neg_eigval") else 1.0
    l2norm, sigmoid = (bool(x.kwargs.get(n)) for n in FUSED)
    return Activations(scale, l2norm, kind, A_log, dt_bias, x.kwargs.get("lower_bound"), sigmoid, beta_scale)


def run(x, device, view=lambda t: t):
    """The stage on poisoned outputs, with every token tensor as `view` gives it; cut off at the last offset."""
    rows, _, end = rows_of(x)
    work = workspaces(x, activations(x, "cpu"))
    ws = torch.float32 if x.q.dtype == torch.float32 else torch.bfloat16
    used = (rows < x.q.shape[0] * x.q.shape[1]).any(1)[:, None, None, None]  # nobody may read the room behind a slot
    work = {n: torch.where(used, t, float("nan")).contiguous().to(device) for n, t in work.items()}
    work = {n: t.to(torch.float32 if n == "norms" else ws) for n, t in work.items()}
    tokens = {"q": x.q, "k": x.k, "v": x.v, "g": x.g, "beta": x.beta, "do": x.grad_o.to(x.v.dtype)}
    tokens = {n: view(t.to(device)) for n, t in tokens.items()}
    out = {
        "d" + n: torch.full(t.shape, float("nan"), dtype=t.dtype, device=device) for n, t in tokens.items() if n != "do"
    }
    cu = x.kwargs.get("cu_seqlens")
    layout = tables.make_layout(tokens["q"], None if cu is None else cu.to(device))
    parameters = gradients.gradients_bwd(**tokens, **work, **out, act=activations(x, device), layout=layout)
    got = {n: (t if cu is None else t[:, :end]).cpu() for n, t in out.items()}
    return got | {"d" + n: t.cpu() for n, t in parameters.items() if t is not None}


def check(device, view=lambda t: t, seeds=(0,), **options):
    """The fp32 limit, or the 16-bit budget. Gradients of several seeds are judged as one tensor, as one number of
    dA_log is a sum that may cancel.
    """
    draws = [_results(testing.make_inputs(seed=seed, **options), device, view) for seed in seeds]
    got, exact, rounded = ({n: torch.stack([d[n] for d in part]) for n in part[0]} for part in zip(*draws, strict=True))
    if rounded:
        testing.assert_within_budget(got, exact, rounded)
    else:
        testing.assert_close(got, exact, testing.FP32_LIMIT)
    return draws[0][0]


def _results(x, device, view):
    """What the stage gave, what fp64 gives, and what the rounded operator gives (nothing for fp32)."""
    got, exact, end = run(x, device, view), testing.oracle(x), rows_of(x)[2]

    def wanted(results):
        cut = {n: t[:, :end] if "cu_seqlens" in x.kwargs and t.dim() > 2 else t for n, t in results.items()}
        return {n: cut[n].reshape(got[n].shape) for n in NAMES if n in got}

    rounded = {} if x.q.dtype == torch.float32 else wanted(testing.rounded(x))
    return {n: got[n] for n in wanted(exact)}, wanted(exact), rounded


def test_gradients_match_autograd_with_every_activation_and_grouped_heads(device):
    check(device, T=70, H=1, HV=2, K=32, V=16, dtype="bfloat16", **FUSED)


@pytest.mark.parametrize("gate", ["softplus", "bounded", "log_uniform"])
def test_gradients_match_autograd_in_fp32_for_any_gate(gate, device):
    check(device, T=65, H=1, K=16, gate=gate, dtype="float32", **FUSED)


def test_gradients_match_autograd_for_packed_input_with_a_nan_tail(device):
    check(device, T=137, H=1, HV=2, K=16, gate="bounded", dtype="float32", cu_seqlens=PACKED)


def test_gradients_match_autograd_for_sizes_that_are_no_powers_of_two(device):
    check(device, T=40, B=2, H=1, K=40, V=24, dtype="float32", seeds=range(4), **FUSED)


def test_gradients_match_autograd_for_values_given_ready_in_fp16(device):
    check(device, T=20, H=1, K=16, gate="given", dtype="float16")


def test_gradients_match_autograd_for_views_of_wider_tensors(device):
    def half(t):  # the first half of each head's row; NaN lies between the rows
        return torch.stack([t, torch.full_like(t, float("nan"))], -1 if t.dim() == 3 else -2).select(3, 0)

    check(device, half, T=20, H=2, K=16, dtype="float32", **FUSED)


@pytest.mark.gpu
@pytest.mark.parametrize("gate", ["softplus", "bounded"])
def test_gradients_match_autograd_at_the_tuned_size(gate, device):
    check(device, T=400, H=2, HV=4, K=128, gate=gate, dtype="bfloat16", **FUSED)
