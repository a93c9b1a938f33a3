"""Launches of a plan, followed through a stand-in for the CUDA driver: what it gets from the first run, which goes the
ordinary way, and from later ones, which do not, is the same.
"""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.backends.nvidia import driver as nvidia
from triton.compiler.compiler import LazyDict
from triton.runtime import driver as config
from triton.tools.tensor_descriptor import TensorDescriptor

from openkda.frameworks.planned import Planner, Signature
from openkda.kda.kernels import launch as launching
from openkda.kda.kernels.launch import launch


@triton.jit(do_not_specialize=["m"])
def _kernel(x, y, tiles, absent, n, m, stride, scale, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tile = tl.sum(tiles.load([0, 0]).to(tl.float32))
    if absent is None:
        tl.store(y + i * stride, scale * tl.load(x + i, mask=i < n, other=0.0) + tile + m, mask=i < n)


LAUNCHES = []  # one list for all drivers: Triton keeps a compiled kernel, and the launcher with it


def launcher_of(src, metadata):
    """Triton's launcher as it is, but for its C function, which is one that writes down what it gets."""
    made = object.__new__(nvidia.CudaLauncher)
    vars(made).update(
        global_scratch_size=0, profile_scratch_size=0, global_scratch_align=1, profile_scratch_align=1, num_ctas=1,
        launch_cooperative_grid=False, launch_pdl=False, gsan_enabled=False, arg_annotations="types",
        kernel_signature="signature",
    )  # fmt: skip
    signature = dict(src.signature.items())
    made.launch = nvidia.wrap_handle_tensordesc(
        lambda *args: LAUNCHES.append((src, args)), signature, metadata.tensordesc_meta
    )
    return made


def another_launcher(src, metadata):
    return lambda *args: LAUNCHES.append((src, args))


def encoded(*args):
    """Instead of a CUtensorMap."""
    return ("encoded", *map(str, args))


class StandIn(DriverBase):
    """Compiles for sm_90, loads nothing."""

    def __init__(self, launcher):
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 77
        self.launcher_cls = launcher
        self.utils = SimpleNamespace(
            load_binary=lambda *args: ("module", "function", 32, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": 232448, "max_num_regs": 65536, "warpSize": 32},
            unload_module=lambda module: None,
            fill_tma_descriptor=encoded,
            fill_tma_descriptor_tiled=encoded,
        )

    @classmethod
    def is_active(cls):
        return True

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def map_python_to_cpp_type(self, ty):
        return ty

    def get_active_torch_device(self):
        raise AssertionError

    def get_benchmarker(self):
        raise AssertionError


@pytest.fixture(params=[launcher_of, another_launcher])
def warps(request):
    """A driver is active; gives a number of warps, of its own, as compiled kernels keep their launcher."""
    LAUNCHES.clear()
    before = config._active
    config.set_active(StandIn(request.param))
    yield 2 if request.param is launcher_of else 1
    config.set_active(before)


def plan_of(warps, misaligned=0):
    """A plan of one launch, with its memories: x (an input), y (a result), and tiles (a workspace)."""
    planner = Planner(90)
    x = planner.input(Signature((64,), (1,), "float32", misaligned))
    y = planner.result((64,), "float32")
    tiles = planner.empty((32, 64), like=x, dtype="bfloat16")
    descriptor = TensorDescriptor(planner.descriptor_base(tiles[16:]), [16, 64], [64, 1], [16, 16])
    launch(_kernel, 2, x, y[16:], descriptor, None, 48, 5, 16, 0.5, BLOCK=32, num_warps=warps)
    return planner.finish()


def plain(args):
    """What the driver gets, with addresses for pointers, lists and tuples flattened; no hooks nor what they get."""
    for x in args:
        if isinstance(x, list | tuple):
            yield from plain(x)
        elif isinstance(x, TensorDescriptor):
            yield from ("tiles", x.base.data_ptr(), *x.shape, *x.strides, *x.block_shape, x.padding)
        elif x is not None and not isinstance(x, triton.knobs.HookChain | LazyDict):
            yield x.data_ptr() if hasattr(x, "data_ptr") else x


@pytest.mark.parametrize("misaligned", [0, 4])
def test_a_direct_launch_hands_over_what_the_ordinary_one_does(misaligned, warps):
    step = plan_of(warps, misaligned).steps[0]
    memories = [1 << 20, 2 << 20, 3 << 20]
    for _ in range(3):
        step.run(memories, launching.current_stream())
    step.run([4 << 20, 5 << 20, 6 << 20], launching.current_stream())
    (src, ordinary), (_, direct), (_, again), (_, moved) = [(src, list(plain(args))) for src, args in LAUNCHES]
    assert direct == ordinary
    assert again == direct
    assert ordinary[:4] == [2, 1, 1, 77]
    at = {1 << 20 | misaligned: 4 << 20 | misaligned, 2 << 20 | 64: 5 << 20 | 64, 3 << 20 | 2048: 6 << 20 | 2048}
    at |= {str(old): str(new) for old, new in at.items()}
    assert moved != direct
    assert moved == [at.get(x, x) for x in direct]
    assert bool(src.attrs.get((0,))) == (misaligned == 0)  # 16-byte alignment of x
    assert src.signature["m"] == "i32"  # not looked at
    assert src.attrs[4,]  # n is a multiple of 16


def test_who_watches_launches_gets_ordinary_ones(warps):
    seen = []
    step = plan_of(warps).steps[0]
    step.run([1 << 20, 2 << 20, 3 << 20], launching.current_stream())
    hook = seen.append
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        assert launching.current_stream() is None
        step.run([1 << 20, 2 << 20, 3 << 20], launching.current_stream())
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert launching.current_stream() == 77
    assert len(LAUNCHES) == 2
    assert any(x is triton.knobs.runtime.launch_enter_hook for x in LAUNCHES[1][1])


def test_a_launch_of_no_programs_is_none(warps):
    launch(_kernel, 0, torch.zeros(1))
    assert LAUNCHES == []
