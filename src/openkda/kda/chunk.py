"""`chunk_kda`: Kimi Delta Attention for training and prefill. Checks the call, picks the backend, runs it."""

from __future__ import annotations

import functools
from typing import Any

from openkda import backends, checks
from openkda.kda import context_parallel, eager, eager_invariant, reference
from openkda.kda.contract import check_context_parallel, check_inputs, check_options, check_state


def _fused(*tensors: Any, **options: Any) -> tuple[Any, Any | None]:
    from openkda.kda import fused  # needs triton, which not everybody has

    return fused.chunk_kda(*tensors, **options)


_passed = checks.Passed()

# What "auto" prefers comes first. The fused kernels come second until all of their tests have passed on a GPU.
AVAILABLE = {"chunk_kda": {"eager": eager.chunk_kda, "triton": _fused, "reference": reference.chunk_kda}}


def chunk_kda(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    *,
    scale: float | None = None,
    initial_state: Any | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    A_log: Any | None = None,
    dt_bias: Any | None = None,
    lower_bound: float | None = None,
    cu_seqlens: Any | None = None,
    state_v_first: bool = False,
    save_intermediates: bool = False,
    batch_invariant: bool = False,
    cp_context: Any | None = None,
    backend: str = "auto",
) -> tuple[Any, Any | None]:
    """Kimi Delta Attention over whole sequences, differentiable in every floating input.

    Per value head, with a state S [K, V]:

        S <- diag(exp(g_t)) S;    S <- S + beta_t k_t (v_t - S^T k_t)^T;    o_t = scale * S^T q_t

    Args:
        q, k: `[B, T, H, K]`, one floating dtype with v. K is at most 256.
        v: `[B, T, HV, V]`, HV a multiple of H: value head i uses key head i // (HV / H). V is at most 256.
        g: `[B, T, HV, K]`, log-decay per token and channel in nats, <= 0; or raw logits with use_gate_in_kernel.
        beta: `[B, T, HV]`, writing strength; or raw logits with use_beta_sigmoid_in_kernel.
        scale: Factor of q, above 0; None means K**-0.5.
        initial_state: `[N, HV, K, V]` fp32 (fp64 with fp64 inputs); N is B, or the slots of cu_seqlens. None means
            zeros.
        output_final_state: Return the states after the last token of each sequence.
        use_qk_l2norm_in_kernel: Replace q and k by x / sqrt(sum x^2 + 1e-6).
        use_gate_in_kernel: g holds raw logits; `kda_gate` with A_log, dt_bias and lower_bound makes the log-decay.
        use_beta_sigmoid_in_kernel: Use sigmoid(beta); with allow_neg_eigval, 2 * sigmoid(beta).
        A_log: `[HV]` fp32. dt_bias: `[HV, K]` or `[HV*K]` fp32 or None. lower_bound: below 0 for the bounded gate, None
            for softplus.
        cu_seqlens: int32 or int64 `[N+1]` on q's device, token offsets of packed sequences; B is then 1. It starts at 0
            and never decreases. A repeated offset is an empty slot: its state passes through bit for bit. Tokens after
            the last offset are padding: o and all token gradients are exactly 0 there, whatever the inputs hold.
        state_v_first: States are `[N, HV, V, K]`.
        save_intermediates: Keep more for the backward and recompute less. Gradients agree to rounding; the eager
            backends always keep all.
        batch_invariant: A sequence gives the same bits alone, in a batch, packed, and decoded by
            `recurrent_kda(batch_invariant=True)`. The eager path then computes every chunk alone, which is slower.
        cp_context: From `build_cp_context`: the row is spread over ranks, and the token tensors `[1, T, ..]` are this
            rank's. cu_seqlens is then None; initial and final states are of all N sequences, the same on every rank.
        backend: "auto", "triton", "eager" or "reference"; `openkda.explain(q)` says what "auto" chooses and why.
    Returns: (o `[B, T, HV, V]` in v's dtype, final states shaped like initial_state, or None).
    Raises: TypeError for a wrong kind or dtype; ValueError for a shape or value outside the above; BackendUnavailable
        when the named backend cannot run here, with the reason. Only backend="reference" has second derivatives:
        elsewhere asking for one raises RuntimeError.
    Numerics: state, sums, inverse and v - S^T k in fp32 (fp64 with fp64 inputs); exact for any finite g <= 0.
    Source: Kimi Linear, arXiv 2510.26692; docs/maths.md derives the chunked form.
    """
    op = "chunk_kda"
    options = {
        "scale": scale,
        "cu_seqlens": cu_seqlens,
        "use_gate_in_kernel": use_gate_in_kernel,
        "A_log": A_log,
        "dt_bias": dt_bias,
        "lower_bound": lower_bound,
        "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": allow_neg_eigval,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "output_final_state": output_final_state,
        "state_v_first": state_v_first,
        "save_intermediates": save_intermediates,
        "batch_invariant": batch_invariant,
    }
    key = None if cp_context is not None else _passed.key(q, k, v, g, beta, initial_state, *options.values())
    if key not in _passed:
        sizes = check_inputs(op, q, k, v, g, beta, cu_seqlens)
        check_options(op, g, **options)
        if cp_context is not None:
            rank = {"cu_seqlens": cu_seqlens, "batch_invariant": batch_invariant}
            sizes = check_context_parallel(op, cp_context, q, sizes, **rank)
        if initial_state is not None:
            check_state(op, "initial_state", initial_state, q, sizes, v_first=state_v_first)
        _passed.add(key)
    chosen = backends.choose(op, backend, AVAILABLE[op], q)
    run = eager_invariant.chunk_kda if batch_invariant and chosen == "eager" else AVAILABLE[op][chosen]
    if chosen != "triton":
        del options["save_intermediates"], options["batch_invariant"]
    if cp_context is not None:
        del options["cu_seqlens"]
        run = functools.partial(context_parallel.chunk_kda, run, cp_context)
    return run(q, k, v, g, beta, initial_state=initial_state, **options)
