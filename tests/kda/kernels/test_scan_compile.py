"""The scans compile for GPUs that are not here: shared memory fits, and the tuned tiles of sm_90 do not spill."""

import pytest

pytest.importorskip("triton")

from triton.experimental.gluon import language as gl

from openkda.kda.kernels import scan, scan_hopper, tuning
from openkda.testing.compile import SHARED_LIMIT, report

K = V = 128
FP32 = ("decay", "initial_state", "final_state", "dfinal_state", "dinitial_state")
KERNELS = {
    "scan_fwd": scan._scan_fwd_kernel,
    "rescan_fwd": scan._rescan_fwd_kernel,
    "reverse_scan_bwd": scan._reverse_scan_bwd_kernel,
}


def scan_report(stage, arch, tile):
    """Compile one scan, packed, bf16, K = V = 128, as its launcher would with this tile."""
    kernel, BV, TMA = KERNELS[stage], tile["BV"], tile["TMA"]
    tiles = dict.fromkeys(("w", "kg", "qg"), (64, K)) | dict.fromkeys(("u", "v_new", "dv_new"), (64, BV))
    tiles |= {"aqk": (64, 64), "states": (K, BV), "dstates": (K, BV)}
    signature = dict.fromkeys(("o", "do", "checkpoints"), "*bf16") | dict.fromkeys(FP32, "*fp32")
    signature |= {name: f"tensordesc<bf16[{rows}, {cols}]>" if TMA else "*bf16" for name, (rows, cols) in tiles.items()}
    signature |= dict.fromkeys(("cu_seqlens", "groups"), "*i32")
    strides = ("stride_b", "stride_t", "stride_h")
    signature |= dict.fromkeys(("T", "HV", "groups_per_sequence", "chunks_per_sequence", *strides), "i32")
    constants = {"K": K, "V": V, "C": 64, "M": 4, "BK": K, "BV": BV, "V_FIRST": False, "PACKED": True, "TMA": TMA}
    constants |= {"PRECISION": "tf32"}
    names = kernel.arg_names
    return report(
        kernel,
        {n: t for n, t in signature.items() if n in names},
        {n: c for n, c in constants.items() if n in names},
        arch,
        num_warps=tile["num_warps"],
        num_stages=tile["num_stages"],
        aligned=strides,
    )


@pytest.mark.parametrize("stage", KERNELS)
def test_scans_do_not_spill_on_sm_90(stage):
    for _, tile in tuning.TABLES[stage][90]:
        used = scan_report(stage, 90, tile)
        assert used.target == "sm_90a"
        assert used.spill_stores == used.spill_loads == used.wgmma_notes == 0, used
        assert used.shared <= SHARED_LIMIT[90], used


@pytest.mark.parametrize("arch", [80, 89, 100], ids=lambda arch: f"sm_{arch}")
@pytest.mark.parametrize("stage", KERNELS)
def test_scans_fit_shared_memory_elsewhere(stage, arch):
    for _, tile in tuning.TABLES[stage][arch]:
        used = scan_report(stage, arch, tile)
        assert used.shared <= SHARED_LIMIT[arch], used


def hopper_report(stage, tile):
    kernel = getattr(scan_hopper, f"_{stage}_hopper_kernel")
    BV = tile["BV"]
    tiles = dict.fromkeys(("w_desc", "kg_desc", "qg_desc"), (64, 128)) | dict.fromkeys(("o_desc", "do_desc"), (64, BV))
    tiles |= dict.fromkeys(("u_desc", "dv_desc"), (64, BV)) | {"aqk_desc": (64, 64)}
    tiles |= dict.fromkeys(("checkpoints_desc", "ds_desc"), (128, BV))
    signature = {}
    for name, shape in tiles.items():
        layout = gl.NVMMASharedLayout.get_default_for(list(shape), gl.bfloat16)
        signature[name] = f"tensordesc<bf16{list(shape)},{layout!r}>"
    flat = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    signature |= {"decay_desc": f"tensordesc<fp32[128],{flat!r}>", "o": "*bf16", "cu_seqlens": "*i64"}
    signature |= dict.fromkeys(FP32[1:], "*fp32") | dict.fromkeys(("T", "HV"), "i32")
    constants = {**tile, "M": 4, "INITIAL": True, "FINAL": True, "CHECKPOINTS": True, "V_FIRST": False, "PACKED": True}
    names = kernel.arg_names
    return report(
        kernel,
        {n: t for n, t in signature.items() if n in names},
        {n: c for n, c in constants.items() if n in names},
        90,
        num_warps=BV // 16,
    )


@pytest.mark.parametrize("stage", ["scan_fwd", "reverse_scan_bwd"])
def test_hopper_scans_do_not_spill(stage):
    for _, tile in tuning.TABLES[stage + "_hopper"][90]:
        used = hopper_report(stage, tile)
        assert used.spill_stores == used.spill_loads == used.wgmma_notes == 0, used
        assert used.shared <= SHARED_LIMIT[90], used
