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


def _row(BV: int, num_warps: int, num_stages: int, TMA: bool = False) -> dict[str, Any]:
    return {"BV": BV, "num_warps": num_warps, "num_stages": num_stages, "TMA": TMA}


def _gradients(BV: int, **options: int) -> dict[str, Any]:
    return {"BK": 64, "BV": BV, "KC": 64, **options}


TABLES: dict[str, dict[int, list[Row]]] = {
    # Serial over chunks, parallel over sequences, heads and V tiles: the widest tile that still fills 132 SMs, until
    # there is more than a wave of programs anyway.
    "scan_fwd": {
        80: [(ANY, _row(32, 4, 2))],
        89: [(ANY, _row(32, 4, 1))],
        90: [(16, _row(16, 4, 3, TMA=True)), (33, _row(32, 4, 3, TMA=True)), (ANY, _row(64, 4, 3, TMA=True))],
        100: [(ANY, _row(32, 4, 2))],
    },
    # Four chunks a program: enough programs at any size, so wide tiles, which load w and kg less often.
    "rescan_fwd": {
        80: [(ANY, _row(64, 4, 2))],
        89: [(ANY, _row(64, 4, 1))],
        90: [(ANY, _row(64, 4, 2, TMA=True))],
        100: [(ANY, _row(64, 4, 2))],
    },
    # The serial scans in Gluon (scan_hopper.py): two programs a head run beside each other up to 66 heads.
    "scan_fwd_hopper": {90: [(ANY, {"BV": 64, "RING": 3})]},
    "reverse_scan_bwd_hopper": {90: [(40, {"BV": 64, "RING": 3}), (ANY, {"BV": 64, "RING": 2})]},
    # Persistent kernels in Gluon: one program a multiprocessor.
    "recompute_fwd_hopper": {90: [(ANY, {"PROGRAMS": 132})]},
    "values_bwd_hopper": {90: [(ANY, {"PROGRAMS": 132})]},
    # One chunk a program, four warps, one a 16-row block; BK channels at a time: more would spill.
    "prepare_fwd": {
        family: [(ANY, {"BK": 16 if family == 89 else 32, "BV": 128, "num_warps": 4, "num_stages": 1})]
        for family in FAMILIES
    },
    # The same; 128 registers let four programs share a multiprocessor of sm_90.
    "recompute_fwd": {
        80: [(ANY, {"BK": 32, "BV": 128, "num_warps": 4, "num_stages": 1})],
        89: [(ANY, {"BK": 32, "BV": 128, "num_warps": 4, "num_stages": 1})],
        90: [(ANY, {"BK": 32, "BV": 128, "num_warps": 4, "num_stages": 1, "maxnreg": 128})],
        100: [(ANY, {"BK": 32, "BV": 128, "num_warps": 4, "num_stages": 1})],
    },
    # BK, BV: of the values kernel. KC: channels that a program of the keys kernel takes at a time, 16 a warp.
    "gradients_bwd": {
        80: [(ANY, _gradients(64))],
        89: [(ANY, _gradients(32))],
        90: [(ANY, _gradients(64))],
        100: [(ANY, _gradients(64))],
    },
    # States pass by once: what counts is bytes in flight and long rows, [K, 32] and [8, K]. One warp a program needs no
    # barriers. The same at any size: a step has the same bits in any batch.
    "recurrent_fwd": {family: [(ANY, {"BV": 32, "num_warps": 1})] for family in FAMILIES},
    "recurrent_fwd_v_first": {family: [(ANY, {"BV": 8, "num_warps": 1})] for family in FAMILIES},
    "reverse_scan_bwd": {
        80: [(ANY, _row(32, 4, 2))],
        89: [(ANY, _row(32, 4, 1))],
        90: [(33, _row(32, 4, 3)), (66, _row(64, 4, 2, TMA=True)), (ANY, _row(128, 8, 2, TMA=True))],
        100: [(ANY, _row(32, 4, 2))],
    },
}


def family_of(x: Any) -> int:
    """Family of the GPU that holds x; sm_90's for CPU tensors, which only the interpreter runs."""
    capability = frameworks.of(x).compute_capability(x)
    if capability is None:
        return 90
    return max((f for f in FAMILIES if f <= capability), default=FAMILIES[0])


def lookup(stage: str, family: int, *, work: int) -> dict[str, Any]:
    """Settings of a stage for a call of this size, K <= 128 and 16-bit operands; a new dict at each call."""
    for limit, settings in TABLES[stage][family]:
        if work <= limit:
            return dict(settings)
    raise KeyError(f"tuning: {stage} must have a last row for any size, got none for sm_{family}")


def general(*, K: int, fp32: bool) -> dict[str, Any]:
    """Settings of the scans for all other calls: narrow tiles, nothing prefetched, shared memory for any family."""
    return _row(16 if fp32 else 32, 8 if K > 128 else 4, 1)
