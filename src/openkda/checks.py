"""Argument checks, and all their wording, shared by every operator, backend and tensor library.

A message reads `<op>: <argument> must <rule>, got <value>; <what to do>`. TypeError is for a wrong kind or dtype,
ValueError for a shape or a value. Checks read shapes, dtypes and devices only, so they never wait for a device; what
needs the values themselves runs when the environment variable OPENKDA_CHECK is 1.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any, NoReturn

from openkda import frameworks

FLOATING = ("float32", "float64", "float16", "bfloat16")


def values_wanted() -> bool:
    """True when checks may read tensor values (OPENKDA_CHECK=1); they then wait for the device."""
    return os.environ.get("OPENKDA_CHECK", "0") == "1"


class Passed:
    """Calls that passed their checks, by all that checks look at: a call like one of them need not be checked again."""

    LIMIT = 1024

    def __init__(self) -> None:
        self._keys: set[tuple] = set()

    def key(self, x: Any, *others: Any) -> tuple | None:
        """The key of a call, x a tensor; None for one that must be checked: values are wanted, a compiler traces it, or
        an argument is of no kind that checks accept.
        """
        if values_wanted() or not frameworks.is_tensor(x):
            return None
        key = frameworks.of(x).call_key((x, *others))
        if key is None:  # compilers trace no hash
            return None
        try:
            hash(key)
        except TypeError:
            return None
        return key

    def __contains__(self, key: tuple | None) -> bool:
        return key is not None and key in self._keys

    def add(self, key: tuple | None) -> None:
        if key is not None:
            if len(self._keys) >= self.LIMIT:
                self._keys.clear()
            self._keys.add(key)


def bad_value(op: str, name: str, rule: str, got: Any, hint: str = "") -> NoReturn:
    raise ValueError(f"{op}: {name} must {rule}, got {got}" + (f"; {hint}" if hint else ""))


def bad_type(op: str, name: str, rule: str, got: Any, hint: str = "") -> NoReturn:
    raise TypeError(f"{op}: {name} must {rule}, got {got}" + (f"; {hint}" if hint else ""))


def tensor(op: str, name: str, x: Any) -> None:
    if not frameworks.is_tensor(x):
        bad_type(op, name, "be a tensor", f"{type(x).__name__}")


def floating(op: str, name: str, x: Any) -> None:
    tensor(op, name, x)
    fw = frameworks.of(x)
    if not fw.is_floating(x):
        bad_type(op, name, "have a floating dtype", fw.dtype_name(x))
    if fw.dtype_name(x) not in FLOATING:  # the 8-bit ones
        bad_type(op, name, f"have dtype {' or '.join(FLOATING)}", fw.dtype_name(x), "cast it first")


def dtype(op: str, name: str, x: Any, allowed: Sequence[str], hint: str = "") -> None:
    tensor(op, name, x)
    got = frameworks.of(x).dtype_name(x)
    if got not in allowed:
        bad_type(op, name, f"have dtype {' or '.join(allowed)}", got, hint)


def rank(op: str, name: str, x: Any, axes: str) -> None:
    """axes names them, as in "[B, T, H, K]"."""
    size = tuple(x.shape)
    if len(size) != axes.count(",") + 1:
        bad_value(op, name, f"have shape {axes}", list(size))


def shape(op: str, name: str, x: Any, want: Sequence[int], axes: str, hint: str = "") -> None:
    size = tuple(x.shape)
    if size != tuple(want):
        bad_value(op, name, f"have shape {axes} = {list(want)}", list(size), hint)


def same_device(op: str, first: str, x: Any, **others: Any) -> None:
    """Every tensor of others (None is skipped) belongs to x's library and device."""
    fw = frameworks.of(x)
    want = fw.device(x)
    for name, y in others.items():
        if y is None:
            continue
        tensor(op, name, y)
        if frameworks.of(y) is not fw:
            bad_type(op, name, f"be a {fw.NAME} tensor like {first}", f"a {frameworks.of(y).NAME} tensor")
        if fw.device(y) != want:
            bad_value(op, name, f"be on {first}'s device {fw.device_name(x)}", fw.device_name(y), "move it there first")


def choice(op: str, name: str, value: Any, allowed: Sequence[Any]) -> None:
    if value not in allowed:
        bad_value(op, name, f"be one of {', '.join(map(repr, allowed))}", repr(value))


def positive(op: str, name: str, value: Any) -> None:
    """A finite number above 0; a tensor is refused, as reading it would wait for the device."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        bad_type(op, name, "be a number", type(value).__name__)
    if not 0 < value < float("inf"):
        bad_value(op, name, "be finite and above 0", value)


def lower_bound(op: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        bad_type(op, "lower_bound", "be a number or None", type(value).__name__)
    if not -float("inf") < value < 0:
        bad_value(
            op,
            "lower_bound",
            "be finite and below 0",
            value,
            "it is the smallest log-decay per token in nats; None selects the softplus gate",
        )


def inference_only(op: str, instead: str, like: Any, /, **tensors: Any) -> None:
    """None of the tensors (None is skipped; all of like's library) needs a gradient; `instead` is the operator that has
    one.
    """
    fw = frameworks.of(like)
    if not fw.needs_grad(*tensors.values()):
        return
    for name, tensor in tensors.items():
        if tensor is not None and fw.needs_grad(tensor):
            hint = f"this operator is inference only; train with {instead}"
            bad_value(op, name, "not need a gradient", "requires_grad=True", hint)


def state_indices(op: str, indices: Any, *, sequences: int, slots: int) -> None:
    """The slot of every sequence in a pool, [N]; negative for padding. Values are checked on request."""
    dtype(op, "state_indices", indices, ("int32", "int64"))
    shape(op, "state_indices", indices, (sequences,), "[N]", "one slot per sequence; negative for padding")
    if values_wanted():
        used = [i for i in frameworks.of(indices).to_list(indices) if i >= 0]
        if used and max(used) >= slots:
            bad_value(op, "state_indices", f"be below the pool's {slots} slots", max(used))
        if len(set(used)) != len(used):
            bad_value(op, "state_indices", "name every slot at most once", used)


def cu_seqlens(op: str, cu: Any, *, batch: int, tokens: int) -> int:
    """Check packed offsets [N+1] against an input [batch, tokens, ..]; returns N."""
    dtype(op, "cu_seqlens", cu, ("int32", "int64"))
    rank(op, "cu_seqlens", cu, "[N+1]")
    n = int(cu.shape[0]) - 1
    if n < 1:
        bad_value(op, "cu_seqlens", "hold at least 2 offsets [N+1]", n + 1)
    if batch != 1:
        bad_value(op, "batch size", "be 1 with cu_seqlens", batch, "fold the batch into the token axis: [1, B*T, ..]")
    if values_wanted():
        offset_values(op, frameworks.of(cu).to_list(cu), tokens)
    return n


def offset_values(op: str, offsets: Sequence[int], tokens: int) -> None:
    """The packed contract of offsets that are on the host."""
    if offsets[0] != 0:
        bad_value(op, "cu_seqlens", "start at 0", offsets[0])
    for n, (a, b) in enumerate(itertools.pairwise(offsets)):
        if b < a:
            bad_value(op, "cu_seqlens", "never decrease", f"{a} then {b} at index {n + 1}")
    if offsets[-1] > tokens:
        bad_value(op, "cu_seqlens", f"end at or below T = {tokens}", offsets[-1])
