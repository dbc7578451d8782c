"""Measuring this machine, small: what is found, what is kept, and what is measured again."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from forebay.cli.main import app
from forebay.device.cpu import CpuDevice
from forebay.layout import state_layout
from forebay.machine import Machine
from forebay.model import Block, Parameter
from forebay.profiler import overhead
from forebay.profiler.company import Company, busy_of
from forebay.profiler.effort import Effort, Layer
from forebay.profiler.machine_cache import Circumstances, Remembered, cache_file, cores, cpu_model, recall
from forebay.profiler.pinning import pinned_capacity
from forebay.profiler.probe import cached, examine, nominal, probe
from forebay.profiler.sharing import lost_share
from forebay.profiler.stopwatch import in_turns, rate_within, span
from forebay.profiler.transfer_rates import both_rates, curve_of
from forebay.profiler.update_rates import UpdateTrial, spared_by, spared_cores
from forebay.states import Masters
from forebay.timeline import Event, Lane

KiB = 1024
MiB = 1024 * KiB

SMALL = Effort(
    layers=(Layer(8, 32, 32), Layer(16, 64, 64)),
    rounds=2,
    bound=0.05,
    copy_sizes=(64 * KiB, 256 * KiB, MiB),
    disk_sizes=(64 * KiB, 256 * KiB),
    disk_file=MiB,
    update_elements=64 * KiB,
    elementwise=256 * KiB,
    chain=20,
    company=1.0,
)


@pytest.fixture(scope="module")
def random_states() -> list[torch.Tensor]:
    """Torch's before and behind what ``measured`` measures."""
    return []


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, random_states: list[torch.Tensor]) -> tuple[Machine, Path]:
    folder = tmp_path_factory.mktemp("cache")
    torch.manual_seed(5)
    random_states.append(torch.get_rng_state())
    with pytest.MonkeyPatch.context() as patch:
        # A third of the layers, whose steps are most of what is measured.
        for name in ("TINY", "MOVING"):
            patch.setattr(f"forebay.profiler.overhead.{name}", replace(getattr(overhead, name), layers=2))
        patch.setattr("forebay.profiler.in_step.ROUNDS", 3)
        machine = probe("cpu", str(folder), folder=folder, effort=SMALL)
    random_states.append(torch.get_rng_state())
    return machine, folder


def never(line: str) -> None:
    raise AssertionError(line)


def recalled(file: Path) -> Remembered:
    wanted = Circumstances(**json.loads(file.read_text())["circumstances"])
    found, reason = recall(file, replace(wanted, cores=tuple(wanted.cores)))
    assert found is not None, reason
    return found


@pytest.fixture
def measurements(measured: tuple[Machine, Path], monkeypatch: pytest.MonkeyPatch) -> list[Remembered]:
    """In the place of measuring, which takes seconds: what was measured before, each time that it is asked for."""
    kept, asked = recalled(cache_file(measured[1], "cpu")), list[Remembered]()

    def measure(here: object) -> Remembered:
        asked.append(kept)
        return kept

    monkeypatch.setattr("forebay.profiler.probe._Here.measure", measure)
    return asked


def test_everything_is_found(measured: tuple[Machine, Path]) -> None:
    machine, folder = measured
    assert (machine.source, machine.device_kind, machine.pinned_capacity) == ("measured", "cpu", 0)
    assert {"float32", "bfloat16"} <= set(machine.compute)
    for figure in (machine.device_bandwidth, machine.host_bandwidth, machine.update_rate, machine.launch_seconds):
        assert figure > 0
    assert {kind.partition(":")[2] for kind in machine.update_elements} == {"bfloat16", "8bit", "4bit", "float32"}
    assert all(rate > 0 for rate in machine.update_elements.values())
    assert 0 <= machine.together_seconds < 1e-3
    assert machine.watch_seconds >= 0 and 0 < machine.duplex <= 1 and 0 <= machine.shared_cores <= 1
    for link in (machine.h2d, machine.d2h):
        assert [size for size, _ in link.curve.points] == [64 * KiB, 256 * KiB, MiB]
        assert link.latency > 0
    assert machine.disk is not None and machine.disk.path == str(folder)
    for link in (machine.disk.read, machine.disk.write):
        assert [size for size, _ in link.curve.points] == [64 * KiB, 256 * KiB]
    assert machine.sources


def test_nothing_is_left_of_the_disk_measurement(measured: tuple[Machine, Path]) -> None:
    assert [entry.name for entry in measured[1].iterdir()] == ["machine-cpu.json"]


