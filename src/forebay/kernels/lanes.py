"""Codes of few bits, ``WIDE`` bytes of them at a time: written in vectors, since what a loop looks up in tables of its
own no compiler puts there.

Arithmetic is done on ``LANES`` elements, bytes on ``WIDE``. Everything is what LLVM offers on any processor, but for
lookups and moves of bytes. With AVX-512 a table of 16 entries is one register and looking up in it one instruction;
with AVX2 it is two of 8 entries, and a choice between what each of them says; elsewhere the entries are loaded one by
one. Where bytes can be looked up too (AVX-512 VBMI), the values of signed codes are put together from bytes, and codes
are gathered from their elements. The results are the same. Streams: see ``native``.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final, final

from llvmlite import ir
from numba import types
from numba.core import cgutils

from forebay.kernels.codes import GATHER, LEAST, LOWER, MOST, OFFSET, PLANES, RISE, SLOPE, START
from forebay.kernels.native import pointer, tag
from forebay.kernels.shares import BLOCK

__all__ = ["HALF", "LANES", "WIDE", "Code", "Lanes", "constants"]

LANES: Final = 16

WIDE: Final = 4 * LANES
"""Bytes of a register of AVX-512."""

HALF: Final = BLOCK // 2


class Code(IntEnum):
    """How a moment is encoded (``codes``). With 4 bits the low half of byte ``i`` of a block is element ``i``, the high
    half element ``HALF + i``, so that neighbours lie beside each other in vectors too."""

    SIGNED_8 = 0
    UNSIGNED_8 = 1
    SIGNED_4 = 2
    LINEAR_4 = 3

    @property
    def packs(self) -> bool:
        """Whether a byte holds two elements."""
        return self in (Code.SIGNED_4, Code.LINEAR_4)

    @property
    def width(self) -> int:
        """Bytes of codes that are handled at once. Of codes that share bytes no more than a vector of their elements:
        with four there are not registers enough for the two moments of all of them."""
        return LANES if self.packs else WIDE


_FLOAT, _I8, _I32, _I64 = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)
_FLOATS, _BYTES, _INTS = (ir.VectorType(element, LANES) for element in (_FLOAT, _I8, _I32))
_CODES, _BITS, _SHORTS = (
    ir.VectorType(_I8, WIDE),
    ir.VectorType(ir.IntType(1), LANES),
    ir.VectorType(ir.IntType(16), LANES),
)
_SIGN: Final = -(2**31)
_ALIGNS: Final = {8: 1, 16: 2, 32: 4}


class _BFloat(ir.Type):  # type: ignore[misc]  # llvmlite has none
    def _to_string(self) -> str:
        return "bfloat"


_BFLOATS = ir.VectorType(_BFloat(), LANES)
_NAN_OR_TINY: Final = 0b10100001
"""Of ``vfpclassps``: NaN, quiet or not, and what is less than the least normal number, but 0."""

_LARGER_SIZE: Final = 0b1011
"""Of ``vrangeps``: the larger magnitude, without its sign."""


@final
class Lanes:
    """Writes vectors of ``LANES`` with ``builder``. ``book``: the stream of tables. ``rounds``: the processor rounds to
    bf16 (``rounded``)."""

    def __init__(self, context: Any, builder: Any, book: int) -> None:
        self.builder = builder
        self._book = book
        features = context.codegen().magic_tuple()[2].split(",")
        self._wide, self._narrow = "+avx512f" in features, "+avx2" in features
        self._bytes, self._ranges = "+avx512vbmi" in features, "+avx512dq" in features
        self.rounds = self._wide and self._ranges and "+avx512bf16" in features

    def splat(self, value: Any) -> Any:
        """``value`` in all lanes."""
        empty = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
        one = self.builder.insert_element(empty, value, ir.Constant(_I32, 0))
        return self.builder.shuffle_vector(one, empty, ir.Constant(_INTS, [0] * LANES))

    def number(self, value: float) -> Any:
        """The fp32 ``value`` in all lanes."""
        return ir.Constant(_FLOATS, [value] * LANES)

    def integer(self, value: int) -> Any:
        """The 32-bit ``value`` in all lanes."""
        return ir.Constant(_INTS, [value] * LANES)

    def bits(self, value: Any) -> Any:
        """The bits of fp32 lanes."""
        return self.builder.bitcast(value, _INTS)

    def floats(self, value: Any) -> Any:
        """The fp32 lanes with these bits."""
        return self.builder.bitcast(value, _FLOATS)

    def magnitude(self, value: Any) -> Any:
        """The bits of the absolute values: ordered as these are, and NaN above all."""
        return self.builder.and_(self.bits(value), self.integer(~_SIGN))

    def call(self, name: str, result: Any, *arguments: Any) -> Any:
        """An intrinsic of LLVM."""
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), arguments)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """``a * b + c``, rounded once."""
        return self.call(f"llvm.fma.v{LANES}f32", _FLOATS, a, b, c)

    def rounded(self, value: Any) -> tuple[Any, Any]:
        """fp32 as the bits of bf16, to nearest, ties to even; and where that is not so: NaN is another one, and what is
        less than the least normal number becomes 0. Only where the processor ``rounds``."""
        narrow = self.call("llvm.x86.avx512bf16.cvtneps2bf16.512", _BFLOATS, value)
        kind = ir.Constant(_I32, _NAN_OR_TINY)
        return self.builder.bitcast(narrow, _SHORTS), self.call("llvm.x86.avx512.fpclass.ps.512", _BITS, value, kind)

    def load(self, address: Any, index: Any, element: Any, stream: int) -> Any:
        """The ``LANES`` elements from ``index``."""
        vector = ir.VectorType(element, LANES)
        where = self.builder.bitcast(pointer(self.builder, address, index, element), vector.as_pointer())
        return tag(self.builder, self.builder.load(where, align=_align(element)), stream)

    def store(self, address: Any, index: Any, value: Any, stream: int) -> None:
        """Writes ``LANES`` elements."""
        element = value.type.element
        where = self.builder.bitcast(pointer(self.builder, address, index, element), value.type.as_pointer())
        tag(self.builder, self.builder.store(value, where, align=_align(element)), stream)

    def lookup(self, table: Any, first: int, places: Any) -> Any:
        """Entries ``first + place`` of a table, ``place`` modulo 16."""
        if self._wide:
            part = self.load(table, ir.Constant(_I64, first), _FLOAT, self._book)
            return self.call("llvm.x86.avx512.permvar.sf.512", _FLOATS, part, places)
        return (
            self._lookup_by_8(table, first, places) if self._narrow else self._lookup_one_by_one(table, first, places)
        )

    def _lookup_by_8(self, table: Any, first: int, places: Any) -> Any:
        builder, eight = self.builder, ir.VectorType(_FLOAT, 8)
        tables = [
            tag(builder, builder.load(builder.bitcast(at, eight.as_pointer()), align=4), self._book)
            for n in range(2)
            for at in (pointer(builder, table, ir.Constant(_I64, first + 8 * n), _FLOAT),)
        ]
        halves = []
        for start in (0, 8):
            mask = ir.Constant(ir.VectorType(_I32, 8), list(range(start, start + 8)))
            here = builder.shuffle_vector(places, places, mask)
            low, high = (self.call("llvm.x86.avx2.permps", eight, part, here) for part in tables)
            # The fourth bit of the place decides, moved to where a choice looks at it.
            moved = builder.shl(here, ir.Constant(here.type, [28] * 8))
            upper = builder.icmp_signed("<", moved, ir.Constant(here.type, [0] * 8))
            halves.append(builder.select(upper, high, low))
        return builder.shuffle_vector(*halves, ir.Constant(_INTS, list(range(LANES))))

    def _lookup_one_by_one(self, table: Any, first: int, places: Any) -> Any:
        builder = self.builder
        places = builder.and_(places, self.integer(LANES - 1))
        found = ir.Constant(_FLOATS, ir.Undefined)
        for lane in range(LANES):
            number = ir.Constant(_I32, lane)
            place = builder.add(builder.extract_element(places, number), ir.Constant(_I32, first))
            at = pointer(builder, table, builder.zext(place, _I64), _FLOAT)
            found = builder.insert_element(found, tag(builder, builder.load(at, align=4), self._book), number)
        return found

    # Codes.

    def decoded(self, address: Any, place: Any, stream: int, table: Any, kind: Code) -> list[Any]:
        """The values of the codes in the ``kind.width`` bytes from ``place``, ``LANES`` at a time; where two share a
        byte, those of the low halves and then those of the high ones."""
        if kind is Code.SIGNED_8 and self._bytes:
            return self._decoded_by_bytes(address, place, stream, table)
        builder, made = self.builder, []
        for start in range(0, kind.width, LANES):
            here = builder.add(place, ir.Constant(_I64, start))
            whole = builder.zext(self.load(address, here, _I8, stream), _INTS)
            if kind.packs:
                parts = [builder.and_(whole, self.integer(15)), builder.lshr(whole, self.integer(4))]
            else:
                parts = [whole]
            made += [self._values(codes, table, kind) for codes in parts]
        return made

    def _values(self, codes: Any, table: Any, kind: Code) -> Any:
        """The values of codes."""
        builder = self.builder
        if kind is Code.LINEAR_4:
            sixteenth = self.number(1 / 16)
            return self.fma(builder.sitofp(codes, _FLOATS), sixteenth, sixteenth)
        if kind is Code.SIGNED_4:
            return self.lookup(table, RISE, codes)
        if kind is Code.UNSIGNED_8:
            return self._by_decade(self.fma(builder.sitofp(codes, _FLOATS), self.number(2), self.number(3)), table)
        signed = builder.sitofp(builder.sub(codes, self.integer(127)), _FLOATS)
        odd = self.fma(self.floats(self.magnitude(signed)), self.number(2), self.number(1))
        value = self.bits(self._by_decade(odd, table))
        return self.floats(builder.xor(value, builder.and_(self.bits(signed), self.integer(_SIGN))))

    def _by_decade(self, odd: Any, table: Any) -> Any:
        """The values of magnitude codes, of which ``odd`` is twice and one more."""
        exponent = self.builder.lshr(self.bits(odd), self.integer(23))
        rise, start = (self.lookup(table, first, exponent) for first in (RISE, START))
        return self.fma(rise, odd, start)

    def _decoded_by_bytes(self, address: Any, place: Any, stream: int, table: Any) -> list[Any]:
        """Signed 8-bit codes: each of the four bytes of a value is looked up, for ``WIDE`` codes at once."""
        builder = self.builder
        # What follows mixes two registers within each of their quarters. This order comes out of it as it went in.
        order = [4 * part + quarter for quarter in range(4) for part in range(4)]
        codes = self._load_wide(address, place, _I8, WIDE, stream)
        codes = builder.bitcast(self._shuffled(builder.bitcast(codes, _INTS), order), _CODES)
        size = self.call(
            f"llvm.abs.v{WIDE}i8", _CODES, builder.sub(codes, _same(127, _CODES)), ir.Constant(ir.IntType(1), 0)
        )
        entry, sign = builder.sub(size, _same(1, _CODES)), builder.and_(builder.not_(codes), _same(-128, _CODES))
        whole = builder.icmp_signed("!=", size, _same(0, _CODES))
        parts = []
        for part in range(4):
            low, high = (self._table_bytes(table, PLANES + 2 * LANES * part + half) for half in (0, LANES))
            found = self._looked_up(low, entry, high)
            parts.append(builder.select(whole, builder.or_(found, sign) if part == 3 else found, _same(0, _CODES)))
        pairs = [self._interleaved(parts[first], parts[first + 1], 1) for first in (0, 2)]
        made = [self._interleaved(low, high, 2) for low, high in zip(*pairs, strict=True)]
        return [builder.bitcast(values, _FLOATS) for both in made for values in both]

    def encoded(self, values: list[Any], table: Any, kind: Code) -> Any:
        """The nearest codes of ``kind.width`` values between -1 and 1, in bytes; of NaN, that of 0."""
        builder = self.builder
        if kind is Code.LINEAR_4:
            return self._gathered([self._linear(x) for x in values], table)
        sizes = self._gathered([self._beyond_zero(x, table) for x in values], table)
        if kind is Code.UNSIGNED_8:
            return sizes
        zero = _same(127 if kind is Code.SIGNED_8 else 7, sizes.type)
        signs = self._gathered([self.bits(x) for x in values], table, last=True)
        below = builder.icmp_signed("<", signs, _same(0, sizes.type))
        # There is no code for -1: the last of the largest decade stands for it.
        down = self.call(f"llvm.usub.sat.v{sizes.type.count}i8", sizes.type, zero, sizes)
        return builder.select(below, down, builder.add(zero, sizes))

    def joined(self, low: Any, high: Any) -> Any:
        """Bytes of two codes."""
        return self.builder.or_(low, self.builder.shl(high, _same(4, high.type)))

    def _linear(self, x: Any) -> Any:
        place = self.fma(x, self.number(16), self.number(-0.5))
        above = self.builder.fcmp_ordered(">", place, self.number(0))
        return self.builder.fptosi(self.builder.select(above, place, self.number(0)), _INTS)

    def _beyond_zero(self, x: Any, table: Any) -> Any:
        """The codes of the magnitudes of ``x``, as they are beyond that of 0."""
        builder = self.builder
        x = self._magnitude_or_least(x)
        bits, octaves = self.bits(x), self.integer(24)
        lower = self.bits(self.lookup(table, LOWER, builder.lshr(bits, octaves)))
        place = builder.lshr(builder.sub(bits, lower), octaves)
        line = self.fma(self.lookup(table, SLOPE, place), x, self.lookup(table, OFFSET, place))
        most = self.lookup(table, MOST, place)
        return builder.fptosi(builder.select(builder.fcmp_ordered("<", line, most), line, most), _INTS)

    def _magnitude_or_least(self, x: Any) -> Any:
        builder, least = self.builder, self.number(LEAST)
        if self._wide and self._ranges:
            whole, current = ir.Constant(ir.IntType(16), -1), ir.Constant(_I32, 4)
            larger = ir.Constant(_I32, _LARGER_SIZE)
            return self.call("llvm.x86.avx512.mask.range.ps.512", _FLOATS, x, least, larger, least, whole, current)
        x = self.floats(self.magnitude(x))
        return builder.select(builder.fcmp_ordered(">", x, least), x, least)

    # Bytes.

    def _gathered(self, vectors: list[Any], table: Any, *, last: bool = False) -> Any:
        """The first byte of every element, in order, or the ``last``."""
        builder = self.builder
        if not self._bytes or LANES * len(vectors) < WIDE:
            if last:
                vectors = [builder.lshr(vector, self.integer(24)) for vector in vectors]
            return self._joined_parts([builder.trunc(vector, _BYTES) for vector in vectors])
        # From the table: of a constant the compiler makes several instructions.
        places = self._table_bytes(table, GATHER + LANES * last)
        halves = [
            self._looked_up(builder.bitcast(low, _CODES), places, builder.bitcast(high, _CODES))
            for low, high in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        return builder.shuffle_vector(*halves, _mask([*range(WIDE // 2), *range(WIDE, WIDE + WIDE // 2)]))

    def _table_bytes(self, table: Any, first: int) -> Any:
        return self.builder.bitcast(self.load(table, ir.Constant(_I64, first), _FLOAT, self._book), _CODES)

    def _looked_up(self, low: Any, places: Any, high: Any) -> Any:
        """Bytes of two registers, ``places`` modulo 128."""
        return self.call("llvm.x86.avx512.vpermi2var.qi.512", _CODES, low, places, high)

    def _joined_parts(self, parts: list[Any]) -> Any:
        while len(parts) > 1:
            count = parts[0].type.count
            mask = _mask(list(range(2 * count)))
            parts = [self.builder.shuffle_vector(a, b, mask) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    def _interleaved(self, a: Any, b: Any, size: int) -> list[Any]:
        """``size`` bytes of ``a``, then as many of ``b``: of the first half of each quarter, and of the second."""
        found = []
        for half in (0, 8):
            mask = [
                16 * quarter + half + size * step + byte + WIDE * other
                for quarter in range(4)
                for step in range(8 // size)
                for other in (0, 1)
                for byte in range(size)
            ]
            found.append(self.builder.shuffle_vector(a, b, _mask(mask)))
        return found

    def _shuffled(self, vector: Any, order: list[int]) -> Any:
        return self.builder.shuffle_vector(vector, vector, _mask(order))

    def _load_wide(self, address: Any, index: Any, element: Any, count: int, stream: int) -> Any:
        vector = ir.VectorType(element, count)
        where = self.builder.bitcast(pointer(self.builder, address, index, element), vector.as_pointer())
        return tag(self.builder, self.builder.load(where, align=_align(element)), stream)


def _same(value: int, vector: Any) -> Any:
    return ir.Constant(vector, [value] * vector.count)


def _mask(places: list[int]) -> Any:
    return ir.Constant(ir.VectorType(_I32, len(places)), places)


def _align(element: Any) -> int:
    return 4 if element is _FLOAT else _ALIGNS[element.width]


def constants(*literals: Any) -> list[int] | None:
    """The values of arguments that are constants; None if one is not."""
    if not all(isinstance(literal, types.IntegerLiteral) for literal in literals):
        return None
    return [literal.literal_value for literal in literals]
