"""Models of transformers, built without memory for their parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.errors import ModelError
from forebay.names import meant
from forebay.recipes import load_recipe, recipe_names
from forebay.recipes.kinds import CAUSAL, Kind, assumed, named, names_head

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ModelSource", "build", "build_as", "find", "kind_of", "read_config"]


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

    Raises ``ModelError`` when transformers is missing, has no causal language model for the configuration, or that
    says it is of another one.
    """
    config = read_config(source)
    other = _other_than_causal(config)
    if other is not None:
        raise ModelError(
            f"{source.name} is {other}, and here causal language models are trained; in a loop of your own, or with "
            f"the Trainer of transformers, forebay.prepare takes any model"
        )
    return build_as(source, dtype, CAUSAL, config)


def _other_than_causal(config: Any) -> str | None:
    """In words, what the model of ``config`` is: by the class that it names, or where its type has no causal language
    model. None where it is one."""
    classes = tuple(config.architectures or ())
    head = names_head(classes)
    if head is not None:
        return None if named(classes, config.model_type) is CAUSAL else f"a {head}"
    if CAUSAL.head(config.model_type):
        return None
    kind = assumed(config.model_type, encoder_decoder=config.is_encoder_decoder)
    return f"a {config.model_type}" if kind is None else kind.what


def kind_of(source: ModelSource, config: Any) -> Kind:
    """What the model of ``config`` is trained for: by the class that it names, as ``save_pretrained`` writes it, or
    else by its type.

    Raises ``ModelError`` where forebay makes no batches for it.
    """
    classes = tuple(config.architectures or ())
    kind = named(classes, config.model_type)
    head = names_head(classes) if kind is None else None
    if kind is None and head is None:
        kind = assumed(config.model_type, encoder_decoder=config.is_encoder_decoder)
    if kind is None:
        raise ModelError(
            f"{source.name} is a {head or config.model_type}, for which forebay makes no batch; write a function that "
            f"returns (model, batch) and give it as package.module:function"
        )
    return kind


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


def build_as(source: ModelSource, dtype: str, kind: Kind, config: Any) -> nn.Module:
    """The model of ``kind`` that transformers makes of ``config``, with its parameters on the meta device.

    Raises ``ModelError`` when it cannot.
    """
    import torch
    import transformers

    try:
        with _parameters_on_meta():
            # transformers takes scaled_dot_product_attention by itself, but for models that cannot use it (Gemma 2).
            model: nn.Module = getattr(transformers, kind.factory).from_config(config, dtype=getattr(torch, dtype))
    except Exception as error:
        raise ModelError(f"transformers cannot build {kind.what} from {source.file}: {_reason(error)}") from error
    return model.train()


def _reason(error: Exception) -> str:
    said = " ".join(str(error).split())[:400]
    if not said:  # as of a MemoryError
        return type(error).__name__
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
