"""The two KDA gates: from raw logits to log-decay, and its cumulative sum inside each chunk.

    softplus   g = -exp(A_log) * softplus(raw + dt_bias)                  Kimi Linear; unbounded below
    bounded    g = lower_bound * sigmoid(exp(A_log) * (raw + dt_bias))    Kimi K3, GLM-5.3; in (lower_bound, 0)

These are two different models; nothing swaps one for the other. The formulas stand here once, for the reference and for
the eager operator. g is a natural logarithm (nats per token) and never above 0.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

from openkda import checks, frameworks, packing


class Softplus:
    """log(1 + exp(z)): no overflow above 88, no rounding to 0 below -16, and its derivative sigmoid(z) everywhere."""

    @staticmethod
    def forward(fw: ModuleType, ctx: Any, z: Any) -> Any:
        ctx.save_for_backward(z)
        return fw.maximum(z, 0.0) + fw.log1p(fw.exp(-fw.abs(z)))

    @staticmethod
    def backward(fw: ModuleType, ctx: Any, dy: Any) -> Any:
        (z,) = ctx.saved_tensors
        return dy * fw.sigmoid(z)


class Sigmoid:
    """1 / (1 + exp(-z)), with derivative s(z) s(-z): s (1 - s) is 0 in fp32 from z = 17 on, where e^-17 is right."""

    @staticmethod
    def forward(fw: ModuleType, ctx: Any, z: Any) -> Any:
        ctx.save_for_backward(z)
        return fw.sigmoid(z)

    @staticmethod
    def backward(fw: ModuleType, ctx: Any, dy: Any) -> Any:
        (z,) = ctx.saved_tensors
        return dy * fw.sigmoid(z) * fw.sigmoid(-z)


def activate(raw: Any, A_log: Any, dt_bias: Any | None, lower_bound: float | None, dtype: str = "float32") -> Any:
    """Log-decay [.., HV, K] of raw [.., HV, K], in `dtype`. Arguments as in `kda_gate`, unchecked."""
    fw = frameworks.of(raw)
    HV, K = fw.shape(raw)[-2:]
    z = fw.cast(raw, dtype)
    if dt_bias is not None:
        z = z + fw.reshape(fw.cast(dt_bias, dtype), (HV, K))
    rate = fw.exp(fw.reshape(fw.cast(A_log, dtype), (HV, 1)))
    if lower_bound is None:
        return -rate * fw.custom(Softplus, z)
    return lower_bound * fw.custom(Sigmoid, rate * z)


def kda_gate(raw: Any, A_log: Any, dt_bias: Any | None = None, *, lower_bound: float | None = None) -> Any:
    """Turn raw gate logits into log-decay, one value per token, value head and channel. Differentiable.

    With lower_bound unset    g = -exp(A_log) * softplus(raw + dt_bias)              in (-inf, 0)
    With lower_bound = m < 0  g = m * sigmoid(exp(A_log) * (raw + dt_bias))          in (m, 0)

    Args:
        raw: Logits, `[B, T, HV, K]`, any float dtype.
        A_log: Natural log of the rate, `[HV]`, fp32.
        dt_bias: Added to raw, `[HV, K]` or flat `[HV*K]`, fp32; None means zero.
        lower_bound: Smallest log-decay per token in nats, below 0; None selects the first form.
    Returns: g in nats per token, shaped like raw, fp32 (fp64 for fp64 raw), every value <= 0.
    Raises: ValueError if a shape disagrees with raw or lower_bound is not below 0; TypeError for a wrong dtype.
    Source: Kimi Linear (arXiv 2510.26692) for the first form, Kimi K3 for the second; docs/maths.md has both
        derivatives.
    """
    check_gate("kda_gate", raw, A_log, dt_bias, lower_bound)
    fw = frameworks.of(raw)
    return activate(raw, A_log, dt_bias, lower_bound, "float64" if fw.dtype_name(raw) == "float64" else "float32")


def kda_gate_cumsum(
    raw: Any,
    A_log: Any,
    dt_bias: Any | None = None,
    *,
    lower_bound: float | None = None,
    chunk_size: int = 64,
    log2: bool = True,
    cu_seqlens: Any | None = None,
) -> Any:
    """The inclusive cumulative sum of the log-decay inside each chunk. Differentiable.

    G[t] = sum of g[s], s from the first token of t's chunk up to t; chunks start anew at every sequence.

    Args:
        raw, A_log, dt_bias, lower_bound: As in `kda_gate`.
        chunk_size: Tokens a chunk.
        log2: Return the sum in base 2, G * log2(e), the form that kernels raise with exp2; else in nats.
        cu_seqlens: int32 or int64 `[N+1]` token offsets of packed sequences (B = 1); values after the last offset are
            0.
    Returns: G, shaped like raw, fp32 (fp64 for fp64 raw).
    Raises: as `kda_gate`; ValueError for a chunk_size below 1 or for B > 1 with cu_seqlens.
    """
    op = "kda_gate_cumsum"
    check_gate(op, raw, A_log, dt_bias, lower_bound)
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int):
        checks.bad_type(op, "chunk_size", "be an int", type(chunk_size).__name__)
    if chunk_size < 1:
        checks.bad_value(op, "chunk_size", "be at least 1", chunk_size)
    if not isinstance(log2, bool):
        checks.bad_type(op, "log2", "be a bool", type(log2).__name__)
    fw = frameworks.of(raw)
    dtype = "float64" if fw.dtype_name(raw) == "float64" else "float32"
    B, T, HV, K = fw.shape(raw)
    C, NC = chunk_size, -(-T // chunk_size)
    if cu_seqlens is None:
        g = activate(raw, A_log, dt_bias, lower_bound, dtype)
        chunks = fw.reshape(fw.pad(g, 1, 0, NC * C - T), (B, NC, C, HV, K))
        total = fw.reshape(fw.cumsum(chunks, 2), (B, NC * C, HV, K))[:, :T]
    else:
        checks.cu_seqlens(op, cu_seqlens, batch=B, tokens=T)
        checks.same_device(op, "raw", raw, cu_seqlens=cu_seqlens)
        table = packing.chunk_table(cu_seqlens, T, C)
        NC = fw.shape(table.tokens)[0]
        # Rows are gathered before the activation, so that nothing in the tail, NaN included, meets a gradient.
        rows = fw.take(fw.pad(raw[0], 0, 0, 1), fw.reshape(table.tokens, (NC * C,)), 0)
        g = fw.reshape(activate(rows, A_log, dt_bias, lower_bound, dtype), (NC, C, HV, K))
        g = fw.where(table.valid[:, :, None, None], g, 0.0)
        total = fw.take(fw.pad(fw.reshape(fw.cumsum(g, 1), (NC * C, HV, K)), 0, 0, 1), table.rows, 0)[None]
    return total * math.log2(math.e) if log2 else total


def check_gate(
    op: str, raw: Any, A_log: Any, dt_bias: Any | None, lower_bound: float | None, raw_name: str = "raw"
) -> None:
    """Shapes and dtypes of the gate's arguments against raw [B, T, HV, K]."""
    checks.floating(op, raw_name, raw)
    checks.rank(op, raw_name, raw, "[B, T, HV, K]")
    HV, K = (int(n) for n in raw.shape[-2:])
    wanted = ("float32", "float64") if frameworks.of(raw).dtype_name(raw) == "float64" else ("float32",)
    checks.dtype(op, "A_log", A_log, wanted, "keep it in fp32: a rounded rate changes every decay")
    checks.shape(op, "A_log", A_log, (HV,), "[HV]", "reshape a checkpoint's [1, 1, H, 1] to [H]")
    if dt_bias is not None:
        checks.dtype(op, "dt_bias", dt_bias, wanted, "keep it in fp32")
        size = tuple(dt_bias.shape)
        if size not in ((HV, K), (HV * K,)):
            checks.bad_value(
                op,
                "dt_bias",
                f"have shape [HV, K] = [{HV}, {K}] or [HV*K] = [{HV * K}]",
                list(size),
                "it has one entry per channel",
            )
    if lower_bound is not None:
        checks.lower_bound(op, lower_bound)
    checks.same_device(op, raw_name, raw, A_log=A_log, dt_bias=dt_bias)
