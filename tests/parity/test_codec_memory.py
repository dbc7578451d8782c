"""Encoding and decoding stay inside their workspace, by the ledger that counts every storage an op makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from forebay.compression import CODE_BITS, DEFAULT, Compression, encoded_nbytes
from forebay.device.ledger import StorageLedger
from forebay.memory import Ledger, Tier
from forebay.runtime.codec import decode, decode_mask, encode, encode_mask
from forebay.units import KiB, MiB

T = TypeVar("T")
TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "small": lambda: torch.randn(1000),
    "large": lambda: torch.randn(300, 1000),
    "bf16": lambda: torch.randn(300, 1000, dtype=torch.bfloat16),
    "transposed": lambda: torch.randn(300, 1000).t(),
    "sliced": lambda: torch.randn(300, 3000)[:, 1000:2000],
    "expanded": lambda: torch.randn(300, 1, 1000).expand(300, 5, 1000),
}
POLICIES = {"256-KiB": Compression(workspace=256 * KiB), "groups-of-8": Compression(group=8, workspace=64 * KiB)}


def counted(work: Callable[[], T]) -> tuple[T, int, int]:
    """What ``work`` returns, and the bytes that it held at the most and at its end."""
    ledger = Ledger(Tier.DEVICE)
    watch = StorageLedger(ledger)
    watch.install()
    watch.activate(True)
    try:
        result = work()
    finally:
        watch.uninstall()
    usage = ledger.usage()
    return result, usage.peak, usage.live


@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", TENSORS)
def test_codes_are_made_and_read_inside_the_workspace(name: str, policy: str, bits: int) -> None:
    chosen, tensor = POLICIES[policy], TENSORS[name]()
    numel, itemsize = 1000 if name == "small" else 300 * 1000, tensor.element_size()
    nbytes, allowed = encoded_nbytes(numel, itemsize, bits, chosen.group), chosen.workspace_nbytes(numel)
    encoded, peak, live = counted(lambda: encode(tensor, bits, torch.Generator(), chosen))
    assert live == nbytes
    # A piece in fp32 at least is made: what is counted is not nothing.
    assert nbytes + 4 * min(numel, chosen.piece) <= peak <= nbytes + allowed
    _, peak, live = counted(lambda: decode(encoded))
    assert live == numel * itemsize
    assert numel * itemsize + 4 * min(numel, chosen.piece) <= peak <= numel * itemsize + allowed


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("gaps", [False, True])
def test_masks_are_made_and_read_inside_the_workspace(dtype: torch.dtype, gaps: bool) -> None:
    policy = POLICIES["256-KiB"]
    tensor = (torch.rand(300, 2000) > 0.5).to(dtype)[:, 500:1500]
    tensor = tensor if gaps else tensor.contiguous()
    nbytes, allowed = 300 * 1000 // 8, policy.workspace_nbytes(300 * 1000)
    mask, peak, live = counted(lambda: encode_mask(tensor, policy))
    assert live == nbytes < peak <= nbytes + allowed
    _, peak, live = counted(lambda: decode_mask(mask))
    assert live == 300 * 1000 * dtype.itemsize < peak <= live + allowed


def test_4_mib_are_enough_for_any_size_as_it_is() -> None:
    tensor = torch.randn(3 << 20, dtype=torch.bfloat16)
    encoded, peak, live = counted(lambda: encode(tensor, 4, torch.Generator()))
    assert peak - live <= DEFAULT.workspace == 4 * MiB
    _, peak, live = counted(lambda: decode(encoded))
    assert peak - live <= 4 * MiB
