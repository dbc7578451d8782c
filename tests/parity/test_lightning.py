"""Lightning's Trainer with a memory plan: the losses, weights and checkpoints of the Trainer without one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import CheckpointIO, TorchCheckpointIO
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

import forebay
from forebay.errors import ConfigError, DoesNotFit, StorageError
from forebay.integrations.lightning import SUFFIX, ForebayFigures, ForebayStrategy, Memory
from forebay.memory import Tier
from forebay.runtime.hooks import is_prepared, session_of
from tests.parity.small_lightning import quiet

__all__ = ["quiet"]

BUDGET = "640KiB"
"""Of device memory: parameters, gradients and states of the module take 1.6 MiB."""

QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}


class Net(LightningModule):
    """A module as Lightning's documentation has it, with dropout, a metric, a scheduler and logs."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        torch.manual_seed(3)
        layers = [layer for _ in range(6) for layer in (nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.1))]
        self.net = nn.Sequential(*layers, nn.Linear(width, 4))
        self.seen = MeanMetric()
        self.losses: list[float] = []
        self.norms: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.seen(loss.detach())
        self.log("train_loss", loss)
        self.log("seen", self.seen, on_epoch=True)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in self.parameters()])))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self(x), y))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0]).argmax(-1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def loader(rows: int, shuffle: bool = True, width: int = 128) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(width, generator=generator), row % 4) for row in range(rows)]
    return DataLoader(data, batch_size=8, shuffle=shuffle)


def trainer(folder: Path, strategy: Any = "auto", **more: Any) -> Trainer:
    usual = {
        "max_epochs": 2,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.5,
        "log_every_n_steps": 1,
        "callbacks": [ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)],
        "logger": CSVLogger(folder, version="csv"),
    }
    return Trainer(default_root_dir=str(folder), strategy=strategy, **{**usual, **QUIET, **more})


@pytest.fixture
def closed() -> Iterator[list[Trainer]]:
    """Trainers whose models are closed at the end."""
    made: list[Trainer] = []
    yield made
    for one in made:
        if one.strategy.model is not None:
            forebay.close(one.strategy.model)


def fitted(made: Trainer, **more: Any) -> Net:
    net = Net()
    torch.manual_seed(7)
    made.fit(net, loader(48), loader(16, shuffle=False), **more)
    return net


def weights(net: Net) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def logged(folder: Path) -> list[str]:
    """What the logger wrote without the figures of forebay."""
    lines = (folder / "lightning_logs" / "csv" / "metrics.csv").read_text().splitlines()
    header = lines[0].split(",")
    kept = [place for place, name in enumerate(header) if not name.startswith("forebay")]
    rows = [[row.split(",")[place] for place in kept] for row in lines]
    return [",".join(row) for row in rows if any(row)]


@pytest.mark.parametrize("precision", ["32-true", pytest.param("bf16-mixed", marks=pytest.mark.slow)])
def test_it_trains_as_lightning_does(closed: list[Trainer], tmp_path: Path, precision: str) -> None:
    figures = ModelCheckpoint(tmp_path / "own", filename="{step}", every_n_train_steps=2, save_top_k=-1)
    # Lightning clips no gradients of a fused optimizer under autocast.
    more = {"precision": precision, "gradient_clip_val": 0.5 if precision == "32-true" else None}
    made = trainer(tmp_path / "own", ForebayStrategy(Memory(BUDGET)), callbacks=[figures, ForebayFigures()], **more)
    closed.append(made)
    own = fitted(made)
    plain = trainer(tmp_path / "theirs", **more)
    theirs = fitted(plain)
    assert (own.losses, own.norms) == (theirs.losses, theirs.norms)
    assert len(own.losses) == 12 and len(own.norms) == 6
    assert same(weights(own), weights(theirs))
    assert made.callback_metrics.keys() == plain.callback_metrics.keys()
    assert all(torch.equal(value, made.callback_metrics[name]) for name, value in plain.callback_metrics.items())
    # It did stream, and evaluates under its plan.
    record = forebay.report(made.strategy.model)
    measured, predicted = record.measured_peaks()[Tier.DEVICE], record.predicted_peaks()[Tier.DEVICE]
    # What ``self.log`` and a metric keep is in no plan: three numbers of 4 bytes and their weights.
    assert measured <= predicted + 32 and max(measured, predicted) <= 640 << 10
    assert any(not placement.resident for placement in record.plan.placements)
    assert made.validate(own, loader(16, shuffle=False), verbose=False) == plain.validate(
        theirs, loader(16, shuffle=False), verbose=False
    )
    found, expected = made.predict(own, loader(16, shuffle=False)), plain.predict(theirs, loader(16, shuffle=False))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert "forebay_device_bytes" in (tmp_path / "own" / "lightning_logs" / "csv" / "metrics.csv").read_text()


