"""The Paddle namespace: the functions of `frameworks/torch.py` on PaddlePaddle tensors.

What differs from torch and is settled here, so that host code needs to know nothing of it (paddlepaddle 3.3.1):

- a PyLayer takes one gradient per tensor argument (None and numbers have no slot), must get None for an input that
  needs no gradient, and knows neither `saved_tensors` nor `needs_input_grad`: see `custom`;
- `clip` with one bound turns infinities into the largest number: `maximum` and `minimum` compare instead;
- the CPU has no 16-bit kernels for a few operations: they run in fp32 and are rounded back, which is exact for them;
- Triton's driver asks torch for device and stream: `on_device` gives it Paddle's for the time of a launch.
"""

from __future__ import annotations

import builtins
import functools
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import paddle
from paddle import Tensor

NAME = "paddle"
OLDEST = (3, 3)  # the first with enable_compat(scope=..) and device= in creation functions
_SELF = sys.modules[__name__]


def _check_version(version: str) -> None:
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST and not version.startswith("0.0.0"):
        raise ImportError(
            f"openkda: paddle must be version {OLDEST[0]}.{OLDEST[1]} or newer, got {version}; "
            "install paddlepaddle==3.3.1, or a later build"
        )


_check_version(paddle.__version__)  # 0.0.0 is what builds from source call themselves


# ---- what a tensor is
def dtype_name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("paddle.")


def shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def strides(x: Tensor) -> tuple[int, ...]:
    """In elements."""
    return tuple(x.strides)


def signature(x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], str, int]:
    """Shape, strides in elements, dtype, and address modulo 16: what a plan for x depends on."""
    return tuple(x.shape), tuple(x.strides), dtype_name(x), address(x) % 16


def device_index(x: Tensor) -> int:
    """-1 on a CPU."""
    return x.place.gpu_device_id() if on_gpu(x) else -1


def call_key(values: Sequence[Any]) -> tuple | None:
    """All that checks may look at: of a tensor its shape, dtype and device, of anything else its type and value."""
    return tuple(
        (tuple(v.shape), dtype_name(v), device_name(v)) if isinstance(v, Tensor) else (type(v), v) for v in values
    )


def address(x: Tensor) -> int:
    return x.data_ptr() if x.size else 0


def view_bytes(x: Tensor, offset: int, size: Sequence[int], stride: Sequence[int], dtype: str) -> Any:
    """A tensor in x's memory, `offset` bytes behind x's start; of torch, as only Triton's interpreter asks for it."""
    import torch

    from openkda.frameworks import torch as torch_namespace

    return torch_namespace.view_bytes(torch.from_dlpack(x.detach()), offset, size, stride, dtype)


def device(x: Tensor) -> Any:
    return x.place


def device_name(x: Tensor) -> str:
    return str(x.place).removeprefix("Place(").removesuffix(")")


def on_gpu(x: Tensor) -> bool:
    return x.place.is_gpu_place()


def compute_capability(x: Tensor) -> int | None:
    """90 for compute capability 9.0; None where x is on no CUDA device."""
    if not x.place.is_gpu_place():
        return None
    major, minor = paddle.device.cuda.get_device_capability(x.place.gpu_device_id())
    return 10 * major + minor


def on_device(x: Tensor) -> AbstractContextManager[None]:
    """Triton launches go to x's device and to Paddle's stream there; nothing to do on a CPU."""
    if not x.place.is_gpu_place():
        return nullcontext()
    from openkda.paddle import driver  # needs triton

    return driver.active(x.place.gpu_device_id())


def descriptor_base(x: Tensor) -> Any:
    """x as the memory of a Triton tensor descriptor: those ask a dtype for its size, which Paddle's do not tell."""
    return SimpleNamespace(dtype=_Dtype(x), data_ptr=x.data_ptr, owner=x)


class _Dtype:
    def __init__(self, x: Tensor) -> None:
        self.name, self.itemsize = dtype_name(x), x.element_size()

    def __str__(self) -> str:
        return self.name


def is_floating(x: Tensor) -> bool:
    return x.is_floating_point()


def needs_grad(*xs: Tensor | None) -> bool:
    """True if autograd would record an operation on any of xs."""
    return paddle.is_grad_enabled() and builtins.any(x is not None and not x.stop_gradient for x in xs)


def no_grad() -> AbstractContextManager[None]:
    return paddle.no_grad()


def detach(x: Tensor) -> Tensor:
    return x.detach()


def to_list(x: Tensor) -> Any:
    """Values on the host. On an accelerator this waits for the device: only the reference and OPENKDA_CHECK=1 may call
    it.
    """
    return x.tolist()


def any_above(x: Tensor, ceiling: float) -> Tensor:
    """0-d bool: some value exceeds the ceiling."""
    return (x > ceiling).any()


