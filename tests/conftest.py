"""What all tests share: a fixed number of threads, fixed seeds, and skips that say why.

Kernel tests (those in a folder named `kernels`) run on a GPU where there is one, else in Triton's interpreter, in a
process with TRITON_INTERPRET=1. One that launches kernels has the mark `interpreter`. One without it (offline
compilation, tables) is left out in the interpreter's process, where `@triton.jit` gives nothing that could be compiled.
"""

import importlib.util
import os
import random
from collections.abc import Callable
from typing import Any

import pytest

# One thread unless the environment says otherwise: test shapes are tiny, and sums must not depend on the cores.
# Set before the first import of torch, which reads it once.
os.environ.setdefault("OMP_NUM_THREADS", "1")

HAS_TORCH = importlib.util.find_spec("torch") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


def pytest_configure(config: pytest.Config) -> None:
    if HAS_TORCH:
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        if INTERPRETED:
            from openkda.testing import interpreter

            interpreter.install()


def _cuda_devices() -> int:
    if not HAS_TORCH:
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what cannot run here; `-ra` in pyproject.toml prints each skip with its reason at the end."""
    for item in items:
        if item.path.parent.name == "kernels":
            launches = item.get_closest_marker("interpreter") is not None
            if launches and not INTERPRETED and not _cuda_devices():
                item.add_marker(pytest.mark.skip(reason="launches kernels: needs a GPU, or TRITON_INTERPRET=1"))
            if INTERPRETED and not launches:
                item.add_marker(pytest.mark.skip(reason="compiles kernels: runs without TRITON_INTERPRET"))
    need_gpu = [item for item in items if item.get_closest_marker("gpu") or item.get_closest_marker("multi_gpu")]
    if not need_gpu:
        return
    devices = _cuda_devices()
    for item in need_gpu:
        wanted = 2 if item.get_closest_marker("multi_gpu") else 1
        if devices < wanted:
            item.add_marker(pytest.mark.skip(reason=f"needs {wanted} CUDA device(s), found {devices}"))


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels run in this process."""
    return "cpu" if INTERPRETED else "cuda"


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody has written holds NaN, workspaces of bytes too, so reading it shows."""
    import torch

    from openkda.frameworks import torch as fw

    def poison(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            x = make(*args, **kwargs)
            if torch.compiler.is_compiling() or not (x.is_floating_point() or x.dtype == torch.uint8):
                return x
            return x.fill_(255 if x.dtype == torch.uint8 else float("nan"))  # a float of bytes 255 is a NaN

        return made

    for name in ("empty", "allocate"):
        monkeypatch.setattr(fw, name, poison(getattr(fw, name)))


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Every test starts from the same random state, whichever tests ran before it."""
    random.seed(0)
    if HAS_TORCH:
        import torch

        torch.manual_seed(0)
