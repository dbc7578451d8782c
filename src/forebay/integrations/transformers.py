"""forebay under the ``Trainer`` of transformers, and under every trainer that is made from it.

    from forebay.integrations.transformers import ForebayTrainer, Memory

    trainer = ForebayTrainer(model, args, train_dataset=data, memory=Memory("24GiB", host_memory="96GiB"))

For another trainer (TRL's, your own) put the mixin in front: ``class MyTrainer(ForebayMixin, DPOTrainer)``.

What the Trainer does stays as it is: its loop, data, logging, evaluation, callbacks. The model is prepared where the
Trainer makes its optimizer, with a plan for one micro-batch. Checkpoints hold the weights as ``from_pretrained`` reads
them, or the adapters alone, and beside them what ``forebay.save`` writes, in the place of the optimizer's pickle.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, final

import torch
from torch import nn

from forebay import api
from forebay.errors import ConfigError, ModelError
from forebay.exporting import replace_weights
from forebay.integrations import missing
from forebay.integrations.accelerate import compile_arguments
from forebay.integrations.common import (
    FOLDER,
    Memory,
    as_drawn_before,
    blocks_compiled,
    expect_restarts,
    expect_served,
    figures,
    in_words,
    resume_in,
    save_in,
    stream_quantised,
)
from forebay.optim.streamed import StreamedOptimizer
from forebay.runtime.hooks import attachment_of, is_prepared, session_of
from forebay.runtime.pretrained import is_pretrained

try:
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import TorchDynamoPlugin
    from transformers import Trainer
    from transformers.utils import logging
except ImportError as error:
    raise missing("transformers", error) from error

if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object

__all__ = ["FOLDER", "ForebayMixin", "ForebayTrainer", "Memory"]

_CHECKPOINTING: Final = frozenset({"gradient_checkpointing", "activation_checkpointing"})
"""Names that one argument of the Trainer has had in its versions."""

_log = logging.get_logger(__name__)


class ForebayMixin(_Base):
    """Goes before a ``Trainer`` in the bases of a class; abstract without one.

    Raises ``ConfigError`` for arguments of the Trainer that forebay does not serve, and what ``forebay.prepare``
    raises when training begins.
    """

    def __init__(self, *args: Any, memory: Memory, **kwargs: Any) -> None:
        self._memory = memory
        super().__init__(*args, **kwargs)
        _expect_served(self, memory)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leaves the model where it is: the plan says where its parameters go."""

    def create_accelerator_and_postprocess(self) -> None:
        """Has Accelerate place nothing: neither the model, nor, by a copy of all of them, the optimizer's states."""
        super().create_accelerator_and_postprocess()
        self.accelerator.device_placement = False
        # Blocks are compiled one by one when the model is prepared, and not all of it when Accelerate is given it.
        self.accelerator.state.dynamo_plugin = TorchDynamoPlugin(backend="no")

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimizer that the Trainer makes, in front of states that are where the plan has them."""
        made = super().create_optimizer() if model is None else super().create_optimizer(model)
        if is_prepared(self._trained):
            self._expect_trains_it()
            return made
        stream_quantised(self._trained)
        asked = TorchDynamoPlugin(backend=self.args.torch_compile_backend, mode=self.args.torch_compile_mode)
        compiled = blocks_compiled(self._trained, self._memory.blocks, compile_arguments(asked))
        with compiled, self.accelerator.autocast(), as_drawn_before():
            planned = self._asked.prepare(self._trained, made, self._example(), self.args.device)
        self.optimizer = planned
        attachment_of(self._trained).at_end(partial(self._forget, planned, made))
        _say(self._trained)
        return planned

    def _forget(self, planned: torch.optim.Optimizer, made: torch.optim.Optimizer) -> None:
        """The model is closed: what ``planned`` was made from takes its place, without states."""
        if self._unwrapped is planned:
            self.optimizer = made

    def _expect_trains_it(self) -> None:
        """Raises ``ModelError`` where the plan under the model is not for the optimizer of this trainer."""
        attachment, optimizer = session_of(self._trained), self._unwrapped
        if attachment and isinstance(optimizer, StreamedOptimizer) and optimizer.is_of(attachment.session):
            return
        raise ModelError(
            "the model is prepared already, and its states are those of another optimizer than this trainer's; call "
            "forebay.close(model) first, or train on with the trainer that it was prepared by"
        )

    def _expect_within_budget(self) -> None:
        """Raises ``ModelError`` where the plan under the model is for another budget than this trainer's."""
        attachment = session_of(self._trained)
        if attachment is None or attachment.session.plan.budget != self._memory.budget:
            raise ModelError(
                "the model is prepared already, within another budget than this trainer's Memory; call "
                "forebay.close(model) first, or give this trainer the Memory that it was prepared with"
            )

    @property
    def _asked(self) -> Memory:
        """The memory, for the loop of the Trainer: it calls ``zero_grad`` behind every step."""
        if self._memory.accumulates is not None:
            return self._memory
        return replace(self._memory, accumulates=self.args.gradient_accumulation_steps > 1)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """Prepares a model that is evaluated before it was ever trained: it may not fit otherwise."""
        if not training:
            if is_prepared(self._trained):
                self._expect_within_budget()
            else:
                self.create_optimizer()
        return super()._wrap_model(model, training, dataloader)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Writes the weights a tensor at a time; what else belongs to the folder is the Trainer's own."""
        adapted = _is_peft(self._trained) or _has_adapters(self._trained)
        if state_dict is None and is_prepared(self._trained) and adapted:
            from forebay.integrations.peft import adapter_state

            state_dict = adapter_state(self._trained)  # type: ignore[arg-type]
        if state_dict is not None or not is_prepared(self._trained) or not is_pretrained(self._trained):
            # PEFT saves a prompt as its encoder makes it, which it calls by itself.
            with torch.no_grad():
                super()._save(output_dir, state_dict)
            return
        folder = str(self.args.output_dir) if output_dir is None else output_dir
        # No weights at first, as the Trainer has it under DeepSpeed: a state dict would be all of them at once.
        super()._save(folder, {})
        if self.args.should_save:
            replace_weights(self._trained, Path(folder))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """What ``forebay.save`` writes: bit for bit, streamed, and nothing that is unpickled."""
        if _is_peft(self._trained):
            # The Trainer's own files: only adapters have states, and the frozen model is in no checkpoint of theirs.
            super()._save_optimizer_and_scheduler(output_dir)
            return
        path, optimizer = Path(output_dir) / FOLDER, self._prepared_optimizer()
        save_in(path, self._trained, optimizer, self.state.global_step, self.lr_scheduler)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        """What ``forebay.save`` wrote has all weights. Of adapters in its own models the Trainer finds no others."""
        if not (_has_adapters(self._trained) and (Path(resume_from_checkpoint) / FOLDER).is_dir()):
            super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if _is_peft(self._trained):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        resume_in(Path(checkpoint) / FOLDER, self._trained, self._prepared_optimizer(), self.lr_scheduler)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """None, which the Trainer leaves out of its logs, where backward uses gradients up before it could ask."""
        if self._memory.update == "backward":
            return None
        return super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[no-untyped-call]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """What the Trainer says when it is done has the figures of the run too, for all of its loggers."""
        if "train_runtime" in logs and is_prepared(self._trained):
            logs = {**logs, **figures(self._trained)}
        super().log(logs, *args, **kwargs)

    @property
    def _trained(self) -> nn.Module:
        if self.model is None:
            raise ModelError("the trainer has no model; give it one, or a model_init")
        return self.model

    @property
    def _unwrapped(self) -> Any:
        """The optimizer without Accelerate's wrapper around it."""
        return self.optimizer.optimizer if isinstance(self.optimizer, AcceleratedOptimizer) else self.optimizer

    def _prepared_optimizer(self) -> StreamedOptimizer:
        optimizer = self._unwrapped
        if not isinstance(optimizer, StreamedOptimizer):
            raise ModelError("the model is not prepared; train or evaluate first")
        return optimizer

    def _example(self) -> Any:
        """What the model's forward will be called with: as ``compute_loss`` calls it, whatever trainer's that is. A
        batch where ``Memory.loss_fn`` makes the loss of that."""
        example = self._memory.example
        batch = self._first_batch() if example is None else example
        if self._memory.loss_fn is not None:
            return dict(batch) if isinstance(batch, Mapping) else batch
        inputs: dict[str, Any] = dict(batch)
        labels = inputs.get("labels")
        # As the Trainer does, which counts no labels that are several tensors (of detection, of several heads).
        counted = (labels != -100).sum() if isinstance(labels, torch.Tensor) else None
        try:
            self.compute_loss(_Listener(self._trained), inputs, num_items_in_batch=counted)  # type: ignore[arg-type]
        except _Called as call:
            return call.keywords or call.arguments
        except KeyError:
            if example is None:
                raise
            # A trainer that makes its batches while it trains, as GRPO does: the example is none of those.
            return example
        raise ConfigError(
            f"compute_loss of {type(self).__name__} does not call the model that it is given, so there is no step to "
            f"plan for; call it there, or train with forebay.prepare in a loop of your own"
        )

    def _first_batch(self) -> Mapping[str, Any]:
        """Of the training data, as its collator makes it. Raises ``ConfigError`` where there is none, and where it is
        not what ``compute_loss`` takes."""
        if self.train_dataset is None:
            raise ConfigError(
                "there is no training data to plan for; give Memory an example: a batch as the collator makes it"
            )
        loader = self.get_train_dataloader()
        with as_drawn_before(loader):
            expect_restarts(loader)
            batch = next(iter(loader))
        if not isinstance(batch, Mapping):
            raise ConfigError(
                f"{type(self).__name__} makes the batches of its model while it trains, so there is no step to plan "
                f"for; give Memory an example: what the model is called with for the largest of them, such as "
                f"input_ids and attention_mask of (sequences, tokens)"
            )
        return batch


