"""Two models with the same weights: transformers' and ours, both read from one folder on disk."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from openkda.integrations.torchtitan import cpu
from openkda.integrations.torchtitan.builders import model_config
from openkda.integrations.torchtitan.hf_checkpoint import HFWeights
from openkda.integrations.torchtitan.hf_config import read_config, sizes_from_config
from openkda.integrations.torchtitan.model import KimiLinearModel
from openkda.parity import reference as hf
from openkda.parity.prompts import Prompt, make_prompts
from openkda.parity.rounding import NOTE, follow_reference

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TINY = {"tiny": None, "tiny-bounded": -5.0}


@dataclass
class Pair:
    """What is compared.

    source: What was asked for. dtype: "fp32" or "bf16". notes: what a reader should know about the two models.
    exact: with bf16, the reference in fp32, to show what rounding does to the reference itself.
    """

    reference: Any
    ours: KimiLinearModel
    prompts: list[Prompt]
    source: str
    dtype: str
    notes: list[str]
    exact: Any = None


def load(
    source: str | Path = "tiny",
    *,
    dtype: str = "fp32",
    rounding: str = "own",
    prompts: Path | None = None,
    seed: int = 0,
) -> Pair:
    """Both models, with the same weights in the same dtype.

    Args:
        source: A folder with config.json and safetensors; a folder or file with config.json only, for random weights;
            or "tiny" or "tiny-bounded", for a small random model with either gate.
        dtype: "fp32" or "bf16": of weights and activations of both.
        rounding: "own", or "reference": ours rounds to bf16 where transformers does (rounding.py).
        prompts: File of prompts; None for passages of Python's reference.
        seed: Of random weights.
    Raises: ValueError naming what is wrong with the source; ImportError for another release of a package.
    """
    if rounding not in ("own", "reference"):
        raise ValueError(f"parity: rounding must be 'own' or 'reference', got {rounding!r}")
    hf.require_transformers()
    cpu.install()
    notes: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder, random = _folder(source, Path(scratch), seed)
        model = hf.load_reference(folder, DTYPES[dtype])
        sizes = replace(
            sizes_from_config(read_config(folder)), expert_dtype="float32" if dtype == "fp32" else "bfloat16"
        )
        ours = _build_ours(folder, sizes, DTYPES[dtype])
        texts = make_prompts(prompts, folder, sizes.vocab_size)
        exact = None if dtype == "fp32" else hf.load_reference(folder, torch.float32)
    if random:
        with hf.quiet():
            factor = hf.lm_head_scale(model, [p.ids for p in texts])
        with torch.no_grad():
            for each in filter(None, (model, exact)):
                each.lm_head.weight.mul_(factor)
            ours.lm_head.weight.copy_(model.lm_head.weight)
        notes.append(
            f"Random weights (seed {seed}); lm_head times {factor:.3g}, for a mean entropy of {hf.ENTROPY:g} nats."
        )
    if dtype == "bf16":
        _round_rates(ours)
        notes.append("transformers rounds A_log to bf16 when it loads; ours, which keeps fp32, got the rounded values.")
    if rounding == "reference":
        follow_reference(ours)
        notes.append(NOTE)
    return Pair(model, ours, texts, str(source), dtype, notes, exact)


def _folder(source: str | Path, scratch: Path, seed: int) -> tuple[Path, bool]:
    """The folder to read both models from, and whether its weights are random."""
    if str(source) in TINY:
        config = hf.tiny_config(TINY[str(source)])
        hf.write_random(config, scratch, seed=seed, embedding_std=hf.TINY_EMBEDDING_STD)
        return scratch, True
    path = Path(source)
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder; or give one of {', '.join(TINY)}")
    if path.is_dir() and any(path.glob("*.safetensors")):
        return path, False
    config = read_config(path)
    sizes_from_config(config)  # says what is wrong with it, before transformers fills the gaps with defaults
    hf.write_random(config, scratch, seed=seed)
    return scratch, True


def _build_ours(folder: Path, sizes: Any, dtype: torch.dtype) -> KimiLinearModel:
    """Our model from a folder; decay parameters and router stay fp32, as transformers keeps its own."""
    config = model_config(sizes, attention_backend="masked")
    with torch.device("meta"):
        model = config.build()
    for name, parameter in model.named_parameters():
        if not name.endswith(("decay.A_log", "decay.dt_bias", "router.gate.weight")):
            parameter.data = parameter.data.to(dtype)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_states()  # buffers that no checkpoint holds
    HFWeights(folder, config).load_into(model)
    return model.eval()


@torch.no_grad()
def _round_rates(model: KimiLinearModel) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("decay.A_log"):
            parameter.copy_(parameter.bfloat16())
