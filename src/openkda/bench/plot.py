"""Time and memory against T, one line for each implementation and number of heads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

PANELS = {
    "forward_ms": "forward, ms",
    "forward_backward_ms": "forward + backward, ms",
    "peak_mib": "peak memory above the inputs, MiB",
}


def series(rows: Sequence[dict[str, Any]], quantity: str) -> dict[str, list[tuple[int, float]]]:
    """{implementation and sizes: [(T, value), ...]} of one quantity; openkda once per shape, from its first row."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        case = row["case"]
        for name, result in row["implementations"].items():
            value = result.get(quantity)
            if value is not None:
                label = f"{name}, B{case['B']} H{case['H']}"
                found.setdefault(label, {}).setdefault(case["T"], value["p50"] if isinstance(value, dict) else value)
    return {label: sorted(points.items()) for label, points in sorted(found.items())}


def draw(rows: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Write the picture; its format is that of the file's name."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = {quantity: lines for quantity in PANELS if (lines := series(rows, quantity))}
    figure = Figure(figsize=(5.5 * max(1, len(panels)), 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    labels = sorted({label for lines in panels.values() for label in lines})
    for i, (quantity, lines) in enumerate(panels.items()):
        axes = figure.add_subplot(1, len(panels), i + 1)
        for label, points in lines.items():
            style = "-o" if label.startswith("openkda") else "--s"
            T, values = zip(*points, strict=True)
            axes.plot(T, values, style, label=label, color=f"C{labels.index(label) % 10}", markersize=4)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("tokens a sequence")
        axes.set_title(PANELS[quantity])
        axes.grid(True, which="both", alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=130)
