"""A checkpoint that is not what was saved is refused in one line, whatever is wrong with it."""

from __future__ import annotations

import json
import random
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import forebay
from forebay.checkpoint.generations import MANIFEST
from forebay.errors import ConfigError, ForebayError, OptimizerError, SessionClosed, StorageError, UsageError
from forebay.runtime.hooks import prepared_session
from tests.faults.trained import AMPLE

WIDTH = 16


def prepared(*, bias: bool = True, make: Any = torch.optim.AdamW) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=bias), nn.Linear(WIDTH, WIDTH))
    return forebay.prepare(model, make(model.parameters(), lr=0.1), device_memory=AMPLE, policy="stream", device="cpu")


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


class Kept:
    """A checkpoint in a folder, and a prepared model to read it into."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model, self.optimizer = prepared()
        train(self.model, self.optimizer)
        self.values = {name: value.clone() for name, value in forebay.parameters(self.model).items()}
        forebay.save(self.model, self.optimizer, folder, step=1)

    def resume(self, folder: Path) -> None:
        try:
            forebay.resume(self.model, self.optimizer, folder)
        finally:
            prepared_session(self.model).unlock(folder)  # there are many folders, and descriptors are few

    def copy(self, where: Path) -> Path:
        shutil.rmtree(where, ignore_errors=True)
        shutil.copytree(self.folder, where)
        return where

    def expect_whole(self) -> None:
        forebay.resume(self.model, self.optimizer, self.folder)
        found = forebay.parameters(self.model)
        assert all(torch.equal(found[name], value) for name, value in self.values.items())


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    made = Kept(tmp_path_factory.mktemp("kept") / "folder")
    yield made
    made.expect_whole()
    forebay.close(made.model)


def piece(folder: Path) -> Path:
    return min(folder.glob("generation-*/*.safetensors"))


def flip(path: Path, place: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


def test_every_flipped_bit_is_found(kept: Kept, tmp_path: Path) -> None:
    draw = random.Random(0)
    nbytes = {path.name: path.stat().st_size for path in (kept.folder / MANIFEST, piece(kept.folder))}
    for name, size in nbytes.items():
        for _ in range(40):
            folder = kept.copy(tmp_path / "folder")
            path = folder / MANIFEST if name == MANIFEST else piece(folder)
            place, bit = draw.randrange(size), draw.randrange(8)
            flip(path, place, bit)
            with pytest.raises((StorageError, ConfigError)) as told:
                kept.resume(folder)
            assert "\n" not in str(told.value)
            assert str(folder) in str(told.value)


def test_after_damage_in_a_tensor_the_model_has_no_values_until_it_gets_some(kept: Kept, tmp_path: Path) -> None:
    folder = kept.copy(tmp_path / "folder")
    flip(piece(folder), -1)
    with pytest.raises(StorageError, match=r"is not what was saved: its checksum is [0-9a-f]{8} and was [0-9a-f]{8}"):
        kept.resume(folder)
    with pytest.raises(SessionClosed, match="a checkpoint was not read to its end"):
        kept.model(torch.ones(1, WIDTH))
    with pytest.raises(SessionClosed):
        forebay.save(kept.model, kept.optimizer, tmp_path / "other", step=2)
    kept.expect_whole()
    kept.model(torch.ones(1, WIDTH)).sum().backward()
    kept.optimizer.zero_grad()


def cut(folder: Path) -> None:
    path = piece(folder)
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(folder: Path) -> None:
    with piece(folder).open("ab") as file:
        file.write(b"\0")


def exchange(folder: Path) -> None:
    first, second = sorted(folder.glob("generation-*/*.safetensors"))
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)


def link(folder: Path) -> None:
    path = piece(folder)
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a file is cut": (cut, "the file was cut or changed"),
    "a file is longer": (lengthen, "the file was cut or changed"),
    "a file is gone": (lambda folder: piece(folder).unlink(), "it was moved or removed"),
    "a folder is gone": (lambda folder: shutil.rmtree(piece(folder).parent), "it was moved or removed"),
    "two files exchanged": (exchange, "do not name the same tensors"),
    "a file is a link": (link, "ELOOP"),
    "no manifest": (lambda folder: (folder / MANIFEST).unlink(), "has no checkpoint"),
    "an empty manifest": (lambda folder: (folder / MANIFEST).write_bytes(b""), "damaged"),
    "a manifest of something else": (lambda folder: (folder / MANIFEST).write_text("{}"), "damaged"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(kept: Kept, tmp_path: Path, name: str) -> None:
    folder = kept.copy(tmp_path / "folder")
    damage, said = DAMAGE[name]
    damage(folder)
    with pytest.raises(ForebayError, match=said):
        kept.resume(folder)
    # Seen before anything was changed.
    assert torch.isfinite(kept.model(torch.ones(1, WIDTH)).sum())


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """A manifest whose checksum is right and whose content is not."""
    path = folder / MANIFEST
    body = json.loads(path.read_text())["manifest"]
    change(body)
    text = json.dumps(body).encode()
    path.write_bytes(b'{"crc32": %d, "manifest": %s}\n' % (zlib.crc32(text), text))


def set_in(*path: Any) -> Callable[[dict[str, Any]], None]:
    *way, key, value = path

    def change(body: Any) -> None:
        for part in way:
            body = body[part]
        body[key] = value

    return change


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


WRONG: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "schema": (set_in("schema", 7), "has schema 7, this forebay reads schema 1"),
    "no files": (set_in("files", []), "is missing|are missing"),
    "a path": (set_in("files", 0, "name", "../../x.safetensors"), "in its own folder"),
    "a negative size": (set_in("files", 0, "nbytes", -1), "0 bytes or more"),
    "a size that is no number": (set_in("files", 0, "nbytes", "many"), "nbytes"),
    "another size": (set_in("files", 0, "nbytes", 12), "12 were saved"),
    "a generation": (set_in("generation", 10**9), "it was moved or removed"),
    "no generation": (set_in("generation", 0), "generations count from 1"),
    "steps of nobody": (set_in("steps", {"x": 1}), "is trained"),
    "negative steps": (set_in("steps", "0.weight", -1), "0 steps or more"),
    "groups": (set_in("groups", []), "parameter groups of"),
    "a scheduler": (set_in("scheduler", {"kind": "LambdaLR", "state": {}}), "was given none"),
    "an unknown kind of value": (set_in("extra", {"$code": "x"}), "that this forebay cannot read"),
    "a tensor without its bytes": (
        set_in("extra", {"$tensor": {"dtype": "float32", "shape": [10**12], "data": ""}}),
        "that this forebay cannot read",
    ),
    "a tensor of no dtype": (
        set_in("extra", {"$tensor": {"dtype": "load", "shape": [1], "data": "00"}}),
        "that this forebay cannot read",
    ),
    "too deep": (set_in("extra", nested(900)), "manifest"),
    "no generators": (set_in("randomness", {}), "random number generators cannot be used"),
    "a generator without words": (
        set_in("randomness", "numpy", "words", ""),
        "random number generators cannot be used",
    ),
    "a generator beyond its words": (
        set_in("randomness", "numpy", "position", 10**6),
        "random number generators cannot be used",
    ),
    "a generator cut short": (set_in("randomness", "python", "words", "00"), "random number generators cannot be used"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_manifest_is_not_believed(kept: Kept, tmp_path: Path, name: str) -> None:
    folder = kept.copy(tmp_path / "folder")
    change, said = WRONG[name]
    rewrite(folder, change)
    with pytest.raises(ForebayError, match=said) as told:
        kept.resume(folder)
    assert "\n" not in str(told.value)


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def set_header(folder: Path, header: bytes, length: int | None = None) -> None:
    """Another header of the same length, or one that says so."""
    path = piece(folder)
    _, rest = header_of(path)
    old = path.stat().st_size - len(rest) - 8
    assert len(header) <= old
    path.write_bytes(struct.pack("<Q", old if length is None else length) + header.ljust(old) + rest)


def test_headers_are_not_believed(kept: Kept, tmp_path: Path) -> None:
    named, rest = header_of(piece(kept.folder))
    first = min(name for name in named if name != "__metadata__")
    entry = named[first]

    def with_first(**change: Any) -> bytes:
        return json.dumps({**named, first: {**entry, **change}}, separators=(",", ":")).encode()

    table: list[tuple[bytes, int | None, str]] = [
        (b"", 2**63, "is damaged: its header says"),
        (b"", len(rest) + 10**6, "is damaged: its header says"),
        (b"[]", None, "no table of tensors"),
        (b"{" * 200, None, "no table of tensors"),
        (b"{}", None, "do not name the same tensors"),
        (with_first(dtype="F64"), None, "the model's is F32"),
        (with_first(shape=[1]), None, "the model's is"),
        (with_first(data_offsets=[0, 2**62]), None, "the model's is"),
        (with_first(data_offsets=[-4, 4]), None, "the model's is"),
        (with_first(dtype=None), None, "the model's is"),
        (json.dumps({**named, first: 3}, separators=(",", ":")).encode(), None, "no tensor"),
    ]
    for header, length, said in table:
        folder = kept.copy(tmp_path / "folder")
        set_header(folder, header, length)
        with pytest.raises(StorageError, match=said):
            kept.resume(folder)


def test_a_checkpoint_of_something_else_is_refused_and_nothing_changes(kept: Kept, tmp_path: Path) -> None:
    def two_groups(parameters: Iterator[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        first, *others = parameters
        return torch.optim.AdamW([{"params": [first]}, {"params": others}], lr=lr)

    for options, error, said in (
        ({"bias": False}, OptimizerError, "parameter groups of"),
        ({"make": torch.optim.SGD}, StorageError, "which this model and optimizer do not have"),
        ({"make": two_groups}, OptimizerError, r"groups of \[4\] parameters, this optimizer has \[1, 3\]"),
    ):
        model, optimizer = prepared(**options)
        train(model, optimizer)
        before = {name: value.clone() for name, value in forebay.parameters(model).items()}
        folder = kept.copy(tmp_path / "folder")
        with pytest.raises(error, match=said):
            forebay.resume(model, optimizer, folder)
        after = forebay.parameters(model)
        assert all(torch.equal(after[name], value) for name, value in before.items())
        train(model, optimizer)
        forebay.close(model)


def test_calls_that_cannot_be_served(kept: Kept, tmp_path: Path) -> None:
    model, optimizer = prepared()
    plain = nn.Linear(2, 2)
    sgd = torch.optim.SGD(plain.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for call, said in (
        (lambda: forebay.save(plain, sgd, tmp_path / "x", step=0), "not prepared"),
        (lambda: forebay.save(model, sgd, tmp_path / "x", step=0), "not of this model"),
        (lambda: forebay.save(model, optimizer, tmp_path / "x", step=-1), "0 or more"),
        (lambda: forebay.save(model, optimizer, tmp_path / "x", step=0, extra={"f": print}), "extra.f is a builtins"),
        (lambda: forebay.resume(model, optimizer, tmp_path / "none"), "there is no folder"),
        (lambda: forebay.resume(model, optimizer, tmp_path / "x"), "has no checkpoint; forebay.save"),
        (
            lambda: forebay.resume(model, optimizer, kept.copy(tmp_path / "y"), scheduler=scheduler),
            "with none as scheduler and resume was given one",
        ),
    ):
        with pytest.raises(ForebayError, match=said):
            call()
    for step in (1.5, float("nan"), np.float32(2), "1", None):
        with pytest.raises(UsageError, match="is an int, got"):
            forebay.save(model, optimizer, tmp_path / "x", step=step)  # type: ignore[arg-type]
    assert not list((tmp_path / "x").glob("generation-*"))
    forebay.close(model)
    with pytest.raises(ForebayError):
        forebay.save(model, optimizer, tmp_path / "x", step=0)


def nested(depth: int) -> list[Any]:
    return [nested(depth - 1)] if depth else []


def holds_itself() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"text": "\ud800"}, r"extra\.text holds"),
        ({"\ud800": 1}, "extra holds"),
        ({"seen": torch.ones(2).to_sparse()}, r"extra\.seen is a tensor without bytes"),
        ([torch.ones(2, device="meta")], r"extra\[0\] is a tensor without bytes"),
        (holds_itself(), "extra holds itself"),
        (nested(200), "if it were written: cannot read"),
        (nested(300), "cannot be written as JSON"),
    ],
    ids=["text", "key", "sparse", "meta", "itself", "deep", "deeper"],
)
def test_what_could_not_be_read_again_is_not_saved(kept: Kept, tmp_path: Path, extra: Any, said: str) -> None:
    folder = kept.copy(tmp_path / "folder")
    with pytest.raises(ConfigError, match=said):
        forebay.save(kept.model, kept.optimizer, folder, step=2, extra=extra)
    assert forebay.resume(kept.model, kept.optimizer, folder).step == 1
    forebay.save(kept.model, kept.optimizer, folder, step=2)
