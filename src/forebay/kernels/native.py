"""What the kernels say to the compiler: typed access to memory, and arithmetic that is rounded as it is written.

Addresses are integers, so that a tensor of any dtype costs nothing to hand over. Every access names its *stream*:
accesses of different streams never touch the same bytes in one call, which lets the compiler put the loop in vectors
without a test. Nothing is contracted or reordered but what ``fma`` and ``loose_add`` ask for.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = [
    "STREAMS",
    "Apart",
    "Form",
    "Kept",
    "as_float",
    "copy_bytes",
    "fma",
    "greater",
    "load",
    "load_master",
    "look",
    "loose_add",
    "magnitude",
    "pointer",
    "store",
    "store_drawn",
    "store_master",
    "tag",
    "take",
    "with_tie",
    "without_tie",
    "written",
]

STREAMS: Final = 16
"""How many streams a kernel may have. The second half are those of what is written apart (``written``)."""


class Apart(IntFlag):
    """What a kernel writes elsewhere than it reads it, and leaves as it is where it was: the fp32 parameter, or the
    master of a narrower one; the moments. The narrower parameter itself is read only where half of its master is kept:
    then the two halves go together.

    If there is anything, a row of the table is followed by a second one in the same columns, by what is written.
    """

    NOTHING = 0
    WIDE = 1
    MOMENTS = 2


def written(stream: int, apart: bool) -> int:
    """The stream of what is written for what ``stream`` reads: the same in place, another one ``apart``."""
    return stream + STREAMS // 2 if apart else stream


class Form(IntEnum):
    """How a value lies in memory."""

    FP32 = 0
    BF16 = 1
    FP16 = 2

    @property
    def itemsize(self) -> int:
        """Bytes of one value."""
        return 4 if self is Form.FP32 else 2


class Kept(IntEnum):
    """How what an update makes of a parameter is kept."""

    WIDE = 0
    """In fp32: the parameter itself, or the whole master of a narrower one."""
    LOWER = 1
    """The lower half of the master of a parameter in bf16, which is the other half (``forebay.states.Masters``)."""
    DRAWN = 2
    """In bf16, rounded up or down by chance: the parameter itself, which has no master."""

    @property
    def itemsize(self) -> int:
        """Bytes of one value."""
        return 4 if self is Kept.WIDE else 2

    @property
    def form(self) -> Form:
        """How a value lies; that of a half lies with the other one."""
        return Form.BF16 if self is Kept.DRAWN else Form.FP32

    def check(self, parameter: Form) -> None:
        """Raises ``ValueError`` for parameters that are not kept so."""
        if self is not Kept.WIDE and parameter is not Form.BF16:
            raise ValueError("only parameters in bf16 have masters as halves, or none")


_FLOAT: Final = ir.FloatType()
_HALF: Final = ir.HalfType()
_I8: Final = ir.IntType(8)
_I16: Final = ir.IntType(16)
_I32: Final = ir.IntType(32)
_I64: Final = ir.IntType(64)
_QUIET_NAN: Final = 0x7FC0


def tag(builder: Any, access: Any, stream: int) -> Any:
    """Says that ``access`` shares no byte with accesses of other streams (LLVM's ``alias.scope`` and ``noalias``)."""
    module = builder.module
    domain = module.add_metadata(["forebay"])
    scopes = [module.add_metadata([f"forebay stream {number}", domain]) for number in range(STREAMS)]
    access.set_metadata("alias.scope", module.add_metadata([scopes[stream]]))
    access.set_metadata("noalias", module.add_metadata([s for n, s in enumerate(scopes) if n != stream]))
    return access


def pointer(builder: Any, address: Any, index: Any, element: Any) -> Any:
    """Where the ``element`` at ``index`` of what begins at ``address`` is."""
    return builder.gep(builder.inttoptr(address, element.as_pointer()), [index])


def _access(form: Any, stream: Any) -> tuple[Form, int] | None:
    if not isinstance(form, types.IntegerLiteral) or not isinstance(stream, types.IntegerLiteral):
        return None
    return Form(form.literal_value), stream.literal_value


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def load(context: Any, address: Any, index: Any, form: Any, stream: Any) -> Any:
    """The value at ``index`` of what begins at ``address``, widened to fp32. ``form`` and ``stream``: constants."""
    found = _access(form, stream)
    if found is None:
        return None
    kind, number = found

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        where, at = arguments[0], arguments[1]
        if kind is Form.FP32:
            return tag(builder, builder.load(pointer(builder, where, at, _FLOAT), align=4), number)
        raw = tag(builder, builder.load(pointer(builder, where, at, _I16), align=2), number)
        if kind is Form.FP16:
            return builder.fpext(builder.bitcast(raw, _HALF), _FLOAT)
        return builder.bitcast(builder.shl(builder.zext(raw, _I32), ir.Constant(_I32, 16)), _FLOAT)

    return types.float32(types.int64, types.int64, form, stream), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def store(context: Any, address: Any, index: Any, value: Any, form: Any, stream: Any) -> Any:
    """Writes an fp32 ``value``, rounded to nearest, ties to even, where the form is narrower."""
    found = _access(form, stream)
    if found is None:
        return None
    kind, number = found

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        where, at, given = arguments[:3]
        if kind is Form.FP32:
            tag(builder, builder.store(given, pointer(builder, where, at, _FLOAT), align=4), number)
        else:
            narrow = (
                builder.bitcast(builder.fptrunc(given, _HALF), _I16) if kind is Form.FP16 else _to_bf16(builder, given)
            )
            tag(builder, builder.store(narrow, pointer(builder, where, at, _I16), align=2), number)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, form, stream), generate


