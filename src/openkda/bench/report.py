"""Results as a table on the terminal, as Markdown, and as one line of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

OPENKDA = "openkda"

#: Key of a result -> heading. What is missing is shown as a dash.
OP_COLUMNS = {
    "forward_ms": "forward ms",
    "forward_graph_ms": "forward, graph ms",
    "forward_backward_ms": "both ms",
    "forward_backward_graph_ms": "both, graph ms",
    "forward_backward_launch_ms": "both, launch ms",
    "ratio": "times openkda",
    "peak_mib": "peak MiB",
    "kept_mib": "kept MiB",
    "o_error": "error of o",
    "worst_gradient": "worst gradient",
}
LAYER_COLUMNS = {
    "forward_ms": "forward ms",
    "forward_backward_ms": "both ms",
    "projections_ms": "projections ms",
    "outside_projections_ms": "outside them ms",
    "ratio": "times openkda",
    "outside_ratio": "times openkda, outside",
    "peak_mib": "peak MiB",
    "kept_mib": "kept MiB",
    "o_error": "error of y",
}
LEGEND = {
    "op": """\
forward: without gradient; both: forward + backward. Times: median (20th - 80th percentile); graph: the same in a CUDA
graph; launch: what the eager call takes longer. times openkda: both (forward where there is no backward) over openkda's
in the same process, where the two take turns. peak: above the inputs, with o and its gradient; kept: for the backward,
above the inputs and o. Errors: relative RMS against fp64, all tokens of up to two heads.""",
    "layer": """\
forward: without gradient; both: forward + backward. Times: median (20th - 80th percentile). projections: the layer's
linear maps alone, forward and backward. times openkda: over openkda's in the same process, where the two take turns.
peak and kept: above input and weights. Error: relative RMS of the output against the same layer in fp64.""",
}


def columns(what: str) -> dict[str, str]:
    return OP_COLUMNS if what == "op" else LAYER_COLUMNS


def heading(what: str, rows: Sequence[dict[str, Any]], options: str) -> str:
    """Machine, versions and options, one line each."""
    machine = next((row["machine"] for row in rows if "machine" in row), {"device": "unknown: no row has started"})
    versions = {name: v for name, v in machine.items() if name != "device"}
    for row in rows:
        for result in row["implementations"].values():
            versions |= result.get("versions", {})
    shown = ", ".join(f"{name} {v}" for name, v in versions.items())
    return f"openkda bench {what} on {machine['device']}\n{shown}\n{options}"


def lines(what: str, rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str, dict[str, str], str]]:
    """(shape, implementation, cells by column key, reason) of each line; openkda once per shape."""
    seen = set()
    for row in rows:
        shape, peer = row["shape"], row["peer"]
        results = dict(row["implementations"])
        if row["failure"]:
            results.setdefault(peer or OPENKDA, {})
            results[peer or OPENKDA]["reason"] = results[peer or OPENKDA].get("reason") or row["failure"]
        ours = results.get(OPENKDA, {})
        for name, result in results.items():
            if name == OPENKDA and (shape in seen or ("forward_ms" not in result and not result.get("reason"))):
                continue
            if name == OPENKDA:
                seen.add(shape)
            cells = {key: cell(value(result, ours, key)) for key in columns(what)}
            yield shape, name, cells, result.get("reason") or ""


def value(result: dict[str, Any], ours: dict[str, Any], key: str) -> Any:
    """What a column shows of a result, beside openkda's in the same row."""
    errors = result.get("errors", {})
    if key == "ratio":
        kind = "forward_backward_ms" if "forward_backward_ms" in result else "forward_ms"
        if result is ours or kind not in result or kind not in ours:
            return None
        return result[kind]["p50"] / ours[kind]["p50"]
    if key == "outside_ratio":
        kind = "outside_projections_ms"
        return None if result is ours or kind not in result or kind not in ours else result[kind] / ours[kind]
    if key == "o_error":
        return _error(errors, ("o", "y"))
    if key == "worst_gradient":
        names = [name for name in errors if name.startswith("d")]
        worst = max(names, key=lambda n: float("inf") if errors[n] is None else errors[n], default=None)
        return worst and f"{_error(errors, (worst,))} {worst}"
    return result.get(key)


def _error(errors: dict[str, float | None], names: tuple[str, ...]) -> str | None:
    found = [errors[name] for name in names if name in errors]
    if not found:
        return None
    return "not finite" if found[0] is None else f"{found[0]:.1e}"


