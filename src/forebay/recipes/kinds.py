"""What a model of transformers is trained for: the factory that builds it, and the batch that it is called with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any, Final, final

from forebay.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["CAUSAL", "Asked", "Kind", "assumed", "in_training", "named", "names_head"]


@final
@dataclass(frozen=True)
class Asked:
    """The ``batch`` sequences (or images) of ``seq`` tokens that somebody asks for; ``name`` is that of the model."""

    name: str
    batch: int
    seq: int


Made = tuple[dict[str, Any], int | None]
"""A batch without values but for classes, and the tokens of its sequences, if it has any."""


@final
@dataclass(frozen=True)
class Kind:
    """``what`` is a word for it, ``factory`` makes its models, ``heads`` is the table in transformers'
    ``modeling_auto`` of their classes by ``model_type``. ``batch`` makes what such a model is called with."""

    what: str
    factory: str
    heads: str
    batch: Callable[[nn.Module, Asked], Made]

    def head(self, model_type: str) -> tuple[str, ...]:
        """The names of the classes of ``model_type`` that are of this kind."""
        from transformers.models.auto import modeling_auto

        return _all(getattr(modeling_auto, self.heads).get(model_type, ()))


def named(names: Iterable[str], model_type: str) -> Kind | None:
    """The kind of the first of the classes ``names`` that is of one."""
    found = (kind for name in names for kind in _KINDS if name in kind.head(model_type))
    return next(found, None)


def names_head(names: Iterable[str]) -> str | None:
    """The first of the classes ``names`` that transformers has and that is no model without a head."""
    import transformers
    from transformers.models.auto import modeling_auto

    bare = {name for names in modeling_auto.MODEL_MAPPING_NAMES.values() for name in _all(names)}
    return next((name for name in names if name not in bare and getattr(transformers, name, None) is not None), None)


def assumed(model_type: str, *, encoder_decoder: bool) -> Kind | None:
    """The kind of a model of which no class is named."""
    order = (TRANSLATION, CAUSAL, IMAGES) if encoder_decoder else (CAUSAL, TRANSLATION, IMAGES)
    return next((kind for kind in order if kind.head(model_type)), None)


def in_training(model: nn.Module) -> dict[str, bool]:
    """What goes with every batch that a language model of transformers is trained on.

    Its configuration asks for a cache of keys and values for the sake of generation, and is exported as it is. A step
    has no use for one, and it would hold the keys and values of all layers until the loop drops the output. The
    ``Trainer`` of transformers trains without, too.
    """
    return {"use_cache": False} if "use_cache" in signature(model.forward).parameters else {}


def _all(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


# Batches. What has no values gets made-up ones where the model runs: random ids, ones for masks. Classes have values
# here, since only the configuration says how many there are.


def _words(model: nn.Module, asked: Asked, limit: str = "max_position_embeddings") -> torch.Tensor:
    """Token ids, (sequences, tokens). Raises ``ConfigError`` for more tokens than the model has positions."""
    import torch

    config: Any = model.config
    longest = getattr(config.get_text_config(), limit, None)
    if longest is not None and asked.seq > longest:
        raise ConfigError(f"--seq {asked.seq} is longer than the {longest} positions of {asked.name}; lower --seq")
    return torch.zeros((asked.batch, asked.seq), dtype=torch.int64, device="meta")


def _classes(model: nn.Module, *shape: int) -> torch.Tensor:
    """Of all classes in turn."""
    import torch

    config: Any = model.config
    count: int = config.num_labels
    return (torch.arange(torch.Size(shape).numel()) % count).reshape(shape)


def _targets(model: nn.Module, asked: Asked) -> Mapping[str, torch.Tensor]:
    """Of each input a class, as the configuration wants it; or numbers, for a single label and for several at once."""
    import torch

    config: Any = model.config
    if config.num_labels > 1 and config.problem_type in (None, "single_label_classification"):
        return {"labels": _classes(model, asked.batch)}
    shape = (asked.batch,) if config.num_labels == 1 else (asked.batch, config.num_labels)
    return {"labels": torch.zeros(shape, dtype=next(model.parameters()).dtype)}


def _of_words(labels: Callable[[nn.Module, Asked], Mapping[str, torch.Tensor]]) -> Callable[[nn.Module, Asked], Made]:
    def made(model: nn.Module, asked: Asked) -> Made:
        return {"input_ids": _words(model, asked), **labels(model, asked), **in_training(model)}, asked.seq

    return made


def _spans(model: nn.Module, asked: Asked) -> Mapping[str, torch.Tensor]:
    import torch

    first = torch.arange(asked.batch) % asked.seq
    return {"start_positions": first, "end_positions": first.clone()}


def _images(model: nn.Module, asked: Asked) -> Made:
    import torch

    config: Any = model.config
    size = config.image_size
    height, width = (size, size) if isinstance(size, int) else (size[0], size[1])
    dtype = next(model.parameters()).dtype
    pixels = torch.zeros(asked.batch, config.num_channels, height, width, dtype=dtype, device="meta")
    return {"pixel_values": pixels, **_targets(model, asked)}, None


def _speech(model: nn.Module, asked: Asked) -> Made:
    """As many frames of sound as the encoder has places for, written down in ``seq`` tokens."""
    import torch

    config: Any = model.config
    bins, places = (getattr(config, name, None) for name in ("num_mel_bins", "max_source_positions"))
    if model.main_input_name != "input_features" or bins is None or places is None:
        raise ConfigError(
            f"forebay does not know the sound that a {type(model).__name__} reads; write a function that returns "
            f"(model, batch) and give it as package.module:function"
        )
    dtype = next(model.parameters()).dtype
    # Two frames for a place: the second convolution takes every other one.
    features = torch.zeros(asked.batch, bins, 2 * places, dtype=dtype, device="meta")
    labels = _words(model, asked, "max_target_positions")
    return {"input_features": features, "labels": labels, **in_training(model)}, asked.seq


_next_words = _of_words(lambda model, asked: {"labels": _words(model, asked)})

CAUSAL: Final = Kind(
    "a causal language model", "AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", _next_words
)
TRANSLATION: Final = Kind(
    "an encoder-decoder", "AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", _next_words
)
IMAGES: Final = Kind(
    "an image classifier", "AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", _images
)

_KINDS: Final = (
    CAUSAL,
    # Before those that fill gaps: BART's class is in the tables of both.
    TRANSLATION,
    Kind("a masked language model", "AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES", _next_words),
    Kind(
        "a classifier of sequences",
        "AutoModelForSequenceClassification",
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
        _of_words(_targets),
    ),
    Kind(
        "a classifier of tokens",
        "AutoModelForTokenClassification",
        "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
        _of_words(lambda model, asked: {"labels": _classes(model, asked.batch, asked.seq)}),
    ),
    Kind(
        "a model that answers questions",
        "AutoModelForQuestionAnswering",
        "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
        _of_words(_spans),
    ),
    IMAGES,
    Kind("a model of speech", "AutoModelForSpeechSeq2Seq", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", _speech),
)
