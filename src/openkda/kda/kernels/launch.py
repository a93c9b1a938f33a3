"""How kernels are launched: at once, or noted down in a plan and launched from there with little work of the host.

An ordinary launch of Triton finds out each time which compiled kernel its arguments want: types, alignment of pointers,
integers that are 1 or multiples of 16. In a plan (`frameworks/planned.py`) all of that is fixed; only addresses change,
and of those the alignment is fixed too. So the first run of a plan launches the ordinary way and keeps the compiled
kernel; later ones hand it new addresses. Whoever watches launches (hooks, instrumentation) gets ordinary ones, as does
a Triton that this was not written for.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import triton
from triton import knobs
from triton.runtime import driver

from openkda.frameworks.planned import Buffer, Dtype

# What `CompiledKernel.run` takes: read in 3.6 and 3.8, the same in both.
DIRECT = (3, 6) <= tuple(int(part) for part in triton.__version__.split(".")[:2]) <= (3, 8)


def launch(kernel: Any, programs: int, *args: Any, **options: Any) -> None:
    """Run `programs` programs of a kernel, now; on planned tensors, when the plan runs."""
    if programs <= 0:
        return
    planned = [x for x in map(_memory_of, args) if isinstance(x, Buffer)]
    if planned:
        planned[0].plan.note(Launch(kernel, programs, args, options, planned))
    else:
        kernel[(programs,)](*args, **options)


def _memory_of(x: Any) -> Any:
    return x.base if _is_descriptor(x) else x


def _is_descriptor(x: Any) -> bool:
    """Triton and Gluon have a class each."""
    return type(x).__name__ == "TensorDescriptor"


class Pointer:
    """An address with a dtype: what Triton asks of a tensor."""

    __slots__ = ("address", "dtype")

    def __init__(self, address: int, dtype: Dtype) -> None:
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self.address


class Launch:
    """One launch of a plan."""

    def __init__(self, kernel: Any, programs: int, args: tuple, options: dict[str, Any], buffers: list[Buffer]) -> None:
        self.kernel, self.programs, self.buffers = kernel, programs, buffers
        names = kernel.arg_names
        given = dict(zip(names, args, strict=False)) | options
        self.params = [given.pop(name) for name in names]
        self.options = given  # of the compiler
        self.pointers, self.tiles = [], []
        for i, x in enumerate(self.params):
            if isinstance(x, Buffer):
                self.pointers.append((i, x.memory.index, x.offset))
            elif _is_descriptor(x):
                self.tiles.append((i, x.base.memory.index, x.base.offset))
        self.compiled: Any = None

    def run(self, memories: list[Any], stream: Any) -> None:
        kernel = self.compiled
        if kernel is None or stream is None:
            self.compiled = self._launch(memories)
            return
        params = self.params.copy()
        for i, memory, offset in self.pointers:
            params[i] = memories[memory] + offset
        for i, memory, offset in self.tiles:
            params[i] = _moved(params[i], memories[memory] + offset)
        kernel.run(
            self.programs, 1, 1, stream, kernel.function, kernel.packed_metadata, None, None, None, *params
        )  # launch metadata and two hooks

    def _launch(self, memories: list[Any]) -> Any:
        """The ordinary way."""
        params = list(self.params)
        for i, memory, _ in self.pointers:
            params[i] = _tensor(memories[memory], params[i])
        for i, memory, _ in self.tiles:
            params[i] = dataclasses.replace(params[i], base=_tensor(memories[memory], params[i].base))
        return self.kernel[(self.programs,)](*params, **self.options)


def _tensor(memory: Any, buffer: Buffer) -> Any:
    return Pointer(memory + buffer.offset, buffer.dtype) if isinstance(memory, int) else memory.view(buffer)


def _moved(descriptor: Any, address: int) -> Any:
    """The same descriptor, checked before, at another address with the same alignment."""
    moved = object.__new__(type(descriptor))
    moved.__dict__.update(descriptor.__dict__)
    moved.base = Pointer(address, descriptor.base.dtype)
    return moved


def current_stream() -> Any:
    """The stream of direct launches, a number; None where launches must go the ordinary way."""
    if not DIRECT or knobs.runtime.interpret or _watched():
        return None
    active = driver.active
    return active.get_current_stream(active.get_current_device())


def _watched() -> bool:
    hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    if any(hook is not None and getattr(hook, "calls", True) for hook in hooks):
        return True
    return bool(knobs.compilation.instrumentation_mode or getattr(knobs.runtime, "add_stages_inspection_hook", None))
