"""Files of every kind that forebay reads, changed at random: refused in one line, unless they can be used still."""

from __future__ import annotations

import json
import pickle
import random
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import forebay
from forebay.catalogue import load_machine, read_machine
from forebay.checkpoint.generations import MANIFEST
from forebay.checkpoint.weights import INDEX, Weights
from forebay.cli.record import Record
from forebay.cli.runfolder import begun_with
from forebay.config import make_config, read_yaml
from forebay.errors import ForebayError
from forebay.plans import Plan
from forebay.reporting.run import RunReport
from forebay.trace import Trace
from forebay.units import MiB
from tests.faults.fuzzing import Change, of_json, of_safetensors, of_yaml
from tests.faults.trained import AMPLE

MANY = 200
FEW = 12

MOST = 64 * MiB
"""Bytes that reading small files may take for a moment."""

LONGEST = 2000
"""Characters of an error."""


@dataclass(frozen=True)
class Kind:
    """A kind of file: the one at ``path`` can be used; what ``change`` makes of it, and who reads it."""

    path: Path
    change: Change
    read: Callable[[], object]


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def prepared(plan: Plan | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = small()
    made = torch.optim.AdamW(model.parameters())
    given = {"device_memory": AMPLE, "policy": "stream", "device": "cpu"}
    return forebay.prepare(model, made, torch.ones(1, 8), plan=plan, **given)  # type: ignore[arg-type]


def resummed(content: bytes, draw: random.Random) -> bytes:
    """A manifest that says something else, with the checksum of that."""
    body = of_json(json.dumps(json.loads(content)["manifest"]).encode(), draw)
    return b'{"crc32": %d, "manifest": %s}\n' % (zlib.crc32(body), body)


class Rig:
    """A small run, and a file of each kind that it leaves or is given in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model, self.optimizer = prepared()
        self.model(torch.ones(1, 8)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.kept = folder / "kept"
        forebay.save(self.model, self.optimizer, self.kept, step=1)
        report = forebay.report(self.model)
        self.trace = forebay.profile(small(), torch.ones(1, 8))
        self.machine = load_machine("h100")
        start = {"settings": {"model": "tiny", "steps": 3}, "warmup": 1, "tokens": 9, "text_crc32": 7, "schema": 1}
        losses = "".join(json.dumps({"step": n, "loss": 0.5 / n, "lr": 0.1}) + "\n" for n in range(1, 4))
        for name, content in (
            ("plan.json", report.plan.to_json()),
            ("trace.json", self.trace.to_json()),
            ("machine.json", self.machine.to_json()),
            ("config.yaml", "model: tiny\ndata: [a.txt]\ndevice_memory: 64MiB\nlr: 0.1\ndisk: /nvme:1GiB\n"),
            ("run.json", json.dumps(start)),
            ("losses.jsonl", losses),
            ("report.json", report.to_json()),
        ):
            (folder / name).write_text(content)
        for name in ("weights", "indexed"):
            (folder / name).mkdir()
            save_file({"a": torch.ones(3, 5), "b": torch.zeros(7)}, folder / name / "model.safetensors")
        (folder / "indexed" / INDEX).write_text('{"weight_map": {"a": "model.safetensors", "b": "model.safetensors"}}')

    def kind(self, name: str) -> Kind:
        """Of one of ``KINDS``."""
        path, change = self.folder / name, of_json
        if name == MANIFEST:
            return Kind(self.kept / MANIFEST, resummed, self._resume)
        if name == "tensors":
            return Kind(min(self.kept.glob("generation-*/*.safetensors")), of_safetensors, self._resume)
        if name == "weights":
            return Kind(path / "model.safetensors", of_safetensors, lambda: self._load(path))
        if name == "index":
            return Kind(self.folder / "indexed" / INDEX, of_json, lambda: self._load(self.folder / "indexed"))
        if name == "config.yaml":
            change = of_yaml
        if name == "losses.jsonl":
            change = by_line
        return Kind(path, change, getattr(self, f"_{path.stem}"))

    def _resume(self) -> None:
        forebay.resume(self.model, self.optimizer, self.kept)

    @staticmethod
    def _load(folder: Path) -> None:
        weights = Weights(folder)
        for name in weights.names:
            weights.entry(name)
            weights.read(name)

    def _plan(self) -> None:
        plan = Plan.from_json((self.folder / "plan.json").read_bytes())
        forebay.close(prepared(plan)[0])

    def _trace(self) -> None:
        Trace.from_json((self.folder / "trace.json").read_bytes())

    def _machine(self) -> None:
        read_machine(self.folder / "machine.json")

    def _config(self) -> None:
        make_config(read_yaml(self.folder / "config.yaml"))

    def _run(self) -> None:
        begun_with(self.folder)

    def _losses(self) -> None:
        with Record.read(self.folder / "losses.jsonl", 3):
            pass

    def _report(self) -> None:
        RunReport.from_json((self.folder / "report.json").read_bytes())


KINDS = (
    MANIFEST,
    "tensors",
    "weights",
    "index",
    "plan.json",
    "trace.json",
    "machine.json",
    "config.yaml",
    "run.json",
    "losses.jsonl",
    "report.json",
)


def by_line(content: bytes, draw: random.Random) -> bytes:
    """One line of several is another."""
    lines = content.splitlines(keepends=True)
    at = draw.randrange(len(lines))
    lines[at] = of_json(lines[at], draw) + b"\n" * (draw.random() < 0.9)
    return b"".join(lines)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    made = Rig(tmp_path_factory.mktemp("files"))
    yield made
    forebay.close(made.model)


def resident(what: str) -> int:
    """Bytes of memory that the process has (VmRSS), or has had at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


@contextmanager
def little_memory() -> Iterator[None]:
    """What happens inside takes ``MOST`` bytes at the most: of what Python asks for, touched or not, and of what
    everybody touches."""
    Path("/proc/self/clear_refs").write_text("5")  # the most so far is what there is now
    before = resident("VmRSS")
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MOST
        assert resident("VmHWM") - before < MOST
    finally:
        tracemalloc.stop()


def is_refused(kind: Kind) -> bool:
    """Whether the file is; False: it can be used all the same."""
    try:
        kind.read()
    except ForebayError as error:
        said = str(error)
        assert said.isprintable() and len(said) < LONGEST, said[:LONGEST]
        return True
    return False


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", KINDS)
def test_files_that_were_changed_at_random(rig: Rig, name: str, count: int) -> None:
    kind, draw = rig.kind(name), random.Random(f"{name} {count}")
    whole = kind.path.read_bytes()
    try:
        assert not is_refused(kind)
        with little_memory():
            refused = 0
            for _ in range(count):
                kind.path.write_bytes(kind.change(whole, draw))
                refused += is_refused(kind)
        assert refused > count // 3
    finally:
        kind.path.write_bytes(whole)
    assert not is_refused(kind)


class Touching:
    """Makes a file, as soon as it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.path), "w")


@pytest.mark.parametrize("name", KINDS)
def test_nothing_is_unpickled(rig: Rig, name: str, tmp_path: Path) -> None:
    kind = rig.kind(name)
    whole = kind.path.read_bytes()
    try:
        for content in (pickle.dumps(Touching(tmp_path / "made")), whole + pickle.dumps(Touching(tmp_path / "made"))):
            kind.path.write_bytes(content)
            # Behind the steps that are saved, losses are cut off.
            assert is_refused(kind) or (name == "losses.jsonl" and content.startswith(whole))
        torch.save({"a": Touching(tmp_path / "made")}, kind.path)
        assert is_refused(kind)
    finally:
        kind.path.write_bytes(whole)
    assert not (tmp_path / "made").exists()
