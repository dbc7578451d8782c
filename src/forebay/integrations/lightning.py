"""forebay under the ``Trainer`` of Lightning.

    from forebay.integrations.lightning import ForebayStrategy

    trainer = Trainer(strategy=ForebayStrategy(device_memory="24GiB", host_memory="96GiB"), ...)

The LightningModule, the loop, data, logging, validation and callbacks stay as they are. The module is prepared where
the strategy makes its optimizers, with a plan for one ``training_step``. Beside a checkpoint ``X.ckpt``, which has the
weights as Lightning has them, lies ``X.ckpt.forebay``, which ``forebay.save`` wrote in the place of the optimizer's
states.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from forebay import api
from forebay.errors import ConfigError
from forebay.integrations import missing
from forebay.integrations.common import (
    Memory,
    as_drawn_before,
    figures,
    in_words,
    resume_in,
    save_in,
    stream_quantised,
    warnings_of,
)
from forebay.loss import Loss
from forebay.memory import Tier
from forebay.runtime.hooks import is_prepared

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.plugins import CheckpointIO, MixedPrecision, Precision, TorchCheckpointIO
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities import CombinedLoader
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
    from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
    from torchmetrics import Metric
except ImportError as error:
    raise missing("lightning", error) from error

__all__ = ["SUFFIX", "ForebayFigures", "ForebayStrategy"]

SUFFIX = ".forebay"
"""Behind the name of a checkpoint: the folder with what ``forebay.save`` wrote."""


@final
class ForebayStrategy(SingleDeviceStrategy):
    """One device with a memory plan.

    The first arguments are those of ``forebay.prepare``. ``example`` is the largest batch that ``training_step`` will
    see; None: the first of the training data. ``device`` None: ``cuda`` if there is one. Raises ``ConfigError`` for
    what forebay does not serve, and what ``forebay.prepare`` raises, when the Trainer begins.
    """

    strategy_name = "forebay"

    def __init__(
        self,
        device_memory: int | str,
        host_memory: int | str | None = None,
        disk: str | None = None,
        *,
        policy: str = "auto",
        loss: Loss = "auto",
        compress: int = 0,
        example: Any = None,
        device: str | torch.device | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        chosen = torch.device(device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
        super().__init__(chosen, checkpoint_io=checkpoint_io or _Straight(), precision_plugin=precision_plugin)
        self._memory = Memory(device_memory, host_memory, disk, policy, loss, compress, example=example)
        self._steps: _Steps | None = None

    # The model.

    def model_to_device(self) -> None:
        """Leaves the model where it is: the plan says where its parameters go."""

    def setup(self, trainer: Trainer) -> None:
        """Prepares the model, also where it is only evaluated: it may not fit otherwise."""
        super().setup(trainer)
        if trainer.state.fn is TrainerFn.FITTING:
            return
        if self._steps is None or self._steps.module is not self.lightning_module:
            self.setup_optimizers(trainer)
        self.model = self._steps

    def setup_optimizers(self, trainer: Trainer) -> None:
        """The optimizer that the module makes, in front of states that are where the plan has them."""
        super().setup_optimizers(trainer)
        module = self.lightning_module
        if module is None:
            raise ConfigError("the strategy has no module; call it through the Trainer")
        _expect_served(module, self.optimizers, self.precision_plugin)
        if self._steps is not None:
            api.close(self._steps)  # of the fit before
        steps = _Steps(module)
        stream_quantised(module)
        with _unattached(module), self.precision_plugin.train_step_context(), as_drawn_before():
            arguments = _arguments(module, self._example(trainer))
            self.optimizers = [self._memory.prepare(steps, self.optimizers[0], arguments, self.root_device)]
        self._steps = self.model = steps
        plan = api.report(steps).plan
        rank_zero_info(in_words(plan))
        for line in warnings_of(plan):
            rank_zero_warn(line)

    def _example(self, trainer: Trainer) -> Any:
        if self._memory.example is not None:
            return self._memory.example
        source = trainer.fit_loop._data_source  # as Lightning's own strategy for DeepSpeed asks for a batch
        if not source.is_defined():
            raise ConfigError(
                "there is no training data to plan for; fit first, or give the strategy an example: a batch as "
                "training_step is given it"
            )
        loader = source.dataloader()
        combined = loader if isinstance(loader, CombinedLoader) else CombinedLoader(loader, "max_size_cycle")
        with as_drawn_before(*combined.flattened):
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
        return self._steps(args[0], _Step(step, args[1:], kwargs))

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
        if self._steps is None:
            return False
        return any(placed.parameters is Tier.DISK for placed in api.report(self._steps).plan.placements)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Lightning's file, and unless only weights are asked for the folder beside it."""
        whole = "optimizer_states" in checkpoint
        if self._steps is not None and whole:
            save_in(_beside(filepath), self._steps, self.optimizers[0], int(checkpoint["global_step"]))
        elif self._steps is not None and self._weights_on_disk:
            checkpoint = {**checkpoint, "state_dict": super().lightning_module_state_dict()}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Lightning's file, with the folder beside it where there is one."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        beside = _beside(checkpoint_path)
        return {**checkpoint, SUFFIX: str(beside)} if beside.is_dir() else checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """From the folder of forebay, with the optimizer's states; or the weights of Lightning's file."""
        if SUFFIX not in checkpoint or self._steps is None:
            super().load_model_state_dict(checkpoint, strict)
            return
        with as_drawn_before():  # Lightning keeps no random numbers
            resume_in(Path(checkpoint[SUFFIX]), self._steps, self.optimizers[0])

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """States that Lightning wrote without forebay; those of forebay came with the weights."""
        if SUFFIX not in checkpoint:
            super().load_optimizer_state_dict(checkpoint)

    def remove_checkpoint(self, filepath: Any) -> None:
        """The file and the folder."""
        shutil.rmtree(_beside(filepath), ignore_errors=True)
        super().remove_checkpoint(filepath)


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


