"""Tokenizers for the text loader: bytes as they are, or a `tokenizer.json` of the `tokenizers` library.

torchtitan's own `HuggingFaceTokenizer` wants a folder with a `tokenizer_config.json` beside the vocabulary; these two
want nothing or one file, and both answer `bos_id` and `eos_id` (None where a vocabulary has no such token).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.components.tokenizer import BaseTokenizer

from openkda.integrations.torchtitan.documents import DataError

NUM_BYTES = 256
BOS, EOS, PAD = 256, 257, 258
BYTE_VOCAB_SIZE = 260  # 259 used, padded to a multiple of 4

# What the vocabularies of public models call the two ends of a document; the first that exists is taken.
BOS_NAMES = ("[BOS]", "<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "<|endoftext|>")
EOS_NAMES = ("[EOS]", "</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>")


class ByteTokenizer(BaseTokenizer):
    """UTF-8 bytes are token ids 0..255; 256 begins a document, 257 ends it, 258 is padding."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config | None = None, *, tokenizer_path: str = "") -> None:
        super().__init__()
        self.bos_id: int | None = BOS
        self.eos_id: int | None = EOS

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        return [*([BOS] if add_bos else []), *text.encode(), *([EOS] if add_eos else [])]

    def decode(self, ids: list[int], **kwargs: Any) -> str:
        """Text of the bytes among `ids`; specials are left out, an unfinished or invalid character becomes U+FFFD."""
        return bytes(i for i in ids if i < NUM_BYTES).decode("utf-8", errors="replace")

    def get_vocab_size(self) -> int:
        return BYTE_VOCAB_SIZE


class FileTokenizer(BaseTokenizer):
    """A `tokenizer.json`, with begin and end of document found by their usual names."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        path: str
        """The tokenizer.json file."""

    def __init__(self, config: Config, *, tokenizer_path: str = "") -> None:
        from tokenizers import Tokenizer

        super().__init__()
        if not Path(config.path).is_file():
            raise DataError(f"{config.path}: no such tokenizer file")
        try:
            self.tokenizer = Tokenizer.from_file(config.path)
        except Exception as error:  # the Rust library raises bare Exception for whatever is wrong with the file
            raise DataError(f"{config.path}: is not a tokenizer.json: {error}") from error
        self.bos_id: int | None = self._first_known(BOS_NAMES)
        self.eos_id: int | None = self._first_known(EOS_NAMES)

    def _first_known(self, names: tuple[str, ...]) -> int | None:
        ids = (self.tokenizer.token_to_id(name) for name in names)
        return next((i for i in ids if i is not None), None)

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        bos = [self.bos_id] if add_bos and self.bos_id is not None else []
        eos = [self.eos_id] if add_eos and self.eos_id is not None else []
        return [*bos, *ids, *eos]

    def decode(self, ids: list[int], **kwargs: Any) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def get_vocab_size(self) -> int:
        return self.tokenizer.get_vocab_size(with_added_tokens=True)
