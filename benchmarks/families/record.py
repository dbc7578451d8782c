"""What is kept of a run over the architectures of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import final

from benchmarks.archive import Archive
from benchmarks.provenance import Provenance

__all__ = ["ARCHIVE", "Comparison", "Trained", "Verdict", "newest"]


class Verdict(StrEnum):
    """How an architecture was trained."""

    SAME = "same"  # every loss, and every parameter after the last step, is that of plain PyTorch to the last bit
    OTHER = "other"  # it is not
    REFUSED = "refused"  # forebay raised an error
    NOT_TRIED = "not tried"  # plain PyTorch does not train it, as small as it was made, or it cannot be made small


@final
@dataclass(frozen=True)
class Trained:
    """One architecture: its ``task`` and the name of its kind in transformers. Of what was tried, how many
    ``parameters`` the tiny model has and the bytes of the device that it needs at least (``least``; it was given a
    fiftieth more). ``why`` not, in words."""

    task: str
    name: str
    verdict: Verdict
    why: str = ""
    parameters: int = 0
    least: int = 0


@final
@dataclass(frozen=True, kw_only=True)
class Comparison(Provenance):
    """One run."""

    trained: tuple[Trained, ...]


def newest(comparisons: Sequence[Comparison]) -> tuple[Trained, ...]:
    """The newest of each architecture, by task and name. ``comparisons`` are in order of their dates."""
    found = {(one.task, one.name): one for comparison in comparisons for one in comparison.trained}
    return tuple(found[key] for key in sorted(found))


ARCHIVE = Archive("families-", Comparison)