def test_the_second_time_it_is_remembered(measured: tuple[Machine, Path]) -> None:
    machine, folder = measured
    again = examine("cpu", str(folder), folder=folder, effort=SMALL, tell=never)
    assert again.seconds == 0.0
    kept = cached("cpu", folder=folder)
    assert kept is not None
    for other in (again.machine, kept):
        assert (other.h2d, other.compute, other.update_rate) == (machine.h2d, machine.compute, machine.update_rate)


def test_the_users_random_numbers_are_left_alone(
    measured: tuple[Machine, Path], random_states: list[torch.Tensor]
) -> None:
    before, behind = random_states
    assert torch.equal(before, behind) and torch.is_grad_enabled()


@pytest.mark.slow
def test_refresh_measures_again(measured: tuple[Machine, Path], measurements: list[Remembered], tmp_path: Path) -> None:
    file = cache_file(tmp_path, "cpu")
    file.write_bytes(cache_file(measured[1], "cpu").read_bytes())
    again = examine("cpu", str(tmp_path), refresh=True, folder=tmp_path, effort=SMALL, tell=never)
    assert len(measurements) == 1 and again.seconds > 0
    now, then = recalled(file).machine.disk, measured[0].disk
    assert now is not None and then is not None and now.path == str(tmp_path) and now.read != then.read


@pytest.mark.slow
def test_another_disk_is_measured_and_nothing_else(measured: tuple[Machine, Path], tmp_path: Path) -> None:
    machine, folder = measured
    cache_file(tmp_path, "cpu").write_bytes(cache_file(folder, "cpu").read_bytes())
    other = probe("cpu", str(tmp_path), folder=tmp_path, effort=SMALL, tell=never)
    assert other.disk is not None and other.disk.path == str(tmp_path)
    assert other.h2d == machine.h2d
    # The remark of the disk measured before goes with it.
    remarks = json.loads(cache_file(tmp_path, "cpu").read_text())["remarks"]
    assert [str(tmp_path) in r for r in remarks if "was read and written" in r] == [True]


def test_what_others_had_of_the_cores() -> None:
    """Two cores for 10 s: 12 s busy, 4 of them with this process."""
    clocks = {"busy": iter((100.0, 112.0)), "own": iter((7.0, 11.0)), "clock": iter((50.0, 60.0))}
    company = Company((0, 1), *(partial(next, clocks[name]) for name in ("busy", "own", "clock")))
    assert company.share() == 0.4
    clocks = {"busy": iter((0.0, 1.0)), "own": iter((0.0, 1.5)), "clock": iter((0.0, 1.0))}
    assert Company((0,), *(partial(next, clocks[name]) for name in ("busy", "own", "clock"))).share() == 0.0
    alone = Company(cores())
    start = time.thread_time()
    while time.thread_time() - start < 0.1:
        pass
    assert 0.0 <= alone.share() <= 1.0


def test_seconds_of_a_core_are_those_in_which_somebody_had_it(tmp_path: Path) -> None:
    second = os.sysconf("SC_CLK_TCK")
    row = [second * n for n in (1, 2, 4, 1000, 2000, 8, 16, 32, 1, 2)]
    lines = ["cpu 9 9 9 9 9 9 9 9 9 9", *(f"cpu{core} {' '.join(map(str, row))}" for core in (0, 2, 20)), "intr 5 0"]
    (tmp_path / "stat").write_text("\n".join(lines))
    assert busy_of((0,), tmp_path / "stat") == 63.0 and busy_of((0, 2), tmp_path / "stat") == 126.0
    assert busy_of((0,), tmp_path / "none") == 0.0


