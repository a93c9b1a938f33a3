"""A launch from Paddle on a GPU that is not there: a kernel is compiled for sm_90 and its launch followed through a
stand-in for the CUDA driver, which answers with Paddle's device and stream.

What cannot be seen without a GPU: that Paddle's stream and CUDA context are the right ones. docs/paddle.md says so.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import paddle
import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver as config
from triton.tools.tensor_descriptor import TensorDescriptor

from openkda.frameworks import paddle as fw
from openkda.paddle import driver

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="interpreted kernels have no driver")


@triton.jit
def _double(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def _copy_tile(x, y):
    tile = x.load([0, 0])
    tl.store(y + tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :], tile)


LAUNCHES = []  # one list for all drivers: Triton keeps a compiled kernel, and the launcher with it


class StandIn(DriverBase):
    """Compiles for sm_90, loads nothing, and writes down each launch: grid, stream, arguments."""

    def __init__(self, stream):
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: stream
        self.utils = SimpleNamespace(
            load_binary=lambda *args: ("module", "function", 32, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": 232448, "max_num_regs": 65536, "warpSize": 32},
            unload_module=lambda module: None,
        )

        def launcher(src, metadata):
            def launch(*args):
                LAUNCHES.append((args[:3], args[3], args[4:]))

            return launch

        self.launcher_cls = launcher

    @classmethod
    def is_active(cls):
        return True

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def map_python_to_cpp_type(self, ty):
        return ty

    def get_active_torch_device(self):
        raise AssertionError("Paddle's launches must not ask for torch's device")

    def get_benchmarker(self):
        raise AssertionError("nothing is timed at a launch")


def flat(args):
    return [item for arg in args for item in (flat(arg) if isinstance(arg, tuple | list) else [arg])]


@pytest.fixture
def launches(monkeypatch):
    """Paddle's driver and the one before it are stand-ins with streams 1111 and 2222; returns what they launched."""
    LAUNCHES.clear()
    monkeypatch.setattr(driver, "driver", lambda: StandIn(1111))
    monkeypatch.setattr(paddle, "CUDAPlace", lambda index: ("gpu", index))
    monkeypatch.setattr(paddle.device, "device", lambda place: nullcontext())
    before = config._active
    config.set_active(StandIn(2222))
    yield LAUNCHES
    config.set_active(before)


def test_a_launch_goes_to_paddles_stream_and_the_driver_is_restored(launches):
    x, y, before = paddle.ones([100]), paddle.zeros([100]), config.active
    with driver.active(0):
        _double[(2,)](x, y, 100, BLOCK=64)
    assert config.active is before
    _double[(2,)](x, y, 100, BLOCK=64)
    assert [(grid, stream) for grid, stream, _ in launches] == [((2, 1, 1), 1111), ((2, 1, 1), 2222)]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "int64"])
def test_paddle_tensors_are_pointers_of_their_dtype(launches, dtype):
    x = paddle.ones([100]).astype(dtype)
    with driver.active(0):
        compiled = _double[(2,)](x, x, 100, BLOCK=64)
    short = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int32": "i32", "int64": "i64"}[dtype]
    assert compiled.src.signature["x"] == "*" + short
    assert next(item for item in flat(launches[0][2]) if isinstance(item, paddle.Tensor)) is x


def test_tensor_descriptors_of_paddle_tensors(launches):
    x, y = paddle.ones([32, 64]).astype("bfloat16"), paddle.zeros([16, 16]).astype("bfloat16")
    with pytest.raises(AttributeError, match="itemsize"):  # when this passes, descriptor_base can go
        TensorDescriptor(x, [32, 64], [64, 1], [16, 16])
    tiles = TensorDescriptor(fw.descriptor_base(x), [32, 64], [64, 1], [16, 16])
    with driver.active(0):
        compiled = _copy_tile[(1,)](tiles, y)
    assert compiled.src.signature["x"] == "tensordesc<bf16[16, 16]>"
    assert "cp.async.bulk.tensor" in compiled.asm["ptx"]


def test_the_driver_is_restored_after_an_error(launches):
    before = config.active

    def fail():
        with driver.active(0):
            raise RuntimeError("launch failed")

    with pytest.raises(RuntimeError, match="launch failed"):
        fail()
    assert config.active is before


def test_no_driver_before_the_first_launch(launches):
    config.set_active(None)
    with driver.active(0):
        pass
    assert config._active is None  # and none was made, which would fail without a GPU


def test_operators_launch_on_paddles_driver(monkeypatch, launches):
    # on_device is what every launch of the operators stands in.
    x = paddle.ones([4])
    on_gpu = SimpleNamespace(place=SimpleNamespace(is_gpu_place=lambda: True, gpu_device_id=lambda: 3))
    places = []
    monkeypatch.setattr(paddle, "CUDAPlace", places.append)
    with fw.on_device(on_gpu):
        assert config.active.get_current_stream(0) == 1111
    assert places == [3]
    with fw.on_device(x):
        assert config.active.get_current_stream(0) == 2222


def test_the_real_driver_asks_paddle(monkeypatch):
    """All but the CUDA calls: utilities and launcher of Triton are replaced, as both open the CUDA library."""
    from triton.backends.nvidia import driver as nvidia

    monkeypatch.setattr(nvidia, "CudaUtils", lambda: "utils")
    monkeypatch.setattr(paddle.device, "get_device", lambda: "gpu:5")
    monkeypatch.setattr(paddle, "CUDAPlace", lambda index: ("gpu", index))
    stream = SimpleNamespace(stream_base=SimpleNamespace(raw_stream=77))
    monkeypatch.setattr(paddle.device, "current_stream", lambda place: {("gpu", 5): stream}[place])
    monkeypatch.setattr(paddle.device.cuda, "get_device_capability", lambda device: (9, 0))
    made = driver.driver.__wrapped__()
    assert made.get_current_device() == 5
    assert made.get_current_stream(5) == 77
    assert made.get_current_target() == GPUTarget("cuda", 90, 32)
    assert made.launcher_cls is nvidia.CudaLauncher
    assert made.get_active_torch_device() == ("gpu", 5)
