"""A few training steps in one parallel layout, through torchtitan's own trainer.

Also the program of a rank: `python layouts.py FOLDER NAME ..` trains those layouts one after the other and leaves one
file each. All start from the checkpoint FOLDER/seed, which layout "single" writes, see the same batches, and differ in
nothing but the layout.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchtitan.trainer import Trainer

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.metrics import BaseLogger
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from openkda.integrations.torchtitan import config_registry, cpu
from openkda.integrations.torchtitan.builders import SIZES, model_config

BATCH, SEQ_LEN, STEPS = 4, 64, 5
#: kimi_linear_tiny, smaller: two KDA layers around one of MLA, experts in the last two, in fp32.
SMALL = {"hidden_size": 64, "num_layers": 3, "mla_layers": (2,), "head_dim": 16, "kv_lora_rank": 32}
SMALL |= {"qk_nope_head_dim": 16, "v_head_dim": 16, "intermediate_size": 128, "moe_intermediate_size": 32}
SMALL |= {"num_experts": 4, "num_experts_per_token": 2}


@dataclass(frozen=True)
class Layout:
    size: int
    """Processes."""
    degrees: dict[str, Any] = field(default_factory=dict)
    """Of torchtitan's ParallelismConfig."""
    checkpointing: type | None = None
    """Of activations."""


LAYOUTS = {
    "single": Layout(1),
    "fsdp2": Layout(2, {"data_parallel_shard_degree": 2}),
    "tp2": Layout(2, {"tensor_parallel_degree": 2}),
    "ep2": Layout(2, {"data_parallel_shard_degree": 2, "expert_parallel_degree": 2}),
    "cp2": Layout(2, {"context_parallel_degree": 2}),
    "cp2_in_order": Layout(2, {"context_parallel_degree": 2, "context_parallel_load_balancer": None}),
    "cp2_selective": Layout(2, {"context_parallel_degree": 2}, SelectiveAC),
    "cp2_full": Layout(2, {"context_parallel_degree": 2}, FullAC),
    "hsdp2": Layout(2, {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}),
    "pp2": Layout(2, {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 2}),
    "fsdp2_tp2": Layout(4, {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2}),
    "cp4": Layout(4, {"context_parallel_degree": 4}),
    "cp2_fsdp2": Layout(4, {"context_parallel_degree": 2, "data_parallel_shard_degree": 2}),
    "turns": Layout(4),  # two of them, one after the other
    "cp2_tp2": Layout(4, {"context_parallel_degree": 2, "tensor_parallel_degree": 2}),
}


