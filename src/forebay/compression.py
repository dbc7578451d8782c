"""What an activation takes as fewer bits an element, and the policy of making it so. No torch.

Codes
    every element of a group of ``group`` becomes a code of 8, 4 or 2 bits between the smallest and the largest
    element of its group (ActNN, Chen et al., ICML 2021, section 4.1; GACT, Liu et al., ICML 2022). The two are kept
    beside the codes, in the tensor's own dtype: they are elements of it, so that this loses nothing. ActNN keeps a
    minimum and a scale in bf16, rounded, which costs as much for 16-bit tensors and half as much for fp32 ones, but
    moves the codes of a group that is far from 0 and narrow.
Masks
    1 bit an element, exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from forebay.errors import ConfigError
from forebay.units import MiB

__all__ = [
    "CODE_BITS",
    "CODE_DTYPES",
    "DEFAULT",
    "GROUP",
    "MASK_BITS",
    "WORKSPACE",
    "Codes",
    "Compression",
    "encoded_nbytes",
    "groups_of",
]

CODE_BITS = (8, 4, 2)
"""Bits an element that lose precision, the mildest first."""

MASK_BITS = 1
"""Bits an element of a mask, which lose nothing."""

CODE_DTYPES = ("float32", "bfloat16", "float16")
"""What can be made into codes that lose precision."""

_ITEMSIZES = MappingProxyType(
    {
        **dict.fromkeys(("bool", "uint8", "int8"), 1),
        **dict.fromkeys(("float16", "bfloat16", "int16"), 2),
        **dict.fromkeys(("float32", "int32"), 4),
        **dict.fromkeys(("float64", "int64"), 8),
    }
)
"""Bytes of an element of what can be made into a mask."""

GROUP = 256
"""Elements that share a minimum and a maximum, as in ActNN."""

WORKSPACE = 4 * MiB
"""Bytes that making codes, or reading them, takes at most beside its input and its result."""

_CODES_PER_BYTE = 8
# Bytes of workspace an element. The most at a time: a copy in fp32 of what an int64 index found in a tensor with gaps
# (4 + 8 + 8 for a mask of 8-byte numbers); later three fp32 numbers, and fewer for packing. Numbers of a group come on
# top, at most 5 fp32 ones for 8 elements.
_ELEMENT_NBYTES = 24


def _check_group(group: int) -> None:
    if group < _CODES_PER_BYTE or group % _CODES_PER_BYTE:
        raise ConfigError(f"a group is a multiple of {_CODES_PER_BYTE} elements, got {group}")


@dataclass(frozen=True)
class Compression:
    """How tensors are made into codes: ``group`` elements share a minimum and a maximum, and at most ``workspace``
    bytes are used beside input and result. A larger workspace means fewer and larger kernels.

    Raises ``ConfigError`` for a group that is no multiple of 8 (a byte of codes belongs to one group) and for a
    workspace that does not hold the work on one group.
    """

    group: int = GROUP
    workspace: int = WORKSPACE

    def __post_init__(self) -> None:
        _check_group(self.group)
        if self.workspace < self.group * _ELEMENT_NBYTES:
            raise ConfigError(
                f"a workspace of {self.workspace} bytes is too small for groups of {self.group} elements; give "
                f"{self.group * _ELEMENT_NBYTES} or more"
            )

    @property
    def piece(self) -> int:
        """Elements that are worked on at a time: whole groups."""
        return self.workspace // (self.group * _ELEMENT_NBYTES) * self.group

    def workspace_nbytes(self, numel: int) -> int:
        """Bytes that encoding or decoding ``numel`` elements takes at most beside input and result."""
        return min(self.piece, groups_of(numel, self.group) * self.group) * _ELEMENT_NBYTES


DEFAULT = Compression()
"""Groups of 256 elements, 4 MiB to work in."""


def groups_of(numel: int, group: int = GROUP) -> int:
    """Groups that ``numel`` elements fill, the last one perhaps in part."""
    return -(-numel // group)


def encoded_nbytes(numel: int, itemsize: int, bits: int, group: int = GROUP) -> int:
    """Bytes of ``numel`` elements of ``itemsize`` bytes each as ``bits`` bits an element.

    0 bits: as they are. 8, 4, 2: the minimum and the maximum of each group, ``itemsize`` bytes each, then the codes.
    With groups of 256 that is 0.125 bits an element more for 16-bit tensors and 0.25 for fp32. 1: a mask.

    Raises ``ConfigError`` for other bits, a size below 0 or a group that is no multiple of 8.
    """
    if bits not in (0, MASK_BITS, *CODE_BITS):
        raise ConfigError(f"a tensor is kept as 0 (as it is), 8, 4, 2 or 1 bits an element, got {bits}")
    if numel < 0 or itemsize < 1:
        raise ConfigError(f"a tensor has 0 or more elements of 1 or more bytes, got {numel} of {itemsize}")
    _check_group(group)
    if bits == 0:
        return numel * itemsize
    bounds = 0 if bits == MASK_BITS else 2 * groups_of(numel, group) * itemsize
    return bounds + -(-numel * bits // 8)


@dataclass(frozen=True, slots=True)
class Codes:
    """The codes of one storage under ``DEFAULT``: ``numel`` elements of ``dtype`` as ``bits`` bits each.

    Raises ``ConfigError`` for what cannot be made into such codes.
    """

    dtype: str
    numel: int
    bits: int

    def __post_init__(self) -> None:
        dtypes = CODE_DTYPES if self.bits in CODE_BITS else tuple(_ITEMSIZES) if self.bits == MASK_BITS else ()
        if self.dtype not in dtypes:
            raise ConfigError(f"{self.dtype} numbers cannot be kept as {self.bits} bits; {', '.join(dtypes)} can")

    @classmethod
    def of(cls, nbytes: int, dtype: str, bits: int) -> Codes:
        """Of a storage of ``nbytes`` in ``dtype``."""
        return cls(dtype, nbytes // _ITEMSIZES.get(dtype, 1), bits)

    @property
    def itemsize(self) -> int:
        """Bytes of an element before it is encoded."""
        return _ITEMSIZES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the codes."""
        return encoded_nbytes(self.numel, self.itemsize, self.bits, DEFAULT.group)

    @property
    def workspace(self) -> int:
        """Bytes that encoding or decoding takes at most beside tensor and codes."""
        return DEFAULT.workspace_nbytes(self.numel)

    @property
    def pieces(self) -> int:
        """Pieces that are worked on one after the other."""
        return -(-self.numel // DEFAULT.piece)
