"""Code written for fla under Paddle: after `install`, with and without compat, with and without torch."""

import subprocess
import sys

import pytest

LINES = """
from fla.modules import FusedRMSNormGated, ShortConvolution
from fla.ops.kda import chunk_kda
from fla.ops.utils.index import prepare_cu_seqlens_from_mask, prepare_lens_from_mask
from fla.utils import tensor_cache
"""
INSTALL = "import sys, paddle\nimport openkda.integrations.fla\nopenkda.integrations.fla.install()\n"
COMPAT = 'paddle.enable_compat(scope={"fla", "triton"})\n'
OVER = "paddle.disable_compat()\n"
USE = """
x = paddle.randn([1, 5, 8])
x.stop_gradient = False
y, _ = ShortConvolution(8, 4)(x)
q = paddle.reshape(y, [1, 5, 2, 4])
o, _ = chunk_kda(q, q, q, -paddle.abs(q), q[..., 0])
z = FusedRMSNormGated(4, activation="sigmoid")(o, q)
z.sum().backward()
assert x.grad.shape == x.shape
assert prepare_cu_seqlens_from_mask(paddle.ones([2, 3])).tolist() == [0, 3, 6]
assert prepare_lens_from_mask(paddle.ones([2, 3])).tolist() == [3, 3]
"""
NO_TORCH = "import sys\nsys.modules['torch'] = None\n"


@pytest.mark.parametrize("torch", [True, False], ids=["with_torch", "without_torch"])
@pytest.mark.parametrize(
    "order",
    [
        INSTALL + COMPAT + LINES + OVER,
        COMPAT.join(["import paddle\n", INSTALL]) + LINES + OVER,
        INSTALL + COMPAT + "import fla\n" + OVER + LINES,
    ],
    ids=["install_first", "compat_first", "names_after_the_scope"],
)
def test_the_five_lines_in_a_compat_scope(order, torch):
    code = ("" if torch else NO_TORCH) + order + "before = set(sys.modules)\n" + USE
    code += "print(*{n for n in sys.modules if n.startswith(('openkda', 'fla'))} - before)"
    command = [sys.executable, "-W", "ignore", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


def test_the_five_lines_without_compat_and_without_torch():
    command = [sys.executable, "-W", "ignore", "-c", NO_TORCH + INSTALL + LINES + USE]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
