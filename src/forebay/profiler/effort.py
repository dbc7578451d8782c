"""How much is measured by ``probe``, as numbers: a test asks for less than a user. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.errors import ConfigError
from forebay.layout import PAGE
from forebay.units import GiB, KiB, MiB

__all__ = ["CPU_EFFORT", "CUDA_EFFORT", "Effort", "Layer"]


@dataclass(frozen=True)
class Layer:
    """A linear layer as a matrix shape: ``tokens`` rows in, ``width`` features to ``hidden`` features."""

    tokens: int
    width: int
    hidden: int

    @property
    def flops(self) -> int:
        """Forward, gradient of the input, gradient of the weight: 2·t·w·h each."""
        return 6 * self.tokens * self.width * self.hidden


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Sizes in bytes, times in seconds.

    Every figure is the median of ``rounds`` short runs, fewer where they would take more than ``bound`` seconds; two
    at least. ``layers`` are tried in order until the next one would be over the bound; the last one tried counts.
    ``pinned_bound`` is the most that is page-locked to see how much can be. Where other programs have more than
    ``company`` of the cores' time meanwhile, nothing is to be believed.
    """

    layers: tuple[Layer, ...]
    rounds: int = 7
    bound: float = 1.2
    copy_sizes: tuple[int, ...] = (64 * KiB, 256 * KiB, MiB, 4 * MiB, 16 * MiB, 64 * MiB, 256 * MiB)
    disk_sizes: tuple[int, ...] = (256 * KiB, MiB, 4 * MiB, 16 * MiB, 64 * MiB)
    disk_file: int = 128 * MiB
    update_elements: int = 16 * 1024 * 1024
    update_dtype: str = "float32"
    elementwise: int = 16 * MiB
    chain: int = 60
    pinned_bound: int = 8 * GiB
    company: float = 0.2

    def __post_init__(self) -> None:
        if not self.layers or self.rounds < 2 or self.bound <= 0:
            raise ConfigError("an effort needs one layer or more, two rounds or more and a bound above 0 seconds")
        for name, sizes in (("copy_sizes", self.copy_sizes), ("disk_sizes", self.disk_sizes)):
            if not sizes or list(sizes) != sorted(set(sizes)) or any(size <= 0 or size % PAGE for size in sizes):
                raise ConfigError(f"{name} must be increasing multiples of {PAGE} bytes, got {sizes}")
        if not 0 <= self.company <= 1:
            raise ConfigError(f"company is a share, from 0 to 1, got {self.company}")
        if self.disk_file < self.disk_sizes[-1]:
            raise ConfigError(f"disk_file must hold the largest of disk_sizes, got {self.disk_file}")


CPU_EFFORT = Effort(
    # The first is for dtypes that this processor computes in software: at 0.5 GFLOP/s it takes 50 ms.
    layers=(Layer(64, 256, 256), Layer(256, 512, 1024), Layer(512, 768, 3072)),
)
CUDA_EFFORT = Effort(
    layers=(Layer(512, 1024, 1024), Layer(2048, 2048, 8192), Layer(8192, 4096, 12288)),
    update_dtype="bfloat16",
    elementwise=256 * MiB,
    chain=1000,
)
