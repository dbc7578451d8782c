"""What training has made, written as other programs read it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from forebay import api
from forebay.arguments import expect_folder
from forebay.checkpoint.archive import write_archive
from forebay.checkpoint.converted import as_filed
from forebay.checkpoint.dcp import Later, write_dcp
from forebay.checkpoint.export import SHARD_NBYTES, held_back, write_configuration, write_safetensors
from forebay.checkpoint.source import ModelSource, Source
from forebay.checkpoint.weights import INDEX, Entry
from forebay.errors import ConfigError, ModelError, OptimizerError, StorageError
from forebay.layout import needs_master
from forebay.optim.streamed import StreamedOptimizer, groups_with
from forebay.runtime.hooks import prepared_session, session_of
from forebay.runtime.pretrained import is_pretrained
from forebay.runtime.session import Session
from forebay.runtime.wholes import wholes_of
from forebay.states import form_of, plain_name

__all__ = ["LAYOUTS", "Layout", "export", "new_folder", "replace_weights", "write", "write_model"]

Layout = Literal["huggingface", "dcp", "torch"]
"""``huggingface``: sharded safetensors and config.json; ``dcp``: ``torch.distributed.checkpoint``; ``torch``: a state
dict as ``torch.save`` writes it."""

LAYOUTS: tuple[Layout, ...] = get_args(Layout)


def export(
    model: nn.Module,
    folder: str | Path,
    *,
    layout: Layout = "huggingface",
    dtype: torch.dtype | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> list[Path]:
    """Writes a prepared model into ``folder``, which is new or empty, part of a tensor in memory at a time (``dcp``: a
    tensor).

    ``huggingface`` is what ``save_pretrained`` writes, and ``from_pretrained`` and ``forebay.load`` read: a parameter
    that transformers takes apart for that is in memory whole meanwhile. Parameters are written in full precision, as
    ``dtype`` where one is given. ``dcp`` takes the states of ``optimizer``, the prepared one, along, under the names of
    ``torch.distributed.checkpoint.state_dict``, for another program to go on with. Returns the files.

    Raises ``UsageError`` for a model that is not prepared, another optimizer, a folder that holds files, a dtype of
    integers, what a layout does not have, and a configuration that transformers refuses to write; ``StorageError`` when
    the folder cannot be written. What was written is removed then.
    """
    attachment = session_of(model)
    if attachment is None:
        raise ModelError("this model is not prepared; save it with its own save_pretrained or torch.save")
    expect_folder(folder, "a new folder")
    if layout not in LAYOUTS:
        raise ConfigError(f"there is no layout {layout!r}; layouts are {', '.join(LAYOUTS)}")
    if layout == "huggingface" and not is_pretrained(model):
        raise ModelError(f"{type(model).__name__} is not a model of transformers; use layout='torch' or layout='dcp'")
    if optimizer is not None and layout != "dcp":
        raise ConfigError(f"layout {layout!r} holds no optimizer states; leave the optimizer, or use layout='dcp'")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f"dtype is a floating-point dtype of torch's, such as torch.bfloat16, got {dtype!r}")
    session: Session = attachment.session
    if optimizer is not None and not (isinstance(optimizer, StreamedOptimizer) and optimizer.is_of(session)):
        raise OptimizerError(
            f"this {type(optimizer).__name__} has no states of this model; give the optimizer that forebay.prepare "
            f"returned, without what a framework has put around it"
        )
    if optimizer is not None and (wholes := wholes_of(model)):
        raise ModelError(
            f"the states of {wholes[0].name} are in tiles, which no other program has; leave the optimizer"
        )
    session.contents.whole()  # parameters and states are of the same moment, whichever is read first
    source: Source = _source(model, session, wide=True)
    if layout == "huggingface":
        source = as_filed(source, model)
    states = None if optimizer is None else _states(session, optimizer)
    target = new_folder(Path(folder))
    try:
        if layout != "huggingface":
            return write(source, target, layout, dtype, states)
        with held_back(target) as beside:
            # First: what transformers refuses is told before the weights are written.
            files = [target / path.name for path in write_configuration(model, beside, dtype)]
            return write(source, target, layout, dtype) + files
    except OSError as error:
        raise _refused(target, error) from error


def write_model(model: nn.Module, folder: Path, *, shard_nbytes: int = SHARD_NBYTES) -> list[Path]:
    """Writes a prepared model of transformers into ``folder``, which may exist, so that ``from_pretrained`` loads it,
    in files of about ``shard_nbytes``. Returns the files.

    Values are written in full precision: the fp32 master of a bf16 parameter stays fp32, and ``from_pretrained`` rounds
    it to the configuration's dtype. Raises ``StorageError`` when the folder cannot be written; no file under its final
    name is then incomplete. Raises ``ModelError`` for a configuration that transformers refuses to write; the weights
    are there then.
    """
    session = prepared_session(model)
    session.contents.whole()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        made = write_safetensors(_source(model, session, wide=True), folder, None, shard_nbytes=shard_nbytes)
        return made + write_configuration(model, folder, None)
    except OSError as error:
        raise _refused(folder, error) from error


def replace_weights(model: nn.Module, folder: Path) -> list[Path]:
    """Writes the weights of a prepared model of transformers into ``folder``, which exists, in the place of those that
    are there; each in its own dtype, one in memory at a time. Returns the files.

    Raises ``StorageError`` when the folder cannot be written.
    """
    session = prepared_session(model)
    session.contents.whole()
    try:
        for old in (*folder.glob("model-*-of-*.safetensors"), folder / "model.safetensors", folder / INDEX):
            old.unlink(missing_ok=True)
        return write_safetensors(_source(model, session, wide=False), folder, None)
    except OSError as error:
        raise _refused(folder, error) from error


def write(
    source: Source,
    folder: Path,
    layout: Layout,
    dtype: torch.dtype | None,
    states: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Writes the tensors of ``source``, and ``states`` of an optimizer (``dcp``). Returns the files.

    Raises ``OSError`` after removing what was written.
    """
    if layout == "huggingface":
        return write_safetensors(source, folder, dtype)
    if layout == "dcp":
        return write_dcp(source, folder, dtype, states)
    return write_archive(source, folder, dtype)


