"""forebay under the ``Trainer`` of Lightning.

    from forebay.integrations.lightning import ForebayStrategy, Memory

    trainer = Trainer(strategy=ForebayStrategy(memory=Memory("24GiB", host_memory="96GiB")), ...)

The LightningModule, the loop, data, logging, validation and callbacks stay as they are. The module is prepared where
the strategy makes its optimizers, with a plan for one ``training_step``. Beside a checkpoint ``X.ckpt``, which has the
weights as Lightning has them, lies ``X.ckpt.forebay``, in which ``forebay.save`` wrote in the place of the optimizer's
states. The file names the folder in there that belongs to it: what an earlier save left is never taken for its own.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, final

import torch

from forebay import api
from forebay.errors import ConfigError
from forebay.integrations import missing
from forebay.integrations.common import (
    FOLDER,
    Memory,
    as_drawn_before,
    expect_restarts,
    expect_served,
    figures,
    in_words,
    resume_in,
    save_in,
    stream_quantised,
)
from forebay.integrations.lightning_files import SUFFIX, Straight, beside_of, remove_others, unused
from forebay.integrations.lightning_steps import Step, Steps, first_step, mark, steps_of, unattached
from forebay.memory import Tier
from forebay.runtime.hooks import attachment_of, is_prepared, session_of

try:
    from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
    from lightning.pytorch.plugins import CheckpointIO, MixedPrecision, Precision
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities import CombinedLoader
    from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
except ImportError as error:
    raise missing("lightning", error) from error

__all__ = ["SUFFIX", "ForebayFigures", "ForebayStrategy", "Memory"]

_OWN_AVERAGE = (
    "average forebay.parameters(trainer.strategy.model) in a callback of your own, as docs/averages.md has it"
)

_ON_WEIGHTS: Final = {
    "BaseFinetuning": "freeze parameters in the module, and fit it again where others are to train",
    "ModelPruning": "prune the module behind forebay.close(trainer.strategy.model)",
    "StochasticWeightAveraging": _OWN_AVERAGE,
    "WeightAveraging": _OWN_AVERAGE,
}
"""Callbacks of Lightning's that read weights where they are not, replace them, or have others train, and what to do
instead. Not every version of it has all of them."""


@final
class ForebayStrategy(SingleDeviceStrategy):
    """One device with a memory plan.

    ``memory.example`` is the largest batch that ``training_step`` will see; None: the first of the training data.
    ``memory.blocks`` are named as in the LightningModule. ``device`` None: ``cuda`` if there is one. Raises
    ``ConfigError`` for what forebay does not serve, and what ``forebay.prepare`` raises, when the Trainer begins.
    """

    strategy_name = "forebay"

    def __init__(
        self,
        memory: Memory,
        *,
        device: str | torch.device | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        chosen = torch.device(device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
        super().__init__(chosen, checkpoint_io=checkpoint_io or Straight(), precision_plugin=precision_plugin)
        blocks = None if memory.blocks is None else tuple(f"module.{name}" for name in memory.blocks)
        self._memory = replace(memory, blocks=blocks)  # by their names in what is prepared (Steps)
        self._steps: Steps | None = None

    # The model.

    def model_to_device(self) -> None:
        """Leaves the model where it is: the plan says where its parameters go."""

    def setup(self, trainer: Trainer) -> None:
        """Prepares the model, also where it is only evaluated: it may not fit otherwise."""
        super().setup(trainer)
        if trainer.state.fn is TrainerFn.FITTING:
            return
        module, steps = self.lightning_module, self._steps
        if steps is None or steps.module is not module or steps_of(steps.module) not in (None, steps):
            self.setup_optimizers(trainer)
        self.model = self._steps

    @property
    def _planned(self) -> Steps | None:
        """What is prepared; None where it was closed since."""
        return self._steps if self._steps is not None and session_of(self._steps) is not None else None

    def setup_optimizers(self, trainer: Trainer) -> None:
        """The optimizer that the module makes, in front of states that are where the plan has them."""
        super().setup_optimizers(trainer)
        module = self.lightning_module
        if module is None:
            raise ConfigError("the strategy has no module; call it through the Trainer")
        _expect_served(trainer, module, self.optimizers, self.precision_plugin, self._memory)
        for before in (self._steps, steps_of(module)):
            if before is not None:
                api.close(before)  # of the fit before, or of another Trainer's, which an exception may have ended
                before.zero_grad()  # as Lightning does before a first backward
        steps = Steps(module)
        stream_quantised(module)
        with unattached(module), self.precision_plugin.train_step_context(), as_drawn_before():
            arguments = first_step(module, self._example(trainer))
            self.optimizers = [self._memory.prepare(steps, self.optimizers[0], arguments, self.root_device)]
        self._steps = self.model = steps
        attachment_of(steps).at_end(mark(steps))
        plan = api.report(steps).plan
        rank_zero_info(in_words(plan))
        for line in plan.changes_numbers:
            rank_zero_warn(line)

    def _example(self, trainer: Trainer) -> Any:
        if self._memory.example is not None:
            return self._memory.example
        source = trainer.fit_loop._data_source  # as Lightning's own strategy for DeepSpeed asks for a batch
        if not source.is_defined():
            raise ConfigError(
                "there is no training data to plan for; fit first, or give Memory an example: a batch as "
                "training_step is given it"
            )
        loader = source.dataloader()
        combined = loader if isinstance(loader, CombinedLoader) else CombinedLoader(loader, "max_size_cycle")
        with as_drawn_before(*combined.flattened):
            for one in combined.flattened:
                expect_restarts(one)
            batch, _, _ = next(iter(combined))
        return batch

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's, as the forward of what was prepared."""
        with self.precision_plugin.train_step_context():
            return self._run("training_step", args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's, as the forward of what was prepared."""
        with self.precision_plugin.val_step_context():
            return self._run("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's, as the forward of what was prepared."""
        with self.precision_plugin.test_step_context():
            return self._run("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's, as the forward of what was prepared."""
        with self.precision_plugin.predict_step_context():
            return self._run("predict_step", args, kwargs)

    def _run(self, step: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self._steps is None:
            raise ConfigError("the module is not prepared; call it through the Trainer")
        return self._steps(args[0], Step(step, args[1:], kwargs))

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Lightning drops gradients after the next forward. They go here: a plan has no room for both."""
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        optimizer.zero_grad()
        return result

    def teardown(self) -> None:
        """Leaves the model prepared, to be evaluated or saved; ``forebay.close(trainer.strategy.model)`` gives it back.
        Lightning would move it to the host as a whole."""
        module, self._lightning_module = self._lightning_module, None
        try:
            super().teardown()
        finally:
            self._lightning_module = module

    # Checkpoints.

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Values go straight to where they are at home."""
        return True

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Nothing: ``forebay.save`` has it."""
        return {}

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's own; nothing where weights are on disk, all of which would be in memory at once."""
        return {} if self._weights_on_disk else super().lightning_module_state_dict()

    @property
    def _weights_on_disk(self) -> bool:
        steps = self._planned
        return steps is not None and any(p.parameters is Tier.DISK for p in api.report(steps).plan.placements)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Lightning's file, and unless only weights are asked for the folder beside it. One that is there of this name
        can be resumed from until the new file stands."""
        steps, beside, new = self._planned, beside_of(Path(filepath)), None
        if steps is not None and "optimizer_states" in checkpoint:
            new = unused(beside)
            checkpoint = {**checkpoint, FOLDER: new.name}
        elif self._weights_on_disk:
            checkpoint = {**checkpoint, "state_dict": super().lightning_module_state_dict()}
        try:
            if steps is not None and new is not None:
                save_in(new, steps, self.optimizers[0], int(checkpoint["global_step"]))
            super().save_checkpoint(checkpoint, filepath, storage_options)
        except Exception:
            if new is not None:
                shutil.rmtree(new, ignore_errors=True)  # no file names it
            raise
        # Only now: the file that stood until here named one of these.
        remove_others(beside, new)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Lightning's file, with the folder beside it that it names."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if FOLDER not in checkpoint:
            return checkpoint
        # A link (last.ckpt) stands for the file that it names.
        folder = beside_of(Path(checkpoint_path).resolve()) / checkpoint[FOLDER]
        return {**checkpoint, SUFFIX: str(folder)} if folder.is_dir() else checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """From the folder of forebay, with the optimizer's states; or the weights of Lightning's file. Raises
        ``StorageError`` where the folder is of another step than the file."""
        steps = self._planned
        if SUFFIX not in checkpoint or steps is None:
            super().load_model_state_dict(checkpoint, strict)
            return
        folder, expected = Path(checkpoint[SUFFIX]), checkpoint["global_step"]
        with as_drawn_before():  # Lightning keeps no random numbers
            resume_in(folder, steps, self.optimizers[0], expected=expected)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """States that Lightning wrote without forebay; those of forebay came with the weights. Raises ``ConfigError``
        where these are not there."""
        if SUFFIX in checkpoint:
            return
        if not any(checkpoint["optimizer_states"]):
            raise ConfigError(
                f"the checkpoint holds no optimizer states, and the folder *{SUFFIX} that was saved with it is not "
                f"beside it; move both"
            )
        super().load_optimizer_state_dict(checkpoint)

    def remove_checkpoint(self, filepath: Any) -> None:
        """The file, and then the folder: without the file nobody takes it for whole."""
        super().remove_checkpoint(filepath)
        shutil.rmtree(beside_of(Path(filepath)), ignore_errors=True)


@final
class ForebayFigures(Callback):
    """Gives every logger of the Trainer what was predicted and what was measured, when training ends
    (``integrations.common.figures``)."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called by the Trainer."""
        model = trainer.strategy.model
        if model is None or not is_prepared(model):
            raise ConfigError("ForebayFigures is for a Trainer with strategy=ForebayStrategy(...)")
        for logger in trainer.loggers:
            logger.log_metrics(dict(figures(model)), step=trainer.global_step)


def _on_weights(trainer: Trainer) -> Iterator[tuple[Callback, str]]:
    """Callbacks that a prepared module does not go with, and what to do instead."""
    given: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # Lightning sets it from elsewhere
    for name, remedy in _ON_WEIGHTS.items():
        kind = vars(callbacks).get(name)
        yield from ((callback, remedy) for callback in given if kind and isinstance(callback, kind))


def _expect_served(
    trainer: Trainer, module: LightningModule, optimizers: list[Any], precision: Precision, memory: Memory
) -> None:
    """Raises ``ConfigError`` for what forebay does not serve."""
    passes, norm = trainer.accumulate_grad_batches, trainer.gradient_clip_val
    on_weights = _on_weights(trainer) if trainer.state.fn is TrainerFn.FITTING else ()
    refused = (
        (module._compiler_ctx is not None, "torch.compile of all of it", "compile() its layers instead, before fit"),
        (not module.automatic_optimization, "manual optimization", "let Lightning optimize, or use forebay.prepare"),
        (memory.loss_fn is not None, "Memory(loss_fn=)", "leave it out: training_step is what a plan is made for"),
        (len(optimizers) != 1, f"{len(optimizers)} optimizers", "make one, with a parameter group for each"),
        (
            isinstance(precision, MixedPrecision) and precision.scaler is not None,
            "16-mixed",
            "use bf16-mixed, which needs no scaling of the loss",
        ),
        *((True, type(callback).__name__, remedy) for callback, remedy in on_weights),
        *memory.not_in_backward(
            (
                (passes > 1, f"accumulate_grad_batches={passes}", "take one batch a step"),
                (
                    bool(norm),
                    f"gradient_clip_val={norm}",
                    "leave it out: gradients are used up before it is their turn",
                ),
            )
        ),
    )
    expect_served("the Trainer is asked for", refused)
