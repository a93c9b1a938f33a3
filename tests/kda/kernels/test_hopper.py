"""The Gluon kernels of the chunk stages against the portable ones, on the same inputs and workspaces.

In the interpreter this checks what they compute, and how partitions of warps hand tiles to each other; not layouts.
"""

import pytest
import torch

pytest.importorskip("triton")

from openkda import frameworks
from openkda.kda.kernels import gradients, gradients_values, prepare, prepare_hopper, recompute_hopper, tables, tuning
from openkda.kda.kernels.common import Activations
from openkda.testing import relative_rms

pytestmark = pytest.mark.interpreter
C, D = 64, 128
CASES = {
    "dense": {"B": 2, "T": 70, "H": 1, "HV": 2, "gate": "softplus", "cu": None},
    "packed": {"B": 1, "T": 150, "H": 1, "HV": 1, "gate": "bounded", "cu": [0, 0, 64, 65, 65, 140]},
}


def make(device, *, B, T, H, HV, gate, cu):
    """bf16 token tensors, with NaN behind the last offset; activations; layout; rows of every chunk."""
    draw = torch.Generator().manual_seed(0)
    sizes = {"q": (H, D), "k": (H, D), "v": (HV, D), "g": (HV, D), "beta": (HV,), "do": (HV, D)}
    x = {n: torch.randn(B, T, *size, generator=draw) for n, size in sizes.items()}
    for t in x.values():
        t[:, cu[-1] if cu else T :] = float("nan")
    x = {n: t.bfloat16().to(device) for n, t in x.items()}
    A_log, dt_bias = torch.rand(HV, generator=draw).to(device), (torch.randn(HV, D, generator=draw) - 2).to(device)
    act = Activations(D**-0.5, True, gate, A_log, dt_bias, -5.0 if gate == "bounded" else None, True, 1.0)
    layout = tables.make_layout(x["q"], None if cu is None else torch.tensor(cu, device=device))
    if cu is None:
        rows = (T - C * torch.arange(-(-T // C))).clamp(max=C).repeat(B)
    else:
        rows = layout.chunks[:, 1].cpu()
    return x, act, layout, rows


def workspaces(layout, HV, device, names):
    """Poisoned workspaces of the prepare stage."""
    sizes = dict.fromkeys(("w", "u", "kg", "qg"), (C, D)) | {"aqk": (C, C), "a": (C, C), "decay": (D,), "norms": (2, C)}
    dtypes = dict.fromkeys(("decay", "norms"), torch.float32)
    return {
        n: torch.full(
            (layout.num_chunks, HV, *sizes[n]), float("nan"), dtype=dtypes.get(n, torch.bfloat16), device=device
        )
        for n in names
    }


def agree(got, want, used, limit):
    for name, t in want.items():
        assert relative_rms(got[name][used].float(), t[used].float()) <= limit, name


@pytest.mark.parametrize("case", CASES)
def test_prepare_and_recompute_agree_with_the_portable_kernels(case, device):
    x, act, layout, rows = make(device, **CASES[case])
    del x["do"]
    HV, used = x["v"].shape[2], (rows > 0).to(device)
    names = ("w", "u", "kg", "qg", "aqk", "a", "decay", "norms")
    got, want = (workspaces(layout, HV, device, names) for _ in range(2))
    prepare_hopper.prepare_fwd(**x, **got, act=act, layout=layout)
    prepare.prepare_fwd(**x, **want, act=act, layout=layout, tile=tuning.lookup("prepare_fwd", 80, work=1))
    agree(got, want, used, 2e-3)  # scores are summed in another order before they are rounded to bf16

    a = {"a": want["a"]}
    got, want = (workspaces(layout, HV, device, [n for n in names if n not in ("aqk", "a")]) for _ in range(2))
    recompute_hopper.recompute_fwd(**x, **a, **got, act=act, layout=layout, PROGRAMS=2)
    prepare.recompute_fwd(**x, **a, **want, act=act, layout=layout, tile=tuning.lookup("recompute_fwd", 80, work=1))
    agree(got, want, used, 2e-4)
    assert all(bool(t[~used].isnan().all()) for t in got.values())  # chunks without rows are left alone


@pytest.mark.parametrize("case", CASES)
def test_values_agree_with_the_portable_kernel(case, device):
    from openkda.kda.kernels import gradients_values_hopper

    x, act, layout, rows = make(device, **CASES[case])
    do, HV, fw = x.pop("do"), x["v"].shape[2], frameworks.of(x["v"])
    p = workspaces(layout, HV, device, ("w", "u", "kg", "qg", "aqk", "a", "decay", "norms"))
    prepare.prepare_fwd(**x, **p, act=act, layout=layout, tile=tuning.lookup("prepare_fwd", 80, work=1))
    draw = torch.Generator().manual_seed(1)
    valid = (torch.arange(C) < rows[:, None])[:, None, :, None]
    sizes = {"v_new": (C, D), "dv_new": (C, D), "states": (D, D), "dstates": (D, D)}
    w = {n: torch.randn(layout.num_chunks, HV, *size, generator=draw) for n, size in sizes.items()}
    w = {n: (torch.where(valid, t, 0.0) if n.endswith("new") else t).bfloat16().to(device) for n, t in w.items()}
    results = []
    for hopper in (True, False):
        work = gradients._workspaces(fw, p["a"], HV, D, layout.num_chunks)
        for t in work.values():
            t.fill_(float("nan") if t.is_floating_point() else -1)
        dv, dbeta = torch.full_like(x["v"], float("nan")), torch.full_like(x["beta"], float("nan"))
        common = {"v": x["v"], "beta": x["beta"], "do": do, "a": p["a"], "aqk": p["aqk"], "qg": p["qg"], **w}
        common |= {"norms": p["norms"], "work": work, "dv": dv, "dbeta": dbeta, "layout": layout}
        if hopper:
            flags = {"L2NORM": True, "BETA_SIGMOID": True, "PACKED": layout.packed}
            gradients_values_hopper.values_bwd(**common, scale=act.scale, beta_scale=1.0, flags=flags, PROGRAMS=2)
        else:
            gradients_values.values_bwd(**common, act=act, BK=64, BV=64, hopper=False)
        work["row_norms"] = work["row_norms"].view(torch.float32).unflatten(-1, (C, 2))
        end = CASES[case]["cu"][-1] if layout.packed else x["v"].shape[1]
        assert bool(dv[:, end:].isnan().all())
        results.append((work, {"dv": dv[:, :end], "dbeta": dbeta[:, :end]}))
    used = (rows > 0).to(device)
    agree(results[0][0], results[1][0], used, 1e-4)
    agree(results[0][1], results[1][1], slice(None), 1e-4)
