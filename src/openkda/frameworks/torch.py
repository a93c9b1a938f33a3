"""The torch namespace: what operators ask of a tensor library, one or two lines each.

Names and argument order follow the Python array API where it has them (`axis`, `concat`, `take`), so that a second
library is a second file of the same shape. Functions return new tensors; only those whose name ends in _ write to an
input. dtypes travel as strings ("float32").
"""

from __future__ import annotations

import builtins
import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor

NAME = "torch"
_SELF = sys.modules[__name__]
_DTYPES = {
    name: getattr(torch, name)
    for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


# ---- what a tensor is
def dtype_name(x: Tensor) -> str:
    return _NAMES.get(x.dtype, str(x.dtype).removeprefix("torch."))


def shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def strides(x: Tensor) -> tuple[int, ...]:
    """In elements."""
    return x.stride()


def signature(x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], str, int]:
    """Shape, strides in elements, dtype, and address modulo 16: what a plan for x depends on."""
    return x.shape, x.stride(), _NAMES[x.dtype], x.data_ptr() & 15


def device_index(x: Tensor) -> int:
    """-1 on a CPU."""
    return x.get_device()


def call_key(values: Sequence[Any]) -> tuple | None:
    """All that checks may look at: of a tensor its shape, dtype and device, of anything else its type and value.

    None while a compiler traces, which checks once anyway.
    """
    if torch.compiler.is_compiling():
        return None
    return tuple([(v.shape, v.dtype, v.device) if isinstance(v, Tensor) else (type(v), v) for v in values])


def address(x: Tensor) -> int:
    return x.data_ptr()


def view_bytes(x: Tensor, offset: int, size: Sequence[int], stride: Sequence[int], dtype: str) -> Tensor:
    """A tensor in x's memory, `offset` bytes behind x's start."""
    made = torch.empty(0, dtype=_DTYPES[dtype], device=x.device)
    start = (x.storage_offset() * x.element_size() + offset) // made.element_size()
    return made.set_(x.untyped_storage(), start, tuple(size), tuple(stride))  # type: ignore[call-overload]


def device(x: Tensor) -> Any:
    return x.device


def device_name(x: Tensor) -> str:
    return str(x.device)


def on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def compute_capability(x: Tensor) -> int | None:
    """90 for compute capability 9.0; None where x is on no CUDA device."""
    if not x.is_cuda:
        return None
    if (index := x.device.index) not in _CAPABILITIES:
        major, minor = torch.cuda.get_device_capability(index)
        _CAPABILITIES[index] = 10 * major + minor
    return _CAPABILITIES[index]


_CAPABILITIES: dict[int, int] = {}  # of every device asked so far; compilers trace a dictionary, but not a cache


def on_device(x: Tensor) -> AbstractContextManager[None]:
    """Make x's device the current one, which is where kernels are launched; nothing to do on a CPU."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device_of(x)


def descriptor_base(x: Tensor) -> Any:
    """x as the memory of a Triton tensor descriptor."""
    return x


def is_floating(x: Tensor) -> bool:
    return x.is_floating_point()


def needs_grad(*xs: Tensor | None) -> bool:
    """True if autograd would record an operation on any of xs."""
    return torch.is_grad_enabled() and builtins.any(x is not None and x.requires_grad for x in xs)


def no_grad() -> AbstractContextManager[None]:
    return torch.no_grad()


def detach(x: Tensor) -> Tensor:
    return x.detach()


def to_list(x: Tensor) -> list:
    """Values on the host. On an accelerator this waits for the device: only the reference and OPENKDA_CHECK=1 may call
    it.
    """
    return x.tolist()


def any_above(x: Tensor, ceiling: float) -> Tensor:
    """0-d bool: some value exceeds the ceiling."""
    return (x > ceiling).any()


def version_of(x: Tensor) -> int:
    """A number that grows with every edit in place; -1 where the library does not count (inference mode)."""
    return -1 if x.is_inference() else x._version


# ---- make
def zeros(size: Sequence[int], *, like: Tensor, dtype: str | None = None) -> Tensor:
    return torch.zeros(size, dtype=_DTYPES[dtype] if dtype else like.dtype, device=like.device)


def ones(size: Sequence[int], *, like: Tensor, dtype: str | None = None) -> Tensor:
    return torch.ones(size, dtype=_DTYPES[dtype] if dtype else like.dtype, device=like.device)


def empty(size: Sequence[int], *, like: Tensor, dtype: str | None = None) -> Tensor:
    return torch.empty(size, dtype=_DTYPES[dtype] if dtype else like.dtype, device=like.device)


def allocate(size: tuple[int, ...], strides: tuple[int, ...], dtype: str, *, like: Tensor) -> Tensor:
    """An unwritten tensor on like's device, which is the current one."""
    return torch.empty_strided(size, strides, dtype=_DTYPES[dtype], device=like.device)


