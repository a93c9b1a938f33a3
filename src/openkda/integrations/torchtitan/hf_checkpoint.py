"""Checkpoints of Hugging Face (safetensors, one file or many) <-> torch.distributed.checkpoint, tensor by tensor.

Neither direction holds more than a few tensors at a time: a tensor of ours is put together from its parts on disk when
the checkpoint writer asks for it, and a file of the other format is written as soon as its tensors are read. The
largest is the stack of one weight of all experts of a layer (48B: 1.2 GB in bf16).

Both are strict. Names and shapes are compared from the headers before any tensor is read, and a fault names the tensor.
Values and dtypes are kept bit for bit; A_log, dt_bias and experts only change shape.
"""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from openkda.integrations.torchtitan.builders import model_config
from openkda.integrations.torchtitan.hf_config import config_from_model, read_config, sizes_from_config
from openkda.integrations.torchtitan.model import KimiLinearModel
from openkda.integrations.torchtitan.state_dict_adapter import Entry, KimiLinearStateDictAdapter, check_layout, layout

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9  # a file of this size is what transformers writes, too
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
# What a training run stores beside the weights, by the first part of its name.
_TRAINING_STATE = ("optimizer", "lr_scheduler", "dataloader", "train_state")
# Files that make a folder usable and that no conversion changes.
_COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "generation_config.json",
    "*.tiktoken",
    "tiktoken.model",
    "*.py",
)


class SafetensorsFolder:
    """The tensors of a folder of safetensors files; opening it reads headers only.

    Attributes:
        shapes, dtypes: By name on disk.
    Raises: ValueError when files and index disagree, or a file is not safetensors.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for path in self._files():
            self._read_header(path)
        self._check_index()

    def _files(self) -> list[Path]:
        if (self.folder / INDEX).is_file():
            files = sorted({self.folder / name for name in self._weight_map().values()})
        else:
            files = sorted(self.folder.glob("*.safetensors"))
        if not files:
            raise ValueError(f"{self.folder}: must hold safetensors files, found none")
        for path in files:
            if not path.is_file():
                raise ValueError(f"{path}: is named in {INDEX} and missing")
        return files

    def _weight_map(self) -> dict[str, str]:
        return json.loads((self.folder / INDEX).read_text())["weight_map"]

    def _read_header(self, path: Path) -> None:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():
                    if name in self._file_of:
                        raise ValueError(f"{name} is in {self._file_of[name].name} and again in {path.name}")
                    piece = file.get_slice(name)
                    if piece.get_dtype() not in _DTYPES:
                        raise ValueError(f"{name} must have dtype {sorted(_DTYPES)}, got {piece.get_dtype()}")
                    self._file_of[name] = path
                    self.shapes[name], self.dtypes[name] = tuple(piece.get_shape()), _DTYPES[piece.get_dtype()]
        except ValueError:
            raise
        except Exception as error:  # safetensors raises its own kind
            raise ValueError(f"{path}: is not a safetensors file: {error}") from error

    def _check_index(self) -> None:
        if (self.folder / INDEX).is_file():
            absent = [name for name in self._weight_map() if name not in self._file_of]
            if absent:
                raise ValueError(f"{self.folder / INDEX}: names tensors that its files do not hold: {absent[:3]}")

    def read(self, name: str) -> torch.Tensor:
        """One tensor, read from its file."""
        with safe_open(self._file_of[name], framework="pt") as file:
            return file.get_tensor(name)


class HFWeights:
    """Weights on disk in the names and shapes of our model, each read when it is asked for.

    Raises: ValueError when a tensor is missing, extra or misshapen, naming it.
    """

    def __init__(self, folder: Path, config: KimiLinearModel.Config) -> None:
        self.files = SafetensorsFolder(folder)
        self.adapter = KimiLinearStateDictAdapter(config, None)
        self.layout = layout(config)
        self._names = self._canonical()
        found = {name: self.files.shapes[raw] for name, raw in self._names.items()}
        wanted = {name: entry.disk_shape for entry in self.layout.values() for name in entry.disk}
        check_layout(wanted, _accept_shapes(found, wanted), where=str(folder))

    def _canonical(self) -> dict[str, str]:
        names: dict[str, str] = {}
        for raw in self.files.shapes:
            try:
                name = self.adapter.canonical_name(raw)
            except KeyError as error:
                raise ValueError(f"{self.files.folder}: not in the model: {raw} ({error.args[0]})") from error
            if name in names:
                raise ValueError(f"{self.files.folder}: {raw} and {names[name]} are the same tensor")
            names[name] = raw
        return names

    def read(self, name: str) -> torch.Tensor:
        """The tensor that is called `name` in our model."""
        disk = {d: self.files.read(self._names[d]) for d in self.layout[name].disk}
        return self.adapter.from_hf(disk)[name]

    def dtype(self, name: str) -> torch.dtype:
        """dtype on disk of the tensor that is called `name` in our model; the widest of its parts."""
        dtypes = {self.files.dtypes[self._names[d]] for d in self.layout[name].disk}
        return max(dtypes, key=lambda dtype: dtype.itemsize)

    @torch.no_grad()
    def load_into(self, model: torch.nn.Module) -> None:
        """Copy every tensor into a model that is on its device already, one at a time, in the model's dtypes."""
        state = model.state_dict()
        for name in self.layout:
            state[name].copy_(self.read(name))


