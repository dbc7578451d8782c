"""The folder of one run.

run.json         what decides the numbers: the settings, those of the last process where they may change, and the text
plan.json        the plan that it runs under
losses.jsonl     a line for each step
report.json      what the last process that took steps has measured, with the events of its last steps; written
                 however it ends
checkpoint/      where the run goes on (``forebay.save``)
out-of-memory.pickle
                 what the device held when it last ran out: a memory snapshot of PyTorch
config.json, model*.safetensors and the tokenizer: what a whole run leaves
"""

from __future__ import annotations

import os
import pickle
import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from pydantic import ValidationError

from forebay.checkpoint.generations import MANIFEST
from forebay.cli.record import Record
from forebay.cli.streams import ENCODING_REMEDY
from forebay.config import TrainConfig
from forebay.errors import ConfigError, StorageError
from forebay.plans import Plan
from forebay.recipes import recipe_names
from forebay.records import dump, load
from forebay.reporting.losses import LOSSES, read_losses
from forebay.tiers.lock import LOCK, FolderLock

if TYPE_CHECKING:
    from torch import nn

    from forebay.data.tokenizers import Tokenizer
    from forebay.reporting.run import RunReport

__all__ = [
    "OWN",
    "REPORT",
    "RUN",
    "SNAPSHOT",
    "RunFolder",
    "RunStart",
    "begun_with",
    "expect_model",
    "expect_nameable",
    "kept_config",
    "kept_plan",
    "may_begin",
    "resuming",
]

RUN, PLAN, REPORT, CHECKPOINT = "run.json", "plan.json", "report.json", "checkpoint"
SNAPSHOT = "out-of-memory.pickle"
MODEL = "config.json"
"""Written when all of the model is there, and so the run over."""

OWN = (RUN, PLAN, REPORT, SNAPSHOT, CHECKPOINT, LOSSES, LOCK, MODEL)
"""What belongs to a run in its folder, there or not yet."""

_NUMBERS = ("model", "batch", "seq", "lr", "seed", "dtype", "accumulate", "clip_norm", "optimizer", "compress", "tile")
"""The settings that decide the numbers, beside the text: a run goes on with those that it was begun with."""


@dataclass(frozen=True)
class RunStart:
    """What a run was begun with: its ``settings`` (as the last process that went on with it had them), the steps over
    which its learning rate rises, and the tokens of its text with their checksum."""

    settings: Mapping[str, Any]
    warmup: int
    tokens: int
    text_crc32: int
    schema: int = 1

    def __post_init__(self) -> None:
        if self.schema != 1 or self.warmup < 1:
            raise ConfigError("a run is kept in schema 1, with a warmup of 1 step or more")


def begun_with(path: Path) -> dict[str, Any]:
    """The settings of the run in the folder ``path``; none where it was not begun.

    Raises ``ConfigError`` where there is no such folder, or one of something else.
    """
    if not path.is_dir():
        raise ConfigError(f"--resume: there is no folder {path}; leave --resume out to begin a run there")
    start = _read_start(path)
    return {} if start is None else dict(start.settings)


def resuming(path: Path) -> str:
    """The command that goes on with the run in the folder ``path``, for a shell."""
    return f"forebay train --run {shlex.quote(str(path))} --resume"


def expect_nameable(config: TrainConfig) -> None:
    """Raises ``ConfigError`` for a name among the settings that is no UTF-8: the files of a run are, and name it."""
    for flag, name in (("run", config.run), ("disk", config.disk), *(("data", path) for path in config.data)):
        try:
            str(name).encode()
        except UnicodeEncodeError:
            here = sys.getfilesystemencoding()
            remedy = "rename it" if here == "utf-8" else f"here names of files are {here}: {ENCODING_REMEDY}"
            raise ConfigError(
                f"--{flag} {str(name)!a}: this name is no UTF-8, as files of a run are; {remedy}"
            ) from None


def kept_config(path: Path) -> TrainConfig | None:
    """``begun_with`` as a configuration, which is whole; None where no run was begun. Raises as ``begun_with`` does,
    and ``ConfigError`` for settings that are none."""
    settings = begun_with(path)
    if not settings:
        return None
    try:
        return TrainConfig.model_validate(settings)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, ("settings", *first["loc"])))
        raise ConfigError(f"{path / RUN}: {where}: {first['msg']}; put the file back as it was") from None


