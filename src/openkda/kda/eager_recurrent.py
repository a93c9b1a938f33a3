"""`recurrent_kda` in plain tensor operations, on any device: the loop over tokens without the host reading offsets.

Where g is near 0 decay acts as S + S (exp(g) - 1), which does not drift, as S exp(g) with a rounded exp(g) does
(docs/decisions/008-decode.md). The kernel, `kernels/recurrent.py`, is judged by this and by the reference.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from openkda import frameworks, packing
from openkda.kda import gate
from openkda.kda.contract import state_dtype
from openkda.norm.eager import l2norm


def recurrent_kda(
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
) -> tuple[Any, Any | None]:
    """`openkda.recurrent_kda` on the eager path, arguments unchecked; see there."""
    fw = frameworks.of(q)
    dtype, (B, T, H, K), (HV, V) = state_dtype(fw, q), fw.shape(q), fw.shape(v)[2:]
    out_dtype = fw.dtype_name(v)
    N = B if cu_seqlens is None else fw.shape(cu_seqlens)[0] - 1
    q, k, v, g, beta = (fw.cast(x, dtype) for x in (q, k, v, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    if use_gate_in_kernel:
        g = gate.activate(g, A_log, dt_bias, lower_bound, dtype)
    if use_beta_sigmoid_in_kernel:
        beta = (2 if allow_neg_eigval else 1) * fw.sigmoid(beta)
    q, k = (fw.repeat(x, HV // H, 2) for x in (q * (K**-0.5 if scale is None else scale), k))

    if initial_state is None:
        S = fw.zeros((N, HV, K, V), like=v)
    else:
        S = fw.swap(initial_state) if state_v_first else initial_state
    tokens = (q, k, v, g, beta[..., None])
    if cu_seqlens is None:
        outputs = []
        for t in range(T):
            o, S = step(fw, S, *(x[:, t] for x in tokens))
            outputs.append(o)
        o = fw.stack(outputs, 1) if outputs else v * 1.0
    else:
        o, S = _packed(fw, S, tokens, cu_seqlens, T)
    if not output_final_state:
        return fw.cast(o, out_dtype), None
    # The caller's tensor is never handed back as the result.
    return fw.cast(o, out_dtype), fw.copy(fw.swap(S) if state_v_first else S)


def step(fw: ModuleType, S: Any, q: Any, k: Any, v: Any, g: Any, beta: Any) -> tuple[Any, Any]:
    """One token of every row: states S [N, HV, K, V]; q, k, g [N, HV, K]; v [N, HV, V]; beta [N, HV, 1] -> o, S."""
    near = g > -0.5  # else exp(g) itself is exact enough, and exp(g) - 1 has lost its digits
    factor = fw.where(near, fw.expm1(g), fw.exp(g))
    S = fw.where(near[..., None], S, 0.0) + S * factor[..., None]
    r = beta * (v - fw.sum(k[..., None] * S, -2))
    S = S + k[..., None] * r[..., None, :]
    return fw.sum(q[..., None] * S, -2), S


def _packed(fw: ModuleType, S: Any, tokens: tuple, cu_seqlens: Any, T: int) -> tuple[Any, Any]:
    """One token after the other; a row of states behind those of the sequences takes what the tail does."""
    N = fw.shape(S)[0]
    states = fw.concat([S, fw.zeros((1, *fw.shape(S)[1:]), like=S)], 0)
    sequence = packing.sequence_ids(cu_seqlens, T)  # [T], N in the tail
    outputs = []
    for t in range(T):
        own = sequence[t : t + 1]
        o, state = step(fw, fw.take(states, own, 0), *(x[:, t] for x in tokens))
        outputs.append(fw.where((own < N)[:, None, None], o, 0.0))
        fw.put_rows_(states, own, state)
    return fw.stack(outputs, 1) if outputs else tokens[2] * 1.0, states[:N]
