"""`chunk_kda` over a row that is spread over ranks: exact, forward and backward, with one all_gather a direction.

KDA is affine in the state (docs/maths.md, section 9). A part of the row turns the state X that enters it into
M X + b, so a rank sends M [K, K] and b [K, V] of each of its parts, and whoever needs the state at a cut folds the maps
of the parts before it:

    forward     b    the state that leaves, if zeros enter     = the operator's final state
                M    the state that leaves, if v = 0           = the operator's final state, from the identity
                X'   = M X + b                                 in time
    backward    c    the gradient of X, if nothing comes back  = the operator's gradient of its initial state
                dX   = M^T dX' + c                             against time

Then every rank runs the operator on its own tokens, from the states that really enter, with the gradients that really
come back. All maths is the operator's: columns of the state do not meet, so b and M are one run.
What a rank sends is H K (K + V) numbers a part and direction, whatever T.

Folds are fp64: cheap, and no tf32 switch touches them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from openkda import frameworks
from openkda.kda.contract import MAX_HEAD_DIM, state_dtype
from openkda.parallel.context import CPContext
from openkda.parallel.layout import Part
from openkda.parallel.states import final_states, slot_starts, with_rows

Range = tuple[int, int]
PARAMETERS: tuple[str, ...] = ("A_log", "dt_bias")
TUNED_HEAD_DIM = 128  # kernels take wider heads, with narrower tiles


def chunk_kda(
    operator: Callable[..., tuple[Any, Any]],
    cp: CPContext,
    *tokens: Any,
    initial_state: Any | None,
    output_final_state: bool,
    state_v_first: bool,
    **options: Any,
) -> tuple[Any, Any | None]:
    """`openkda.chunk_kda` with cp_context, arguments unchecked; see there and `build_cp_context`.

    Args:
        operator: The backend's chunk_kda.
        tokens: q, k, v, g, beta of this rank, [1, T, ..].
        initial_state: Of all sequences, [N, HV, K, V].
        options: All other arguments of the operator.
    """
    fw = frameworks.of(tokens[0])
    if state_v_first and initial_state is not None:
        initial_state = fw.swap(initial_state)
    run = _Run(fw, cp, operator, options)
    with fw.no_grad():
        maps = _maps(run, tokens, initial_state)  # [parts, HV, K, V + K]
        entering = _entering(run, _gather(fw, cp, maps), maps)
    starts = slot_starts(fw, cp, initial_state, run.zero_state(tokens), entering)
    o, ends = run(tokens, starts, cp.local_offsets(like=tokens[0]))
    fixed = [x if x is None else fw.detach(x) for x in (*tokens, *(options[name] for name in PARAMETERS))]
    o, ends = fw.custom(Bridge, o, ends, _transitions(fw, maps), *fixed, run)
    if not output_final_state:
        return o, None
    final = final_states(fw, cp, ends, initial_state)
    return o, fw.swap(final) if state_v_first else final


class _Run:
    """The local operator: packed tokens and states [slots, HV, K, V] -> (o, states after each slot)."""

    def __init__(self, fw: ModuleType, cp: CPContext, operator: Callable[..., tuple], options: dict[str, Any]) -> None:
        self.fw, self.cp, self.operator = fw, cp, operator
        self.options = {name: value for name, value in options.items() if name not in PARAMETERS}
        self.parameters = {name: options[name] for name in PARAMETERS}

    def __call__(self, tokens: Sequence[Any], starts: Any, cu_seqlens: Any, **parameters: Any) -> tuple[Any, Any]:
        return self.operator(
            *tokens,
            initial_state=starts,
            output_final_state=True,
            cu_seqlens=cu_seqlens,
            state_v_first=False,
            **self.options,
            **(parameters or self.parameters),
        )

    def zero_state(self, tokens: Sequence[Any]) -> Any:
        """Zeros [HV, K, V]."""
        fw, q, v = self.fw, tokens[0], tokens[2]
        (HV, V), K = fw.shape(v)[2:], fw.shape(q)[3]
        return fw.zeros((HV, K, V), like=q, dtype=state_dtype(fw, q))

    def stretches(self, tokens: Sequence[Any], ranges: Sequence[Range]) -> tuple[list[Any], Any]:
        """Tokens of some ranges alone, packed, and their offsets."""
        whole = ranges[0] == (0, self.fw.shape(tokens[0])[1])
        packed = [x if whole else _stretches(self.fw, x, ranges) for x in tokens]
        return packed, self.cp.offsets_of([stop - start for start, stop in ranges], like=tokens[0])


def _stretches(fw: ModuleType, x: Any, ranges: Sequence[Range]) -> Any:
    blocks = [x[:, start:stop] for start, stop in ranges]
    return blocks[0] if len(blocks) == 1 else fw.concat(blocks, 1)


def _gather(fw: ModuleType, cp: CPContext, maps: Any) -> Any:
    """[parts, ..] of this rank -> [ranks * parts, ..], see `CPContext.place`."""
    gathered = fw.all_gather(fw.contiguous(maps), cp.group)
    return fw.reshape(gathered, (cp.size * len(cp.parts), *fw.shape(maps)[1:]))


# ---------------------------------------------------------------- forward
def _maps(run: _Run, tokens: Sequence[Any], initial_state: Any | None) -> Any:
    """(b | M) of this rank's parts, [parts, HV, K, V + K]; zeros where no sequence leaves.

    Where the sequence that leaves begins in the part, nothing that enters reaches it: M is 0.
    """
    fw, zero = run.fw, run.zero_state(tokens)
    K, V = fw.shape(zero)[1:]
    leaving = [part for part in run.cp.parts if part.leaves]
    maps = fw.zeros((len(run.cp.parts), *fw.shape(zero)[:2], V + K), like=zero)
    if not leaving:
        return maps
    packed, cu_seqlens = run.stretches(tokens, [(p.pieces[-1].start, p.pieces[-1].stop) for p in leaving])
    begun = fw.stack([_begun(part, initial_state, zero) for part in leaving], 0)
    one, none = fw.expand(fw.eye(K, like=zero), (fw.shape(zero)[0], K, K)), zero[..., :1] * fw.zeros((K,), like=zero)
    unit = fw.stack([one if part.passes else none for part in leaving], 0)
    if any(part.passes for part in leaving):
        ends = _both_maps(run, packed, begun, unit, cu_seqlens)
    else:
        ends = fw.concat([run(packed, begun, cu_seqlens)[1], unit], -1)
    return with_rows(fw, maps, {part.index: ends[i] for i, part in enumerate(leaving)})


def _both_maps(run: _Run, tokens: Sequence[Any], begun: Any, unit: Any, cu_seqlens: Any) -> Any:
    """The states after each slot from `begun` with v, and from `unit` with v = 0: [slots, HV, K, V + K].

    One run with K more columns, or with twice the value heads, which leaves them as wide as kernels are made for.
    """
    fw, (q, k, v, g, beta) = run.fw, tokens
    (HV, V), K = fw.shape(v)[2:], fw.shape(q)[3]
    nothing = fw.zeros((*fw.shape(v)[:3], K), like=v)
    if K + V <= (TUNED_HEAD_DIM if fw.on_gpu(q) else MAX_HEAD_DIM):
        wide = (q, k, fw.concat([v, nothing], -1), g, beta)
        return run(wide, fw.concat([begun, unit], -1), cu_seqlens)[1]
    if K != V:
        return fw.concat([run((q, k, x, g, beta), S, cu_seqlens)[1] for x, S in ((v, begun), (nothing, unit))], -1)
    parameters = {n: x if x is None else fw.repeat(fw.reshape(x, (HV, -1)), 2, 0) for n, x in run.parameters.items()}
    if parameters["A_log"] is not None:
        parameters["A_log"] = fw.reshape(parameters["A_log"], (2 * HV,))
    pairs = (q, k, _interleaved(fw, v, nothing, 2), fw.repeat(g, 2, 2), fw.repeat(beta, 2, 2))
    ends = run(pairs, _interleaved(fw, begun, unit, 1), cu_seqlens, **parameters)[1]
    first, second = fw.unstack(fw.reshape(ends, (fw.shape(ends)[0], HV, 2, K, V)), 2)
    return fw.concat([first, second], -1)


def _interleaved(fw: ModuleType, x: Any, y: Any, axis: int) -> Any:
    """The heads of x and y in turn: value heads 2n and 2n + 1 read the key head that n reads."""
    size = list(fw.shape(x))
    size[axis] *= 2
    return fw.reshape(fw.stack([x, y], axis + 1), size)


def _begun(part: Part, initial_state: Any | None, zero: Any) -> Any:
    """The state before a part's last piece, if zeros enter the part."""
    piece = part.pieces[-1]
    return zero if initial_state is None or not piece.begins else initial_state[piece.sequence]


