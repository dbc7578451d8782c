"""Adapters of PEFT: what of a prepared model belongs into their files."""

from __future__ import annotations

import torch

from forebay.integrations import missing

try:
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTuner
except ImportError as error:
    raise missing("peft", error) from error

__all__ = ["adapter_state"]


def adapter_state(model: PeftModel) -> dict[str, torch.Tensor]:
    """The part of ``model.state_dict()`` that PEFT may want to save: what is trained, adapters that are not, and
    embeddings; by its names, each in its own shape and dtype. The rest of the frozen model is not read: it may be more
    than the host has memory for.

    For ``model.save_pretrained(folder, state_dict=adapter_state(model))``.
    """
    kept = {id(p) for p in model.parameters() if p.requires_grad}
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        kept |= {id(p) for p in layer.parameters()} if layer is not None else set()
    prefix = model.base_model.prefix if isinstance(model.base_model, BaseTuner) else None
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    wanted = (name for name, tensor in named if id(tensor) in kept or (prefix is not None and prefix in name))
    names = dict.fromkeys(wanted)
    found: dict[str, torch.Tensor] = {}
    for owner in dict.fromkeys(name.rpartition(".")[0] for name in names):
        # Each module gives its values in plain PyTorch's names, wherever they live.
        state = model.get_submodule(owner).state_dict(prefix=f"{owner}." if owner else "")
        found |= {name: value for name, value in state.items() if name in names}
    return found
