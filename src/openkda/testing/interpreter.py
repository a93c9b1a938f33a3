"""Triton's CPU interpreter, made right for 16-bit kernels.

With `TRITON_INTERPRET=1` in the environment Triton runs a kernel on CPU tensors, program by program, in numpy. As
shipped it computes on the bit patterns of bf16 numbers, which gives silent garbage. `install` replaces what is wrong:

| part | what is wrong as shipped | triton |
|---|---|---|
| bf16 arithmetic, comparison, dot | works on the raw uint16 patterns; here in fp32, rounded after each | 3.6 to 3.8 |
| fp32 to bf16 | truncates; here round to nearest even, NaN stays NaN | 3.6 to 3.8 |
| "tf32" dots | use all of fp32; here operands are rounded to 10 mantissa bits, as in tensor cores | 3.6 to 3.8 |
| "bf16x3", "bf16x6" dots | refused by an assertion; here allowed, in fp32 | 3.6 to 3.8 |
| Paddle tensors | lack what the interpreter calls; here it gets torch tensors that share their memory | 3.6 to 3.8 |
| run-time loop bounds | `int()` of a one-element array, which numpy 2.4 refuses | 3.6 and 3.7 |
| infinities and NaN | numpy warns of each, and a test run makes that an error; a GPU makes them silently | 3.6 to 3.8 |

`tests/testing/test_interpreter.py` says, when a new Triton comes, which of these can go. What stays invisible on a
CPU: races, missing barriers, layouts, shared-memory limits, and everything about speed. Triton decides at
`@triton.jit`, and for its own library at `import triton`, whether a function is interpreted: the variable must be set
before the process starts.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any

import numpy as np

_installed = False


def is_on() -> bool:
    """Whether this process was started with Triton's interpreter switched on."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def install() -> None:
    """Correct the interpreter of this process; further calls do nothing.

    Raises: RuntimeError if the process was not started with `TRITON_INTERPRET=1`.
    """
    global _installed
    if not is_on():
        raise RuntimeError("interpreter: TRITON_INTERPRET must be 1 when the process starts; set it in the environment")
    if _installed:
        return
    _correct_bf16()
    _correct_dot()
    _correct_loop_bounds()
    _accept_paddle_tensors()
    np.seterr(all="ignore")
    _installed = True


# ---- bit patterns, numpy in and out


