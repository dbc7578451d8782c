"""The same model with fewer layers, for a machine that has no room for all of them."""

from __future__ import annotations

import copy
from typing import Any

__all__ = ["depth_of", "with_layers"]


def depth_of(config: Any) -> int | None:
    """Layers of the model that a transformers configuration describes, a second stack left out; None: it says none."""
    found: int | None = getattr(config.get_text_config(), "num_hidden_layers", None)
    return found


def with_layers(config: Any, layers: int) -> Any:
    """A copy of ``config`` with its first ``layers`` layers: of encoder and decoder, where it has both.

    What the configuration says of each layer in a list (``layer_types``) is cut to the same length.
    """
    short = copy.deepcopy(config)
    text, before = short.get_text_config(), depth_of(config)
    said = dict(vars(text))
    for name, value in said.items():
        if "layer" in name and isinstance(value, list | tuple) and len(value) == before:
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    decoder = said.get("num_decoder_layers")
    if decoder is not None:
        text.num_decoder_layers = min(decoder, layers)
    return short