def expect_model(name: str, *, weights: bool) -> None:
    """Raises ``ConfigError`` where ``name`` is the folder of a run that has no model yet. With ``weights``,
    which are to be read, also where the run has steps to take: those that are there are older than its last ones."""
    path = Path(name)
    if name in recipe_names() or not (path / RUN).is_file():
        return
    config, taken = kept_config(path), len(read_losses(path / LOSSES))
    if config is None or ((path / MODEL).exists() and not (weights and taken < config.steps)):
        return
    raise ConfigError(
        f"the run in {path} has taken {taken} of {config.steps} steps, and its model is written when it ends; go on "
        f"with {resuming(path)}, which ends at the last saved step if that is given as --steps"
    )


def kept_plan(path: Path) -> Plan:
    """The plan of the run that was begun in the folder ``path``. Raises ``ConfigError`` where it has none yet, or none
    that can be read, and ``StorageError``."""
    try:
        return Plan.from_json((path / PLAN).read_bytes())
    except FileNotFoundError:
        then = f"go on with {resuming(path)}, which makes one"
        if may_begin(path):
            then = f"begin it anew: forebay train ... --run {shlex.quote(str(path))}"
        raise ConfigError(f"{path} has no {PLAN}: the run in it has none yet; {then}") from None
    except OSError as error:
        raise StorageError(f"cannot read {path / PLAN}: {error.strerror}") from None
    except ConfigError as error:
        raise ConfigError(f"{path / PLAN}: {error}; {resuming(path)} makes it again") from None


def may_begin(path: Path) -> bool:
    """Whether a run may begin in the folder ``path``: it is empty, or what was begun there has come to nothing, not
    even to a plan. Raises ``StorageError``."""
    try:
        names = {entry.name for entry in path.iterdir()} - {LOCK}
        # A place for saves is made before the plan that they are for.
        if CHECKPOINT in names and (path / CHECKPOINT).is_dir() and set(os.listdir(path / CHECKPOINT)) <= {LOCK}:
            names.remove(CHECKPOINT)
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from None
    if not names <= {RUN, f"{RUN}.new"}:
        return False
    try:
        # A file of this name that is no start of a run is somebody else's.
        return RUN not in names or _read_start(path) is not None
    except ConfigError:
        return False


def _read_start(path: Path) -> RunStart | None:
    try:
        return load(RunStart, (path / RUN).read_bytes())
    except FileNotFoundError:
        if any(entry.name not in (LOCK, f"{RUN}.new") for entry in path.iterdir()):
            raise ConfigError(f"{path} is not the folder of a run: it has no {RUN}; give the one of --run") from None
        return None
    except ConfigError as error:
        raise ConfigError(f"{path / RUN}: {error}") from None
    except OSError as error:
        raise StorageError(f"cannot read {path / RUN}: {error.strerror}") from None


