"""Tile sizes of the convolution as data, one row a GPU family; `openkda.kda.kernels.tuning` explains the scheme.

BC channels a program, and as many tokens (`rows`) as give about PROGRAMS programs, within the limits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton

from openkda.kda.kernels.tuning import FAMILIES, family_of

MEASURED: dict[int, str] = {}


def _row(BC: int, num_warps: int, programs: int, fewest: int, most: int, **options: int) -> dict[str, int]:
    return {"BC": BC, "num_warps": num_warps, "programs": programs, "fewest": fewest, "most": most, **options}


TABLES: dict[str, dict[int, dict[str, int]]] = {
    "conv_fwd": {family: _row(1024, 4, 2112, 16, 64) for family in FAMILIES},
    "conv_bwd": {family: _row(512, 4, 528, 16, 1024) for family in FAMILIES},
}


@dataclass(frozen=True)
class Plan:
    """How a pass over tokens x channels is cut."""

    programs: int  # ranges * ceil(C / BC)
    ranges: int
    rows: int  # tokens of a range
    options: dict[str, int]  # BC and launch options


def plan(stage: str, x: Any, *, tokens: int, channels: int) -> Plan:
    """The cut for x; depends on shapes and the GPU family alone."""
    options = dict(TABLES[stage][family_of(x)])
    programs, fewest, most = (options.pop(name) for name in ("programs", "fewest", "most"))
    if (fewer := triton.next_power_of_2(channels)) < options["BC"]:
        options |= {"BC": fewer, "num_warps": max(1, options["num_warps"] * fewer // options["BC"])}
    blocks = -(-channels // options["BC"])
    rows = min(max(-(-tokens * blocks // programs), fewest), most, tokens)
    ranges = -(-tokens // rows)
    return Plan(ranges * blocks, ranges, rows, options)
