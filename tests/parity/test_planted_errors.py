"""A fault put into our model is found, in its layer and step, and named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import openkda
from openkda.integrations.torchtitan import kda as titan_kda
from openkda.parity import Pair, compare
from openkda.parity.results import Comparison, Finding

CopyOf = Callable[..., Pair]


def kda(pair: Pair, layer: int) -> Any:
    return pair.ours.layers[str(layer)].kda


def findings_of_layers(c: Comparison) -> list[Finding]:
    return [finding for finding in c.findings if finding.where.startswith("layer")]


def only_finding(c: Comparison, where: str, text: str) -> Finding:
    """The one finding in a layer; it must be there and say so."""
    (finding,) = findings_of_layers(c)
    assert finding.where == where
    assert finding.cause is not None
    assert text in finding.cause
    assert c.first_divergence is not None
    assert where.startswith(f"layer {c.first_divergence.index} ")
    assert finding.sentence() in c.text()
    return finding


def test_nothing_is_found_where_nothing_is_planted(tiny_pair: Pair, copy_of: CopyOf) -> None:
    c = compare(copy_of(tiny_pair))
    assert c.findings == []
    assert c.first_divergence is None


def test_wrong_gate_family_is_named(tiny_pair: Pair, copy_of: CopyOf) -> None:
    pair = copy_of(tiny_pair)
    kda(pair, 1).inner_kda.lower_bound = -5.0
    c = compare(pair)
    finding = only_finding(c, "layer 1 (KDA), log-decay", "the gate bounded at -5, the reference the softplus gate")
    assert finding.parameters == ["model.layers.1.self_attn.A_log", "model.layers.1.self_attn.dt_bias"]
    assert c.all.kl > 1e-6


def test_softplus_in_place_of_the_bounded_gate_is_named(bounded_pair: Pair, copy_of: CopyOf) -> None:
    pair = copy_of(bounded_pair)
    kda(pair, 2).inner_kda.lower_bound = None
    only_finding(compare(pair), "layer 2 (KDA), log-decay", "the softplus gate, the reference the gate bounded at -5")


def test_wrong_bound_is_named(bounded_pair: Pair, copy_of: CopyOf) -> None:
    pair = copy_of(bounded_pair)
    kda(pair, 0).inner_kda.lower_bound = -4.0
    only_finding(
        compare(pair), "layer 0 (KDA), log-decay", "the gate bounded at -4, the reference the gate bounded at -5"
    )


def test_exchanged_convolutions_are_named(tiny_pair: Pair, copy_of: CopyOf) -> None:
    pair = copy_of(tiny_pair)
    layer = kda(pair, 1)
    layer.q_conv1d.weight, layer.k_conv1d.weight = layer.k_conv1d.weight, layer.q_conv1d.weight
    c = compare(pair)
    only_finding(c, "layer 1 (KDA), q after convolution", "the convolution of q in ours uses the weights of k_conv1d")
    weights = [f.cause for f in c.findings if f.where == "weights, model.layers.1.self_attn.k_conv1d.weight"]
    assert weights == [
        "not equal to the reference's: it holds what the reference has in model.layers.1.self_attn.q_conv1d.weight"
    ]


def test_convolution_with_its_taps_reversed_is_named_though_the_weights_are_equal(
    tiny_pair: Pair, copy_of: CopyOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = copy_of(tiny_pair)
    inner = kda(pair, 2).inner_kda
    plain = inner._conv
    inner._conv = lambda x, weight, *rest: plain(x, weight.flip(-1), *rest)
    c = compare(pair)
    only_finding(c, "layer 2 (KDA), q after convolution", "applies the taps in reverse order")
    assert not [f for f in c.findings if f.where.startswith("weights")]


@pytest.mark.parametrize(
    "layer, path, stage",
    [
        (1, "attention_norm", "layer 1 (KDA), attention norm"),
        (2, "ffn_norm", "layer 2 (KDA), ffn norm"),
        (0, "kda.o_norm", "layer 0 (KDA), gated norm"),
    ],
)
def test_wrong_eps_is_named_with_both_values(
    tiny_pair: Pair, copy_of: CopyOf, layer: int, path: str, stage: str
) -> None:
    pair = copy_of(tiny_pair)
    pair.ours.layers[str(layer)].get_submodule(path).eps = 1e-6
    finding = only_finding(compare(pair), stage, "(its setting: 1e-06), the reference with 1e-05")
    assert finding.cause is not None
    measured = float(finding.cause.split("eps ")[1].split()[0])
    assert measured == pytest.approx(1e-6, rel=0.1)


def test_latent_norm_with_the_eps_of_the_other_norms_is_named(tiny_pair: Pair, copy_of: CopyOf) -> None:
    pair = copy_of(tiny_pair)
    pair.ours.layers["3"].attention.kv_norm.eps = 1e-5
    only_finding(compare(pair), "layer 3 (MLA), latent norm", "(its setting: 1e-05), the reference with 1e-06")


def test_output_gate_with_silu_is_named(tiny_pair: Pair, copy_of: CopyOf, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = copy_of(tiny_pair)
    norm = kda(pair, 1).o_norm
    norm.forward = lambda x, gate: openkda.rms_norm_gated(x, gate, norm.weight, activation="silu", eps=norm.eps)
    only_finding(compare(pair), "layer 1 (KDA), gated norm", "silu(gate) where the reference has sigmoid(gate)")


class _Operators:
    """openkda, with another chunk_kda in one layer."""

    def __init__(self, layer: Any, chunk_kda: Callable[..., Any]) -> None:
        self._A_log, self._chunk_kda = layer.decay.A_log, chunk_kda

    def __getattr__(self, name: str) -> Any:
        return getattr(openkda, name)

    def chunk_kda(self, *args: Any, **options: Any) -> Any:
        planted = options["A_log"] is self._A_log
        return (self._chunk_kda if planted else openkda.chunk_kda)(*args, **options)


def test_final_state_transposed_is_named(tiny_pair: Pair, copy_of: CopyOf, monkeypatch: pytest.MonkeyPatch) -> None:
    def chunk_kda(*args: Any, **options: Any) -> Any:
        o, state = openkda.chunk_kda(*args, **options)
        return o, None if state is None else state.mT.contiguous()

    pair = copy_of(tiny_pair)
    monkeypatch.setattr(titan_kda, "openkda", _Operators(kda(pair, 1), chunk_kda))
    only_finding(compare(pair), "layer 1 (KDA), final state", "transposed: [V, K] where the reference has [K, V]")


def test_state_read_transposed_is_named(tiny_pair: Pair, copy_of: CopyOf, monkeypatch: pytest.MonkeyPatch) -> None:
    from openkda.parity.causes import _loop

    def chunk_kda(q: Any, k: Any, v: Any, g: Any, beta: Any, **options: Any) -> Any:
        _, state = openkda.chunk_kda(q, k, v, g, beta, **options)
        g = openkda.kda_gate(g, options["A_log"], options["dt_bias"])
        return _loop(q, k, v, g, beta.sigmoid(), transposed=True), state

    pair = copy_of(tiny_pair, prompts=1)
    monkeypatch.setattr(titan_kda, "openkda", _Operators(kda(pair, 2), chunk_kda))
    only_finding(compare(pair), "layer 2 (KDA), attention", "ours reads and writes its state transposed")


def test_A_log_off_by_one_percent_in_one_layer_is_named(tiny_pair: Pair, copy_of: CopyOf) -> None:
    pair = copy_of(tiny_pair)
    with torch.no_grad():
        kda(pair, 1).decay.A_log.mul_(1.01)
    c = compare(pair)
    finding = only_finding(c, "layer 1 (KDA), log-decay", "the rates exp(A_log) differ")
    assert finding.parameters[0] == "model.layers.1.self_attn.A_log"
    (weights,) = [f for f in c.findings if f.where.startswith("weights")]
    assert weights.parameters == ["model.layers.1.self_attn.A_log"]
    assert "it is the reference's times 1.01 (+1.00%)" in (weights.cause or "")
    assert c.all.kl > 1e-9


def test_A_log_used_otherwise_is_found_though_the_weights_are_equal(tiny_pair: Pair, copy_of: CopyOf) -> None:
    pair = copy_of(tiny_pair)
    inner = kda(pair, 2).inner_kda
    inner.register_forward_pre_hook(lambda module, args: (*args[:8], 1.01 * args[8], *args[9:]))
    c = compare(pair)
    only_finding(c, "layer 2 (KDA), log-decay", "the rates exp(A_log) differ")
    assert len(c.findings) == 1


def test_stage_without_an_explanation_is_named_with_its_parameters(tiny_pair: Pair, copy_of: CopyOf) -> None:
    pair = copy_of(tiny_pair)
    projection = kda(pair, 1).v_proj
    plain = projection.forward
    projection.forward = lambda x: plain(x).roll(1, -1)
    (finding,) = compare(pair).findings
    assert finding.where == "layer 1 (KDA), v_proj"
    assert finding.cause is None
    assert finding.parameters == ["model.layers.1.self_attn.v_proj.weight"]


def test_fault_outside_the_layers_is_named(tiny_pair: Pair, copy_of: CopyOf) -> None:
    pair = copy_of(tiny_pair)
    with torch.no_grad():
        pair.ours.lm_head.weight[7] += 0.5
    assert {f.where for f in compare(pair).findings} == {"lm_head", "weights, lm_head.weight"}


def test_fault_in_a_router_is_found_without_blaming_later_layers(tiny_pair: Pair, copy_of: CopyOf) -> None:
    pair = copy_of(tiny_pair)
    router = pair.ours.layers["1"].moe.router
    router.route_scale = 1.0
    c = compare(pair)
    (finding,) = findings_of_layers(c)
    assert finding.where == "layer 1 (KDA), routed experts"
    assert c.layers[2].first_stage is None
    assert c.layers[2].hidden_error > c.tolerance
