"""Text to token numbers: a model's own tokenizer where its folder brings one, bytes where it does not."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, final

import torch

from forebay.errors import ModelError

__all__ = ["ByteTokenizer", "FolderTokenizer", "Tokenizer", "find_tokenizer"]

_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model")


class Tokenizer(ABC):
    """Turns one document into tokens."""

    name: str

    @abstractmethod
    def encode(self, text: str) -> torch.Tensor:
        """The tokens of one document and the mark of its end: one dimension, an integer dtype that holds them."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes what reading the tokens back needs into ``folder``."""


@final
class ByteTokenizer(Tokenizer):
    """Every byte of the UTF-8 text is a token, 256 in all. Byte 0, which no text file holds, ends a document."""

    name = "bytes"

    def encode(self, text: str) -> torch.Tensor:
        return torch.frombuffer(bytearray(text.encode() + b"\0"), dtype=torch.uint8)

    def save(self, folder: Path) -> None:
        """Bytes need no file."""


@final
class FolderTokenizer(Tokenizer):
    """The tokenizer saved beside a model. Its end-of-sequence token, where it has one, ends a document."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self.name = f"the tokenizer of {folder}"
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError, ImportError) as error:
            reason = " ".join(str(error).split())[:400]
            raise ModelError(f"transformers cannot read the tokenizer of {folder}: {reason}") from None

    def encode(self, text: str) -> torch.Tensor:
        tokens: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        end: int | None = self._tokenizer.eos_token_id
        return torch.tensor(tokens if end is None else [*tokens, end], dtype=torch.int32, device="cpu")

    def save(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(folder)


def find_tokenizer(folder: Path | None) -> Tokenizer:
    """The tokenizer in ``folder``, or bytes where there is none. Raises ``ModelError`` if it cannot be read."""
    if folder is not None and any((folder / name).is_file() for name in _FILES):
        return FolderTokenizer(folder)
    return ByteTokenizer()