def arange(n: int, *, like: Tensor, dtype: str = "int64") -> Tensor:
    return torch.arange(n, dtype=_DTYPES[dtype], device=like.device)


def eye(n: int, *, like: Tensor) -> Tensor:
    return torch.eye(n, dtype=like.dtype, device=like.device)


def from_list(values: Sequence[Any], *, like: Tensor, dtype: str = "int64") -> Tensor:
    return torch.tensor(values, dtype=_DTYPES[dtype], device=like.device)


def cast(x: Tensor, dtype: str) -> Tensor:
    return x.to(_DTYPES[dtype])


# ---- shape
def reshape(x: Tensor, size: Sequence[int]) -> Tensor:
    return x.reshape(size)


def permute(x: Tensor, axes: Sequence[int]) -> Tensor:
    return x.permute(*axes)


def swap(x: Tensor) -> Tensor:
    """The last two axes exchanged."""
    return x.transpose(-1, -2)


def expand(x: Tensor, size: Sequence[int]) -> Tensor:
    return x.expand(size)


def concat(xs: Sequence[Tensor], axis: int) -> Tensor:
    return torch.cat(list(xs), axis)


def stack(xs: Sequence[Tensor], axis: int) -> Tensor:
    return torch.stack(list(xs), axis)


def unstack(x: Tensor, axis: int) -> tuple[Tensor, ...]:
    return x.unbind(axis)


def split(x: Tensor, sizes: Sequence[int], axis: int) -> tuple[Tensor, ...]:
    return x.split(list(sizes), axis)


def pad(x: Tensor, axis: int, before: int, after: int) -> Tensor:
    """Zeros (False) before and after, along one axis."""
    if not before and not after:
        return x
    rest = x.dim() - 1 - axis % x.dim()
    return torch.nn.functional.pad(x, (0, 0) * rest + (before, after))


def repeat(x: Tensor, times: int, axis: int) -> Tensor:
    """Each entry along `axis`, `times` times in a row."""
    return x if times == 1 else x.repeat_interleave(times, axis)


def flip(x: Tensor, axis: int) -> Tensor:
    return x.flip(axis)


def take(x: Tensor, index: Tensor, axis: int) -> Tensor:
    """Entries of x at a 1-D index, along one axis. The gradient adds up in a fixed order."""
    return x.index_select(axis, index)


def copy(x: Tensor) -> Tensor:
    """The same values in memory of their own, rows in order."""
    return x.clone(memory_format=torch.contiguous_format)


def contiguous(x: Tensor) -> Tensor:
    """x itself where its rows are in order already."""
    return x.contiguous()


def diagonal(x: Tensor) -> Tensor:
    """[.., C, C] -> [.., C]"""
    return x.diagonal(dim1=-2, dim2=-1)


# ---- elementwise
def where(condition: Tensor, x: Tensor | float, y: Tensor | float) -> Tensor:
    return torch.where(condition, x, y)


def exp(x: Tensor) -> Tensor:
    return x.exp()


def exp2(x: Tensor) -> Tensor:
    return x.exp2()


def expm1(x: Tensor) -> Tensor:
    return x.expm1()


def log1p(x: Tensor) -> Tensor:
    return x.log1p()


def abs(x: Tensor) -> Tensor:
    return x.abs()


def sqrt(x: Tensor) -> Tensor:
    return x.sqrt()


def rsqrt(x: Tensor) -> Tensor:
    return x.rsqrt()


def sigmoid(x: Tensor) -> Tensor:
    return x.sigmoid()


def maximum(x: Tensor, floor: float) -> Tensor:
    return x.clamp_min(floor)


def minimum(x: Tensor, ceiling: float) -> Tensor:
    return x.clamp_max(ceiling)


