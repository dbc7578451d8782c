"""What a run holds while it is loaded, evaluated, saved and resumed: the formulas against the ledgers, and the bytes
that pass beside them against a ledger of the test's own, which sees every storage that an op makes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import accelerate
import pytest
import torch
from torch import nn

import forebay
from forebay.arenas import arenas
from forebay.budgets import Budget, DiskBudget
from forebay.checkpoint.halved import JoiningReader, halved_in
from forebay.device.cpu import CpuDevice
from forebay.device.ledger import StorageLedger
from forebay.exporting import write_model
from forebay.memory import Kind, Ledger, Tier
from forebay.model import Parameter
from forebay.phases import PASSING, PHASES, PhasePeaks, forward_peak, phases
from forebay.plans import Placement, Plan, Streaming, Update
from forebay.profiler.capture import capture
from forebay.runtime.hooks import session_of
from forebay.states import Masters
from forebay.trace import Trace
from tests.parity.compare import adamw
from tests.parity.models import CASES, Case
from tests.parity.offloading import trace_of
from tests.parity.test_halves import halved

AMPLE = 64 * 2**20

HOMES = {
    "resident": (Tier.DEVICE, Tier.DEVICE, Tier.DEVICE),
    "host": (Tier.HOST, Tier.HOST, Tier.HOST),
    "states on disk": (Tier.HOST, Tier.HOST, Tier.DISK),
    "all on disk": (Tier.DISK, Tier.HOST, Tier.DISK),
    "host, updated ahead": (Tier.HOST, Tier.HOST, Tier.HOST),
    "all on disk, updated ahead": (Tier.DISK, Tier.HOST, Tier.DISK),
    "host, updated beside the storage": (Tier.HOST, Tier.HOST, Tier.DISK),
}
UPDATES = {
    "host, updated ahead": Update.AHEAD,
    "all on disk, updated ahead": Update.AHEAD,
    "host, updated beside the storage": Update.STORAGE,
}
"""Of those that are not updated when their step asks."""

HALVES = [home for home in HOMES if home != "host, updated beside the storage"]
"""Where masters can be kept as halves: not where the storage updates."""

WAYS = [
    *((home, torch.float32, Masters.WHOLE) for home in HOMES if "updated" not in home),
    *((home, torch.bfloat16, Masters.WHOLE) for home in HOMES),
    *((home, torch.bfloat16, Masters.LOWER) for home in HALVES),
]

each = pytest.mark.parametrize(
    ("home", "dtype", "masters"), WAYS, ids=[f"{home}-{dtype}-{masters.value}" for home, dtype, masters in WAYS]
)

CHUNK = 1024
"""Elements of an update."""


class Run:
    """A model prepared on the meta device under a plan that puts every block in one place."""

    def __init__(self, case: Case, dtype: torch.dtype, home: str, masters: Masters, folder: Path) -> None:
        self.case, self.dtype, self.folder = case, dtype, folder
        self.trace: Trace = trace_of(case, dtype)
        blocks = self.trace.model.blocks
        largest = max(b.nbytes for b in blocks)
        whole = -(-largest // 4096) * 4096
        update = UPDATES.get(home, Update.STEP)
        placements = tuple(Placement(b.name, *HOMES[home], update) for b in blocks)
        streaming = Streaming(
            slots=() if home == "resident" else (largest, largest),
            host_slots=(whole, whole) if home.startswith("all on disk") else (),
            update_chunk=CHUNK,
            masters=masters,
        )
        sizes = arenas(self.trace.model, placements, streaming, self.trace.state_names)
        budget = Budget(AMPLE, AMPLE, None, DiskBudget(str(folder), AMPLE) if sizes.disk else None)
        self.plan = Plan("test", budget, placements, streaming, AMPLE, sizes.host, sizes.disk)
        self.sizes = sizes
        step = {Tier.DEVICE: AMPLE, Tier.HOST: sizes.host, Tier.PINNED: 0, Tier.DISK: sizes.disk}
        self.phases = phases(self.trace, self.plan, step)
        self.device = CpuDevice(AMPLE)

    def prepare(self, *, meta: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The model under the plan; ``meta``: without values, from the folder of weights that is written first."""
        model = self.case.model(self.dtype)
        if meta:
            model.save_pretrained(self.folder / "weights")
            with accelerate.init_empty_weights():
                model = self.case.make().to(self.dtype)
        budgets = {"device_memory": AMPLE, "host_memory": AMPLE}
        disk = f"{self.folder}:{AMPLE}B" if self.plan.disk else None
        optimizer = adamw(list(model.parameters()))
        return forebay.prepare(model, optimizer, plan=self.plan, device=self.device, disk=disk, **budgets)

    def peaks(self, model: nn.Module) -> PhasePeaks:
        """What the ledgers have measured since they were reset."""
        found = forebay.report(model).timeline.peaks
        return PhasePeaks(found[Tier.DEVICE], found[Tier.HOST], found.get(Tier.PINNED, 0), found[Tier.DISK])

    def reset(self, model: nn.Module) -> None:
        attachment = session_of(model)
        assert attachment is not None
        ledgers = attachment.session.resources.ledgers
        for ledger in (self.device.ledger, ledgers.host, ledgers.pinned, ledgers.disk):
            ledger.reset_peak()


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


