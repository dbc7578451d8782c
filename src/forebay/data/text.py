"""Text files to batches: tokenised once, cut into windows, shuffled anew in every epoch."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, final

import torch

from forebay.data.tokenizers import Tokenizer
from forebay.errors import ModelError, UsageError

__all__ = ["Windows", "read_text", "tokenize"]


def read_text(path: Path) -> str:
    """The text of a UTF-8 file. Raises ``UsageError`` naming a file that is missing, empty or not text."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"there is no data file {path}") from None
    except IsADirectoryError:
        raise UsageError(f"the data file {path} is a folder; give its files, for example {path}/*.txt") from None
    except OSError as error:
        raise UsageError(f"cannot read the data file {path}: {error.strerror}") from None
    if not content.strip():
        raise UsageError(f"the data file {path} is empty; give text to train on")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"the data file {path} is not UTF-8 text (byte {error.start}); convert it first") from None
    if "\0" in text:
        raise UsageError(f"the data file {path} is binary: it holds zero bytes; give plain text")
    return text


def tokenize(paths: Iterable[Path], tokenizer: Tokenizer) -> torch.Tensor:
    """All tokens of the files in their order, one dimension. Raises ``UsageError`` as ``read_text`` does."""
    return torch.cat([tokenizer.encode(read_text(path)) for path in paths])


@final
class Windows:
    """Batches of shape (batch, seq) out of a row of tokens.

    The row is cut into windows of ``seq`` tokens that do not overlap; each epoch deals them in an order of its own,
    which ``seed`` decides, and leaves out the last windows that fill no batch. Batch ``index`` depends on nothing but
    the arguments, so a run can start again at any batch. What is ``beside`` goes with each.
    """

    def __init__(
        self, tokens: torch.Tensor, *, batch: int, seq: int, seed: int, beside: Mapping[str, bool] | None = None
    ) -> None:
        needed = batch * seq
        if tokens.numel() < needed:
            raise UsageError(
                f"the text has {tokens.numel()} tokens and one batch of {batch} x {seq} needs {needed}; give more "
                "text, or lower --batch or --seq"
            )
        self._windows = tokens[: tokens.numel() // seq * seq].view(-1, seq)
        self._batch = batch
        self._seed = seed
        self._beside = dict(beside or {})
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64, device="cpu")

    @property
    def tokens(self) -> int:
        """Tokens in the row, the last ones that fill no window left out."""
        return self._windows.numel()

    @property
    def crc32(self) -> int:
        """A checksum of these tokens."""
        return zlib.crc32(self._windows.view(torch.uint8).numpy().data)

    @property
    def per_epoch(self) -> int:
        """Batches in an epoch."""
        return self._windows.shape[0] // self._batch

    def batch(self, index: int) -> dict[str, Any]:
        """Batch ``index`` (0 or more): ``input_ids`` and ``labels``, int64, shape (batch, seq).

        The two are equal: transformers' models shift the labels themselves.
        """
        epoch, place = divmod(index, self.per_epoch)
        if epoch != self._epoch:
            order = torch.Generator().manual_seed((self._seed + epoch) % 2**63)
            self._order = torch.randperm(self._windows.shape[0], generator=order, device="cpu")
            self._epoch = epoch
        rows = self._order[place * self._batch : (place + 1) * self._batch]
        input_ids = self._windows[rows].to(torch.int64)
        return {"input_ids": input_ids, "labels": input_ids.clone(), **self._beside}

    def check_range(self, tokenizer: str, vocabulary: int) -> None:
        """Raises ``ModelError`` when a token is outside the model's vocabulary (a number of tokens)."""
        highest = int(self._windows.max())
        if highest >= vocabulary:
            raise ModelError(
                f"{tokenizer} gives token {highest} and the model's vocabulary has {vocabulary}; use the tokenizer "
                "that belongs to the model"
            )