def _to_bf16(builder: Any, value: Any) -> Any:
    bits = builder.bitcast(value, _I32)
    odd = builder.and_(builder.lshr(bits, ir.Constant(_I32, 16)), ir.Constant(_I32, 1))
    return _narrowed(builder, value, builder.add(bits, builder.add(odd, ir.Constant(_I32, 0x7FFF))))


def _narrowed(builder: Any, value: Any, rounded: Any) -> Any:
    """The upper half of ``rounded``, as 16 bits; a quiet NaN where ``value`` is one."""
    kept = builder.trunc(builder.lshr(rounded, ir.Constant(_I32, 16)), _I16)
    # A NaN with a full mantissa would carry into the sign and come out as 0.
    return builder.select(builder.fcmp_unordered("uno", value, value), ir.Constant(_I16, _QUIET_NAN), kept)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def store_drawn(context: Any, address: Any, index: Any, value: Any, salt: Any, stream: Any) -> Any:
    """Writes an fp32 ``value`` as bf16, rounded up or down by chance so that the expectation is the value itself.

    The chance is a hash of ``salt`` and ``index`` (the finalizer of Murmur3 with the constants of Wellons' lowbias32):
    the same in every run and for every cut into shares.
    """
    if not isinstance(stream, types.IntegerLiteral):
        return None
    number = stream.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        where, at, given, key = arguments[:4]
        narrow = _drawn(builder, given, at, key)
        tag(builder, builder.store(narrow, pointer(builder, where, at, _I16), align=2), number)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.int64, stream), generate


