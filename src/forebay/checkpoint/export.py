"""Writing a model as transformers reads it, part of a tensor in memory at a time.

A safetensors file starts with the length of its header (8 bytes, little endian), then the header (JSON, spaces may
follow), then the tensors.
"""

from __future__ import annotations

import copy
import json
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from forebay.checkpoint.inventory import dtype_name
from forebay.checkpoint.source import Source, kept_dtype
from forebay.checkpoint.weights import INDEX, Entry
from forebay.errors import ForebayError, ModelError

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["SHARD_NBYTES", "held_back", "write_configuration", "write_safetensors"]

SHARD_NBYTES = 5 * 1000**3
"""Bytes of tensors after which a new file begins."""


def write_configuration(model: nn.Module, folder: Path, dtype: torch.dtype | None) -> list[Path]:
    """Writes config.json of a model of transformers, which says ``dtype`` (None: the one that it was made with), and
    generation_config.json where it generates. Returns the files; raises ``ModelError`` for one that transformers
    refuses to write."""
    whole: Any = model
    config = copy.deepcopy(whole.config)
    config.architectures = [type(model).__name__]
    if dtype is not None:
        config.dtype = dtype
    try:
        config.save_pretrained(folder)
        files = [folder / "config.json"]
        if whole.can_generate() and whole.generation_config is not None:
            whole.generation_config.save_pretrained(folder)
            files.append(folder / "generation_config.json")
    except (AttributeError, TypeError, ValueError) as error:
        said = " ".join(str(error).split())[:300]
        raise ModelError(
            f"transformers does not write the configuration of this {type(model).__name__}; change model.config or "
            f"model.generation_config: {said}"
        ) from error
    return files


@contextmanager
def held_back(folder: Path) -> Iterator[Path]:
    """A folder for files that belong into ``folder`` and go there at the end; nothing of it is left where something is
    raised before that."""
    with TemporaryDirectory(prefix="beside-", dir=folder) as made:
        yield Path(made)
        for path in sorted(Path(made).iterdir()):
            os.replace(path, folder / path.name)


def write_safetensors(
    source: Source, folder: Path, dtype: torch.dtype | None, *, shard_nbytes: int = SHARD_NBYTES
) -> list[Path]:
    """Writes the tensors of ``source`` as ``dtype`` (None: as they are) into ``folder``, which exists, ``shard_nbytes``
    or somewhat more a file. Returns the files; raises ``OSError`` after removing what was written."""
    shards = _shards({n: Entry(e.shape, kept_dtype(e, dtype)) for n, e in source.entries.items()}, shard_nbytes)
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    parts = [folder / f"{name}.part" for name in names]
    made: list[Path] = []
    try:
        for path, entries in zip(parts, shards, strict=True):
            _write_file(path, source, entries)
        if len(shards) > 1:
            names.append(INDEX)
            parts.append(folder / f"{INDEX}.part")
            parts[-1].write_text(_index(dict(zip(names, shards, strict=False))), encoding="utf-8")
        for path, name in zip(parts, names, strict=True):
            os.replace(path, folder / name)
            made.append(folder / name)
    except BaseException:
        for path in (*parts, *made):
            path.unlink(missing_ok=True)
        raise
    return made


def _index(shards: Mapping[str, Mapping[str, Entry]]) -> str:
    """The text of the index of ``shards``, by the names of their files."""
    total = sum(entry.nbytes for entries in shards.values() for entry in entries.values())
    places = {tensor: name for name, entries in shards.items() for tensor in entries}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2) + "\n"


def _shards(entries: Mapping[str, Entry], nbytes: int) -> list[dict[str, Entry]]:
    """``entries`` in their order; what begins behind so many bytes of a file is in the next one."""
    shards: list[dict[str, Entry]] = [{}]
    filled = 0
    for name, entry in entries.items():
        if filled >= nbytes:
            shards.append({})
            filled = 0
        shards[-1][name] = entry
        filled += entry.nbytes
    return shards


def _write_file(path: Path, source: Source, entries: Mapping[str, Entry]) -> None:
    """Writes a file of the ``entries`` of ``source`` and waits until it is on the disk."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, entry in entries.items():
        begin, end = end, end + entry.nbytes
        dtype = dtype_name(str(entry.dtype).removeprefix("torch."))
        header[name] = {"dtype": dtype, "shape": list(entry.shape), "data_offsets": [begin, end]}
    said = json.dumps(header).encode()
    said = said.ljust(-(-len(said) // 8) * 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(said)) + said)
        for name, entry in entries.items():
            for piece in source.raw(name, entry.dtype):
                file.write(piece)
                del piece  # or the next one would be read while this one is still held
            if file.tell() != 8 + len(said) + header[name]["data_offsets"][1]:
                raise ForebayError(f"{name} has other bytes than its shape {entry.shape} and dtype {entry.dtype} say")
        file.flush()
        os.fsync(file.fileno())