def _refused(folder: Path, error: OSError) -> StorageError:
    return StorageError(f"cannot write the model to {folder}: {error.strerror or error}")


def new_folder(path: Path) -> Path:
    """``path``, made if it is not there, readable by its owner only: weights may be private.

    Raises ``ConfigError`` for a folder that holds files, ``StorageError`` if it cannot be made.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise ConfigError(f"{path} is not empty; give a new folder")
    except OSError as error:
        raise StorageError(f"cannot make the folder {path}: {error.strerror}") from None
    return path


def _source(model: nn.Module, session: Session, *, wide: bool) -> ModelSource:
    """The tensors of a prepared model; with ``wide`` parameters that have a master are as that is, in fp32."""
    specs = [spec for block in session.model.blocks for spec in block.parameters]
    dtypes = {s.name: torch.float32 if wide and needs_master(s) else getattr(torch, s.dtype) for s in specs}
    entries = {s.name: Entry(s.shape, dtypes[s.name]) for s in specs}
    for whole in wholes_of(model):
        parts = [entries.pop(part) for part in whole.parts]
        entries[whole.name] = Entry(whole.layer.grid.shape, parts[0].dtype)
    contents = session.contents
    in_parts = {name: partial(contents.full_precision_parts, name) for name in entries if name in contents.spec_of}
    return ModelSource(model, api.parameters(model), in_parts, entries)


def _states(session: Session, optimizer: StreamedOptimizer) -> dict[str, Any]:
    """What ``get_optimizer_state_dict`` gives, its tensors to be read later: a parameter's states at a time."""
    groups = groups_with(session.names, optimizer.param_groups)
    states = {name: _of_parameter(session, name) for group in groups for name in group["params"]}
    return {"state": {name: state for name, state in states.items() if state}, "param_groups": groups}


def _of_parameter(session: Session, name: str) -> dict[str, Later]:
    spec = session.contents.spec_of[name]
    if not session.contents.state(name).steps.get(name, 0):
        return {}
    found = {"step": Later(Entry((), torch.float32), lambda: session.read_states(name)["step"])}
    for stream in session.contents.state(name).streams_of(spec):
        key, form = plain_name(stream), form_of(stream)
        entry = Entry(form.shape_for(spec) or (), getattr(torch, form.dtype))
        found[key] = Later(entry, lambda key=key: session.read_states(name)[key])  # type: ignore[misc]
    return found
