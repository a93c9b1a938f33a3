"""Training configurations: `openkda train --config NAME`, or torchtitan's own launcher with this module.

Every function returns a torchtitan Trainer.Config; any of its fields can be set from the command line. It also installs
what torchtitan needs on this machine (cpu.py), so that both launchers work everywhere.
"""

from __future__ import annotations

import torch
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.trainer import Trainer

from openkda.integrations.torchtitan import cpu
from openkda.integrations.torchtitan.builders import model_registry
from openkda.integrations.torchtitan.data import TextDataLoader
from openkda.integrations.torchtitan.tokenizer import ByteTokenizer
from openkda.integrations.torchtitan.validate import HeldOutValidator

__all__ = ["kimi_linear_48b_a3b", "kimi_linear_debug", "kimi_linear_tiny", "kimi_linear_tiny_bounded"]


def adamw(lr: float, *, weight_decay: float = 0.1) -> OptimizersContainer.Config:
    """AdamW with weight decay on everything but A_log and dt_bias, which are rates and not weights."""

    def group(pattern: str, decay: float) -> ParamGroupConfig:
        options = {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": decay}
        return ParamGroupConfig(pattern=pattern, optimizer_name="AdamW", optimizer_kwargs=options)

    return OptimizersContainer.Config(param_groups=[group(r"\.(A_log|dt_bias)$", 0.0), group(r".*", weight_decay)])


def kimi_linear_tiny() -> Trainer.Config:
    """A model of 1.9 million parameters that learns English on two CPU cores in a few minutes. All of it in fp32."""
    return _tiny("tiny")


def kimi_linear_tiny_bounded() -> Trainer.Config:
    """kimi_linear_tiny with the bounded gate of Kimi K3."""
    return _tiny("tiny-bounded")


def _tiny(flavor: str) -> Trainer.Config:
    cpu.install()
    model_spec = model_registry(flavor, attention_backend="masked")
    return Trainer.Config(
        model_spec=model_spec,
        hf_assets_path=".",
        tokenizer=ByteTokenizer.Config(),
        dataloader=TextDataLoader.Config(),
        validator=HeldOutValidator.Config(enable=False, freq=200),
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec)),
        optimizer=adamw(lr=4e-3),
        lr_scheduler=LRSchedulersContainer.Config(
            warmup_steps=40, decay_ratio=0.8, decay_type="cosine", min_lr_factor=0.1
        ),
        training=TrainingConfig(
            local_batch_size=4,
            seq_len=256,
            steps=600,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        metrics=MetricsProcessor.Config(log_freq=10),
        checkpoint=CheckpointManager.Config(interval=200, initial_load_model_only=False),
        activation_checkpoint=None,
    )


def kimi_linear_debug() -> Trainer.Config:
    """A few layers of every kind with the precision, attention and checkpointing of a real run, on bytes of local text.

    Attention is FlexAttention where there is an accelerator and masked attention on a CPU.
    """
    cpu.install()
    backend = "flex" if torch.accelerator.is_available() else "masked"
    model_spec = model_registry("debug", attention_backend=backend)
    return Trainer.Config(
        model_spec=model_spec,
        hf_assets_path=".",
        tokenizer=ByteTokenizer.Config(),
        dataloader=TextDataLoader.Config(),
        validator=HeldOutValidator.Config(enable=False, freq=100),
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec)),
        optimizer=adamw(lr=2e-3),
        lr_scheduler=LRSchedulersContainer.Config(
            warmup_steps=10, decay_ratio=0.8, decay_type="cosine", min_lr_factor=0.1
        ),
        training=TrainingConfig(local_batch_size=4, seq_len=512, steps=50, disable_cuda_graphs=True),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        metrics=MetricsProcessor.Config(log_freq=1),
        checkpoint=CheckpointManager.Config(interval=50, initial_load_model_only=False),
        activation_checkpoint=SelectiveAC.Config(),
    )


def kimi_linear_48b_a3b() -> Trainer.Config:
    """Kimi Linear 48B-A3B: 48 billion parameters, 3 billion of them used by a token. Give it data and a tokenizer."""
    cpu.install()
    model_spec = model_registry("48B-A3B", attention_backend="flex")
    return Trainer.Config(
        model_spec=model_spec,
        hf_assets_path="./assets/hf/Kimi-Linear-48B-A3B-Base",
        dataloader=TextDataLoader.Config(),
        validator=HeldOutValidator.Config(enable=False, freq=100),
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec)),
        optimizer=adamw(lr=2.2e-4),
        lr_scheduler=LRSchedulersContainer.Config(
            warmup_steps=2000, decay_ratio=0.8, decay_type="cosine", min_lr_factor=0.1
        ),
        training=TrainingConfig(local_batch_size=1, seq_len=8192, steps=10000, disable_cuda_graphs=True),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        checkpoint=CheckpointManager.Config(interval=500),
        activation_checkpoint=SelectiveAC.Config(),
    )
