"""Kimi Delta Attention, token by token: the definition that everything else in openkda is tested against.

Per value head, with a state S [K, V]:

    S <- diag(exp(g_t)) S                         decay first, per channel of K
    S <- S + beta_t k_t (v_t - S^T k_t)^T         then the delta rule
    o_t = scale * S^T q_t                         the output reads the updated state

Source: Kimi Linear, arXiv 2510.26692, equation 1. fp64 for fp64 inputs, else fp32; gradients by the library's autograd.
"""

from __future__ import annotations

import itertools
from typing import Any

from openkda import frameworks
from openkda.kda import gate
from openkda.kda.contract import state_dtype
from openkda.norm.reference import l2norm


def chunk_kda(
    q: Any,  # [B, T, H, K]
    k: Any,  # [B, T, H, K]
    v: Any,  # [B, T, HV, V]
    g: Any,  # [B, T, HV, K]  log-decay in nats, or raw logits with use_gate_in_kernel
    beta: Any,  # [B, T, HV]
    *,
    scale: float | None = None,
    initial_state: Any | None = None,  # [N, HV, K, V]
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    A_log: Any | None = None,  # [HV]
    dt_bias: Any | None = None,  # [HV, K]
    lower_bound: float | None = None,
    cu_seqlens: Any | None = None,  # [N+1]; its values are read on the host
    state_v_first: bool = False,
) -> tuple[Any, Any | None]:
    """`openkda.chunk_kda` by definition, arguments unchecked; see there."""
    fw = frameworks.of(q)
    dtype, (B, T, H, K), (HV, V) = state_dtype(fw, q), fw.shape(q), fw.shape(v)[2:]
    sequences = [(b, 0, T) for b in range(B)]  # (batch row, first token, one past the last)
    if cu_seqlens is not None:
        offsets = fw.to_list(cu_seqlens)
        sequences = [(0, start, end) for start, end in itertools.pairwise(offsets)]

    outputs, states = [], []
    for n, (b, start, end) in enumerate(sequences):
        # [L, H or HV, ..] of one sequence, in the working precision; every key head serves HV / H value heads
        q_n, k_n, v_n, g_n, beta_n = (fw.cast(x[b, start:end], dtype) for x in (q, k, v, g, beta))
        if use_qk_l2norm_in_kernel:
            q_n, k_n = l2norm(q_n), l2norm(k_n)
        if use_gate_in_kernel:
            g_n = gate.activate(g_n, A_log, dt_bias, lower_bound, dtype)
        if use_beta_sigmoid_in_kernel:
            beta_n = (2 if allow_neg_eigval else 1) * fw.sigmoid(beta_n)
        q_n, k_n = (fw.repeat(x, HV // H, 1) for x in (q_n * (K**-0.5 if scale is None else scale), k_n))

        S = fw.zeros((HV, K, V), like=v, dtype=dtype)
        if initial_state is not None:
            S = fw.swap(initial_state[n]) if state_v_first else initial_state[n]
        for q_t, k_t, v_t, g_t, beta_t in zip(*(fw.unstack(x, 0) for x in (q_n, k_n, v_n, g_n, beta_n)), strict=True):
            S = fw.exp(g_t)[:, :, None] * S
            error = v_t - fw.sum(k_t[:, :, None] * S, 1)  # v_t - S^T k_t  [HV, V]
            S = S + k_t[:, :, None] * (beta_t[:, None] * error)[:, None, :]
            outputs.append(fw.sum(q_t[:, :, None] * S, 1))  # S^T q_t  [HV, V]
        states.append(fw.swap(S) if state_v_first else S)

    outputs += [fw.zeros((HV, V), like=v, dtype=dtype)] * (B * T - len(outputs))  # after the last offset: padding
    o = fw.stack(outputs, 0) if outputs else fw.zeros((0, HV, V), like=v, dtype=dtype)
    o = fw.cast(fw.reshape(o, (B, T, HV, V)), fw.dtype_name(v))
    if not output_final_state:
        return o, None
    no_states = fw.zeros((0, HV, V, K) if state_v_first else (0, HV, K, V), like=v, dtype=dtype)
    return o, fw.stack(states, 0) if states else no_states
