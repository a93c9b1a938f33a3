"""What the kernels use of Gluon, for Triton's interpreter, which does not know Gluon: layouts mean nothing on a CPU.

Only functions whose Gluon form has a layout or works on shared memory differ from `triton.language`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.language import constexpr, float16, float32, int32, int64  # noqa: F401

# The interpreter exchanges the attributes of `triton.language` while a kernel runs: look them up at each call.
_SAME = "program_id load store where exp2 abs maximum minimum sum join static_range".split()


def __getattr__(name: str) -> Any:
    if name in _SAME:
        return getattr(tl, name)
    raise AttributeError(name)


def _no_layout(*_: Any, **__: Any) -> None:
    return None


NVMMADistributedLayout = DotOperandLayout = DistributedLinearLayout = BlockedLayout = SliceLayout = _no_layout
SwizzledSharedLayout = _no_layout


def constexpr_function(fn: Any) -> Any:
    """Kernels make layouts with it."""
    return _no_layout


def thread_barrier() -> None:
    """One thread at a time runs here."""


def arange(start: int, end: int, layout: Any = None) -> Any:
    return tl.arange(start, end)


def full(shape: Any, value: Any, dtype: Any, layout: Any = None) -> Any:
    return tl.full(shape, value, dtype)


def zeros(shape: Any, dtype: Any, layout: Any = None) -> Any:
    return tl.zeros(shape, dtype)


def convert_layout(x: Any, layout: Any) -> Any:
    return x


def mma_v2(a: Any, b: Any, acc: Any, input_precision: str | None = None) -> Any:
    return tl.dot(a, b, acc, input_precision=input_precision)


class _Memory:
    """Shared memory: an array, and views of it."""

    def __init__(self, data: np.ndarray, dtype: Any) -> None:
        self.data, self.dtype = data, dtype
        self.shape = data.shape

    def store(self, x: Any) -> None:
        self.data[...] = x.handle.data

    def load(self, layout: Any = None) -> Any:
        from triton.runtime.interpreter import TensorHandle

        return tl.tensor(TensorHandle(self.data.copy(), self.dtype), tl.block_type(self.dtype, list(self.data.shape)))

    def slice(self, start: int, length: int, dim: int = 0) -> _Memory:
        at = [slice(None)] * self.data.ndim
        at[dim] = slice(int(start), int(start) + length)
        return _Memory(self.data[tuple(at)], self.dtype)

    def index(self, index: int) -> _Memory:
        return _Memory(self.data[int(index)], self.dtype)

    def permute(self, order: Any) -> _Memory:
        return _Memory(self.data.transpose(order), self.dtype)


def allocate_shared_memory(dtype: Any, shape: Any, layout: Any = None) -> _Memory:
    from triton.runtime.interpreter import _get_np_dtype

    size = [int(getattr(n, "value", n)) for n in shape]
    return _Memory(np.full(size, -1).astype(_get_np_dtype(dtype)), dtype)