def nan_to_num(x: Tensor) -> Tensor:
    return x.nan_to_num()


# ---- sums, products, search
def sum(x: Tensor, axis: int | tuple[int, ...], *, keepdim: bool = False) -> Tensor:
    return x.sum(axis, keepdim=keepdim)


def cumsum(x: Tensor, axis: int) -> Tensor:
    return x.cumsum(axis)


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """x @ y in the dtype of the operands, inside an autocast region too: operators choose their own precision."""
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):  # there is no autocast, nor asking, on meta
        with torch.autocast(x.device.type, enabled=False):
            return x @ y
    return x @ y


def tril(x: Tensor, diagonal: int = 0) -> Tensor:
    return x.tril(diagonal)


def searchsorted(edges: Tensor, values: Tensor) -> Tensor:
    """How many entries of the sorted 1-D `edges` are <= each value (int64)."""
    return torch.searchsorted(edges, values, right=True)


def any(x: Tensor) -> Tensor:
    return x.any()


def argmax(x: Tensor) -> Tensor:
    """0-d index of the first largest entry of a 1-D tensor."""
    return x.to(torch.int32).argmax() if x.dtype is torch.bool else x.argmax()


def put_rows_(x: Tensor, index: Tensor, rows: Tensor) -> None:
    """x[index[n]] = rows[n], in place."""
    x.index_copy_(0, index, rows)


