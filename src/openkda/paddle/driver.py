"""Triton launches from Paddle: a driver that asks Paddle, not torch, for the device and the stream.

Triton has one active driver a process, and its CUDA driver takes device and stream from torch. With both libraries in
a process a kernel for Paddle tensors would run on torch's stream, unordered with Paddle's work. So the driver is
exchanged for the time of a launch, and the one before is put back, whatever happens. Launches for torch tensors are not
touched.

Checked against triton 3.6 and 3.8 as far as a CPU goes: tests/paddle/test_driver.py compiles a kernel and follows its
launch through a stand-in. docs/paddle.md says what is untested.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_launching = threading.RLock()  # the active driver is one for all threads


@functools.cache
def driver() -> Any:
    """The driver for Paddle, made at the first launch.

    Raises: RuntimeError where no CUDA driver is; ImportError without triton.
    """
    import paddle
    from triton.backends.nvidia import driver as nvidia

    class PaddleDriver(nvidia.CudaDriver):
        """Of CudaDriver all that does not ask torch; see the class there for what each attribute is."""

        def __init__(self) -> None:
            self.utils = nvidia.CudaUtils()
            self.launcher_cls = nvidia.CudaLauncher
            self.get_current_device = current_device
            self.set_current_device = paddle.device.set_device
            self.get_current_stream = current_stream
            self.get_device_capability = paddle.device.cuda.get_device_capability

        @staticmethod
        def is_active() -> bool:
            return paddle.is_compiled_with_cuda()

        def get_active_torch_device(self) -> Any:
            return paddle.CUDAPlace(current_device())

        def get_device_interface(self) -> Any:
            return paddle.device.cuda

        def get_empty_cache_for_benchmark(self) -> Any:
            return paddle.empty([64 * 1024 * 1024], dtype="int32")

    return PaddleDriver()


def current_device() -> int:
    """Index of Paddle's current GPU."""
    import paddle

    return int(paddle.device.get_device().rpartition(":")[2])


def current_stream(device: int) -> int:
    """Handle of Paddle's current CUDA stream on a device."""
    import paddle

    return paddle.device.current_stream(paddle.CUDAPlace(device)).stream_base.raw_stream


@contextmanager
def active(device: int) -> Iterator[None]:
    """Launch on this GPU and on Paddle's stream there; afterwards all is as it was."""
    import paddle

    with _launching, paddle.device.device(paddle.CUDAPlace(device)), exchanged(driver()):
        yield


@contextmanager
def exchanged(new: Any) -> Iterator[None]:
    """`new` is Triton's active driver within."""
    from triton.runtime import driver as config

    before: Any = config._active  # None before the first launch; `config.active` would make a driver then, or fail
    config.set_active(new)
    try:
        yield
    finally:
        config.set_active(before)
