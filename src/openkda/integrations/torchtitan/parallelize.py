"""Apply parallelism to a Kimi Linear model, in torchtitan's order: context, tensor and expert parallelism, activation
checkpointing, compilation of every block, FSDP. Pipelines are cut before by torchtitan, and every stage passes through
here.

FSDP is applied on one process as well: it is what gives torchtitan mixed precision.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.context_parallel import apply_cp_to_forward
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.distributed.full_dtensor import resolve_fsdp_mesh
from torchtitan.tools import utils

from openkda.integrations.torchtitan import cpu
from openkda.integrations.torchtitan.context_parallel import ORDERS, ContextParallel
from openkda.integrations.torchtitan.kda import DecayParameters
from openkda.integrations.torchtitan.mla import MLA
from openkda.integrations.torchtitan.model import Experts, KimiLinearModel


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
    _reject_unsupported(parallel_dims, parallelism)
    compiles = compile_config.enable and "model" in compile_config.components
    if compiles:
        _reject_what_cannot_compile(model, parallel_dims)
    if parallel_dims.cp_enabled:
        _apply_context_parallel(model, parallel_dims, parallelism)
    if parallel_dims.tp_enabled or parallel_dims.ep_enabled:
        model.parallelize(parallel_dims)
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    if compiles:
        apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)
    _apply_fsdp(model, parallel_dims, training, parallelism)
    return model


def _reject_unsupported(parallel_dims: ParallelDims, parallelism: ParallelismConfig) -> None:
    backend = parallelism.spmd_backend
    if backend == "full_dtensor" or (backend != "partial_dtensor" and parallel_dims.world_size > 1):
        raise NotImplementedError(
            f"kimi_linear: parallelism.spmd_backend must be 'partial_dtensor', got {backend!r}; "
            "'spmd_types' runs on one process"
        )
    if parallel_dims.cp_enabled and parallelism.context_parallel_load_balancer not in ORDERS:
        raise NotImplementedError(
            "kimi_linear: parallelism.context_parallel_load_balancer must be 'headtail' or None, got "
            f"{parallelism.context_parallel_load_balancer!r}; KDA needs to know which rank holds which tokens"
        )


def _reject_what_cannot_compile(model: KimiLinearModel, parallel_dims: ParallelDims) -> None:
    way_out = "or compile the loss only, with --compile.components loss"
    if parallel_dims.cp_enabled:
        raise NotImplementedError(
            "kimi_linear: compile.components must not contain 'model' with context parallelism, whose cuts are read on "
            f"the host, got context_parallel_degree {parallel_dims.cp}; turn one of them off, {way_out}"
        )
    for module in model.modules():
        if isinstance(module, Experts) and module.expert_dtype != "bfloat16":
            raise NotImplementedError(
                "kimi_linear: expert_dtype must be 'bfloat16' for compile.components with 'model', got "
                f"{module.expert_dtype!r}, whose grouped product torch cannot trace; {way_out.removeprefix('or ')}"
            )


def _apply_context_parallel(
    model: KimiLinearModel, parallel_dims: ParallelDims, parallelism: ParallelismConfig
) -> None:
    """Before tensor parallelism, so that attention's gathering of keys runs on local tensors."""
    mesh = parallel_dims.get_mesh("cp")
    if model.batch_invariant:
        raise NotImplementedError(
            "kimi_linear: parallelism.context_parallel_degree must be 1 with batch_invariant, got "
            f"{parallel_dims.cp}; where a row is cut changes its sums"
        )
    model.context_parallel = ContextParallel(mesh.get_group(), ORDERS[parallelism.context_parallel_load_balancer])
    attention = [cast(torch.nn.Module, m.inner_attention) for m in model.modules() if isinstance(m, MLA)]
    if attention:
        apply_cp_to_forward(attention, mesh)


def _apply_fsdp(
    model: KimiLinearModel, parallel_dims: ParallelDims, training: TrainingConfig, parallelism: ParallelismConfig
) -> None:
    expert_mesh = None
    if parallelism.spmd_backend == "spmd_types":
        mesh, mesh_dims = resolve_fsdp_mesh(parallel_dims)
    else:
        replicas = ["dp_replicate"] if parallel_dims.dp_replicate_enabled else []
        mesh, mesh_dims = parallel_dims.get_mesh([*replicas, "fsdp"]), None
        if parallel_dims.ep_enabled:
            expert_mesh = parallel_dims.get_optional_mesh([*replicas, "efsdp"])
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
        edp_mesh=expert_mesh,
        dp_mesh_dims=mesh_dims,
        enable_symm_mem=parallelism.enable_fsdp_symm_mem,
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
