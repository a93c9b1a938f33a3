"""The recurrent kernel compiles for GPUs that are not here, without spills, and reads and writes states in 16 bytes."""

import re

import pytest

pytest.importorskip("triton")

from openkda.kda.kernels import recurrent, tuning
from openkda.testing.compile import compile_for, resources

TOKENS = ("q", "k", "v", "g", "beta")
STRIDES = [f"{x}_{axis}" for x in "qkvgb" for axis in "bth"]


def compiled(arch, tile, *, K=128, V=128, pool="fp32", v_first=False, packed=False):
    kernel = recurrent._recurrent_fwd_kernel
    signature = dict.fromkeys((*TOKENS, "o"), "*bf16") | dict.fromkeys(("A_log", "dt_bias"), "*fp32")
    signature |= dict.fromkeys(("initial_state", "final_state"), "*" + pool) | {"slots": "*i32", "cu_seqlens": "*i32"}
    strides = [*STRIDES, "i_slot", "i_head", "i_k", "i_v", "f_slot", "f_head", "f_k", "f_v"]
    signature |= dict.fromkeys(("T", "N", "HV", "group", *strides), "i32")
    signature |= dict.fromkeys(("scale", "lower_bound", "beta_scale"), "fp32")
    width = lambda n: 1 << (n - 1).bit_length()  # noqa: E731
    constants = {"K": K, "V": V, "BK": width(K), "BV": min(tile["BV"], width(V)), "ONE": not packed}
    constants |= {"GATE": "softplus", "L2NORM": True, "BETA_SIGMOID": True}
    constants |= dict.fromkeys(("i_k", "f_k") if v_first else ("i_v", "f_v"), 1)
    if not packed:
        constants["cu_seqlens"] = None
    signature = {n: t for n, t in signature.items() if n not in constants}
    aligned = tuple(n for n in strides if n not in constants)
    num_warps = tile["num_warps"] * (2 if K > 128 else 1)
    return compile_for(kernel, signature, constants, arch, num_warps=num_warps, aligned=aligned)


@pytest.mark.parametrize("arch", tuning.FAMILIES, ids=lambda arch: f"sm_{arch}")
@pytest.mark.parametrize("call", [{}, {"packed": True}, {"K": 256, "V": 256}], ids=["one", "packed", "wide"])
def test_recurrent_does_not_spill(arch, call):
    for v_first, stage in enumerate(("recurrent_fwd", "recurrent_fwd_v_first")):
        for _, tile in tuning.TABLES[stage][arch]:
            used = resources(compiled(arch, tile, v_first=bool(v_first), **call), arch)
            assert used.spill_stores == used.spill_loads == used.stack == 0, used


@pytest.mark.parametrize("v_first", [False, True], ids=["K_first", "V_first"])
@pytest.mark.parametrize("pool, width", [("fp32", "v4.b32"), ("bf16", "v4.b32")])
def test_recurrent_moves_states_in_16_bytes(pool, width, v_first):
    _, tile = tuning.TABLES["recurrent_fwd_v_first" if v_first else "recurrent_fwd"][90][-1]
    ptx = compiled(90, tile, pool=pool, v_first=v_first).asm["ptx"]
    size = 4 if pool == "fp32" else 2
    accesses = 128 * tile["BV"] * size // (16 * 32 * tile["num_warps"])  # of one thread, to one state tile
    assert len(re.findall(r"ld\.global\S*\." + width, ptx)) >= accesses
    assert len(re.findall(r"st\.global\S*\." + width, ptx)) >= accesses