@pytest.mark.parametrize(
    ("others", "times", "kept"), [((0.1,), 1, True), ((0.5, 0.1), 2, True), ((0.6, 0.5), 2, False)]
)
def test_what_others_disturbed_is_measured_once_more_and_not_kept(
    others: tuple[float, ...],
    times: int,
    kept: bool,
    measurements: list[Remembered],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shares, told = iter(others), list[str]()
    monkeypatch.setattr("forebay.profiler.probe.Company.share", lambda company: next(shares))
    quiet = replace(SMALL, company=0.2)
    found = examine("cpu", folder=tmp_path, effort=quiet, tell=told.append)
    assert len(measurements) == times and cache_file(tmp_path, "cpu").exists() == kept
    assert len(told) == times - 1 + (not kept)
    if kept:
        assert not any("other programs" in remark for remark in found.remarks)
        return
    assert "other programs had 50% of the" in told[-1] and "not kept" in told[-1] and found.remarks[0] == told[-1]
    # What there was stays: it was measured on a machine that nobody else had.
    cache_file(tmp_path, "cpu").write_text("what there was")
    shares = iter(others)
    examine("cpu", refresh=True, folder=tmp_path, effort=quiet, tell=told.append)
    assert cache_file(tmp_path, "cpu").read_text() == "what there was"


def break_whole(text: str) -> str:
    return text[: len(text) // 2]


def change_torch(text: str) -> str:
    content = json.loads(text)
    content["circumstances"]["torch"] = "0.0.1"
    return json.dumps(content)


def change_cores(text: str) -> str:
    content = json.loads(text)
    content["circumstances"]["cores"] = [7, 9]
    return json.dumps(content)


def change_rate(text: str) -> str:
    content = json.loads(text)
    content["machine"]["update_rate"] = -1.0
    return json.dumps(content)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (break_whole, "cannot be used"),
        (change_torch, "torch was 0.0.1"),
        (change_cores, "cores was (7, 9)"),
        (change_rate, "update_rate"),
    ],
)
def test_what_cannot_be_used_is_measured_again_and_said(
    measured: tuple[Machine, Path],
    measurements: list[Remembered],
    tmp_path: Path,
    spoil: Callable[[str], str],
    said: str,
) -> None:
    file = cache_file(tmp_path, "cpu")
    file.write_text(spoil(cache_file(measured[1], "cpu").read_text()))
    assert cached("cpu", folder=tmp_path) is None
    lines: list[str] = []
    assert examine("cpu", folder=tmp_path, effort=SMALL, tell=lines.append).seconds > 0
    assert len(measurements) == 1
    assert len(lines) == 1 and said in lines[0] and "\n" not in lines[0] and "measuring anew" in lines[0]
    assert cached("cpu", folder=tmp_path) is not None


