"""Explain the first stage that differs: try what is known to go wrong, and keep an explanation that fits the numbers.

An explanation is kept only if it reproduces our output from the reference's input to within a small part of the
difference, so a sentence in the report is a finding and not a guess. Where none fits, the report names the stage and
the parameters it depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import openkda
from openkda.integrations.torchtitan.model import KimiLinearBlock
from openkda.parity import stages
from openkda.parity.stages import Stage

FITS = 0.05  # an explanation may leave this part of the difference
LOOP_TOKENS = 48  # the variants of the operator are run token by token on so many


@dataclass
class Site:
    """A stage that differs, and all that is known there.

    reference, ours: values by stage. operator: the reference's q, k, v, g, beta. call: the arguments of our operator.
    """

    stage: Stage
    block: KimiLinearBlock
    layer: Any
    reference: Mapping[str, Tensor]
    ours: Mapping[str, Tensor]
    operator: Mapping[str, Tensor]
    call: Mapping[str, Any]
    block_input: Tensor


def relative(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want|| in fp64; shapes of as many elements."""
    a, b = got.detach().double().flatten(), want.detach().double().flatten()
    return ((a - b).norm() / b.norm().clamp_min(1e-300)).item()


def explain(site: Site) -> str | None:
    """A sentence on what our side does differently, or None."""
    name = site.stage.name
    explanations: dict[str, Callable[[Site], str | None]] = {
        "attention norm": lambda s: _norm(s, s.block_input, s.layer.input_layernorm, s.block.attention_norm),
        "latent norm": _latent_norm,
        "ffn norm": _ffn_norm,
        "gated norm": _gated_norm,
        "log-decay": _decay,
        stages.ATTENTION: _operator,
        **{f"{x} after convolution": _convolution for x in "qkv"},
    }
    return explanations[name](site) if name in explanations else None


def _fitting(site: Site, candidates: Iterator[tuple[str, Tensor]]) -> str | None:
    """The candidate that is closest to our output, if it explains nearly all of the difference."""
    own = site.ours[site.stage.name]
    best = min(((relative(value, own), text) for text, value in candidates), default=(float("inf"), ""))
    return best[1] if best[0] <= FITS * relative(own, site.reference[site.stage.name]) else None


# ---- norms -----------------------------------------------------------------------------------------------------------


def _norm(site: Site, x: Tensor, reference: Any, ours: Any) -> str | None:
    return _eps(site, x, 1.0, reference.weight, reference.variance_epsilon, ours.eps)


def _latent_norm(site: Site) -> str | None:
    latent = site.reference["kv_a_proj"][..., : site.block.attention.kv_lora_rank]
    return _norm(site, latent, site.layer.self_attn.kv_a_layernorm, site.block.attention.kv_norm)


def _ffn_norm(site: Site) -> str | None:
    mixed = site.block_input + site.reference["o_proj"]
    return _norm(site, mixed, site.layer.post_attention_layernorm, site.block.ffn_norm)


def _gated_norm(site: Site) -> str | None:
    norm = site.layer.self_attn.o_norm
    x = site.reference[stages.ATTENTION]
    gate = site.reference["output gate"].view_as(x).float()
    found = _eps(site, x, gate.sigmoid(), norm.weight, norm.variance_epsilon, site.block.kda.o_norm.eps)

    def candidates() -> Iterator[tuple[str, Tensor]]:
        normed = F.rms_norm(x.float(), x.shape[-1:], norm.weight.float(), norm.variance_epsilon)
        yield "ours gates with silu(gate) where the reference has sigmoid(gate)", normed * F.silu(gate)
        yield "ours does not apply the output gate", normed
        yield (
            "ours norms after gating, the reference before",
            F.rms_norm(x.float() * gate.sigmoid(), x.shape[-1:], norm.weight.float(), norm.variance_epsilon),
        )

    return found or _fitting(site, candidates())


