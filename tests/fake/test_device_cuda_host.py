"""What can be said of the CUDA device where there is none."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from forebay.device.cuda import CudaDevice, requested_bytes
from forebay.errors import ModelError

SETTINGS = """
import os, sys
import torch
from forebay.device.cuda import configure_allocator
for mine in sys.argv[1:]:
    if os.fork() == 0:
        os.environ["PYTORCH_ALLOC_CONF"] = mine
        configure_allocator()
        print(torch._C._accelerator_getAllocatorSettings(), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.parametrize(
    ("message", "nbytes"),
    [
        ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity", 20 * 2**20),
        ("CUDA out of memory. Tried to allocate 1.50 GiB.", 3 * 2**29),
        ("CUDA out of memory. Tried to allocate 512.00 KiB.", 512 * 2**10),
        ("CUDA out of memory. Tried to allocate 300 bytes.", 300),
        ("Allocation on device 0 would exceed allowed memory. (out of memory)", None),
    ],
)
def test_the_request_is_read_from_torch_s_message(message: str, nbytes: int | None) -> None:
    assert requested_bytes(message) == nbytes


def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(ModelError, match="no CUDA device 99"):
        CudaDevice(99)


@pytest.mark.skipif(torch.cuda.is_available(), reason="reads the settings back without starting CUDA")
def test_the_allocator_is_configured_beside_the_user_s_settings() -> None:
    """In children of one process, which imports torch for all of them: a setting is read when it is first asked for."""
    table = {
        "": "expandable_segments:True",
        "max_split_size_mb:128": "max_split_size_mb:128,expandable_segments:True",
        "expandable_segments:False": "expandable_segments:False",
    }
    done = subprocess.run([sys.executable, "-c", SETTINGS, *table], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == list(table.values())
