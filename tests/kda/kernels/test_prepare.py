"""The prepare stage and its recomputation against the eager functions in fp64, on raw inputs."""

import itertools
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from openkda import frameworks
from openkda.kda import eager, gate
from openkda.kda.kernels import prepare, tables
from openkda.kda.kernels.common import Activations
from openkda.testing import FP32_LIMIT, assert_close, assert_within_budget

pytestmark = pytest.mark.interpreter
C = tables.CHUNK
fw = frameworks.of(torch.empty(0))

# name: (gate, raw gate from a normal n and a uniform u, exp(A_log), common part of all keys)
GATES = {
    "softplus": ("softplus", lambda n, u: n, 1.0, 0.0),
    "slow, cos 0.8": ("softplus", lambda n, u: n - 4.0, 1.0, 2.0),
    "20x": ("softplus", lambda n, u: n, 20.0, 0.0),
    "bounded": ("bounded", lambda n, u: torch.log(u / (1 - u)), 1.0, 0.0),  # g in U(-5, 0)
    "bounded, all -5": ("bounded", lambda n, u: 30 + 0 * n, 1.0, 0.0),
    "mixed": ("none", lambda n, u: -(10 ** (7 * u - 4)), 1.0, 0.0),  # g from -1e-4 to -1000 in one chunk
    "no decay": ("none", lambda n, u: 0 * n, 1.0, 0.0),
}


def make(T, B=1, H=1, HV=1, K=32, V=32, name="softplus", dtype=torch.bfloat16, cu=None, **flags):
    """Inputs on the CPU, activations, and the offsets of sequences in the flattened tokens."""
    draw = torch.Generator().manual_seed(0)

    def n(*shape):
        return torch.randn(*shape, generator=draw)

    kind, raw, rate, alike = GATES[name]
    g = raw(n(B, T, HV, K), torch.rand(B, T, HV, K, generator=draw).clamp(1e-3, 1 - 1e-3))
    q, k, v, beta = n(B, T, H, K), n(B, T, H, K) + alike * n(1, 1, H, K), n(B, T, HV, V), n(B, T, HV)
    x = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    x = {key: t.to(dtype) for key, t in x.items()}
    if not flags.get("l2norm", True):
        x["q"], x["k"] = (torch.nn.functional.normalize(x[key].float(), dim=-1).to(dtype) for key in ("q", "k"))
    if not flags.get("beta_sigmoid", True):
        x["beta"] = x["beta"].float().sigmoid().to(dtype)
    bias = n(HV, K) * 0.1 if flags.get("bias", True) and kind != "none" else None
    act = Activations(
        scale=K**-0.5,
        l2norm=flags.get("l2norm", True),
        gate=kind,
        A_log=torch.full((HV,), rate).log() if kind != "none" else None,
        dt_bias=bias,
        lower_bound=-5.0 if kind == "bounded" else None,
        beta_sigmoid=flags.get("beta_sigmoid", True),
        beta_scale=flags.get("beta_scale", 1.0),
    )
    return SimpleNamespace(x=x, act=act, cu=cu, B=B, T=T, H=H, HV=HV, K=K, V=V)


def run(case, device, tile=None):
    """Both launchers on poisoned workspaces: what prepare_fwd gave, and what recompute_fwd gave from its inverse."""
    x = {key: t.to(device) for key, t in case.x.items()} if not hasattr(case, "views") else case.views(device)
    cu = None if case.cu is None else torch.tensor(case.cu, device=device)
    layout = tables.make_layout(x["q"], cu)
    act = case.act
    if act.A_log is not None:
        bias = None if act.dt_bias is None else act.dt_bias.to(device)
        act = Activations(**{**vars(act), "A_log": act.A_log.to(device), "dt_bias": bias})
    ws = torch.float32 if x["q"].dtype == torch.float32 else torch.bfloat16
    NC, HV, K, V = layout.num_chunks, case.HV, case.K, case.V
    widths = {"w": (C, K), "u": (C, V), "kg": (C, K), "qg": (C, K), "aqk": (C, C), "a": (C, C)}

    def poisoned():
        out = {key: torch.full((NC, HV, *size), float("nan"), dtype=ws, device=device) for key, size in widths.items()}
        out |= {"decay": torch.full((NC, HV, K), float("nan"), device=device)}
        return out | {"norms": torch.full((NC, HV, 2, C), float("nan"), device=device)}

    first, second = poisoned(), poisoned()
    prepare.prepare_fwd(**x, **first, act=act, layout=layout, tile=tile)
    second["a"] = first["a"]
    prepare.recompute_fwd(**x, **{k: t for k, t in second.items() if k != "aqk"}, act=act, layout=layout)
    del second["aqk"], second["a"]
    return layout, *({key: t.cpu() for key, t in out.items()} for out in (first, second))


