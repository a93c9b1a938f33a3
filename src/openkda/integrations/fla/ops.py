"""Operators with the signatures of fla 0.6.0, on openkda's. For tensors of any library.

What openkda does without being asked, it accepts and ignores: exact gates (safe_gate), offsets that are never read on
the host (cu_seqlens_cpu, use_graph, max_num_seqs), a result that does not depend on the chunk (chunk_size). What it
cannot do raises and names the flag, and so does a keyword that fla would drop without a word.
"""

from __future__ import annotations

from typing import Any

from openkda import checks, frameworks
from openkda.kda import chunk, gate, recurrent

_SAFE_GATE_BOUND = -5.0


def chunk_kda(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    scale: float | None = None,
    initial_state: Any | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Any | None = None,
    cu_seqlens_cpu: Any | None = None,
    cp_context: Any | None = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    **kwargs: Any,
) -> tuple[Any, Any | None]:
    """`openkda.chunk_kda` as `fla.ops.kda.chunk_kda`: q, k `[B, T, H, K]`, v `[B, T, HV, V]`, g `[B, T, HV, K]`,
    beta `[B, T, HV]`.

    Args:
        safe_gate: With use_gate_in_kernel it wants -5 <= lower_bound < 0, as in fla; changes nothing else.
        disable_recompute: `save_intermediates`.
        return_intermediate_states: Not supported.
        kwargs: A_log (any shape of HV entries; None with lower_bound means a rate of 1) and dt_bias (HV * K entries),
            any float dtype; chunk_size, 32 or 64; transpose_state_layout, an old name of state_v_first.
    Returns: (o `[B, T, HV, V]`, final states `[N, HV, K, V]` fp32 or None).
    Raises: as `openkda.chunk_kda`; NotImplementedError for return_intermediate_states; TypeError for another keyword.
    """
    op = "chunk_kda"
    if return_intermediate_states:
        raise NotImplementedError(
            f"{op}: return_intermediate_states must be False, got True; openkda does not hand out states within a "
            "sequence, use output_final_state on a shorter one"
        )
    checks.choice(op, "chunk_size", kwargs.pop("chunk_size", 64), (32, 64))
    if safe_gate and use_gate_in_kernel and not (lower_bound is not None and _SAFE_GATE_BOUND <= lower_bound < 0):
        checks.bad_value(op, "lower_bound", "be in [-5, 0) with safe_gate and use_gate_in_kernel", lower_bound)
    A_log, dt_bias = kwargs.pop("A_log", None), kwargs.pop("dt_bias", None)
    state_v_first = _state_v_first(op, state_v_first, kwargs)
    return chunk.chunk_kda(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        save_intermediates=disable_recompute,
        cu_seqlens=cu_seqlens,
        cp_context=cp_context,
        **_gate(g, use_gate_in_kernel, A_log, dt_bias, lower_bound),
    )


def fused_recurrent_kda(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    A_log: Any | None = None,
    dt_bias: Any | None = None,
    scale: float | None = None,
    initial_state: Any | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Any | None = None,
    **kwargs: Any,
) -> tuple[Any, Any | None]:
    """`openkda.recurrent_kda` as `fla.ops.kda.fused_recurrent_kda`; arguments as in `chunk_kda` above.

    Where fla silently returns results without a gradient, this raises: inference only. beta `[B, T, HV, V]`, one
    strength per channel, is not supported.
    """
    state_v_first = _state_v_first("fused_recurrent_kda", state_v_first, kwargs)
    return recurrent.recurrent_kda(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        **_gate(g, use_gate_in_kernel, A_log, dt_bias, lower_bound),
    )


def fused_kda_gate(
    g: Any,
    A_log: Any | None = None,
    dt_bias: Any | None = None,
    lower_bound: float | None = None,
    output_dtype: Any | None = None,
) -> Any:
    """`openkda.kda_gate` as `fla.ops.kda.gate.fused_kda_gate`: raw g `[.., HV, K]` to log-decay in nats.

    Args:
        A_log: HV entries; None, which needs lower_bound, means a rate of 1.
        output_dtype: Of the result, as the tensor's library or as a string has it; None means fp32.
    """
    checks.floating("fused_kda_gate", "g", g)
    fw = frameworks.of(g)
    size = fw.shape(g)
    if len(size) < 2:
        checks.bad_value("fused_kda_gate", "g", "have shape [.., HV, K]", list(size))
    options = _gate(g, True, A_log, dt_bias, lower_bound)
    raw = fw.reshape(g, (1, -1, *size[-2:]))
    out = gate.kda_gate(raw, options["A_log"], options["dt_bias"], lower_bound=lower_bound)
    return fw.cast(fw.reshape(out, size), "float32" if output_dtype is None else str(output_dtype).split(".")[-1])


def _gate(g: Any, in_kernel: bool, A_log: Any | None, dt_bias: Any | None, lower_bound: float | None) -> dict[str, Any]:
    """The gate's options as openkda wants them: flat, fp32, and with A_log."""
    if frameworks.is_tensor(g) and in_kernel:
        fw = frameworks.of(g)
        HV, dtype = fw.shape(g)[-2], "float64" if fw.dtype_name(g) == "float64" else "float32"
        if A_log is None and lower_bound is not None:
            A_log = fw.zeros((HV,), like=g, dtype=dtype)
        A_log = None if A_log is None else fw.cast(fw.reshape(A_log, (-1,)), dtype)
        dt_bias = None if dt_bias is None else fw.cast(fw.reshape(dt_bias, (-1,)), dtype)
    return {"use_gate_in_kernel": in_kernel, "A_log": A_log, "dt_bias": dt_bias, "lower_bound": lower_bound}


def _state_v_first(op: str, state_v_first: bool, kwargs: dict[str, Any]) -> bool:
    """The flag, or its old name; kwargs must hold nothing else any more."""
    old = kwargs.pop("transpose_state_layout", None)
    if kwargs:
        name = next(iter(kwargs))
        raise TypeError(f"{op}: {name} must be left out, got {kwargs[name]!r}; openkda knows no such argument")
    if old is not None and state_v_first:
        checks.bad_value(op, "transpose_state_layout", "be left out with state_v_first", old, "it is its old name")
    return state_v_first if old is None else old