def cell(x: Any) -> str:
    """A value as text: times with their spread, everything else to a sensible number of digits."""
    if x is None:
        return "-"
    if isinstance(x, dict):
        return f"{x['p50']:.3f} ({x['p20']:.3f} - {x['p80']:.3f})"
    if isinstance(x, float):
        return f"{x:.0f}" if abs(x) >= 100 else f"{x:.2f}" if abs(x) >= 10 else f"{x:.3f}"
    return str(x)


def print_table(what: str, rows: Sequence[dict[str, Any]], missing: Sequence[str]) -> None:
    """A rich table; below it a line for each peer that could not be measured, the missing ones first."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:  # a file or a pipe has no width: do not fold the columns to 80
        console = Console(highlight=False, width=220)
    found = list(lines(what, rows))
    shown = [key for key in columns(what) if any(cells[key] != "-" for _, _, cells, _ in found)]
    table = Table()
    for title in ("shape", "implementation", *(columns(what)[key] for key in shown)):
        table.add_column(title, justify="left" if title in ("shape", "implementation") else "right")
    for shape, name, cells, _ in found:
        if any(text != "-" for text in cells.values()):
            table.add_row(shape, name, *(cells[key] for key in shown))
    if table.row_count:
        console.print(table)
    for line in [*missing, *remarks(rows, found)]:
        console.print(line, soft_wrap=True, markup=False)


def remarks(rows: Sequence[dict[str, Any]], found: Sequence[tuple[str, str, dict[str, str], str]]) -> list[str]:
    """What to know about the peers, and which could not be measured and why."""
    notes = {
        name: r["note"]
        for row in rows
        for name, r in row["implementations"].items()
        if r.get("note") and "forward_ms" in r
    }
    said = [f"{name}: {note}" for name, note in notes.items()]
    reasons: dict[tuple[str, str], list[str]] = {}
    for shape, name, _, reason in found:
        if reason:
            reasons.setdefault((name, reason), []).append(shape)
    said += [f"{name} at {', '.join(shapes)}: {reason}" for (name, reason), shapes in reasons.items()]
    for row in rows:
        for name, r in row["implementations"].items():
            if r.get("graph_reason"):
                said.append(f"{name} at {row['shape']}: no CUDA graph: {r['graph_reason']}")
    return list(dict.fromkeys(said))


def markdown(what: str, rows: Sequence[dict[str, Any]], options: str, command: str, missing: Sequence[str]) -> str:
    """A page with the command, the machine, the table and the remarks."""
    found = list(lines(what, rows))
    shown = [key for key in columns(what) if any(cells[key] != "-" for _, _, cells, _ in found)]
    titles = ["shape", "implementation", *(columns(what)[key] for key in shown)]
    page = [f"# {heading(what, rows, options).splitlines()[0]}", "", f"    {command}", ""]
    page += [*heading(what, rows, options).splitlines()[1:], ""]
    page += [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    for shape, name, cells, _ in found:
        if any(text != "-" for text in cells.values()):
            page.append(f"| {' | '.join([shape, name, *(cells[key] for key in shown)])} |")
    page += ["", *LEGEND[what].splitlines(), ""]
    page += [f"- {line}" for line in [*missing, *remarks(rows, found)]]
    return "\n".join(page).rstrip() + "\n"


def kernel_lines(rows: Sequence[dict[str, Any]], at_least_us: float = 1.0) -> list[str]:
    """The kernels of one forward + backward of each implementation, the longest first."""
    said = []
    for row in rows:
        for name, result in row["implementations"].items():
            if result.get("kernels"):
                said.append(f"kernels of {name} at {row['shape']}:")
                said += [
                    f"  {k['us']:9.1f} us  x{k['launches']:<4g} {k['name'][:90]}"
                    for k in result["kernels"]
                    if k["us"] >= at_least_us
                ]
    return said


def summary(what: str, rows: Sequence[dict[str, Any]]) -> str:
    """One line of JSON: per shape, how many times openkda's time each peer takes."""
    ratios: dict[str, dict[str, float | None]] = {}
    for row in rows:
        ours = row["implementations"].get(OPENKDA, {})
        if row["peer"]:
            ratio = value(row["implementations"].get(row["peer"], {}), ours, "ratio")
            ratios.setdefault(row["shape"], {})[row["peer"]] = None if ratio is None else round(ratio, 3)
    return json.dumps({"benchmark": what, "rows": len(rows), "times_openkda": ratios})