def test_checkpoints_are_resumed_and_loaded(closed: list[Trainer], tmp_path: Path) -> None:
    kept = ModelCheckpoint(tmp_path / "run", filename="{step}", every_n_train_steps=2, save_top_k=1, save_last="link")
    made = trainer(tmp_path / "run", ForebayStrategy(Memory(BUDGET, policy="stream")), callbacks=[kept], max_steps=4)
    closed.append(made)
    net = fitted(made)
    # The checkpoint before is removed, with what lay beside it.
    assert sorted(p.name for p in (tmp_path / "run").glob("*.ckpt*")) == [
        "last.ckpt",
        "step=4.ckpt",
        f"step=4.ckpt{SUFFIX}",
    ]
    path = tmp_path / "run" / "step=4.ckpt"
    assert same(weights(Net.load_from_checkpoint(path, map_location="cpu")), weights(net))
    assert torch.load(path, weights_only=False)["optimizer_states"] == [{}]
    # Under another plan, from the link; Lightning's own resume from a checkpoint of its own gives the numbers.
    again = trainer(tmp_path / "again", ForebayStrategy(Memory("1MiB", policy="stream-recompute")))
    closed.append(again)
    resumed = fitted(again, ckpt_path=tmp_path / "run" / "last.ckpt")
    plain = trainer(tmp_path / "plain", max_steps=4)
    fitted(plain)
    expected = fitted(trainer(tmp_path / "further"), ckpt_path=tmp_path / "plain" / "step=4.ckpt")
    assert resumed.losses == expected.losses and resumed.losses
    assert same(weights(resumed), weights(expected))
    # A checkpoint of Lightning's own is taken up too.
    taken = trainer(tmp_path / "taken", ForebayStrategy(Memory(BUDGET, policy="stream")))
    closed.append(taken)
    assert fitted(taken, ckpt_path=tmp_path / "plain" / "step=4.ckpt").losses == expected.losses
    evaluated = made.validate(net, loader(16, shuffle=False), ckpt_path=str(path), verbose=False)
    assert evaluated == plain.validate(
        Net(), loader(16, shuffle=False), ckpt_path=str(tmp_path / "plain" / "step=4.ckpt"), verbose=False
    )


class Small(Net):
    """A step of a thousandth of a second."""

    def __init__(self) -> None:
        super().__init__(16)


def small(folder: Path, steps: int = 2, io: CheckpointIO | None = None, **more: Any) -> Trainer:
    example = next(iter(loader(8, width=16)))
    strategy = ForebayStrategy(Memory("1MiB", example=example), checkpoint_io=io)
    usual = {"max_epochs": None, "max_steps": steps, "callbacks": [], "enable_checkpointing": False, "logger": False}
    return trainer(folder, strategy, **{**usual, **more})


class FullDisk(TorchCheckpointIO):
    """Writes the first file, and none after it."""

    def __init__(self) -> None:
        self.files = 0

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.files += 1
        if self.files > 1:
            raise OSError(28, "No space left on device")
        super().save_checkpoint(checkpoint, path, storage_options)


