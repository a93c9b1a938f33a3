"""The convolution's kernels compile for GPUs that are not here: nothing spills, rows move 16 or 8 bytes a thread."""

import re

import pytest

pytest.importorskip("triton")

from openkda.conv.kernels import backward, forward, tuning, update
from openkda.kda.kernels.partials import _sum_partials_kernel
from openkda.testing.compile import SHARED_LIMIT, compile_for, report, resources

KERNELS = {"conv_fwd": forward._conv_fwd_kernel, "conv_bwd": backward._conv_bwd_kernel}
STATES = {
    "final_state": forward._final_state_kernel,
    "initial_state_bwd": backward._initial_state_bwd_kernel,
    "conv_update": update._conv_update_kernel,
}
STRIDES = ("stride_xb", "stride_xt", "stride_db", "stride_dt", "stride_xn")
INTEGERS = ("T", "N", "total", "rows", "C", *STRIDES)


def arguments(kernel, W, packed, states, **constants):
    """Signature and constants as a launch makes them, bf16; a bias comes with states here."""
    constants |= {"W": W, "SILU": True, "PACKED": packed, "DBIAS": states}
    absent = [] if states else ["bias", "initial_state", "dfinal_state"]
    constants |= dict.fromkeys(absent if packed else [*absent, "cu_seqlens"])
    signature = dict.fromkeys(INTEGERS, "i32") | {"partials": "*fp32", "cu_seqlens": "*i64", "indices": "*i64"}
    names = kernel.arg_names
    signature = {n: signature.get(n, "*bf16") for n in names if n not in constants}
    return signature, {n: c for n, c in constants.items() if n in names}


# (stage, packed, states): the calls that take each row of the table.
CALLS = [
    ("conv_fwd", False, False), ("conv_fwd_more", False, True), ("conv_fwd_more", True, False),
    ("conv_fwd_more", True, True), ("conv_bwd", False, False), ("conv_bwd", True, False),
    ("conv_bwd_more", False, True), ("conv_bwd_more", True, True),
]  # fmt: skip


def compiled(stage, arch, W, packed, states):
    settings = tuning.TABLES[stage][arch]
    options = {n: settings[n] for n in ("num_warps", "maxnreg") if n in settings}
    kernel = KERNELS[stage.removesuffix("_more")]
    signature, constants = arguments(kernel, W, packed, states, BC=settings["BC"])
    return compile_for(kernel, signature, constants, arch, num_stages=3, aligned=("C", *STRIDES), **options)


@pytest.mark.parametrize("arch", [80, 89, 90, 100], ids=lambda arch: f"sm_{arch}")
@pytest.mark.parametrize("stage, packed, states", CALLS)
def test_tuned_passes_do_not_spill_and_move_whole_vectors(stage, packed, states, arch):
    settings = tuning.TABLES[stage][arch]
    code = compiled(stage, arch, 4, packed, states)
    used = resources(code, arch)
    assert used.spill_stores == used.spill_loads == 0, used
    assert used.shared <= SHARED_LIMIT[arch], used
    words = settings["BC"] // settings["num_warps"] // 32 // 2  # of 4 bytes of a row, a thread
    stores = re.findall(r"st\.global\.v(\d)\.b32", code.asm["ptx"])
    assert stores.count(str(words)) >= 4, stores  # the four rows of the loop


@pytest.mark.parametrize("W", [2, 3])
@pytest.mark.parametrize("stage, packed, states", CALLS)
def test_narrower_filters_do_not_spill(stage, packed, states, W):
    used = resources(compiled(stage, 90, W, packed, states), 90)
    assert used.spill_stores == used.spill_loads == 0, used


@pytest.mark.parametrize("arch", [80, 89, 90, 100], ids=lambda arch: f"sm_{arch}")
@pytest.mark.parametrize("stage", STATES)
def test_passes_over_states_do_not_spill(stage, arch):
    kernel = STATES[stage]
    signature, constants = arguments(kernel, 4, True, True, BC=1024 if stage == "final_state" else 512)
    used = report(kernel, signature, constants, arch, aligned=("C", *STRIDES))
    assert used.spill_stores == used.spill_loads == 0, used


@pytest.mark.parametrize("arch", [80, 89, 90, 100], ids=lambda arch: f"sm_{arch}")
def test_sums_of_partials_do_not_spill(arch):
    for BP, BC in ((32, 64), (256, 16)):
        signature = {"partials": "*fp32", "out": "*bf16"} | dict.fromkeys(("P", "C", "first"), "i32")
        constants = {"ROWS": 5, "J": 4, "BP": BP, "BC": BC}
        used = report(_sum_partials_kernel, signature, constants, arch, aligned=("C",))
        assert used.spill_stores == used.spill_loads == 0, used