def _eps(site: Site, x: Tensor, factor: Tensor | float, weight: Tensor, reference: float, ours: float) -> str | None:
    """Solve y = factor * weight * x / sqrt(mean(x^2) + eps) for eps, from our output."""
    x64, y64 = x.double(), site.ours[site.stage.name].view_as(x).double()
    mean_square = x64.square().mean(-1, keepdim=True)
    top = factor * weight.double() * x64
    # One scale 1/sqrt(mean_square + eps) a token: the ratio of two projections, which small elements cannot spoil.
    scale = (top * y64).sum(-1, keepdim=True) / top.square().sum(-1, keepdim=True)
    eps = (1 / scale.square() - mean_square).median()
    fitted = top * torch.rsqrt((mean_square + eps).clamp_min(1e-300))
    if eps <= 0 or relative(fitted, y64) > FITS * relative(y64, site.reference[site.stage.name].view_as(x)):
        return None
    return f"ours norms with eps {eps.item():.3g} (its setting: {ours:g}), the reference with {reference:g}"


# ---- short convolution -----------------------------------------------------------------------------------------------


def _convolution(site: Site) -> str | None:
    mine = site.stage.name[0]
    attention = site.layer.self_attn
    weights = dict(zip("qkv", attention.conv1d.weight.detach().squeeze(1).chunk(3), strict=True))
    x = site.reference[f"{mine}_proj"]

    def candidates() -> Iterator[tuple[str, Tensor]]:
        for other, weight in weights.items():
            for turned in (False, True):
                for activation in ("silu", None):
                    taps = weight.flip(-1) if turned else weight
                    y, _ = openkda.causal_conv1d(x, taps.contiguous(), activation=activation)
                    faults = [
                        f"uses the weights of {other}_conv1d" if other != mine else "",
                        "applies the taps in reverse order" if turned else "",
                        "leaves out silu" if activation is None else "",
                    ]
                    yield f"the convolution of {mine} in ours " + " and ".join(filter(None, faults)), y

    return _fitting(site, candidates())


# ---- decay -----------------------------------------------------------------------------------------------------------


def _decay(site: Site) -> str | None:
    gate = site.layer.self_attn.forget_gate
    heads = site.block.kda.decay.A_log.shape[0]
    raw = site.reference["gate logits"].unflatten(-1, (heads, -1))
    A_log, dt_bias = gate.A_log.detach().float().reshape(-1), gate.dt_bias.detach().float().view(heads, -1)
    theirs = getattr(gate, "safe_gate_lower_bound", None)
    own = site.call.get("lower_bound")

    def candidates() -> Iterator[tuple[str, Tensor]]:
        for bound in {None, own, -5.0} - {theirs}:
            text = f"ours has {_family(bound)}, the reference {_family(theirs)}: wrong gate family or bound"
            yield text, openkda.kda_gate(raw, A_log, dt_bias, lower_bound=bound)
        yield "ours leaves out dt_bias", openkda.kda_gate(raw, A_log, None, lower_bound=theirs)
        yield (
            "ours uses A_log where exp(A_log) belongs",
            openkda.kda_gate(raw, A_log.clamp_min(1e-30).log(), dt_bias, lower_bound=theirs),
        )

    return _fitting(site, candidates()) or _rate(site)


def _family(bound: float | None) -> str:
    return "the softplus gate" if bound is None else f"the gate bounded at {bound:g}"


def _rate(site: Site) -> str | None:
    """Whether, head by head, our log-decay is a constant times the reference's (softplus gate: another rate)."""
    reference, ours = site.reference["log-decay"].double(), site.ours["log-decay"].double()
    axes = (0, 1, 3)
    ratio = (reference * ours).sum(axes) / reference.square().sum(axes).clamp_min(1e-300)  # [H]
    left = relative(reference * ratio[:, None], ours)
    if left > FITS * relative(ours, reference):
        return None
    heads = ", ".join(f"{r - 1:+.2%}" for r in ratio.tolist()[:8])
    return f"the rates exp(A_log) differ: our log-decay is off by {heads} in heads 0 to {min(len(ratio), 8) - 1}"


