"""A Comparison as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openkda.parity.results import Comparison, LayerReport


def lines(c: Comparison) -> Iterator[str]:
    """Everything but the long tables of the page; last the figures of the last tokens, and of all tokens."""
    yield (
        f"{c.source}, {c.dtype}, {c.routing} routing: {c.prompts} prompts, {c.all.tokens} tokens, "
        f"mean entropy {c.all.entropy:.2f} nats"
    )
    yield from (f"  {note}" for note in c.notes)
    yield "layer  mixer  ffn      hidden error  worst stage alone          experts agree  score diff  nearest tie"
    yield from (_layer(layer) for layer in c.layers)
    first = c.first_divergence
    yield f"first divergence: {'none' if first is None else f'layer {first.index}, {first.first_stage}'}"
    yield from (f"found: {finding.sentence()}" for finding in c.findings)
    if c.ties:
        widest = c.ties[0]
        number = sum(layer.tokens_rerouted or 0 for layer in c.layers)
        yield (
            f"routing: {number} choices of experts differ, all decided in the reference by score differences below "
            f"{widest.gap:.2e}"
        )
    if c.gradients:
        worst = c.gradients[0]
        yield f"gradients: {len(c.gradients)} parameters, largest relative error {worst.error:.2e} ({worst.name})"
    if c.packed is not None:
        also = "" if c.packed.gradient_error is None else f", gradients {c.packed.gradient_error:.2e}"
        yield f"packed against separate: logits {c.packed.logits_error:.2e}{also} (relative errors)"
    if c.rounding is not None:
        yield f"reference in {c.dtype} against itself in fp32: {c.rounding.line()}"
    yield from (f"over the threshold: {sentence}" for sentence in c.broken)
    yield f"last token: {c.last.line()}"
    yield f"all tokens: {c.all.line()}"


def _layer(layer: LayerReport) -> str:
    worst = max(layer.stages, key=lambda name: layer.stages[name])
    error = layer.stages[worst]
    row = f"{layer.index:5d}  {layer.mixer:5s}  {layer.ffn:7s}  {layer.hidden_error:12.2e}  {error:.1e} {worst:21s}"
    if layer.expert_agreement is None:
        return row.rstrip()
    return f"{row}  {100 * layer.expert_agreement:12.2f}%  {layer.score_diff:10.1e}  {layer.nearest_tie:11.1e}"
