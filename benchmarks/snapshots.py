"""What PyTorch's allocator did on a card: histories to hold its models against (``tests/null/layouts``).

    python -m benchmarks.snapshots --out FOLDER

Every scenario is a process of its own, whose history begins before CUDA does and is complete. Of each entry is kept
what an allocator sees (action, address, bytes, stream), of each segment what it holds at the end. A file is a memory
snapshot of PyTorch, a gzipped pickle of plain values, with one key more: ``scenario``, in words.
"""

from __future__ import annotations

import argparse
import gzip
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

__all__ = ["SCENARIOS", "Scenario", "main"]

MIB: Final = 2**20
STREAMED: Final = int(1.8 * 2**30)
MOST: Final = 200_000
"""Entries of a history."""


@dataclass(frozen=True)
class Scenario:
    """``run`` is recorded; ``settings`` are those of ``PYTORCH_CUDA_ALLOC_CONF``, ``limit`` bytes of the device."""

    run: Callable[[], None]
    settings: str = ""
    limit: int | None = None


def _requests(seed: int, count: int = 3000, streams: int = 1, most: int = 64 * MIB, live: int = 512 * MIB) -> None:
    """Random requests: a third small, sizes spread evenly over their logarithm, given back in any order."""
    import torch

    draw, held, total = random.Random(seed), list[torch.Tensor](), 0
    sides = [torch.cuda.current_stream(), *(torch.cuda.Stream() for _ in range(streams - 1))]
    for _ in range(count):
        if held and (total > live or draw.random() < 0.45):
            gone = held.pop(draw.randrange(len(held)))
            total -= gone.nbytes
            del gone
            continue
        largest = MIB if draw.random() < 1 / 3 else most
        nbytes = int(2 ** draw.uniform(0, largest.bit_length() - 1))
        with torch.cuda.stream(draw.choice(sides)):
            held.append(torch.empty(nbytes, dtype=torch.uint8, device="cuda"))
        total += nbytes


def _trained(make: Callable[[], Any], lengths: tuple[int, ...]) -> None:
    """A step of AdamW for each of ``lengths`` tokens."""
    import torch

    torch.manual_seed(0)
    model = make().to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for length in lengths:
        ids = torch.randint(0, 512, (4, length), device="cuda")
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _streamed() -> None:
    """Six steps of GPT-2 small under forebay, within 1.8 GiB."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import forebay

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config()).to(torch.bfloat16)
    ids = torch.randint(0, 50257, (4, 512))
    batch = {"input_ids": ids, "labels": ids}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = forebay.prepare(model, optimizer, batch, device_memory=STREAMED, device="cuda")
    for _ in range(6):
        model(**{name: tensor.to("cuda") for name, tensor in batch.items()}).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    forebay.close(model)


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=4096, n_positions=1024, n_embd=384, n_layer=4, n_head=6))


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=4096,
            hidden_size=512,
            intermediate_size=1408,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
        )
    )


LENGTHS: Final = (128, 512, 300, 1024, 640)

SCENARIOS: Final[Mapping[str, Scenario]] = MappingProxyType(
    {
        "gpt2": Scenario(lambda: _trained(_gpt2, LENGTHS)),
        "llama": Scenario(lambda: _trained(_llama, LENGTHS)),
        "gpt2-expandable": Scenario(lambda: _trained(_gpt2, LENGTHS), "expandable_segments:True"),
        "gpt2-streamed-expandable": Scenario(_streamed, "expandable_segments:True", STREAMED),
        "llama-unsplit": Scenario(lambda: _trained(_llama, LENGTHS), "max_split_size_mb:64"),
        **{f"requests-{seed}": Scenario(lambda seed=seed: _requests(seed)) for seed in range(3)},  # type: ignore[misc]
        "requests-streams": Scenario(lambda: _requests(3, streams=3)),
        "requests-expandable": Scenario(lambda: _requests(4), "expandable_segments:True"),
        "requests-expandable-streams": Scenario(lambda: _requests(5, streams=3), "expandable_segments:True"),
        "requests-unsplit": Scenario(lambda: _requests(6), "max_split_size_mb:24"),
        "requests-short": Scenario(lambda: _requests(7, live=400 * MIB), limit=640 * MIB),
        "requests-collected": Scenario(
            lambda: _requests(8, live=300 * MIB), "garbage_collection_threshold:0.5", 1024 * MIB
        ),
    }
)


def _record(name: str, out: Path) -> None:
    """Runs one scenario in this process, which has not used CUDA yet."""
    import torch

    scenario = SCENARIOS[name]
    torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=MOST)
    if scenario.limit is not None:
        torch.cuda.set_per_process_memory_fraction(scenario.limit / torch.cuda.mem_get_info()[1])
    scenario.run()
    torch.cuda.synchronize()
    snapshot = torch.cuda.memory._snapshot(0)
    kept: dict[str, Any] = {
        "device_traces": [[_only(e, "action", "addr", "size", "stream") for e in t] for t in snapshot["device_traces"]],
        "segments": [
            {
                **_only(segment, "device", "address", "total_size", "stream", "segment_type", "is_expandable"),
                "blocks": [_only(b, "address", "size", "requested_size", "state") for b in segment["blocks"]],
            }
            for segment in snapshot["segments"]
        ],
        "scenario": {
            "name": name,
            "settings": scenario.settings,
            "limit": scenario.limit,
            "torch": str(torch.__version__),
            "card": torch.cuda.get_device_name(0),
        },
    }
    (out / f"{name}.pickle.gz").write_bytes(gzip.compress(pickle.dumps(kept, protocol=4), mtime=0))
    print(f"{name}: {len(kept['device_traces'][0])} entries, {torch.cuda.memory_reserved() / MIB:.0f} MiB", flush=True)


def _settings(scenario: Scenario) -> dict[str, str]:
    return {"PYTORCH_CUDA_ALLOC_CONF": scenario.settings} if scenario.settings else {}


def _only(entry: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: entry[name] for name in names if name in entry}


def main() -> int:
    """The command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="benchmarks.snapshots", description="Allocator histories from a card.")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), help="this one alone, in this process")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.scenario is not None:
        _record(options.scenario, options.out)
        return 0
    command = [sys.executable, "-m", "benchmarks.snapshots", "--out", str(options.out), "--scenario"]
    started = [
        # torch reads its allocator's settings from there when CUDA starts.
        subprocess.Popen([*command, name], env={**os.environ, **_settings(scenario)})
        for name, scenario in SCENARIOS.items()
    ]
    return max(process.wait() for process in started)


if __name__ == "__main__":
    sys.exit(main())