def halves(masters: Masters) -> bool:
    """Whether of masters only the lower halves are kept."""
    return masters is Masters.LOWER


@contextmanager
def seen() -> Iterator[Ledger]:
    """Counts the storages that ops make in this thread, whoever asks for them."""
    ledger = Ledger(Tier.HOST)
    watch = StorageLedger(ledger)
    watch.install()
    watch.activate(True)
    try:
        yield ledger
    finally:
        watch.uninstall()


@pytest.mark.thinned(3)
@each
def test_loading(home: str, dtype: torch.dtype, masters: Masters, folder: Path) -> None:
    run = Run(CASES["llama"], dtype, home, masters, folder)
    model, _ = run.prepare(meta=True)
    with seen() as ledger:
        forebay.load(model, str(folder / "weights"))
    expected = run.phases["load"]
    assert replace(run.peaks(model), device=0) == replace(expected, device=0, beside=0)
    assert run.peaks(model).device == expected.device
    # device = resident parameters and states + slots + buffers, written out
    sizes = run.sizes
    assert expected.device == sizes.device_resident + sizes.device_slots + run.trace.model.buffer_nbytes
    # What safetensors maps from the file is no op's, and every tensor lies in order. Of a master that is kept as halves
    # a piece is widened, and one is spare: half of what putting one together takes.
    assert (expected.beside, ledger.usage().peak) == ((4 * 4 * CHUNK, 2 * 4 * CHUNK) if halves(masters) else (0, 0))
    forebay.close(model)
    run.device.close()


