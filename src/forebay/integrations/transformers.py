"""forebay under the ``Trainer`` of transformers, and under every trainer that is made from it.

    from forebay.integrations.transformers import ForebayTrainer, Memory

    trainer = ForebayTrainer(model, args, train_dataset=data, memory=Memory("24GiB", host_memory="96GiB"))

For another trainer (TRL's, your own) put the mixin in front: ``class MyTrainer(ForebayMixin, SFTTrainer)``.

What the Trainer does stays as it is: its loop, data, logging, evaluation, callbacks. The model is prepared where the
Trainer makes its optimizer, with a plan for one micro-batch. Checkpoints hold the weights as ``from_pretrained`` reads
them, and beside them what ``forebay.save`` writes, in the place of the optimizer's pickle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from transformers import Trainer
from transformers.utils import logging

from forebay import api
from forebay.errors import ConfigError, ModelError
from forebay.exporting import replace_weights
from forebay.loss import Loss
from forebay.optim.streamed import StreamedOptimizer
from forebay.recipes.tasks import is_transformers
from forebay.runtime.generators import as_drawn_before
from forebay.runtime.hooks import is_prepared, prepared_session
from forebay.units import format_bytes, format_seconds

if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object

__all__ = ["FOLDER", "ForebayMixin", "ForebayTrainer", "Memory"]

FOLDER = "forebay"
"""Of a checkpoint of the Trainer: the folder with what ``forebay.save`` wrote."""

_CHECKPOINTING: Final = frozenset({"gradient_checkpointing", "activation_checkpointing"})
"""Names that one argument of the Trainer has had in its versions."""

_log = logging.get_logger(__name__)


@final
@dataclass(frozen=True)
class Memory:
    """What ``forebay.prepare`` is asked for, in its words. ``example`` is a batch as the data collator makes it, the
    largest that training will see; None: the first of the training data, which is right where all have one length."""

    device_memory: int | str
    host_memory: int | str | None = None
    disk: str | None = None
    policy: str = "auto"
    loss: Loss = "auto"
    compress: int = 0
    blocks: tuple[str, ...] | None = None
    example: Mapping[str, Any] | None = None


class ForebayMixin(_Base):
    """Goes before a ``Trainer`` in the bases of a class; abstract without one.

    Raises ``ConfigError`` for arguments of the Trainer that forebay does not serve, and what ``forebay.prepare``
    raises when training begins.
    """

    def __init__(self, *args: Any, memory: Memory, **kwargs: Any) -> None:
        self._memory = memory
        super().__init__(*args, **kwargs)
        _expect_served(self)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leaves the model where it is: the plan says where its parameters go."""

    def create_accelerator_and_postprocess(self) -> None:
        """Has Accelerate place nothing: neither the model, nor, by a copy of all of them, the optimizer's states."""
        super().create_accelerator_and_postprocess()
        self.accelerator.device_placement = False

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimizer that the Trainer makes, in front of states that are where the plan has them."""
        made = super().create_optimizer() if model is None else super().create_optimizer(model)
        if is_prepared(self._trained):
            return made
        memory = self._memory
        with self.accelerator.autocast(), as_drawn_before():
            example = self._example()
            _, self.optimizer = api.prepare(
                self._trained,
                made,
                example,
                device_memory=memory.device_memory,
                host_memory=memory.host_memory,
                disk=memory.disk,
                policy=memory.policy,
                loss=memory.loss,
                compress=memory.compress,
                blocks=memory.blocks,
            )
        _say(self._trained)
        return self.optimizer

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """Prepares a model that is evaluated before it was ever trained: it may not fit otherwise."""
        if not training and not is_prepared(self._trained):
            self.create_optimizer()
        return super()._wrap_model(model, training, dataloader)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Writes the weights a tensor at a time; what else belongs to the folder is the Trainer's own."""
        if state_dict is not None or not is_prepared(self._trained) or not is_transformers(self._trained):
            super()._save(output_dir, state_dict)
            return
        folder = str(self.args.output_dir) if output_dir is None else output_dir
        # No weights at first, as the Trainer has it under DeepSpeed: a state dict would be all of them at once.
        super()._save(folder, {})
        if self.args.should_save:
            replace_weights(self._trained, Path(folder))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """What ``forebay.save`` writes: bit for bit, streamed, and nothing that is unpickled."""
        path, step, optimizer = Path(output_dir) / FOLDER, self.state.global_step, self._prepared_optimizer()
        try:
            api.save(self._trained, optimizer, path, step=step, scheduler=self.lr_scheduler)
        finally:
            # Nobody writes there again, but somebody may read it, or remove it for a newer one.
            prepared_session(self._trained).unlock(path)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        path = Path(checkpoint) / FOLDER
        if not path.is_dir():
            raise ConfigError(
                f"{checkpoint} holds no optimizer states of forebay; resume from a checkpoint that this trainer wrote "
                f"with save_only_model off"
            )
        optimizer = self._prepared_optimizer()
        try:
            api.resume(self._trained, optimizer, path, scheduler=self.lr_scheduler)
        finally:
            prepared_session(self._trained).unlock(path)

    @property
    def _trained(self) -> nn.Module:
        if self.model is None:
            raise ModelError("the trainer has no model; give it one, or a model_init")
        return self.model

    def _prepared_optimizer(self) -> StreamedOptimizer:
        """The optimizer without Accelerate's wrapper around it."""
        optimizer = self.optimizer.optimizer if isinstance(self.optimizer, AcceleratedOptimizer) else self.optimizer
        if not isinstance(optimizer, StreamedOptimizer):
            raise ModelError("the model is not prepared; train or evaluate first")
        return optimizer

    def _example(self) -> dict[str, Any]:
        """What the model's forward will be called with, as ``compute_loss`` calls it."""
        batch = self._memory.example
        if batch is None:
            if self.train_dataset is None:
                raise ConfigError(
                    "there is no training data to plan for; give Memory an example: a batch as the collator makes it"
                )
            batch = next(iter(self.get_train_dataloader()))
        example = dict(batch)
        labelled = "labels" in example
        if self.label_smoother is not None or self.compute_loss_func is not None:
            example.pop("labels", None)
        if self.model_accepts_loss_kwargs and labelled:
            example["num_items_in_batch"] = (example["labels"] != -100).sum() if "labels" in example else None
        return example


