"""Local text as documents, and the part of it that is held out. No torch here, and nothing is downloaded.

Where text may come from (`read_documents`):
- no path: the language-reference topics that ship with Python (`pydoc_data.topics`), one document a topic;
- a text file, or a folder of them (read recursively, hidden files left out): one document a file, UTF-8;
- JSON lines as C4 has them (`.jsonl`, `.ndjson`, `.json`, plain or `.gz`): one document a line, in its field "text";
- a Hugging Face dataset on disk (`save_to_disk`, or `.parquet` / `.arrow` files): one document a row, in its column
  "text".
Text and JSON lines are held in memory; a dataset stays on disk and is read row by row.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
TABLE_SUFFIXES = (".parquet", ".arrow")
# A longer file is read as several documents, cut at line ends: that bounds what one tokenizer call sees, and lets one
# big file be shuffled, held out from and shared between ranks. Sequences are far shorter, so little context is lost.
MAX_DOCUMENT_CHARS = 1 << 20
# Paragraphs shorter than this recur by nature ("See also:", a closing brace); longer ones in two documents are copies.
MIN_COPIED_CHARS = 40


class DataError(ValueError):
    """The text the user pointed at cannot be trained on; the message names the file and the place in it."""


@dataclass(frozen=True, slots=True)
class Document:
    """One text and the name it is known by: a topic, a path below the folder, or `file:line`."""

    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Documents to train on, and documents kept back to measure with."""

    train: Sequence[Document]
    heldout: Sequence[Document]


def read_documents(path: str | os.PathLike[str] | None) -> Sequence[Document]:
    """Read the documents at `path`, or the default text for None.

    Raises: DataError when the path is missing, is empty, is not UTF-8, or holds a JSON line or a table without "text".
    """
    if path is None:
        return default_documents()
    root = Path(path)
    if not root.exists():
        raise DataError(f"{root}: no such file or folder")
    documents = _read_folder(root) if root.is_dir() else _read_file(root, root.name)
    if len(documents) == 0:
        raise DataError(f"{root}: holds no text")
    return documents


def default_documents() -> list[Document]:
    """The topics of `pydoc_data`: about 470 kB of English reference prose that is part of every Python installation."""
    from pydoc_data.topics import topics

    return [Document(name, topics[name]) for name in sorted(topics)]


# ---- reading -------------------------------------------------------------------------------------------------------


def _read_folder(root: Path) -> Sequence[Document]:
    if any((root / mark).is_file() for mark in ("state.json", "dataset_dict.json")):
        return _read_saved_dataset(root)
    files = sorted(p for p in root.rglob("*") if p.is_file() and not _is_hidden(p.relative_to(root)))
    tables = [p for p in files if p.suffix in TABLE_SUFFIXES]
    if tables:
        return _read_tables(root, tables)
    return [d for p in files for d in _read_file(p, p.relative_to(root).as_posix())]


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def _read_file(path: Path, name: str) -> Sequence[Document]:
    if path.suffix in TABLE_SUFFIXES:
        return _read_tables(path, [path])
    text = _decode(path, _read_bytes(path))
    stem = path.name.removesuffix(".gz")
    if stem.endswith(JSON_SUFFIXES):
        return list(_json_lines(path, name, text))
    return list(_pieces(name, text, MAX_DOCUMENT_CHARS))


def _read_bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:  # BadGzipFile is an OSError
        raise DataError(f"{path}: cannot be read: {error}") from error


def _decode(path: Path, data: bytes) -> str:
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        byte = data[error.start]
        raise DataError(f"{path}: is not UTF-8 text: byte 0x{byte:02x} at offset {error.start}") from error


def _pieces(name: str, text: str, limit: int) -> Iterator[Document]:
    """The text as one document, or as several of at most `limit` characters that end at line ends where there are
    any.
    """
    start = 0
    while start < len(text):
        end = start + limit
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        piece = text[start:end]
        if not piece.isspace():
            yield Document(name if start == 0 else f"{name}@{start}", piece)
        start = end


def _json_lines(path: Path, name: str, text: str) -> Iterator[Document]:
    # Only "\n" ends a JSON line: str.splitlines would also cut at U+2028, which may stand unescaped inside a JSON
    # string.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}: line {number} is not JSON: {error.msg} (column {error.colno})") from error
        except (ValueError, RecursionError) as error:  # thousands of digits, thousands of brackets
            raise DataError(f"{path}: line {number} cannot be read: {error}") from error
        if not isinstance(record, dict) or not isinstance(record.get("text"), str):
            raise DataError(
                f'{path}: line {number} has no "text" string; each line must be an object like {{"text": "..."}}'
            )
        if any("\ud800" <= c <= "\udfff" for c in set(record["text"])):
            raise DataError(f'{path}: line {number} has half a surrogate pair in "text", which no UTF-8 text can hold')
        if record["text"].strip():
            yield Document(f"{name}:{number}", record["text"])


# ---- Hugging Face datasets -----------------------------------------------------------------------------------------


def _read_saved_dataset(root: Path) -> Sequence[Document]:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(root))
    except Exception as error:  # the library raises many kinds for a damaged folder; all mean the same to the user
        raise DataError(f"{root}: cannot be read as a Hugging Face dataset: {error}") from error
    if isinstance(loaded, datasets.DatasetDict):
        if "train" not in loaded:
            raise DataError(f'{root}: has no split "train"; it has {", ".join(map(str, loaded))}')
        loaded = loaded["train"]
    return _TableDocuments(root, loaded)