def test_weights_alone_are_not_those_of_an_earlier_save(closed: list[Trainer], tmp_path: Path) -> None:
    path, net = tmp_path / "m.ckpt", Small()
    made = small(tmp_path)
    closed.append(made)
    made.fit(net, loader(32, width=16))
    made.save_checkpoint(path)
    made.fit_loop.epoch_loop.max_steps = 4
    made.fit(net, loader(32, width=16))
    trained = weights(net)
    made.save_checkpoint(path, weights_only=True)
    assert [p.name for p in tmp_path.glob("m.ckpt*")] == ["m.ckpt"]
    again, other = small(tmp_path), Small()
    closed.append(again)
    again.fit(other, loader(32, width=16))
    assert not same(weights(other), trained)
    again.validate(other, loader(16, width=16), ckpt_path=str(path), verbose=False)
    assert same(weights(other), trained)


def test_a_save_that_fails_leaves_the_checkpoint_before(closed: list[Trainer], tmp_path: Path) -> None:
    path, net = tmp_path / "m.ckpt", Small()
    made = small(tmp_path, io=FullDisk())
    closed.append(made)
    made.fit(net, loader(32, width=16))
    made.save_checkpoint(path)
    saved = weights(net)
    made.fit_loop.epoch_loop.max_steps = 4
    made.fit(net, loader(32, width=16))
    with pytest.raises(OSError, match="No space left"):
        made.save_checkpoint(path)
    beside = path.with_name(path.name + SUFFIX)
    assert len(list(beside.iterdir())) == 1 and not same(weights(net), saved)
    again, other = small(tmp_path), Small()
    closed.append(again)
    again.fit(other, loader(32, width=16), ckpt_path=str(path))
    assert again.global_step == 2 and same(weights(other), saved)
    # A folder of another save is not taken for that of the file, and neither is none.
    made.strategy.checkpoint_io = TorchCheckpointIO()
    made.save_checkpoint(tmp_path / "later.ckpt")
    shutil.rmtree(beside)
    shutil.copytree(tmp_path / f"later.ckpt{SUFFIX}", beside)
    with pytest.raises(StorageError, match="of optimizer step 4 and the checkpoint beside it of step 2"):
        again.fit(other, loader(32, width=16), ckpt_path=str(path))
    shutil.rmtree(beside)
    with pytest.raises(ConfigError, match="is not beside it; move both"):
        again.fit(other, loader(32, width=16), ckpt_path=str(path))


