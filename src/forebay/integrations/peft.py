"""Adapters of PEFT: what of a prepared model belongs into their files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from forebay.integrations import missing

try:
    from peft import PEFT_TYPE_TO_TUNER_MAPPING, PeftModel
except ImportError as error:
    raise missing("peft", error) from error

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["adapter_state"]


def adapter_state(model: PeftModel | PreTrainedModel) -> dict[str, torch.Tensor]:
    """The part of ``model.state_dict()`` that PEFT may want to save: what is trained, what else adapters have, and
    embeddings; by its names, each in its own shape and dtype. The rest of the frozen model is not read: it may be more
    than the host has memory for. ``model`` is one of PEFT's, or one of transformers with adapters (``add_adapter``).

    For ``model.save_pretrained(folder, state_dict=adapter_state(model))``.
    """
    kept = {id(p) for p in model.parameters() if p.requires_grad}
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        kept |= {id(p) for p in layer.parameters()} if layer is not None else set()
    adapters = set(model.peft_config)
    kinds = {config.peft_type for config in model.peft_config.values()}
    tuners = [tuner for kind, tuner in PEFT_TYPE_TO_TUNER_MAPPING.items() if kind in kinds]
    prefixes = [tuner.prefix for tuner in tuners if getattr(tuner, "prefix", None)]  # not all have one
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    # Some have tensors of other names beside: the projections that layers share in VeRA, by the adapter's name.
    of_adapters = (
        name for name, _ in named if any(p in name for p in prefixes) or not adapters.isdisjoint(name.split("."))
    )
    wanted = (*(name for name, tensor in named if id(tensor) in kept), *of_adapters)
    names = dict.fromkeys(wanted)
    found: dict[str, torch.Tensor] = {}
    for owner in dict.fromkeys(name.rpartition(".")[0] for name in names):
        # Each module gives its values in plain PyTorch's names, wherever they live.
        state = model.get_submodule(owner).state_dict(prefix=f"{owner}." if owner else "")
        found |= {name: value for name, value in state.items() if name in names}
    return found