def _entering(run: _Run, gathered: Any, like: Any) -> dict[int, Any]:
    """{slot: the state that enters it [HV, K, V]}."""
    fw, cp = run.fw, run.cp
    V = fw.shape(like)[-1] - fw.shape(like)[-2]
    states = {}
    for part in cp.parts:
        if not part.enters:
            continue
        chain = []  # the parts that the sequence has passed, and where it began, nearest first
        for earlier in cp.earlier(part):
            chain.append(fw.cast(gathered[cp.place(earlier)], "float64"))
            if not earlier.passes:
                break
        state = chain.pop()[..., :V]
        for step in reversed(chain):
            state = fw.matmul(step[..., V:], state) + step[..., :V]
        states[cp.entering_slots[part.index]] = fw.cast(state, fw.dtype_name(like))
    return states


def _transitions(fw: ModuleType, maps: Any) -> Any:
    """M of (b | M), in memory of its own."""
    return fw.copy(maps[..., fw.shape(maps)[-1] - fw.shape(maps)[-2] :])


# ---------------------------------------------------------------- backward
class Bridge:
    """Nothing forward. Backward, between the gradients of the results and the operator's own backward: finds the
    gradient that comes back from later parts into the states that leave this rank.
    """

    ONCE = "chunk_kda"

    @staticmethod
    def forward(fw: ModuleType, ctx: Any, o: Any, ends: Any, transitions: Any, *fixed_and_run: Any) -> tuple:
        *fixed, ctx.run = fixed_and_run
        ctx.save_for_backward(transitions, *fixed)
        return fw.reshape(o, fw.shape(o)), fw.reshape(ends, fw.shape(ends))

    @staticmethod
    def backward(fw: ModuleType, ctx: Any, do: Any, d_ends: Any) -> tuple:
        transitions, *fixed = ctx.saved_tensors
        tokens, parameters = fixed[:5], dict(zip(PARAMETERS, fixed[5:], strict=True))
        cp: CPContext = ctx.run.cp
        own = _initial_gradients(ctx.run, tokens, parameters, do, d_ends)  # [parts, HV, K, V]
        gathered = _gather(fw, cp, fw.concat([own, transitions], -1))
        d_ends = with_rows(fw, d_ends, _returning(ctx.run, gathered, own))
        return (do, d_ends, None, *(None for _ in fixed), None)


