"""Settings: where they come from, which one wins, and what a wrong one is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from forebay.config import make_config, read_yaml
from forebay.errors import ConfigError
from forebay.recipes import load_recipe, recipe_names

ENOUGH = {"model": "tiny", "data": ["a.txt"], "device_memory": "64MiB"}


def test_a_later_layer_wins_and_none_is_not_given() -> None:
    config = make_config(ENOUGH, {"steps": 7, "lr": 0.5}, {"steps": 9, "lr": None})
    assert (config.steps, config.lr) == (9, 0.5)


def test_sizes_become_bytes() -> None:
    config = make_config(ENOUGH, {"host_memory": "1.5GiB"})
    assert config.device_memory == 64 * 2**20
    assert config.host_memory == 3 * 2**29


def test_tokens_per_step_counts_every_micro_batch() -> None:
    assert make_config(ENOUGH, {"batch": 3, "seq": 5, "accumulate": 2}).tokens_per_step == 30


def test_a_configuration_cannot_change() -> None:
    with pytest.raises(ValidationError):
        make_config(ENOUGH).steps = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model": "tiny", "data": ["a"]}, "--device-memory"),
        (ENOUGH | {"device_memory": "64MiBB"}, "unknown unit 'MiBB'"),
        (ENOUGH | {"device_memory": 0}, "--device-memory"),
        (ENOUGH | {"disk": "/x:12QB"}, "--disk"),
        (ENOUGH | {"batch": 0}, "--batch"),
        (ENOUGH | {"lr": float("nan")}, "--lr"),
        (ENOUGH | {"clip_norm": 0}, "--clip-norm"),
        (ENOUGH | {"dtype": "float16"}, "'float32' or 'bfloat16', got 'float16'"),
        (ENOUGH | {"update": "later"}, "--update: input should be 'step' or 'backward', got 'later'"),
        (ENOUGH | {"update": "backward", "clip_norm": 1}, "--update: backward uses gradients up as they come; leave"),
        (ENOUGH | {"update": "backward", "accumulate": 2}, "leave --accumulate out, or take --update step"),
        (ENOUGH | {"nonfinite": "hope"}, "--nonfinite: input should be 'stop' or 'skip', got 'hope'"),
        (ENOUGH | {"update": "backward", "nonfinite": "skip"}, "--nonfinite: a step that backward has taken cannot be"),
        (ENOUGH | {"checksums": True}, "--checksums: checksums are of what is on disk, and no disk is allowed; give"),
        (ENOUGH | {"checksums": True, "disk": ""}, "--disk: "),
        (ENOUGH | {"data": []}, "--data"),
        (ENOUGH | {"device_memry": "1GiB"}, "did you mean device_memory?"),
        (ENOUGH | {"device-memory": "1GiB"}, "did you mean device_memory?"),
        (ENOUGH | {"colour": "red"}, "settings are model, batch, "),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_config(settings)
    assert said in str(error.value)


def test_yaml_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: tiny\ndata: a.txt\ndevice_memory: 1GiB\nlr: 1e-3\n")
    config = make_config(read_yaml(path))
    assert (config.data, config.device_memory, config.lr) == ((Path("a.txt"),), 2**30, 1e-3)


def test_an_empty_yaml_sets_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("# nothing yet\n")
    assert read_yaml(path) == {}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"modle: tiny\n", "did you mean model?"),
        (b"- a\n- b\n", "holds a list"),
        (b"a: [1\n", "is not YAML"),
        (b"\xff\xfe\x00", "UTF-8"),
        (b"run: 2026-11-30\n", "YAML reads 2026-11-30 as date; put it in quotes"),
        (b"run: 12\n", "YAML reads 12 as int; put it in quotes"),
    ],
)
def test_a_wrong_yaml_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        read_yaml(path)
    assert said in str(error.value)
    assert str(path) in str(error.value)


def test_a_yaml_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_yaml(tmp_path / "none.yaml")


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_a_valid_base(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.description
    assert recipe.model["model_type"]
    assert make_config({"device_memory": "1GiB"}, recipe.train, {"model": name, "data": "a.txt"}).model == name


def test_an_unknown_recipe_lists_the_names() -> None:
    with pytest.raises(ConfigError, match=r"demo, .*llama-135m, .*tiny"):
        load_recipe("nope")
