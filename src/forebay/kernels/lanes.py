"""Codes of few bits, ``LANES`` at a time: written in vectors, since what a loop looks up in tables of its own no
compiler puts there.

Everything is what LLVM offers on any processor, but for the lookups: with AVX-512 a table of 16 or 32 entries is one or
two registers and looking up in it one instruction; with AVX2 it is two or four of 8 entries, and a choice between what
each of them says; elsewhere the entries are loaded one by one. The results are the same. Streams: see ``native``.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final, final

from llvmlite import ir
from numba import types
from numba.core import cgutils

from forebay.kernels.codes import LEAST, MOST, OFFSET, RISE, SLOPE, START, START_SLOT, THRESHOLD
from forebay.kernels.native import pointer, tag
from forebay.kernels.shares import BLOCK

__all__ = ["HALF", "LANES", "Code", "Lanes", "constants"]

LANES: Final = 16

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


_FLOAT, _I8, _I32, _I64 = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)
_FLOATS, _BYTES, _INTS = (ir.VectorType(element, LANES) for element in (_FLOAT, _I8, _I32))
_MANTISSA, _ONE_BITS, _SIGN = 0x7FFFFF, 0x3F800000, -(2**31)
_ALIGNS: Final = {8: 1, 16: 2, 32: 4}


@final
class Lanes:
    """Writes vectors of ``LANES`` with ``builder``. ``book``: the stream of tables."""

    def __init__(self, context: Any, builder: Any, book: int) -> None:
        self.builder = builder
        self._book = book
        features = context.codegen().magic_tuple()[2].split(",")
        self._wide, self._narrow = "+avx512f" in features, "+avx2" in features

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

    def lookup(self, table: Any, first: int, places: Any, registers: int = 1) -> Any:
        """Entries ``first + place`` of a table, ``place`` modulo ``registers * LANES``."""
        if not self._wide and self._narrow:
            return self._lookup_by_8(table, first, places, 2 * registers)
        if not self._wide:
            return self._lookup_one_by_one(table, first, places, registers * LANES - 1)
        parts = [self.load(table, ir.Constant(_I64, first + n * LANES), _FLOAT, self._book) for n in range(registers)]
        if registers == 1:
            return self.call("llvm.x86.avx512.permvar.sf.512", _FLOATS, parts[0], places)
        return self.call("llvm.x86.avx512.vpermi2var.ps.512", _FLOATS, parts[0], places, parts[1])

    def _lookup_by_8(self, table: Any, first: int, places: Any, registers: int) -> Any:
        builder, eight = self.builder, ir.VectorType(_FLOAT, 8)
        tables = [
            tag(builder, builder.load(builder.bitcast(at, eight.as_pointer()), align=4), self._book)
            for n in range(registers)
            for at in (pointer(builder, table, ir.Constant(_I64, first + 8 * n), _FLOAT),)
        ]
        halves = []
        for start in (0, 8):
            mask = ir.Constant(ir.VectorType(_I32, 8), list(range(start, start + 8)))
            here = builder.shuffle_vector(places, places, mask)
            found = [self.call("llvm.x86.avx2.permps", eight, part, here) for part in tables]
            bit = 3
            while len(found) > 1:
                # The next bit of the place decides, moved to where a choice looks at it.
                moved = builder.shl(here, ir.Constant(here.type, [31 - bit] * 8))
                upper = builder.icmp_signed("<", moved, ir.Constant(here.type, [0] * 8))
                found = [builder.select(upper, b, a) for a, b in zip(found[::2], found[1::2], strict=True)]
                bit += 1
            halves.append(found[0])
        return builder.shuffle_vector(*halves, ir.Constant(_INTS, list(range(LANES))))

    def _lookup_one_by_one(self, table: Any, first: int, places: Any, mask: int) -> Any:
        builder = self.builder
        places = builder.and_(places, self.integer(mask))
        found = ir.Constant(_FLOATS, ir.Undefined)
        for lane in range(LANES):
            number = ir.Constant(_I32, lane)
            place = builder.add(builder.extract_element(places, number), ir.Constant(_I32, first))
            at = pointer(builder, table, builder.zext(place, _I64), _FLOAT)
            found = builder.insert_element(found, tag(builder, builder.load(at, align=4), self._book), number)
        return found

    # Codes.

    def unpacked(self, held: Any, kind: Code) -> list[Any]:
        """The codes in bytes, as integers: of the elements of these places and, where they share bytes, of those
        ``HALF`` further on."""
        wide = self.builder.zext(held, _INTS)
        if not kind.packs:
            return [wide]
        return [self.builder.and_(wide, self.integer(15)), self.builder.lshr(wide, self.integer(4))]

    def decoded(self, codes: Any, table: Any, kind: Code) -> Any:
        """The values of codes."""
        builder = self.builder
        if kind is Code.LINEAR_4:
            sixteenth = self.number(1 / 16)
            return self.fma(builder.sitofp(codes, _FLOATS), sixteenth, sixteenth)
        if kind is Code.SIGNED_4:
            return self.lookup(table, RISE, codes)
        if kind is Code.SIGNED_8:
            signed = builder.sitofp(builder.sub(codes, self.integer(127)), _FLOATS)
            odd = self.fma(self.floats(self.magnitude(signed)), self.number(2), self.number(1))
        else:
            odd = self.fma(builder.sitofp(codes, _FLOATS), self.number(2), self.number(3))
        exponent = builder.lshr(self.bits(odd), self.integer(23))
        fraction = builder.or_(builder.and_(self.bits(odd), self.integer(_MANTISSA)), self.integer(_ONE_BITS))
        rise, start = (self.lookup(table, first, exponent) for first in (RISE, START))
        value = self.fma(rise, self.floats(fraction), start)
        if kind is Code.UNSIGNED_8:
            return value
        return self.floats(builder.xor(self.bits(value), builder.and_(self.bits(signed), self.integer(_SIGN))))

    def encoded(self, x: Any, table: Any, kind: Code) -> Any:
        """The nearest codes of values between -1 and 1; of NaN, that of 0."""
        builder = self.builder
        if kind is Code.LINEAR_4:
            place = self.fma(x, self.number(16), self.number(-0.5))
            above = builder.fcmp_ordered(">", place, self.number(0))
            return builder.fptosi(builder.select(above, place, self.number(0)), _INTS)
        if kind is Code.UNSIGNED_8:
            return builder.fptosi(self._line(x, table), _INTS)
        zero = self.integer(127 if kind is Code.SIGNED_8 else 7)
        line = self.bits(self._line(self.floats(self.magnitude(x)), table))
        sign = builder.and_(self.bits(x), self.integer(_SIGN))
        code = builder.add(zero, builder.fptosi(self.floats(builder.or_(line, sign)), _INTS))
        # There is no code for -1: the last of the largest decade stands for it.
        return builder.select(builder.icmp_signed(">", code, self.integer(0)), code, self.integer(0))

    def _line(self, x: Any, table: Any) -> Any:
        """The codes of ``x``, 0 or more, before they are rounded down; of a signed code what it is beyond that of 0."""
        builder = self.builder
        least = self.number(LEAST)
        x = builder.select(builder.fcmp_ordered(">", x, least), x, least)
        octave = builder.lshr(self.bits(x), self.integer(23))
        threshold, start = (self.bits(self.lookup(table, first, octave, 2)) for first in (THRESHOLD, START_SLOT))
        # -1 below the threshold: both are positive, and their bits are ordered as they are.
        below = builder.ashr(builder.sub(self.bits(x), threshold), self.integer(31))
        slot = builder.add(start, below)
        line = self.fma(self.lookup(table, SLOPE, slot), x, self.lookup(table, OFFSET, slot))
        most = self.lookup(table, MOST, slot)
        return builder.select(builder.fcmp_ordered("<", line, most), line, most)


def _align(element: Any) -> int:
    return 4 if element is _FLOAT else _ALIGNS[element.width]


def constants(*literals: Any) -> list[int] | None:
    """The values of arguments that are constants; None if one is not."""
    if not all(isinstance(literal, types.IntegerLiteral) for literal in literals):
        return None
    return [literal.literal_value for literal in literals]