@final
class ForebayTrainer(ForebayMixin, Trainer):
    """The ``Trainer`` of transformers with a memory plan: ``memory=Memory("24GiB")`` is all that is new."""


def _expect_served(trainer: Trainer) -> None:
    """Raises ``ConfigError`` for arguments of the Trainer that forebay does not serve."""
    args = trainer.args
    refused = (
        (args.world_size > 1, f"{args.world_size} processes", "start one"),
        (args.n_gpu > 1, f"{args.n_gpu} GPUs", "let CUDA_VISIBLE_DEVICES name one"),
        (trainer.is_deepspeed_enabled, "DeepSpeed", "take it out of the arguments"),
        (trainer.is_fsdp_enabled, "FSDP", "take it out of the arguments"),
        (args.fp16, "fp16", "use bf16, which needs no scaling of the loss"),
        (args.torch_compile, "torch_compile", "compile the model's layers one by one instead"),
        (args.auto_find_batch_size, "auto_find_batch_size", "the plan says beforehand whether a batch fits"),
    )
    for is_asked, what, remedy in refused:
        if is_asked:
            raise ConfigError(f"the trainer's arguments ask for {what}, which forebay does not serve: {remedy}")
    for name in _CHECKPOINTING.intersection(field.name for field in fields(args)):
        if getattr(args, name):
            _log.warning(f"{name} is left to forebay, whose plan says what is computed again")
            setattr(args, name, False)


def _say(model: nn.Module) -> None:
    plan = api.report(model).plan
    seconds = (
        "" if plan.step_seconds is None else f", about {format_seconds(plan.step_seconds)} a micro-batch and update"
    )
    peaks = ", ".join(f"{tier.value} {format_bytes(nbytes)}" for tier, nbytes in plan.peaks().items() if nbytes)
    _log.info(f"forebay ({plan.planner}): {peaks}{seconds}")
    for line in plan.changes_numbers:
        _log.warning(line)