def version_of(x: Tensor) -> int:
    """A number that grows with every edit in place."""
    return x.inplace_version


# ---- make
def zeros(size: Sequence[int], *, like: Tensor, dtype: str | None = None) -> Tensor:
    return paddle.zeros(list(size), dtype=dtype or like.dtype, device=like.place)


def ones(size: Sequence[int], *, like: Tensor, dtype: str | None = None) -> Tensor:
    return paddle.ones(list(size), dtype=dtype or like.dtype, device=like.place)


def empty(size: Sequence[int], *, like: Tensor, dtype: str | None = None) -> Tensor:
    return paddle.empty(list(size), dtype=dtype or like.dtype, device=like.place)


def allocate(size: tuple[int, ...], strides: tuple[int, ...], dtype: str, *, like: Tensor) -> Tensor:
    """An unwritten tensor on like's device; strides are those of rows in order."""
    return empty(size, like=like, dtype=dtype)


def arange(n: int, *, like: Tensor, dtype: str = "int64") -> Tensor:
    return paddle.arange(n, dtype=dtype, device=like.place)


def eye(n: int, *, like: Tensor) -> Tensor:
    return paddle.eye(n, dtype=like.dtype, device=like.place)


def _scalar(value: float, like: Tensor) -> Tensor:
    return paddle.full([], value, dtype=like.dtype, device=like.place)


def from_list(values: Sequence[Any], *, like: Tensor, dtype: str = "int64") -> Tensor:
    return paddle.to_tensor(list(values), dtype=dtype, place=like.place)


def cast(x: Tensor, dtype: str) -> Tensor:
    return x if dtype_name(x) == dtype else x.astype(dtype)


# ---- 16-bit tensors on a CPU
def _widened(x: Tensor) -> Tensor:
    """x in fp32 if it is a 16-bit tensor on a CPU, where Paddle has few kernels for it, and fewer derivatives."""
    narrow = x.dtype in (paddle.bfloat16, paddle.float16) and x.place.is_cpu_place()
    return x.astype("float32") if narrow else x


def _narrow_again(y: Tensor, like: Tensor) -> Tensor:
    return y if y.dtype == like.dtype else y.astype(like.dtype)


# ---- shape
def reshape(x: Tensor, size: Sequence[int]) -> Tensor:
    return paddle.reshape(x, list(size))


def permute(x: Tensor, axes: Sequence[int]) -> Tensor:
    return paddle.transpose(x, list(axes))


def swap(x: Tensor) -> Tensor:
    """The last two axes exchanged."""
    axes = list(range(x.ndim))
    return paddle.transpose(x, [*axes[:-2], axes[-1], axes[-2]])


def expand(x: Tensor, size: Sequence[int]) -> Tensor:
    return paddle.expand(x, list(size))


def concat(xs: Sequence[Tensor], axis: int) -> Tensor:
    return _narrow_again(paddle.concat([_widened(x) for x in xs], axis), xs[0])


def stack(xs: Sequence[Tensor], axis: int) -> Tensor:
    return _narrow_again(paddle.stack([_widened(x) for x in xs], axis), xs[0])


def unstack(x: Tensor, axis: int) -> tuple[Tensor, ...]:
    return tuple(paddle.unbind(x, axis))


def split(x: Tensor, sizes: Sequence[int], axis: int) -> tuple[Tensor, ...]:
    return tuple(paddle.split(x, list(sizes), axis))


def pad(x: Tensor, axis: int, before: int, after: int) -> Tensor:
    """Zeros (False) before and after, along one axis."""
    if not before and not after:
        return x
    size, axis = list(x.shape), axis % x.ndim
    first, last = (zeros([*size[:axis], n, *size[axis + 1 :]], like=x) if n else None for n in (before, after))
    return concat([block for block in (first, x, last) if block is not None], axis)


def repeat(x: Tensor, times: int, axis: int) -> Tensor:
    """Each entry along `axis`, `times` times in a row."""
    return x if times == 1 else _narrow_again(paddle.repeat_interleave(_widened(x), times, axis), x)


def flip(x: Tensor, axis: int) -> Tensor:
    return _narrow_again(paddle.flip(_widened(x), axis), x)


def take(x: Tensor, index: Tensor, axis: int) -> Tensor:
    """Entries of x at a 1-D index, along one axis."""
    return _narrow_again(paddle.index_select(_widened(x), index, axis), x)


def copy(x: Tensor) -> Tensor:
    """The same values in memory of their own, rows in order."""
    return x.clone() if x.is_contiguous() else x.contiguous()


def contiguous(x: Tensor) -> Tensor:
    """x itself where its rows are in order already."""
    return x if x.is_contiguous() else x.contiguous()


def diagonal(x: Tensor) -> Tensor:
    """[.., C, C] -> [.., C]"""
    return paddle.diagonal(x, axis1=-2, axis2=-1)


