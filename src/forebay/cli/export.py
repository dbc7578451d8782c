"""``forebay export``: the model of a run, or of any folder of safetensors, as other programs read it."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from forebay.errors import ConfigError, StorageError
from forebay.units import format_bytes

if TYPE_CHECKING:
    from forebay.exporting import Layout
    from forebay.recipes.sources import ModelSource

__all__ = ["Exported", "export"]

BESIDE = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.*",
    "merges.txt",
    "spiece.model",
    "sentencepiece*.model",
    "preprocessor_config.json",
)
"""Files beside the weights that belong to the model. Nothing else of a run is copied."""

CONFIG = "config.json"


@dataclass(frozen=True)
class Exported:
    """What was written: a ``folder``, how (``layout``), its files, and their bytes."""

    folder: Path
    layout: Layout
    files: tuple[str, ...]
    nbytes: int

    @property
    def words(self) -> str:
        """A sentence for a terminal."""
        return f"{self.folder}: {format_bytes(self.nbytes)} in {len(self.files)} files ({self.layout})"

    def to_json_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        return {
            "folder": str(self.folder),
            "format": self.layout,
            "files": list(self.files),
            "bytes": self.nbytes,
        }


def export(run: Path, to: Path, *, layout: str | None = None, dtype: str | None = None) -> Exported:
    """Writes the model in ``run`` into the new folder ``to``. ``layout`` None: as Hugging Face has it; ``dtype`` None:
    as it is kept, which is fp32 for a run of ``forebay train``.

    Raises a ``UsageError`` for a folder without a model and for a layout or a dtype that there is not, ``StorageError``
    when ``to`` cannot be written.
    """
    from forebay.checkpoint.converted import as_filed, as_wanted
    from forebay.checkpoint.export import held_back
    from forebay.checkpoint.source import FolderSource, Source, saved_names
    from forebay.checkpoint.weights import Weights
    from forebay.exporting import new_folder, write
    from forebay.recipes.tasks import build_any

    chosen, kept = _layout(layout), _dtype(dtype)
    found = _model_in(run)
    model = build_any(found, dtype or "float32")  # on the meta device
    source: Source = FolderSource(as_wanted(Weights(run), model, saved_names(model)), model)
    if chosen == "huggingface":
        source = as_filed(source, model)
    target = new_folder(to)
    try:
        with held_back(target) as beside:
            files = [target / path.name for path in _copy_beside(run, beside, dtype)] if chosen == "huggingface" else []
            files += write(source, target, chosen, kept)
    except OSError as error:
        raise StorageError(f"cannot write the model to {to}: {error.strerror or error}") from error
    return Exported(to, chosen, tuple(sorted(file.name for file in files)), sum(file.stat().st_size for file in files))


def _layout(name: str | None) -> Layout:
    from forebay.exporting import LAYOUTS

    for layout in LAYOUTS:
        if layout == (name or LAYOUTS[0]):
            return layout
    raise ConfigError(f"--format: there is no {name!r}; formats are {', '.join(LAYOUTS)}")


def _dtype(name: str | None) -> Any:
    import torch

    from forebay.cli.plan import PlanSettings

    names = get_args(PlanSettings.model_fields["dtype"].annotation)
    if name is not None and name not in names:
        raise ConfigError(f"--dtype: a model is written as {' or '.join(names)}, not as {name!r}")
    return None if name is None else getattr(torch, name)


def _model_in(run: Path) -> ModelSource:
    from forebay.cli.runfolder import expect_model
    from forebay.recipes.sources import find

    if not run.is_dir():
        raise ConfigError(f"there is no folder {run}; give the folder of a run (forebay train --run)")
    name = f"./{run}" if not run.is_absolute() else str(run)
    expect_model(name, weights=True)
    found = find(name)
    if not found.weights:
        raise ConfigError(f"{run} has a {CONFIG} and no safetensors: there is nothing to export")
    return found


def _copy_beside(run: Path, target: Path, dtype: str | None) -> list[Path]:
    """The configuration, which says the dtype, and what else belongs to the model."""
    config = json.loads((run / CONFIG).read_text(encoding="utf-8"))
    if dtype is not None:
        config.pop("torch_dtype", None)  # what releases of transformers before 5 call it
        config["dtype"] = dtype
    (target / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    found = [target / CONFIG]
    for pattern in BESIDE:
        for file in sorted(run.glob(pattern)):
            if file.is_file():
                found.append(Path(shutil.copyfile(file, target / file.name)))
    return found
