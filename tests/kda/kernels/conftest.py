"""Kernel tests run on a GPU where there is one, else in Triton's interpreter, in a process with TRITON_INTERPRET=1.

A test that launches kernels has the mark `interpreter`. A test without it (offline compilation, tables) is left out in
the interpreter's process, where `@triton.jit` gives nothing that could be compiled.
"""

from pathlib import Path

import pytest
import torch

from openkda.testing import interpreter

if interpreter.is_on():
    interpreter.install()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    can_launch = interpreter.is_on() or torch.cuda.is_available()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            launches = item.get_closest_marker("interpreter") is not None
            if launches and not can_launch:
                item.add_marker(pytest.mark.skip(reason="launches kernels: needs a GPU, or TRITON_INTERPRET=1"))
            if interpreter.is_on() and not launches:
                item.add_marker(pytest.mark.skip(reason="compiles kernels: runs without TRITON_INTERPRET"))


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels run in this process."""
    return "cpu" if interpreter.is_on() else "cuda"
