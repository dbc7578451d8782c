"""Writing a model as transformers reads it, one tensor in memory at a time.

A safetensors file starts with the length of its header (8 bytes, little endian), then the header (JSON, spaces may
follow), then the tensors. The header names every shape, so writing it first would mean reading every tensor twice.
Here a space wide enough is left for it and filled in when the last tensor has been written.
"""

from __future__ import annotations

import copy
import json
import os
import struct
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, final

from forebay.checkpoint.inventory import dtype_name
from forebay.checkpoint.source import Source, kept_dtype, raw_bytes, saved_buffers
from forebay.checkpoint.weights import INDEX
from forebay.errors import StorageError

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["export_model", "write_configuration", "write_safetensors"]

SHARD_NBYTES = 5 * 1000**3
"""Bytes of tensors after which a new file begins."""

_TENSOR_ENTRY = 512
"""Bytes: more than the header's entry of any tensor of up to 16 dimensions takes, its name left out."""

Written = tuple[str, "torch.Tensor", "torch.dtype"]
"""A tensor by its name, and as what it is written."""


def export_model(
    model: nn.Module,
    parameters: Mapping[str, torch.Tensor],
    folder: Path,
    *,
    shard_nbytes: int = SHARD_NBYTES,
) -> None:
    """Writes config.json and the weights into ``folder``, so that ``from_pretrained(folder)`` loads them.

    ``parameters`` maps plain PyTorch names to tensors and may read each one as it is asked for; a tied parameter is
    in it once, under its first name. Values are written as they are: the fp32 master of a bf16 parameter stays fp32,
    and ``from_pretrained`` rounds it to the configuration's dtype. Files hold about ``shard_nbytes`` each.

    Raises ``StorageError`` when the folder cannot be written; no file under its final name is then incomplete.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = [*parameters, *saved_buffers(model)]
        _write_shards(_tensors(model, parameters), names, folder, shard_nbytes)
        write_configuration(model, folder, None)  # last: an export that fails leaves nothing
    except OSError as error:
        raise StorageError(f"cannot write the model to {folder}: {error.strerror or error}") from error


def write_configuration(model: nn.Module, folder: Path, dtype: torch.dtype | None) -> list[Path]:
    """Writes config.json of a model of transformers, which says ``dtype`` (None: the one that it was made with), and
    generation_config.json where it generates. Returns the files."""
    whole: Any = model
    config = copy.deepcopy(whole.config)
    config.architectures = [type(model).__name__]
    if dtype is not None:
        config.dtype = dtype
    config.save_pretrained(folder)
    files = [folder / "config.json"]
    if whole.can_generate() and whole.generation_config is not None:
        whole.generation_config.save_pretrained(folder)
        files.append(folder / "generation_config.json")
    return files


def write_safetensors(
    source: Source, folder: Path, dtype: torch.dtype | None, *, shard_nbytes: int = SHARD_NBYTES
) -> list[Path]:
    """Writes the tensors of ``source`` as ``dtype`` (None: as they are) into ``folder``, which exists. Returns the
    files; raises ``OSError`` after removing what was written."""
    tensors = ((name, source.read(name), kept_dtype(entry, dtype)) for name, entry in source.entries.items())
    return _write_shards(tensors, list(source.entries), folder, shard_nbytes)


def _tensors(model: nn.Module, parameters: Mapping[str, torch.Tensor]) -> Iterator[Written]:
    for name in parameters:
        tensor = parameters[name]
        yield name, tensor, tensor.dtype
        del tensor  # or the next one would be read while this one is still held
    yield from ((name, buffer, buffer.dtype) for name, buffer in saved_buffers(model).items())


def _write_shards(tensors: Iterator[Written], names: Collection[str], folder: Path, shard_nbytes: int) -> list[Path]:
    header = 64 + sum(len(json.dumps(name)) + _TENSOR_ENTRY for name in names)
    shards: list[_Shard] = []
    try:
        for name, tensor, dtype in tensors:
            if not shards or shards[-1].nbytes >= shard_nbytes:
                shards.append(_Shard(folder / f"model-{len(shards) + 1:05d}.part", header))
            shards[-1].add(name, tensor, dtype)
            del tensor  # or the next one would be read while this one is still held
        for shard in shards:
            shard.finish()
    except BaseException:
        for shard in shards:
            shard.abandon()
        raise
    if len(shards) == 1:
        os.replace(shards[0].path, folder / "model.safetensors")
        return [folder / "model.safetensors"]
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        target = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        os.replace(shard.path, folder / target)
        places.update(dict.fromkeys(shard.entries, target))
    index = {"metadata": {"total_size": sum(shard.nbytes for shard in shards)}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return [folder / INDEX, *(folder / name for name in dict.fromkeys(places.values()))]


@final
class _Shard:
    """One file under way: a space of ``header`` bytes, then tensors one after the other."""

    def __init__(self, path: Path, header: int) -> None:
        self.path = path
        self.nbytes = 0
        self.entries: dict[str, dict[str, Any]] = {}
        self._header = header
        self._file: IO[bytes] = path.open("wb")
        self._file.seek(8 + header)

    def add(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        """Appends ``tensor`` as ``dtype``."""
        begin = self.nbytes
        for piece in raw_bytes(tensor, dtype):
            self._file.write(piece)
            self.nbytes += piece.nbytes
        self.entries[name] = {
            "dtype": dtype_name(str(dtype).removeprefix("torch.")),
            "shape": list(tensor.shape),
            "data_offsets": [begin, self.nbytes],
        }

    def finish(self) -> None:
        """Fills the header in and waits until the file is on disk."""
        header = json.dumps({"__metadata__": {"format": "pt"}, **self.entries}).encode()
        self._file.seek(0)
        self._file.write(struct.pack("<Q", self._header) + header.ljust(self._header))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        """Removes what was written."""
        self._file.close()
        self.path.unlink(missing_ok=True)