def add_to_half_(x: Tensor, h: int, half: int, y: Tensor, factor: Tensor | None = None) -> None:
    """x [.., C, D] in blocks of 2h rows: the first (half = 0) or last (1) h rows of each += y [.., C / 2h, h, D].

    In place; y is multiplied by factor if there is one. x is contiguous.
    """
    *lead, C, D = x.shape
    part = x.view(*lead, C // (2 * h), 2, h, D).select(-3, half)
    part.add_(y) if factor is None else part.addcmul_(y, factor)


def add_to_last_rows_(x: Tensor, h: int, rows: Tensor) -> None:
    """x [.., C, D] in blocks of h rows: the last row of each += rows [.., C / h, D], in place. x is contiguous."""
    *lead, C, D = x.shape
    x.view(*lead, C // h, h, D)[..., -1, :].add_(rows)


# ---- autograd
def custom(spec: type, *args: Any) -> Any:
    """Run `spec.forward(fw, ctx, *args)` with `spec.backward(fw, ctx, *grads)` as its derivative.

    One gradient (or None) per argument comes back from backward. ctx has save_for_backward, saved_tensors,
    needs_input_grad and free attributes. A spec whose backward uses what forward computed besides its results, which
    makes it a constant to a second derivative, names its operator in ONCE: create_graph=True then raises.
    """
    return _Custom.apply(*args, spec)


class _Custom(torch.autograd.Function):
    """One class for every spec: torch.compile traces this one, and stops where a class is made at run time."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        ctx.spec = args[-1]
        return ctx.spec.forward(_SELF, ctx, *args[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if hasattr(ctx.spec, "ONCE"):
            _once_only(ctx.spec.ONCE)
        result = ctx.spec.backward(_SELF, ctx, *grads)
        return (*result, None) if isinstance(result, tuple) else (result, None)


def _once_only(op: str) -> None:
    """Raise where autograd records this backward (create_graph=True): it would take it for a constant.

    torch's once_differentiable raises later, but not always: autograd.grad passes over it on the way to an input.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            f"{op}: a second derivative must not be asked for on a fast backend, got create_graph=True; "
            'backend="reference" has one'
        )


def gradient(function: Callable[[Tensor], tuple[Tensor, ...]], x: Tensor, grads: Sequence[Tensor]) -> Tensor:
    """d/dx of sum(grads . function(x)), apart from any recorded graph."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(function(x), x, tuple(grads))[0]


# ---- groups of processes
def group_size(group: Any) -> int:
    """Processes of a group; None is the default group."""
    return torch.distributed.get_world_size(group)


def group_rank(group: Any) -> int:
    return torch.distributed.get_rank(group)


def all_gather(x: Tensor, group: Any) -> Tensor:
    """x of every process of a group, [size, ..]; no derivative. x is contiguous."""
    gathered = x.new_empty((group_size(group), *x.shape))
    # torch 2.13 has a new name for it, and warns of the old one; 2.11 knows only that.
    gather = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor
    gather(gathered.flatten(0, 1) if x.dim() else gathered, x, group=group)
    return gathered


# ---- two streams
class _Beside:
    """Runs launches on a second stream of x's device; on a CPU, at once."""

    _streams: ClassVar[dict[int, Any]] = {}

    def __init__(self, x: Tensor) -> None:
        self.device = x.device if x.is_cuda else None

    def launch(self, run: Callable[[], None]) -> Any:
        """Run after everything that is on the current stream by now. Memory it uses must stay alive until `join`."""
        if self.device is None:
            return run()
        main, side = torch.cuda.current_stream(self.device), self._side()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            run()
        return side.record_event()

    def join(self, event: Any) -> None:
        """Make the current stream wait for one launch."""
        if self.device is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def _side(self) -> Any:
        index = self.device.index  # type: ignore[union-attr]
        if index not in self._streams:
            self._streams[index] = torch.cuda.Stream(self.device)
        return self._streams[index]


def beside(x: Tensor) -> _Beside:
    """See `_Beside`; for stages that leave most of a GPU idle."""
    return _Beside(x)


class _InOrder:
    """The same, without a second stream."""

    def launch(self, run: Callable[[], None]) -> None:
        run()

    def join(self, event: None) -> None:
        pass


def in_order() -> _InOrder:
    return _InOrder()


# ---- operators that compilers see as one
_REGISTERED: set[str] = set()


def operator(spec: Any) -> Callable[..., tuple]:
    """The function of a custom operator: one node for torch.compile, autograd and CUDA graphs.

    spec has NAME, SCHEMA (in the language of torch.library) and forward(fw, *args) -> results; fake(fw, *args) makes
    empty results of the right sizes. With a derivative it also has keep(args, results) -> (tensors, others), which
    says what backward(fw, tensors, others, needs_input_grad, *grads) gets; without, NO_DERIVATIVE says why not. One
    that has neither is for inference: it may write to arguments that SCHEMA marks, and autograd never sees it.

    Whoever traces, or watches operators by a dispatch mode, gets the operator of torch.library. Nobody else pays for
    its way through the dispatcher (0.1 ms a call): they get the same two functions as an autograd.Function.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        _register(spec)
        return getattr(torch.ops.openkda, spec.NAME)
    if not _has_autograd(spec) or not torch.is_grad_enabled():
        return functools.partial(spec.forward, _SELF)
    return functools.partial(_Direct.apply, spec)


def _has_autograd(spec: Any) -> bool:
    return hasattr(spec, "backward") or hasattr(spec, "NO_DERIVATIVE")


class _Direct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, spec: Any, *args: Any) -> tuple:
        ctx.spec, results = spec, spec.forward(_SELF, *args)
        if hasattr(spec, "keep"):
            tensors, ctx.others = spec.keep(args, results)
            ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        if not hasattr(ctx.spec, "backward"):
            raise RuntimeError(ctx.spec.NO_DERIVATIVE)
        needs = ctx.needs_input_grad[1:]
        return (None, *ctx.spec.backward(_SELF, ctx.saved_tensors, ctx.others, needs, *grads))


def _register(spec: Any) -> bool:
    if spec.NAME in _REGISTERED:
        return True
    _REGISTERED.add(spec.NAME)
    name = f"openkda::{spec.NAME}"

    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        tensors, ctx.others = spec.keep(inputs, output)
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        return spec.backward(_SELF, ctx.saved_tensors, ctx.others, ctx.needs_input_grad, *grads)

    def refuse(*_: Any) -> None:
        raise RuntimeError(spec.NO_DERIVATIVE)

    torch.library.define(name, spec.SCHEMA)
    torch.library.impl(name, ("cpu", "cuda"))(functools.partial(spec.forward, _SELF))
    torch.library.register_fake(name, functools.partial(spec.fake, _SELF))
    if hasattr(spec, "backward"):
        torch.library.register_autograd(name, backward, setup_context=setup_context)
    elif _has_autograd(spec):
        torch.library.register_autograd(name, refuse)
    return True


# torch.compile runs _register while it traces, and does not trace it: what torch.compiler.assume_constant_result sets,
# which would import torch._dynamo, and with it triton, in every program that uses an operator (torch 2.13).
_register._dynamo_marked_constant = True  # type: ignore[attr-defined]
