"""Machine files that cannot be used: the error names the file and the field, and what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from forebay.catalogue import load_machine, read_machine
from forebay.cli.main import app
from forebay.errors import ConfigError

Change = Callable[[dict[str, Any]], object]


def written(tmp_path: Path, change: Change) -> Path:
    content = json.loads(load_machine("h100").to_json())
    change(content)
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda m: m.pop("h2d"), "h2d"),
        (lambda m: m.pop("d2h"), "d2h"),
        (lambda m: m["disk"].pop("write"), "disk.write"),
        (lambda m: m.update(schema=99), "schema is 99"),
        (lambda m: m.update(schema=99, links=[]), "schema is 99"),
        (lambda m: m.update(update_rate=0), "update_rate"),
        (lambda m: m.update(update_rate=-5), "update_rate"),
        (lambda m: m["compute"].update(bfloat16=0), "compute.bfloat16"),
        (lambda m: m["h2d"]["curve"].update(points=[[4096, 0]]), "h2d.curve"),
        (lambda m: m["h2d"]["curve"].update(points=[[4096, -1.0]]), "h2d.curve.points.0.1"),
        (lambda m: m["h2d"]["curve"].update(points=[]), "h2d.curve"),
        (lambda m: m["d2h"].update(latency=-1), "d2h.latency"),
        (lambda m: m["d2h"].update(latency=float("nan")), "d2h.latency"),
        (lambda m: m.update(host_bandwidth=float("inf")), "host_bandwidth"),
        (lambda m: m["disk"].update(capacity=-1), "disk.capacity"),
        (lambda m: m.update(pinned_capacity=-1), "pinned_capacity"),
        (lambda m: m.update(device_capacity="much"), "device_capacity"),
        (lambda m: m.update(lunch_seconds=1e-6), "did you mean launch_seconds?"),
        (lambda m: m.update(schema="new"), "schema"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, change: Change, field: str) -> None:
    path = written(tmp_path, change)
    with pytest.raises(ConfigError) as error:
        read_machine(path)
    assert str(path) in str(error.value) and field in str(error.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe{}", b'"h100"'])
def test_a_file_that_is_no_object_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "machine.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"machine\.json"):
        read_machine(path)


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    whole = load_machine("h100").to_json()
    path = tmp_path / "machine.json"
    for end in range(0, len(whole) - 1, 97):
        path.write_text(whole[:end])
        with pytest.raises(ConfigError, match="whole JSON"):
            read_machine(path)


def test_a_name_that_is_unknown_gets_the_names() -> None:
    with pytest.raises(ConfigError, match="did you mean h100") as error:
        read_machine("h1000")
    assert "rtx-4090" in str(error.value)
    with pytest.raises(ConfigError, match="in the catalogue"):
        load_machine("abacus")


def test_a_folder_is_no_machine_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the machine file"):
        read_machine(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--device", "tpu"), "no device 'tpu'"),
        (("--device", "cpu", "--out", "/nowhere/at/all.json"), "--out"),
        (("--device", "cpu", "--out", "/"), "--out"),
        (("--device", "cpu", "--disk", "/nowhere/at/all"), "/nowhere/at/all has: No such file"),
    ],
)
def test_doctor_refuses_misuse_without_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("forebay.profiler.probe._undisturbed", None)  # what measures
    result = CliRunner().invoke(app, ["doctor", *arguments])
    assert result.exit_code == 2
    assert said in result.stderr and "Traceback" not in result.output
    assert not list(tmp_path.iterdir())
