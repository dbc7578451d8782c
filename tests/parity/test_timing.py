"""Seconds of the ops of a step: which ops run, on what values, for how long, and what is kept of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, final

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from forebay.cli.plan import make_settings, plan
from forebay.machine import Curve, Link, Machine
from forebay.profiler import op_table
from forebay.profiler.capture import Captured, capture
from forebay.profiler.machine_cache import Remembered, cache_file
from forebay.profiler.op_table import MeasuredOps, OpTable, measure_ops, with_measured_ops
from forebay.profiler.probe import circumstances
from forebay.profiler.stopwatch import Stopwatch
from forebay.profiler.timing import Timed, TimingPolicy, arguments, time_each, waited
from forebay.profiler.work import Call, TensorSpec
from forebay.simulation.costs import Costs
from forebay.states import Masters

LINK = Link(Curve(((1 << 20, 8e9),)), 1e-5)

MACHINE = Machine(
    name="bench",
    source="measured",
    device_kind="cpu",
    device_capacity=1 << 30,
    host_capacity=1 << 30,
    pinned_capacity=0,
    compute={"float32": 1e11},
    device_bandwidth=1e10,
    host_bandwidth=1e10,
    update_rate=1e10,
    h2d=LINK,
    d2h=LINK,
    launch_seconds=1e-6,
)
CPU = torch.device("cpu")
aten = torch.ops.aten


@final
class Scripted(Stopwatch):
    """Does the work and says that it took ``each`` seconds; ``runs`` counts."""

    def __init__(self, each: float = 1e-3) -> None:
        self.each = each
        self.runs = 0

    def seconds(self, work: Callable[[], Any]) -> float:
        work()
        self.runs += 1
        return self.each


@final
class Seen(TorchDispatchMode):
    """Counts the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Many(nn.Module):
    """Indices of all sorts, a list of tensors, ops in place, an empty tensor, a mask, a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50)
        self.rows = nn.Parameter(torch.ones(5, 8))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        h = torch.cat([self.embed(ids), self.embed(labels)], 1).mul(2.0).add_(1.0)
        h = functional.dropout(torch.softmax(h, -1), 0.1)
        h[mask] = self.rows[0]
        top, where = h.topk(2, -1)
        h = h.scatter_add(-1, where, top) + h.gather(-1, where).mean(-1, keepdim=True)
        h = h + self.rows.index_select(0, labels[0, :3]).mean() + h[:0].sum()
        loss = functional.cross_entropy(self.head(h[:, : ids.shape[1]]).flatten(0, 1), labels.flatten())
        return {"loss": loss + h[mask].mean()}


@pytest.fixture(scope="module")
def captured() -> Captured:
    ids = torch.randint(0, 50, (2, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(24).reshape(2, 12) % 3 == 0
    return capture(Many(), {"ids": ids, "mask": mask, "labels": ids.flip(0)}, "sgd")


def timed(captured: Captured, watch: Stopwatch, policy: TimingPolicy | None = None, **more: Any) -> Timed:
    more = {"waiting": lambda: 0.0, **more}
    machine = more.pop("machine", MACHINE)
    return time_each(captured.trace, captured.calls, machine, CPU, watch, policy, **more)


def moving(captured: Captured) -> set[str]:
    return {work.signature for work in captured.trace.works if work.nbytes}


def test_every_op_that_moves_something_is_run_and_timed(captured: Captured) -> None:
    watch = Scripted()
    with Seen() as seen:
        found = timed(captured, watch, TimingPolicy(total=1e3, runs=4))
    assert set(found.seconds) == moving(captured)
    assert found.alone == found.disturbed == ()
    assert set(found.seconds.values()) == {1e-3}
    # Arguments are made once; one run warms up, and four count.
    assert watch.runs == (1 + 1 + 4) * len(found.seconds)
    kinds = Counter(str(captured.calls[signature].func) for signature in found.seconds)
    made_with = {"aten.copy_.default", "aten.zeros.default", "aten.index_put_.default"}  # arguments take these too
    for op, n in kinds.items():
        assert seen.ops[op] == 5 * n or (op in made_with and seen.ops[op] > 5 * n), op
    for op in ("add_.Tensor", "cat.default", "index_put_.default", "embedding_dense_backward.default"):
        assert kinds[f"aten.{op}"], "the model has one"
    for op in ("nll_loss_backward.default", "_softmax_backward_data.default", "scatter_add.default"):
        assert kinds[f"aten.{op}"], "the model has one"


def test_integers_are_indices_of_what_is_there(captured: Captured) -> None:
    bounded = 0
    for call in captured.calls.values():
        args, kwargs = arguments(call, CPU)
        specs, made = tree_leaves((call.args, dict(call.kwargs))), tree_leaves((args, kwargs))
        for spec, tensor in zip(specs, made, strict=True):
            if not isinstance(spec, TensorSpec):
                continue
            shape, stride = tuple(tensor.shape), tensor.stride()
            assert (shape, stride, str(tensor.dtype)) == (spec.shape, spec.stride, f"torch.{spec.dtype}")
            if tensor.numel() and not tensor.is_floating_point():
                assert int(tensor.min()) >= 0 and int(tensor.max()) < (spec.high or 1)
                bounded += (spec.high or 0) > 2
            elif tensor.numel():
                assert float(tensor.min()) > 0.09 and float(tensor.max()) < 1.01
    assert bounded >= 8


def test_groups_are_of_a_size() -> None:
    spec = TensorSpec((4,), (1,), "int32", 257, True)
    (ends,), _ = arguments(Call(None, (spec,), {}), CPU)
    assert ends.tolist() == [64, 128, 192, 256]
    assert ends.dtype is torch.int32


def test_a_large_tensor_is_random_throughout() -> None:
    (tensor,), _ = arguments(Call(None, (TensorSpec((300, 1000), (1000, 1), "bfloat16"),), {}), CPU)
    assert (tensor > 0.09).all() and tensor.unique().numel() > 50
    (none,), _ = arguments(Call(None, (TensorSpec((0, 7), (7, 1), "float32"),), {}), CPU)
    assert none.shape == (0, 7)


def test_what_cannot_run_alone_is_left_to_the_roofline(captured: Captured) -> None:
    chosen = sorted(moving(captured))
    refusing, sparse, foreign, opaque, unknown = chosen[:5]
    ran: list[str] = []
    small, workspace = TensorSpec((3, 3), (3, 1), "float32"), TensorSpec((9,), (1,), "uint8")
    calls = {
        **captured.calls,
        refusing: Call(aten.mm.default, (small, TensorSpec((2, 3), (3, 1), "float32")), {}),
        sparse: Call(aten.neg.default, (TensorSpec((3, 3), (), "float32"),), {}),
        # Made-up values may do worse than raise where nobody checks them: these never run.
        foreign: Call(lambda tensor: ran.append("foreign"), (small,), {}),
        opaque: Call(aten.mkldnn_rnn_layer_backward.default, (small, workspace), {}),
    }
    del calls[unknown]
    found = timed(replace(captured, calls=calls), Scripted(), TimingPolicy(total=1e3))
    assert set(found.alone) == {refusing, sparse, foreign, opaque} and not ran
    assert set(found.seconds) == moving(captured) - set(chosen[:5])
    costs = Costs(captured.trace, replace(MACHINE, op_seconds=found.seconds), Masters.WHOLE)
    sources = {w.signature: costs.work(i).source for i, w in enumerate(captured.trace.works)}
    assert {sources[s] for s in chosen[:5]} == {"roofline"}
    assert sources[chosen[5]] == "measured"


@pytest.mark.parametrize("total", [1.0, 4.0])
def test_the_budget_holds_and_the_heaviest_come_first(captured: Captured, total: float) -> None:
    each = 0.05
    watch = Scripted(each)
    found = timed(captured, watch, TimingPolicy(total=total, share=0.25))
    # Making arguments is part of it. The last op may begin a run with next to nothing left.
    assert total <= watch.runs * each <= total + each
    costs = Costs(captured.trace, MACHINE, Masters.WHOLE)
    weight: Counter[str] = Counter()
    for _, _, op in captured.trace.ops():
        weight[captured.trace.works[op.work].signature] += costs.work(op.work).seconds  # type: ignore[assignment]
    heaviest = sorted(moving(captured), key=lambda s: -weight[s])[: len(found.seconds)]
    assert sum(weight[s] for s in found.seconds) == pytest.approx(sum(weight[s] for s in heaviest))
    assert 0 < len(found.seconds) < len(moving(captured))


def test_an_op_too_large_for_the_share_or_the_memory_never_runs(captured: Captured) -> None:
    watch = Scripted()
    slow = replace(MACHINE, compute={"float32": 1.0}, device_bandwidth=1.0)
    assert timed(captured, watch, machine=slow).seconds == {}
    assert timed(captured, watch, TimingPolicy(nbytes=1)).seconds == {}
    assert watch.runs == 0


def test_a_run_that_waited_for_a_core_does_not_count(captured: Captured) -> None:
    # The clock of what was lost goes on by 1 ms each time that it is asked: before and after each run.
    clock = count()
    found = timed(captured, Scripted(0.005), TimingPolicy(total=1e3), waiting=lambda: 1e-3 * next(clock))
    assert found.seconds == {} and set(found.disturbed) == moving(captured)
    # 1 ms of 20 is not worth a word.
    found = timed(captured, Scripted(0.02), TimingPolicy(total=1e4), waiting=lambda: 1e-3 * next(clock))
    assert set(found.seconds) == moving(captured)


def test_some_runs_of_many_are_enough(captured: Captured) -> None:
    # Each third run loses as much as it takes: the others count.
    clock = count()
    found = timed(captured, Scripted(), TimingPolicy(total=1e3, runs=4), waiting=lambda: 1e-3 * (next(clock) // 6))
    assert set(found.seconds) == moving(captured)


def test_what_was_waited_only_grows() -> None:
    before = waited()
    assert 0 <= before <= waited()


def test_bursts_are_of_many_calls(captured: Captured) -> None:
    with Seen() as seen:
        found = timed(captured, Scripted(), TimingPolicy(total=1e3, runs=2, burst=10))
    assert set(found.seconds.values()) == {1e-3 / 10}
    n = sum(str(captured.calls[s].func) == "aten.cat.default" for s in found.seconds)
    assert seen.ops["aten.cat.default"] == n * (1 + 2) * 10 > 0


def test_the_users_random_numbers_are_left_alone(captured: Captured) -> None:
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    timed(captured, Scripted())
    assert torch.equal(torch.rand(4), wanted)


# What is kept.


def ops_of(captured: Captured, folder: Path, watch: Scripted, **more: Any) -> MeasuredOps:
    more = {"tell": never, "seconds": 1e3, **more}
    machine = more.pop("machine", MACHINE)
    return measure_ops(captured, machine, "cpu", folder=folder, stopwatch=watch, waiting=lambda: 0.0, **more)


def never(line: str) -> None:
    raise AssertionError(line)


def test_the_second_time_nothing_is_timed(captured: Captured, tmp_path: Path) -> None:
    watch = Scripted()
    first = ops_of(captured, tmp_path, watch)
    assert (first.known, first.timed) == (0, len(moving(captured)))
    assert [entry.name for entry in tmp_path.iterdir()] == ["ops-cpu.json"]
    before = watch.runs
    again = ops_of(captured, tmp_path, watch)
    assert (again.known, again.timed, watch.runs) == (len(moving(captured)), 0, before)
    assert again.machine == first.machine
    assert f"{first.timed} kinds of ops were timed here in" in first.note
    assert again.note == f"{first.timed} kinds of ops were timed here before"
    assert with_measured_ops(captured, MACHINE, "cpu", folder=tmp_path) == first.machine


def test_what_one_budget_left_out_the_next_one_times(captured: Captured, tmp_path: Path) -> None:
    first = ops_of(captured, tmp_path, Scripted(0.05), seconds=4.0)
    assert 0 < first.timed < len(moving(captured))
    second = ops_of(captured, tmp_path, Scripted(0.05))
    assert second.known == first.timed and second.known + second.timed == len(moving(captured))


def test_the_table_outlives_the_process(captured: Captured, tmp_path: Path) -> None:
    made = OpTable(circumstances("cpu")[1], {"a(float32[2;1])": 0.5})
    op_table.keep(made, tmp_path / "ops-cpu.json")
    code = (
        "import sys, torch; torch.set_num_threads(int(sys.argv[2]))\n"
        "from pathlib import Path; from forebay.profiler.op_table import OpTable, recall_as, circumstances\n"
        "print(recall_as(OpTable, Path(sys.argv[1]), circumstances('cpu')[1])[0].seconds)"
    )
    arguments = [str(tmp_path / "ops-cpu.json"), str(torch.get_num_threads())]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(made.seconds)


def cut(text: str) -> str:
    return text[: len(text) // 2]


def other_torch(text: str) -> str:
    content = json.loads(text)
    content["circumstances"]["torch"] = "0.0.1"
    return json.dumps(content)


def less_than_nothing(text: str) -> str:
    content = json.loads(text)
    content["seconds"][next(iter(content["seconds"]))] = -1.0
    return json.dumps(content)


def newer(text: str) -> str:
    return json.dumps({**json.loads(text), "schema": 99})


@pytest.mark.parametrize(
    ("spoil", "said"),
    [(cut, "cannot be used"), (other_torch, "torch was 0.0.1"), (less_than_nothing, "takes -1.0"), (newer, "schema")],
)
def test_a_table_that_cannot_be_used_is_thrown_away(
    captured: Captured, tmp_path: Path, spoil: Callable[[str], str], said: str
) -> None:
    ops_of(captured, tmp_path, Scripted())
    file = tmp_path / "ops-cpu.json"
    file.write_text(spoil(file.read_text()))
    lines: list[str] = []
    # No time for any op: nothing is written in its place.
    made = ops_of(captured, tmp_path, Scripted(), seconds=1e-9, tell=lines.append)
    assert (made.known, made.timed) == (0, 0) and not file.exists()
    assert len(lines) == 1 and said in lines[0] and "\n" not in lines[0] and lines[0].endswith("timing the ops anew")


def test_the_table_is_bounded_and_forgets_what_was_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_table, "MOST_OPS", 3)
    table = OpTable(circumstances("cpu")[1], {"a": 1.0, "b": 1.0, "c": 1.0})
    assert list(table.used({"a": 2.0, "d": 4.0}).seconds.items()) == [("c", 1.0), ("a", 2.0), ("d", 4.0)]


def test_a_folder_that_cannot_be_written_is_no_obstacle(captured: Captured, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    lines: list[str] = []
    made = ops_of(captured, blocked / "cache", Scripted(), tell=lines.append)
    assert made.timed == len(moving(captured))
    assert "cannot keep what was timed" in lines[-1]


@pytest.mark.parametrize("machine", [replace(MACHINE, source="catalogue"), replace(MACHINE, device_kind="cuda")])
def test_ops_of_another_machine_are_not_timed_here(captured: Captured, tmp_path: Path, machine: Machine) -> None:
    watch = Scripted()
    made = ops_of(captured, tmp_path, watch, machine=machine)
    assert made == MeasuredOps(machine) and made.note == "" and watch.runs == 0
    assert not list(tmp_path.iterdir())


# In a plan.


def make() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), (torch.zeros(8, 64),)


@pytest.mark.parametrize("case", ["measured", "nominal", "named"])
def test_a_plan_for_this_machine_has_its_ops_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    name, here = circumstances()
    folder = tmp_path / "forebay"
    file = cache_file(folder, name)
    measured = replace(MACHINE, device_kind=torch.device(name).type)
    Remembered(here, measured).save(file)
    settings: dict[str, Any] = {"model": "tests.parity.test_timing:make", "optimizer": "sgd"}
    if case == "named":
        settings["machine"] = str(tmp_path / "bench.json")
        Path(settings["machine"]).write_text(measured.to_json())
    elif case == "nominal":
        file.unlink()
    report = plan(make_settings(settings))
    said = [note for note in report.notes if "kinds of ops were timed here in" in note]
    assert len(said) == (case == "measured")
    if case != "measured":
        assert not list(folder.glob("ops-*"))
        assert report.step is not None and report.step.measured_share == 0
