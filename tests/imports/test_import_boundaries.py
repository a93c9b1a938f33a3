"""What an import brings along. Every case runs in a fresh interpreter: this process has long imported torch."""

import subprocess
import sys
import textwrap

import pytest

FRAMEWORKS = ("torch", "triton", "paddle", "transformers", "torchtitan", "fla", "numpy")

#: The names that users rely on. A name may be added; taking one away is a breaking change.
PUBLIC = (
    "chunk_kda",
    "recurrent_kda",
    "kda_gate",
    "kda_gate_cumsum",
    "l2norm",
    "causal_conv1d",
    "causal_conv1d_update",
    "rms_norm_gated",
    "explain",
    "KimiDeltaAttention",
    "ShortConvolution",
    "FusedRMSNormGated",
    "prepare_lens_from_mask",
    "prepare_cu_seqlens_from_mask",
    "prepare_chunk_indices",
    "tensor_cache",
)

#: A finder that answers for the named packages before any other does: they are then as good as not installed.
BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}} (blocked)", name=name)
sys.meta_path.insert(0, Blocked())
"""


def run_fresh(code: str, *, without: tuple[str, ...] = ()) -> str:
    """Run code in a new interpreter in which the packages of `without` cannot be imported; returns what it printed."""
    script = (BLOCKED.format(names=set(without)) if without else "") + textwrap.dedent(code)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    "module",
    [
        "openkda",
        "openkda.errors",
        "openkda.checks",
        "openkda.frameworks",
        "openkda.packing",
        "openkda.kda.reference",
        "openkda.kda.eager",
        "openkda.kda.gate",
        "openkda.kda.chunk",
        "openkda.kda.recurrent",
        "openkda.conv",
        "openkda.norm",
        "openkda.cli.main",
    ],
)
def test_import_brings_no_tensor_library(module: str):
    # The operators take the library from the tensors they are given, so none is needed to import them.
    loaded = run_fresh(f"import sys, {module}\nprint(*[n for n in {FRAMEWORKS} if n in sys.modules])")
    assert loaded.split() == []


@pytest.mark.parametrize(
    "module", ["openkda", "openkda.kda.chunk", "openkda.kda.recurrent", "openkda.conv", "openkda.norm"]
)
def test_import_works_when_no_tensor_library_is_installed(module: str):
    run_fresh(f"import {module}", without=FRAMEWORKS)


def test_operators_resolve_when_no_tensor_library_is_installed():
    operators = [name for name in PUBLIC if name[0].islower()]
    run_fresh(
        f"import openkda\nfor name in {operators}: assert callable(getattr(openkda, name)), name", without=FRAMEWORKS
    )


def test_layer_without_torch_names_what_to_install():
    message = run_fresh(
        """
        import openkda
        try:
            openkda.KimiDeltaAttention
        except ImportError as error:
            print(error)
        """,
        without=FRAMEWORKS,
    )
    assert "torch" in message


def test_every_public_name_resolves():
    out = run_fresh(
        """
        import openkda
        for name in openkda.__all__:
            value = getattr(openkda, name)
            assert value is getattr(openkda, name), f"{name} changes between two accesses"
        print(*openkda.__all__)
        """
    )
    assert set(PUBLIC) <= set(out.split())


def test_dir_lists_every_public_name():
    out = run_fresh("import openkda\nprint(*dir(openkda))")
    assert set(PUBLIC) <= set(out.split())


def test_unknown_name_raises_and_lists_what_there_is():
    message = run_fresh(
        """
        import openkda
        try:
            openkda.chunk_kdaa
        except AttributeError as error:
            print(error)
        """
    )
    assert "chunk_kdaa" in message
    missing = [name for name in PUBLIC if name not in message]
    assert not missing, f"the message does not name {missing}: {message}"


def test_using_an_operator_imports_only_the_library_of_its_tensors():
    others = tuple(name for name in FRAMEWORKS if name not in ("torch", "numpy"))
    loaded = run_fresh(
        f"""
        import sys, torch
        before = set(sys.modules)
        import openkda
        q, v = torch.randn(1, 5, 1, 8), torch.randn(1, 5, 1, 8)
        openkda.chunk_kda(q, q, v, -v.abs(), v[..., 0].sigmoid())
        print(*[n for n in {others} if n in sys.modules and n not in before])
        """
    )
    assert loaded.split() == []
