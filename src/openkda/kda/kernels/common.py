"""Device helpers that stages share: activations of the inputs, selection matrices, decay factors, places of chunks.

Every decay between two rows of a chunk is exp2 of a sum of terms of one sign. Which terms is a 0/1 matrix, so the sums
are products

    exponent[i] = sum over s of keep[i, s] g_log2[s]        keep[i, s] 0 or 1: `select_level`, or s <= i, or s > i

on the tensor cores, summed in fp32. Where inputs have 16 bits, g_log2 is rounded to fp16 for it, 2^-12 of itself: a
factor 2^-e is then off by 2^-12 e 2^-e ln 2 <= 1.3e-4 at any e, a tenth of the rounding of an operand to bf16. (The
decay of a whole chunk, which the state meets again and again, is exp2 of a sum that was never rounded.) With fp32
inputs nothing is rounded. Levels h = 32, 16, 8, 4, 2, 1 cover each pair of rows once: at level h the chunk falls into
blocks of 2h rows; a row of the upper half sums from the start of its half up to itself, one of the lower half from
behind itself to the end of its half.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from openkda import frameworks


@dataclass(frozen=True)
class Activations:
    """What the kernels do to raw inputs; host side."""

    scale: float  # of q, in scores and outputs
    l2norm: bool  # q and k: x / sqrt(sum x^2 + 1e-6)
    gate: str  # "none": g is log-decay in nats; "softplus", "bounded": g is raw
    A_log: Any | None  # fp32 [HV], contiguous; None without a gate
    dt_bias: Any | None  # fp32 [HV, K] or flat, contiguous; None means zero
    lower_bound: float | None  # of the bounded gate, nats
    beta_sigmoid: bool
    beta_scale: float  # of the sigmoid: 1, or 2 for negative eigenvalues

    @classmethod
    def of(cls, x: Any, A_log: Any | None, dt_bias: Any | None) -> Activations:
        """From an operator's options: scale, lower_bound, l2norm, gate, beta_sigmoid, neg_eigval."""
        gate = "none" if not x.gate else "softplus" if x.lower_bound is None else "bounded"
        beta_scale = 2.0 if x.neg_eigval else 1.0
        return cls(x.scale, x.l2norm, gate, A_log, dt_bias, x.lower_bound, x.beta_sigmoid, beta_scale)


def hopper_module(name: str, x: Any, *token_tensors: Any) -> Any | None:
    """The Gluon module of a stage where it takes the call, else None."""
    if frameworks.of(x).compute_capability(x) != 90:
        return None
    module = importlib.import_module("openkda.kda.kernels." + name)  # needs Gluon, which not every Triton has
    return module if module.takes(x, *token_tensors) else None


def is_matrix(x: Any) -> bool:
    """Whether a tensor descriptor can take x [B, T, heads, width] for a matrix of B * T rows, heads side by side."""
    fw = frameworks.of(x)
    (B, T, heads, width), (stride_b, stride_t, stride_h, stride) = fw.shape(x), fw.strides(x)
    rows = (B == 1 or stride_b == T * stride_t) and stride_t % 8 == 0 and stride_t >= heads * width
    return rows and stride == 1 and (heads == 1 or stride_h == width) and fw.address(x) % 16 == 0


def as_matrix(x: Any) -> Any:
    """x itself if it `is_matrix`, else a copy that is one."""
    return x if is_matrix(x) else frameworks.of(x).copy(x)


LOG2_E = tl.constexpr(1.4426950408889634)  # kernels use exp2 only
# A decay of 2^-4096 is 0 in fp32, and so is every product with it: the floor changes nothing and keeps fp16 finite.
FLOOR_LOG2 = tl.constexpr(-4096.0)
NORM_EPS = tl.constexpr(1e-6)  # of l2norm
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # type: ignore[attr-defined]  # it knows no inline assembly


# ---- places
@triton.jit
def locate_chunk(chunks, i_c, T, stride_b, stride_t, C: tl.constexpr, PACKED: tl.constexpr):
    """Of chunk i_c: element offset of its first token in a tensor with these strides, and its valid rows (0 .. C)."""
    if PACKED:
        first = tl.load(chunks + i_c * 4).to(tl.int64)
        return first * stride_t, tl.load(chunks + i_c * 4 + 1)
    per_sequence = tl.cdiv(T, C)
    i_b = i_c // per_sequence
    start = (i_c - i_b * per_sequence).to(tl.int32) * C
    return i_b * stride_b + start.to(tl.int64) * stride_t, tl.minimum(T - start, C)


