"""The three scans against a loop over chunks in fp64, on workspaces drawn at random."""

import itertools

import pytest
import torch

pytest.importorskip("triton")

from openkda.kda.kernels import scan, tables
from openkda.testing import FP32_LIMIT, assert_close, assert_within_budget

pytestmark = pytest.mark.interpreter
C, M = tables.CHUNK, tables.GROUP


def loop(x, ranges, states, do, dfinal, operand):
    """maths.md sections 2 and 3, in fp64, one chunk at a time; `operand` rounds what enters a product."""
    out = {name: torch.zeros_like(x["u"]) for name in ("o", "v_new", "dv_new")}
    out |= {name: x["u"].new_zeros(*x["decay"].shape, x["u"].shape[-1]) for name in ("states", "dstates")}
    final, dinitial = states.clone(), dfinal.clone()
    for n, (a, b) in enumerate(ranges):
        S = states[n]
        for c in range(a, b):
            out["states"][c] = operand(S)
            out["v_new"][c] = operand(x["u"][c] - x["w"][c] @ operand(S))
            out["o"][c] = operand(x["qg"][c] @ operand(S) + x["aqk"][c] @ out["v_new"][c])
            S = x["decay"][c][..., None] * S + x["kg"][c].mT @ out["v_new"][c]
        final[n] = S
        dS = dfinal[n]
        for c in reversed(range(a, b)):
            out["dstates"][c] = operand(dS)
            dvn = operand(x["aqk"][c].mT @ do[c] + x["kg"][c] @ operand(dS))
            out["dv_new"][c] = dvn
            dS = x["decay"][c][..., None] * dS + x["qg"][c].mT @ do[c] - x["w"][c].mT @ dvn
        dinitial[n] = dS
    return out | {"final_state": final, "dinitial_state": dinitial}