class Batches(BaseDataLoader):
    """The same global batches whatever the layout: a data-parallel rank takes its rows. Documents of many lengths."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, **kwargs: Any) -> None:
        self.rank, self.size = kwargs["dp_rank"], kwargs["dp_world_size"]
        self.rows, self.step = kwargs["local_batch_size"], 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            rng = torch.Generator().manual_seed(self.step // (BATCH // (self.rows * self.size)))
            tokens = torch.randint(0, 40, (BATCH, SEQ_LEN + 1), generator=rng)
            starts = torch.rand(BATCH, SEQ_LEN, generator=rng) < 0.06
            starts[:, 0] = True
            place = torch.arange(SEQ_LEN).expand(BATCH, -1)
            positions = place - torch.where(starts, place, 0).cummax(1).values
            accumulated = self.step % (BATCH // (self.rows * self.size))
            first = (accumulated * self.size + self.rank) * self.rows
            mine = slice(first, first + self.rows)
            self.step += 1
            yield {"input": tokens[mine, :-1], "positions": positions[mine]}, tokens[mine, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict.get("step", 0)


class Losses(BaseLogger):
    """Keeps what torchtitan would write to TensorBoard."""

    def __init__(self) -> None:
        self.train: dict[int, float] = {}

    def log(self, metrics: dict[str, float], step: int) -> None:
        if "loss_metrics/global_avg_loss" in metrics:
            self.train[step] = metrics["loss_metrics/global_avg_loss"]


#: Another model to train, whole, and for how many steps: what benchmarks/two_gpu.py asks for.
OTHER = os.environ.get("OPENKDA_LAYOUTS_CONFIG")
STEPS = int(os.environ.get("OPENKDA_LAYOUTS_STEPS", STEPS))


def config_of(layout: Layout, folder: Path, *, steps: int = STEPS) -> Trainer.Config:
    config = getattr(config_registry, OTHER or "kimi_linear_tiny")()
    if OTHER is None:
        small = model_config(replace(SIZES["tiny"], **SMALL), attention_backend="masked")
        config.model_spec = replace(config.model_spec, model=small)
    for name, value in layout.degrees.items():
        setattr(config.parallelism, name, value)
    degrees = layout.degrees
    rows = degrees.get("data_parallel_shard_degree", 1) * degrees.get("data_parallel_replicate_degree", 1)
    config.training.local_batch_size, config.training.global_batch_size = BATCH // rows, BATCH
    config.training.seq_len, config.training.steps = SEQ_LEN, steps
    config.lr_scheduler.warmup_steps, config.lr_scheduler.total_steps = 2, STEPS
    config.dataloader = Batches.Config()
    if layout.checkpointing is not None:
        config.activation_checkpoint = layout.checkpointing.Config()
    config.dump_folder = str(folder)
    config.metrics.log_freq, config.debug.seed = 1, 0
    config.checkpoint.enable, config.checkpoint.last_save_model_only = True, False
    config.checkpoint.interval = 1000
    return config


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(config: Trainer.Config) -> dict[str, Any]:
    """Losses by step, the gradients of the first step, clipped, whole, and the experts' biases after the last."""
    trainer = config.build()
    trainer.metrics_processor.logger = losses = Losses()
    gradients: dict[str, torch.Tensor] = {}
    step = trainer.optimizers.step

    def spy(*args: Any, **kwargs: Any) -> Any:
        if not gradients:
            for part in trainer.model_parts:
                named = ((n.replace("_checkpoint_wrapped_module.", ""), p) for n, p in part.named_parameters())
                gradients.update({n: whole(p.grad) for n, p in named})
        return step(*args, **kwargs)

    trainer.optimizers.step = spy
    try:
        trainer.train()
        biases = {}
        for part in trainer.model_parts:
            named = ((n.replace("_checkpoint_wrapped_module.", ""), b) for n, b in part.named_buffers())
            biases |= {n: whole(b) for n, b in named if n.endswith("expert_bias_E")}
    finally:
        trainer.close()
    return {"losses": losses.train, "gradients": gradients, "biases": biases}


def run(name: str, folder: Path) -> None:
    """Layout by name: train from the seed (`single` makes it), and keep what came out."""
    config = config_of(LAYOUTS[name], folder / name)
    config.checkpoint.initial_load_path = str(folder / "seed")
    torch.save(train(config), folder / f"{name}-{dist.get_rank()}.pt")


def run_in_turns(folder: Path) -> None:
    """Three steps in one layout, and the rest in another one, from the checkpoint between them."""
    found: dict[str, Any] = {"losses": {}, "gradients": {}}
    for name, steps in (("fsdp2_tp2", 3), ("cp2_fsdp2", STEPS)):
        config = config_of(LAYOUTS[name], folder / "turns", steps=steps)
        config.checkpoint.initial_load_path = str(folder / "seed")
        turn = train(config)
        found["losses"] |= turn["losses"]
        found["biases"] = turn["biases"]
        rank = dist.get_rank()
        new_port()
    torch.save(found, folder / f"turns-{rank}.pt")


def new_port() -> None:
    """A port for the next group: a rank that is ahead must not find the store of the one before."""
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)


def make_seed(folder: Path) -> None:
    """A checkpoint of the model before its first step."""
    config = config_of(LAYOUTS["single"], folder)
    config.checkpoint.folder = "."
    config.checkpoint.create_seed_checkpoint = True
    trainer = config.build()
    trainer.checkpointer.save(curr_step=0, last_step=True)
    trainer.close()
    (folder / "step-0").rename(folder / "seed")


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    cpu.install()
    warnings.filterwarnings("ignore")
    for name in names:
        if name == "seed":
            make_seed(folder)
        elif name == "turns":
            run_in_turns(folder)
        else:
            run(name, folder)
        new_port()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
