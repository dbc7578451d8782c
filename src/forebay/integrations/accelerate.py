"""forebay under a training loop with Accelerate.

    from forebay.integrations.accelerate import ForebayAccelerator, Memory

    accelerator = ForebayAccelerator(memory=Memory("24GiB", host_memory="96GiB"), gradient_accumulation_steps=4)

The rest of the loop stays as it is. ``prepare`` puts a plan under the model and the optimizer that are given together;
``save_state`` and ``load_state`` keep what ``forebay.save`` keeps, in the place of the optimizer's pickle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import torch
from torch import nn
from torch.utils.data import DataLoader

from forebay import api
from forebay.errors import ConfigError, ModelError
from forebay.exporting import replace_weights
from forebay.integrations import missing
from forebay.integrations.common import (
    FOLDER,
    Memory,
    as_drawn_before,
    blocks_compiled,
    expect_restarts,
    expect_served,
    figures,
    resume_in,
    save_in,
    stream_quantised,
)
from forebay.optim.streamed import StreamedOptimizer
from forebay.runtime.hooks import attachment_of

try:
    from accelerate import Accelerator, DistributedType
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DynamoBackend, TorchDynamoPlugin
except ImportError as error:
    raise missing("transformers", error) from error

__all__ = ["FOLDER", "ForebayAccelerator", "Memory", "compile_arguments"]


@final
class ForebayAccelerator(Accelerator):  # type: ignore[misc]
    """The ``Accelerator`` with a memory plan: ``memory=Memory("24GiB")`` is all that is new.

    ``memory.example`` is what the loop calls the model with; None: the first batch of the first data loader that
    ``prepare`` is given, which has to be a mapping of the forward's arguments, or one tensor.

    Raises ``ConfigError`` for arguments of the Accelerator that forebay does not serve, and what ``forebay.prepare``
    raises when a model is prepared.
    """

    def __init__(self, *args: Any, memory: Memory, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _expect_served(self)
        self._memory = memory
        self._planned: tuple[nn.Module, StreamedOptimizer] | None = None
        self._taken = 0  # optimizer steps before the model was prepared
        self.register_save_state_pre_hook(self._save)
        self.register_load_state_pre_hook(self._load)

    def prepare(self, *args: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """``Accelerator.prepare``. A model that comes with its optimizer gets a plan; anything else is Accelerate's.

        Raises ``ConfigError`` for more than one model with its optimizer, or another before ``forebay.close`` of the
        first; and for an optimizer that comes without its model where no model has a plan.
        """
        models = [one for one in args if isinstance(one, nn.Module)]
        optimizers = [one for one in args if isinstance(one, torch.optim.Optimizer)]
        if not models or not optimizers:
            for optimizer in optimizers:
                self._expect_plan_for(optimizer)
            return super().prepare(*args, device_placement=device_placement)
        if len(models) > 1 or len(optimizers) > 1 or self._planned is not None:
            raise ConfigError(
                "ForebayAccelerator plans for one model with one optimizer; call forebay.close(model) first, or use "
                "forebay.prepare_several for several"
            )
        (model,), (optimizer,) = models, optimizers
        planned = self._plan(model, optimizer, args)
        placed = list(device_placement or [None] * len(args))
        for place, one in enumerate(args):
            # Where their bytes are is the plan's to say; Accelerate would copy all states to place them.
            placed[place] = False if one is model or one is optimizer else placed[place]
        given = [planned if one is optimizer else one for one in args]
        with _compiled_already(self.state):
            return super().prepare(*given, device_placement=placed)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """``Accelerator.prepare_optimizer``. Raises ``ConfigError`` where no model has a plan."""
        self._expect_plan_for(optimizer)
        return super().prepare_optimizer(optimizer, device_placement)

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """``Accelerator.save_state``; the model that has a plan is written by ``forebay.save``, and its weights beside
        that, a tensor at a time."""
        with self._apart():
            return super().save_state(*args, **kwargs)

    def load_state(self, *args: Any, **kwargs: Any) -> Any:
        """``Accelerator.load_state`` of what ``save_state`` wrote; the budgets may be others."""
        with self._apart():
            return super().load_state(*args, **kwargs)

    def _plan(self, model: nn.Module, optimizer: torch.optim.Optimizer, args: Sequence[Any]) -> StreamedOptimizer:
        stream_quantised(model)
        compiled = blocks_compiled(model, self._memory.blocks, compile_arguments(self.state.dynamo_plugin))
        with compiled, self.autocast(), as_drawn_before(*args):
            planned = self._memory.prepare(model, optimizer, self._example(args), self.device)
        if not isinstance(planned, StreamedOptimizer):
            raise ModelError("forebay.prepare made no optimizer that it can save")
        self._planned, self._taken = (model, planned), 0
        attachment_of(model).at_end(self._forget)
        return planned

    def _forget(self) -> None:
        """The model is closed: from here on it is Accelerate's alone. Its optimizer has no states any more."""
        if self._planned is not None:
            _, optimizer = self._planned
            held = list[Any](self._optimizers)  # type: ignore[has-type]
            self._planned, self._optimizers = None, [one for one in held if one.optimizer is not optimizer]

    def _example(self, args: Sequence[Any]) -> Any:
        if self._memory.example is not None:
            return self._memory.example
        loader = next((one for one in args if isinstance(one, DataLoader)), None)
        if loader is None:
            raise ConfigError(
                "there is no data loader to plan for; give it to prepare too, or give Memory an example: what the "
                "model is called with"
            )
        expect_restarts(loader)
        batch = next(iter(loader))
        if not isinstance(batch, Mapping | torch.Tensor) and self._memory.loss_fn is None:
            raise ConfigError(
                f"the data loader's batches are of {type(batch).__name__}, of which nobody knows what the model is "
                f"called with; give Memory an example: what it is called with, or a loss_fn that takes such a batch"
            )
        return batch

    def figures(self) -> Mapping[str, float]:
        """What was predicted and measured (``forebay.integrations.common.figures``), for ``accelerator.log``. Raises
        ``ModelError`` before ``prepare``."""
        return figures(self._expect_planned()[0])

    def _expect_planned(self) -> tuple[nn.Module, StreamedOptimizer]:
        if self._planned is None:
            raise ModelError(
                "no model was prepared with its optimizer; call accelerator.prepare(model, optimizer, ...)"
            )
        return self._planned

    def _expect_plan_for(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises ``ConfigError`` for one that comes without its model where no model has a plan."""
        if self._planned is None and not isinstance(optimizer, AcceleratedOptimizer | StreamedOptimizer):
            raise ConfigError(
                "an optimizer without its model would train with no plan; give both to one call: "
                "accelerator.prepare(model, optimizer, ...)"
            )

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Leaves what the hooks below see to out of Accelerate's lists: a state dict would be all of it at once."""
        models, optimizers = list[Any](self._models), list[Any](self._optimizers)  # type: ignore[has-type]
        if self._planned is not None:
            model, optimizer = self._planned
            self._models = [one for one in models if one is not model]
            self._optimizers = [one for one in optimizers if one.optimizer is not optimizer]
        try:
            yield
        finally:
            self._models, self._optimizers = models, optimizers

    def _save(self, models: Sequence[nn.Module], weights: Sequence[Any], output_dir: str) -> None:
        """When Accelerate has a folder for what it saves. ``models`` are the others."""
        if self._planned is None:
            return
        model, optimizer = self._planned
        save_in(Path(output_dir) / FOLDER, model, optimizer, self._taken + api.report(model).steps)
        if not models:  # else the file of this name is another's
            replace_weights(model, Path(output_dir))

    def _load(self, models: Sequence[nn.Module], input_dir: str) -> None:
        """When Accelerate knows the folder to load."""
        if self._planned is None:
            return
        model, optimizer = self._planned
        step = resume_in(Path(input_dir) / FOLDER, model, optimizer)
        self._taken = step - api.report(model).steps


def compile_arguments(plugin: TorchDynamoPlugin) -> Mapping[str, Any] | None:
    """What ``torch.compile`` is to be given where ``plugin`` asks for it; None where it does not."""
    wanted = plugin.backend is not DynamoBackend.NO and not plugin.disable
    return plugin.to_kwargs() if wanted else None


@contextmanager
def _compiled_already(state: Any) -> Iterator[None]:
    """Has Accelerate compile nothing: the blocks are, and a model that is compiled as a whole has nothing between
    them."""
    plugin, state.dynamo_plugin = state.dynamo_plugin, TorchDynamoPlugin(backend="no")
    try:
        yield
    finally:
        state.dynamo_plugin = plugin


def _expect_served(accelerator: Any) -> None:
    """Raises ``ConfigError`` for what forebay does not serve."""
    refused = (
        (accelerator.num_processes > 1, f"{accelerator.num_processes} processes", "start one"),
        (
            accelerator.distributed_type is not DistributedType.NO,
            str(accelerator.distributed_type.value),
            "take it out of the configuration",
        ),
        (accelerator.scaler is not None, "fp16", "use bf16, which needs no scaling of the loss"),
    )
    expect_served("the Accelerator is asked for", refused)