@final
class RunFolder:
    """The folder of one run, readable by its owner only: text and weights may be private. It belongs to this process
    until it is closed.

    Raises ``ConfigError`` for a folder that holds files already (``resume``: for one that holds no run, or the model of
    one that was not saved), ``StorageError`` if it cannot be made or another process has it.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not resume:
                _expect_fresh(path)
            path.chmod(0o700)
        except OSError as error:
            raise StorageError(f"--run {path}: cannot make the folder: {error.strerror}") from None
        self._goes_on = resume
        self._start: RunStart | None = None
        self._lock = FolderLock(path)
        try:
            if resume:
                self._start = _read_start(path)
                self._expect_more()
            else:
                _expect_fresh(path)  # once more: a run may have ended there before the folder was ours
        except BaseException:
            self._lock.close()
            raise

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.close()

    @property
    def checkpoint(self) -> Path:
        """Where ``forebay.save`` keeps the run."""
        return self.path / CHECKPOINT

    @property
    def goes_on(self) -> bool:
        """Whether the folder was opened to go on with the run in it."""
        return self._goes_on

    @property
    def is_saved(self) -> bool:
        """Whether there is a step to go on from."""
        return (self.checkpoint / MANIFEST).exists()

    def reopen(self) -> None:
        """From here on the run in it goes on, which this process has begun itself."""
        self._goes_on, self._start = True, _read_start(self.path)

    def begin(self, config: TrainConfig, warmup: int, tokens: int, text_crc32: int) -> int:
        """Notes what the run is begun with, or compares it with that; returns the steps over which the learning rate
        rises.

        Raises ``ConfigError`` naming the first setting that would change the numbers of a run that goes on.
        """
        asked = RunStart(_portable(config), warmup, tokens, text_crc32)
        if self._start is None:
            self._write(RUN, dump(asked))
            return warmup
        begun = self._start
        for name in _NUMBERS:
            before, now = begun.settings.get(name), asked.settings.get(name)
            if before != now:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(
                    f"{flag}: the run in {self.path} was begun with {before}, not {now}; leave {flag} out"
                )
        if (begun.tokens, begun.text_crc32) != (tokens, text_crc32):
            raise ConfigError(
                f"--data: the text has {tokens} tokens and is not the one of {begun.tokens} tokens that the run in "
                f"{self.path} was begun with"
            )
        return begun.warmup

    def go_on(self, config: TrainConfig) -> None:
        """Notes the settings with which the run goes on, which it goes on with from here. Raises ``StorageError``."""
        if self._start is not None:
            self._write(RUN, dump(replace(self._start, settings=_portable(config))))

    def promise(self, plan: Plan) -> None:
        """Writes the plan that the run is about to begin under. Raises ``StorageError``."""
        try:
            # What a process before has measured was under another plan, maybe.
            (self.path / REPORT).unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"--run {self.path}: cannot remove {REPORT}: {error.strerror}") from None
        self._write(PLAN, plan.to_json())

    def keep(self, report: RunReport) -> None:
        """Writes what was measured, however the run has ended. Raises ``StorageError``."""
        self._write(REPORT, report.for_keeping().to_json())

    def keep_snapshot(self, snapshot: Mapping[str, Any]) -> Path:
        """Writes what the device held when it ran out (``DeviceOutOfMemory.snapshot``), in the place of an earlier one;
        returns the file. Raises ``StorageError``."""
        self._write(SNAPSHOT, pickle.dumps(dict(snapshot)))
        return self.path / SNAPSHOT

    def _expect_more(self) -> None:
        """A run that has its model, and no step to go on from, would begin anew and lose what it has."""
        if (self.path / MODEL).exists() and not self.is_saved:
            raise ConfigError(
                f"--resume: the run in {self.path} is over, and no step of it was saved to go on from; begin another "
                f"one from its weights: --model {self.path} --run FOLDER"
            )

    def _write(self, name: str, content: str | bytes) -> None:
        """A file as a whole, or as it was."""
        fresh = self.path / f"{name}.new"
        try:
            with fresh.open("wb") as file:
                file.write(content if isinstance(content, bytes) else content.encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(fresh, self.path / name)
        except OSError as error:
            with suppress(OSError):
                fresh.unlink(missing_ok=True)
            raise StorageError(f"--run {self.path}: cannot write {name}: {error.strerror}") from None

    def record(self, step: int) -> Record:
        """The losses of the first ``step`` steps, and the file that takes those that come. Raises what ``Record.read``
        raises."""
        return Record.read(self.path / LOSSES, step)

    def finish(self, model: nn.Module, tokenizer: Tokenizer) -> None:
        """Writes the model as ``from_pretrained`` reads it."""
        from forebay.exporting import write_model

        tokenizer.save(self.path)
        write_model(model, self.path)


def _expect_fresh(path: Path) -> None:
    if not may_begin(path):
        raise ConfigError(
            f"--run {path}: the folder is not empty; give a new one, or go on with the run in it: --resume"
        )


def _portable(config: TrainConfig) -> dict[str, Any]:
    """The settings of ``config`` as JSON, with paths that mean the same wherever the run goes on."""
    settings: dict[str, Any] = config.model_dump(mode="json")
    settings["data"] = [str(path.resolve()) for path in config.data]
    model = Path(config.model)
    if model.exists():
        settings["model"] = str(model.resolve())
    return {name: value for name, value in settings.items() if value is not None}
