"""forebay under the trainers of TRL.

    from forebay.integrations.trl import ForebaySFTTrainer, Memory

    trainer = ForebaySFTTrainer(model, args, train_dataset=data, memory=Memory("24GiB", host_memory="96GiB"))

``SFTTrainer`` computes its loss from the weight of the head, which the model reads itself: the head is on the device
for a whole forward (``Plan.read_outside``). For another trainer of TRL put ``ForebayMixin`` in front of it.
"""

from __future__ import annotations

from typing import final

from forebay.integrations import missing
from forebay.integrations.transformers import ForebayMixin, Memory

try:
    from trl.trainer.sft_trainer import SFTTrainer
except ImportError as error:
    raise missing("trl", error) from error

__all__ = ["ForebaySFTTrainer", "Memory"]


@final
class ForebaySFTTrainer(ForebayMixin, SFTTrainer):
    """TRL's ``SFTTrainer`` with a memory plan: ``memory=Memory("24GiB")`` is all that is new."""
