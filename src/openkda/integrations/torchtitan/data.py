"""Local text for torchtitan: documents packed into sequences, with positions that restart at every document.

A training sequence is `seq_len` tokens of the stream of documents, in an order shuffled anew each epoch. Inputs and
labels are shifted inside a document, so no label crosses a boundary (as in torchtitan's own loader). A document that
does not end with the sequence goes on at position 0 in the next one: every sequence starts from an empty state. Ranks
take every `dp_world_size`-th document of one shuffled order.

The stream is a function of (epoch, document, token): those three numbers are all that a checkpoint stores, and a
resumed run reads on at exactly the next token.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.tokenizer import BaseTokenizer

from openkda.integrations.torchtitan.documents import (
    Corpus,
    DataError,
    Document,
    read_documents,
    split_documents,
    spread,
)

# One sequence: {"input": [seq_len], "positions": [seq_len]} and labels [seq_len], all int64.
Sample = tuple[dict[str, torch.Tensor], torch.Tensor]


class TextDataLoader(ParallelAwareDataloader):
    """The loader of torchtitan's trainer and validator for local text.

    With `infinite` it is an endless, shuffled, resumable stream; without, one pass in order over padded sequences of
    which every rank gets the same number.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        dataset_path: str | None = None
        """Text file, folder, JSON lines or Hugging Face dataset on disk; unset: the reference topics that come with
        Python.
        """

        split: Literal["train", "heldout"] = "train"
        """Which part of the documents to read."""

        heldout_fraction: float = 0.05
        """Share of the text, by document, that is held out."""

        heldout_bytes: int = 1 << 18
        """Measure on no more held-out text than this many bytes, so that measuring stays short on large data."""

        infinite: bool = True
        """Whether to go round the documents without end."""

        seed: int = 0
        """Seed of the order of documents, which differs from epoch to epoch."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer,
        seq_len: int,
        local_batch_size: int,
        snapshot_every_n_steps: int | None = 1,
        **kwargs: Any,
    ) -> None:
        corpus = load_corpus(config.dataset_path, config.heldout_fraction)
        documents = corpus.train if config.split == "train" else first_bytes(corpus.heldout, config.heldout_bytes)
        source = config.dataset_path or "default text"
        dataset: Dataset[Sample]
        if config.infinite:
            check_length(documents, tokenizer, seq_len, source)
            documents = spread(documents, dp_world_size)
            if len(documents) < dp_world_size:
                raise DataError(f"{source}: is too short for {dp_world_size} data-parallel ranks")
            dataset = PackedStream(
                documents, tokenizer, seq_len, seed=config.seed, rank=dp_rank, world_size=dp_world_size
            )
        else:
            dataset = PaddedSequences(documents, tokenizer, seq_len, rank=dp_rank, world_size=dp_world_size)
        super().__init__(
            dataset,  # pyright: ignore[reportArgumentType]  # torchtitan annotates IterableDataset; its base takes any Dataset
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            batch_size=local_batch_size,
            num_workers=config.num_workers,
            persistent_workers=config.persistent_workers,
            prefetch_factor=config.prefetch_factor,
            pin_memory=config.pin_memory,
            snapshot_every_n_steps=snapshot_every_n_steps,
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = state_dict.get("world_size", self.dp_world_size)
        if saved != self.dp_world_size:
            raise DataError(
                f"a checkpoint of {saved} data-parallel ranks must go on with as many, got {self.dp_world_size}: "
                "others would not know what text was read; all other degrees may change"
            )
        super().load_state_dict(state_dict)


def load_corpus(path: str | None, fraction: float) -> Corpus:
    """Read and split the text at `path`; asked again for the same unchanged path, answer from memory."""
    stamp = None
    if path is not None and Path(path).exists():
        stat = Path(path).stat()
        stamp = (stat.st_mtime_ns, stat.st_size)
    return _load_corpus(path, fraction, stamp)


@functools.lru_cache(maxsize=1)  # the trainer and each validation ask for the same one
def _load_corpus(path: str | None, fraction: float, stamp: tuple[int, int] | None) -> Corpus:
    return split_documents(read_documents(path), fraction)


def first_bytes(documents: Sequence[Document], limit: int) -> list[Document]:
    """The first documents, at least one, that together hold no more than `limit` bytes."""
    chosen: list[Document] = []
    total = 0
    for i in range(len(documents)):
        total += len(documents[i].text.encode())
        if chosen and total > limit:
            break
        chosen.append(documents[i])
    return chosen


def check_length(documents: Sequence[Document], tokenizer: BaseTokenizer, seq_len: int, source: str) -> None:
    """Raise DataError when all documents together do not fill one sequence."""
    total = 0
    for i in range(len(documents)):
        total += len(encode(tokenizer, documents[i])) - 1
        if total >= seq_len:
            return
    raise DataError(
        f"{source}: {total} tokens to train on are fewer than one sequence of {seq_len}; "
        "give more text, or a smaller --training.seq_len"
    )


def encode(tokenizer: BaseTokenizer, document: Document) -> np.ndarray:
    """Token ids of a document between its begin and end marks, `[n + 1]` int64: n inputs and n labels."""
    return np.asarray(tokenizer.encode(document.text, add_bos=True, add_eos=True), dtype=np.int64)


class PackedStream(IterableDataset[Sample]):
    """An endless stream of full sequences; see the module's docstring.

    Position in the stream: `epoch`, `cursor` (into this rank's documents of that epoch) and `offset` (labels already
    used of the document there).
    """

    def __init__(
        self,
        documents: Sequence[Document],
        tokenizer: BaseTokenizer,
        seq_len: int,
        *,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.documents, self.tokenizer, self.seq_len = documents, tokenizer, seq_len
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.epoch, self.cursor, self.offset = 0, 0, 0
        self._encoded: tuple[int, np.ndarray] | None = None

    def __iter__(self) -> Iterator[Sample]:
        while True:
            yield self._next_sequence()

    def _next_sequence(self) -> Sample:
        pieces: list[np.ndarray] = []
        missing = self.seq_len
        for tokens in self._documents_from_here():
            piece = tokens[self.offset : self.offset + missing + 1]
            pieces.append(piece)
            missing -= len(piece) - 1
            self.offset += len(piece) - 1
            if missing == 0:
                break
        return pack(pieces, self.seq_len)

    def _documents_from_here(self) -> Iterator[np.ndarray]:
        """Tokens of the document at the cursor, then of the ones after it; moves the cursor only past what is used
        up.
        """
        order = self._order()
        while True:
            if self.cursor == len(order):
                self.epoch, self.cursor = self.epoch + 1, 0
                order = self._order()
            tokens = self._encode(int(order[self.cursor]))
            if self.offset < len(tokens) - 1:
                yield tokens
            if self.offset >= len(tokens) - 1:
                self.cursor, self.offset = self.cursor + 1, 0

    def _encode(self, index: int) -> np.ndarray:
        # A long document fills many sequences; it is encoded once.
        if self._encoded is None or self._encoded[0] != index:
            self._encoded = index, encode(self.tokenizer, self.documents[index])
        return self._encoded[1]

    def _order(self) -> np.ndarray:
        # RandomState, not default_rng: its streams are frozen for good, so a checkpoint resumes under any later numpy.
        order = np.random.RandomState([self.seed, self.epoch]).permutation(len(self.documents))
        return order[self.rank :: self.world_size]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "cursor": self.cursor, "offset": self.offset}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.cursor, self.offset = state["epoch"], state["cursor"], state["offset"]


class PaddedSequences(Dataset[Sample]):
    """One pass over the documents in order; the end of the last sequence, and whole sequences to even out the ranks,
    are padding.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        tokenizer: BaseTokenizer,
        seq_len: int,
        *,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        samples = list(_pad_all(documents, tokenizer, seq_len))
        while len(samples) % world_size:
            samples.append(pack([], seq_len))
        self.samples = samples[rank::world_size]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]