def run_case(
    device, *, T, B=1, HV=1, K=64, V=64, cu=None, dtype=torch.bfloat16, v_first=False, with_state=True, tile=None,
    judge=True,
):  # fmt: skip
    draw = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=draw)

    layout = tables.make_layout(
        torch.empty(B, T, 1, device=device), None if cu is None else torch.tensor(cu, device=device)
    )
    NC, N = layout.num_chunks, layout.N
    offsets = cu if cu is not None else [n * T for n in range(B + 1)]
    rows = torch.full((NC, C), B * T)  # token of every row; B * T stands for none
    ranges = []
    for n, (a, b) in enumerate(itertools.pairwise(offsets)):
        first = a // C + n if cu is not None else n * layout.chunks_per_sequence
        ranges.append((first, first + -(-(b - a) // C)))
        for t in range(a, b):
            rows[first + (t - a) // C, (t - a) % C] = t
    valid = (rows < B * T)[:, None, :, None]
    x = {
        n: normal(NC, HV, C, w) * s
        for n, w, s in (("w", K, 0.1), ("u", V, 1.0), ("kg", K, K**-0.5), ("qg", K, K**-0.5))
    }
    x["aqk"] = normal(NC, HV, C, C).tril() * 0.1
    x = {n: torch.where(valid, t, 0.0).to(dtype) for n, t in x.items()}
    used = valid.any(2, keepdim=True)
    x = {n: torch.where(used, t, float("nan")) for n, t in x.items()}  # nobody may read the room behind a slot
    x["decay"] = torch.where(used[:, :, 0], torch.exp2(-3 * torch.rand(NC, HV, K, generator=draw)), float("nan"))
    do_tokens = normal(B * T + 1, HV, V).to(dtype)
    do_tokens[-1] = 0
    do = do_tokens[rows].transpose(1, 2)
    do_tokens[offsets[-1] :] = float("nan")
    states, dfinal = (normal(N, HV, K, V) * 0.3 for _ in range(2)) if with_state else torch.zeros(2, N, HV, K, V)

    def orient(state):
        return (state.mT if v_first else state).contiguous().to(device)

    def back(state):
        return (state.mT if v_first else state).cpu()

    g = {n: t.to(device) for n, t in x.items()}
    o = torch.full((B, T, HV, V), float("nan"), dtype=dtype, device=device)

    def nan(*shape):
        return torch.full(shape, float("nan"), dtype=dtype, device=device)

    final, dinitial = (orient(torch.full((N, HV, K, V), float("nan"))) for _ in range(2))
    initial = orient(states) if with_state else None
    checkpoints, kept, v_new = nan(layout.num_checkpoints, HV, K, V), nan(NC, HV, K, V), nan(NC, HV, C, V)
    dv_new, dkept = nan(NC, HV, C, V), nan(NC, HV, K, V)
    common = dict(layout=layout, state_v_first=v_first, tile=tile)
    scan.scan_fwd(**g, o=o, initial_state=initial, final_state=final, checkpoints=checkpoints, **common)
    forward = {n: g[n] for n in ("w", "u", "kg", "decay")}
    scan.rescan_fwd(**forward, checkpoints=checkpoints, initial_state=initial, states=kept, v_new=v_new, **common)
    strided = torch.full((B, T, HV, 2 * V), float("nan"), dtype=dtype)  # half of an interleaved buffer: no copy is made
    strided[..., V:] = do_tokens[:-1].view(B, T, HV, V)
    backward = {n: g[n] for n in ("w", "kg", "qg", "aqk", "decay")}
    scan.reverse_scan_bwd(
        **backward, do=strided.to(device)[..., V:], dfinal_state=orient(dfinal) if with_state else None, dv_new=dv_new,
        dstates=dkept, dinitial_state=dinitial, **common,
    )  # fmt: skip

    where = used.cpu()[:, 0, 0, 0]
    o = torch.cat([o.cpu().view(B * T, HV, V), torch.zeros(1, HV, V, dtype=dtype)])
    assert bool(o[offsets[-1] : -1].isnan().all()), "scan_fwd wrote behind the last offset"
    got = {"o": o[rows].transpose(1, 2)[where], "final_state": back(final), "dinitial_state": back(dinitial)}
    got |= {n: t.cpu()[where] for n, t in (("states", kept), ("v_new", v_new), ("dv_new", dv_new), ("dstates", dkept))}

    if not judge:
        return got

    def want(operand):
        exact = {n: torch.where(used if t.dim() == 4 else used[:, :, 0], t.double(), 0.0) for n, t in x.items()}
        out = loop(exact, ranges, states.double(), do.double(), dfinal.double(), operand)
        return {n: t if n in ("final_state", "dinitial_state") else t[where] for n, t in out.items()}

    exact = want(lambda t: t)
    if dtype == torch.float32:
        assert_close(got, exact, FP32_LIMIT)
    else:
        assert_within_budget(got, exact, want(lambda t: t.to(dtype).double()))
    empty = [n for n, (a, b) in enumerate(ranges) if a == b]
    assert torch.equal(got["final_state"][empty], states[empty])
    assert torch.equal(got["dinitial_state"][empty], dfinal[empty])
    return got


PACKED = [0, 0, 64, 64, 65, 330]  # empty slots, one token, several groups


def test_scans_match_the_loop_for_dense_bf16(device):
    run_case(device, T=350, B=2, HV=2, K=32, V=32)


def test_scans_match_the_loop_for_packed_bf16_with_a_tail(device):
    run_case(device, T=337, HV=2, K=32, V=32, cu=PACKED)


@pytest.mark.parametrize("v_first", [False, True], ids=["k_first", "v_first"])
def test_scans_match_the_loop_when_sizes_are_no_powers_of_two(v_first, device):
    run_case(device, T=130, B=2, K=24, V=40, v_first=v_first)


def test_scans_match_the_loop_for_packed_fp32_and_v_first_states(device):
    run_case(device, T=337, K=20, V=16, cu=PACKED, dtype=torch.float32, v_first=True)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_scans_match_the_loop_through_descriptors(packed, device):
    tile = {"BV": 16, "num_warps": 4, "num_stages": 2, "TMA": True}
    run_case(device, T=337, HV=2, K=32, V=32, cu=PACKED if packed else None, tile=tile)


def test_scans_start_from_zero_states(device):
    run_case(device, T=65, K=16, V=16, with_state=False)


@pytest.mark.parametrize("T", [1, 64], ids=["one_token", "one_chunk"])
def test_scans_work_on_short_sequences(T, device):
    run_case(device, T=T, B=3, K=16, V=16)


def test_scans_work_when_every_slot_is_empty(device):
    run_case(device, T=3, K=16, V=16, cu=[0, 0, 0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("v_first", [False, True], ids=["k_first", "v_first"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_scans_match_the_loop_at_the_tuned_size(packed, v_first, dtype, device):
    run_case(
        device, T=600, HV=3, K=128, V=128, cu=[*PACKED, 330, 590] if packed else None, v_first=v_first, dtype=dtype
    )


@pytest.mark.gpu
def test_scans_repeat_to_the_bit(device):
    first = run_case(device, T=4096, B=2, HV=40, K=128, V=128, judge=False)
    for _ in range(5):
        again = run_case(device, T=4096, B=2, HV=40, K=128, V=128, judge=False)
        assert all(torch.equal(first[name], again[name]) for name in first)