@pytest.mark.usefixtures("measurements")
def test_a_folder_that_cannot_be_written_is_no_obstacle(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    lines: list[str] = []
    machine = probe("cpu", folder=blocked / "cache", effort=SMALL, tell=lines.append)
    assert machine.update_rate > 0 and "cannot" in lines[-1]


def test_a_disk_that_is_gone_is_left_out(measured: tuple[Machine, Path], tmp_path: Path) -> None:
    content = recalled(cache_file(measured[1], "cpu"))
    assert content.machine.disk is not None
    gone = replace(content.machine, disk=replace(content.machine.disk, path=str(tmp_path / "gone")))
    replace(content, machine=gone).save(cache_file(tmp_path, "cpu"))
    kept = cached("cpu", folder=tmp_path)
    assert kept is not None and kept.disk is None


def test_a_nominal_machine_is_the_same_every_time() -> None:
    first, second = nominal("cpu"), nominal("cpu")
    assert first.device_kind == "cpu" and first.device_capacity > 0
    assert replace(first, device_capacity=1, host_capacity=1) == replace(second, device_capacity=1, host_capacity=1)


def test_an_update_counts_the_bytes_that_a_program_counts() -> None:
    # AdamW on float32: two moments in and out, parameter in and out, gradient in.
    elements = 9 * MiB
    parameter = Parameter("weight", (elements,), (1,), "float32", 4 * elements, 0, True)
    layout = state_layout(
        Block("b", (parameter,), ("b",), 4 * elements), ("exp_avg", "exp_avg_sq"), 4 * MiB, Masters.WHOLE
    )
    device = CpuDevice()
    try:
        with UpdateTrial(device, elements, "float32", 2) as trial:
            events = trial.step()
    finally:
        device.close()
    assert len(events) == len(layout.chunks) == 3
    assert sum(event.nbytes for event in events) == elements * (2 * 2 * 4 + 3 * 4)


@pytest.mark.parametrize(
    ("every", "less", "spared"),
    [(1.08, 1.0, 1), (1.6, 1.0, 0), (16.0, 15.0, 1)],
    ids=["memory binds", "cores bind", "one of many"],
)
def test_the_last_core_is_for_updates_where_it_is_worth_it(every: float, less: float, spared: int) -> None:
    assert spared_by(every, less) == spared


def test_a_core_alone_is_the_updates_own_too() -> None:
    mine, device = os.sched_getaffinity(0), CpuDevice()
    try:
        assert spared_cores(device, SMALL) in (0, 1)
        os.sched_setaffinity(0, {min(mine)})
        assert spared_cores(device, SMALL) == 1
    finally:
        os.sched_setaffinity(0, mine)
        device.close()


@pytest.fixture
def two_lanes() -> list[Event]:
    # h2d moves 100 B/s from 0 to 10, d2h 50 B/s from 4 to 14: both are busy from 4 to 10.
    up = [Event(Lane.H2D, float(s), s + 2.0, 200) for s in range(0, 10, 2)]
    down = [Event(Lane.D2H, float(s), s + 5.0, 250) for s in (4, 9)]
    return [*up, *down]


def test_rates_of_both_directions_are_those_of_the_time_they_share(two_lanes: list[Event]) -> None:
    assert both_rates(two_lanes) == pytest.approx(150.0)
    assert rate_within(two_lanes, 5.0, 7.0) == pytest.approx(150.0)
    assert rate_within(two_lanes, 11.0, 12.0) == pytest.approx(50.0)
    assert span(two_lanes) == 14.0


def test_directions_that_never_met_had_the_link_to_themselves() -> None:
    assert both_rates([Event(Lane.H2D, 0, 1, 100), Event(Lane.D2H, 2, 4, 100)]) == pytest.approx(150.0)


def test_a_curve_leaves_the_latency_out_but_not_all_of_the_time() -> None:
    curve = curve_of({1000: 11.0, 100: 2.0, 10: 1.1}, latency=1.0)
    # 100 / (2 - 1), 1000 / (11 - 1); for 10 bytes a tenth of a second would be left, so a quarter of the time counts.
    assert curve.points == ((10, 10 / (1.1 / 4)), (100, 100.0), (1000, 100.0))


def test_a_share_is_lost_only_where_something_was() -> None:
    assert [lost_share(10, 10), lost_share(10, 5), lost_share(10, 12), lost_share(0, 1)] == [0.0, 0.5, 0.0, 0.0]


def test_cases_take_turns_and_the_first_round_warms_up() -> None:
    order: list[str] = []

    def case(name: str, *values: float) -> Callable[[], float]:
        rest = iter(values)
        return lambda: (order.append(name), next(rest))[1]

    taken = in_turns({"a": case("a", 9, 1, 2), "b": case("b", 9, 3, 4)}, rounds=3, bound=60)
    assert order == ["a", "b"] * 3
    assert taken == {"a": [1, 2], "b": [3, 4]}
    assert in_turns({"a": case("a", 9, 1, 2)}, rounds=3, bound=0.0) == {"a": [1]}  # two rounds in any case


@pytest.mark.parametrize(
    ("works_to", "bound", "limit", "expected"),
    [
        (10_000 * MiB, 1024 * MiB, None, 4096 * MiB),  # never refused: all of the host
        (10_000 * MiB, 1024 * MiB, 2048 * MiB, 2048 * MiB),  # the limit was not reached by a try, so it holds
        (10_000 * MiB, 1024 * MiB, 8 * MiB, 4096 * MiB),  # the driver went past the limit: it does not apply
        (200 * MiB, 1024 * MiB, None, 128 * MiB),  # refused at 256 MiB
        (0, 1024 * MiB, None, 4096),  # refused at once: a page, since 0 would mean that none is needed
    ],
)
def test_what_can_be_pinned_is_tried_by_doubling(works_to: int, bound: int, limit: int | None, expected: int) -> None:
    assert pinned_capacity(lambda nbytes: nbytes <= works_to, 4096 * MiB, bound, limit) == expected


def test_a_processor_is_named_or_its_architecture_is(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Example 9000\n")
    assert cpu_model(info) == "Example 9000"
    assert cpu_model(tmp_path / "none") != ""


def doctor(cache: Path, monkeypatch: pytest.MonkeyPatch, measured: Path, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("COLUMNS", "80")
    kept = cache_file(cache / "forebay", "cpu")
    kept.parent.mkdir(exist_ok=True)
    kept.write_bytes(cache_file(measured, "cpu").read_bytes())
    result = CliRunner().invoke(app, ["doctor", "--device", "cpu", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_doctor_prints_one_object(
    measured: tuple[Machine, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "machine.json"
    code, stdout, stderr = doctor(tmp_path, monkeypatch, measured[1], "--json", "--out", str(out))
    assert (code, stderr) == (0, "")
    assert Machine.from_json(stdout) == Machine.from_json(out.read_text())
    assert Machine.from_json(stdout).h2d == measured[0].h2d


def test_doctor_prints_a_table_of_80_columns(
    measured: tuple[Machine, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, stdout, _ = doctor(tmp_path, monkeypatch, measured[1])
    assert code == 0
    assert max(len(line) for line in stdout.splitlines()) <= 80
    for said in ("Capacities", "compute, float32", "disk write", "Worth knowing", "How these were found", "--refresh"):
        assert said in stdout, said


@pytest.mark.slow
def test_where_a_program_has_its_tensors_made_is_no_matter(tmp_path: Path) -> None:
    """Nothing can be measured on ``meta``, which stands for a card that is not asked about."""
    with torch.device("meta"):
        machine = probe("cpu", folder=tmp_path, effort=SMALL)
    assert machine.source == "measured" and {"float32", "bfloat16"} <= set(machine.compute)
