"""What the Hopper kernels share: places of chunks, log-decays, and tensors as matrices of tiles for the TMA."""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
# (a launch passes plain values for constexpr parameters; device functions are no plain Python)
from __future__ import annotations

import functools
from typing import Any

import triton.language as tl  # noqa: F401  # the interpreter looks for it here
from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from openkda import frameworks
from openkda.kda.kernels.common import LOG2_E
from openkda.kda.kernels.gluon import gl, jit
from openkda.kda.kernels.tables import CHUNK

C = gl.constexpr(64)
D = gl.constexpr(128)  # K = V


# ---------------------------------------------------------------- device helpers
@jit
def place(chunks, item, T, HV, PACKED: gl.constexpr):
    """Of an item: head, first token among all, valid rows (0 .. C)."""
    i_c, i_h = item // HV, item % HV
    if PACKED:
        return i_h, gl.load(chunks + i_c * 4), gl.load(chunks + i_c * 4 + 1)
    per_sequence = (T + C - 1) // C
    i_b = i_c // per_sequence
    start = (i_c - i_b * per_sequence) * C
    return i_h, i_b * T + start, gl.minimum(T - start, C)


@jit
def decay_log2(raw, bias, rate, bound, GATE: gl.constexpr):
    """`common.decay_log2`, which says how; coefficients from there."""
    if GATE == "softplus":
        y = raw * LOG2_E + bias * LOG2_E
        u = gl.exp2(-gl.abs(y))
        p = 0.06274843357141435 - 0.012077020269316563 * u
        p = -0.1541520064325823 + u * p
        p = 0.2551763492142669 + u * p
        p = -0.3530963533412672 + u * p
        p = 0.48001246079524296 + u * p
        p = -0.7213067574280009 + u * p
        p = 1.442694724590345 + u * p
        return -rate * (gl.maximum(y, 0.0) + u * p)
    elif GATE == "bounded":
        return (bound * LOG2_E) / (1.0 + gl.exp2((raw + bias) * (-LOG2_E * rate)))
    else:
        return raw * LOG2_E


# ---------------------------------------------------------------- tiles
@functools.cache
def shared(*shape: int) -> Any:
    """The shared-memory layout of a tile: bf16 if it has two axes, fp32 if one."""
    if len(shape) == 2:
        return NVMMASharedLayout.get_default_for(list(shape), bfloat16)
    return NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)


def tiles(x: Any, height: int, width: int, stride: int, rows: int, cols: int) -> TensorDescriptor:
    base = frameworks.of(x).descriptor_base(x)
    return TensorDescriptor(base, [height, width], [stride, 1], [rows, cols], shared(rows, cols))


def workspace(x: Any, cols: int, rows: int = CHUNK) -> TensorDescriptor:
    """Tiles [rows, cols] of a contiguous workspace [NC, HV, height, width]."""
    NC, HV, height, width = x.shape
    return tiles(x, NC * HV * height, width, width, rows, cols)


def token_tiles(x: Any, cols: int) -> TensorDescriptor:
    """Tiles [C, cols] of token rows x [B, T, heads, width], which `is_matrix`."""
    fw = frameworks.of(x)
    B, T, HV, V = (int(n) for n in x.shape)
    return tiles(x, B * T, HV * V, int(fw.strides(x)[1]), CHUNK, cols)
