"""The planning namespace: tensors that do not exist yet.

The host code of an operator runs once for every call signature on such tensors. Launches are noted down instead of made
(`Planner.note`), and what comes out is a `Plan`: the launches in order and a place for every workspace. A call is then
one run of its plan: an allocation per result, one for all workspaces, and the launches.

    input        memory of the caller; only its shape, strides, dtype and alignment are known
    result       memory that the caller gets. Nobody reads it before the plan writes it, so until then it lends itself
    workspace    used from its first launch to its last; those that never meet in time share bytes

Lifetimes are those of byte ranges, not of whole tensors: where half a workspace is done with, half of it is free.
Offsets are found by greedy placement, the largest first. Launches beside others (a second stream) count as running
until they are joined.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, NamedTuple, Protocol

ALIGNMENT = 512  # bytes, of every workspace within its memory: more than any load or TMA descriptor asks for
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "uint8": 1}


class Signature(NamedTuple):
    """What a plan may depend on, of one tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    dtype: str
    misaligned: int  # address modulo 16


class Use(NamedTuple):
    """Bytes low .. high - 1 are in use from step `first` to step `last`."""

    low: int
    high: int
    first: float
    last: float

    def meets(self, other: Use, distance: int) -> bool:
        """Whether they share bytes at some time, if this one starts `distance` bytes later than it says."""
        if self.first > other.last or other.first > self.last:
            return False
        return self.low + distance < other.high and other.low < self.high + distance


class Memory:
    """Of one input, result or workspace. uses: what the steps mention."""

    def __init__(self, index: int, nbytes: int) -> None:
        self.index, self.nbytes = index, nbytes
        self.uses: list[Use] = []

    def pieces(self) -> list[Use]:
        """Uses of byte ranges that do not overlap."""
        cuts = sorted({edge for use in self.uses for edge in use[:2]})
        found = []
        for low, high in itertools.pairwise(cuts):
            over = [use for use in self.uses if use.low < high and low < use.high]
            if over:
                found.append(Use(low, high, min(u.first for u in over), max(u.last for u in over)))
        return found


class Dtype(str):
    """A dtype's name with the one attribute that Triton asks a dtype for."""

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self]


class Buffer:
    """A tensor, or a part of one, in a memory: shape, strides (in elements), dtype, offset (in bytes)."""

    __slots__ = ("dtype", "memory", "offset", "plan", "shape", "strides")

    def __init__(self, plan: Planner, memory: Memory, offset: int, shape: tuple, strides: tuple, dtype: str) -> None:
        self.plan, self.memory, self.offset = plan, memory, offset
        self.shape, self.strides, self.dtype = shape, strides, Dtype(dtype)

    def __getitem__(self, index: Any) -> Buffer:
        """Slices (of step 1) and integers on the first axes."""
        offset, shape, strides = self.offset, [], []
        indices = index if isinstance(index, tuple) else (index,)
        for n, (size, stride) in enumerate(zip(self.shape, self.strides, strict=True)):
            at = indices[n] if n < len(indices) else slice(None)
            start, stop, _ = at.indices(size) if isinstance(at, slice) else (at, at, 1)
            offset += start * stride * self.dtype.itemsize
            if isinstance(at, slice):
                shape.append(max(stop - start, 0))
                strides.append(stride)
        return Buffer(self.plan, self.memory, offset, tuple(shape), tuple(strides), self.dtype)

    @property
    def extent(self) -> int:
        """Bytes from the first element to the last."""
        if 0 in self.shape:
            return 0
        reach = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return (reach + 1) * self.dtype.itemsize

    def data_ptr(self) -> int:
        """An address modulo ALIGNMENT: all that is known of one."""
        return self.offset % ALIGNMENT

    @property
    def base(self) -> Buffer:
        return self


class Step(Protocol):
    """Something to do on a stream; buffers are all that it reads or writes."""

    buffers: Sequence[Buffer]

    def run(self, memories: list[Any], stream: Any) -> None: ...


class Group:
    """Steps that run beside those after it, till they are joined."""

    def __init__(self) -> None:
        self.steps: list[Step] = []


class Join(NamedTuple):
    group: Group


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


