"""``forebay fragmentation`` of the folder of a run: the step that is played is the one that ran."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from forebay import api
from forebay.cli.fragmentation import step_of_run
from forebay.cli.recapture import captured_again
from forebay.cli.train import train
from forebay.lowering import step_buffers
from forebay.plans import Plan
from tests.faults.train_rig import MODEL, Telling, settings, text

__all__ = ["text"]


def test_a_step_is_played_in_the_tiles_and_pieces_in_which_it_ran(text: Path, tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(json.dumps(MODEL | {"hidden_size": 128}))
    run = tmp_path / "run"
    config = settings(text, run, loss="chunked", tile="64KiB", steps=1, accumulate=2)
    train(config, api, Telling())
    plan = Plan.from_json((run / "plan.json").read_bytes())
    trace = captured_again(config, plan, "cpu")
    assert plan.loss_piece > 0 and trace.fingerprint == plan.fingerprint
    assert step_of_run(run) == step_buffers(trace, plan.recompute, plan.activations)
