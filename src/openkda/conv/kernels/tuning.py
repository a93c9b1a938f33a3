"""Tile sizes of the convolution as data, one row a GPU family; `openkda.kda.kernels.tuning` explains the scheme.

BC channels a program, and tokens (`rows`) in as many ranges as give about `programs` programs, within the limits: one
wave of programs, since long ranges read fewer rows twice and leave fewer partial sums. How many fit depends on the
registers, and packed sequences and states take some: their calls have rows of their own (`_more`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton

from openkda.kda.kernels.tuning import family_of

MEASURED = {90: "NVIDIA H200, torch 2.11.0, triton 3.6.0"}


def _row(BC: int, num_warps: int, programs: int, fewest: int = 16, most: int = 4096, **options: int) -> dict[str, int]:
    return {"BC": BC, "num_warps": num_warps, "programs": programs, "fewest": fewest, "most": most, **options}


TABLES: dict[str, dict[int, dict[str, int]]] = {
    "conv_fwd": {  # four programs a multiprocessor where nothing spills
        80: _row(1024, 4, 324),
        89: _row(512, 4, 512),
        90: _row(1024, 4, 528, maxnreg=128),
        100: _row(1024, 4, 592, maxnreg=128),
    },
    "conv_fwd_more": {  # three
        80: _row(1024, 4, 324),
        89: _row(512, 4, 512),
        90: _row(1024, 4, 396, maxnreg=168),
        100: _row(1024, 4, 444, maxnreg=168),
    },
    "conv_bwd": {  # three; not one program more, or a second wave doubles the time
        80: _row(512, 4, 216),
        89: _row(512, 4, 256, maxnreg=224),
        90: _row(512, 4, 396, maxnreg=168),
        100: _row(512, 4, 444, maxnreg=168),
    },
    "conv_bwd_more": {  # two
        80: _row(512, 4, 216),
        89: _row(512, 4, 256),
        90: _row(512, 4, 264),
        100: _row(512, 4, 296),
    },
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
    rows = -(-tokens // max(programs // blocks, 1))
    rows = min(max(rows, fewest), most, tokens)
    ranges = -(-tokens // rows)
    return Plan(ranges * blocks, ranges, rows, options)