def _pad_all(documents: Sequence[Document], tokenizer: BaseTokenizer, seq_len: int) -> Iterator[Sample]:
    pieces: list[np.ndarray] = []
    missing = seq_len
    for i in range(len(documents)):
        tokens = encode(tokenizer, documents[i])
        offset = 0
        while offset < len(tokens) - 1:
            piece = tokens[offset : offset + missing + 1]
            pieces.append(piece)
            offset += len(piece) - 1
            missing -= len(piece) - 1
            if missing == 0:
                yield pack(pieces, seq_len)
                pieces, missing = [], seq_len
    if pieces:
        yield pack(pieces, seq_len)


def pack(pieces: list[np.ndarray], seq_len: int) -> Sample:
    """Lay token runs side by side, each of n+1 tokens giving n inputs, n labels and positions 0..n-1; fill up with
    padding.

    Padding is a run of its own, token 0 with labels that the loss ignores.
    """
    runs = [*pieces, np.zeros(1 + seq_len - sum(len(p) - 1 for p in pieces), dtype=np.int64)]
    inputs = np.concatenate([run[:-1] for run in runs])
    labels = np.concatenate([*(run[1:] for run in pieces), np.full(len(runs[-1]) - 1, IGNORE_INDEX, dtype=np.int64)])
    positions = np.concatenate([np.arange(len(run) - 1) for run in runs])
    as_tensor = torch.from_numpy
    return {"input": as_tensor(inputs), "positions": as_tensor(positions)}, as_tensor(labels)


def count_heldout(config: TextDataLoader.Config, tokenizer: BaseTokenizer) -> tuple[int, int]:
    """Labels and UTF-8 bytes of the held-out text that the validator reads: bits per byte = nats/label * labels/bytes
    / ln 2.
    """
    corpus = load_corpus(config.dataset_path, config.heldout_fraction)
    documents = first_bytes(corpus.heldout, config.heldout_bytes)
    labels = sum(len(encode(tokenizer, d)) - 1 for d in documents)
    return labels, sum(len(d.text.encode()) for d in documents)