@final
class ForebayTrainer(ForebayMixin, Trainer):
    """The ``Trainer`` of transformers with a memory plan: ``memory=Memory("24GiB")`` is all that is new."""


@final
class _Called(Exception):
    """The model was called. Ends ``compute_loss`` there."""

    def __init__(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments
        self.keywords = dict(keywords)


@final
class _Listener:
    """Stands for a model that is about to be called."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _Called(args, kwargs)


def _is_peft(model: nn.Module) -> bool:
    library = sys.modules.get("peft")
    return library is not None and isinstance(model, library.PeftModel)


def _has_adapters(model: nn.Module) -> bool:
    """Whether it is a model of transformers into which that has put adapters (``add_adapter``)."""
    return is_pretrained(model) and bool(getattr(model, "_hf_peft_config_loaded", False))


def _expect_served(trainer: Trainer, memory: Memory) -> None:
    """Raises ``ConfigError`` for arguments of the Trainer that forebay does not serve."""
    args = trainer.args
    passes = args.gradient_accumulation_steps
    refused = (
        (args.world_size > 1, f"{args.world_size} processes", "start one"),
        (args.n_gpu > 1, f"{args.n_gpu} GPUs", "let CUDA_VISIBLE_DEVICES name one"),
        (trainer.is_deepspeed_enabled, "DeepSpeed", "take it out of the arguments"),
        (trainer.is_fsdp_enabled, "FSDP", "take it out of the arguments"),
        (args.fp16, "fp16", "use bf16, which needs no scaling of the loss"),
        (args.fp16_full_eval, "fp16_full_eval", "use bf16, which leaves the weights as they are"),
        (args.bf16_full_eval, "bf16_full_eval", "use bf16, which leaves the weights as they are"),
        (args.auto_find_batch_size, "auto_find_batch_size", "the plan says beforehand whether a batch fits"),
        (
            memory.accumulates is False and passes > 1,
            f"gradient_accumulation_steps={passes} beside Memory(accumulates=False)",
            "leave accumulates out, or take one micro-batch a step",
        ),
        *memory.not_in_backward(
            (
                (passes > 1, f"gradient_accumulation_steps={passes}", "take one micro-batch a step"),
                (
                    bool(args.max_grad_norm),
                    f"max_grad_norm={args.max_grad_norm}",
                    "set it to 0: gradients are used up before anybody could clip them",
                ),
            )
        ),
    )
    expect_served("the trainer's arguments ask for", refused)
    asked = [name for name in sorted(_CHECKPOINTING.intersection(f.name for f in fields(args))) if getattr(args, name)]
    for name in asked:
        setattr(args, name, False)
    if asked:
        _log.warning(f"{asked[-1]} is left to forebay, whose plan says what is computed again")


def _say(model: nn.Module) -> None:
    plan = api.report(model).plan
    _log.info(in_words(plan))
    for line in plan.changes_numbers:
        _log.warning(line)
