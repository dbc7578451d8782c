"""The settings of a training run, typed: from a YAML file, a recipe and flags, each default written once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from forebay.budgets import expect_disk
from forebay.calls import CHECKSUMS
from forebay.errors import ConfigError
from forebay.loss import Loss
from forebay.names import meant
from forebay.plans import UpdateTime
from forebay.units import parse_bytes, parse_disks

__all__ = ["MOST", "SEQ", "NonFinite", "OptimizerName", "StepSettings", "TrainConfig", "make_config", "read_yaml"]


Size = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]
"""Bytes, written ``24GiB`` or as a number of bytes."""

Bits = Literal[0, 2, 4, 8]
"""The bits that an activation may be kept as; 0: as it is."""

OptimizerWithoutMasters = Literal[
    "adamw-sr", "adamw-bf16-sr", "adamw-8bit-sr", "adamw-4bit-sr", "lion-sr", "adafactor-sr"
]
"""Those of forebay that round parameters in bf16 by chance (stochastic rounding)."""

OptimizerOfSeveralOps = Literal["rmsprop", "adagrad", "adadelta", "adamax"]
"""``torch.optim``'s, one op after the other."""

OptimizerWithMasters = Literal[
    "adamw", "adam", "sgd", "adamw-bf16", "adamw-8bit", "adamw-4bit", "lion", "adafactor", "muon", OptimizerOfSeveralOps
]
"""``torch.optim``'s, and forebay's own (``optim/``)."""

OptimizerName = Literal[OptimizerWithMasters, OptimizerWithoutMasters]
"""All that go by name."""


NonFinite = Literal["stop", "skip"]
"""What a step comes to whose loss, or whose gradients, are infinite or NaN: the end of the run, or nothing."""


MOST: Final = 2**28
"""Rows of a batch, and tokens of a row: more than any machine has memory for, and few enough to be multiplied."""

SEQ: Final = 128
"""Tokens of a row where nobody says how many."""


class StepSettings(BaseModel):
    """What whoever makes a plan is told of a step. Sizes are bytes; see the help of the flag of the same name for the
    meaning."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    model: str = Field(min_length=1)
    batch: int = Field(default=1, ge=1, le=MOST)
    dtype: Literal["float32", "bfloat16"] = "float32"
    accumulate: int = Field(default=1, ge=1)
    optimizer: OptimizerName = "adamw"
    host_memory: Size | None = None
    disk: str | None = None
    policy: str = "auto"
    loss: Loss = "auto"
    compress: Bits = 0
    tile: Size | None = None
    checksums: bool = CHECKSUMS

    @field_validator("checksums")
    @classmethod
    def _checksums_are_of_a_disk(cls, value: bool, others: ValidationInfo) -> bool:
        if "disk" in others.data:  # it is not where the disk itself is wrong
            expect_disk(others.data["disk"], checksums=value)
        return value


def _usual_lr(settings: dict[str, object]) -> float:
    """The learning rate of whoever gives none. That of Adafactor is a share of the size of each parameter."""
    return 1e-2 if str(settings.get("optimizer")).startswith("adafactor") else 3e-4


class TrainConfig(StepSettings):
    """One run of ``forebay train``."""

    data: tuple[Path, ...] = Field(min_length=1)
    device_memory: Size
    seq: int = Field(default=SEQ, ge=2, le=MOST)
    steps: int = Field(default=100, ge=1)
    lr: float = Field(default_factory=_usual_lr, ge=0, allow_inf_nan=False)
    seed: int = Field(default=0, ge=0, lt=2**63)
    clip_norm: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    device: Literal["cpu", "cuda"] | None = None
    update: UpdateTime = "step"
    nonfinite: NonFinite = "stop"
    run: Path | None = None
    save_every: int | None = Field(default=None, ge=1)

    @field_validator("data", mode="before")
    @classmethod
    def _one_file_is_a_list(cls, value: object) -> object:
        return (value,) if isinstance(value, str | Path) else value

    @field_validator("disk")
    @classmethod
    def _disk_can_be_read(cls, value: str | None) -> str | None:
        if value is not None:
            parse_disks(value)
        return value

    @field_validator("update")
    @classmethod
    def _one_backward_as_it_is(cls, value: UpdateTime, others: ValidationInfo) -> UpdateTime:
        """Updates in backward use gradients up: none is left to be clipped, or to be added to."""
        for name, harmless in (("clip_norm", None), ("accumulate", 1)):
            if value == "backward" and others.data.get(name, harmless) != harmless:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"backward uses gradients up as they come; leave {flag} out, or take --update step")
        return value

    @field_validator("nonfinite")
    @classmethod
    def _what_is_done_is_not_skipped(cls, value: NonFinite, others: ValidationInfo) -> NonFinite:
        if value == "skip" and others.data.get("update") == "backward":
            raise ValueError(
                "a step that backward has taken cannot be skipped; take --nonfinite stop, or --update step"
            )
        return value

    @property
    def tokens_per_step(self) -> int:
        """Tokens between two optimizer steps."""
        return self.batch * self.seq * self.accumulate


def read_yaml(path: Path) -> dict[str, Any]:
    """The settings in a YAML file. Raises ``ConfigError`` for a file that is missing or holds no mapping, and where the
    folder of a run in it is no text."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the configuration {path}: {reason}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date that there is not, brackets without end
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold settings as 'name: value', it holds a {type(content).__name__}")
    _refuse_unknown(content, str(path))
    folder = content.get("run")
    if not isinstance(folder, str | None):
        kind = type(folder).__name__
        raise ConfigError(f"{path}: run is the name of a folder, and YAML reads {folder} as {kind}; put it in quotes")
    return content


def make_config(*layers: Mapping[str, Any]) -> TrainConfig:
    """One configuration from ``layers``; a later one overrides an earlier one, None means 'not given'.

    Raises ``ConfigError`` naming the first setting that is missing, unknown or wrong.
    """
    merged = {key: value for layer in layers for key, value in layer.items() if value is not None}
    _refuse_unknown(merged, "the configuration")
    try:
        return TrainConfig.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(_first_fault(error)) from None


def _refuse_unknown(settings: Mapping[Any, Any], where: str) -> None:
    known = list(TrainConfig.model_fields)
    for key in settings:
        if key not in known:
            hint = meant(str(key).replace("-", "_"), known) or f"settings are {', '.join(known)}"
            raise ConfigError(f"{where}: {key} is not a setting; {hint}")


def _first_fault(error: ValidationError) -> str:
    first = error.errors()[0]
    name = str(first["loc"][0]) if first["loc"] else "the configuration"
    flag = "--" + name.replace("_", "-")
    if first["type"] == "missing":
        return f"{name} is missing; give {flag}, or {name}: in the YAML file"
    if first["type"] == "value_error":  # raised by one of our own parsers: it quotes the value already
        return f"{flag}: {first['msg'].removeprefix('Value error, ')}"
    return f"{flag}: {first['msg'][:1].lower()}{first['msg'][1:]}, got {first['input']!r}"
