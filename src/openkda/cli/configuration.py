"""torchtitan's configuration for a request: the named one, pointed at local text, with the user's options on top."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import traceback
from typing import Any, cast

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.config import ConfigManager
from torchtitan.trainer import Trainer

from openkda.cli.errors import UserError
from openkda.cli.train import Request
from openkda.integrations.torchtitan.data import TextDataLoader
from openkda.integrations.torchtitan.documents import DataError
from openkda.integrations.torchtitan.tokenizer import ByteTokenizer, FileTokenizer
from openkda.integrations.torchtitan.validate import HeldOutValidator

COUNTS = (
    "training.steps",
    "training.seq_len",
    "training.local_batch_size",
    "checkpoint.interval",
    "metrics.log_freq",
    "validator.freq",
)


def load_config(request: Request) -> Trainer.Config:
    """torchtitan's configuration: the named one, adapted to local text, then the options meant for torchtitan.

    Raises: UserError for an unknown configuration or option, DataError for a bad tokenizer.
    """
    registry = _registry(request.module)
    names = getattr(registry, "__all__", None) or _functions(registry)
    if request.config not in names:
        raise UserError(f"--config must be one of {', '.join(sorted(names))}, got {request.config}")
    manager = _AdaptedConfig(request)
    args = ["--module", request.module, "--config", request.config, *request.flags]
    if request.help_all:
        args.append("--help")
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            config = cast(Trainer.Config, manager.parse_args(args))
    except DataError:
        raise
    except (ValueError, AssertionError) as error:  # checks of one option against another
        raise UserError(one_line(error)) from error
    except SystemExit as done:
        if not done.code:  # after --help
            raise
        raise UserError(_first_sentence(said.getvalue())) from done
    _check(config, request)
    return config


def _check(config: Trainer.Config, request: Request) -> None:
    """What torchtitan has no objection to, and this command cannot do: options that take away what it promises at its
    end, and counts that would be divided by, or looped over for ever.
    """
    if config.dump_folder != str(request.output):
        raise UserError(f"--dump_folder must be left out, got {config.dump_folder}; --output is the folder of a run")
    for option, part in (("checkpoint", config.checkpoint), ("validator", config.validator)):
        if not part.enable:
            raise UserError(f"--{option}.enable must be true: a run ends with a checkpoint and its held-out figure")
    for option in COUNTS:
        section, name = option.split(".")
        value = getattr(getattr(config, section), name)
        if value < 1:
            raise UserError(f"--{option} must be at least 1, got {value}")


def _functions(registry: Any) -> list[str]:
    own = (n for n, f in vars(registry).items() if getattr(f, "__module__", "") == registry.__name__ and callable(f))
    return [n for n in own if not n.startswith("_")]


def _registry(module: str) -> Any:
    # Imported here first: torchtitan's own lookup hides why an import failed.
    for name in (f"{module}.config_registry", f"torchtitan.models.{module}.config_registry"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
    raise UserError(f"--module {module}: has no config_registry")


class _AdaptedConfig(ConfigManager):
    """torchtitan's configuration manager; between the named configuration and the options it puts our defaults."""

    def __init__(self, request: Request) -> None:
        super().__init__()
        self.request = request

    def _load_config(self, args: list[str]) -> tuple[Any, list[str]]:
        config, rest = super()._load_config(args)
        adapt(cast(Trainer.Config, config), self.request)
        return config, rest


def adapt(config: Trainer.Config, request: Request) -> None:
    """Point a configuration at the request's text, tokenizer and folder, with checkpoints that can be resumed."""
    config.dump_folder = str(request.output)
    if request.steps is not None:
        config.training.steps = request.steps
    if request.tokenizer is not None:
        config.tokenizer = FileTokenizer.Config(path=str(request.tokenizer))
    elif not isinstance(config.tokenizer, ByteTokenizer.Config):
        config.tokenizer = ByteTokenizer.Config()
    data = None if request.data is None else str(request.data)
    if not isinstance(config.dataloader, TextDataLoader.Config):
        config.dataloader = TextDataLoader.Config()
    config.dataloader.dataset_path = data
    if not isinstance(config.validator, HeldOutValidator.Config):
        config.validator = HeldOutValidator.Config(freq=max(10, config.training.steps // 2))
    assert isinstance(config.validator.dataloader, TextDataLoader.Config)
    config.validator.dataloader.dataset_path = data
    config.validator.enable = True
    config.checkpoint.enable = True
    config.checkpoint.last_save_model_only = False
    config.checkpoint.load_step = -1 if request.resume_step is None else request.resume_step
    config.metrics.enable_tensorboard = True
    config.metrics.disable_color_printing = True  # the log is a file
    if config.debug.seed is None:
        config.debug.seed = 0  # a run that can be repeated, unless another seed is asked for
    if not torch.cuda.is_available():
        config.training.disable_cuda_graphs = True
        config.metrics.log_freq = 1  # reading the loss costs nothing here
    _fit_vocabulary(config)


def _fit_vocabulary(config: Trainer.Config) -> None:
    """Give the model an embedding for every token of the tokenizer; a larger one it has already is kept."""
    assert config.model_spec is not None
    model: Any = config.model_spec.model
    needed = config.tokenizer.build(tokenizer_path="").get_vocab_size()
    if model.vocab_size < needed:
        model.vocab_size = needed
        model.tok_embeddings.num_embeddings = needed
        model.lm_head.out_features = needed
        if hasattr(config.loss, "global_vocab_size"):
            cast(Any, config.loss).global_vocab_size = needed


def _first_sentence(box: str) -> str:
    """What tyro wrote on stderr, as one line: the fault, and the option it thinks was meant.

    It writes a title, then paragraphs with rules between them, inside a box where the terminal is UTF-8.
    """
    lines = [line.strip("│╭╮╰╯ ") for line in box.splitlines()[1:]]
    paragraphs = "\n".join("" if not line.strip("─-") else line for line in lines).strip().split("\n\n")
    fault = " ".join(paragraphs[0].split()) or "torchtitan rejects the options"
    meant = re.search(r"Perhaps you meant.*?(--[\w.-]+)", " ".join(lines))
    return f"{fault}; " + (f"perhaps you meant {meant.group(1)}; " if meant else "") + "see --help-all"


def checkpoint_fault(error: CheckpointException) -> str:
    """Why a checkpoint could not be read or written, on one line: the first rank's reason."""
    cause = next(iter(error.failures.values()))[0]
    return f"{type(cause).__name__}: {' '.join(str(cause).split())[:300]}"


def one_line(error: Exception) -> str:
    """The message of an error on one line; of an assertion without a message, the condition."""
    text = " ".join(str(error).split())
    return text or f"torchtitan wants {traceback.extract_tb(error.__traceback__)[-1].line}"
