"""A Comparison as one HTML file: no scripts, nothing fetched, readable when printed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.metadata import version
from pathlib import Path

from openkda import __version__
from openkda.parity.figure import divergence_svg
from openkda.parity.metrics import Figures
from openkda.parity.results import Comparison, LayerReport
from openkda.parity.stages import ORDER

MANY_GRADIENTS = 20

_STYLE = """
:root { --ink: #1c2733; --soft: #5c6b7a; --line: #d9e0e7; --good: #2f7d4f; --bad: #c0392b; --wash: #f5f7f9; }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); max-width: 1000px; margin: 0 auto;
  padding: 2rem 1.5rem 4rem; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .4rem; border-bottom: 1px solid var(--line); padding-bottom: .2rem; }
p { margin: .4rem 0; }
.soft { color: var(--soft); font-size: .92em; }
.verdict { border-left: 5px solid var(--good); background: var(--wash); padding: .7rem 1rem; margin: 1rem 0; }
.verdict.bad { border-color: var(--bad); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: .5rem 0; font-variant-numeric: tabular-nums; font-size: .92em; }
th { text-align: left; color: var(--soft); font-weight: 600; }
th, td { padding: .22rem .8rem .22rem 0; border-bottom: 1px solid var(--line); vertical-align: top;
  white-space: nowrap; }
