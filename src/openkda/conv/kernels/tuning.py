"""Tile sizes of the convolution as data, one row a GPU family; `openkda.kda.kernels.tuning` explains the scheme.

BC channels a program, and as many tokens (`rows`) as give about PROGRAMS programs, within the limits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton

from openkda.kda.kernels.tuning import family_of

MEASURED = {90: "NVIDIA H200, torch 2.11.0, triton 3.6.0"}


def _row(BC: int, num_warps: int, programs: int, fewest: int, most: int, **options: int) -> dict[str, int]:
    return {"BC": BC, "num_warps": num_warps, "programs": programs, "fewest": fewest, "most": most, **options}


TABLES: dict[str, dict[int, dict[str, int]]] = {
    # Few programs with long ranges: the fewer rows are read twice. Half a wave of four warps keeps memory busy.
    "conv_fwd": {
        80: _row(1024, 4, 648, 16, 256),
        89: _row(512, 4, 1536, 16, 256),
        90: _row(1024, 4, 768, 16, 256),
        100: _row(1024, 4, 888, 16, 256),
    },
    # One wave: three programs of 168 registers a multiprocessor. More would mean more partial sums.
    "conv_bwd": {
        80: _row(512, 4, 216, 16, 4096),
        89: _row(512, 4, 256, 16, 4096),
        90: _row(512, 4, 396, 16, 4096, maxnreg=168),
        100: _row(512, 4, 444, 16, 4096, maxnreg=168),
    },
}


@dataclass(frozen=True)
class Plan:
    """How a pass over tokens x channels is cut."""

    programs: int  # ranges * ceil(C / BC)
    ranges: int
    rows: int  # tokens of a range
    options: dict[str, int]  # BC and launch options


def plan(stage: str, x: Any, *, tokens: int, channels: int, states: bool = False) -> Plan:
    """The cut for x; depends on shapes and the GPU family alone, and on whether states take registers."""
    options = dict(TABLES[stage][family_of(x)])
    if states:
        options.pop("maxnreg", None)
    programs, fewest, most = (options.pop(name) for name in ("programs", "fewest", "most"))
    if (fewer := triton.next_power_of_2(channels)) < options["BC"]:
        options |= {"BC": fewer, "num_warps": max(1, options["num_warps"] * fewer // options["BC"])}
    blocks = -(-channels // options["BC"])
    rows = min(max(-(-tokens * blocks // programs), fewest), most, tokens)
    ranges = -(-tokens // rows)
    return Plan(ranges * blocks, ranges, rows, options)
