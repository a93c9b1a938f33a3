"""`chunk_kda` on the eager path with batch_invariant=True: every chunk of every sequence alone, in one shape.

A library's matmul may sum in another order when its batch or its size changes, and an elementwise function may give
other bits at the end of a tensor than in its middle. So nothing is promised about them: each chunk, full or not, goes
through `eager.chunk_kda` as 64 rows of one sequence, in memory of its own, from the state that the chunk before it
left. Whatever such a call computes, it computes the same wherever the chunk came from: alone, in a batch, packed, or
replayed while decoding. What stands behind a row of a chunk does not reach it (the operator is causal to the bit).

As many calls as there are chunks: three to four times slower than the eager path (one thread, B1 T2048 and B8 T512).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from openkda import frameworks
from openkda.kda import eager
from openkda.kda.contract import state_dtype


def chunk_kda(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    *,
    initial_state: Any | None = None,
    output_final_state: bool = False,
    cu_seqlens: Any | None = None,
    state_v_first: bool = False,
    **options: Any,
) -> tuple[Any, Any | None]:
    """`openkda.chunk_kda`, arguments unchecked; see there. Differentiable like the eager path."""
    fw = frameworks.of(q)
    (B, T, _, K), (HV, V) = fw.shape(q), fw.shape(v)[2:]
    states = {"initial_state": initial_state, "output_final_state": output_final_state, "state_v_first": state_v_first}
    if B * T == 0:
        return eager.chunk_kda(q, k, v, g, beta, cu_seqlens=cu_seqlens, **states, **options)
    S0 = initial_state
    if S0 is not None and state_v_first:
        S0 = fw.swap(S0)
    chunks = eager.Chunks(fw, v, T, cu_seqlens)
    tokens = [chunks.split(x) for x in (q, k, v, g, fw.reshape(beta, (B, T, HV, 1)))]  # [R, NC, C, heads, D]
    valid = chunks.valid
    if valid is None:
        valid = fw.arange(chunks.NC * eager.CHUNK, like=v) >= 0
    valid = fw.reshape(valid, (chunks.NC, eager.CHUNK))
    zeros = fw.zeros((1, HV, K, V), like=v, dtype=state_dtype(fw, q))
    rows, ends = [], []
    for r in range(fw.shape(tokens[0])[0]):
        outputs, S = [], zeros if S0 is None else S0[r : r + 1]
        for c in range(chunks.NC):
            if chunks.table is not None:
                S = _start_of(fw, chunks.table, S0, c, zeros, S)
            c_q, c_k, c_v, c_g, c_beta = (fw.copy(x[r, c][None]) for x in tokens)
            o, S = eager.chunk_kda(
                c_q,
                c_k,
                c_v,
                c_g,
                c_beta[..., 0],
                initial_state=fw.copy(S),
                output_final_state=True,
                valid=fw.copy(valid[c]),
                **options,
            )
            outputs.append(fw.permute(o[0], (1, 0, 2)))  # [HV, C, V]
            ends.append(S)
        rows.append(fw.stack(outputs, 0))
    o = chunks.join(fw.stack(rows, 0))
    if not output_final_state:
        return o, None
    last = _final(fw, chunks, S0, ends)
    return o, fw.copy(fw.swap(last)) if state_v_first else last


def _start_of(fw: ModuleType, table: Any, S0: Any | None, c: int, zeros: Any, S: Any) -> Any:
    """The state before chunk c of packed sequences; S is the one after the chunk before it."""
    start = zeros if S0 is None else fw.take(S0, table.sequence[c : c + 1], 0)
    return fw.where(table.first[c], start, S)


def _final(fw: ModuleType, chunks: eager.Chunks, S0: Any | None, ends: list) -> Any:
    """States after each sequence, [N, HV, K, V], from those after each chunk."""
    if chunks.table is None:
        return fw.concat(ends[chunks.NC - 1 :: chunks.NC], 0)
    N = fw.shape(chunks.table.last_chunk)[0]
    through = fw.zeros((N, *fw.shape(ends[0])[1:]), like=ends[0]) if S0 is None else S0
    return fw.take(fw.concat([*ends, through], 0), chunks.table.last_chunk, 0)