# ---- elementwise
def where(condition: Tensor, x: Tensor | float, y: Tensor | float) -> Tensor:
    like: Tensor = x if isinstance(x, Tensor) else y  # type: ignore[assignment]
    x, y = (_widened(side if isinstance(side, Tensor) else _scalar(side, like)) for side in (x, y))
    return _narrow_again(paddle.where(condition, x, y), like)


def exp(x: Tensor) -> Tensor:
    return paddle.exp(x)


def exp2(x: Tensor) -> Tensor:
    return 2.0**x


def expm1(x: Tensor) -> Tensor:
    return paddle.expm1(x)


def log1p(x: Tensor) -> Tensor:
    return paddle.log1p(x)


def abs(x: Tensor) -> Tensor:
    return paddle.abs(x)


def sqrt(x: Tensor) -> Tensor:
    return paddle.sqrt(x)


def rsqrt(x: Tensor) -> Tensor:
    return paddle.rsqrt(x)


def sigmoid(x: Tensor) -> Tensor:
    return paddle.nn.functional.sigmoid(x)


def maximum(x: Tensor, floor: float) -> Tensor:
    return paddle.maximum(x, _scalar(floor, x))


def minimum(x: Tensor, ceiling: float) -> Tensor:
    return paddle.minimum(x, _scalar(ceiling, x))


def nan_to_num(x: Tensor) -> Tensor:
    return paddle.nan_to_num(x)


# ---- sums, products, search
def sum(x: Tensor, axis: int | tuple[int, ...], *, keepdim: bool = False) -> Tensor:
    return paddle.sum(x, list(axis) if isinstance(axis, tuple) else axis, keepdim=keepdim)


def cumsum(x: Tensor, axis: int) -> Tensor:
    return paddle.cumsum(x, axis)


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """x @ y in the dtype of the operands, inside an auto_cast region too: operators choose their own precision."""
    if paddle.is_autocast_enabled():
        with paddle.amp.auto_cast(enable=False):
            return paddle.matmul(x, y)
    return paddle.matmul(x, y)


def tril(x: Tensor, diagonal: int = 0) -> Tensor:
    return paddle.tril(x, diagonal)


def searchsorted(edges: Tensor, values: Tensor) -> Tensor:
    """How many entries of the sorted 1-D `edges` are <= each value (int64)."""
    return paddle.searchsorted(edges, values, right=True)


def any(x: Tensor) -> Tensor:
    return x.any()


def argmax(x: Tensor) -> Tensor:
    """0-d index of the first largest entry of a 1-D tensor."""
    return paddle.argmax(x.astype("int32") if x.dtype == paddle.bool else x)


def put_rows_(x: Tensor, index: Tensor, rows: Tensor) -> None:
    """x[index[n]] = rows[n], in place."""
    x[index] = rows


def add_to_half_(x: Tensor, h: int, half: int, y: Tensor, factor: Tensor | None = None) -> None:
    """x [.., C, D] in blocks of 2h rows: the first (half = 0) or last (1) h rows of each += y [.., C / 2h, h, D].

    In place; y is multiplied by factor if there is one. x is contiguous.
    """
    y = y if factor is None else y * factor
    blocks = x.view([-1, 2, h, x.shape[-1]])  # all leading axes in one: indexing ends at 6 axes
    blocks[:, half].add_(paddle.reshape(y, [-1, *y.shape[-2:]]))


def add_to_last_rows_(x: Tensor, h: int, rows: Tensor) -> None:
    """x [.., C, D] in blocks of h rows: the last row of each += rows [.., C / h, D], in place. x is contiguous."""
    D = x.shape[-1]
    x.view([-1, h, D])[:, -1].add_(paddle.reshape(rows, [-1, D]))


# ---- autograd
class _Context(SimpleNamespace):
    """What `spec` sees as ctx: torch's names, and free attributes. It never holds Paddle's context, which holds it."""

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Any, ...] = ()
    materialize: bool = True

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self.materialize = value


def custom(spec: Any, *args: Any) -> Any:
    """Run `spec.forward(fw, ctx, *args)` with `spec.backward(fw, ctx, *grads)` as its derivative.

    One gradient (or None) per argument comes back from backward. ctx has save_for_backward, saved_tensors,
    needs_input_grad and free attributes.
    """
    needs = tuple(isinstance(a, Tensor) and needs_grad(a) for a in args)
    if not builtins.any(needs):
        return spec.forward(_SELF, _Context(needs_input_grad=needs), *args)
    return _Custom.apply(spec, *args)


