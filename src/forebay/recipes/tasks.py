"""Any model that a name, a configuration or a function stands for, on the meta device, with a batch to match."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.errors import ConfigError, ModelError
from forebay.recipes.depth import depth_of, with_layers
from forebay.recipes.kinds import CAUSAL, IMAGES, Asked, Kind, named
from forebay.recipes.sources import ModelSource, build_as, find, kind_of, read_config

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Sample", "build_any", "depth", "names_function", "sample"]


@dataclass(frozen=True)
class Sample:
    """A model without memory for its parameters, and a batch of the shape that it will be trained on.

    ``seq`` is the length of a sequence as it was used; None for a model that has none (images), and for a function
    that brings its own batch. ``kind`` is what the model is trained for; None where such a function says so.
    """

    name: str
    model: nn.Module
    batch: Any
    seq: int | None
    kind: Kind | None = None


def sample(name: str, *, batch: int, seq: int, dtype: str, on: str = "meta", layers: int | None = None) -> Sample:
    """The model that ``name`` stands for, with a batch of ``batch`` sequences of ``seq`` tokens.

    ``name`` is a recipe, a folder with a config.json, a config.json, or ``package.module:function``. The function is
    called without arguments inside ``torch.device(on)`` and returns ``(model, batch)``, or a model of transformers
    alone, for which the batch is made here, on the meta device like everything that no function makes, but for the
    classes that it is to tell. An encoder-decoder reads and writes ``seq`` tokens each; an image classifier takes
    ``batch`` images of its own size.
    ``layers`` (None: all) are as many as the model gets, the first ones.

    Raises ``ModelError`` when there is no such model or it cannot be built, ``ConfigError`` when ``seq`` is more than
    its positions, and for ``layers`` of what a function makes.
    """
    if names_function(name):
        if layers is not None:
            raise ConfigError(f"{name} makes its own model, whose layers cannot be left out here; leave --layers")
        return _from_function(name, batch, seq, dtype, on)
    return _sampled(build_any(find(name), dtype, layers), Asked(name, batch, seq))


def build_any(source: ModelSource, dtype: str, layers: int | None = None) -> nn.Module:
    """The model of ``source``, whatever it is for, with its parameters on the meta device; of ``layers`` layers (None:
    all). Raises ``ModelError`` when it cannot be built."""
    config = read_config(source)
    if layers is not None:
        config = with_layers(config, layers)
    model = build_as(source, dtype, kind_of(source, config), config)
    _mind_untied(source, model)
    return model


def depth(name: str) -> int | None:
    """Layers of the model that ``name`` stands for; None where a function makes it, or its configuration does not say.

    Raises ``ModelError`` when there is no such model.
    """
    return None if names_function(name) else depth_of(read_config(find(name)))


def names_function(name: str) -> bool:
    """Whether ``name`` is ``package.module:function``."""
    return ":" in name and not Path(name).exists()


def _mind_untied(source: ModelSource, model: nn.Module) -> None:
    """Gives the head a weight of its own where the configuration asks for one.

    transformers 5 ties the head of every T5 until it loads weights that differ; the configuration knows beforehand.
    """
    from torch import nn

    whole: Any = model
    head = whole.get_output_embeddings()
    if head is None or _content(source.config).get("tie_word_embeddings") is not False:
        return
    if head.weight is whole.get_input_embeddings().weight:
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)


def _content(config: Mapping[str, Any] | Path) -> Mapping[str, Any]:
    if isinstance(config, Path):
        import json

        found = json.loads(config.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return config


def _sampled(model: nn.Module, asked: Asked) -> Sample:
    """``model``, which is one of transformers, with a batch by what its class, or one that it is made from, is for."""
    config: Any = model.config
    kind = named((made.__name__ for made in type(model).__mro__), config.model_type)
    if kind is None:
        kind = IMAGES if model.main_input_name == "pixel_values" else CAUSAL
    made, used = kind.batch(model, asked)
    return Sample(asked.name, model, made, used, kind)


def _from_function(name: str, batch: int, seq: int, dtype: str, on: str) -> Sample:
    import torch
    from torch import nn

    from forebay.runtime.pretrained import is_pretrained

    function = _find_function(name)
    try:
        with torch.device(on):
            made = function()
    except Exception as error:
        # The function is the user's: whatever it raises is an answer to them and not a fault of ours.
        raise ModelError(f"{name} failed on the {on} device: {type(error).__name__}: {_first_line(error)}") from error
    if isinstance(made, nn.Module):
        if not is_pretrained(made):
            raise ModelError(
                f"{name} returned a {type(made).__name__} alone, and forebay knows the inputs of transformers models "
                f"only; return (model, batch), batch being what the model's forward is called with"
            )
        model = made.to(getattr(torch, dtype)).train()
        return _sampled(model, Asked(name, batch, seq))
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise ModelError(
            f"{name} must return a model, or (model, batch) with batch being what its forward is called with (a dict "
            f"or a tuple of tensors); it returned a {type(made).__name__}"
        )
    return Sample(name, made[0].train(), made[1], None)


def _find_function(name: str) -> Any:
    where, _, attribute = name.partition(":")
    # A module of the folder that the command is run in counts, as it does for ``python -m``.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(where)
    except Exception as error:
        raise ModelError(f"cannot import {where} for {name}: {type(error).__name__}: {_first_line(error)}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ModelError(f"{where} has no function {attribute!r}; a model is given as package.module:function")
    return function


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")[:300]
