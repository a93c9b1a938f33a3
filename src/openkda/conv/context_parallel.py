"""`causal_conv1d` over a row that is spread over ranks: the W-1 inputs before a cut come from the ranks before it.

Every rank sends the last W-1 inputs of each of its parts. A part may be shorter than that, and a sequence may have
begun less than W-1 tokens ago, so what enters is put together from as many parts as it takes, and the initial state.
Backward, the gradients of what entered go back the same way. One all_gather a direction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from openkda import frameworks
from openkda.parallel.context import CPContext
from openkda.parallel.layout import Part
from openkda.parallel.states import final_states, slot_starts, with_rows


def causal_conv1d(
    operator: Callable[..., tuple[Any, Any]],
    cp: CPContext,
    x: Any,  # [1, T, C]
    weight: Any,  # [C, W]
    bias: Any | None,
    *,
    activation: str | None,
    initial_state: Any | None,  # [N, C, W-1]
    output_final_state: bool,
) -> tuple[Any, Any | None]:
    """`openkda.causal_conv1d` with cp_context, arguments unchecked; see there and `build_cp_context`."""
    fw = frameworks.of(x)
    C, width = fw.shape(x)[2], fw.shape(weight)[1] - 1
    starts = slot_starts(fw, cp, initial_state, fw.zeros((C, width), like=x), {})
    if width:
        starts = fw.custom(Halo, x, starts, cp)
    y, ends = operator(
        x,
        weight,
        bias,
        activation=activation,
        initial_state=starts,
        output_final_state=output_final_state,
        cu_seqlens=cp.local_offsets(like=x),
    )
    if not output_final_state:
        return y, None
    if not width:  # nothing to keep, and nothing to send
        return y, fw.zeros((cp.num_sequences, C, 0), like=x) if initial_state is None else initial_state * 1.0
    return y, final_states(fw, cp, ends, initial_state)


class Halo:
    """Fill the states of slots that continue a sequence: x [1, T, C], starts [slots, C, W-1] -> starts.

    The initial state of such a sequence still counts where it began fewer than W-1 tokens before: its last columns
    then come first.
    """

    @staticmethod
    def forward(fw: ModuleType, ctx: Any, x: Any, starts: Any, cp: CPContext) -> Any:
        width = fw.shape(starts)[2]
        ctx.cp, ctx.size = cp, fw.shape(x)
        tails = _all_parts(fw, cp, fw.stack([_tail(fw, x, part, width) for part in cp.parts], 0))
        rows = {}
        for part in cp.parts:
            if part.enters:
                slot = cp.entering_slots[part.index]
                blocks = [_last(tails[cp.place(p)], skip=0, count=n) for p, _, n in _sources(cp, part, width)][::-1]
                old = starts[slot][:, part.pieces[0].before :]  # [C, 0 or more]
                rows[slot] = fw.concat([old, fw.swap(fw.concat(blocks, 0))], 1)
        return with_rows(fw, starts, rows) if rows else fw.copy(starts)  # a result is no input of its own

    @staticmethod
    def backward(fw: ModuleType, ctx: Any, grad: Any) -> tuple:
        cp, width, grad = ctx.cp, fw.shape(grad)[2], fw.contiguous(grad)
        none = fw.zeros(fw.shape(grad)[1:], like=grad)
        slots = cp.entering_slots
        entered = fw.stack([grad[slots[p.index]] if p.enters else none for p in cp.parts], 0)  # [parts, C, W-1]
        everywhere = _all_parts(fw, cp, entered)
        blocks = []
        for part in cp.parts:
            tail = fw.zeros((min(width, part.length), ctx.size[2]), like=grad)  # of the last inputs of the part
            for later, skip, n in _users(cp, part, width):
                own = _last(fw.swap(everywhere[cp.place(later)]), skip=skip, count=n)
                tail = tail + fw.pad(own, 0, fw.shape(tail)[0] - n, 0)
            blocks += [fw.zeros((part.length - fw.shape(tail)[0], ctx.size[2]), like=grad), tail]
        # What is left of an initial state: `before` columns further back than where it stands now.
        rows = {}
        for part in cp.parts:
            if part.enters:
                slot, before = slots[part.index], min(part.pieces[0].before, width)
                rows[slot] = fw.pad(grad[slot][:, : width - before], 1, before, 0)
        return fw.concat(blocks, 0)[None], with_rows(fw, grad, rows), None


def _all_parts(fw: ModuleType, cp: CPContext, x: Any) -> Any:
    """[parts, ..] of this rank -> [ranks * parts, ..], see `CPContext.place`."""
    return fw.reshape(fw.all_gather(x, cp.group), (cp.size * len(cp.parts), *fw.shape(x)[1:]))


def _tail(fw: ModuleType, x: Any, part: Part, width: int) -> Any:
    """The last inputs of a part [W-1, C]; zeros in front where it has fewer."""
    count = min(width, part.length)
    stop = part.start + part.length
    return fw.pad(x[0, stop - count : stop], 0, width - count, 0)


def _last(x: Any, *, skip: int, count: int) -> Any:
    """`count` rows of x, `skip` rows before its end."""
    stop = x.shape[0] - skip
    return x[stop - count : stop]


def _sources(cp: CPContext, part: Part, width: int) -> Iterator[tuple[Part, int, int]]:
    """(earlier part, tokens between the two, how many of its last inputs enter `part`), nearest first."""
    wanted = min(part.pieces[0].before, width)
    for earlier in cp.earlier(part):
        between = (part.position - earlier.position - 1) * part.length
        if between >= wanted or not part.length:
            return
        yield earlier, between, min(wanted - between, part.length)


def _users(cp: CPContext, part: Part, width: int) -> Iterator[tuple[Part, int, int]]:
    """(later part, tokens between the two, how many of the last inputs of `part` enter it), nearest first."""
    for later in cp.later(part):
        between = (later.position - part.position - 1) * part.length
        if between >= width or not part.length:
            return
        if later.enters:
            yield from ((later, skip, n) for p, skip, n in _sources(cp, later, width) if p is part)