# ---- operator --------------------------------------------------------------------------------------------------------


def _operator(site: Site) -> str | None:
    if site.block.mixer_name != "kda":
        return None
    T = LOOP_TOKENS
    q, k, v, g, beta = (site.operator[n][:, :T].double() for n in ("q", "k", "v", "g", "beta"))
    own = site.ours[stages.ATTENTION][:, :T]
    loops = {
        "ours reads and writes its state transposed, [V, K] where [K, V] is meant": {"transposed": True},
        "ours decays the state after the update instead of before": {"decay_last": True},
        "ours reads the state before the token's own update": {"read_first": True},
        "ours does not normalise q and k": {"normalise": False},
        "ours leaves out the scale K**-0.5": {"scale": 1.0},
        "ours leaves out the delta rule's correction": {"correct": False},
    }
    want = site.reference[stages.ATTENTION][:, :T]
    difference = relative(own, want)
    fits = {text: relative(_loop(q, k, v, g, beta, **options), own) for text, options in loops.items()}
    best = min(fits, key=lambda text: fits[text])
    return best if fits[best] <= FITS * difference else None


def _loop(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    transposed: bool = False,
    decay_last: bool = False,
    read_first: bool = False,
    normalise: bool = True,
    scale: float | None = None,
    correct: bool = True,
) -> Tensor:
    """The recurrence with one thing wrong; q, k, g `[B, T, H, K]`, v `[B, T, H, V]`, beta `[B, T, H]`."""
    if normalise:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    out = []
    for t in range(q.shape[1]):
        decay = g[:, t].exp()[..., None]
        if not decay_last:
            state = state * decay
        read = state
        seen = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        error = (v[:, t] - seen if correct else v[:, t]) * beta[:, t, :, None]
        state = state + k[:, t, :, :, None] * error[:, :, None]
        if transposed:
            if q.shape[3] != v.shape[3]:
                return torch.full_like(v, torch.inf)
            read = state.mT
        elif not read_first:
            read = state
        out.append(torch.einsum("bhkv,bhk->bhv", read, q[:, t]))
        if decay_last:
            state = state * decay
    return torch.stack(out, 1)


def state_transposed(reference: Tensor, ours: Tensor) -> str | None:
    """Whether our final state `[1, H, K, V]` is the reference's with K and V exchanged."""
    if ours.shape[-1] != ours.shape[-2] or relative(ours.mT, reference) > FITS * relative(ours, reference):
        return None
    return "the final state in ours is transposed: [V, K] where the reference has [K, V]"


# ---- parameters ------------------------------------------------------------------------------------------------------


def compare_weights(reference: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> Iterator[tuple[str, float, str]]:
    """Parameters that are not equal bit for bit: name on disk, relative error, and what it looks like."""
    for name, want in reference.items():
        got = ours[name]
        if torch.equal(got.double().flatten(), want.double().flatten()):
            continue
        yield name, relative(got, want), _describe_weight(name, got, reference)


def _describe_weight(name: str, got: Tensor, reference: Mapping[str, Tensor]) -> str:
    want = reference[name].view_as(got).double()
    got = got.double()
    twins = [
        other
        for other, value in reference.items()
        if other != name and value.shape == want.shape and torch.equal(value.double(), got)
    ]
    if twins:
        return f"it holds what the reference has in {twins[0]}"
    if torch.equal(got.flip(-1), want):
        return "its last axis is in reverse order"
    if got.ndim == 2 and got.shape[0] == got.shape[1] and torch.equal(got.mT, want):
        return "it is transposed"
    ratio = (got * want).sum() / want.square().sum().clamp_min(1e-300)
    if relative(want * ratio, got) <= FITS * relative(got, want):
        return f"it is the reference's times {ratio.item():.6g} ({ratio.item() - 1:+.2%})"
    return f"largest difference {(got - want).abs().max().item():.3g}"
