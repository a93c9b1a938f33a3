"""How kernels are launched: at once, or noted down in a plan and launched from there with little work of the host.

An ordinary launch of Triton finds out each time which compiled kernel its arguments want: types, alignment of pointers,
integers that are 1 or multiples of 16. In a plan (`frameworks/planned.py`) all of that is fixed; only addresses change,
and of those the alignment is fixed too. So the first run of a plan launches the ordinary way and keeps the compiled
kernel; later ones hand it new addresses. Whoever watches launches (hooks, instrumentation) gets ordinary ones, as does
a Triton that this was not written for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from triton import knobs
from triton.runtime import driver

from openkda.frameworks.planned import Buffer
from openkda.kda.kernels.direct import KNOWN, Pointer, direct, is_descriptor


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
    return x.base if is_descriptor(x) else x


class Launch:
    """One launch of a plan."""

    def __init__(self, kernel: Any, programs: int, args: tuple, options: dict[str, Any], buffers: list[Buffer]) -> None:
        self.kernel, self.programs, self.buffers = kernel, programs, buffers
        names = kernel.arg_names
        given = dict(zip(names, args, strict=False)) | options
        self.params = [given.pop(name) for name in names]
        self.options = given  # of the compiler
        self.direct: Callable[[list[int], Any], None] | None = None

    def run(self, memories: list[Any], stream: Any) -> None:
        if self.direct is not None and stream is not None:
            self.direct(memories, stream)
            return
        compiled = self._launch(memories)
        if stream is not None and not self.kernel.pre_run_hooks:
            self.direct = direct(compiled, self.programs, self.params)

    def _launch(self, memories: list[Any]) -> Any:
        """The ordinary way."""
        params = []
        for x in self.params:
            if isinstance(x, Buffer):
                x = _tensor(memories, x)
            elif is_descriptor(x):
                x = dataclasses.replace(x, base=_tensor(memories, x.base))
            params.append(x)
        return self.kernel[(self.programs,)](*params, **self.options)


def _tensor(memories: list[Any], buffer: Buffer) -> Any:
    memory = memories[buffer.memory.index]
    return Pointer(memory + buffer.offset, buffer.dtype) if isinstance(memory, int) else memory.view(buffer)


def current_stream() -> Any:
    """The stream of direct launches, a number; None where launches must go the ordinary way."""
    if not KNOWN or knobs.runtime.interpret or _watched():
        return None
    active = driver.active
    return active.get_current_stream(active.get_current_device())


def _watched() -> bool:
    hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    if any(hook is not None and getattr(hook, "calls", True) for hook in hooks):
        return True
    return bool(knobs.compilation.instrumentation_mode or getattr(knobs.runtime, "add_stages_inspection_hook", None))
