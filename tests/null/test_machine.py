"""Machines as records and as data: what the catalogue promises of every entry, and what order must hold among them."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf, nan
from pathlib import Path

import pytest

from forebay.calls import Calls
from forebay.catalogue import for_device, in_host, is_listed, load_machine, machine_names, read_machine
from forebay.cli.advice import advice
from forebay.errors import ConfigError
from forebay.machine import Curve, Disk, Link, Machine
from forebay.tiers.host import HostMemory

GiB = 2**30
MiB = 2**20

NAMES = {
    "a100-40gb",
    "a100-80gb",
    "gh200",
    "h100",
    "h200",
    "l4",
    "mi300x",
    "rtx-3090",
    "rtx-4090",
    "rtx-4090-1-ssd",
    "rtx-4090-12-ssd",
    "rtx-5090",
    "t4",
    "v100-32gb",
}

PCIE = {3: 15.75e9, 4: 31.5e9, 5: 63.0e9}
"""Bytes/s of x16 in one direction, by generation."""

GENERATION = {
    "t4": 3,
    "v100-32gb": 3,
    "l4": 4,
    "rtx-3090": 4,
    "rtx-4090": 4,
    "rtx-4090-12-ssd": 4,
    "a100-40gb": 4,
    "a100-80gb": 4,
    "rtx-5090": 5,
    "h100": 5,
    "h200": 5,
    "mi300x": 5,
}


def a_machine() -> Machine:
    link = Link(Curve(((65536, 4e9), (1048576, 8e9))), latency=1e-5)
    return Machine(
        name="here",
        source="measured",
        device_kind="cpu",
        device_capacity=8 * GiB,
        host_capacity=8 * GiB,
        pinned_capacity=0,
        compute={"float32": 100e9},
        device_bandwidth=20e9,
        host_bandwidth=20e9,
        update_rate=20e9,
        h2d=link,
        d2h=link,
        disk=Disk(GiB, link, link, "/disk"),
    )


def test_a_curve_is_linear_between_its_points_and_flat_outside() -> None:
    curve = Curve(((100, 10.0), (300, 30.0)))
    assert [curve.rate(n) for n in (1, 100, 200, 300, 999)] == [10.0, 10.0, 20.0, 30.0, 30.0]


def test_a_transfer_takes_its_latency_and_its_bytes() -> None:
    link = Link(Curve(((100, 10.0), (300, 30.0))), latency=2.0)
    assert link.seconds(200) == 2.0 + 200 / 20.0
    assert link.seconds(0) == 0.0


def test_a_machine_survives_json() -> None:
    machine = a_machine()
    assert Machine.from_json(machine.to_json()) == machine


def test_a_machine_of_schema_1_had_one_way_for_reads_and_writes() -> None:
    machine = a_machine()
    assert machine.disk is not None
    old = {**json.loads(machine.to_json()), "schema": 1}
    assert Machine.from_json(json.dumps(old)) == machine  # an entry of the catalogue, which says nothing of calls
    for name in ("reads", "writes"):
        del old["disk"][name]
    old["disk"] |= {"block": 2 * MiB, "depth": 3}
    calls = Calls(2 * MiB, 3)
    assert Machine.from_json(json.dumps(old)) == replace(machine, disk=replace(machine.disk, reads=calls, writes=calls))
    assert Machine.from_json(json.dumps({**old, "disk": None})) == replace(machine, disk=None)
    with pytest.raises(ConfigError, match=r"disk\.reads\.block"):
        Machine.from_json(json.dumps({**old, "disk": {**old["disk"], "block": "large"}}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": 99}, "schema 99"),
        ({"source": "hearsay"}, "measured or catalogue"),
        ({"device_kind": "tpu"}, "cpu or cuda"),
        ({"update_rate": 0.0}, "update_rate"),
        ({"compute": {}}, "no dtype"),
        ({"compute": {"float32": -1.0}}, "compute.float32"),
        ({"duplex": 0.0}, "duplex"),
        ({"shared_cores": 1.5}, "shared_cores"),
        ({"device_bandwidth": inf}, "device_bandwidth must be more than 0 and finite, got inf"),
        ({"host_bandwidth": nan}, "host_bandwidth"),
        ({"pinned_capacity": -1}, "pinned_capacity must be 0 or more and finite, got -1"),
        ({"launch_seconds": -1e-6}, "launch_seconds must be 0 or more"),
        ({"watch_seconds": -1.0}, "watch_seconds"),
        ({"handover_seconds": nan}, "handover_seconds"),
        ({"replay_seconds": inf}, "replay_seconds"),
        ({"treat_seconds": -1.0}, "treat_seconds"),
        ({"together_seconds": -1.0}, "together_seconds"),
        ({"op_seconds": {"add": 1.0, "mul": inf}}, "op_seconds.mul must be 0 or more and finite, got inf"),
    ],
)
def test_a_machine_that_cannot_be_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(a_machine(), **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [{"duplex": 0.0}, {"alternation": 0.0}, {"alternation": 1.5}, {"order_seconds": -1.0}, {"capacity": -1}],
)
def test_a_disk_that_cannot_be_is_refused(change: dict[str, float]) -> None:
    disk = a_machine().disk
    assert disk is not None
    with pytest.raises(ConfigError, match=next(iter(change))):
        replace(disk, **change)  # type: ignore[arg-type]


def test_the_catalogue_has_these_machines() -> None:
    assert set(machine_names()) == NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_entry_is_whole(name: str) -> None:
    machine = load_machine(name)
    assert (machine.name, machine.source, machine.device_kind) == (name, "catalogue", "cuda")
    assert {"float32", "bfloat16", "float16"} == set(machine.compute)
    assert machine.disk is not None and machine.disk.capacity > 0
    assert 0 < machine.pinned_capacity <= machine.host_capacity
    # The word of each figure: what is specified, and what share of a peak is taken and why.
    text = " ".join(machine.sources)
    for said in ("specification:", "compute.bfloat16: peak", "host_bandwidth", "update_rate", "disk:", "typical"):
        assert said in text, said


@pytest.mark.parametrize(("name", "generation"), sorted(GENERATION.items()))
def test_a_link_is_near_and_under_what_its_generation_allows(name: str, generation: int) -> None:
    machine = load_machine(name)
    for link in (machine.h2d, machine.d2h):
        assert 0.7 * PCIE[generation] < link.curve.rate(64 * MiB) < 0.95 * PCIE[generation]


def test_faster_is_faster() -> None:
    def of(figure: str, *names: str) -> list[float]:
        return [float(getattr(load_machine(name), figure)) for name in names]

    def bf16(*names: str) -> list[float]:
        return [load_machine(name).compute["bfloat16"] for name in names]

    for figures in (
        of("device_bandwidth", "t4", "l4", "rtx-3090", "rtx-4090", "a100-40gb", "a100-80gb", "h100", "h200"),
        of("device_capacity", "t4", "l4", "rtx-5090", "a100-40gb", "h100", "gh200", "h200", "mi300x"),
        bf16("t4", "rtx-3090", "rtx-4090", "rtx-5090", "a100-80gb", "h100"),
    ):
        assert figures == sorted(figures) and len(set(figures)) == len(figures), figures
    # NVLink-C2C against PCIe 5.0.
    assert load_machine("gh200").h2d.seconds(GiB) < load_machine("h100").h2d.seconds(GiB) / 5
    # No 16-bit tensor cores for bfloat16 before Ampere.
    for name in ("t4", "v100-32gb"):
        rates = load_machine(name).compute
        assert rates["bfloat16"] < rates["float32"] < rates["float16"]
    # The same but for the disks.
    one, many = load_machine("rtx-4090-1-ssd"), load_machine("rtx-4090-12-ssd")
    assert one.disk is not None and many.disk is not None and 12 * one.disk.capacity == many.disk.capacity
    assert many.disk.read.seconds(GiB) < one.disk.read.seconds(GiB) / 5
    assert replace(one, name="", disk=None, sources=()) == replace(many, name="", disk=None, sources=())


def test_every_rate_is_under_its_peak() -> None:
    peaks = {"rtx-3090": 71.2e12, "rtx-4090": 165.2e12, "a100-80gb": 312e12, "h100": 989.4e12, "mi300x": 1307.4e12}
    for name, peak in peaks.items():
        assert 0.45 * peak < load_machine(name).compute["bfloat16"] < 0.8 * peak


@pytest.mark.parametrize("spelled", ["RTX 4090", "rtx_4090", " Rtx-4090 "])
def test_a_name_may_be_written_as_people_write_it(spelled: str) -> None:
    assert read_machine(spelled).name == "rtx-4090"


@pytest.mark.parametrize(
    ("torch_name", "entry"),
    [
        ("NVIDIA H200", "h200"),
        ("Tesla V100-SXM3-32GB", "v100-32gb"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "rtx-3090"),
        ("Tesla T4", "t4"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_a_gpu_is_known_by_its_name(torch_name: str, entry: str) -> None:
    assert for_device(torch_name).name == entry


@pytest.mark.parametrize("name", machine_names())
def test_an_entry_comes_in_a_larger_host(name: str) -> None:
    entry = load_machine(name)
    assert is_listed(entry) and entry.disk is not None
    memory, disk = 2 * entry.host_capacity, 3 * entry.disk.capacity
    larger = in_host(entry, memory, disk)
    assert larger.disk is not None
    assert (larger.host_capacity, larger.pinned_capacity, larger.disk.capacity) == (memory, memory, disk)
    assert replace(larger, host_capacity=entry.host_capacity, pinned_capacity=entry.pinned_capacity) == replace(
        entry, disk=larger.disk
    )
    assert in_host(entry) == in_host(entry, memory // 4, disk // 4) == entry
    half = replace(entry, pinned_capacity=entry.host_capacity // 2)
    assert in_host(half, memory).pinned_capacity == entry.host_capacity // 2


def test_a_machine_that_is_not_listed_is_what_it_is() -> None:
    for machine in (a_machine(), replace(load_machine("rtx-4090"), name="NVIDIA GeForce RTX 4090")):
        assert not is_listed(machine)
        assert in_host(machine, 1 << 50, 1 << 50) == machine


def test_a_measured_file_is_read_like_an_entry(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(a_machine().to_json())
    assert read_machine(path) == read_machine(str(path)) == a_machine()


def test_advice_names_what_is_out_of_the_ordinary() -> None:
    slow = Link(Curve(((65536, 1e8),)))
    machine = replace(
        a_machine(),
        compute={"float32": 100e9, "bfloat16": 200e9, "float16": 1e9},
        disk=Disk(GiB, slow, slow, "/disk"),
        shared_cores=0.5,
    )
    limited = HostMemory(8 * GiB, GiB, "cgroup limit /sys/fs/cgroup/memory.max")
    text = "\n".join(advice(machine, limited, 64 * GiB))
    for said in (
        "limited to 8.0 GiB of the machine's 64.0 GiB",
        "same memory",
        "1.0 GiB of host memory are free",
        "float16 computes at 1%",
        "50%",
    ):
        assert said in text, said
    assert "train in float32 or bfloat16" in text and "NVMe" in text


def test_an_ordinary_machine_gets_no_warning() -> None:
    assert advice(load_machine("h100"), HostMemory(256 * GiB, 200 * GiB, "meminfo"), 256 * GiB) == ()
