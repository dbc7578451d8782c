"""Some of the tests that need a CUDA device, on the emulated card (``tests/card``); ``scripts/card`` runs them all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.card.building import why_not

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can be made here")

LATE = """
import tests.card.emulated as card, torch
runtime, side, event = torch.cuda.cudart(), torch.cuda.Stream(), torch.cuda.Event()

def copied(to, source):
    with torch.cuda.stream(side):
        to.copy_(source, non_blocking=True)
        event.record(side)

here, there = torch.ones(8), torch.zeros(8, device="cuda")
runtime.cudaHostRegister(here.data_ptr(), here.nbytes, 0)
copied(there, here)
seen = [there.sum().item()]  # nobody has waited
torch.cuda.current_stream().wait_event(event)
seen.append(there.sum().item())
here.fill_(2)
copied(there, here)
here.fill_(3)  # before the copy has read it
torch.cuda.synchronize()
seen.append(there.sum().item())
copied(torch.zeros(8, device="cuda"), here)  # memory that nobody holds
torch.cuda.synchronize()
print(seen, card.lost())
try:
    there + torch.ones(8)
except RuntimeError as error:
    print(error)
torch.cuda.set_per_process_memory_fraction(2048 / card.TOTAL)
try:
    torch.zeros(1024, device="cuda")
except torch.OutOfMemoryError as error:
    print(error)
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)


def test_it_shows_who_does_not_wait_and_what_is_elsewhere() -> None:
    told = run("-c", LATE).stdout.splitlines()
    assert told[0] == "[0.0, 8.0, 24.0] 1"
    assert told[1].startswith("Expected all tensors to be on the same device")
    assert told[2] == "CUDA out of memory. Tried to allocate 4096 bytes."


@pytest.mark.thinned(5)
@pytest.mark.parametrize(
    ("file", "some"),
    [
        ("test_cuda_device", "not real"),
        ("test_streaming_cuda", "llama and dtype0"),
        ("test_optimizers_cuda", "muon"),
        ("test_update_ops_cuda", "lion"),
        ("test_plans_cuda", "test_every_policy and (stream-recompute or offload-all)"),
    ],
)
def test_what_needs_a_card_runs_on_it(file: str, some: str) -> None:
    emulated = ("-p", "tests.card.emulated", "-p", "no:cacheprovider", "-n", "0", "-q")
    done = run("-m", "pytest", *emulated, f"tests/gpu/{file}.py", "-k", some)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
