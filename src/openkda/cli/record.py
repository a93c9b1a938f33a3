"""What a run leaves beside its checkpoints so that they can be continued and used: `openkda.json`.

It lies in the checkpoint folder, with a copy of the tokenizer, so that folder can be moved as a whole.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

from openkda import __version__
from openkda.cli.errors import UserError

FILE_NAME = "openkda.json"
TOKENIZER_NAME = "tokenizer.json"


@dataclass
class RunRecord:
    """The request behind a run: enough to build the same trainer again."""

    config: str
    module: str
    data: str | None = None
    steps: int | None = None
    flags: list[str] = field(default_factory=list)
    tokenizer: bool = False
    """Whether TOKENIZER_NAME lies beside the record; otherwise tokens are bytes."""
    version: str = __version__

    def save(self, folder: Path, tokenizer: Path | None) -> None:
        """Write the record, and a copy of the tokenizer file, into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        if tokenizer is not None and tokenizer.resolve() != (folder / TOKENIZER_NAME).resolve():
            shutil.copyfile(tokenizer, folder / TOKENIZER_NAME)
        (folder / FILE_NAME).write_text(json.dumps(asdict(self), indent=2) + "\n")


@dataclass(frozen=True)
class Checkpoint:
    """One step of a run on disk."""

    folder: Path
    """The folder that holds the record and one `step-N` folder for each checkpoint."""
    step: int
    record: RunRecord

    @property
    def path(self) -> Path:
        return self.folder / f"step-{self.step}"

    @property
    def tokenizer(self) -> Path | None:
        return self.folder / TOKENIZER_NAME if self.record.tokenizer else None


def find_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint meant by `path`: a `step-N` folder, the folder that holds them, or the output folder of a run.

    Raises: UserError when there is none, naming what was looked for.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file or folder")
    step = _step_of(path)
    candidates = [path, *sorted(path.glob("*/"))] if step is None else [path.parent]
    folder = next((f for f in candidates if (f / FILE_NAME).is_file()), None)
    if folder is None:
        raise UserError(f"{path}: holds no {FILE_NAME}; give the output folder of a run, or one of its step-N folders")
    if step is None:
        step = latest_step(folder)
    if step is None:
        raise UserError(f"{folder}: holds no checkpoint yet")
    if not (folder / f"step-{step}" / ".metadata").is_file():
        raise UserError(f"{folder / f'step-{step}'}: is not a complete checkpoint")
    return Checkpoint(folder, step, _read(folder / FILE_NAME))


def latest_step(folder: Path) -> int | None:
    """The last step of which `folder` holds a complete checkpoint."""
    steps = [_step_of(p) for p in folder.glob("step-*") if (p / ".metadata").is_file()]
    return max((s for s in steps if s is not None), default=None)


def _step_of(path: Path) -> int | None:
    match = re.fullmatch(r"step-(\d+)", path.name)
    return int(match.group(1)) if match else None


def _read(path: Path) -> RunRecord:
    try:
        return RunRecord(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: is not a record of openkda train: {error}") from error