def test_a_module_goes_on_after_an_exception_with_another_trainer(closed: list[Trainer], tmp_path: Path) -> None:
    class Fails(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            raise ValueError("half-way")

    net, plain = Small(), Small()
    broken = small(tmp_path, callbacks=[Fails()])
    with pytest.raises(ValueError, match="half-way"):
        broken.fit(net, loader(32, shuffle=False, width=16))
    made = small(tmp_path)
    closed.append(made)
    plain.load_state_dict(net.state_dict())
    for one, fitted in ((made, net), (trainer(tmp_path, max_epochs=None, max_steps=2, callbacks=[]), plain)):
        torch.manual_seed(7)
        one.fit(fitted, loader(32, shuffle=False, width=16))
    assert made.global_step == 2 and same(weights(net), weights(plain))
    # The first Trainer takes it back, also to evaluate it; and nothing is left of either when it is closed.
    broken.callbacks.clear()
    broken.validate(net, loader(16, width=16), verbose=False)
    assert session_of(broken.strategy.model) is not None and session_of(made.strategy.model) is None
    broken.fit(net, loader(32, shuffle=False, width=16))
    forebay.close(broken.strategy.model)
    assert not net._forward_pre_hooks and not is_prepared(net)


def test_blocks_are_named_as_in_the_module(closed: list[Trainer], tmp_path: Path) -> None:
    strategy = ForebayStrategy(Memory("1MiB", policy="stream", blocks=("net.0", "net.3")))
    made = trainer(tmp_path, strategy, max_epochs=None, max_steps=1, callbacks=[], logger=False)
    closed.append(made)
    made.fit(Small(), loader(16, width=16))
    assert {"module.net.0", "module.net.3"} <= {p.block for p in forebay.report(strategy.model).plan.placements}


@pytest.mark.slow
def test_weights_on_disk_are_not_gathered_in_memory(closed: list[Trainer], tmp_path: Path) -> None:
    # 6 MiB of parameters and 12 of states; the host has room for gradients and what passes through to the disk.
    strategy = ForebayStrategy(Memory("6MiB", "15MiB", str(tmp_path), policy="stream"))
    made = trainer(tmp_path, strategy, max_steps=2)
    closed.append(made)
    net = Net(512)
    made.fit(net, loader(32, width=512))
    assert any(placed.parameters is Tier.DISK for placed in forebay.report(strategy.model).plan.placements)
    assert torch.load(tmp_path / "step=2.ckpt", weights_only=False)["state_dict"] == {}
    made.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert not (tmp_path / f"weights.ckpt{SUFFIX}").exists()
    assert same(weights(Net.load_from_checkpoint(tmp_path / "weights.ckpt", width=512)), weights(net))
    again = trainer(tmp_path / "again", ForebayStrategy(Memory("8MiB", policy="stream")), max_steps=4)
    closed.append(again)
    resumed = Net(512)
    again.fit(resumed, loader(64, width=512), ckpt_path=tmp_path / "step=2.ckpt")
    assert len(resumed.losses) == 4 and not same(weights(resumed), weights(net))


def test_what_is_not_served_is_refused(tmp_path: Path) -> None:
    class Manual(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    made = trainer(tmp_path, ForebayStrategy(Memory(BUDGET)), accumulate_grad_batches=1, gradient_clip_val=None)
    with pytest.raises(ConfigError, match="manual optimization, which forebay does not serve"):
        made.fit(Manual(), loader(8))
    made = trainer(tmp_path, ForebayStrategy(Memory(BUDGET, loss_fn=lambda module, batch: module(batch).sum())))
    with pytest.raises(ConfigError, match=r"Memory\(loss_fn=\), which forebay does not serve: .* training_step is"):
        made.fit(Net(), loader(8))
    with pytest.raises(
        ConfigError, match=r"torch\.compile of all of it, which forebay does not serve: compile\(\) its"
    ):
        trainer(tmp_path, ForebayStrategy(Memory(BUDGET))).fit(torch.compile(Net(), backend="eager"), loader(8))
    with pytest.raises(ConfigError, match="fit first, or give Memory an example"):
        trainer(tmp_path, ForebayStrategy(Memory(BUDGET))).validate(Net(), loader(8), verbose=False)
    with pytest.raises(DoesNotFit, match="device"):
        trainer(tmp_path, ForebayStrategy(Memory("16KiB"))).fit(Net(), loader(8))
    with pytest.raises(ConfigError, match="ForebayFigures is for a Trainer with strategy"):
        trainer(tmp_path, callbacks=[ForebayFigures()], max_steps=1).fit(Net(), loader(16))


class Unlooked(Net):
    """One that asks for no norm of gradients."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        return


@pytest.mark.thinned(2)
@pytest.mark.parametrize("budget", [BUDGET, "64MiB"], ids=["streamed", "stays"])
def test_gradients_used_up_in_backward(closed: list[Trainer], tmp_path: Path, budget: str) -> None:
    """Where Lightning clips nothing and takes one backward a step; it zeroes gradients behind the next forward."""
    usual: dict[str, Any] = {"accumulate_grad_batches": 1, "gradient_clip_val": None}
    for more, words in (
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches=2"),
        ({"gradient_clip_val": 0.5}, "gradient_clip_val=0.5"),
    ):
        strategy = ForebayStrategy(Memory(budget, update="backward"), device="cpu")
        with pytest.raises(ConfigError, match=rf"{words} beside Memory\(update='backward'\)"):
            fitted(trainer(tmp_path, strategy, **{**usual, **more}))
    made = []
    for strategy in (ForebayStrategy(Memory(budget, update="backward"), device="cpu"), "auto"):
        net = Unlooked()
        torch.manual_seed(7)
        one = trainer(tmp_path / str(len(made)), strategy, **usual)
        if not made:
            closed.append(one)
        one.fit(net, loader(48), loader(16, shuffle=False))
        made.append((net.losses, weights(net)))
    (own, ours), (plain, theirs) = made
    assert own == plain and all(torch.equal(value, theirs[name]) for name, value in ours.items())
