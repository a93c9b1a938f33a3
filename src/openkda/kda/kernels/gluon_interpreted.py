"""What the kernels use of Gluon, for Triton's interpreter, which does not know Gluon: layouts mean nothing on a CPU.

Only functions whose Gluon form has a layout or works on shared memory differ from `triton.language`. Copies by TMA are
done when they are asked for; partitions of warps are threads, which wait for each other at mbarriers as on a GPU.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language import bfloat16, constexpr, float16, float32, int32, int64  # noqa: F401

# The interpreter exchanges the attributes of `triton.language` while a kernel runs: look them up at each call.
_SAME = "program_id num_programs load store where exp2 abs maximum minimum sum join static_range expand_dims rsqrt cast"


def __getattr__(name: str) -> Any:
    if name in _SAME.split():
        return getattr(tl, name)
    raise AttributeError(name)


def _no_layout(*_: Any, **__: Any) -> None:
    return None


NVMMADistributedLayout = DotOperandLayout = DistributedLinearLayout = BlockedLayout = SliceLayout = _no_layout
SwizzledSharedLayout = _no_layout


class NVMMASharedLayout:
    get_default_for = staticmethod(_no_layout)


def constexpr_function(fn: Any) -> Any:
    """Kernels make layouts with it."""
    return _no_layout


def arange(start: int, end: int, layout: Any = None) -> Any:
    return tl.arange(start, end)


def full(shape: Any, value: Any, dtype: Any, layout: Any = None) -> Any:
    return tl.full(shape, value, dtype)


def zeros(shape: Any, dtype: Any, layout: Any = None) -> Any:
    return tl.zeros(shape, dtype)


def zeros_like(x: Any) -> Any:
    return tl.zeros(x.shape, x.dtype)


def inline_asm_elementwise(asm: str, constraints: str, args: Any, dtype: Any, is_pure: bool, pack: int) -> Any:
    """The two instructions that kernels use: products, and conversions."""
    if asm.startswith("mul.rn"):
        return args[0] * args[1]
    if asm.startswith("cvt.rn"):
        return args[0].to(dtype)
    raise NotImplementedError(f"gluon_interpreted: an instruction must be mul.rn or cvt.rn, got {asm.split()[0]}")


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
        at[dim] = slice(_int(start), _int(start) + _int(length))
        return _Memory(self.data[tuple(at)], self.dtype)

    def index(self, index: int) -> _Memory:
        return _Memory(self.data[_int(index)], self.dtype)

    def permute(self, order: Any) -> _Memory:
        return _Memory(self.data.transpose(order), self.dtype)

    def reshape(self, shape: Any) -> _Memory:
        return _Memory(self.data.reshape(_sizes(shape)), self.dtype)

    def _reinterpret(self, dtype: Any, shape: Any, layout: Any) -> _Memory:
        from triton.runtime.interpreter import _get_np_dtype

        return _Memory(self.data.view(_get_np_dtype(dtype)).reshape(_sizes(shape)), dtype)


def _int(n: Any) -> int:
    """Of an int, a tensor of one, or either of them as a constexpr."""
    return int(n.value if isinstance(n, constexpr) else n)


def _sizes(shape: Any) -> list[int]:
    return [_int(n) for n in shape]


def allocate_shared_memory(dtype: Any, shape: Any, layout: Any = None) -> _Memory:
    from triton.runtime.interpreter import _get_np_dtype

    return _Memory(np.full(_sizes(shape), -1).astype(_get_np_dtype(dtype)), dtype)


# ---- Hopper
def fence_async_shared() -> None:
    """Copies are no threads of their own here."""


def warpgroup_mma(a: Any, b: Any, acc: Any, use_acc: bool = True, is_async: bool = False) -> Any:
    a = a.load() if isinstance(a, _Memory) else a
    return tl.dot(a, b.load(), acc if _int(use_acc) else None)


def warpgroup_mma_wait(num_outstanding: int, deps: Any) -> Any:
    return deps[0] if len(deps) == 1 else tuple(deps)


class _Barrier:
    """An mbarrier: a phase ends when all arrivals and all bytes that were expected have come."""

    changed = threading.Condition()
    failed = False
    all: dict[int, _Barrier] = {}  # noqa: RUF012  # by place in shared memory

    def __init__(self, count: int) -> None:
        self.count = self.left = count
        self.bytes, self.phase = 0, 0

    @classmethod
    def at(cls, memory: _Memory) -> _Barrier:
        return cls.all[memory.data.ctypes.data]

    def come(self, arrivals: int, size: int) -> None:
        with self.changed:
            self.bytes += size
            self.left -= arrivals
            if self.left == 0 and self.bytes == 0:
                self.left, self.phase = self.count, self.phase + 1
                self.changed.notify_all()


class mbarrier:
    MBarrierLayout = staticmethod(_no_layout)

    @staticmethod
    def init(bar: _Memory, count: int) -> None:
        _Barrier.all[bar.data.ctypes.data] = _Barrier(count)

    @staticmethod
    def expect(bar: _Memory, size: int) -> None:
        _Barrier.at(bar).come(1, _int(size))

    @staticmethod
    def arrive(bar: _Memory, count: int = 1) -> None:
        _Barrier.at(bar).come(count, 0)

    @staticmethod
    def wait(bar: _Memory, phase: Any) -> None:
        parity, state = _int(phase), _Barrier.at(bar)
        with _Barrier.changed:
            done = _Barrier.changed.wait_for(lambda: state.phase & 1 != parity or _Barrier.failed, timeout=120)
        if not done or _Barrier.failed:
            raise RuntimeError("mbarrier.wait: a phase must end, got none in 120 s, or an error in another partition")


class tma:
    """Tiles of matrices; what lies behind the last row reads as 0 and is not written. Tensors: torch."""

    @staticmethod
    def _rows(desc: Any, at: Any) -> Any:
        height, (rows, cols), (row, col) = desc.shape[0], desc.block_shape, (_int(i) for i in at)
        x = torch.as_strided(desc.base, desc.shape, desc.strides)
        return x[row : min(row + rows, height), col : col + cols].view(torch.int16)

    @staticmethod
    def async_copy_global_to_shared(desc: Any, at: Any, bar: _Memory, memory: _Memory) -> None:
        rows = tma._rows(desc, at)
        memory.data[...] = 0
        memory.data[: rows.shape[0]] = rows.numpy().view(np.uint16)
        _Barrier.at(bar).come(0, -memory.data.nbytes)

    @staticmethod
    def async_copy_shared_to_global(desc: Any, at: Any, memory: _Memory) -> None:
        rows = tma._rows(desc, at)
        rows.copy_(torch.from_numpy(memory.data[: rows.shape[0]].view(np.int16).copy()))

    @staticmethod
    def store_wait(pendings: int) -> None:
        """Stores are done when they are asked for."""


def warp_specialize(partitions: Any, worker_num_warps: Any, worker_num_regs: Any) -> None:
    """Partitions side by side, as threads."""
    errors: list[BaseException] = []
    _Barrier.failed = False

    def run(fn: Any, args: Any) -> None:
        try:
            fn(*args)
        except BaseException as error:  # raised again below
            errors.append(error)
            with _Barrier.changed:
                _Barrier.failed = True
                _Barrier.changed.notify_all()

    threads = [threading.Thread(target=run, args=partition) for partition in partitions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
