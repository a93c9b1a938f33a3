"""Partial sums of many programs, added in one fixed order: the same bits in every run, without atomics.

    out[c, j] = sum over p of partials[p, first + j, c]        j from 0 to interleave - 1

cost      reads 4 * programs * interleave * C bytes
program   BC columns of one j; partial sums in tiles of BP, first within a tile, then tile after tile
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from openkda import frameworks


@triton.jit(do_not_specialize=["P"])
def _sum_partials_kernel(
    partials, out, P, C, first, ROWS: tl.constexpr, J: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr
):
    num_c = tl.cdiv(C, BC)
    o_c = tl.program_id(0) % num_c * BC + tl.arange(0, BC)
    j = tl.program_id(0) // num_c
    total = tl.zeros([BC], tl.float32)
    for p in range(0, P, BP):
        o_p = p + tl.arange(0, BP)
        at = partials + (o_p[:, None].to(tl.int64) * ROWS + first + j) * C + o_c[None, :]
        total += tl.sum(tl.load(at, mask=(o_p < P)[:, None] & (o_c < C)[None, :], other=0.0), 0)
    tl.store(out + o_c * J + j, total.to(out.dtype.element_ty), mask=o_c < C)


def sum_partials(partials: Any, out: Any, *, first: int = 0, interleave: int = 1) -> None:
    """partials fp32 [P, rows, C] -> out, contiguous [C, interleave] (or [C]) in any floating type."""
    fw = frameworks.of(partials)
    P, rows, C = fw.shape(partials)
    if C == 0:
        return
    BP, BC = (256, 16) if P > 128 else (32, 64)  # many of few columns are added in taller tiles
    with fw.on_device(partials):
        _sum_partials_kernel[(interleave * -(-C // BC),)](
            partials, out, P, C, first, ROWS=rows, J=interleave, BP=BP, BC=BC
        )
