"""Tile sizes of the normalisations as data, one row a GPU family; `openkda.kda.kernels.tuning` explains the scheme.

A program takes `size` entries at a time, in whole rows; a backward that sums over rows has `programs` programs, each of
which walks over many tiles.
"""

from __future__ import annotations

from typing import Any

import triton

from openkda.kda.kernels.tuning import FAMILIES, family_of

MEASURED = {90: "NVIDIA H200, torch 2.11.0, triton 3.6.0"}


def _row(size: int, num_warps: int, programs: int = 0) -> dict[str, int]:
    return {"size": size, "num_warps": num_warps, "programs": programs}


TABLES: dict[str, dict[int, dict[str, int]]] = {
    "l2norm_fwd": {family: _row(2048, 4) for family in FAMILIES},
    "l2norm_bwd": {family: _row(2048, 4) for family in FAMILIES},
    "rms_norm_gated_fwd": {family: _row(2048, 4) for family in FAMILIES},
    # One wave: two programs of eight warps a multiprocessor.
    "rms_norm_gated_bwd": {
        80: _row(4096, 8, programs=216),
        89: _row(4096, 8, programs=256),
        90: _row(4096, 8, programs=264),
        100: _row(4096, 8, programs=296),
    },
}


def plan(stage: str, x: Any, *, rows: int, width: int) -> tuple[int, dict[str, int]]:
    """Programs, and the options of a launch over [rows, width]; depends on shapes and the GPU family alone."""
    return cut(TABLES[stage][family_of(x)], rows=rows, width=width)


def cut(settings: dict[str, int], *, rows: int, width: int) -> tuple[int, dict[str, int]]:
    """`plan` with the settings of one row of the table."""
    BD = triton.next_power_of_2(width)
    BR = max(1, settings["size"] // BD)
    warps = settings["num_warps"] * max(1, BD // settings["size"])
    programs = -(-rows // BR)
    if settings["programs"]:
        programs = min(programs, settings["programs"])
    return programs, {"BR": BR, "BD": BD, "num_warps": warps}
