"""The operator token by token, for decoding and short prefill: one launch, states read once and written once.

    S <- D S,  D = 2^x          x = log2 of the token's decay, per channel
    r  = b (v - S^T k)
    S <- S + k r^T
    o  = scale S^T q

q, k [B, T, H, K], v [B, T, HV, V], g [B, T, HV, K], beta [B, T, HV] in any float type, raw where `Activations` says
so; all arithmetic in fp32. States are [K, V] matrices anywhere: strides are free, so a state with V first is the same
matrix with its strides exchanged. With slots, they live in a pool and are updated in place.

A state that is multiplied by D = exp(g) rounded to fp32 drifts: the same error, up to 2^-25, at every step. Near 1
decay is therefore S + S (D - 1), with D - 1 exact to 1.3e-7 of itself: `decay_state`.

cost       reads and writes a state once, 131 kB a sequence and head at K = V = 128, in fp32: that is all but 1% of the
           bytes of a step, whose 0.1 Mflop take a tenth of its time
program    one sequence x one value head x BV columns of V, all of K; the sum over K has one order for any V tile
oracle     openkda.kda.eager_recurrent, openkda.kda.reference
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# (a launch passes plain values for constexpr parameters, and loops over tl.range)
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from openkda import frameworks
from openkda.kda.kernels import tuning
from openkda.kda.kernels.common import LOG2_E, NORM_EPS, Activations, decay_log2, sigmoid
from openkda.kda.kernels.launch import launch


# ---- device helpers
@triton.jit
def decay_state(s, x):
    """2^x s, rows of s [K, V] by x [K] <= 0, as s + s (2^x - 1) where x > -1.

    (2^x - 1) / x is a polynomial of degree 5 on [-1, 0] (Chebyshev interpolation, 1.3e-7 of itself in fp32).
    """
    p = 0.001291636880031984 + 0.00011491995030441791 * x
    p = 0.009597035189495036 + x * p
    p = 0.05549922958938052 + x * p
    p = 0.24022609141349882 + x * p
    p = 0.6931471747956164 + x * p
    near = x > -1.0
    factor = tl.where(near, x * p, tl.exp2(x))
    return tl.where(near[:, None], s, 0.0) + s * factor[:, None]


@triton.jit
def _unit(x, L2NORM: tl.constexpr):
    if L2NORM:
        return x * tl.rsqrt(tl.sum(x * x, 0) + NORM_EPS)
    return x


@triton.jit
def _step(
    s, p_q, p_k, p_v, p_g, p_beta, p_o, bias, rate, bound, scale, beta_scale, m_k, m_v,
    GATE: tl.constexpr, L2NORM: tl.constexpr, BETA_SIGMOID: tl.constexpr,
):  # fmt: skip
    """One token: the state [BK, BV] before it -> after it; the output is stored. Masked channels hold k = q = 0."""
    b_q = _unit(tl.load(p_q, mask=m_k, other=0.0).to(tl.float32), L2NORM) * scale
    b_k = _unit(tl.load(p_k, mask=m_k, other=0.0).to(tl.float32), L2NORM)
    b_v = tl.load(p_v, mask=m_v, other=0.0).to(tl.float32)
    b_beta = tl.load(p_beta).to(tl.float32)
    if BETA_SIGMOID:
        b_beta = beta_scale * sigmoid(b_beta)
    x = decay_log2(tl.load(p_g, mask=m_k, other=0.0).to(tl.float32), bias, rate, bound, GATE)
    s = decay_state(s, x)
    r = b_beta * (b_v - tl.sum(s * b_k[:, None], 0))
    s += b_k[:, None] * r[None, :]
    tl.store(p_o, tl.sum(s * b_q[:, None], 0).to(p_o.dtype.element_ty), mask=m_v)
    return s


@triton.jit
def _zero_rows(o, first, end, step, i_h, HV, o_v, m_v, V: tl.constexpr):
    """0 to rows first, first + step, .. below end of o [T, HV, V], in the columns o_v of one head."""
    zeros = tl.zeros_like(o_v).to(o.dtype.element_ty)
    t = first
    while t < end:
        tl.store(o + (t * HV + i_h) * V + o_v, zeros, mask=m_v)
        t += step


# ---- the kernel
@triton.jit(do_not_specialize=["T", "N"])
def _recurrent_fwd_kernel(
    q, k, v, g, beta, A_log, dt_bias, initial_state, o, final_state, slots, cu_seqlens,
    T, N, HV, group, scale, lower_bound, beta_scale,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, b_b, b_t, b_h,
    i_slot, i_head, i_k, i_v, f_slot, f_head, f_k, f_v,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GATE: tl.constexpr, L2NORM: tl.constexpr, BETA_SIGMOID: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    # Which work: V tiles of a state are neighbours. One axis, as y and z end at 65535.
    NV: tl.constexpr = (V + BV - 1) // BV
    i_state = (tl.program_id(0) // NV).to(tl.int64)
    i_n, i_h = i_state // HV, i_state % HV
    o_k, o_v = tl.arange(0, BK), (tl.program_id(0) % NV) * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V

    # Its tokens; what lies behind the last offset is padding, and all sequences share in writing its zeros.
    first, tokens, o_row = tl.cast(0, tl.int64), tl.cast(T, tl.int64), i_n * T
    if cu_seqlens is not None:
        first = tl.load(cu_seqlens + i_n).to(tl.int64)
        tokens = tl.load(cu_seqlens + i_n + 1).to(tl.int64) - first
        o_row = first
        _zero_rows(o, tl.load(cu_seqlens + N).to(tl.int64) + i_n, T, N, i_h, HV, o_v, m_v, V)
        i_n_token = tl.cast(0, tl.int64)
    else:
        i_n_token = i_n

    # Its state. A negative slot is padding; one without tokens stays as it is.
    slot = i_n
    if slots is not None:
        slot = tl.load(slots + i_n).to(tl.int64)
        if slot < 0:
            _zero_rows(o, o_row, o_row + tokens, 1, i_h, HV, o_v, m_v, V)
            return
        if tokens == 0:
            return
    m_s = m_k[:, None] & m_v[None, :]
    if initial_state is not None:
        p_s = initial_state + slot * i_slot + i_h * i_head + o_k[:, None] * i_k + o_v[None, :] * i_v
        s = tl.load(p_s, mask=m_s, other=0.0).to(tl.float32)
    else:
        s = tl.zeros([BK, BV], tl.float32)

    rate, bias = tl.cast(0.0, tl.float32), tl.zeros([BK], tl.float32)
    if GATE != "none":
        rate = tl.exp2(tl.load(A_log + i_h).to(tl.float32) * LOG2_E)
        if dt_bias is not None:
            bias = tl.load(dt_bias + i_h * K + o_k, mask=m_k, other=0.0).to(tl.float32)
    p_q = q + i_n_token * q_b + first * q_t + (i_h // group) * q_h + o_k
    p_k = k + i_n_token * k_b + first * k_t + (i_h // group) * k_h + o_k
    p_v = v + i_n_token * v_b + first * v_t + i_h * v_h + o_v
    p_g = g + i_n_token * g_b + first * g_t + i_h * g_h + o_k
    p_beta = beta + i_n_token * b_b + first * b_t + i_h * b_h
    p_o = o + (o_row * HV + i_h) * V + o_v
    if ONE:  # without a loop all loads are on their way at once
        s = _step(
            s, p_q, p_k, p_v, p_g, p_beta, p_o, bias, rate, lower_bound, scale, beta_scale, m_k, m_v,
            GATE, L2NORM, BETA_SIGMOID,
        )  # fmt: skip
    else:
        for _ in range(tokens.to(tl.int32)):
            s = _step(
                s, p_q, p_k, p_v, p_g, p_beta, p_o, bias, rate, lower_bound, scale, beta_scale, m_k, m_v,
                GATE, L2NORM, BETA_SIGMOID,
            )  # fmt: skip
            p_q += q_t
            p_k += k_t
            p_v += v_t
            p_g += g_t
            p_beta += b_t
            p_o += HV * V
    if final_state is not None:
        p_f = final_state + slot * f_slot + i_h * f_head + o_k[:, None] * f_k + o_v[None, :] * f_v
        tl.store(p_f, s.to(final_state.dtype.element_ty), mask=m_s)


# ---- launcher
def _state_strides(state: Any | None, v_first: bool) -> tuple[int, ...]:
    """Strides over slots, heads, K and V."""
    if state is None:
        return (0, 0, 0, 0)
    slot, head, first, second = frameworks.of(state).strides(state)
    return (slot, head, second, first) if v_first else (slot, head, first, second)


def recurrent_fwd(
    *, q: Any, k: Any, v: Any, g: Any, beta: Any, o: Any, initial_state: Any | None, final_state: Any | None,
    slots: Any | None, cu_seqlens: Any | None, act: Activations, state_v_first: bool, tile: dict | None = None,
) -> None:  # fmt: skip
    """Walk over the tokens of every sequence; arguments were checked.

    Args:
        q, k, v, g, beta: Strides are free but for a contiguous last axis of all but beta; raw where `act` says so.
        o: Written, [B, T, HV, V], contiguous; 0 behind the last offset and for padding slots.
        initial_state: [N, HV, K, V] ([N, HV, V, K] with state_v_first), any strides, fp32 or bf16; None means zeros.
        final_state: Written, like initial_state; None where not wanted. With slots both are the pool, [slots, ..].
        slots: int32 or int64 [N], contiguous; negative for padding.
    """
    fw = frameworks.of(q)
    (B, T, H, K), (HV, V) = fw.shape(q), fw.shape(v)[2:]
    N = B if cu_seqlens is None else int(cu_seqlens.shape[0]) - 1
    stage = "recurrent_fwd_v_first" if state_v_first else "recurrent_fwd"
    settings = dict(tile or tuning.lookup(stage, tuning.family_of(q), work=N * HV))
    if K > 128:
        settings["num_warps"] *= 2
    BK, BV = triton.next_power_of_2(K), min(settings.pop("BV"), triton.next_power_of_2(V))
    strides = [int(n) for x in (q, k, v, g, beta) for n in fw.strides(x)[:3]]
    with fw.on_device(q):
        launch(
            _recurrent_fwd_kernel, N * HV * -(-V // BV),
            q, k, v, g, beta, act.A_log, act.dt_bias, initial_state, o, final_state, slots, cu_seqlens,
            T, N, HV, HV // H, float(act.scale), float(act.lower_bound or 0.0), float(act.beta_scale), *strides,
            *_state_strides(initial_state, state_v_first), *_state_strides(final_state, state_v_first),
            K=K, V=V, BK=BK, BV=BV, GATE=act.gate, L2NORM=act.l2norm, BETA_SIGMOID=act.beta_sigmoid,
            ONE=cu_seqlens is None and T == 1, **settings,
        )  # fmt: skip
