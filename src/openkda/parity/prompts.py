"""What both models read: token ids, and the text they stand for where there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from openkda.integrations.torchtitan.documents import default_documents
from openkda.integrations.torchtitan.tokenizer import ByteTokenizer, FileTokenizer

NUM_DEFAULT, SHORTEST = 8, 200


@dataclass(frozen=True)
class Prompt:
    """One text. ids: `[1, T]` int64. pieces: what each token stands for, T strings."""

    name: str
    ids: torch.Tensor
    pieces: tuple[str, ...]

    @property
    def length(self) -> int:
        return self.ids.shape[1]


def make_prompts(file: Path | None, folder: Path, vocab_size: int) -> list[Prompt]:
    """The prompts of a file, or eight passages of the reference topics that come with Python.

    Args:
        file: Text with one prompt a paragraph (blank lines between them); None for the passages.
        folder: Of the checkpoint; its tokenizer.json is used, and bytes where there is none.
        vocab_size: Of the model.
    Raises: ValueError for a file without text, or a tokenizer that makes ids the model has no embedding for.
    """
    tokenizer_file = folder / "tokenizer.json"
    if tokenizer_file.is_file():
        tokenizer = FileTokenizer.Config(path=str(tokenizer_file)).build(tokenizer_path="")
    else:
        tokenizer = ByteTokenizer.Config().build(tokenizer_path="")
    texts = list(_passages()) if file is None else _paragraphs(file)
    prompts = []
    for name, text in texts:
        ids = tokenizer.encode(text, add_bos=False, add_eos=False)
        if not ids or max(ids) >= vocab_size:
            raise ValueError(
                f"prompts: ids of {name} must be below the vocabulary size {vocab_size}, got {max(ids, default=None)}; "
                "give the checkpoint its tokenizer.json"
            )
        prompts.append(Prompt(name, torch.tensor([ids]), _pieces(tokenizer.decode, ids)))
    return prompts


def _passages() -> Iterator[tuple[str, str]]:
    """Eight passages of different lengths, none a multiple of the operator's chunk of 64 tokens."""
    long = [d for d in default_documents() if len(d.text) > 1000]
    for i, document in enumerate(long[:: len(long) // NUM_DEFAULT][:NUM_DEFAULT]):
        text = " ".join(document.text.encode("ascii", "ignore").decode().split())
        yield document.name, text[: SHORTEST + 1 + 6 * i]


def _paragraphs(file: Path) -> list[tuple[str, str]]:
    if not file.is_file():
        raise ValueError(f"{file}: no such file")
    texts = [" ".join(part.split("\n")).strip() for part in file.read_text().split("\n\n")]
    named = [(f"{file.name}:{i}", text) for i, text in enumerate(filter(None, texts), 1)]
    if not named:
        raise ValueError(f"{file}: must hold text, found none")
    return named


def _pieces(decode: Callable[[list[int]], str], ids: list[int]) -> tuple[str, ...]:
    return tuple(decode([i]) for i in ids)
