"""Whether a module is a model of transformers, without importing that: who has one has imported it."""

from __future__ import annotations

import sys

from torch import nn

__all__ = ["is_pretrained"]


def is_pretrained(module: nn.Module) -> bool:
    """Whether ``module`` is a model of transformers."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(module, library.PreTrainedModel)
