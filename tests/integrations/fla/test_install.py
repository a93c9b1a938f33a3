"""`install` under torch: the five lines of code written for fla. (Under Paddle: tests/paddle/test_fla.py.)"""

import subprocess
import sys

LINES = """
from fla.modules import FusedRMSNormGated, ShortConvolution
from fla.ops.kda import chunk_kda
from fla.ops.utils.index import prepare_cu_seqlens_from_mask, prepare_lens_from_mask
from fla.utils import tensor_cache
"""
INSTALL = "import openkda.integrations.fla\nopenkda.integrations.fla.install()\n"


def run_fresh(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_five_lines():
    run_fresh(
        "import torch\n" + INSTALL + LINES + "import openkda.integrations.fla as ours\n"
        "assert chunk_kda is ours.chunk_kda and ShortConvolution is ours.ShortConvolution\n"
        "assert FusedRMSNormGated.__module__ == 'openkda.integrations.fla.layers'\n"
        "q = torch.randn(1, 3, 1, 4)\n"
        "chunk_kda(q, q, q, -q.abs(), q[..., 0])\n"
        "assert prepare_cu_seqlens_from_mask(torch.ones(2, 3)).tolist() == [0, 3, 6]\n"
    )


def test_the_other_operators_of_kda():
    run_fresh(
        INSTALL + "from fla.ops.kda import fused_recurrent_kda\nfrom fla.ops.kda.gate import fused_kda_gate\n"
        "import openkda.integrations.fla as ours\n"
        "assert fused_recurrent_kda is ours.fused_recurrent_kda and fused_kda_gate is ours.fused_kda_gate\n"
    )


def test_install_imports_no_library():
    assert (
        run_fresh(INSTALL + "import sys\nprint(*[n for n in ('torch', 'paddle', 'fla') if n in sys.modules])") == "\n"
    )


def test_install_twice_is_install_once():
    run_fresh(INSTALL + "import sys, fla\nopenkda.integrations.fla.install()\nimport fla.ops.kda")


def test_what_is_not_there_is_not_found():
    code = INSTALL + "try:\n    import fla.layers\nexcept ModuleNotFoundError as error:\n    print(error)"
    assert "fla.layers" in run_fresh(code)


def test_a_real_fla_that_is_imported_already_is_refused(tmp_path):
    (tmp_path / "fla.py").write_text("")
    code = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport fla, openkda.integrations.fla as ours\n"
    code += "try:\n    ours.install()\nexcept RuntimeError as error:\n    print(error)"
    message = run_fresh(code)
    assert message.startswith("openkda.integrations.fla: install must be called before fla is imported, got fla from ")
    assert str(tmp_path) in message
