"""Runs that are killed at random instants: ``python -m tests.faults.killing FOLDER KILLS SEED``, so many of each way.

One process imports torch and has no thread; every part of a run is a child of it, forked, so that a part is cheap.
For each trial a part trains and saves after every step until it is killed, others go on from its checkpoint and are
killed too, and the last one may come to the end. Parts are loops as a user writes them, or ``forebay train``. Losses
and parameters must be those of a run that nobody killed, and no part may begin before the step that was said to be
saved. Prints one JSON object.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import torch
import transformers  # noqa: F401 (every child has it, and none imports it)
from torch import nn

import forebay
from forebay import api
from forebay.cli.progress import StepResult, View
from forebay.cli.train import train
from forebay.config import make_config
from forebay.memory import Tier
from tests.faults.trained import AMPLE, WIDTH, adamw, disk_plan, network

STEPS = 12
SHOTS = 2
"""Parts of a trial that are shot at; some have come to their end by then."""
WAYS = ("auto", "stream", "disk", "in place", "halves", "train")
"""``halves``: states in place in bf16, without the parameters, which are the other halves of their masters."""

MODEL = {"model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48}
MODEL |= {"num_hidden_layers": 2, "num_attention_heads": 2, "attention_dropout": 0.1}
COMMAND = {"seq": 16, "batch": 2, "steps": STEPS, "accumulate": 2, "clip_norm": 0.1, "save_every": 1, "device": "cpu"}
COMMAND |= {"policy": "stream", "device_memory": "4MiB"}


@final
class Saying(View):
    """Says when a run goes on, and when it is saved."""

    is_terminal = False

    def __init__(self, said: Callable[[str], None]) -> None:
        self._said = said
        self.console: Any = self

    def print(self, text: str, **options: object) -> None:
        for begin, verb in (("goes on behind step ", "begin"), ("step ", "saved")):
            if text.startswith(begin) and (verb == "begin" or " is saved: " in text):
                self._said(f"{verb} {text.removeprefix(begin).split()[0].rstrip(',')}")

    def start(self, steps: int, device_peak: Any) -> None:
        pass

    def step(self, result: StepResult) -> None:
        pass

    def stop(self) -> None:
        pass


def train_part(folder: Path, said: Callable[[str], None]) -> None:
    """``forebay train``, or with ``--resume`` where a run has begun."""
    (folder / "model.json").write_text(json.dumps(MODEL))
    (folder / "text.txt").write_text("".join(f"{i} green bottles hanging on the wall\n" for i in range(99)))
    run = folder / "run"
    given = {"model": str(folder / "model.json"), "data": str(folder / "text.txt"), "run": str(run)}
    found = train(make_config(COMMAND, given), api, Saying(said), resume=run.exists())
    digest = hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest()
    said("end " + json.dumps([found.losses, digest]))


def part(folder: Path, way: str, said: Callable[[str], None]) -> None:
    """Trains from where ``folder`` says to the end, saves after each step and then says so."""
    torch.set_num_threads(1)
    if way == "train":
        train_part(folder, said)
        return
    disk = folder / "disk"
    disk.mkdir(exist_ok=True)
    options: dict[str, Any] = {"policy": way}
    kept = folder / "kept"
    dtype, homes = (torch.bfloat16, Tier.HOST) if way == "halves" else (torch.float32, Tier.DISK)
    in_place = way in ("in place", "halves")
    if way == "disk" or in_place:
        plan = disk_plan(disk, 2 if in_place else 1, dtype=dtype, parameters=homes)
        options = {"plan": plan, "disk": f"{disk}:64MiB"}
    if in_place:
        options["crash_safe"] = kept
    model = network(dtype)
    model, optimizer = forebay.prepare(model, adamw(model), device_memory=AMPLE, device="cpu", **options)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    losses: list[float] = []
    begin = 0
    if (kept / "manifest.json").exists():
        found = forebay.resume(model, optimizer, kept, scheduler=scheduler)
        begin, losses = found.step, found.extra
    said(f"begin {begin}")
    for step in range(begin, STEPS):
        for micro in range(2):
            inputs = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(2 * step + micro))
            loss = nn.functional.dropout(model(inputs.to(dtype)), 0.1).square().mean()
            loss.backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        given = {"step": step + 1, "scheduler": scheduler, "extra": losses, "background": in_place}
        forebay.save(model, optimizer, kept, **given)
        # In the background it may still be on its way; the one before stands, or the call would not have returned.
        said(f"saved {step if in_place else step + 1}")
    forebay.synchronize(model)
    said(f"saved {STEPS}")
    digest = [value.double().sum().item().hex() for value in forebay.parameters(model).values()]
    said("end " + json.dumps([losses, digest]))
    forebay.close(model)


def run_part(folder: Path, way: str, kill: Callable[[int], None]) -> tuple[list[str], int]:
    """A part in a process of its own, at which ``kill`` may shoot; what it said, and how it ended."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            part(folder, way, lambda line: os.write(writer, f"{line}\n".encode()) and None)
        except BaseException as error:
            os.write(writer, f"error {type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(0)
    os.close(writer)
    kill(child)
    with os.fdopen(reader) as lines:
        text = lines.read()
    _, status = os.waitpid(child, 0)
    return text.splitlines(), status


def shoot_between(draw: random.Random, seconds: float) -> Callable[[int], None]:
    def kill(child: int) -> None:
        time.sleep(draw.uniform(0, seconds))
        os.kill(child, signal.SIGKILL)

    return kill


def number_in(lines: list[str], verb: str) -> int:
    return max((int(line.split()[1]) for line in lines if line.startswith(f"{verb} ")), default=0)


def trial(folder: Path, way: str, draw: random.Random, seconds: float, expected: str) -> int:
    """Returns how many parts were killed while they ran. Raises ``AssertionError`` where anything was lost."""
    killed = last = 0
    for number in range(SHOTS + 1):
        shoot = shoot_between(draw, seconds) if number < SHOTS else lambda child: None
        lines, status = run_part(folder, way, shoot)
        assert not any(line.startswith("error") for line in lines), lines
        if any(line.startswith("begin") for line in lines):
            assert number_in(lines, "begin") >= last, (lines, last)
        last = max(last, number_in(lines, "saved"))
        killed += os.WIFSIGNALED(status)
    assert lines[-1] == expected, (way, lines)
    return killed


def main(folder: Path, kills: int, seed: int) -> None:
    draw = random.Random(seed)
    trials, killed = 0, dict.fromkeys(WAYS, 0)
    # Kernels are loaded once, here, and every child has them. A child of a process with threads would lack those.
    (folder / "warm").mkdir()
    for way in ("stream", "train"):
        part(folder / "warm", way, lambda line: None)
    assert threading.active_count() == 1, threading.enumerate()
    for way in WAYS:
        (folder / way).mkdir()
        since = time.monotonic()
        lines, _ = run_part(folder / way, way, lambda child: None)
        seconds = time.monotonic() - since
        assert number_in(lines, "saved") == STEPS, lines
        while killed[way] < kills:
            where = folder / f"{way}-{trials}"
            where.mkdir()
            killed[way] += trial(where, way, draw, seconds, lines[-1])
            trials += 1
            shutil.rmtree(where)
    print(json.dumps({"trials": trials, "killed": killed}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
