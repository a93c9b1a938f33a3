"""The sharding plan, read as data: no devices, no processes."""

from __future__ import annotations

import inspect

import pytest
import spmd_types as spmd
import torch
from torchtitan.distributed.parallel_dims import MeshAxisName
from torchtitan.distributed.spmd_types import spmd_validate_redistributions
from torchtitan.protocols.module import Module

from openkda.integrations.torchtitan.builders import SIZES, model_config
from openkda.integrations.torchtitan.kda import InnerKDA
from openkda.integrations.torchtitan.sharding import set_kimi_linear_sharding_config

TP = MeshAxisName.TP


def planned(*, enable_sp: bool = True, enable_ep: bool = False):
    config = model_config(SIZES["tiny"], attention_backend="masked")
    set_kimi_linear_sharding_config(config, enable_sp=enable_sp, enable_ep=enable_ep)
    return config


@pytest.mark.parametrize("enable_sp", [True, False])
@pytest.mark.parametrize("enable_ep", [True, False])
def test_every_parameter_and_buffer_has_a_place(enable_sp: bool, enable_ep: bool) -> None:
    config = planned(enable_sp=enable_sp, enable_ep=enable_ep)
    with torch.device("meta"):
        model = config.build()
    for name, module in model.named_modules():
        own = [*dict(module.named_parameters(recurse=False)), *dict(module.named_buffers(recurse=False))]
        if own:
            assert module._sharding_config is not None, name
            assert set(own) <= module._sharding_config.state_shardings.keys(), name


def test_every_redistribution_is_one_collective() -> None:
    for name, module, *_ in planned().traverse(Module.Config, recurse=True):
        if module.sharding_config is not None:
            spmd_validate_redistributions(module.sharding_config)
        assert name is not None


def test_kda_is_split_by_heads() -> None:
    kda = planned().layers[0].kda
    by_heads = {"q_proj", "k_proj", "v_proj", "f_b_proj", "b_proj", "g_b_proj", "q_conv1d", "k_conv1d", "v_conv1d"}
    for name in by_heads:
        assert getattr(kda, name).sharding_config.state_shardings["weight"].axis_types[TP] == spmd.S(0), name
    for name in ("f_a_proj", "g_a_proj", "o_norm"):
        assert getattr(kda, name).sharding_config.state_shardings["weight"].axis_types[TP] == spmd.R, name
    assert kda.o_proj.sharding_config.state_shardings["weight"].axis_types[TP] == spmd.S(1)
    for name in ("A_log", "dt_bias"):
        assert kda.decay.sharding_config.state_shardings[name].axis_types[TP] == spmd.S(0)


def test_local_region_names_the_arguments_of_the_operator_in_order() -> None:
    parameters = inspect.signature(InnerKDA.forward).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"]
    plan = planned().layers[0].kda.inner_kda.sharding_config
    assert list(plan.in_src_shardings) == positional
    assert len(plan.local_map.in_grad_placements) == len(positional)
