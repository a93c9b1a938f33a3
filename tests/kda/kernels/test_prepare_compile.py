"""The prepare stage compiles for GPUs that are not here: shared memory fits, and no loop of the tuned tiles spills."""

import re

import pytest

pytest.importorskip("triton")

import torch
import triton.language as tl

from openkda.kda.kernels import prepare, tables, tuning
from openkda.kda.kernels.common import Activations
from openkda.testing.compile import SHARED_LIMIT, compile_for, report, unwritten_uniform_registers

KERNELS = {"prepare_fwd": prepare._prepare_fwd_kernel, "recompute_fwd": prepare._recompute_fwd_kernel}


def prepare_report(stage, arch, gate):
    """Compile one kernel for packed bf16 input with K = V = 128, as its launcher would with the tuned tile."""
    kernel, tile = KERNELS[stage], tuning.lookup(stage, arch, work=10**6)
    names = kernel.arg_names
    signature = dict.fromkeys(("q", "k", "v", "g", "beta", "w", "u", "kg", "qg", "aqk", "a"), "*bf16")
    signature |= dict.fromkeys(("A_log", "dt_bias", "decay", "norms", "blocks"), "*fp32") | {"chunks": "*i32"}
    signature |= dict.fromkeys(("T", "HV", "group"), "i32")
    signature |= dict.fromkeys(("scale", "lower_bound", "beta_scale"), "fp32")
    strides = [n for n in names if re.fullmatch("[qkvgb]_[bth]", n)]
    signature |= dict.fromkeys(strides, "i32")
    constants = {"K": 128, "V": 128, "KW": 128, "BK": tile.pop("BK"), "BV": tile.pop("BV"), "C": 64, "GATE": gate}
    constants |= {"L2NORM": True, "BETA_SIGMOID": True, "PACKED": True, "PRECISION": "tf32"}
    constants |= dict.fromkeys(("OPERAND", "TERM", "INVERSE"), tl.float16)
    return report(
        kernel,
        {n: t for n, t in signature.items() if n in names},
        {n: c for n, c in constants.items() if n in names},
        arch,
        aligned=tuple(n for n in strides if not n.startswith("b")),
        **tile,
    )


@pytest.mark.parametrize("gate", ["softplus", "bounded"])
@pytest.mark.parametrize("stage", KERNELS)
def test_prepare_keeps_its_loops_in_registers_on_sm_90(stage, gate):
    used = prepare_report(stage, 90, gate)
    assert used.target == "sm_90a"
    assert used.wgmma_notes == 0, used
    # a few words are put aside once, from head to end of a program; what spills in a loop takes hundreds of bytes
    assert max(used.spill_stores, used.spill_loads) <= 96, used
    assert used.shared <= SHARED_LIMIT[90] // 4, used  # shared memory is not what limits programs a multiprocessor


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 89, 100], ids=lambda arch: f"sm_{arch}")
@pytest.mark.parametrize("stage", KERNELS)
def test_prepare_fits_shared_memory_elsewhere(stage, arch):
    used = prepare_report(stage, arch, "softplus")
    assert used.shared <= SHARED_LIMIT[arch], used
    assert max(used.spill_stores, used.spill_loads) <= 96, used


@pytest.mark.parametrize("K, V", [(16, 32), (24, 40), (32, 64)])
def test_recompute_takes_no_address_from_a_register_that_nobody_wrote(K, V):
    """Not only tuned sizes run: with few channels ptxas 12.8 once made W from wherever a register pointed."""
    q, v = torch.empty(1, 64, 1, K, dtype=torch.bfloat16), torch.empty(1, 64, 1, V, dtype=torch.bfloat16)
    act = Activations(1.0, True, "bounded", torch.zeros(1), torch.zeros(1, K), -5.0, True, 1.0)
    settings = prepare._settings("recompute_fwd", q, v, act, tables.make_layout(q, None), None)
    kernel = prepare._recompute_fwd_kernel
    types = dict.fromkeys(("A_log", "dt_bias", "decay", "norms"), "*fp32")
    types |= dict.fromkeys(("q", "k", "v", "g", "beta", "a", "w", "u", "kg", "qg"), "*bf16")
    types |= dict.fromkeys(("scale", "lower_bound", "beta_scale"), "fp32")
    constants = {n: c for n, c in settings.items() if n in kernel.arg_names} | {"chunks": None}
    options = {n: o for n, o in settings.items() if n not in constants}
    signature = {n: types.get(n, "i32") for n in kernel.arg_names if n not in constants}
    assert unwritten_uniform_registers(compile_for(kernel, signature, constants, 90, **options)) == []
