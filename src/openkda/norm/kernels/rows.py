"""Rows of a tensor [.., D] in place: most strided views are a grid of rows, outer x inner, and need no copy."""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from openkda import frameworks


class Rows(NamedTuple):
    """Row i of x lies at (i // inner) * stride_outer + (i % inner) * stride_inner."""

    x: Any
    inner: int
    stride_outer: int
    stride_inner: int


def rows_of(x: Any) -> Rows:
    """x [.., D] as rows; a copy of it where its strides make no grid, or where a row's entries are not adjacent."""
    fw = frameworks.of(x)
    *sizes, D = fw.shape(x)
    *strides, last = fw.strides(x)
    merged: list[tuple[int, int]] = []  # (size, stride), outermost first
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    if (last != 1 and D > 1) or len(merged) > 2:
        return Rows(fw.copy(x), 1, D, 0)
    if len(merged) == 2:
        return Rows(x, merged[1][0], merged[0][1], merged[1][1])
    return Rows(x, 1, merged[0][1] if merged else D, 0)


@triton.jit
def offsets(o_r, inner, stride_outer, stride_inner):
    """Of rows o_r, in elements, int64, [BR, 1]."""
    outer = (o_r // inner).to(tl.int64) * stride_outer
    return (outer + (o_r % inner).to(tl.int64) * stride_inner)[:, None]
