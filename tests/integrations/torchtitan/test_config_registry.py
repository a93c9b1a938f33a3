"""The named training configurations."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import ConfigManager
from torchtitan.trainer import Trainer

from openkda.integrations import torchtitan as integration
from openkda.integrations.torchtitan import config_registry

NAMES = config_registry.__all__


@pytest.mark.parametrize("name", NAMES)
def test_every_configuration_builds_its_model_on_the_meta_device(name: str) -> None:
    config: Trainer.Config = getattr(config_registry, name)()
    assert config.model_spec is not None
    config.model_spec.model.update_from_config(config=config)
    with torch.device("meta"):
        config.model_spec.model.build().verify_module_protocol()


@pytest.mark.parametrize("name", NAMES)
def test_launcher_finds_the_configuration_and_takes_options(name: str) -> None:
    argv = ["--module", "openkda.integrations.torchtitan", "--config", name, "--training.steps", "7"]
    config = ConfigManager().parse_args(argv)
    assert config.training.steps == 7
    assert config.model_spec.name == "kimi_linear"


def test_tiny_variants_differ_only_in_the_gate() -> None:
    softplus, bounded = (
        config.model_spec.model.layers[0].kda
        for config in (config_registry.kimi_linear_tiny(), config_registry.kimi_linear_tiny_bounded())
    )
    assert softplus.inner_kda.lower_bound is None
    assert bounded.inner_kda.lower_bound == -5.0
    assert softplus.q_proj.out_features == bounded.q_proj.out_features


def test_48b_has_the_published_router_and_norms() -> None:
    layers = config_registry.kimi_linear_48b_a3b().model_spec.model.layers
    router = layers[1].moe.router
    assert (router.num_experts, router.top_k, router.score_func) == (256, 8, "sigmoid")
    assert (router.route_norm, router.route_scale) == (True, 2.446)
    assert layers[1].moe.shared_experts.w1.out_features == 1024
    assert layers[0].moe is None
    assert layers[3].attention.kv_norm.eps == 1e-6
    assert layers[3].attention_norm.eps == layers[0].kda.o_norm.eps == 1e-5


def test_decay_parameters_take_no_weight_decay_and_everything_else_does() -> None:
    config = config_registry.kimi_linear_tiny()
    model = config.model_spec.model.build()
    optimizers = OptimizersContainer(config.optimizer, model_parts=[model])
    decay_of = {
        name: group["weight_decay"]
        for optimizer in optimizers
        for group in optimizer.param_groups
        for name in group["param_names"]
    }
    assert decay_of.keys() == dict(model.named_parameters()).keys()
    free = {name for name, decay in decay_of.items() if decay == 0}
    assert free == {f"layers.{i}.kda.decay.{name}" for i in range(3) for name in ("A_log", "dt_bias")}


def test_patterns_also_match_inside_checkpointed_blocks() -> None:
    pattern = config_registry.adamw(1e-3).param_groups[0].pattern
    assert re.search(pattern, "layers.0._checkpoint_wrapped_module.kda.decay.A_log")
    assert not re.search(pattern, "layers.0.kda.f_b_proj.weight")


def test_decay_parameters_are_fp32_in_a_bf16_model() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = config_registry.kimi_linear_tiny().model_spec.model.build()
    finally:
        torch.set_default_dtype(torch.float32)
    kda = model.layers["0"].kda
    assert kda.q_proj.weight.dtype == torch.bfloat16
    assert kda.decay.A_log.dtype == kda.decay.dt_bias.dtype == torch.float32


@pytest.mark.parametrize("found", ["0.2.1", "0.4.0rc1"])
def test_another_torchtitan_is_refused_with_the_command_to_install_the_right_one(
    monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    monkeypatch.setattr(integration, "version", lambda name: found)
    with pytest.raises(ImportError, match=rf"must be 0\.3\.0, got {found}; .*pip install 'openkda\[torchtitan\]'"):
        integration.require_torchtitan()


def test_public_names_are_found_and_others_are_not() -> None:
    for name in integration.__all__:
        assert getattr(integration, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Mamba'"):
        integration.Mamba  # noqa: B018


@pytest.mark.slow
def test_torchtitans_own_launcher_trains_on_a_cpu(tmp_path: Path) -> None:
    one_process = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    flags = ["--training.steps", "1", "--training.seq_len", "64", "--dump_folder", str(tmp_path)]
    module = ["--module", "openkda.integrations.torchtitan", "--config", "kimi_linear_tiny"]
    done = subprocess.run(
        [sys.executable, "-m", "torchtitan.train", *module, *flags],
        env={**os.environ, **one_process},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Training completed" in done.stdout