td.n, th.n { text-align: right; }
td.wrap { white-space: normal; min-width: 14rem; }
.over { color: var(--bad); font-weight: 600; }
.first { background: #fbe9e7; }
code { font-family: ui-monospace, monospace; font-size: .92em; }
mark { background: #ffe9a8; color: inherit; }
svg { max-width: 100%; height: auto; }
"""


def write_page(comparison: Comparison, path: Path) -> None:
    """Write the report to a file."""
    path.write_text(page(comparison), encoding="utf-8")


def page(c: Comparison) -> str:
    """The report as HTML."""
    parts = [
        f"<h1>Parity: {escape(c.source)}</h1>",
        f'<p class="soft">transformers {version("transformers")} (reference) and openkda {__version__} in torchtitan '
        f"{version('torchtitan')}, torch {version('torch')} · {c.dtype} · {c.routing} routing · {c.prompts} prompts, "
        f"{c.all.tokens} tokens · mean entropy {c.all.entropy:.2f} nats</p>",
        *(f'<p class="soft">{escape(note)}</p>' for note in c.notes),
        _verdict(c),
        _figures(c),
        "<h2>Where the models part</h2>",
        "<p>Bars: a layer by itself, given what the reference gives its own; a fault shows in its layer only. "
        "Line: the hidden state of the whole model, where errors add up.</p>",
        divergence_svg(c),
        _layers(c),
        _stages(c),
        _router(c),
        _worst(c),
        _gradients(c),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>'
        f"Parity: {escape(c.source)}</title>\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


# ---- the answer ------------------------------------------------------------------------------------------------------


def _verdict(c: Comparison) -> str:
    bad = bool(c.findings or c.broken)
    if c.findings:
        head = f"Not the same model: {len(c.findings)} finding{'s' if len(c.findings) > 1 else ''} beyond rounding."
    elif c.broken:
        head = "No single step differs by more than rounding, but a threshold is not kept."
    else:
        head = "The same model: no step of any layer differs by more than rounding."
        if c.dtype != "fp32":
            head += f" That of {c.dtype} is coarse; in fp32 smaller faults show."
    items = [_finding(c, i) for i in range(len(c.findings))]
    items += [f"over the threshold: {escape(sentence)}" for sentence in c.broken]
    rows = "".join(f"<li>{item}</li>" for item in items)
    return (
        f'<div class="verdict{" bad" if bad else ""}"><strong>{head}</strong>{f"<ul>{rows}</ul>" if rows else ""}</div>'
    )


def _finding(c: Comparison, index: int) -> str:
    f = c.findings[index]
    names = f" <code>{escape(', '.join(f.parameters))}</code>" if f.parameters else ""
    cause = escape(f.cause) if f.cause else "no known cause fits"
    return f"<strong>{escape(f.where)}</strong>: {cause}. Relative error {f.error:.2e}.{names}"


def _figures(c: Comparison) -> str:
    rows = [("last token of each prompt", c.last), ("all tokens", c.all)]
    if c.packed is not None:
        rows.append(("all tokens, ours packed", c.packed.figures))
    if c.rounding is not None:
        rows.append((f"the reference in {c.dtype} against itself in fp32", c.rounding))
    table = _table(
        ["", "largest KL", "mean KL", "smallest cosine", "largest difference", "top 1", "top 5"],
        ([_td(name), *_figure_cells(figures)] for name, figures in rows),
    )
    extra = ""
    if c.packed is not None:
        gradient = "" if c.packed.gradient_error is None else (
            f", of gradients {c.packed.gradient_error:.2e} ({escape(c.packed.gradient_name or '')})"
        )  # fmt: skip
        extra = (
            f"<p>All prompts in one packed row, against one by one: relative error of the logits "
            f"{c.packed.logits_error:.2e}{gradient}.</p>"
        )
    return f"<h2>Predictions</h2>{table}{extra}"


def _figure_cells(f: Figures) -> list[str]:
    numbers = (f"{f.kl:.2e}", f"{f.mean_kl:.2e}", f"{f.cos:.9f}", f"{f.max_diff:.2e}")
    return [_td(text, "n") for text in (*numbers, f"{100 * f.top1:.2f}%", f"{100 * f.top5:.2f}%")]


# ---- layers ----------------------------------------------------------------------------------------------------------


def _layers(c: Comparison) -> str:
    first = c.first_divergence
    text = "none" if first is None else f"layer {first.index}, {escape(first.first_stage or '')}"
    return f"<p>First divergence: <strong>{text}</strong>.</p>" + _table(
        ["layer", "mixer", "feed-forward", "hidden state", "worst stage alone", "", "first over the tolerance"],
        (_layer_row(layer, c.tolerance) for layer in c.layers),
    )


def _layer_row(layer: LayerReport, tolerance: float) -> list[str]:
    worst = max(layer.stages, key=lambda name: layer.stages[name])
    return [
        _td(str(layer.index), "n"),
        _td(layer.mixer),
        _td(layer.ffn),
        _error(layer.hidden_error, None),
        _error(layer.stages[worst], tolerance),
        _td(worst),
        _td(layer.first_stage or "–", "over" if layer.first_stage else ""),
    ]


def _stages(c: Comparison) -> str:
    """Stages down, layers across: the first red cell of a column is where its layer goes wrong."""
    names = [name for name in ORDER if any(name in layer.stages for layer in c.layers)]
    rows = []
    for name in names:
        cells = [_td(name)]
        for layer in c.layers:
            if name not in layer.stages:
                cells.append(_td("", "n"))
            else:
                cells.append(_error(layer.stages[name], c.tolerance, first=layer.first_stage == name))
        rows.append(cells)
    return (
        "<h2>Every step, by itself</h2><p>Relative RMS error of each step of a layer, given the reference's input and "
        f"experts; red: over the tolerance of {c.tolerance:g}. Read a column downwards: its first red cell is where "
        "the layer goes wrong, the others pass it on.</p>"
        + _table(["step", *(f"layer {layer.index}" for layer in c.layers)], rows)
    )


def _router(c: Comparison) -> str:
    routed = [layer for layer in c.layers if layer.expert_agreement is not None]
    if not routed:
        return ""
    table = _table(
        ["layer", "experts agree", "tokens with other experts", "largest score difference", "nearest tie"],
        (
            [
                _td(str(layer.index), "n"),
                _td(f"{100 * (layer.expert_agreement or 0):.3f}%", "n"),
                _td(str(layer.tokens_rerouted), "n"),
                _error(layer.score_diff or 0.0, None),
                _error(layer.nearest_tie or 0.0, None),
            ]
            for layer in routed
        ),
    )
    note = (
        "Ours used the reference's experts; the table shows what its own routers would have chosen."
        if c.routing == "forced"
        else "Each model chose for itself."
    )
    ties = ""
    if c.ties:
        ties = (
            "<p>Tokens whose experts differ, the clearest decisions first. The margin is how far, in the reference, "
            "the last expert chosen was ahead of the first one left out: where the score difference above is as large, "
            "rounding decides.</p>"
            + _table(
                ["layer", "prompt", "position", "token", "margin", "reference", "ours"],
                (
                    [
                        _td(str(t.layer), "n"),
                        _td(t.prompt),
                        _td(str(t.position), "n"),
                        _code(t.piece),
                        _error(t.gap, None),
                        _td(str(t.reference)),
                        _td(str(t.ours)),
                    ]
                    for t in c.ties
                ),
            )
        )
    return f"<h2>Routing</h2><p>{note}</p>{table}{ties}"


# ---- tokens and gradients --------------------------------------------------------------------------------------------


def _worst(c: Comparison) -> str:
    rows = (
        [
            _td(w.prompt),
            _td(str(w.position), "n"),
            f'<td class="wrap"><code>{escape(w.before)}<mark>{escape(_visible(w.piece))}</mark></code></td>',
            _error(w.kl, None),
            _td(f"{w.cos:.9f}", "n"),
            _td(" ".join(map(_visible, w.reference))),
            _td(" ".join(map(_visible, w.ours))),
        ]
        for w in c.worst
    )
    return (
        "<h2>Worst tokens</h2><p>Where the predictions of the next token differ most, after the marked one.</p>"
        + _table(["prompt", "position", "text", "KL", "cosine", "reference expects", "ours expects"], rows)
    )


def _gradients(c: Comparison) -> str:
    if not c.gradients:
        return ""
    shown = c.gradients[:MANY_GRADIENTS]
    return (
        f"<h2>Gradients</h2><p>Of the mean next-token loss; the {len(shown)} with the largest errors of "
        f"{len(c.gradients)} parameters.</p>"
        + _table(
            ["parameter", "relative error", "norm"],
            ([_code(g.name), _error(g.error, None), _td(f"{g.norm:.2e}", "n")] for g in shown),
        )
    )


# ---- HTML ------------------------------------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells come as HTML; a title stands over its numbers as they do, to the right."""
    cells = [list(row) for row in rows]
    numeric = [bool(cells) and cells[0][i].startswith('<td class="n') for i in range(len(head))]
    titles = "".join(
        f"<th{' class=n' if right else ''}>{escape(title)}</th>" for title, right in zip(head, numeric, strict=True)
    )
    body = "\n".join(f"<tr>{''.join(row)}</tr>" for row in cells)
    return f'<div class="scroll"><table><thead><tr>{titles}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def _td(text: str, kind: str = "") -> str:
    return f"<td{f' class={chr(34)}{kind}{chr(34)}' if kind else ''}>{escape(text)}</td>"


def _code(text: str) -> str:
    return f"<td><code>{escape(_visible(text))}</code></td>"


def _error(value: float, tolerance: float | None, *, first: bool = False) -> str:
    over = tolerance is not None and not value <= tolerance
    kind = "n" + (" over" if over else "") + (" first" if first else "")
    return f'<td class="{kind}">{f"{value:.1e}" if value else "0"}</td>'


def _visible(text: str) -> str:
    """A token that can be seen: blanks as their symbols."""
    return text.replace(" ", "␣").replace("\n", "⏎") or "∅"
