"""DeepSpeed's ZeRO in ``zero``: a contender, and its extensions, which it compiles where it finds none.

Compiled by DeepSpeed itself they take five minutes of two cores, one contender after the other, and again whenever
torch is in another folder: include paths are part of what ninja compares. So they are made once, before anybody is set
up, in a folder for this torch; ``DS_BUILD_*`` variables at ``pip install`` spare even that.

python -m benchmarks.fasthost.rival    # makes or finds them
"""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from benchmarks.case import BenchmarkError, Contender, Job, Running
from benchmarks.fasthost.trainers import LEARNING_RATE, Loop, Mode
from benchmarks.host import ROOT

if TYPE_CHECKING:
    import torch

__all__ = ["DeepSpeed", "build", "check_unlocked", "main"]

EXTENSIONS: Final = ("CPUAdamBuilder", "ShareMemCommBuilder", "PinMemoryBuilder", "AsyncIOBuilder")

_ENVIRONMENT: Final[Mapping[str, str]] = {
    "DS_ACCELERATOR": "cpu",
    # Its allocator of aligned and locked memory: without it every read and write of its disk tier is copied once more.
    "DS_PIN_MEMORY_BACKEND": "native",
    "MASTER_ADDR": "127.0.0.1",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_SIZE": "1",
}


@final
@dataclass(frozen=True, kw_only=True)
class DeepSpeed(Contender):
    """DeepSpeed in fp32 on the CPU with DeepSpeedCPUAdam, where Python finds the package."""

    name: str
    what: str
    mode: Mode

    @property
    def budgets(self) -> Mapping[str, str]:
        return {}

    def start(self, job: Job) -> Running:
        os.environ.update(_environment(), MASTER_PORT=str(_free_port()))
        try:
            import deepspeed  # type: ignore[import-not-found, unused-ignore]
        except ImportError as error:
            raise BenchmarkError(f"DeepSpeed: {error}") from error
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
        model = job.model.build(job.seq, "cpu")
        job.scratch.mkdir(parents=True, exist_ok=True)
        config = _config(job, self.mode)
        if self.mode == "nvme":
            # Left to ``initialize``, parameters are written in bf16 and read back in fp32 where the processor has no
            # fp16, and the process aborts (0.19.8, ``Init._set_dtype``).
            deepspeed.zero.Init(module=model, config_dict_or_path=config, remote_device="nvme", pin_memory=True)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        engine.train()
        return _Engine(job, engine)


def _config(job: Job, mode: Mode) -> dict[str, Any]:
    """Locked memory, the pipelines of its disk tier with groups of a size that this model has several of, and
    otherwise DeepSpeed's own defaults."""
    place = {"device": "nvme", "nvme_path": str(job.scratch)} if mode == "nvme" else {"device": "cpu"}
    zero: dict[str, Any] = {
        "stage": 2 if mode == "offload" else 3,
        "offload_optimizer": {**place, "pin_memory": True},
        "contiguous_gradients": True,
    }
    if mode != "offload":
        zero["offload_param"] = {**place, "pin_memory": True}
    if mode == "nvme":
        # Its own pipeline: the next group is read and the last one written while one is updated, 4 tensors of each.
        zero["offload_optimizer"] |= {"buffer_count": 12, "pipeline_read": True, "pipeline_write": True}
        zero["offload_param"] |= {"buffer_count": 5, "buffer_size": 16 << 20}
        zero["sub_group_size"] = 4 << 20
    return {
        "train_micro_batch_size_per_gpu": job.batch,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.01}},
        "zero_optimization": zero,
        "aio": {"block_size": 1 << 20, "queue_depth": 8, "intra_op_parallelism": 1, "single_submit": False},
        "wall_clock_breakdown": False,
        "steps_per_print": 1 << 30,
    }


@final
class _Engine(Loop):
    def __init__(self, job: Job, engine: Any) -> None:
        super().__init__(job)
        self._engine = engine

    def train(self, batch: Mapping[str, torch.Tensor]) -> Any:
        loss = self._engine(**batch).loss
        self._engine.backward(loss)
        self._engine.step()
        return loss.detach()


def build(say: Callable[[str], None]) -> None:
    """Has the extensions made or found by a process of its own. Does nothing where there is no DeepSpeed.

    Raises ``BenchmarkError`` where they cannot be made, or where somebody else seems to make them.
    """
    if find_spec("deepspeed") is None:
        return
    check_unlocked(_folder())
    say("  DeepSpeed's extensions are looked for, or compiled: some minutes the first time")
    start = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.fasthost.rival"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchmarkError(f"DeepSpeed's extensions cannot be made: {done.stderr.strip()[-600:]}")
    say(f"  DeepSpeed's extensions are there after {time.perf_counter() - start:.0f} s")


def check_unlocked(folder: Path) -> None:
    """Raises ``BenchmarkError`` where a build in ``folder`` has not ended: every other one waits for it, for ever."""
    locks = sorted(folder.glob("*/lock"))
    if locks:
        raise BenchmarkError(
            f"{locks[0]} is there: another process compiles DeepSpeed's extensions, or was killed while it did; wait "
            f"for it, or remove the file"
        )


def main() -> int:
    """Makes the extensions that are not there yet."""
    os.environ.update(_environment())
    from deepspeed.accelerator import get_accelerator  # type: ignore[import-not-found, unused-ignore]

    for name in EXTENSIONS:
        get_accelerator().create_op_builder(name).load()
    return 0


def _environment() -> dict[str, str]:
    return {**_ENVIRONMENT, "TORCH_EXTENSIONS_DIR": str(_folder())}


def _folder() -> Path:
    """Where extensions for the torch of this environment are kept."""
    found = find_spec("torch")
    where = "" if found is None or found.origin is None else found.origin
    key = hashlib.sha256(where.encode()).hexdigest()[:8]
    return Path.home() / ".cache" / "torch_extensions" / f"forebay-bench-{key}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main())