@pytest.mark.thinned(3)
@each
def test_initializing(home: str, dtype: torch.dtype, masters: Masters, folder: Path) -> None:
    run = Run(CASES["llama"], dtype, home, masters, folder)
    model, _ = run.prepare(meta=True)
    with seen() as ledger:
        forebay.initialize(model)
    expected = run.phases["initialize"]
    assert replace(run.peaks(model), device=0) == replace(expected, device=0, beside=0)
    assert run.peaks(model).device == expected.device
    # beside = the values of one block + a byte for each element of one parameter, of which it is asked whether one is
    # no number, and for the answer, or of a master that is kept as halves what putting a piece together takes: half of
    # it is taken here
    putting = 4 * 4 * CHUNK if halves(masters) else 0
    blocks = run.trace.model.blocks
    most = [(sum(p.nbytes for p in b.parameters), 1 + max(p.numel for p in b.parameters)) for b in blocks]
    assert expected.beside == max(values + max(asked, putting) for values, asked in most)
    assert ledger.usage().peak == max(values + max(asked, putting // 2) for values, asked in most)
    forebay.close(model)
    run.device.close()


@pytest.mark.thinned(3)
@each
def test_evaluating(home: str, dtype: torch.dtype, masters: Masters, folder: Path) -> None:
    run = Run(CASES["llama"], dtype, home, masters, folder)
    model, _ = run.prepare()
    model.eval()
    run.reset(model)
    with torch.no_grad():
        for step in range(2):
            output = model(**run.case.inputs(step, dtype))  # held while the next pass runs, as the plan assumes
    del output
    measured, expected = run.peaks(model), run.phases["eval"]
    assert replace(measured, device=0) == replace(expected, device=0)
    assert measured.device <= expected.device <= 1.03 * measured.device
    forebay.close(model)
    run.device.close()


@pytest.mark.thinned(3)
@each
def test_saving(home: str, dtype: torch.dtype, masters: Masters, folder: Path) -> None:
    run = Run(CASES["llama"], dtype, home, masters, folder)
    model, _ = run.prepare()
    run.reset(model)
    with seen() as ledger:
        write_model(model, folder / "saved")
    expected = run.phases["save"]
    assert replace(run.peaks(model), device=0) == replace(expected, device=0, beside=0)
    assert run.peaks(model).device == expected.device
    assert expected.beside == ledger.usage().peak
    forebay.close(model)
    run.device.close()


@pytest.mark.thinned(3)
@each
def test_saving_a_checkpoint_and_resuming(home: str, dtype: torch.dtype, masters: Masters, folder: Path) -> None:
    run = Run(CASES["llama"], dtype, home, masters, folder)
    model, optimizer = run.prepare()
    model(**run.case.inputs(0, dtype)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    forebay.synchronize(model)
    expected = run.phases["resume"]
    # device = resident parameters and states + slots + buffers; host and disk = the arenas and files of the plan
    sizes = run.sizes
    assert expected.device == sizes.device_resident + sizes.device_slots + run.trace.model.buffer_nbytes
    # What another plan has saved may have masters as halves (``test_masters_come_together_a_part_at_a_time``).
    joining = PASSING if dtype is torch.bfloat16 else 0
    # Of what this plan keeps as halves: a piece of a master, what is spare, what keeps ties, what is read or written.
    # Of the piece that is read what was saved as halves is put together before.
    putting, piece = (4 * 4 * CHUNK, 4 * CHUNK) if halves(masters) else (0, 0)
    beside = max(joining + piece, putting)
    assert (expected.host, expected.disk, expected.beside) == (sizes.host, sizes.disk, beside)
    for phase, move in (
        ("save", lambda: forebay.save(model, optimizer, folder / "kept", step=1)),
        ("resume", lambda: forebay.resume(model, optimizer, folder / "kept")),
    ):
        run.reset(model)
        with seen() as ledger:
            move()
        assert run.peaks(model) == replace(expected, beside=0), phase
        assert ledger.usage().peak == putting, "not a byte else is copied beside the tiers"
        assert replace(run.phases[phase], beside=0) == replace(expected, beside=0)
    forebay.close(model)
    run.device.close()


def test_masters_come_together_a_part_at_a_time() -> None:
    """A resume of a checkpoint that has halves: for a quarter of ``PASSING`` bytes of a master at a time its halves,
    the state that keeps ties, and as much that is spare, however long the master is. What is read of ties elsewhere
    has no signs."""
    elements = PASSING + 12
    spec = Parameter("a", (elements,), (1,), "bfloat16", 2 * elements, 0, True)
    block = replace(trace_of(CASES["llama"], torch.bfloat16).model.blocks[0], parameters=(spec,))
    master, ties = torch.randn(elements).abs_(), torch.rand(elements)
    master[::3].view(torch.int32).bitwise_and_(-(1 << 17)).add_(1 << 15)  # half-way, to the even one below
    said, (upper, lower) = ties.clone(), halved(master, ties)
    assert (ties < 0).sum() >= elements // 3
    kept = {"upper.a": upper, "lower.a": lower, "exp_avg_sq.a": ties}

    def read(name: str, offset: int, buffer: memoryview) -> None:
        content = kept[name].view(torch.uint8).numpy().data
        buffer[:] = content[offset : offset + len(buffer)]

    found, squares = torch.empty(elements - 8), torch.empty(elements)
    reader = JoiningReader(halved_in(block, kept), read)
    with seen() as ledger:
        reader.read("parameter.a", 4 * 8, found.view(torch.uint8).numpy().data)
    reader.read("exp_avg_sq.a", 0, squares.view(torch.uint8).numpy().data)
    assert torch.equal(found, master[8:]) and torch.equal(squares, said)
    assert ledger.usage().peak == 3 * PASSING // 4


def test_a_tensor_that_does_not_lie_in_order_is_copied_to_be_written() -> None:
    case = CASES["used-twice"]
    model = case.model(torch.float32)
    trace = capture(model, case.inputs(0, torch.float32), "sgd", "cpu").trace
    block = max(trace.model.blocks, key=lambda b: b.nbytes)
    parameter = max((p for p in block.parameters if len(p.shape) == 2), key=lambda p: p.nbytes)
    turned = replace(parameter, stride=(1, parameter.shape[0]))

    def saving(chosen: object) -> int:
        only = replace(block, parameters=(chosen,), held=False)  # type: ignore[arg-type]
        changed = replace(trace, model=replace(trace.model, blocks=(only,)))
        placements = (Placement(block.name, *HOMES["host"]),)
        plan = Plan("test", Budget(AMPLE), placements, Streaming((block.nbytes,)), 0, 0, 0)
        return phases(changed, plan, dict.fromkeys(Tier, 0))["save"].beside

    assert saving(parameter) == 0  # written as it lies at home
    assert saving(turned) == 2 * parameter.nbytes


def test_evaluation_takes_less_than_training() -> None:
    """A forward that saves nothing holds at most what the forward that saves holds, on every model there is."""
    for name in ("gpt2", "llama", "t5", "mixtral", "vit"):
        case = CASES[name]
        trace = capture(case.model(torch.float32), case.inputs(0, torch.float32), "adamw", "cpu").trace
        made = sum(t.nbytes for i, t in trace.tensors() if i >= len(trace.sources) and t.root == i)
        assert 0 < forward_peak(trace) < made / 4, name


def test_the_phases_are_those_of_the_interface() -> None:
    case = CASES["llama"]
    trace = capture(case.model(torch.float32), case.inputs(0, torch.float32), "adamw", "cuda").trace
    placements = tuple(Placement(b.name, *HOMES["resident"]) for b in trace.model.blocks)
    plan = Plan("test", Budget(AMPLE), placements, Streaming(), 0, 0, 0)
    step = {Tier.DEVICE: 10, Tier.HOST: 20, Tier.PINNED: 30, Tier.DISK: 40}
    found = phases(trace, plan, step)
    assert tuple(found) == PHASES
    assert found["step"] == PhasePeaks(10, 20, 30, 40)
    assert all((p.host, p.pinned, p.disk) == (20, 30, 40) for p in found.values())
    inputs = sum(t.nbytes for t in trace.sources if t.kind is Kind.INPUT)
    assert inputs > 0 and trace.workspace_nbytes > 0
    beside = inputs + trace.workspace_nbytes
    assert found["eval"].device == found["load"].device + beside + forward_peak(trace) + trace.held_nbytes
    # Of what is resident a part is converted on its way to an accelerator: here no parameter has as much.
    assert found["load"].beside == max(p.nbytes for b in trace.model.blocks for p in b.parameters) < PASSING
    assert found["save"].device == found["load"].device