def _initial_gradients(run: _Run, tokens: Sequence[Any], parameters: dict[str, Any], do: Any, d_ends: Any) -> Any:
    """c of this rank's parts, [parts, HV, K, V]: the gradient of the state that enters, from this part's results."""
    fw, cp, zero = run.fw, run.cp, run.zero_state(tokens)
    entering = [part for part in cp.parts if part.enters]
    c = fw.zeros((len(cp.parts), *fw.shape(zero)), like=zero)
    if not entering:
        return c
    ranges = [(part.pieces[0].start, part.pieces[0].stop) for part in entering]
    packed, cu_seqlens = run.stretches(tokens, ranges)
    results = _stretches(fw, do, ranges), fw.stack([d_ends[cp.entering_slots[p.index]] for p in entering], 0)
    starts = fw.zeros((len(entering), *fw.shape(zero)), like=zero)
    grads = fw.gradient(lambda states: run(packed, states, cu_seqlens, **parameters), starts, results)
    return with_rows(fw, c, {part.index: grads[i] for i, part in enumerate(entering)})


def _returning(run: _Run, gathered: Any, like: Any) -> dict[int, Any]:
    """{slot: the gradient of the state that leaves it [HV, K, V]}."""
    fw, cp = run.fw, run.cp
    V = fw.shape(like)[-1]
    grads = {}
    for part in cp.parts:
        if not part.leaves:
            continue
        chain = []  # the parts that the sequence has yet to pass, and where it ends, nearest first
        for later in cp.later(part):
            chain.append(fw.cast(gathered[cp.place(later)], "float64"))
            if not later.passes:
                break
        grad = chain.pop()[..., :V]
        for step in reversed(chain):
            grad = fw.matmul(fw.swap(step[..., V:]), grad) + step[..., :V]
        grads[cp.leaving_slots[part.index]] = fw.cast(grad, fw.dtype_name(like))
    return grads
