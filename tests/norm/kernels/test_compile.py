"""The normalisations' kernels compile for GPUs that are not here: nothing spills, up to the widest row."""

import pytest

pytest.importorskip("triton")

from openkda.norm.api import TRITON_WIDTH
from openkda.norm.kernels import l2norm, rms_norm_gated, tuning
from openkda.testing.compile import SHARED_LIMIT, report

KERNELS = {
    "l2norm_fwd": l2norm._l2norm_fwd_kernel,
    "l2norm_bwd": l2norm._l2norm_bwd_kernel,
    "rms_norm_gated_fwd": rms_norm_gated._rms_norm_gated_fwd_kernel,
    "rms_norm_gated_bwd": rms_norm_gated._rms_norm_gated_bwd_kernel,
}


@pytest.mark.parametrize("arch", [80, 89, 90, 100], ids=lambda arch: f"sm_{arch}")
@pytest.mark.parametrize("stage", KERNELS)
@pytest.mark.parametrize("width", [128, TRITON_WIDTH])
def test_norms_do_not_spill(stage, arch, width):
    kernel = KERNELS[stage]
    _, options = tuning.cut(tuning.TABLES[stage][arch], rows=10**6, width=width)
    constants = {"D": width, "SILU": True, "BR": options.pop("BR"), "BD": options.pop("BD")}
    constants = {n: c for n, c in constants.items() if n in kernel.arg_names}
    strides = [n for n in kernel.arg_names if n.startswith("stride_") or n.endswith("_inner")]
    signature = dict.fromkeys(strides, "i32") | {"R": "i32", "eps": "fp32", "partials": "*fp32"}
    signature = {n: signature.get(n, "*bf16") for n in kernel.arg_names if n not in constants}
    used = report(kernel, signature, constants, arch, aligned=tuple(strides), **options)
    assert used.spill_stores == used.spill_loads == 0, used
    assert used.shared <= SHARED_LIMIT[arch], used
