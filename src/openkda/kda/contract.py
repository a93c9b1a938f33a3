"""The contract of the operator, once, for every backend and tensor library: what `chunk_kda` and `recurrent_kda`
accept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from openkda import checks, frameworks
from openkda.kda.gate import check_gate
from openkda.parallel.context import check_context

MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class Sizes:
    """B batch, T tokens, H query/key heads, HV value heads, K and V head widths, N sequences (B, or the slots of
    cu_seqlens).
    """

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    N: int


def state_dtype(fw: Any, q: Any) -> str:
    """States and sums are fp32; fp64 with fp64 inputs."""
    return "float64" if fw.dtype_name(q) == "float64" else "float32"


def check_inputs(op: str, q: Any, k: Any, v: Any, g: Any, beta: Any, cu_seqlens: Any | None) -> Sizes:
    """Ranks, shapes, dtypes and devices of the token tensors."""
    for name, x, axes in (("q", q, "[B, T, H, K]"), ("k", k, "[B, T, H, K]"), ("v", v, "[B, T, HV, V]")):
        checks.floating(op, name, x)
        checks.rank(op, name, x, axes)
    B, T, H, K = (int(n) for n in q.shape)
    HV, V = int(v.shape[2]), int(v.shape[3])
    checks.shape(op, "k", k, (B, T, H, K), "[B, T, H, K]", "k follows q")
    checks.shape(op, "v", v, (B, T, HV, V), "[B, T, HV, V]", "B and T follow q")
    if H < 1 or HV < 1 or HV % H:
        checks.bad_value(op, "v", f"have a number of heads HV that is a multiple of q's H = {H}", HV)
    for name, size in (("K (q's last axis)", K), ("V (v's last axis)", V)):
        if not 1 <= size <= MAX_HEAD_DIM:
            checks.bad_value(op, name, f"be between 1 and {MAX_HEAD_DIM}", size)
    checks.floating(op, "g", g)
    checks.shape(op, "g", g, (B, T, HV, K), "[B, T, HV, K]", "one log-decay per token, value head and channel of K")
    checks.floating(op, "beta", beta)
    checks.shape(op, "beta", beta, (B, T, HV), "[B, T, HV]", "beta follows the heads of v, not of q")
    fw = frameworks.of(q)
    for name, x in (("k", k), ("v", v)):
        checks.dtype(op, name, x, (fw.dtype_name(q),), "q, k and v share one dtype")
    checks.same_device(op, "q", q, k=k, v=v, g=g, beta=beta, cu_seqlens=cu_seqlens)
    N = B if cu_seqlens is None else checks.cu_seqlens(op, cu_seqlens, batch=B, tokens=T)
    return Sizes(B, T, H, HV, K, V, N)


def check_options(
    op: str,
    g: Any,
    *,
    scale: Any,
    use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    A_log: Any,
    dt_bias: Any,
    lower_bound: Any,
    cu_seqlens: Any | None,
    **flags: Any,
) -> None:
    """Switches that only make sense together, and the gate's parameters. Other boolean switches come in as flags."""
    flags |= {
        "use_gate_in_kernel": use_gate_in_kernel,
        "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": allow_neg_eigval,
    }
    for name, value in flags.items():
        if not isinstance(value, bool):
            checks.bad_type(op, name, "be a bool", type(value).__name__)
    if scale is not None:
        checks.positive(op, "scale", scale)
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        checks.bad_value(
            op,
            "allow_neg_eigval",
            "be False without use_beta_sigmoid_in_kernel",
            True,
            "it doubles the sigmoid; double a ready beta yourself",
        )
    if use_gate_in_kernel:
        checks.tensor(op, "A_log", A_log)
        check_gate(op, g, A_log, dt_bias, lower_bound, raw_name="g")
        return
    for name, value in (("A_log", A_log), ("dt_bias", dt_bias), ("lower_bound", lower_bound)):
        if value is not None:
            got = type(value).__name__ if frameworks.is_tensor(value) else value
            checks.bad_value(
                op,
                name,
                "be None without use_gate_in_kernel",
                got,
                "g is then the log-decay itself; set use_gate_in_kernel=True for raw logits",
            )
    if checks.values_wanted():
        _check_decay_values(op, g, cu_seqlens)


def _check_decay_values(op: str, g: Any, cu_seqlens: Any | None) -> None:
    fw = frameworks.of(g)
    if cu_seqlens is not None:
        g = g[:, : fw.to_list(cu_seqlens)[-1]]  # behind it lies padding, which may hold anything
    if fw.to_list(fw.any_above(g, 0.0)):
        checks.bad_value(op, "g", "be <= 0 everywhere", "a value above 0", "g is a log-decay in nats")


def check_state(op: str, name: str, state: Any, q: Any, sizes: Sizes, *, v_first: bool) -> None:
    """A state [N, HV, K, V], or [N, HV, V, K] with v_first, fp32 (fp64 beside fp64 inputs), on q's device."""
    fw = frameworks.of(q)
    checks.dtype(op, name, state, (state_dtype(fw, q),), "states are kept in fp32 (fp64 with fp64 inputs)")
    inner = (sizes.V, sizes.K) if v_first else (sizes.K, sizes.V)
    axes = "[N, HV, V, K]" if v_first else "[N, HV, K, V]"
    checks.shape(op, name, state, (sizes.N, sizes.HV, *inner), axes)
    checks.same_device(op, "q", q, **{name: state})


def check_context_parallel(
    op: str, context: Any, q: Any, sizes: Sizes, *, cu_seqlens: Any | None, batch_invariant: bool
) -> Sizes:
    """The arguments that go with cp_context; returns the sizes with N of all ranks."""
    context = check_context(op, context)
    if cu_seqlens is not None:
        checks.bad_value(op, "cu_seqlens", "be None with cp_context", list(cu_seqlens.shape), "cp_context has them")
    if batch_invariant:
        checks.bad_value(op, "batch_invariant", "be False with cp_context", True, "where a row is cut changes its sums")
    context.check(op, "q", q)
    return replace(sizes, N=context.num_sequences)
