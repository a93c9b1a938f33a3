"""The plot of a report: errors and routing, layer by layer, as SVG text. matplotlib without a display."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from openkda.parity.results import Comparison

FLOOR = 1e-9  # a logarithmic axis has no zero: equal to the last bit is drawn here
MODEL, ALONE, OVER, SCORES = "#1f5fa8", "#7a9e3b", "#c0392b", "#8e6bb0"


def divergence_svg(c: Comparison) -> str:
    """Two panels over the layers: errors (whole model, layer alone, tolerance) and the router's disagreement."""
    figure = Figure(figsize=(8.6, 5.4), layout="constrained")
    FigureCanvasSVG(figure)
    errors, routing = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    layers = [layer.index for layer in c.layers]
    alone = [max(_drawn(max(layer.stages.values())), FLOOR) for layer in c.layers]
    colors = [OVER if layer.first_stage else ALONE for layer in c.layers]
    errors.bar(layers, alone, width=0.55, color=colors, alpha=0.85, label="this layer alone, its worst stage")
    errors.plot(
        layers,
        [_drawn(x.hidden_error) for x in c.layers],
        "o-",
        color=MODEL,
        label="hidden state, whole model",
    )
    errors.axhline(c.tolerance, color=OVER, linestyle="--", linewidth=1, label=f"tolerance {c.tolerance:g}")
    for layer, value in zip(c.layers, alone, strict=True):
        if layer.first_stage:
            errors.annotate(
                layer.first_stage,
                (layer.index, value),
                xytext=(0, 4),
                textcoords="offset points",
                ha="center",
                color=OVER,
            )
    errors.set_yscale("log")
    errors.set_ylim(FLOOR, 10 * max(c.tolerance, *alone, *(_drawn(x.hidden_error) for x in c.layers)))
    errors.set_ylabel("relative RMS error")
    figure.legend(loc="outside upper center", ncols=3, fontsize=8, frameon=False)
    errors.grid(axis="y", alpha=0.25)

    routed = [layer for layer in c.layers if layer.expert_agreement is not None]
    if routed:
        share = [100 * (1 - (layer.expert_agreement or 0.0)) for layer in routed]
        routing.bar([layer.index for layer in routed], share, width=0.55, color=SCORES)
        routing.set_ylim(0, max(1.0, 1.3 * max(share)))
    routing.set_ylabel("experts chosen\notherwise, %")
    routing.set_xlabel("layer")
    routing.set_xticks(layers, [f"{layer.index}\n{layer.mixer}" for layer in c.layers])
    routing.grid(axis="y", alpha=0.25)
    return _svg(figure)


def _drawn(value: float) -> float:
    """A value that a logarithmic axis can show; NaN and infinity at its upper end."""
    return max(value, FLOOR) if value < 1e3 else 1e3


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    # Text stays text: the page can be searched, and its fonts are the reader's. No date: equal reports are equal files.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "openkda", "font.family": "sans-serif"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)  # it names addresses that no one needs
    return text[text.index("<svg") :]
