"""Convert checkpoints between Hugging Face (hf) and torch.distributed.checkpoint (dcp), bit for bit.

Tensors are read and written one at a time, so a model need not fit into memory. Names and shapes are checked first;
what is missing, extra or misshapen is named.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from openkda.cli.errors import UserError
from openkda.cli.record import FILE_NAME, find_checkpoint

FORMATS = ("hf", "dcp")
EPILOG = """\
formats:
  hf   folder with config.json and safetensors files, as published or as transformers saves it
  dcp  torchtitan's: a folder that an hf one was converted to, or one of openkda train (its output or a step-N)

examples:
  openkda convert --from hf Kimi-Linear-48B-A3B-Base --to dcp kimi_dcp
  openkda convert --from dcp outputs/kimi_linear_tiny-20260101-120000 --to hf my_model

A dcp folder is what torchtitan starts from with --checkpoint.initial_load_path.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--from", dest="source", nargs=2, required=True, metavar=("FORMAT", "DIR"), help="hf or dcp, and its folder")
    add("--to", dest="target", nargs=2, required=True, metavar=("FORMAT", "DIR"), help="the other, and a new folder")


def run(args: argparse.Namespace) -> int:
    (source_format, source), (target_format, target) = args.source, args.target
    for option, given in (("--from", source_format), ("--to", target_format)):
        if given not in FORMATS:
            raise UserError(f"{option} must be one of {', '.join(FORMATS)} and a folder, got {given}")
    if source_format == target_format:
        raise UserError(
            f"--to must be the other format, {'dcp' if source_format == 'hf' else 'hf'}, got {target_format}"
        )
    if not Path(source).is_dir():
        raise UserError(f"{source}: no such folder")
    try:
        from openkda.integrations.torchtitan import require_torchtitan

        require_torchtitan()
        from openkda.integrations.torchtitan import cpu, hf_checkpoint
    except ImportError as error:
        raise UserError(str(error)) from error
    from torch.distributed.checkpoint.api import CheckpointException

    from openkda.cli.configuration import checkpoint_fault, one_line

    cpu.install()
    try:
        if source_format == "hf":
            tensors = hf_checkpoint.hf_to_dcp(Path(source), Path(target))
        else:
            folder, config = _find_dcp(Path(source))
            tensors = hf_checkpoint.dcp_to_hf(folder, Path(target), config)
    except ValueError as error:
        raise UserError(" ".join(str(error).split())) from error
    except CheckpointException as error:  # no Exception, but a BaseException
        raise UserError(f"{source}: cannot be read: {checkpoint_fault(error)}") from error
    except (UnpicklingError, EOFError) as error:  # of the checkpoint's .metadata
        raise UserError(f"{source}: cannot be read: {one_line(error)}") from error
    print(f"openkda convert: {tensors} tensors, {target_format} folder {target}")
    return 0


def _find_dcp(path: Path) -> tuple[Path, Any]:
    """The folder of a dcp checkpoint and its model; a model of None is described by config.json in the folder."""
    if (path / ".metadata").is_file() and (path / "config.json").is_file():
        return path, None
    if not any((f / FILE_NAME).is_file() for f in (path, path.parent, path / "checkpoint")):
        raise UserError(f"{path}: must hold .metadata and config.json, or be of openkda train")
    checkpoint = find_checkpoint(path)
    from openkda.cli.decoding import model_config_of

    return checkpoint.path, model_config_of(checkpoint)
