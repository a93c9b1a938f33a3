"""Train a model on local text.

The trainer is torchtitan's: this command chooses the text, the folder and the console, and passes every option that it
does not know on to torchtitan's own configuration (`--training.seq_len 512`, `--parallelism.tensor_parallel_degree 2`).
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from openkda.cli.errors import UserError
from openkda.cli.record import RunRecord, find_checkpoint, latest_step

MODULE = "openkda.integrations.torchtitan"
EPILOG = """\
Options that are not listed here go to torchtitan, such as --training.seq_len 512;
--help-all lists them for the chosen configuration.

examples:
  openkda train --config kimi_linear_tiny
  openkda train --config kimi_linear_tiny --data my_texts/ --steps 200
  openkda train --config kimi_linear_debug --nproc 8 --parallelism.tensor_parallel_degree 2
  openkda train --resume outputs/kimi_linear_tiny-20260101-120000
"""


@dataclass
class Request:
    """What to train, with what `--resume` remembers filled in."""

    config: str
    module: str
    output: Path
    data: Path | None
    tokenizer: Path | None
    steps: int | None
    flags: list[str] = field(default_factory=list)
    """Options for torchtitan; of two that are the same the later one counts."""
    resume_step: int | None = None
    """The step to go on from; None trains from the beginning."""
    verbose: bool = False
    help_all: bool = False

    def record(self) -> RunRecord:
        return RunRecord(
            config=self.config,
            module=self.module,
            data=None if self.data is None else str(self.data.resolve()),
            steps=self.steps,
            flags=self.flags,
            tokenizer=self.tokenizer is not None,
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--config", metavar="NAME", help="configuration to train, such as kimi_linear_tiny")
    add(
        "--data",
        type=Path,
        metavar="PATH",
        help="text file, folder of text files, JSON lines with a field text (may be .gz), or Hugging Face dataset "
        "on disk; default: the reference topics that come with Python",
    )
    add("--tokenizer", type=Path, metavar="FILE", help="tokenizer.json; default: tokens are bytes")
    add(
        "--steps",
        type=_positive,
        metavar="N",
        help="optimizer steps, at whose end the learning rate has come down; default: what the configuration says",
    )
    add("--output", type=Path, metavar="DIR", help="folder for checkpoints and logs; default: outputs/NAME-DATE")
    add(
        "--resume",
        type=Path,
        metavar="PATH",
        help="go on from the last checkpoint in this output folder, or from this step-N folder, with the options "
        "it was started with",
    )
    add(
        "--nproc",
        type=_positive,
        metavar="N",
        help="processes to train with on this machine, one a GPU; default: 1. By default they share the parameters "
        "(FSDP); --parallelism.tensor_parallel_degree and its relatives choose another layout",
    )
    add("--module", metavar="MODULE", help=f"package with a config_registry; default: {MODULE}")
    add("--verbose", action="store_true", help="show torchtitan's log here as well as in the log file")
    add("--help-all", action="store_true", help="list torchtitan's options for this configuration and leave")


def run(args: argparse.Namespace) -> int:
    request = resolve(args)
    if args.nproc is not None and "RANK" in os.environ:
        raise UserError("--nproc must be left out under torchrun, which has its own --nproc-per-node")
    if request.data is not None and not request.data.exists():  # said before torch is imported, which takes seconds
        raise UserError(f"{request.data}: no such file or folder")
    try:
        from openkda.integrations.torchtitan import require_torchtitan

        require_torchtitan()
        nproc = args.nproc or 1
        if nproc > 1 and not args.help_all:
            from openkda.cli.launch import launch

            return launch(_words(args, request), nproc, request.output / "ranks")
        from openkda.cli import training
    except ImportError as error:
        raise UserError(str(error)) from error
    return training.train(request)


def _words(args: argparse.Namespace, request: Request) -> list[str]:
    """The command line of a rank."""
    output = None if args.resume is not None else request.output
    options = {name: getattr(args, name) for name in ("config", "data", "tokenizer", "steps", "resume", "module")}
    words = ["train"]
    for name, value in {**options, "output": output}.items():
        words += [] if value is None else [f"--{name}", str(value)]
    return [*words, *(["--verbose"] if args.verbose else []), *args.extra]


def resolve(args: argparse.Namespace) -> Request:
    """The request that `args` make, together with the run they resume."""
    if args.resume is not None:
        return _resume(args)
    if args.config is None:
        raise UserError("--config is required, such as --config kimi_linear_tiny")
    request = Request(
        config=args.config,
        module=args.module or MODULE,
        output=args.output or _new_output(args.config),
        data=args.data,
        tokenizer=args.tokenizer,
        steps=args.steps,
        flags=args.extra,
        verbose=args.verbose,
        help_all=args.help_all,
    )
    step = latest_step(request.output / "checkpoint")
    if step is not None:
        raise UserError(
            f"--output {request.output} already holds a checkpoint of step {step}; "
            f"go on with --resume {request.output}, or give another folder"
        )
    return request


def _resume(args: argparse.Namespace) -> Request:
    checkpoint = find_checkpoint(args.resume)
    record, output = checkpoint.record, checkpoint.folder.parent
    if args.output is not None and args.output.resolve() != output.resolve():
        raise UserError(f"--output must be left out with --resume, which goes on in {output}, got {args.output}")
    for option, asked, was in (("config", args.config, record.config), ("module", args.module, record.module)):
        if asked not in (None, was):
            raise UserError(f"--{option} must be {was} to resume {args.resume}, got {asked}")
    return Request(
        config=record.config,
        module=record.module,
        output=output,
        data=args.data or (None if record.data is None else Path(record.data)),
        tokenizer=args.tokenizer or checkpoint.tokenizer,
        steps=args.steps or record.steps,
        flags=[*record.flags, *args.extra],
        resume_step=checkpoint.step,
        verbose=args.verbose,
        help_all=args.help_all,
    )


def _new_output(config: str) -> Path:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("--output is required with several processes, so that all of them use the same folder")
    return Path("outputs") / f"{config}-{time.strftime('%Y%m%d-%H%M%S')}"


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text}")
    return value
