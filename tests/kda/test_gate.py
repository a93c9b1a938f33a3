"""Both gate families: their values, their derivatives at the extremes, and the chunk-local cumulative sum."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from openkda import kda_gate, kda_gate_cumsum, testing

LOG2_E = 1.4426950408889634


def logits(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """raw [1, T, 1, 1]."""
    return torch.tensor(values, dtype=dtype).view(1, -1, 1, 1)


def rate(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """A_log [1] with exp(A_log) = value."""
    return torch.tensor([math.log(value)], dtype=dtype)


def gradients(g: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(g.sum(), leaves)


# ---- values
def test_softplus_gate_by_hand():
    # -2 * log(1 + e^0) and, with bias ln 3, -2 * log(1 + 3).
    assert kda_gate(logits(0.0), rate(2)).item() == pytest.approx(-2 * math.log(2), rel=1e-6, abs=0)
    assert kda_gate(logits(0.0), rate(2), torch.tensor([[math.log(3)]])).item() == pytest.approx(
        -2 * math.log(4), rel=1e-6
    )


def test_bounded_gate_by_hand():
    # -5 * sigmoid(2 * (1 - 1)) = -2.5; -5 * sigmoid(2 * ln 3 / 2) = -3.75.
    bias = torch.tensor([[-1.0]])
    raw = logits(1.0, 1 + math.log(3) / 2)
    assert kda_gate(raw, rate(2), bias, lower_bound=-5).flatten().tolist() == pytest.approx(
        [-2.5, -3.75], rel=1e-6, abs=0
    )


@pytest.mark.parametrize("raw", [-20.0, -50.0, -80.0])
def test_softplus_gate_keeps_its_digits_for_very_negative_logits(raw):
    # log(1 + e^x) is e^x there; log1p keeps it, log(1 + ..) would give 0.
    assert kda_gate(logits(raw), rate(1)).item() == pytest.approx(-math.exp(raw), rel=1e-5, abs=0)


def test_softplus_gate_keeps_its_digits_at_minus_100():
    # e^-100 = 3.7e-44 lies among the subnormal fp32 numbers, 1.4e-45 apart; in fp64 it has all its digits.
    assert kda_gate(logits(-100.0, dtype=torch.float64), rate(1, torch.float64)).item() == pytest.approx(
        -math.exp(-100), rel=1e-12, abs=0
    )
    assert kda_gate(logits(-100.0), rate(1)).item() == pytest.approx(-math.exp(-100), rel=0, abs=3e-45)


@pytest.mark.parametrize("raw", [20.0, 50.0, 89.0, 1000.0])
def test_softplus_gate_is_linear_for_large_logits(raw):
    assert kda_gate(logits(raw), rate(3)).item() == pytest.approx(-3 * raw, rel=1e-6, abs=0)


@pytest.mark.parametrize("lower_bound", [None, -5.0, -0.01, -1000.0])
def test_gate_is_never_above_zero_nor_below_its_bound(lower_bound):
    raw = torch.linspace(-200, 200, 801).view(1, -1, 1, 1)
    for strength in (1e-3, 1.0, 16.0, 1e4):
        g = kda_gate(raw, rate(strength), lower_bound=lower_bound)
        assert g.isfinite().all()
        assert (g <= 0).all()
        assert lower_bound is None or (g >= lower_bound).all()


@pytest.mark.parametrize("lower_bound", [None, -5.0], ids=["softplus", "bounded"])
def test_gate_takes_dt_bias_flat_or_by_head(lower_bound):
    # Channels differ, so an index by head alone would show.
    raw, A_log, dt_bias = torch.randn(2, 5, 3, 4), torch.randn(3), torch.arange(12.0).view(3, 4)
    g = kda_gate(raw, A_log, dt_bias, lower_bound=lower_bound)
    assert torch.equal(g, kda_gate(raw, A_log, dt_bias.flatten(), lower_bound=lower_bound))
    assert torch.equal(g[..., 1, 2], kda_gate(raw + 6, A_log, lower_bound=lower_bound)[..., 1, 2])


@pytest.mark.parametrize(
    "dtype, want",
    [("float64", torch.float64), ("float32", torch.float32), ("bfloat16", torch.float32), ("float16", torch.float32)],
)
def test_gate_is_never_rounded_to_16_bits(dtype, want):
    raw = torch.randn(1, 3, 2, 4).to(getattr(torch, dtype)).requires_grad_()
    A_log = torch.randn(2, dtype=want)
    g = kda_gate(raw, A_log)
    assert g.dtype == want
    assert torch.equal(g, kda_gate(raw.to(want), A_log))
    assert gradients(g, raw)[0].dtype == raw.dtype


@pytest.mark.parametrize("gate", ["softplus", "bounded"])
def test_gate_outside_the_operator_equals_the_gate_inside(gate):
    from openkda import chunk_kda

    inputs = testing.make_inputs(T=70, HV=4, gate=gate)
    lower_bound = inputs.options.get("lower_bound")

    def outside(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **kwargs: object) -> object:
        A_log, dt_bias = kwargs.pop("A_log"), kwargs.pop("dt_bias")
        for name in ("use_gate_in_kernel", "lower_bound"):
            kwargs.pop(name, None)
        return chunk_kda(q, k, v, kda_gate(g, A_log, dt_bias, lower_bound=lower_bound), beta, **kwargs)

    testing.assert_close(testing.run(outside, inputs), testing.run(chunk_kda, inputs), testing.FP64_LIMIT)


# ---- derivatives
@pytest.mark.parametrize("lower_bound", [None, -5.0], ids=["softplus", "bounded"])
def test_gate_gradients_agree_with_finite_differences(lower_bound):
    rng = torch.Generator().manual_seed(0)
    shapes = ((2, 3, 2, 3), (2,), (2, 3))
    leaves = [torch.randn(s, generator=rng, dtype=torch.float64).requires_grad_() for s in shapes]
    assert torch.autograd.gradcheck(lambda *x: kda_gate(*x, lower_bound=lower_bound), leaves)


@pytest.mark.parametrize("lower_bound", [None, -5.0], ids=["softplus", "bounded"])
@pytest.mark.parametrize("raw", [-50.0, 50.0, -1e4, 1e4])
@pytest.mark.parametrize("strength", [1.0, 16.0, 1e30])
def test_gate_gradients_are_finite_at_saturation(raw, strength, lower_bound):
    leaves = [logits(raw), rate(strength), torch.tensor([[0.5]])]
    leaves = [x.requires_grad_() for x in leaves]
    g = kda_gate(*leaves, lower_bound=lower_bound)
    assert g.isfinite().all()
    assert all(grad.isfinite().all() for grad in gradients(g, *leaves))


@pytest.mark.parametrize("raw", [-50.0, 50.0])
def test_a_saturated_bounded_gate_has_gradient_zero(raw):
    leaves = [x.requires_grad_() for x in (logits(raw), rate(16), torch.zeros(1, 1))]
    grads = gradients(kda_gate(*leaves, lower_bound=-5.0), *leaves)
    assert [grad.item() for grad in grads] == [0.0, 0.0, 0.0]


def test_a_saturated_softplus_gate_has_the_slope_of_its_asymptote():
    raw = logits(-50.0, 50.0).requires_grad_()
    (grad,) = gradients(kda_gate(raw, rate(2)), raw)
    assert grad.flatten().tolist() == pytest.approx([-2 * math.exp(-50), -2.0], rel=1e-5, abs=0)


@pytest.mark.parametrize("sign", [-1, 1])
def test_bounded_gate_gradient_keeps_its_digits_on_both_sides(sign):
    # s(z) s(-z) = e^-30 at both ends; 1 - s(z) would lose it at the upper one.
    raw = logits(sign * 30.0).requires_grad_()
    (grad,) = gradients(kda_gate(raw, rate(1), lower_bound=-5.0), raw)
    assert grad.item() == pytest.approx(-5 * math.exp(-30), rel=1e-5, abs=0)


def test_bounded_gate_keeps_its_distance_from_zero():
    # -5 * sigmoid(-80) is -5e^-80 = -9e-35, not 0.
    assert kda_gate(logits(-80.0), rate(1), lower_bound=-5.0).item() == pytest.approx(
        -5 * math.exp(-80), rel=1e-5, abs=0
    )


# ---- cumulative sums
def by_loop(g: Tensor, chunk_size: int, starts: list[int], end: int) -> Tensor:
    """Sum from the first token of the chunk, chunks starting anew at each of starts; 0 from end on."""
    total = torch.zeros_like(g)
    for t in range(end):
        begin = max(s for s in starts if s <= t)
        total[:, t] = g[:, t] + (total[:, t - 1] if (t - begin) % chunk_size else 0)
    return total


@pytest.mark.parametrize("lower_bound", [None, -5.0], ids=["softplus", "bounded"])
@pytest.mark.parametrize("chunk_size", [1, 16, 32, 64])
@pytest.mark.parametrize("T", [1, 63, 64, 65, 130])
def test_gate_cumsum_sums_inside_each_chunk(T, chunk_size, lower_bound):
    inputs = testing.make_inputs(B=2, T=T, HV=2, K=3)
    gate = (inputs.g, inputs.A_log, inputs.dt_bias)
    want = by_loop(kda_gate(*gate, lower_bound=lower_bound), chunk_size, [0], T)
    nats = kda_gate_cumsum(*gate, lower_bound=lower_bound, chunk_size=chunk_size, log2=False)
    torch.testing.assert_close(nats, want, rtol=1e-13, atol=0)
    bits = kda_gate_cumsum(*gate, lower_bound=lower_bound, chunk_size=chunk_size)
    torch.testing.assert_close(bits, LOG2_E * want, rtol=1e-13, atol=0)


@pytest.mark.parametrize(
    "offsets, T",
    [([0, 15, 100], 100), ([0, 0, 64, 64, 65], 65), ([0, 30], 50), ([0, 0], 4)],
    ids=["two", "empty slots", "tail", "only tail"],
)
def test_gate_cumsum_starts_anew_at_every_sequence(offsets, T):
    inputs = testing.make_inputs(T=T, HV=2, K=3, cu_seqlens=offsets)
    leaves = [x.requires_grad_() for x in (inputs.g, inputs.A_log, inputs.dt_bias)]
    got = kda_gate_cumsum(*leaves, chunk_size=32, log2=False, cu_seqlens=inputs.cu_seqlens)
    end = offsets[-1]
    clean = inputs.g.detach().nan_to_num()
    want = by_loop(kda_gate(clean, *leaves[1:]).detach(), 32, offsets[:-1], end)
    torch.testing.assert_close(got, want, rtol=1e-13, atol=0)
    got.backward(inputs.grad_o[..., :3])  # NaN in the tail, too
    assert all(x.grad.isfinite().all() for x in leaves)
    assert not leaves[0].grad[:, end:].any()


@pytest.mark.parametrize("log2", [False, True])
def test_gate_cumsum_gradients_agree_with_finite_differences(log2):
    rng = torch.Generator().manual_seed(0)
    leaves = [torch.randn(s, generator=rng, dtype=torch.float64).requires_grad_() for s in ((1, 5, 1, 2), (1,), (1, 2))]
    cu_seqlens = torch.tensor([0, 3, 4])
    for options in ({}, {"cu_seqlens": cu_seqlens}, {"lower_bound": -5.0}):
        assert torch.autograd.gradcheck(lambda *x, o=options: kda_gate_cumsum(*x, chunk_size=2, log2=log2, **o), leaves)


def test_gate_cumsum_is_fp32_for_16_bit_logits():
    raw = torch.randn(1, 70, 2, 4).bfloat16()
    A_log = torch.zeros(2)
    got = kda_gate_cumsum(raw, A_log)
    assert got.dtype == torch.float32
    assert torch.equal(got, kda_gate_cumsum(raw.float(), A_log))


# ---- refusals
RAW, A_LOG, BIAS = torch.zeros(1, 5, 2, 4), torch.zeros(2), torch.zeros(2, 4)
REFUSED = {
    "dt_bias of one entry per head": (
        dict(dt_bias=torch.zeros(2)),
        ValueError,
        r"dt_bias must have shape \[HV, K\] = \[2, 4\] or \[HV\*K\] = \[8\], got \[2\]; it has one entry per channel",
    ),
    "dt_bias transposed": (dict(dt_bias=torch.zeros(4, 2)), ValueError, r"dt_bias must have shape .*, got \[4, 2\]"),
    "dt_bias in 16 bits": (dict(dt_bias=BIAS.bfloat16()), TypeError, "dt_bias must have dtype float32, got bfloat16"),
    "A_log in 16 bits": (dict(A_log=A_LOG.bfloat16()), TypeError, "A_log must have dtype float32, got bfloat16"),
    "A_log of another number of heads": (
        dict(A_log=torch.zeros(3)),
        ValueError,
        r"A_log must have shape \[HV\] = \[2\], got \[3\]",
    ),
    "A_log as on disk": (
        dict(A_log=torch.zeros(1, 1, 2, 1)),
        ValueError,
        r"A_log must have shape \[HV\] = \[2\], got \[1, 1, 2, 1\]; reshape",
    ),
    "A_log None": (dict(A_log=None), TypeError, "A_log must be a tensor, got NoneType"),
    "A_log a number": (dict(A_log=1.0), TypeError, "A_log must be a tensor, got float"),
    "raw without heads": (
        dict(raw=torch.zeros(1, 5, 4)),
        ValueError,
        r"raw must have shape \[B, T, HV, K\], got \[1, 5, 4\]",
    ),
    "raw of integers": (dict(raw=RAW.long()), TypeError, "raw must have a floating dtype, got int64"),
    "lower_bound 0": (
        dict(lower_bound=0.0),
        ValueError,
        "lower_bound must be finite and below 0, got 0.0; it is the smallest",
    ),
    "lower_bound 5": (dict(lower_bound=5), ValueError, "lower_bound must be finite and below 0, got 5"),
    "lower_bound -inf": (dict(lower_bound=-math.inf), ValueError, "lower_bound must be finite and below 0, got -inf"),
    "lower_bound NaN": (dict(lower_bound=math.nan), ValueError, "lower_bound must be finite and below 0, got nan"),
    "lower_bound a tensor": (
        dict(lower_bound=torch.tensor(-5.0)),
        TypeError,
        "lower_bound must be a number or None, got Tensor",
    ),
    "other devices": (dict(A_log=A_LOG.to("meta")), ValueError, "A_log must be on raw's device cpu, got meta"),
}


@pytest.mark.parametrize("op", [kda_gate, kda_gate_cumsum], ids=lambda op: op.__name__)
@pytest.mark.parametrize("change, error, message", REFUSED.values(), ids=REFUSED.keys())
def test_gate_refuses(op, change, error, message):
    arguments = {"raw": RAW, "A_log": A_LOG, "dt_bias": BIAS, "lower_bound": None} | change
    with pytest.raises(error, match=f"^{op.__name__}: {message}"):
        op(**arguments)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(chunk_size=0), ValueError, "chunk_size must be at least 1, got 0"),
        (dict(chunk_size=2.5), TypeError, "chunk_size must be an int, got float"),
        (dict(log2=2), TypeError, "log2 must be a bool, got int"),
        (
            dict(cu_seqlens=torch.tensor([0.0, 5.0])),
            TypeError,
            "cu_seqlens must have dtype int32 or int64, got float32",
        ),
        (dict(cu_seqlens=torch.tensor([[0, 5]])), ValueError, r"cu_seqlens must have shape \[N\+1\], got \[1, 2\]"),
        (dict(cu_seqlens=torch.tensor([0])), ValueError, r"cu_seqlens must hold at least 2 offsets \[N\+1\], got 1"),
        (
            dict(raw=RAW.repeat(2, 1, 1, 1), cu_seqlens=torch.tensor([0, 5])),
            ValueError,
            "batch size must be 1 with cu_seqlens, got 2",
        ),
    ],
    ids=[
        "chunk_size 0",
        "chunk_size a float",
        "log2 a number",
        "offsets of floats",
        "offsets of rank 2",
        "one offset",
        "batch of 2",
    ],
)
def test_gate_cumsum_refuses(change, error, message):
    arguments = {"raw": RAW, "A_log": A_LOG} | change
    with pytest.raises(error, match=f"^kda_gate_cumsum: {message}"):
        kda_gate_cumsum(**arguments)


def test_gate_takes_keywords_only_after_the_bias():
    with pytest.raises(TypeError, match="positional"):
        kda_gate(RAW, A_LOG, BIAS, -5.0)
