"""Which library an import gets, and which it must not touch. Every case runs in a fresh interpreter.

The incantation is what Paddle tells users of libraries that were written for torch; ours needs none, and must be right
within it all the same.
"""

import subprocess
import sys
import textwrap

import pytest

#: Packages are as good as not installed.
BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}} (blocked)", name=name)
sys.meta_path.insert(0, Blocked())
"""
#: Loss, o and gradients of one call of every operator and layer on Paddle tensors; then nothing of torch may be there.
USE = """
q, v, g = paddle.randn([1, 5, 2, 8]), paddle.randn([1, 5, 2, 8]), -paddle.rand([1, 5, 2, 8])
beta = paddle.rand([1, 5, 2])
q.stop_gradient = False
o, state = chunk_kda(q, q, v, g, beta, output_final_state=True)
y, _ = ShortConvolution(16, 4)(paddle.reshape(o, [1, 5, 16]))
z = FusedRMSNormGated(8, activation="sigmoid")(paddle.reshape(y, [1, 5, 2, 8]), v)
(z.sum() + state.sum()).backward()
assert isinstance(z, paddle.Tensor) and q.grad.shape == q.shape
mask = paddle.to_tensor([[1, 1, 0], [1, 0, 0]])
assert prepare_lens_from_mask(mask).tolist() == [2, 1]
assert prepare_cu_seqlens_from_mask(mask).tolist() == [0, 2, 3]
assert tensor_cache(lambda x: x + 1)(mask).shape == [2, 3]
"""
NAMES = (
    "from openkda import chunk_kda, FusedRMSNormGated, ShortConvolution, prepare_cu_seqlens_from_mask, "
    "prepare_lens_from_mask, tensor_cache\n"
)
INCANTATION = """
import sys
import paddle
paddle.enable_compat(scope={"openkda", "triton"})
import openkda
paddle.disable_compat()
"""
TORCH_USE = """
x = torch.randn(1, 5, 2, 8, requires_grad=True)
o, _ = openkda.chunk_kda(x, x, x, -x.detach().abs(), x[..., 0].sigmoid())
o.sum().backward()
assert isinstance(o, torch.Tensor) and x.grad.shape == x.shape
"""


def run_fresh(code, *, without=()):
    """Run code in a new interpreter in which the packages of `without` cannot be imported; returns what it printed."""
    script = (BLOCKED.format(names=set(without)) if without else "") + textwrap.dedent(code)
    command = [sys.executable, "-W", "ignore", "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    "module", ["openkda", "openkda.frameworks", "openkda.nn", "openkda.nn._rules", "openkda.paddle"]
)
def test_import_brings_no_library(module):
    names = ("torch", "paddle", "triton", "numpy")
    assert run_fresh(f"import sys, {module}\nprint(*[n for n in {names} if n in sys.modules])").split() == []


def test_paddle_only():
    code = "import paddle\nimport openkda\n" + NAMES + USE + "import sys; assert 'torch' not in sys.modules"
    run_fresh(code, without=("torch", "triton", "transformers", "torchtitan", "fla"))


def test_paddle_only_binds_the_layers_to_paddle():
    code = """
    import openkda
    from openkda import KimiDeltaAttention
    import paddle, openkda.paddle.nn
    assert KimiDeltaAttention is openkda.paddle.nn.KimiDeltaAttention
    """
    run_fresh(code, without=("torch",))


def test_torch_only():
    code = "import sys, torch, openkda\n" + TORCH_USE
    code += "assert openkda.KimiDeltaAttention.__module__ == 'openkda.nn.attention'\nassert 'paddle' not in sys.modules"
    run_fresh(code, without=("paddle",))


@pytest.mark.parametrize("first, second", [("torch", "paddle"), ("paddle", "torch")])
def test_both_in_either_order(first, second):
    code = f"import {first}\nimport {second}\nimport openkda\n" + TORCH_USE
    code += NAMES.replace("FusedRMSNormGated, ShortConvolution, ", "")
    code += "from openkda.paddle.nn import FusedRMSNormGated, ShortConvolution\n" + USE + TORCH_USE
    code += "assert openkda.KimiDeltaAttention.__module__ == 'openkda.nn.attention'\n"
    run_fresh(code)


def test_the_incantation_without_torch():
    code = INCANTATION + NAMES + USE
    code += "assert 'torch' not in sys.modules and 'triton' not in sys.modules\n"
    code += "assert openkda.KimiDeltaAttention.__module__ == 'openkda.paddle.nn.attention'\n"
    run_fresh(code, without=("torch",))


@pytest.mark.parametrize("before", ["", "import torch\n"], ids=["torch_later", "torch_before"])
def test_the_incantation_with_torch(before):
    code = before + INCANTATION
    if not before:
        code += "assert 'torch' not in sys.modules\n"
    code += NAMES + USE + "import torch\nassert torch.__name__ == 'torch' and hasattr(torch, '_C')\n" + TORCH_USE
    code += "assert openkda.ShortConvolution.__module__ == 'openkda.paddle.nn.convolution'\n"
    code += "import openkda.nn\nopenkda.nn.ShortConvolution(4, 4)(torch.zeros(1, 2, 4))\n"
    run_fresh(code)


def test_after_the_incantation_nothing_of_ours_is_imported_any_more():
    code = INCANTATION + "before = {n for n in sys.modules if n.startswith('openkda')}\n" + NAMES + USE
    code += "print(*{n for n in sys.modules if n.startswith('openkda')} - before)"
    assert run_fresh(code).split() == []


def test_a_scope_that_does_not_name_openkda_binds_nothing():
    code = """
    import sys, paddle
    paddle.enable_compat(scope={"triton"})
    import openkda
    paddle.disable_compat()
    assert openkda.ShortConvolution.__module__ == "openkda.nn.convolution"
    """
    run_fresh(code)


def test_compat_for_everything_binds_to_paddle():
    code = """
    import sys, paddle
    paddle.enable_compat()
    import openkda
    assert openkda.ShortConvolution.__module__ == "openkda.paddle.nn.convolution"
    import torch
    o, _ = openkda.chunk_kda(*[torch.zeros([1, 2, 1, 4])] * 4, torch.zeros([1, 2, 1]))
    assert isinstance(o, paddle.Tensor)
    """
    run_fresh(code)


def test_torch_layers_refuse_to_be_built_on_paddles_proxy():
    code = """
    import paddle
    paddle.enable_compat(scope={"openkda"})
    import openkda
    try:
        from openkda.nn import ShortConvolution
    except ImportError as error:
        print(error)
    """
    assert "use openkda.paddle.nn.ShortConvolution" in run_fresh(code)


def test_the_library_never_switches_compat_on():
    code = """
    import paddle
    def refuse(*args, **kwargs):
        raise AssertionError("enable_compat was called")
    import paddle.compat.proxy
    paddle.enable_compat = paddle.compat.proxy.enable_torch_proxy = refuse
    import openkda
    """
    run_fresh(textwrap.dedent(code) + NAMES + USE, without=("torch",))


def test_torch_blocked_by_none_in_sys_modules():
    # What some Paddle packages do so that nothing can import torch.
    code = "import sys\nsys.modules['torch'] = None\nimport paddle, openkda\n" + NAMES + USE
    run_fresh(code)


def test_nothing_installed_says_what_to_install():
    code = """
    import openkda
    try:
        openkda.KimiDeltaAttention
    except ImportError as error:
        print(error)
    """
    assert "torch" in run_fresh(code, without=("torch", "paddle"))
