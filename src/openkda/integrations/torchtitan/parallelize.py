"""Apply activation checkpointing and FSDP to a Kimi Linear model; say clearly what is not supported yet.

FSDP is applied on one process as well: it is what gives torchtitan mixed precision.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.distributed.full_dtensor import resolve_fsdp_mesh
from torchtitan.tools import utils

from openkda.integrations.torchtitan import cpu
from openkda.integrations.torchtitan.kda import DecayParameters
from openkda.integrations.torchtitan.model import KimiLinearModel


def parallelize_kimi_linear(
    model: KimiLinearModel,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compile_config: CompileConfig,
    ac_config: ActivationCheckpointingConfig | None,
    dump_folder: str,
) -> KimiLinearModel:
    """torchtitan's parallelize function; the model should still be on the meta device.

    Raises: NotImplementedError for a combination that has not been shown to train correctly.
    """
    _reject_unsupported(parallel_dims, parallelism, compile_config)
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    _apply_fsdp(model, parallel_dims, training, parallelism)
    return model


def _reject_unsupported(
    parallel_dims: ParallelDims, parallelism: ParallelismConfig, compile_config: CompileConfig
) -> None:
    degrees = {
        "expert_parallel_degree": parallel_dims.ep,  # first: its ranks are also counted by another degree
        "data_parallel_replicate_degree": parallel_dims.dp_replicate,
        "data_parallel_shard_degree": parallel_dims.dp_shard,
        "tensor_parallel_degree": parallel_dims.tp,
        "context_parallel_degree": parallel_dims.cp,
        "pipeline_parallel_degree": parallel_dims.pp,
    }
    for name, degree in degrees.items():
        if degree > 1:
            raise NotImplementedError(
                f"kimi_linear: parallelism.{name} must be 1, got {degree}; only one process is supported so far"
            )
    if parallelism.spmd_backend == "full_dtensor":
        raise NotImplementedError(
            "kimi_linear: parallelism.spmd_backend must be 'spmd_types' or 'partial_dtensor', got 'full_dtensor'"
        )
    if compile_config.enable and "model" in compile_config.components:
        raise NotImplementedError(
            "kimi_linear: compile.components must not contain 'model' yet, got "
            f"{compile_config.components}; compile the loss only with --compile.components loss"
        )


def _apply_fsdp(
    model: KimiLinearModel, parallel_dims: ParallelDims, training: TrainingConfig, parallelism: ParallelismConfig
) -> None:
    if parallelism.spmd_backend == "spmd_types":
        mesh, mesh_dims = resolve_fsdp_mesh(parallel_dims)
    else:
        mesh, mesh_dims = parallel_dims.get_mesh(["fsdp"]), None
    _shard_decay_parameters(model, mesh, mesh_dims, training)
    apply_fsdp_to_decoder(
        model,
        mesh,
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        pp_enabled=parallel_dims.pp_enabled,
        cpu_offload=training.enable_cpu_offload,
        reshard_after_forward_policy=parallelism.fsdp_reshard_after_forward,
        ep_degree=parallel_dims.ep,
        dp_mesh_dims=mesh_dims,
    )
    if utils.device_type == "cpu":
        cpu.use_sum_reduction(model)


def _shard_decay_parameters(model: KimiLinearModel, mesh: Any, mesh_dims: Any, training: TrainingConfig) -> None:
    """A_log and dt_bias of all layers as one FSDP unit in fp32; the units of the blocks, made later, leave them out.

    The unit is gathered by the model, before its blocks, and not by hooks on these modules: inside a block such hooks
    would run within activation checkpointing, and selective checkpointing fails when the recomputation does not repeat
    the operators of the forward one by one.
    """
    units: list[torch.nn.Module] = [module for module in model.modules() if isinstance(module, DecayParameters)]
    if not units:
        return
    options: dict[str, Any] = {"mesh": mesh}
    if mesh_dims is not None:
        options["dp_mesh_dims"] = mesh_dims
    if training.enable_cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(units, mp_policy=policy, **options)
    unit = cast(FSDPModule, units[0])  # the modules of a list share one unit

    def gather(module: torch.nn.Module, args: Any) -> None:
        unit.unshard()

    def release_without_backward(module: torch.nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            unit.reshard()  # with a backward, FSDP does this at its end

    model.register_forward_pre_hook(gather)
    model.register_forward_hook(release_without_backward)