def _drawn(builder: Any, value: Any, index: Any, salt: Any) -> Any:
    """The bits of bf16, up or down by chance."""
    word = builder.add(builder.trunc(index, _I32), builder.trunc(salt, _I32))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        word = builder.xor(word, builder.lshr(word, ir.Constant(_I32, shift)))
        word = builder.mul(word, ir.Constant(_I32, factor))
    word = builder.lshr(builder.xor(word, builder.lshr(word, ir.Constant(_I32, 16))), ir.Constant(_I32, 16))
    return _narrowed(builder, value, builder.add(builder.bitcast(value, _I32), word))


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def load_master(
    context: Any, parameter: Any, master: Any, tie: Any, index: Any, kept: Any, own: Any, stream: Any
) -> Any:
    """The fp32 value at ``index`` of what begins at ``master``, ``kept`` so. Of one kept as its lower half the upper
    one, rounded to bf16, is at that of ``parameter``, and the sign of the fp32 ``tie`` says what these leave unsaid
    (``forebay.states.Masters``). ``own`` and ``stream`` are the streams of the two. The last three are constants."""
    if not all(isinstance(given, types.IntegerLiteral) for given in (kept, own, stream)):
        return None
    how, streams = Kept(kept.literal_value), (own.literal_value, stream.literal_value)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        at = arguments[3]
        if how is Kept.WIDE:
            return tag(builder, builder.load(pointer(builder, arguments[1], at, _FLOAT), align=4), streams[1])
        if how is Kept.DRAWN:
            raw = tag(builder, builder.load(pointer(builder, arguments[1], at, _I16), align=2), streams[1])
            return builder.bitcast(builder.shl(builder.zext(raw, _I32), ir.Constant(_I32, 16)), _FLOAT)
        upper, lower = (
            builder.sext(tag(builder, builder.load(pointer(builder, where, at, _I16), align=2), number), _I32)
            for where, number in zip(arguments[:2], streams, strict=True)
        )
        below = builder.lshr(builder.bitcast(arguments[2], _I32), ir.Constant(_I32, 31))
        upper = builder.shl(builder.add(upper, below), ir.Constant(_I32, 16))
        return builder.bitcast(builder.add(upper, lower), _FLOAT)

    return types.float32(types.int64, types.int64, types.float32, types.int64, kept, own, stream), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def store_master(context: Any, address: Any, index: Any, value: Any, salt: Any, kept: Any, stream: Any) -> Any:
    """Writes an fp32 ``value``, ``kept`` so; by chance, with ``salt``, as ``store_drawn`` does. The last two are
    constants."""
    if not isinstance(kept, types.IntegerLiteral) or not isinstance(stream, types.IntegerLiteral):
        return None
    how, number = Kept(kept.literal_value), stream.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        where, at, given, key = arguments[:4]
        if how is Kept.WIDE:
            tag(builder, builder.store(given, pointer(builder, where, at, _FLOAT), align=4), number)
        else:
            lower = how is Kept.LOWER
            half = builder.trunc(builder.bitcast(given, _I32), _I16) if lower else _drawn(builder, given, at, key)
            tag(builder, builder.store(half, pointer(builder, where, at, _I16), align=2), number)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.int64, kept, stream), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def without_tie(context: Any, value: Any, kept: Any) -> Any:
    """``value``, without its sign where masters are ``kept`` (a constant) as their lower halves."""
    if not isinstance(kept, types.IntegerLiteral):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if kept.literal_value != Kept.LOWER:
            return arguments[0]
        bits = builder.and_(builder.bitcast(arguments[0], _I32), ir.Constant(_I32, 0x7FFFFFFF))
        return builder.bitcast(bits, _FLOAT)

    return types.float32(types.float32, kept), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def with_tie(context: Any, value: Any, master: Any, kept: Any) -> Any:
    """``value``. Where masters are ``kept`` (a constant) as their lower halves it is 0 or more, and gets a minus sign
    where ``master`` is half-way between two numbers of bf16 and the even one is below it."""
    if not isinstance(kept, types.IntegerLiteral):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if kept.literal_value != Kept.LOWER:
            return arguments[0]
        last = builder.and_(builder.bitcast(arguments[1], _I32), ir.Constant(_I32, 0x1FFFF))
        tie = builder.icmp_unsigned("==", last, ir.Constant(_I32, 0x8000))
        sign = builder.select(tie, ir.Constant(_I32, -(2**31)), ir.Constant(_I32, 0))
        return builder.bitcast(builder.or_(builder.bitcast(arguments[0], _I32), sign), _FLOAT)

    return types.float32(types.float32, types.float32, kept), generate


@intrinsic  # type: ignore[untyped-decorator]
def copy_bytes(context: Any, source: Any, target: Any, count: Any) -> Any:
    """Copies ``count`` bytes. Belongs to no stream: whatever is tagged stays on its side of it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        places = [builder.inttoptr(address, _I8.as_pointer()) for address in arguments[:2]]
        cgutils.raw_memcpy(builder, places[1], places[0], arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def take(context: Any, counter: Any) -> Any:
    """What the int64 at the address ``counter`` was; it is one more now. No two threads are told the same."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        where = builder.inttoptr(arguments[0], _I64.as_pointer())
        # Nothing else hangs on it: what shares read and write, no two of them share.
        return builder.atomic_rmw("add", where, ir.Constant(_I64, 1), "monotonic")

    return types.int64(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def look(context: Any, address: Any, index: Any) -> Any:
    """The int64 at ``index`` of those that begin at ``address``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(pointer(builder, arguments[0], arguments[1], _I64), align=8)

    return types.int64(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def magnitude(context: Any, value: Any) -> Any:
    """The bits of ``abs(value)``, fp32, as an integer: they are ordered as the values are, and NaN above all."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.and_(builder.bitcast(arguments[0], _I32), ir.Constant(_I32, 0x7FFFFFFF))

    return types.int32(types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def as_float(context: Any, bits: Any) -> Any:
    """The fp32 value with these bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _FLOAT)

    return types.float32(types.int32), generate


@intrinsic  # type: ignore[untyped-decorator]
def greater(context: Any, a: Any, b: Any) -> Any:
    """The greater of two 32-bit integers."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.select(builder.icmp_signed(">", *arguments), *arguments)

    return types.int32(types.int32, types.int32), generate


@intrinsic  # type: ignore[untyped-decorator]
def fma(context: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` in fp32, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def loose_add(context: Any, a: Any, b: Any) -> Any:
    """``a + b`` in fp32 where the order of a long sum does not matter: the compiler may keep several partial sums."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fadd(*arguments, flags=["reassoc"])

    return types.float32(types.float32, types.float32), generate
