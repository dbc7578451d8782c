"""``forebay layout``: a file of buffers, or a step whose ops get an order first, to addresses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forebay.buffer_csv import read_buffers, write_offsets
from forebay.buffers import Addresses, BufferSet
from forebay.checking.addresses import check_addresses
from forebay.checking.orders import check_order
from forebay.errors import ConfigError, ModelError, UnitError
from forebay.memory import ALIGNMENT
from forebay.op_graph import OpGraph, Ordered
from forebay.reporting.files import expect_apart, expect_folder_of, writing
from forebay.trace import Trace
from forebay.units import parse_bytes

__all__ = ["Asked", "Laid", "lay"]


@dataclass(frozen=True)
class Asked:
    """One question to ``forebay layout``: its argument and its flags; ``step`` are those of a model's step by name."""

    source: str
    capacity: str | None
    layout: str
    order: str | None
    step: Mapping[str, Any]
    seconds: float | None
    out: Path | None
    graph: Path | None


@dataclass(frozen=True)
class Laid:
    """The answer: addresses for what goes by ``title``, and of a step the order of its ops."""

    title: str
    addresses: Addresses
    ordered: Ordered | None


def lay(asked: Asked) -> Laid:
    """Answers ``asked``, checked, and writes the files that it names; that the buffers do not fit is an answer too.
    Raises a ``UsageError`` for what cannot be used, and ``StorageError`` for a file that cannot be written."""
    written = {"--out": asked.out, "--graph": asked.graph}
    for flag, file in written.items():
        if file is not None:
            expect_folder_of(file, flag)  # before the search, which may take a minute
    expect_apart(written)
    room = _room(asked.capacity)
    path = Path(asked.source)
    if path.suffix == ".csv" or (path.is_file() and path.suffix != ".json"):
        _refuse_step_flags(asked, f"{path} has buffers, whose lives are given", all_of_them=True)
        return _placed(path.name, BufferSet(read_buffers(path), room), asked, None)
    title, graph = _graph_of(asked)
    if asked.graph is not None:
        with writing("the graph", asked.graph):
            asked.graph.write_text(graph.to_json() + "\n", encoding="utf-8")
    ordered = _ordered(graph, asked)
    aligned = tuple(replace(buffer, alignment=ALIGNMENT) for buffer in graph.buffers(ordered.order))
    return _placed(title, BufferSet(aligned, room), asked, ordered)


def _placed(title: str, given: BufferSet, asked: Asked, ordered: Ordered | None) -> Laid:
    from forebay.planners.layout import lay_out  # after all that could be wrong with the input: it takes a moment

    found = lay_out(given, asked.layout, asked.seconds)
    check_addresses(found)
    if asked.out is not None and found.feasible:
        write_offsets(found, asked.out)
    return Laid(title, found, ordered)


def _ordered(graph: OpGraph, asked: Asked) -> Ordered:
    from forebay.planners.ordering import order_ops

    found = order_ops(graph, asked.order or "program", asked.seconds)
    check_order(found)
    return found


def _room(capacity: str | None) -> int | None:
    try:
        return None if capacity is None else parse_bytes(capacity)
    except UnitError as error:
        raise ConfigError(f"--capacity: {error}") from None


def _refuse_step_flags(asked: Asked, why: str, *, all_of_them: bool) -> None:
    """Raises ``ConfigError`` for flags that say how a step is recorded, or, with all of them, which order it has."""
    more = {"order": asked.order, "graph": asked.graph} if all_of_them else {}
    given = [f"--{name}" for name, value in {**more, **asked.step}.items() if value is not None]
    if given:
        what = "a model or a graph of ops" if all_of_them else "a model, whose step is to be recorded"
        raise ConfigError(f"{why}: {given[0]} is for {what}; leave it out")


def _graph_of(asked: Asked) -> tuple[str, OpGraph]:
    """The graph that the source is, or is recorded of, and what it is called."""
    from forebay.lowering import step_graph

    path = Path(asked.source)
    keys = _keys(path) if path.suffix == ".json" else frozenset[str]()
    if not {"ops", "segments"} & keys:
        return _captured(asked)
    _refuse_step_flags(asked, f"{path} is a step already", all_of_them=False)
    try:
        text = path.read_bytes()
        return path.name, step_graph(Trace.from_json(text)) if "segments" in keys else OpGraph.from_json(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _keys(path: Path) -> frozenset[str]:
    """The names of what the object in the file at ``path`` holds."""
    try:
        whole = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{path} is not JSON; give a trace, a graph of ops or a config.json") from None
    if not isinstance(whole, dict):
        raise ConfigError(f"{path} holds a {type(whole).__name__}; give a trace, a graph of ops or a config.json")
    return frozenset(whole)


def _captured(asked: Asked) -> tuple[str, OpGraph]:
    """The step of a model, recorded as ``forebay plan`` does it."""
    import torch

    from forebay.cli.plan import make_settings
    from forebay.lowering import step_graph
    from forebay.profiler.capture import capture
    from forebay.recipes import settings_of
    from forebay.recipes.tasks import sample
    from forebay.runtime.own_checkpointing import as_planned

    source = asked.source
    settings = make_settings(settings_of(source), {**asked.step, "model": source})
    found = sample(settings.model, batch=settings.batch, seq=settings.seq, dtype=settings.dtype)
    try:
        with as_planned(found.model):
            device = "cuda" if torch.cuda.is_available() else "cpu"
            trace = capture(found.model, found.batch, settings.optimizer, device).trace
    except ModelError as error:
        raise ModelError(f"{source}: {error}") from None
    shape = f"batch {settings.batch}" + (f" of {found.seq} tokens" if found.seq is not None else "")
    return f"{source}, {shape}", step_graph(trace)