class _Custom(paddle.autograd.PyLayer):
    """A PyLayer that saved a result of its own would keep itself alive where no backward is run (3.3.1). What is saved
    of results is therefore a detached alias, which has no second derivative: asking for one raises.
    """

    @staticmethod
    def forward(ctx: Any, spec: Any, *args: Any) -> Any:
        needs = tuple(isinstance(a, Tensor) and not a.stop_gradient for a in args)
        own = _Context(needs_input_grad=needs)
        result = spec.forward(_SELF, own, *args)
        results = result if isinstance(result, tuple) else (result,)
        made_here = {id(r) for r in results if isinstance(r, Tensor)}
        ctx.save_for_backward(*(t.detach() if id(t) in made_here else t for t in own.saved_tensors))
        ctx.once_only = builtins.any(id(t) in made_here for t in own.saved_tensors)
        vars(own).pop("saved_tensors", None)
        ctx.set_materialize_grads(own.materialize)
        ctx.spec, ctx.own = spec, own
        ctx.arguments = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
        ctx.num_results, ctx.results = len(results), [i for i, r in enumerate(results) if isinstance(r, Tensor)]
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        once = getattr(ctx.spec, "ONCE", None)
        if (ctx.once_only or once) and paddle.is_grad_enabled():  # create_graph=True
            raise RuntimeError(
                f"openkda: a second derivative must not be asked for on Paddle, got create_graph=True through "
                f'{once or getattr(ctx.spec, "__name__", "an operator")}; only backend="reference" has one'
            )
        own = _Context(**vars(ctx.own))
        own.saved_tensors = tuple(ctx.saved_tensor())
        all_grads = [None] * ctx.num_results  # a result that was None has no slot
        for i, grad in zip(ctx.results, grads, strict=True):
            all_grads[i] = grad
        result = ctx.spec.backward(_SELF, own, *all_grads)
        result = result if isinstance(result, tuple) else (result,)
        slots: tuple[Any, ...] = tuple(result[i] if own.needs_input_grad[i] else None for i in ctx.arguments)
        return slots[0] if len(slots) == 1 else slots


def gradient(function: Callable[[Tensor], tuple[Tensor, ...]], x: Tensor, grads: Sequence[Tensor]) -> Tensor:
    """d/dx of sum(grads . function(x)), apart from any recorded graph."""
    with paddle.enable_grad():
        x = x.detach()
        x.stop_gradient = False
        paddle.autograd.backward(list(function(x)), list(grads))  # a paddle.grad within another one is not possible
        return x.grad


# ---- groups of processes
def group_size(group: Any) -> int:
    """Processes of a group; None is the default group."""
    return paddle.distributed.get_world_size(group)


def group_rank(group: Any) -> int:
    return paddle.distributed.get_rank(group)


def all_gather(x: Tensor, group: Any) -> Tensor:
    """x of every process of a group, [size, ..]; no derivative. x is contiguous."""
    gathered: list[Tensor] = []
    paddle.distributed.all_gather(gathered, x, group=group)
    return paddle.stack(gathered, 0)


# ---- two streams
class _InOrder:
    """Runs launches on the current stream; `frameworks/torch.py` has one that runs them beside it."""

    def launch(self, run: Callable[[], None]) -> None:
        run()

    def join(self, event: None) -> None:
        pass


def in_order() -> _InOrder:
    return _InOrder()


def beside(x: Tensor) -> _InOrder:
    """On the same stream: a memory block that Paddle frees may be in use on another one."""
    return _InOrder()


# ---- operators with their derivative as an operator
def operator(spec: Any) -> Callable[..., tuple]:
    """The function of a custom operator; `frameworks/torch.py` says what spec has.

    Results that the backward keeps are for the backward alone: where a gradient is wanted they come back as None. (A
    PyLayer that saved a result of its own would keep itself alive.)
    """
    if not hasattr(spec, "backward") and not hasattr(spec, "NO_DERIVATIVE"):
        return functools.partial(spec.forward, _SELF)
    return functools.partial(custom, _Operator(spec))


class _Operator:
    def __init__(self, spec: Any) -> None:
        self.spec = spec

    def forward(self, fw: Any, ctx: Any, *args: Any) -> tuple:
        results = self.spec.forward(fw, *args)
        if not builtins.any(ctx.needs_input_grad):
            return results
        ctx.set_materialize_grads(False)
        if not hasattr(self.spec, "backward"):
            return results
        tensors, ctx.others = self.spec.keep(args, results)
        ctx.save_for_backward(*tensors)
        kept = {id(t) for t in tensors}
        if not isinstance(results, tuple):
            return results
        return tuple(None if id(r) in kept else r for r in results)

    def backward(self, fw: Any, ctx: Any, *grads: Any) -> tuple:
        if not hasattr(self.spec, "backward"):
            raise RuntimeError(self.spec.NO_DERIVATIVE)
        return self.spec.backward(fw, ctx.saved_tensors, ctx.others, ctx.needs_input_grad, *grads)