def _accept_shapes(
    found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """A_log may be `[H]` instead of `[1, 1, H, 1]`, and dt_bias `[H, K]` instead of `[H*K]`: both are in use."""
    out = dict(found)
    for name, shape in found.items():
        want = wanted.get(name, ())
        if name.endswith(".A_log") and want and shape == (want[2],):
            out[name] = want
        if name.endswith(".dt_bias") and want and len(shape) == 2 and shape[0] * shape[1] == want[0]:
            out[name] = want
    return out


def load_config(folder: Path) -> KimiLinearModel.Config:
    """Config of the model that a folder's config.json describes, with attention that runs on any device.

    Raises: ValueError naming the key of config.json that is wrong.
    """
    return model_config(sizes_from_config(read_config(folder)), attention_backend="masked")


# ---- Hugging Face -> DCP ---------------------------------------------------------------------------------------------


class _ReadWhenWritten(DefaultSavePlanner):
    """Plans with tensors that have no storage, and reads each one when its bytes are wanted."""

    def __init__(self, weights: HFWeights) -> None:
        super().__init__()
        self.weights = weights

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self.weights.read(write_item.index.fqn)


def hf_to_dcp(source: Path, target: Path) -> int:
    """Convert a Hugging Face folder; `target` gets the checkpoint, config.json and the tokenizer.

    Returns: number of tensors in the new checkpoint.
    Raises: ValueError for a checkpoint that does not fit its config.json, and for a target that is not empty.
    """
    weights = HFWeights(source, load_config(source))
    _make_empty(target)
    with torch.device("meta"):
        state = {name: torch.empty(e.shape, dtype=weights.dtype(name)) for name, e in weights.layout.items()}
    with _quiet():
        save_dcp(state, checkpoint_id=str(target), planner=_ReadWhenWritten(weights), no_dist=True)
    shutil.copyfile(source / "config.json", target / "config.json")
    _copy_companions(source, target)
    return len(state)


# ---- DCP -> Hugging Face ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """The model part of a DCP checkpoint."""

    folder: Path
    dtypes: dict[str, torch.dtype]
    shapes: dict[str, tuple[int, ...]]

    def read(self, name: str) -> torch.Tensor:
        tensors = {name: torch.empty(self.shapes[name], dtype=self.dtypes[name])}
        with _quiet():
            load_dcp(tensors, checkpoint_id=str(self.folder), no_dist=True)
        return tensors[name]


def open_dcp(folder: Path) -> Stored:
    """Names, shapes and dtypes of a DCP checkpoint, without what belongs to the optimizer and the data.

    Raises: ValueError when `folder` holds no complete checkpoint.
    """
    if not (folder / ".metadata").is_file():
        raise ValueError(f"{folder}: must be a checkpoint of torch.distributed.checkpoint, found no .metadata")
    entries = FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    model = {n: e for n, e in entries.items() if n.split(".")[0] not in _TRAINING_STATE}
    odd = [name for name, entry in model.items() if not isinstance(entry, TensorStorageMetadata)]
    if odd:
        raise ValueError(f"{folder}: not in the model: {'; '.join(odd[:3])}")
    tensors: dict[str, Any] = model
    return Stored(
        folder,
        {name: entry.properties.dtype for name, entry in tensors.items()},
        {name: tuple(entry.size) for name, entry in tensors.items()},
    )


def dcp_to_hf(
    source: Path, target: Path, config: KimiLinearModel.Config | None = None, shard_bytes: int = SHARD_BYTES
) -> int:
    """Convert a DCP checkpoint, be it of hf_to_dcp or a step of a training run.

    Args:
        source: Folder with `.metadata`.
        target: Folder to make; must be empty or not exist.
        config: Config of the model; None takes config.json in `source`.
        shard_bytes: Start another file when one would grow beyond this.
    Returns: number of tensors in the new checkpoint.
    Raises: ValueError for a checkpoint that does not fit the model, and for a target that is not empty.
    """
    stored = open_dcp(source)
    model = load_config(source) if config is None else config
    entries = layout(model)
    check_layout({name: e.shape for name, e in entries.items()}, stored.shapes, where=str(source))
    _make_empty(target)
    adapter = KimiLinearStateDictAdapter(model, None)
    files = _split_into_files(entries, stored.dtypes, shard_bytes)
    weight_map: dict[str, str] = {}
    total = 0
    for number, names in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else "model.safetensors"
        sizes = _write_file(target / file, stored, adapter, names)
        weight_map |= dict.fromkeys(sizes, file)
        total += sum(sizes.values())
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (target / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    _write_config(source, target, model, stored.dtypes["tok_embeddings.weight"])
    _copy_companions(source, target)
    return len(weight_map)


def _write_file(
    path: Path, stored: Stored, adapter: KimiLinearStateDictAdapter, names: Iterable[str]
) -> dict[str, int]:
    """Write one safetensors file; returns bytes by name. Its tensors are gone before the next file is read."""
    disk = {d: v.contiguous() for name in names for d, v in adapter.to_hf({name: stored.read(name)}).items()}
    save_file(disk, path, metadata={"format": "pt"})
    return {name: value.nbytes for name, value in disk.items()}


def _split_into_files(
    entries: Mapping[str, Entry], dtypes: Mapping[str, torch.dtype], shard_bytes: int
) -> list[list[str]]:
    files: list[list[str]] = [[]]
    size = 0
    for name, entry in entries.items():
        nbytes = torch.Size(entry.shape).numel() * dtypes[name].itemsize
        if files[-1] and size + nbytes > shard_bytes:
            files.append([])
            size = 0
        files[-1].append(name)
        size += nbytes
    return files


def _write_config(source: Path, target: Path, model: KimiLinearModel.Config, dtype: torch.dtype) -> None:
    if (source / "config.json").is_file():
        shutil.copyfile(source / "config.json", target / "config.json")
        return
    config = config_from_model(model, _DTYPE_NAMES.get(dtype, "float32"))
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


# ---- files -----------------------------------------------------------------------------------------------------------


def _make_empty(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target}: must be a new or empty folder")
    target.mkdir(parents=True, exist_ok=True)


def _copy_companions(source: Path, target: Path) -> None:
    for pattern in _COMPANIONS:
        for path in source.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, target / path.name)


@contextmanager
def _quiet() -> Iterator[None]:
    """DCP says that it works in one process, which is meant here."""
    logger = logging.getLogger("torch.distributed.checkpoint")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