def rows_of(case):
    """Token of every row of every chunk [NC, C], B * T where there is none."""
    offsets = case.cu or [n * case.T for n in range(case.B + 1)]
    per = -(-case.T // C)
    NC = case.T // C + len(offsets) - 1 if case.cu else case.B * per
    rows = torch.full((NC, C), case.B * case.T)
    for n, (a, b) in enumerate(itertools.pairwise(offsets)):
        first = a // C + n if case.cu else n * per
        for t in range(a, b):
            rows[first + (t - a) // C, (t - a) % C] = t
    return rows


def stage(case, operand=None, store=lambda t: t):
    """The stage in fp64 by the eager functions; `operand` rounds what enters a product, `store` what is written."""
    act, rows = case.act, rows_of(case)
    x = {key: t.double() for key, t in case.x.items()}
    norms = {key: (x[key].square().sum(-1, keepdim=True) + 1e-6).rsqrt() for key in ("q", "k")}
    if act.l2norm:
        x["q"], x["k"] = (x[key] * norm for key, norm in norms.items())
    if act.gate != "none":
        x["g"] = gate.activate(x["g"], act.A_log, act.dt_bias, act.lower_bound, "float64")
    if act.beta_sigmoid:
        x["beta"] = act.beta_scale * x["beta"].sigmoid()
    x["beta"] = x["beta"][..., None]

    def chunked(t, empty=0.0):  # [B, T, heads, D] -> [NC, HV, C, D]; `empty` where there is no token
        t = torch.cat([t.flatten(0, 1), torch.full((1, *t.shape[2:]), empty, dtype=t.dtype)])[rows]
        return t.repeat_interleave(case.HV // t.shape[2], 2).transpose(1, 2)

    q, k, v, g, b = (chunked(x[key]) for key in ("q", "k", "v", "g", "beta"))
    q = q * act.scale
    mm = eager.Matmul(fw, operand)
    levels, d_in, d_out, d_all = eager.decay_factors(fw, g)
    aqk, akk = eager.intra_chunk_scores(mm, q, k, levels)
    a = eager.triangular_inverse(fw, b, eager.level_blocks(fw, akk))
    ab = a * b.mT
    out = {"w": mm(ab, k * d_in), "u": mm(ab, v), "kg": k * d_out, "qg": q * d_in, "aqk": aqk, "a": a}
    norms = torch.stack([chunked(norm, 1e3)[..., 0] for norm in norms.values()], 2)
    return {key: store(t) for key, t in out.items()} | {"decay": d_all, "norms": norms}


def bf16(t):
    return t.bfloat16().double()


def check(case, device, tile=None):
    """Errors of both launchers against fp64, on the chunks that hold tokens."""
    used = (rows_of(case) < case.B * case.T).any(1)
    _, first, second = run(case, device, tile)
    exact = {key: t[used] for key, t in stage(case).items()}
    for got in (first, second):
        got = {key: t[used].double() for key, t in got.items()}
        want = {key: exact[key] for key in got}
        # exp of a sum e that is right to r of itself is right to r e of itself; r is a few roundings of 2^-24
        decay, want_decay = got.pop("decay"), want.pop("decay")
        tiny = torch.finfo(torch.float32).tiny  # what is less may be flushed to 0
        bound = 2e-6 * (1 + want_decay.clamp_min(tiny).log().abs()) * want_decay + tiny
        assert ((decay - want_decay).abs() <= bound).all()
        norms, want_norms = got.pop("norms"), want.pop("norms")
        if case.act.l2norm:
            assert ((norms / want_norms - 1).abs() <= 2e-6).all()
        else:
            assert norms.isnan().all()
        if case.x["q"].dtype == torch.float32:
            assert_close(got, want, FP32_LIMIT)
        else:
            rounded = {key: t[used] for key, t in stage(case, "bfloat16", bf16).items()}
            assert_within_budget(got, want, {key: rounded[key] for key in got})
    return first


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", GATES)
def test_prepare_matches_eager_for_every_gate(name, dtype, device):
    check(make(T=64, K=32, V=16, name=name, dtype=dtype), device)


# ragged ends; K != V, not powers of two, above one slice and above one tile; GVA
@pytest.mark.parametrize(
    "shape",
    [
        {"T": 1}, {"T": 70, "B": 2}, {"T": 65, "K": 24, "V": 40}, {"T": 33, "K": 16, "V": 144},
        {"T": 20, "K": 136, "V": 16}, {"T": 40, "H": 2, "HV": 4},
    ],
    ids=lambda shape: "-".join(f"{key}{value}" for key, value in shape.items()),
)  # fmt: skip
def test_prepare_matches_eager_for_every_shape(shape, device):
    check(make(**shape, name="bounded"), device)


@pytest.mark.parametrize(
    "flags",
    [
        {"l2norm": False}, {"beta_sigmoid": False}, {"beta_scale": 2.0}, {"bias": False},
        {"name": "mixed", "l2norm": False}, {"dtype": torch.float16}, {"dtype": torch.float16, "l2norm": False},
        {"dtype": torch.float32, "l2norm": False},
    ],
    ids=lambda flags: "-".join(f"{key}_{str(value).removeprefix('torch.')}" for key, value in flags.items()),
)  # fmt: skip
def test_prepare_matches_eager_for_every_flag(flags, device):
    check(make(T=64, **flags), device)


def test_prepare_follows_the_packed_table(device):
    """Empty slots, one token, a chunk more or less, and a tail of NaN that nothing may look at."""
    case = make(T=150, HV=2, name="softplus", cu=[0, 0, 64, 65, 65, 140])
    used = (rows_of(case) < case.T).any(1)
    for key in case.x:
        case.x[key][:, 140:] = float("nan")
    clean = make(T=150, HV=2, name="softplus", cu=[0, 0, 64, 65, 65, 140])
    _, first, _ = run(case, device)
    case.x = clean.x
    again = check(case, device)
    for key, t in first.items():
        assert torch.equal(t[used], again[key][used]), key
        assert t[~used].isnan().all(), key  # chunks without rows are left alone


def test_prepare_reads_strided_inputs_in_place(device):
    """An interleaved QKV projection and heads-first tensors give the same bits as contiguous ones."""
    case = make(T=70, B=2, H=2, HV=2, K=32, V=32)
    _, want, _ = run(case, device)

    def views(device):
        x = {key: t.to(device) for key, t in case.x.items()}
        qkv = torch.cat([x["q"], x["k"], x["v"]], -1)  # [B, T, H, 3 D]
        x["q"], x["k"], x["v"] = qkv.split(32, -1)
        x["g"] = x["g"].transpose(1, 2).contiguous().transpose(1, 2)
        x["beta"] = x["beta"].transpose(1, 2).contiguous().transpose(1, 2)
        return x

    case.views = views
    _, got, _ = run(case, device)
    for key in want:
        assert torch.equal(got[key], want[key]), key


@pytest.mark.parametrize("P", [1, 17, 40])
def test_prepare_is_causal_to_the_bit(P, device):
    """Rows before P of what outputs read do not see a change at P and after."""
    case = make(T=64)
    _, want, _ = run(case, device)
    case.x = {key: torch.cat([t[:, :P], t[:, P:].flip(1) * 2], 1) for key, t in case.x.items()}
    _, got, _ = run(case, device)
    for key in ("w", "u", "qg", "aqk", "a"):
        assert torch.equal(got[key][:, :, :P], want[key][:, :, :P]), key
    assert not torch.equal(got["qg"], want["qg"])


def test_inverse_stays_accurate_for_equal_keys(device):
    """Equal keys, beta = 1, no decay: the strictly lower part has norm 40, and a Neumann series loses all digits."""
    case = make(T=64, name="no decay", beta_sigmoid=False)
    case.x["k"] = case.x["k"][:, :1].expand(-1, 64, -1, -1).contiguous()
    case.x["beta"] = torch.ones_like(case.x["beta"])
    check(case, device)