class Planner:
    """The namespace that host code sees, and the plan in the making. What is not here cannot be planned."""

    NAME = "planned"

    def __init__(self, capability: int | None) -> None:
        self.capability = capability
        self.memories: list[Memory] = []  # all of them
        self.inputs: list[Memory] = []
        self.results: list[tuple[Memory, tuple[int, ...], str]] = []
        self.workspaces: list[Memory] = []
        self.steps: list[Any] = []
        self._group: Group | None = None
        self._running: dict[Group, list[tuple[Memory, Use]]] = {}

    # ---- what a tensor is
    def dtype_name(self, x: Buffer) -> str:
        return x.dtype

    def shape(self, x: Buffer) -> tuple[int, ...]:
        return x.shape

    def strides(self, x: Buffer) -> tuple[int, ...]:
        return x.strides

    def compute_capability(self, x: Buffer) -> int | None:
        return self.capability

    def address(self, x: Buffer) -> int:
        """Modulo ALIGNMENT, which is all that is known of it."""
        return x.data_ptr()

    def on_device(self, x: Buffer) -> AbstractContextManager[None]:
        return nullcontext()

    def descriptor_base(self, x: Buffer) -> Buffer:
        return x

    # ---- make
    def input(self, signature: Signature | None) -> Buffer | None:
        """The next input; None for an argument that is None."""
        self.inputs.append(memory := self._memory(0))
        if signature is None:
            return None
        shape, strides, dtype, misaligned = signature
        return Buffer(self, memory, misaligned, tuple(shape), tuple(strides), dtype)

    def result(self, size: Sequence[int], dtype: str) -> Buffer:
        """The next result, contiguous."""
        memory = self._memory(math.prod(size) * ITEMSIZE[dtype])
        self.results.append((memory, tuple(size), dtype))
        return Buffer(self, memory, 0, tuple(size), contiguous_strides(size), dtype)

    def empty(self, size: Sequence[int], *, like: Buffer, dtype: str | None = None) -> Buffer:
        """A workspace, contiguous."""
        dtype = dtype or like.dtype
        memory = self._memory(math.prod(size) * ITEMSIZE[dtype])
        self.workspaces.append(memory)
        return Buffer(self, memory, 0, tuple(size), contiguous_strides(size), dtype)

    def within(self, x: Buffer, offset: int, size: Sequence[int], dtype: str) -> Buffer:
        """A contiguous tensor in the memory of x, `offset` bytes behind its start."""
        return Buffer(self, x.memory, x.offset + offset, tuple(size), contiguous_strides(size), dtype)

    def _memory(self, nbytes: int) -> Memory:
        self.memories.append(Memory(len(self.memories), nbytes))
        return self.memories[-1]

    # ---- steps
    def note(self, step: Step) -> None:
        """The next thing to do."""
        at = len(self.steps)
        uses = [(b.memory, Use(b.offset, b.offset + b.extent, at, at)) for b in step.buffers if b.extent]
        if self._group is None:
            self.steps.append(step)
            self._use(uses)
        else:
            self._group.steps.append(step)
            self._running[self._group] += uses

    def _use(self, uses: list[tuple[Memory, Use]]) -> None:
        for memory, use in uses:
            memory.uses.append(use)

    def in_order(self) -> _Beside:
        return _Beside(self, beside=False)

    def beside(self, x: Buffer) -> _Beside:
        return _Beside(self, beside=True)

    # ---- the end
    def finish(self) -> Plan:
        """The plan. Nothing may be noted after it."""
        for running in self._running.values():  # never joined
            self._use([(memory, use._replace(last=math.inf)) for memory, use in running])
        return Plan(self)


class _Beside:
    """The shape of `frameworks.torch.beside` and `in_order`, for a plan."""

    def __init__(self, plan: Planner, beside: bool) -> None:
        self.plan, self.beside = plan, beside

    def launch(self, run: Callable[[], None]) -> Group | None:
        if not self.beside:
            return run()
        group = self.plan._group = Group()
        self.plan._running[group] = []
        try:
            run()
        finally:
            self.plan._group = None
        self.plan.steps.append(group)
        return group

    def join(self, group: Group | None) -> None:
        if group is not None and group in self.plan._running:
            running, at = self.plan._running.pop(group), len(self.plan.steps)
            self.plan._use([(memory, use._replace(last=at)) for memory, use in running])
            self.plan.steps.append(Join(group))