def bf16_to_fp32(bits: np.ndarray) -> np.ndarray:
    """Bit patterns of bf16 (uint16) to fp32; exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def fp32_to_bf16(x: np.ndarray) -> np.ndarray:
    """fp32 to the bit patterns of bf16 (uint16), rounded to nearest even; every NaN becomes the quiet NaN 0x7FC0."""
    x = np.ascontiguousarray(x, dtype=np.float32)
    bits = x.view(np.uint32)
    nearest_even = bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))
    return np.where(np.isnan(x), np.uint16(0x7FC0), (nearest_even >> 16).astype(np.uint16))


def fp32_to_tf32(x: np.ndarray) -> np.ndarray:
    """fp32 rounded to the 10 mantissa bits of tf32 (nearest even), still held as fp32; infinities and NaN are kept."""
    x = np.ascontiguousarray(x, dtype=np.float32)
    bits = x.view(np.uint32)
    nearest_even = (bits + np.uint32(0xFFF) + ((bits >> 13) & np.uint32(1))) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(x), nearest_even.view(np.float32), x)


# ---- corrections of triton.runtime.interpreter

# Methods `create_<name>` of the builder that take and give floats.
_FLOAT_METHODS = (
    "fadd fsub fmul fdiv frem fma fneg precise_divf minimumf minnumf maximumf maxnumf clampf "
    "cos sin exp exp2 log log2 sqrt precise_sqrt rsqrt erf floor ceil"
).split()


def _is_bf16(x: Any) -> bool:
    import triton.language as tl
    from triton.runtime import interpreter

    return isinstance(x, interpreter.TensorHandle) and x.dtype.scalar == tl.bfloat16


def _widen(x: Any) -> Any:
    """A bf16 handle as an fp32 handle; anything else as it is."""
    import triton.language as tl
    from triton.runtime import interpreter

    return interpreter.TensorHandle(bf16_to_fp32(x.data), tl.float32) if _is_bf16(x) else x


def _correct_bf16() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    handle = interpreter.TensorHandle

    def in_fp32(name: str, gives_bf16: bool) -> None:
        shipped = getattr(builder, name)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not any(_is_bf16(a) for a in args):
                return shipped(self, *args, **kwargs)
            result = shipped(self, *[_widen(a) for a in args], **kwargs)
            return handle(fp32_to_bf16(result.data), tl.bfloat16) if gives_bf16 else result

        setattr(builder, name, method)

    for name in _FLOAT_METHODS:
        if hasattr(builder, "create_" + name):
            in_fp32("create_" + name, gives_bf16=True)
    for name in [n for n in dir(builder) if n.startswith("create_fcmp")]:
        in_fp32(name, gives_bf16=False)

    shipped_cast, shipped_convert = builder.cast_impl, builder.create_fp_to_fp

    def numeric(dtype: Any) -> bool:
        return dtype.is_standard_floating() or dtype.is_int()

    def cast(self: Any, src: Any, dst_type: Any) -> Any:
        s, d = src.dtype.scalar, dst_type.scalar
        if s == tl.bfloat16 and d != tl.bfloat16 and numeric(d):
            return handle(bf16_to_fp32(src.data).astype(interpreter._get_np_dtype(dst_type)), d)
        if d == tl.bfloat16 and s != tl.bfloat16 and numeric(s):
            return handle(fp32_to_bf16(src.data.astype(np.float32)), d)
        return shipped_cast(self, src, dst_type)

    def convert(self: Any, src: Any, dst_type: Any, rounding: Any) -> Any:
        s, d = src.dtype.scalar, dst_type.scalar
        if tl.bfloat16 in (s, d) and min(s.primitive_bitwidth, d.primitive_bitwidth) > 8:
            return cast(self, src, dst_type)
        return shipped_convert(self, src, dst_type, rounding)

    builder.cast_impl = cast
    builder.create_fp_to_fp = convert
    builder.get_bf16 = lambda self, value: handle(fp32_to_bf16(np.array([value], np.float32)), tl.bfloat16)


def _correct_dot() -> None:
    import triton.language as tl
    from triton._C.libtriton import ir
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    handle = interpreter.TensorHandle
    shipped = builder.create_dot

    def as_tf32(x: Any) -> Any:
        return handle(fp32_to_tf32(x.data), tl.float32) if x.dtype.scalar == tl.float32 else x

    def dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, *rest: Any) -> Any:
        if input_precision == ir.INPUT_PRECISION.TF32:
            a, b = as_tf32(a), as_tf32(b)
        return shipped(self, _widen(a), _widen(b), d, input_precision, *rest)

    builder.create_dot = dot
    precisions = ("tf32", "tf32x3", "ieee", "bf16x3", "bf16x6")
    interpreter.InterpreterOptions.allowed_dot_input_precisions = precisions
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(allowed_dot_input_precisions=precisions)


def _correct_loop_bounds() -> None:
    """For triton below 3.8: let a run-time scalar bound a loop."""
    import triton
    from triton.runtime import interpreter

    if tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 8):
        return
    shipped = interpreter._patch_lang_tensor

    def as_int(self: Any) -> int:
        return int(np.asarray(self.handle.data).reshape(-1)[0])

    def patch(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        result = shipped(tensor, *args, **kwargs)
        if args and hasattr(args[0], "set_attr"):  # a scope that undoes the patches after the launch
            args[0].set_attr(tensor, "__index__", as_int)
        else:
            tensor.__index__ = as_int
        return result

    interpreter._patch_lang_tensor = patch


def _accept_paddle_tensors() -> None:
    """Zero-copy stand-ins: a torch tensor made by DLPack from each Paddle tensor of a launch."""
    from triton.runtime import interpreter
    from triton.tools.tensor_descriptor import TensorDescriptor

    shipped = interpreter.GridExecutor.__call__

    def as_torch(x: Any) -> Any:
        paddle = sys.modules.get("paddle")
        if paddle is None:
            return x
        if isinstance(x, paddle.Tensor):
            import torch

            return torch.from_dlpack(x.detach())
        if isinstance(x, TensorDescriptor) and hasattr(x.base, "owner"):
            return dataclasses.replace(x, base=as_torch(x.base.owner))
        return x

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return shipped(self, *map(as_torch, args), **{name: as_torch(value) for name, value in kwargs.items()})

    interpreter.GridExecutor.__call__ = call
