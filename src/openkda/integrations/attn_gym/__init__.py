"""Code written for attention-gym's KDA (`attn_gym.linear`), on openkda: the same argument order and the same gate.

    gate = bounded_gate_cumsum(raw, A_log, dt_bias)                     # log2, summed within chunks of 64 tokens
    o, state = chunk_kda(q, k, v, gate, beta)
    gate = bounded_gate_cumsum(raw, A_log, dt_bias, chunk_size=1)       # log2, per token
    o, state = recurrent_kda(q, k, v, gate, beta)

This is the interface with log2 gates, attention-gym at 7fdb85d (2026-08-22). Its releases from 0.0.17 on take the
per-token gate in nats instead, and states [N, H, V, K]: that is `openkda.chunk_kda(..., state_v_first=True)` itself.

A cumulative gate is taken apart into differences, which costs what its rounding costs: with a gate of -5 nats the last
of 64 sums is about -460, and a step of it is right to 3e-5. `openkda.chunk_kda` on the raw gate has no such loss.
"""

from __future__ import annotations

import math
from typing import Any

import openkda
from openkda import checks, frameworks, packing

CHUNK = 64
_LN_2 = math.log(2)
_BACKENDS = {"fused": "auto", "reference": "reference"}


def chunk_kda(
    q: Any,
    k: Any,
    v: Any,
    cumulative_gate: Any,
    beta: Any,
    initial_state: Any | None = None,
    *,
    cu_seqlens: Any | None = None,
    output_final_state: bool = False,
    fastmath: bool = False,
    autotune: bool = True,
    impl: Any = "fused",
) -> tuple[Any, Any | None]:
    """`openkda.chunk_kda` as attention-gym calls it. Differentiable.

    Args:
        q, k: `[B, T, H, K]`. v: `[B, T, HV, V]`. beta: `[B, T, HV]`. q is scaled by K**-0.5.
        cumulative_gate: `[B, T, HV, K]`, log2 of the decay, summed from the first token of each chunk of 64 tokens, as
            `bounded_gate_cumsum` makes it. Chunks start anew at every sequence.
        initial_state: `[N, HV, K, V]` fp32.
        autotune: Accepted: openkda's choices are never timed.
        impl: "fused" for whatever `openkda.explain` names, "reference" for the token loop.
    Returns: (o `[B, T, HV, V]` in q's dtype, final states `[N, HV, K, V]` fp32 or None).
    Raises: as `openkda.chunk_kda`; ValueError for fastmath or an unknown impl.
    """
    op = "chunk_kda"
    _refuse_fastmath(op, fastmath)
    g = _per_token(op, cumulative_gate, cu_seqlens)
    options = {"initial_state": initial_state, "cu_seqlens": cu_seqlens, "output_final_state": output_final_state}
    return openkda.chunk_kda(q, k, v, g, beta, **options, backend=_backend(op, impl))


def recurrent_kda(
    q: Any,
    k: Any,
    v: Any,
    gate: Any,
    beta: Any,
    initial_state: Any | None = None,
    *,
    cu_seqlens: Any | None = None,
    output_final_state: bool = False,
    state_indices: Any | None = None,
    autotune: bool = True,
    impl: Any = "fused",
) -> tuple[Any, Any | None]:
    """`openkda.recurrent_kda` as attention-gym calls it; arguments as in `chunk_kda`, and

    Args:
        gate: `[B, T, HV, K]`, log2 of the decay per token, as `bounded_gate_cumsum(.., chunk_size=1)` makes it.
        state_indices: int32 `[N]`, slots of the pool initial_state, which is updated in place. Slot 0 and indices
            outside of the pool are padding.
        impl: "fused" is inference only, as there; "reference" is differentiable and takes no state_indices.
    Raises: as `openkda.recurrent_kda`; ValueError for output_final_state or impl="reference" with state_indices.
    """
    op = "recurrent_kda"
    backend = _backend(op, impl)
    fw = frameworks.of(gate)
    g = fw.cast(gate, _wide(fw, gate)) * _LN_2
    options = {"initial_state": initial_state, "cu_seqlens": cu_seqlens, "output_final_state": output_final_state}
    if state_indices is None:
        operator = openkda.chunk_kda if backend == "reference" else openkda.recurrent_kda  # the same token loop
        return operator(q, k, v, g, beta, **options, backend=backend)
    if output_final_state:
        checks.bad_value(op, "output_final_state", "be False with state_indices", True, "the states are in the pool")
    if backend == "reference":
        checks.bad_value(op, "impl", 'be "fused" with state_indices', repr("reference"))
    slots = state_indices
    if initial_state is not None:
        live = (slots > 0) & (slots < initial_state.shape[0])
        slots = fw.where(live, slots, fw.zeros((), like=slots) - 1)
    return openkda.recurrent_kda(q, k, v, g, beta, **options, state_indices=slots, backend=backend)


def bounded_gate_cumsum(
    raw_gate: Any,
    A_log: Any,
    dt_bias: Any,
    *,
    chunk_size: int = CHUNK,
    lower_bound: float = -5.0,
    fastmath: bool = False,
    profile_ranges: bool = False,
    cu_seqlens: Any | None = None,
) -> Any:
    """`openkda.kda_gate_cumsum` in log2 with the bounded gate: `[B, T, HV, K]` fp32. chunk_size=1 is per token.

    Any lower_bound below 0 is fine here; attention-gym's ends near -5.9.

    Raises: as `openkda.kda_gate_cumsum`; ValueError for fastmath or profile_ranges.
    """
    op = "bounded_gate_cumsum"
    _refuse_fastmath(op, fastmath)
    if profile_ranges:
        checks.bad_value(op, "profile_ranges", "be False", True, "use the profiler of your framework")
    checks.lower_bound(op, lower_bound)
    return openkda.kda_gate_cumsum(
        raw_gate, A_log, dt_bias, lower_bound=lower_bound, chunk_size=chunk_size, cu_seqlens=cu_seqlens
    )


def _per_token(op: str, cumulative: Any, cu_seqlens: Any | None) -> Any:
    """Log-decay per token in nats of sums within chunks in log2, `[B, T, HV, K]`. Waits for no device."""
    checks.floating(op, "cumulative_gate", cumulative)
    checks.rank(op, "cumulative_gate", cumulative, "[B, T, HV, K]")
    fw = frameworks.of(cumulative)
    B, T = fw.shape(cumulative)[:2]
    G = fw.cast(cumulative, _wide(fw, cumulative))
    place = fw.arange(T, like=cumulative)
    if cu_seqlens is not None:
        checks.cu_seqlens(op, cu_seqlens, batch=B, tokens=T)
        starts = fw.cast(cu_seqlens, "int64")
        place = place - fw.take(starts, packing.sequence_ids(cu_seqlens, T), 0)  # the tail counts from the last offset
    first = (place % CHUNK == 0)[None, :, None, None]
    before = fw.pad(G, 1, 1, 0)[:, :T]
    return (G - fw.where(first, fw.zeros((), like=G), before)) * _LN_2


def _wide(fw: Any, x: Any) -> str:
    return "float64" if fw.dtype_name(x) == "float64" else "float32"


def _backend(op: str, impl: Any) -> str:
    """impl is a string or attention-gym's enum of strings."""
    name = getattr(impl, "value", impl)
    checks.choice(op, "impl", name, tuple(_BACKENDS))
    return _BACKENDS[name]


def _refuse_fastmath(op: str, fastmath: bool) -> None:
    if fastmath:
        checks.bad_value(op, "fastmath", "be False", True, "openkda has one arithmetic, which is exact for any gate")