# ---- activations
@triton.jit
def decay_log2(raw, bias, rate, bound, GATE: tl.constexpr):
    """log2 of a token's decay, <= 0, in fp32; raw fp32, bias broadcasts to it, rate = exp(A_log).

    softplus   -rate (max(y, 0) + log2(1 + u)), y = log2(e) (raw + bias), u = 2^-|y|. log2(1 + u) / u is a polynomial of
               degree 7 on [0, 1] (Chebyshev interpolation, 3.3e-7 of itself in fp32): it costs no more than the
               instruction for log2, and unlike it keeps the digits of a small u, which slow decay is made of
    bounded    bound log2(e) sigmoid(rate z)
    none       raw is g, in nats
    Rows that hold no token must not decay: there the caller makes rate (softplus), bound (bounded) or raw (none) zero.
    """
    if GATE == "softplus":
        y = raw * LOG2_E + bias * LOG2_E
        u = tl.exp2(-tl.abs(y))
        p = 0.06274843357141435 - 0.012077020269316563 * u
        p = -0.1541520064325823 + u * p
        p = 0.2551763492142669 + u * p
        p = -0.3530963533412672 + u * p
        p = 0.48001246079524296 + u * p
        p = -0.7213067574280009 + u * p
        p = 1.442694724590345 + u * p
        return -rate * (tl.maximum(y, 0.0) + u * p)
    elif GATE == "bounded":
        return (bound * LOG2_E) / (1.0 + tl.exp2((raw + bias) * (-LOG2_E * rate)))
    else:
        return raw * LOG2_E


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(x * -LOG2_E))


# ---- exponents
@triton.jit
def select_level(i, s, h: tl.constexpr):
    """Which rows s add to the exponent of row i at level h: those up to i of its half if upper, else behind i."""
    return (i // h == s // h) & ((s <= i) == ((i // h) % 2 == 1))


@triton.jit
def exponents(keep, g_log2, PRECISION: tl.constexpr):
    """sum over s of keep[.., i, s] g_log2[.., s, :], fp32; terms of one sign, so nothing cancels."""
    return tl.dot(keep.to(g_log2.dtype), g_log2, input_precision=PRECISION)


@triton.jit
def prefetch_rows(x, rows, stride, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Ask for x[0 : ROWS, 0 : WIDTH] in L2, which hides the latency of memory behind what comes before the load."""
    if not INTERPRETED:
        LINE: tl.constexpr = 128 // (x.dtype.element_ty.primitive_bitwidth // 8)
        i = tl.maximum(tl.minimum(tl.arange(0, ROWS), rows - 1), 0)
        for j in tl.static_range((WIDTH + LINE - 1) // LINE):
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [x + i * stride + j * LINE], tl.int32, False, 1
            )


@triton.jit
def packed_product(x, y):
    """x * y, two 16-bit products an instruction where x is fp16; y in the type of x, broadcast to it."""
    if INTERPRETED or x.dtype != tl.float16:
        return x * y
    else:
        return tl.inline_asm_elementwise("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [x, y], tl.float16, True, 2)


@triton.jit
def to_operand(x, DTYPE: tl.constexpr):
    """fp32 to the type of matmul operands, two numbers an instruction."""
    if INTERPRETED or DTYPE != tl.float16:
        return x.to(DTYPE)
    else:
        return tl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], tl.float16, True, 2)


@triton.jit
def scaled(q, k, factor):
    """q * factor and k * factor in the type of q; factor fp32, <= 1.

    In fp16 the factor is rounded first: two roundings to 11 bits are four times as exact as one to bf16, and two
    numbers share an instruction.
    """
    if q.dtype == tl.float16:
        f = to_operand(factor, tl.float16)
        return packed_product(q, f), packed_product(k, f)
    else:
        return (q.to(tl.float32) * factor).to(q.dtype), (k.to(tl.float32) * factor).to(k.dtype)
