"""The Gluon kernels of the chunk stages compile for sm_90: they fit a multiprocessor, and spill next to nothing."""

import pytest

pytest.importorskip("triton")

from triton.experimental.gluon import language as gl

from openkda.kda.kernels import gradients_values_hopper, prepare_hopper, recompute_hopper
from openkda.testing.compile import SHARED_LIMIT, report

KERNELS = {
    "prepare_fwd": (prepare_hopper._prepare_fwd_hopper_kernel, 4),
    "recompute_fwd": (recompute_hopper._recompute_fwd_hopper_kernel, 8),
    "values_bwd": (gradients_values_hopper._values_bwd_hopper_kernel, 4),
}
SQUARES, STATES = ("a", "aqk", "wq", "wk"), ("s", "ds")
TYPES = dict.fromkeys(("beta", "dv", "dbeta"), "*bf16") | {"row_norms": "*i64"}
TYPES |= dict.fromkeys(("A_log", "dt_bias", "decay", "norms", "ends", "row_beta"), "*fp32") | {"chunks": "*i32"}
TYPES |= dict.fromkeys(("scale", "lower_bound", "beta_scale"), "fp32")
FLAGS = {"L2NORM": True, "BETA_SIGMOID": True}


def tile(name):
    rows = 128 if name in STATES else 64
    shape = [rows, 64 if name in SQUARES else 128]
    return f"tensordesc<bf16{shape},{gl.NVMMASharedLayout.get_default_for(shape, gl.bfloat16)!r}>"


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("gate", ["softplus", "bounded"])
@pytest.mark.parametrize("stage", KERNELS)
def test_hopper_kernels_keep_their_numbers_in_registers(stage, gate, packed):
    kernel, num_warps = KERNELS[stage]
    constants = {n: c for n, c in {**FLAGS, "GATE": gate, "PACKED": packed}.items() if n in kernel.arg_names}
    if stage == "values_bwd":
        if gate == "bounded":
            pytest.skip("knows no gate")
    names = [n for n in kernel.arg_names if n not in constants]
    signature = {n: tile(n.removesuffix("_desc")) if n.endswith("_desc") else TYPES.get(n, "i32") for n in names}
    used = report(kernel, signature, constants, 90, num_warps=num_warps)
    assert used.target == "sm_90a"
    assert max(used.spill_stores, used.spill_loads) <= 96, used  # put aside once an item
    programs = 3 if stage == "prepare_fwd" else 1  # a multiprocessor, of which each keeps 1 KB of shared memory
    assert programs * (used.shared + 1024) <= SHARED_LIMIT[90] + 1024, used
