"""Codes on a processor without AVX-512: compiled for one, in a process of its own, a step has the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from hashlib import sha256

import numpy as np
import pytest

from forebay.kernels.adam import adam_scalars
from forebay.kernels.adam_low import adam_low_kernel, codebook
from forebay.kernels.native import Form
from tests.parity.kernel_rig import memory, run
from tests.parity.test_kernels_low_bits import NUMBERS, LowStates

pytestmark = pytest.mark.slow

COUNT = 5 * 256 + 131


def digest(bits: int) -> str:
    """Of everything that two steps have written."""
    held, states = memory(COUNT, Form.BF16, Form.BF16, states=0), LowStates(COUNT, bits)
    kernel = adam_low_kernel(Form.BF16, Form.BF16, bits, coupled=False)
    for step in (1, 2):
        scalars = adam_scalars(step, **NUMBERS, coupled=False, maximize=False)
        run(kernel, [held.row(4) + states.addresses()], scalars, codebook(bits), 1)
    content = [held.master.numpy(), *(t.numpy() for t in (*states.codes, *states.scales))]
    return sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in content)).hexdigest()


@pytest.mark.parametrize("cpu", ["haswell", "x86-64-v2"])
def test_the_processor_changes_no_bit(cpu: str) -> None:
    features = "+avx2,+fma,+f16c" if cpu == "haswell" else ""
    code = "from tests.parity.test_kernels_other_cpu_slow import digest; print(digest(8), digest(4))"
    environment = {**os.environ, "NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=300
    )
    assert found.stdout.split() == [digest(8), digest(4)]