@final
class _Step:
    """Which step of the module is asked for, and with what beside the batch: nothing that a plan depends on."""

    def __init__(self, name: str, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> None:
        self.name = name
        self.args = args
        self.kwargs = kwargs or {}

    def __repr__(self) -> str:
        return self.name  # by which batches of one shape are known: their numbers make no difference


@final
class _Steps(nn.Module):
    """What is prepared: a module whose forward is a step of the LightningModule."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any, step: _Step) -> Any:
        """The module's method of this name."""
        return getattr(self.module, step.name)(batch, *step.args, **step.kwargs)


@final
class _Straight(TorchCheckpointIO):
    """Lightning's file without a copy of all of it in memory first."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Writes a new file, then gives it its name."""
        if storage_options is not None:
            raise ConfigError("storage_options are for a checkpoint_io of your own; give it to ForebayStrategy")
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.part")
        try:
            torch.save(checkpoint, part)
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)


def _beside(path: Any) -> Path:
    # A link (last.ckpt) stands for the file that it names.
    target = Path(path).resolve()
    return target.with_name(target.name + SUFFIX)


def _arguments(module: LightningModule, batch: Any) -> tuple[Any, _Step]:
    """What ``_Steps`` is called with for the first batch."""
    numbered = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    return batch, _Step("training_step", (0,) if numbered else ())


@contextmanager
def _unattached(module: LightningModule) -> Iterator[None]:
    """Has ``module`` without its Trainer, as in its own tests: ``self.log`` does nothing then. Metrics are told
    nothing: a plan is made without values, which they look at and keep."""
    trainer, module.trainer = module.trainer, None
    metrics = [(metric, dict(vars(metric))) for metric in module.modules() if isinstance(metric, Metric)]
    try:
        for metric, _ in metrics:
            vars(metric).update(forward=_no_metric, update=_no_metric)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "You are trying to `self.log")
            yield
    finally:
        for metric, before in metrics:
            vars(metric).clear()
            vars(metric).update(before)
        module.trainer = trainer


def _no_metric(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.zeros(())


def _expect_served(module: LightningModule, optimizers: list[Any], precision: Precision) -> None:
    """Raises ``ConfigError`` for what forebay does not serve."""
    refused = (
        (not module.automatic_optimization, "manual optimization", "let Lightning optimize, or use forebay.prepare"),
        (len(optimizers) != 1, f"{len(optimizers)} optimizers", "make one, with a parameter group for each"),
        (
            isinstance(precision, MixedPrecision) and precision.scaler is not None,
            "16-mixed",
            "use bf16-mixed, which needs no scaling of the loss",
        ),
    )
    for is_asked, what, remedy in refused:
        if is_asked:
            raise ConfigError(f"the Trainer is asked for {what}, which forebay does not serve: {remedy}")
