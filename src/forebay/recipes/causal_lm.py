"""Causal language models of transformers, built without memory for their parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.errors import ModelError
from forebay.names import meant
from forebay.recipes import load_recipe, recipe_names

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ModelSource", "build", "build_as", "find", "in_training", "read_config"]

_KINDS = {
    "AutoModelForCausalLM": "a causal language model",
    "AutoModelForSeq2SeqLM": "an encoder-decoder",
    "AutoModelForImageClassification": "an image classifier",
}


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from.

    ``config`` is the content of a config.json (of a recipe) or its path; ``folder`` holds the tokenizer, if any, and
    the weights if ``weights``.
    """

    name: str
    config: Mapping[str, Any] | Path
    folder: Path | None = None
    weights: bool = False

    @property
    def file(self) -> str:
        """The file that the configuration is in, for messages; of a recipe its name."""
        return str(self.config) if isinstance(self.config, Path) else self.name


def find(name: str) -> ModelSource:
    """What ``name`` stands for: a recipe, a folder with a config.json, or a config.json.

    A folder called like a recipe is written ``./name``. Raises ``ModelError`` when there is neither, and for weights
    that are not safetensors.
    """
    if name in recipe_names():
        return ModelSource(name, load_recipe(name).model)
    path = Path(name)
    if path.is_file() and path.suffix == ".json":
        return ModelSource(name, path)
    if path.is_dir():
        return _folder(name, path)
    if ":" in name:
        raise ModelError(
            f"{name} is a function, and here language models are taken by name or folder; a function is for forebay "
            f"plan, compare and verify, and in a loop of your own forebay.prepare takes any model"
        )
    # On the hub the name of a model has its owner's in front, and capitals.
    near = meant(path.name.lower(), recipe_names())
    hint = f"; {near} It" if near else ": it"
    raise ModelError(
        f"there is no model {name}{hint} is neither a recipe ({', '.join(recipe_names())}) nor a "
        f"folder with a config.json nor a config.json; nothing is downloaded"
    )


def _folder(name: str, path: Path) -> ModelSource:
    config = path / "config.json"
    if not config.is_file():
        raise ModelError(f"the model folder {name} has no config.json; give a folder saved with save_pretrained")
    weights = any(path.glob("*.safetensors"))
    if not weights and (any(path.glob("*.bin")) or any(path.glob("*.gguf"))):
        raise ModelError(
            f"the weights in {name} are not safetensors; load them with transformers and save them again with "
            "save_pretrained, or give its config.json to start from random weights"
        )
    return ModelSource(name, config, folder=path, weights=weights)


def build(source: ModelSource, dtype: str) -> nn.Module:
    """The model of ``source`` with every parameter on the meta device and every buffer real, ready to train.

    Raises ``ModelError`` when transformers is missing or has no causal language model for the configuration.
    """
    return build_as(source, dtype, "AutoModelForCausalLM", read_config(source))


def read_config(source: ModelSource) -> Any:
    """The transformers configuration of ``source``. Raises ``ModelError``."""
    try:
        from transformers import AutoConfig
    except ImportError:
        raise ModelError("a named model needs transformers; pip install 'forebay[transformers]'") from None
    try:
        if isinstance(source.config, Path):
            return AutoConfig.from_pretrained(source.config, local_files_only=True)
        return AutoConfig.for_model(**source.config)
    except Exception as error:
        # The configuration is the user's: whatever transformers raises over it is an answer to them.
        raise ModelError(f"transformers cannot read the configuration {source.file}: {_reason(error)}") from error


def build_as(source: ModelSource, dtype: str, factory: str, config: Any) -> nn.Module:
    """The model that ``transformers.<factory>`` makes of ``config``, with its parameters on the meta device.

    Raises ``ModelError`` when it cannot.
    """
    import torch
    import transformers

    try:
        with _parameters_on_meta():
            # transformers takes scaled_dot_product_attention by itself, but for models that cannot use it (Gemma 2).
            model: nn.Module = getattr(transformers, factory).from_config(config, dtype=getattr(torch, dtype))
    except Exception as error:
        raise ModelError(f"transformers cannot build {_KINDS[factory]} from {source.file}: {_reason(error)}") from error
    return model.train()


def in_training(model: nn.Module) -> dict[str, bool]:
    """What goes with every batch that a language model of transformers is trained on.

    Its configuration asks for a cache of keys and values for the sake of generation, and is exported as it is. A step
    has no use for one, and it would hold the keys and values of all layers until the loop drops the output. The
    ``Trainer`` of transformers trains without, too.
    """
    return {"use_cache": False} if "use_cache" in signature(model.forward).parameters else {}


def _reason(error: Exception) -> str:
    said = " ".join(str(error).split())[:400]
    # Alone, the words of these are the name that is missing, or a sum that a number of the file spoils.
    return f"{type(error).__name__}: {said}" if isinstance(error, LookupError | ArithmeticError) else said


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """While it lasts, a parameter that a module takes goes to the meta device at once.

    One parameter at a time is real, and as modules fill theirs only after taking them, its pages are never touched.
    Buffers stay: a model computes them when it is built (rotary frequencies, say) and no file brings them back.
    """
    from torch.nn import Parameter
    from torch.nn.modules.module import register_module_parameter_registration_hook

    def to_meta(module: nn.Module, name: str, parameter: Any) -> Any:
        # A parameter that is on meta already is being tied or moved: a new one would untie it.
        if parameter is None or parameter.is_meta:
            return None
        return Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(to_meta)
    try:
        yield
    finally:
        handle.remove()