def _read_tables(root: Path, files: list[Path]) -> Sequence[Document]:
    import datasets

    kinds = {p.suffix for p in files}
    if len(kinds) > 1:
        raise DataError(f"{root}: holds both .parquet and .arrow files; point --data at one kind")
    datasets.disable_progress_bars()
    try:
        if kinds == {".arrow"}:
            table = datasets.concatenate_datasets([datasets.Dataset.from_file(str(p)) for p in files])
        else:
            table = datasets.Dataset.from_parquet([str(p) for p in files])
    except Exception as error:  # as above
        raise DataError(f"{root}: cannot be read as a Hugging Face dataset: {error}") from error
    return _TableDocuments(root, table)


class _TableDocuments(Sequence[Document]):
    """Rows of a Hugging Face dataset as documents, read when they are asked for."""

    def __init__(self, root: Path, table: Any, rows: range | None = None) -> None:
        if "text" not in table.column_names:
            raise DataError(f'{root}: has no column "text"; its columns are {", ".join(table.column_names)}')
        self.root, self.table = root, table
        self.rows = range(table.num_rows) if rows is None else rows

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Document: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Document]: ...
    def __getitem__(self, index: int | slice) -> Document | Sequence[Document]:
        if isinstance(index, slice):
            return _TableDocuments(self.root, self.table, self.rows[index])
        row = self.rows[index]
        text = self.table[row]["text"]
        if not isinstance(text, str):
            raise DataError(f'{self.root}: row {row} has no "text" string, but {type(text).__name__}')
        return Document(f"row {row}", text)


# ---- holding out ---------------------------------------------------------------------------------------------------


def split_documents(documents: Sequence[Document], fraction: float = 0.05) -> Corpus:
    """Hold out `fraction` of the text, by whole documents, the same ones every time.

    Documents are taken in the order of a hash of their names, as long as they fit in `fraction` of all bytes: adding
    a file later does not move the others, and no order in the data matters. A paragraph of a held-out document that
    also stands in another one is taken out of that one, so that what is measured was never seen. Where not even one
    document fits (one book, say), the last `fraction` of each is held out instead. Of a dataset on disk, whose sizes
    are not known, every 1/fraction-th row is held out.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"split_documents: fraction must be between 0 and 1, got {fraction}")
    if isinstance(documents, _TableDocuments) and len(documents) >= 2 / fraction:
        return _split_rows(documents, round(1 / fraction))
    sizes = [len(d.text.encode()) for d in documents]
    budget = fraction * sum(sizes)
    held: set[int] = set()
    for i in sorted(range(len(documents)), key=lambda i: hashlib.blake2b(documents[i].name.encode()).digest()):
        if sizes[i] <= budget:
            held.add(i)
            budget -= sizes[i]
    if not held:
        return _split_tails(documents, fraction)
    heldout = [documents[i] for i in sorted(held)]
    return Corpus([d for d in _without_shared(documents, held) if d.text.strip()], heldout)


def _split_rows(documents: _TableDocuments, stride: int) -> Corpus:
    train = _Skipping(documents, stride)
    return Corpus(train, documents[stride - 1 :: stride])


class _Skipping(Sequence[Document]):
    """All items but every `stride`-th, by index arithmetic: nothing is copied, whatever the size."""

    def __init__(self, items: Sequence[Document], stride: int) -> None:
        self.items, self.stride = items, stride

    def __len__(self) -> int:
        return len(self.items) - len(self.items) // self.stride

    @overload
    def __getitem__(self, index: int) -> Document: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Document]: ...
    def __getitem__(self, index: int | slice) -> Document | Sequence[Document]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.items[index + index // (self.stride - 1)]


def _split_tails(documents: Sequence[Document], fraction: float) -> Corpus:
    train, heldout = [], []
    for d in documents:
        tail = round(len(d.text) * fraction)
        cut = len(d.text) - tail
        cut = d.text.rfind("\n", cut - tail, cut) + 1 or cut  # at a line end where one is near
        train.append(Document(d.name, d.text[:cut]))
        heldout.append(Document(f"{d.name} (end)", d.text[cut:]))
    return Corpus([d for d in train if d.text.strip()], [d for d in heldout if d.text.strip()])


def _without_shared(documents: Sequence[Document], held: set[int]) -> Iterator[Document]:
    seen = {p.strip() for i in held for p in documents[i].text.split("\n\n") if len(p.strip()) >= MIN_COPIED_CHARS}
    for i, d in enumerate(documents):
        if i not in held:
            kept = [p for p in d.text.split("\n\n") if p.strip() not in seen]
            yield Document(d.name, "\n\n".join(kept))


# ---- sharing between ranks -------------------------------------------------------------------------------------------


def spread(documents: Sequence[Document], ranks: int) -> Sequence[Document]:
    """The documents as they are when each rank can have one; otherwise cut at line ends, into about four for each
    rank.
    """
    if len(documents) >= ranks:
        return documents
    size = max(1, sum(len(d.text) for d in documents) // (4 * ranks))
    return [piece for d in documents for piece in _pieces(d.name, d.text, size)]
