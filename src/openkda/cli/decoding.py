"""Load a checkpoint of `openkda train` into one process and decode from it. Imports torch; generate.py does not."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.tools.utils import set_default_dtype

from openkda.cli.configuration import checkpoint_fault, load_config
from openkda.cli.errors import UserError
from openkda.cli.record import Checkpoint
from openkda.cli.train import Request
from openkda.integrations.torchtitan import cpu
from openkda.integrations.torchtitan.decode import stream


def load(checkpoint: Checkpoint, *, batch_invariant: bool = False) -> tuple[Any, BaseTokenizer]:
    """The model of a checkpoint, in eval mode on the first GPU or else the CPU, and its tokenizer.

    batch_invariant: as in `KimiLinearModel`, whatever the run was trained with.

    Raises: UserError when the checkpoint does not fit the configuration it names.
    """
    cpu.install()
    config = _load_config(checkpoint)
    assert config.model_spec is not None
    model_config = config.model_spec.model
    model_config.update_from_config(config=config)
    model_config.batch_invariant = model_config.batch_invariant or batch_invariant
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.device("meta"), set_default_dtype(TORCH_DTYPE_MAP[config.training.dtype]):
        model: Any = model_config.build()
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    _read_weights(model, checkpoint.path)
    model.eval()
    return model, config.tokenizer.build(tokenizer_path="")


def model_config_of(checkpoint: Checkpoint) -> Any:
    """Config of the model that a checkpoint holds the weights of, with the vocabulary of its tokenizer."""
    config = _load_config(checkpoint)
    assert config.model_spec is not None
    return config.model_spec.model


def _load_config(checkpoint: Checkpoint) -> Any:
    record = checkpoint.record
    return load_config(
        Request(
            config=record.config,
            module=record.module,
            output=checkpoint.folder.parent,
            data=None,
            tokenizer=checkpoint.tokenizer,
            steps=record.steps,
            flags=record.flags,
        )
    )


def _read_weights(model: Any, path: Path) -> None:
    state = model.state_dict()
    try:
        with warnings.catch_warnings():  # it says that it reads in one process, which is meant
            warnings.simplefilter("ignore")
            logging.getLogger("torch.distributed.checkpoint").setLevel(logging.CRITICAL)
            load_dcp(state, checkpoint_id=str(path), no_dist=True)
    except CheckpointException as error:  # no Exception, but a BaseException
        raise UserError(f"{path}: does not fit its configuration: {checkpoint_fault(error)}") from error
    except Exception as error:  # DCP raises its own kinds; what counts for the user is that this checkpoint is unusable
        raise UserError(f"{path}: does not fit its configuration: {' '.join(str(error).split())[:300]}") from error
    model.load_state_dict(state)


def continue_text(
    model: Any,
    tokenizer: BaseTokenizer,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int,
) -> Iterator[str]:
    """What the model writes after `prompt`, in pieces of whole characters, up to the end of the document."""
    ids = tokenizer.encode(prompt, add_bos=True, add_eos=False)
    if not ids:
        raise UserError("--prompt must not be empty with a tokenizer that has no begin mark")
    device = next(model.parameters()).device
    tokens = torch.tensor([ids], device=device)
    choose = chooser(temperature, top_k, torch.Generator(device).manual_seed(seed))
    new: list[int] = []
    shown = ""
    for token in stream(model, tokens, max_new_tokens=max_new_tokens, choose=choose, stop=tokenizer.eos_id):
        new.append(int(token))
        text = tokenizer.decode(new)
        # A character may take several tokens; until it is whole it decodes to U+FFFD at the end, which is not shown.
        if not text.endswith("\ufffd") and len(text) > len(shown):
            yield text[len(shown) :]
            shown = text
    if len(text := tokenizer.decode(new)) > len(shown):
        yield text[len(shown) :]


def chooser(
    temperature: float, top_k: int | None, generator: torch.Generator
) -> Callable[[torch.Tensor], torch.Tensor]:
    """How the next token is drawn from logits `[B, vocabulary]`: the likeliest one, or at random by probability."""
    if temperature == 0:
        return lambda logits: logits.argmax(-1)

    def draw(logits: torch.Tensor) -> torch.Tensor:
        logits = logits.float()
        # The largest one at 0: a tiny temperature then makes -inf of the others, and no infinity of this one.
        logits = (logits - logits.amax(-1, keepdim=True)) / max(temperature, 1e-30)
        if top_k is not None and top_k < logits.shape[-1]:
            smallest = logits.topk(top_k).values[:, -1:]
            logits = logits.masked_fill(logits < smallest, -float("inf"))
        return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]

    return draw
