"""How fast activations become fewer bits and come back: bytes/s of the tensor, beside those of a copy of it.

    .venv/bin/python -m benchmarks.activations.codec                                  # cpu, 64 MiB, workspace 4 MiB
    .venv/bin/python -m benchmarks.activations.codec --device cuda --nbytes 256MiB --workspace 64MiB --json

A copy reads and writes every byte once: what the memory can do. An encoding pays off before an offload where its rate
is above that of the link. The rows of a device are measured in turn in one process; compare them with each other, and
only on a machine that does nothing else. Rates are of medians.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch.utils.benchmark import Timer

from benchmarks.case import DeviceKind
from benchmarks.host import code, hardware, versions
from forebay.compression import CODE_BITS, WORKSPACE, Compression, encoded_nbytes
from forebay.runtime.codec import DTYPES, decode, decode_mask, encode, encode_mask
from forebay.units import MiB, format_bytes, format_rate, parse_bytes

__all__ = ["Rate", "main", "rates"]

_SECONDS = 1.0
"""Least time that one row is measured for."""


@dataclass(frozen=True)
class Rate:
    """One row: bytes of the tensor as it is, and a second's worth of them (None: no such direction)."""

    what: str
    dtype: str
    nbytes: int
    encoded_nbytes: int
    encode_bytes_per_second: float
    decode_bytes_per_second: float | None


def rates(device: DeviceKind, nbytes: int, workspace: int, seconds: float = _SECONDS) -> Iterator[Rate]:
    """Measures a copy, the codes of all bits and a mask, for tensors of ``nbytes`` bytes of each dtype."""
    policy = Compression(workspace=workspace)
    generator = torch.Generator(device.value).manual_seed(0)
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        numel = nbytes // dtype.itemsize
        tensor = torch.randn(numel, generator=generator, device=device.value).to(dtype)
        size = tensor.nbytes

        def rate(work: Callable[[], object], size: int = size) -> float:
            # The timer waits for the card, and runs the work once before it counts.
            timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
            return size / timer.blocked_autorange(min_run_time=seconds).median

        yield Rate("copy", name, size, size, rate(tensor.clone), None)
        for bits in CODE_BITS:
            made = encode(tensor, bits, generator, policy)
            yield Rate(
                f"{bits} bits",
                name,
                size,
                encoded_nbytes(numel, dtype.itemsize, bits, policy.group),
                rate(partial(encode, tensor, bits, generator, policy)),
                rate(partial(decode, made)),
            )
        tensor.relu_()
        kept = encode_mask(tensor, policy)
        yield Rate(
            "mask",
            name,
            size,
            encoded_nbytes(numel, dtype.itemsize, 1, policy.group),
            rate(partial(encode_mask, tensor, policy)),
            rate(partial(decode_mask, kept)),
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table, or one JSON object with what it was measured on."""
    parser = argparse.ArgumentParser(description="Bytes/s of encoding and decoding activations.")
    parser.add_argument("--device", type=DeviceKind, choices=list(DeviceKind), default=DeviceKind.CPU)
    parser.add_argument("--nbytes", type=parse_bytes, default=64 * MiB, help="of the tensor")
    parser.add_argument("--workspace", type=parse_bytes, default=WORKSPACE)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    rows = list(rates(options.device, options.nbytes, options.workspace))
    if options.json:
        measured_on = {
            "hardware": asdict(hardware(options.device is DeviceKind.CUDA)),
            "versions": versions(),
            "code": asdict(code()),
            "threads": torch.get_num_threads(),
            "workspace": options.workspace,
        }
        print(json.dumps(measured_on | {"rates": [asdict(row) for row in rows]}, indent=1))
        return 0
    print(f"{'':8} {'dtype':9} {'of':>10} {'as':>10} {'encode':>12} {'decode':>12}")
    for row in rows:
        back = "" if row.decode_bytes_per_second is None else format_rate(row.decode_bytes_per_second)
        print(
            f"{row.what:8} {row.dtype:9} {format_bytes(row.nbytes):>10} {format_bytes(row.encoded_nbytes):>10} "
            f"{format_rate(row.encode_bytes_per_second):>12} {back:>12}"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
