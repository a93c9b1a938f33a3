"""Training through torchtitan's own Trainer, on one process; test_layouts.py has several."""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtitan.components.metrics import BaseLogger
from torchtitan.config import CompileConfig
from torchtitan.distributed import utils as titan_distributed
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.trainer import Trainer

from openkda.integrations.torchtitan import config_registry
from openkda.integrations.torchtitan.kda import DecayParameters, InnerKDA
from openkda.integrations.torchtitan.model import KimiLinearModel

MakeModel = Callable[..., KimiLinearModel]
MakeTrainer = Callable[..., Trainer]


class Losses(BaseLogger):
    """Keeps what torchtitan would write to TensorBoard."""

    def __init__(self) -> None:
        self.train: list[float] = []

    def log(self, metrics: dict[str, float], step: int) -> None:
        if "loss_metrics/global_avg_loss" in metrics:
            self.train.append(metrics["loss_metrics/global_avg_loss"])


@pytest.fixture
def make_trainer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[MakeTrainer]:
    """A trainer of a configuration, shortened; puts back the process-wide switches that torchtitan flips."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    one_process = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in one_process.items():
        monkeypatch.setenv(name, str(value))
    # torchtitan sets these two for the whole process; monkeypatch restores them.
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path))
    monkeypatch.setattr("torchtitan.trainer.time.sleep", lambda seconds: None)
    trainers: list[Trainer] = []

    def make(config: Trainer.Config) -> Trainer:
        config.dump_folder = str(tmp_path)
        config.debug.seed = 0
        config.metrics.log_freq = 1
        config.training.local_batch_size, config.training.seq_len = 2, 64
        trainers.append(config.build())
        return trainers[0]

    yield make
    for trainer in trainers:
        trainer.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.enable()
    torch.autograd.set_multithreading_enabled(True)
    titan_distributed.set_spmd_backend("spmd_types")


@pytest.mark.parametrize(
    "name, spmd_backend",
    [
        ("kimi_linear_tiny", "partial_dtensor"),
        ("kimi_linear_tiny_bounded", "spmd_types"),
    ],
)
def test_loss_falls_in_a_few_steps(make_trainer: MakeTrainer, name: str, spmd_backend: str) -> None:
    config: Trainer.Config = getattr(config_registry, name)()
    config.training.steps, config.lr_scheduler.warmup_steps = 10, 2
    config.parallelism.spmd_backend = spmd_backend
    trainer = make_trainer(config)
    trainer.metrics_processor.logger = losses = Losses()
    trainer.train()
    assert len(losses.train) == 10
    # Logits start near zero, so the first loss is that of a uniform guess over 260 tokens, 5.56 nats, and a little.
    assert 5.4 < losses.train[0] < 6.5
    assert losses.train[-1] < 4.2
    # The load-balancing hook of torchtitan reached our experts.
    assert trainer.model_parts[0].layers["1"].moe.expert_bias_E.abs().max() > 0


def test_decay_parameters_stay_fp32_and_learn_under_mixed_precision_and_checkpointing(
    make_trainer: MakeTrainer,
) -> None:
    config = config_registry.kimi_linear_tiny()
    config.training.steps, config.training.mixed_precision_param = 1, "bfloat16"
    config.activation_checkpoint = SelectiveAC.Config()
    trainer = make_trainer(config)
    model = trainer.model_parts[0]
    seen: list[tuple[torch.dtype, ...]] = []

    def spy(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        seen.append((args[0].dtype, args[5].dtype, args[8].dtype, args[9].dtype))

    for module in model.modules():
        if isinstance(module, InnerKDA):
            module.register_forward_pre_hook(spy)
    trainer.train()
    # Three layers, once forward and once in the recomputation.
    assert seen == [(torch.bfloat16, torch.bfloat16, torch.float32, torch.float32)] * 6
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32, name  # the master copy
        gradient = parameter.grad.to_local()
        assert gradient.isfinite().all(), name
        assert gradient.abs().max() > 0, name


def test_decay_parameters_are_gathered_afresh_after_a_validation(make_trainer: MakeTrainer) -> None:
    config = config_registry.kimi_linear_tiny()
    config.training.steps = 1
    trainer = make_trainer(config)
    trainer.train()
    model, tokens = trainer.model_parts[0], torch.randint(0, 256, (1, 64))
    decay = next(module for module in model.modules() if isinstance(module, DecayParameters))
    with torch.no_grad():
        before = model(tokens)
        assert isinstance(decay.A_log, DTensor)  # released, so that the next forward reads the current values
        decay.A_log.add_(1.0)
        assert not torch.equal(model(tokens), before)


@pytest.mark.parametrize("policy", [FullAC, SelectiveAC])
def test_activation_checkpointing_gives_the_same_gradients(make_model: MakeModel, policy: type) -> None:
    plain, checkpointed = make_model(), make_model()
    policy.Config().build(dump_folder="").apply(checkpointed)
    tokens, positions = torch.randint(0, 256, (1, 70)), torch.arange(70)[None] % 30
    for model in (plain, checkpointed):
        model(tokens, positions).square().mean().backward()
    gradients = [p.grad for p in checkpointed.parameters()]
    for (name, parameter), gradient in zip(plain.named_parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient), name


def with_bf16_experts(config: Trainer.Config) -> Trainer.Config:
    """torch cannot trace a grouped product in fp32."""
    for layer in config.model_spec.model.layers:
        if layer.moe is not None:
            layer.moe.routed_experts.inner_experts.expert_dtype = "bfloat16"
    return config


# What torch 2.13 says of itself while it traces, and of its own backend "aot_eager".
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd is returning a function:UserWarning")
@pytest.mark.parametrize(
    "checkpointing", [None, SelectiveAC.Config(), FullAC.Config()], ids=["none", "selective", "full"]
)
def test_compiled_blocks_train_the_same(make_trainer: MakeTrainer, checkpointing: object) -> None:
    config = with_bf16_experts(config_registry.kimi_linear_tiny())
    config.activation_checkpoint = checkpointing
    config.parallelism.spmd_backend = "partial_dtensor"
    # Without a compiler for C++: what torch traces, without the code that it would generate from it.
    config.compile = CompileConfig(enable=True, components=["model"], backend="aot_eager")
    trainer = make_trainer(config)
    model = trainer.model_parts[0]
    tokens, positions = torch.randint(0, 256, (2, 64)), torch.arange(64).expand(2, 64)
    torch._dynamo.utils.counters.clear()
    results = []
    for compiled in (True, False):
        with torch.compiler.set_stance("default" if compiled else "force_eager"):
            model.zero_grad()
            model(tokens, positions).square().mean().backward()
        results.append(
            {name: p.grad.full_tensor().clone() for name, p in model.named_parameters() if p.grad is not None}
        )
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 2  # with and without experts
    for name, gradient in results[0].items():
        torch.testing.assert_close(
            gradient, results[1][name], rtol=1e-5, atol=1e-7 * gradient.abs().max().item(), msg=name
        )


def test_what_cannot_be_compiled_is_refused_with_a_way_out(make_trainer: MakeTrainer) -> None:
    config = config_registry.kimi_linear_tiny()  # computes its experts in fp32
    config.compile = CompileConfig(enable=True)
    with pytest.raises(
        NotImplementedError, match=r"expert_dtype .*compile the loss only, with --compile\.components loss"
    ):
        make_trainer(config)


def test_full_dtensor_is_refused(make_trainer: MakeTrainer) -> None:
    config = config_registry.kimi_linear_tiny()
    config.parallelism.spmd_backend = "full_dtensor"
    with pytest.raises(NotImplementedError, match="spmd_backend must be 'partial_dtensor', got 'full_dtensor'"):
        make_trainer(config)