# ---- places
class _Pool:
    """A memory in which workspaces are placed: one of a result, or what is allocated for the rest (size None)."""

    def __init__(self, base: int, size: int | None, taken: list[Use]) -> None:
        self.base, self.size, self.taken = base, size, taken

    def place(self, nbytes: int, pieces: list[Use]) -> int | None:
        """The first offset at which these bytes fit, which are then taken; None where there is none."""
        if self.size is not None and nbytes > self.size:
            return None
        others = [use for use in self.taken if any(use.first <= p.last and p.first <= use.last for p in pieces)]
        for offset in sorted({0, *(-(-use.high // ALIGNMENT) * ALIGNMENT for use in others)}):
            if self.size is not None and offset + nbytes > self.size:
                break
            if not any(piece.meets(other, offset) for piece in pieces for other in others):
                self.taken += [Use(p.low + offset, p.high + offset, p.first, p.last) for p in pieces]
                return offset
        return None


def _place(planner: Planner) -> tuple[dict[Memory, tuple[int, int]], int]:
    """{memory: (base, offset)} of every workspace, and the bytes to allocate for those that fit into no result.

    Bases count inputs and results, then comes the allocation. Of equal sizes those that are used last are placed first:
    results are written late and have room for them.
    """
    number = len(planner.inputs)
    pools = []
    for base, (memory, _, _) in enumerate(planner.results, number):
        pools.append(_Pool(base, memory.nbytes, [piece._replace(last=math.inf) for piece in memory.pieces()]))
    rest = _Pool(number + len(planner.results), None, [])
    pieces = {memory: memory.pieces() for memory in planner.workspaces}
    latest = {memory: max((piece.last for piece in found), default=0) for memory, found in pieces.items()}
    places = {}
    for memory in sorted(planner.workspaces, key=lambda m: (-m.nbytes, -latest[m])):
        for pool in (*pools, rest):
            offset = pool.place(memory.nbytes, pieces[memory])
            if offset is not None:
                places[memory] = (pool.base, offset)
                break
    return places, max((use.high for use in rest.taken), default=0)


class Bytes(NamedTuple):
    """Memory of a CPU tensor, from an offset on."""

    fw: ModuleType
    tensor: Any
    offset: int

    def view(self, buffer: Buffer) -> Any:
        offset = self.offset + buffer.offset
        return self.fw.view_bytes(self.tensor, offset, buffer.shape, buffer.strides, buffer.dtype)


class Plan:
    """Launches and places; made once, run often, by any thread."""

    def __init__(self, planner: Planner) -> None:
        workspaces, self.nbytes = _place(planner)
        places: dict[Memory, tuple[int, int]] = dict(workspaces)
        places |= {memory: (base, 0) for base, memory in enumerate(planner.inputs)}
        places |= {memory: (base, 0) for base, (memory, _, _) in enumerate(planner.results, len(planner.inputs))}
        self.places = [places[memory] for memory in planner.memories]
        self.results = [(size, contiguous_strides(size), dtype) for _, size, dtype in planner.results]
        self.steps = planner.steps

    def run(self, fw: ModuleType, inputs: Sequence[Any], stream: Callable[[], Any]) -> tuple:
        """The results for tensors of the signatures that the plan was made for; inputs[0] exists.

        stream: says on which stream launches go; asked once, and once for every group of launches beside others.
        """
        like = inputs[0]
        with fw.on_device(like):
            results = [fw.allocate(size, strides, dtype, like=like) for size, strides, dtype in self.results]
            tensors = [*inputs, *results]
            if self.nbytes:
                tensors.append(fw.allocate((self.nbytes,), (1,), "uint8", like=like))
            self._run(fw, like, self._memories(fw, like, tensors), stream)
        return tuple(results)

    def _memories(self, fw: ModuleType, like: Any, tensors: list[Any]) -> list[Any]:
        """Where every memory begins: an address, or on a CPU `Bytes`. That of an input is rounded down to 16 bytes."""
        if not fw.on_gpu(like):
            starts = [0 if t is None else -(fw.address(t) % 16) for t in tensors]
            return [Bytes(fw, tensors[base], starts[base] + offset) for base, offset in self.places]
        addresses = [0 if t is None else fw.address(t) & -16 for t in tensors]
        return [addresses[base] + offset for base, offset in self.places]

    def _run(self, fw: ModuleType, like: Any, memories: list[Any], stream: Callable[[], Any]) -> None:
        current, events, side = stream(), {}, None
        for step in self.steps:
            if isinstance(step, Group):
                side = side or fw.beside(like)
                events[step] = side.launch(functools.partial(_run_all, step.steps, memories, stream))
            elif isinstance(step, Join):
                side.join(events[step.group])  # type: ignore[union-attr]
            else:
                step.run(memories, current)


def _run_all(steps: list[Step], memories: list[Any], stream: Callable[[], Any]) -> None:
    current = stream()
    for step in steps:
        step.run(memories, current)
