"""Launches of a compiled kernel whose arguments are all known but their addresses: no work but to put those in.

An ordinary launch passes through Triton's launcher, which encodes every tensor descriptor anew, 5 us of Python each.
Here its arguments are laid out once, as its C function takes them, and the encoded descriptors (CUtensorMap) are kept
by address: allocators hand out the same memory again and again.

What is used of Triton's inside was read in 3.6 and 3.8 and is asked for by name. `direct` goes through the public
`CompiledKernel.run` where it finds something else, and other versions (not KNOWN) launch the ordinary way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton

from openkda.frameworks.planned import Buffer, Dtype

_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
KNOWN = _VERSION in ((3, 6), (3, 8))


class Pointer:
    """An address with a dtype: what Triton asks of a tensor."""

    __slots__ = ("address", "dtype")

    def __init__(self, address: int, dtype: Dtype) -> None:
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self.address


def is_descriptor(x: Any) -> bool:
    """Triton and Gluon have a class each."""
    return type(x).__name__ == "TensorDescriptor"


def direct(compiled: Any, programs: int, params: list[Any]) -> Callable[[list[int], Any], None]:
    """A function of memories' addresses and a stream that launches a kernel.

    params: what it was compiled for, `Buffer` for pointers and descriptors of such.
    """
    found = _launcher(compiled)
    if found is None:
        return _Compiled(compiled, programs, params)
    call, metas, encode = found
    if len(metas) != sum(map(is_descriptor, params)):
        return _Compiled(compiled, programs, params)
    return _Expanded(call, programs, params, [lambda tiles, m=meta: encode(tiles, m) for meta in metas])


class _Compiled:
    """Through `CompiledKernel.run`, which the versions have in common."""

    def __init__(self, compiled: Any, programs: int, params: list[Any]) -> None:
        self.compiled, self.programs, self.params = compiled, programs, params
        self.pointers = [(i, x.memory.index, x.offset) for i, x in enumerate(params) if isinstance(x, Buffer)]
        self.tiles = [(i, x.base.memory.index, x.base.offset) for i, x in enumerate(params) if is_descriptor(x)]

    def __call__(self, memories: list[int], stream: Any) -> None:
        params, kernel = self.params.copy(), self.compiled
        for i, memory, offset in self.pointers:
            params[i] = memories[memory] + offset
        for i, memory, offset in self.tiles:
            params[i] = _moved(params[i], memories[memory] + offset)
        no_metadata_and_hooks = (None, None, None)
        size = (self.programs, 1, 1)
        kernel.run(*size, stream, kernel.function, kernel.packed_metadata, *no_metadata_and_hooks, *params)


class _Expanded:
    """Through the C function of the launcher."""

    def __init__(self, call: Callable[..., None], programs: int, params: list[Any], encoders: list[Any]) -> None:
        self.call, self.programs = call, programs
        self.params: list[Any] = []
        self.pointers: list[tuple[int, int, int]] = []
        self.tiles: list[tuple[int, int, _Tiles]] = []
        encoders = list(encoders)
        for x in params:
            if isinstance(x, Buffer):
                self.pointers.append((len(self.params), x.memory.index, x.offset))
            if is_descriptor(x):
                self.tiles.append((len(self.params), x.base.memory.index, _Tiles(x, encoders.pop(0))))
                self.params += [None, *x.shape, *x.strides]
            else:
                self.params.append(x)

    def __call__(self, memories: list[int], stream: Any) -> None:
        params = self.params.copy()
        for i, memory, offset in self.pointers:
            params[i] = memories[memory] + offset
        for i, memory, tiles in self.tiles:
            params[i] = tiles.at(memories[memory])
        self.call(self.programs, stream, params)


class _Tiles:
    """Encoded descriptors by address of their memory."""

    LIMIT = 32

    def __init__(self, descriptor: Any, encode: Callable[[Any], Any]) -> None:
        self.descriptor, self.encode = descriptor, encode
        self.encoded: dict[int, Any] = {}

    def at(self, memory: int) -> Any:
        try:
            return self.encoded[memory]
        except KeyError:
            if len(self.encoded) >= self.LIMIT:
                self.encoded = {}
            encoded = self.encode(_moved(self.descriptor, memory + self.descriptor.base.offset))
            self.encoded[memory] = encoded
            return encoded


def _moved(descriptor: Any, address: int) -> Any:
    """The same descriptor, checked before, at another address with the same alignment."""
    moved = object.__new__(type(descriptor))
    moved.__dict__.update(descriptor.__dict__)
    moved.base = Pointer(address, descriptor.base.dtype)
    return moved


def _launcher(compiled: Any) -> tuple[Callable[..., None], list[Any], Callable[[Any, Any], Any]] | None:
    """(call(programs, stream, expanded arguments), metadata of descriptors, encode(descriptor, its metadata)).

    None for a kernel that wants more than arguments, such as scratch memory, and for another launcher.
    """
    from triton.backends.nvidia import driver as nvidia

    launcher, meta = compiled.run, compiled.metadata
    if type(launcher) is not nvidia.CudaLauncher or getattr(launcher, "gsan_enabled", False):
        return None
    metas = list(getattr(meta, "tensordesc_meta", None) or [])
    if launcher.global_scratch_size or launcher.profile_scratch_size or None in metas:
        return None
    raw = launcher.launch
    if metas:  # wrapped into a function that encodes
        raw = inspect.getclosurevars(raw).nonlocals.get("launcher")
    if raw is None:
        return None
    function, packed = compiled.function, compiled.packed_metadata
    flags = (launcher.launch_cooperative_grid, launcher.launch_pdl)
    scratch, watched = (None, None), (None, None, None)  # global, profile; metadata, hooks
    if _VERSION == (3, 6):

        def call(programs: int, stream: Any, params: list[Any]) -> None:
            raw(programs, 1, 1, stream, function, *flags, *scratch, packed, *watched, *params)

        encode: Any = nvidia.make_tensordesc_arg  # of two arguments there, of three in 3.8
        return call, metas, lambda tiles, meta: encode(tiles, meta)[0]
    types = (launcher.arg_annotations, launcher.kernel_signature)

    def call_packed(programs: int, stream: Any, params: list[Any]) -> None:
        raw(programs, 1, 1, stream, function, *flags, packed, *watched, *scratch, *types, params)

    return call_packed, metas, lambda tiles, meta: nvidia.make_tensordesc_arg(tiles, meta, None)[0]
