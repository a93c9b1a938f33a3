"""`recurrent_kda`: the same operator one token after another, for decoding and short prefill; no gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from openkda import backends, checks, frameworks, packing
from openkda.errors import BackendUnavailable
from openkda.kda import chunk, eager_recurrent, reference
from openkda.kda.contract import Sizes, check_inputs, check_options, check_state, state_dtype
from openkda.kda.replay import ReplayState, check_replay_state, replay


def _fused(*tensors: Any, **options: Any) -> tuple[Any, Any | None]:
    from openkda.kda import fused_recurrent  # needs triton, which not everybody has

    return fused_recurrent.recurrent_kda(*tensors, **options)


_passed = checks.Passed()

# Best first.
AVAILABLE = {
    "recurrent_kda": {"triton": _fused, "eager": eager_recurrent.recurrent_kda, "reference": reference.chunk_kda}
}


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
    state_indices: Any | None = None,
    batch_invariant: bool = False,
    backend: str = "auto",
) -> tuple[Any, Any | None]:
    """Kimi Delta Attention token by token, for inference: arguments and results as in `openkda.chunk_kda`, and

    Args:
        state_indices: int32 or int64 `[N]`. initial_state is then a pool `[slots, HV, K, V]` (fp32 or bf16) that is
            read and updated in place at these slots; a negative index is padding: o is 0 there and no slot is touched.
            Two sequences must not share a slot. The returned state is None: it is in the pool.
        batch_invariant: Give the bits that `chunk_kda(batch_invariant=True)` gives for whole sequences, however they
            are cut into calls, by running the unfinished chunk of 64 tokens again (`openkda.kda.replay`). The final
            state is then a ReplayState, and initial_state None, a ReplayState, or a plain state where a chunk begins.
    Returns: (o `[B, T, HV, V]` in v's dtype, final states or None).
    Raises: as chunk_kda; ValueError if an input needs a gradient, if state_indices comes without a pool or with
        batch_invariant, or (with OPENKDA_CHECK=1) if an index exceeds the pool or comes twice.
    Numerics: fp32 inside, whatever the inputs (fp64 with fp64 inputs). A state does not drift however slow its decay.
    Source: Kimi Linear, arXiv 2510.26692, equation 1.
    """
    op = "recurrent_kda"
    gate = {"use_gate_in_kernel": use_gate_in_kernel, "A_log": A_log, "dt_bias": dt_bias, "lower_bound": lower_bound}
    options: dict[str, Any] = {
        "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": allow_neg_eigval,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "output_final_state": output_final_state,
        "state_v_first": state_v_first,
    }
    tokens, call = (q, k, v, g, beta), {"scale": scale, "cu_seqlens": cu_seqlens, **gate, **options}
    # a ReplayState holds tensors that a key does not see through
    key = None if batch_invariant else _passed.key(*tokens, initial_state, state_indices, *call.values())
    if key not in _passed:
        sizes = check_inputs(op, *tokens, cu_seqlens)
        check_options(op, g, batch_invariant=batch_invariant, **call)
        _check_states(op, initial_state, state_indices, tokens, sizes, batch_invariant, v_first=state_v_first)
        if batch_invariant:
            return _invariant(op, tokens, initial_state, sizes, call, backend)
        _passed.add(key)
    fw = frameworks.of(q)
    _refuse_gradients(op, tokens, A_log, dt_bias, initial_state)
    chosen = backends.choose(op, backend, AVAILABLE[op], q)
    token_by_token = AVAILABLE[op][chosen]
    with fw.no_grad():
        if chosen == "triton":
            call["state_indices"] = state_indices
        if chosen == "triton" or state_indices is None:
            return token_by_token(*tokens, initial_state=initial_state, **call)
        return _with_pool(token_by_token, tokens, initial_state, state_indices, call), None


def _refuse_gradients(op: str, tokens: tuple, A_log: Any, dt_bias: Any, state: Any) -> None:
    named = dict(zip(("q", "k", "v", "g", "beta"), tokens, strict=True)) | {"A_log": A_log, "dt_bias": dt_bias}
    named["initial_state"] = None if isinstance(state, ReplayState) else state
    checks.inference_only(op, "chunk_kda", tokens[0], **named)


def _invariant(
    op: str, tokens: tuple, before: Any | None, sizes: Sizes, call: dict[str, Any], backend: str
) -> tuple[Any, Any | None]:
    """With batch_invariant: by replay of the unfinished chunk."""
    fw = frameworks.of(tokens[0])
    _refuse_gradients(op, tokens, call["A_log"], call["dt_bias"], before)
    if backend == "reference":
        raise BackendUnavailable(
            f'{op}: batch_invariant=True needs backend "triton" or "eager", got "reference", whose activations run '
            "over whole sequences at once"
        )
    cu_seqlens, final, v_first = call.pop("cu_seqlens"), call.pop("output_final_state"), call["state_v_first"]
    whole = functools.partial(chunk.chunk_kda, **call, batch_invariant=True, backend=backend)
    with fw.no_grad():
        o, after = replay(whole, tokens, before, sizes, cu_seqlens, v_first, state_dtype(fw, tokens[0]))
    return o, after if final else None


def _check_states(
    op: str, state: Any, indices: Any, tokens: tuple, sizes: Sizes, batch_invariant: bool, *, v_first: bool
) -> None:
    """The states that the call starts from, in whichever form."""
    if indices is not None and batch_invariant:
        checks.bad_value(op, "state_indices", "be None with batch_invariant", list(indices.shape))
    if indices is not None:
        _check_pool(op, state, indices, tokens[0], sizes, v_first=v_first)
    elif state is not None and batch_invariant:
        check_replay_state(op, state, tokens, sizes, v_first=v_first)
    elif state is not None:
        check_state(op, "initial_state", state, tokens[0], sizes, v_first=v_first)


def _check_pool(op: str, pool: Any, indices: Any, q: Any, sizes: Sizes, *, v_first: bool) -> None:
    fw = frameworks.of(q)
    if pool is None:
        checks.bad_value(op, "initial_state", "be the pool of states with state_indices", None)
    wanted = ("float32", "bfloat16", "float64") if fw.dtype_name(q) == "float64" else ("float32", "bfloat16")
    checks.dtype(op, "initial_state", pool, wanted, "a pool of states is fp32 or bf16")
    inner, axes = ((sizes.V, sizes.K), "[slots, HV, V, K]") if v_first else ((sizes.K, sizes.V), "[slots, HV, K, V]")
    checks.rank(op, "initial_state", pool, axes)
    checks.shape(op, "initial_state", pool, (int(pool.shape[0]), sizes.HV, *inner), axes)
    checks.state_indices(op, indices, sequences=sizes.N, slots=int(pool.shape[0]))
    checks.same_device(op, "q", q, initial_state=pool, state_indices=indices)


def _with_pool(
    token_by_token: Callable[..., Any], tokens: tuple[Any, ...], pool: Any, indices: Any, call: dict[str, Any]
) -> Any:
    """Gather states, run, write them back; a padding sequence computes on zeros and is dropped by selects, never by
    branches.
    """
    q, _, v, _, _ = tokens
    fw, call = frameworks.of(q), {**call, "output_final_state": True}
    live = indices >= 0  # [N]
    live_state = live[:, None, None, None]
    slots = fw.maximum(fw.cast(indices, "int64"), 0)
    dtype = "float64" if fw.dtype_name(q) == "float64" else "float32"
    states = fw.where(live_state, fw.cast(fw.take(pool, slots, 0), dtype), 0.0)
    o, final = token_by_token(*tokens, initial_state=states, **call)
    packing.write_slots_(pool, slots, fw.cast(final, fw.dtype_name(pool)), live)
    if call["cu_seqlens"] is None:
        return fw.where(live_state, o, fw.zeros((), like=o))
    return fw.where(_live_tokens(fw, call["cu_seqlens"], live, fw.shape(v)[1]), o, fw.zeros((), like=o))


def _live_tokens(fw: Any, cu_seqlens: Any, live: Any, tokens: int) -> Any:
    """[1, T, 1, 1]: whether a token's sequence is live; those of the tail have none."""
    sequence, N = packing.sequence_ids(cu_seqlens, tokens), fw.shape(live)[0]
    return ((sequence < N) & fw.take(live, fw.minimum(sequence, N - 1), 0))[None, :, None, None]
