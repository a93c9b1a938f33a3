"""Tile sizes as data: one table a stage, one list a GPU family, measured once, the same in every run.

A row holds for calls of at most `work` programs before V is split (sequences x value heads for the serial scans, groups
x value heads for the re-scan); the last row of a list holds for all others. Families are compute capabilities; one that
is not listed takes the closest one below it. Only what stands in MEASURED was timed; the other families are untested:
their settings compile and fit the shared memory, no more is known.
"""

from __future__ import annotations

from typing import Any

from openkda import frameworks

FAMILIES = (80, 89, 90, 100)
MEASURED = {90: "NVIDIA H200, torch 2.11.0, triton 3.6.0"}

Row = tuple[float, dict[str, Any]]
ANY = float("inf")

_SMALL: list[Row] = [(ANY, {"BV": 32, "num_warps": 4, "num_stages": 1})]

TABLES: dict[str, dict[int, list[Row]]] = {
    # Serial over chunks, parallel over sequences, heads and V tiles: narrow tiles while they fill the GPU.
    "scan_fwd": {
        80: [(ANY, {"BV": 32, "num_warps": 4, "num_stages": 2})],
        89: _SMALL,
        90: [(ANY, {"BV": 32, "num_warps": 4, "num_stages": 3})],
        100: [(ANY, {"BV": 32, "num_warps": 4, "num_stages": 3})],
    },
    "rescan_fwd": {
        80: [(ANY, {"BV": 64, "num_warps": 4, "num_stages": 2})],
        89: _SMALL,
        90: [(ANY, {"BV": 64, "num_warps": 4, "num_stages": 2})],
        100: [(ANY, {"BV": 64, "num_warps": 4, "num_stages": 2})],
    },
    "reverse_scan_bwd": {
        80: [(ANY, {"BV": 32, "num_warps": 4, "num_stages": 2})],
        89: _SMALL,
        90: [(ANY, {"BV": 32, "num_warps": 4, "num_stages": 3})],
        100: [(ANY, {"BV": 32, "num_warps": 4, "num_stages": 3})],
    },
}


def family_of(x: Any) -> int:
    """Family of the GPU that holds x; sm_90's for CPU tensors, which only the interpreter runs."""
    capability = frameworks.of(x).compute_capability(x)
    if capability is None:
        return 90
    return max((f for f in FAMILIES if f <= capability), default=FAMILIES[0])


def lookup(stage: str, family: int, *, work: int) -> dict[str, Any]:
    """Settings of a stage for a call of this size; a new dict at each call."""
    for limit, settings in TABLES[stage][family]:
        if work <= limit:
            return dict(settings)
    raise KeyError(f"tuning: {stage} must have a last row for any size, got none for sm_{family}")
