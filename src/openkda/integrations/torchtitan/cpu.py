"""Everything torchtitan 0.3.0 needs to train on a CPU with torch 2.13, in one place.

torchtitan assumes an accelerator. install() makes it run without one, by changing torchtitan only and leaving torch
alone; MaskedAttention stands in for FlexAttention. What each piece works around, and when it can go, is written at the
piece. tests/integrations/torchtitan/test_cpu.py fails when a piece is no longer needed.
"""

from __future__ import annotations

import os
import resource
import sys
import warnings
from collections import OrderedDict
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torchtitan.distributed import utils as titan_distributed
from torchtitan.models.common.attention import FlexAttention
from torchtitan.protocols.module import Module
from torchtitan.tools import utils as titan_utils

if TYPE_CHECKING:
    from torchtitan.distributed import ParallelDims

_installed = False


def install() -> None:
    """Make torchtitan usable on this machine; call before a Trainer is built, as often as you like.

    On a machine with an accelerator only the process-group timeout is replaced.
    """
    global _installed
    if _installed:
        return
    _installed = True
    _replace_set_pg_timeouts()
    if not torch.accelerator.is_available():
        _use_cpu_device()
        _draw_whole_parameters()
        _silence_warnings()


def _replace_set_pg_timeouts() -> None:
    """torchtitan calls torch.distributed.set_timeout after the first step.

    Needed because torch 2.13 has no such function (nightly builds do), on GPUs as well.
    Can go with the first torch release that has torch.distributed.set_timeout.
    """
    if hasattr(dist, "set_timeout"):
        return

    def set_pg_timeouts(timeout: timedelta, parallel_dims: ParallelDims) -> None:
        # All ranks must be past their slow first step before a shorter timeout holds for any of them. Gloo's barrier
        # takes no device_ids; NCCL's wants one.
        on_cpu = titan_utils.device_type == "cpu"
        dist.barrier(device_ids=None if on_cpu else [titan_utils.device_module.current_device()])
        titan_utils.device_module.synchronize()
        meshes = parallel_dims.get_all_one_dimensional_meshes().values()
        for group in [*(mesh.get_group() for mesh in meshes), None]:
            distributed_c10d._set_pg_timeout(timeout, group)

    titan_distributed.set_pg_timeouts = set_pg_timeouts


class CPUDevice(SimpleNamespace):
    """The part of torch.cuda's interface that torchtitan uses, for a CPU. Memory is that of the process."""

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        pass

    def synchronize(self, device: Any = None) -> None:
        pass

    def get_device_name(self, device: Any = None) -> str:
        return "CPU"

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return SimpleNamespace(name="CPU", total_memory=total)

    def memory_stats(self, device: Any = None) -> OrderedDict[str, int]:
        # Kilobytes on Linux, bytes on macOS.
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return OrderedDict({"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak})

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        pass

    def empty_cache(self) -> None:
        pass


def _use_cpu_device() -> None:
    """Name the device "cpu", with a device module that answers what torchtitan asks.

    Needed because torchtitan 0.3.0 falls back to "cuda" when there is no accelerator, and torch.cpu lacks set_device,
    memory_stats and others. Can go when torchtitan has a CPU mode (torchtitan issue 1661).
    """
    device_module = CPUDevice()
    titan_utils.device_type, titan_utils.device_module = "cpu", device_module
    # Modules imported earlier hold copies of the two names; those imported later copy the new ones.
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan.") and module is not None:
            if "device_type" in vars(module):
                module.device_type = "cpu"  # pyright: ignore[reportAttributeAccessIssue]
            if "device_module" in vars(module):
                module.device_module = device_module  # pyright: ignore[reportAttributeAccessIssue]
    # Otherwise torchtitan calls lspci and takes the machine for an A100. No peak is known, so utilisation reads 0.
    titan_utils.get_peak_flops = lambda device_name: float("inf")


def _draw_whole_parameters() -> None:
    """Initialise a sharded parameter by drawing all of it and keeping this rank's part.

    Needed because torch 2.13 has no random numbers for sharded tensors on a CPU: every rank would draw the same ones
    for its part, and halves of a weight would be equal. With this a model starts from the same weights in any layout
    without a pipeline, whose stages draw for themselves.
    Can go when DTensor's random operators support CPU meshes.
    """
    init = Module._init_param

    def init_param(self: Module, name: str, parameter: nn.Parameter) -> None:
        if not isinstance(parameter, DTensor) or parameter.device.type != "cpu":
            init(self, name, parameter)
            return
        whole = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype))
        init(self, name, whole)
        size, start = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        mine = whole[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]
        with torch.no_grad():
            parameter.to_local().copy_(mine)

    Module._init_param = init_param  # pyright: ignore[reportAttributeAccessIssue]


def _silence_warnings() -> None:
    """Warnings that a CPU run cannot avoid and that ask nothing of the user.

    Autocast: the router computes its gate under autocast to fp32, which a CPU does not offer and says so at every call;
        the gate follows the dtype of the activations. Can go when torchtitan's router casts by hand.
    set_vital: torchdata's loader calls a function that torch 2.13 deprecates. Can go with torchdata's next release.
    """
    warnings.filterwarnings("ignore", message="In CPU autocast, but the target dtype is not supported")
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated")


def use_sum_reduction(model: nn.Module) -> None:
    """Reduce gradients with plain sums under FSDP.

    Needed because torchtitan sets FSDP's gradient divisor to 1, which torch expresses as a PREMUL_SUM reduction, and
    gloo of torch 2.13 has none. Can go when gloo has it, or FSDP skips the factor 1.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def block_causal_mask(positions_BL: torch.Tensor) -> torch.Tensor:
    """Bool `[B, 1, L, L]`, True where a query (row) may see a key (column): same document, not later.

    A position of 0 starts a document, and so does every row.
    """
    L = positions_BL.shape[1]
    document_BL = (positions_BL == 0).cumsum(1)
    same_BLL = document_BL[:, :, None] == document_BL[:, None, :]
    causal_LL = torch.ones(L, L, dtype=torch.bool, device=positions_BL.device).tril()
    return (same_BLL & causal_LL)[:, None]


class MaskedAttention(FlexAttention):
    """Scaled dot-product attention with a boolean mask, in place of FlexAttention.

    Needed because FlexAttention has no backward on a CPU in torch 2.13, and torchtitan compiles it, which wants a C++
    compiler. Runs on every device; its mask is quadratic in memory, so it is for short sequences. Can go when
    FlexAttention trains on a CPU. A subclass, because the trainer builds masks only for FlexAttention and Varlen.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: torch.Tensor | None = None,
        scale: float | None = None,
        **unused: Any,
    ) -> torch.Tensor:
        """Attention with the mask of block_causal_mask; None means causal over the whole row."""
        o_BNLH = F.scaled_dot_product_attention(
            q_BLNH.transpose(1, 2),
            k_BLNH.transpose(1, 2),
            v_BLNH.transpose(1, 2),
            attn_mask=attention_masks,
            is_causal=attention_masks is None,
            scale=scale,
        )
        return o_BNLH.transpose(1, 2)
