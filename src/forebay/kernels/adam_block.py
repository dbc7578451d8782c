"""Adam over one block of elements whose moments are codes, in vectors and two loops. The operations are ``adam``'s.

``begin_block`` decodes the moments and moves them on; then their largest are known, which are the new scales.
``finish_block`` moves the parameters and encodes the moments: what encodes runs while the divisions and the root of the
step go on. With all but the encoding in one loop a processor has no room for enough of its turns at a time.
"""

from __future__ import annotations

from typing import Any, Final, final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from forebay.kernels.lanes import HALF, LANES, Code, Lanes, constants
from forebay.kernels.native import Apart, Form, written
from forebay.kernels.shares import BLOCK

__all__ = ["GRADIENT", "OWN", "SCALES", "TARGET", "begin_block", "finish_block"]

GRADIENT, TARGET, FIRST, SECOND, BOOK, OWN, SCALES, CODES = range(8)
"""Streams: gradient, master, the two blocks of new moments, what is only read, the parameter, scales, codes."""

_FLOAT, _HALF_FLOAT, _I16, _I32, _I64 = (
    ir.FloatType(),
    ir.HalfType(),
    ir.IntType(16),
    ir.IntType(32),
    ir.IntType(64),
)
_FLOATS, _INTS, _SHORTS, _BITS = (ir.VectorType(element, LANES) for element in (_FLOAT, _I32, _I16, ir.IntType(1)))
_QUIET_NAN: Final = 0x7FC0


def _kinds(bits: int) -> tuple[Code, Code]:
    return (Code.SIGNED_8, Code.UNSIGNED_8) if bits == 8 else (Code.SIGNED_4, Code.LINEAR_4)


def _places(builder: Any, kind: Code) -> Any:
    """A loop over the bytes of a block's codes, ``kind.width`` at a time."""
    zero, step = ir.Constant(_I64, 0), ir.Constant(_I64, kind.width)
    return cgutils.for_range_slice(builder, zero, ir.Constant(_I64, HALF if kind.packs else BLOCK), step, intp=_I64)


def _parts(builder: Any, place: Any, kind: Code) -> list[Any]:
    """The first elements of what ``Lanes.decoded`` has of the bytes from ``place`` on."""
    starts = (0, HALF) if kind.packs else range(0, kind.width, LANES)
    return [builder.add(place, ir.Constant(_I64, start)) for start in starts]


@final
class _Step:
    """Writes the arithmetic of a step. ``scalars_at`` are ``adam_scalars``."""

    def __init__(self, lanes: Lanes, scalars_at: Any, gradient: Form, *, coupled: bool) -> None:
        self._lanes = lanes
        self._gradient = gradient
        self.coupled = coupled
        builder = lanes.builder
        at = builder.inttoptr(scalars_at, _FLOAT.as_pointer())
        zero, one = ir.Constant(_FLOAT, 0.0), ir.Constant(_FLOAT, 1.0)
        numbers = [builder.load(builder.gep(at, [ir.Constant(_I64, place)]), align=4) for place in range(9)]
        near, up = (builder.fcmp_ordered(*how) for how in (("!=", numbers[2], zero), ("==", numbers[8], one)))
        self.usual = builder.and_(near, up)
        self._numbers = [lanes.splat(number) for number in numbers]

    def gradients(self, at: Any, place: Any) -> Any:
        """``LANES`` gradients, as fp32."""
        lanes, builder = self._lanes, self._lanes.builder
        if self._gradient is Form.FP32:
            return lanes.load(at, place, _FLOAT, GRADIENT)
        raw = lanes.load(at, place, _I16, GRADIENT)
        if self._gradient is Form.FP16:
            return builder.fpext(builder.bitcast(raw, ir.VectorType(_HALF_FLOAT, LANES)), _FLOATS)
        return lanes.floats(builder.shl(builder.zext(raw, _INTS), lanes.integer(16)))

    def moments(self, g: Any, p_at: Any, place: Any, m: Any, v: Any, *, usual: bool) -> list[Any]:
        """Both moments after the step. ``usual``: the scalar ``near`` is not 0, and the sign is 1."""
        lanes, builder = self._lanes, self._lanes.builder
        decay, rate, near, beta2, rest2, *_, sign = self._numbers
        signed = g if usual else builder.fmul(g, sign)
        if self.coupled:
            g = signed = lanes.fma(lanes.load(p_at, place, _FLOAT, TARGET), decay, signed)
        # A change of sign rounds nothing, and squares do not see it.
        far = m if usual else builder.select(builder.fcmp_ordered("!=", near, lanes.number(0)), m, signed)
        m = lanes.fma(rate, builder.fsub(signed, m), far)
        return [m, lanes.fma(builder.fmul(rest2, g), g, builder.fmul(v, beta2))]

    def parameters(self, p: Any, m: Any, v: Any) -> Any:
        """The parameters after the step."""
        lanes, builder = self._lanes, self._lanes.builder
        decay, _, _, _, _, bias2, eps, pace, _ = self._numbers
        if not self.coupled:
            p = builder.fmul(p, decay)
        root = lanes.call(f"llvm.sqrt.v{LANES}f32", _FLOATS, v)
        below = builder.fadd(builder.fdiv(root, bias2), eps)
        return builder.fadd(p, builder.fdiv(builder.fmul(pace, m), below))


@final
class _Narrow:
    """Writes parameters that are narrower than their master, rounded to nearest, ties to even."""

    def __init__(self, lanes: Lanes, form: Form) -> None:
        self._lanes = lanes
        self._form = form
        self._fast = lanes.rounds and form is Form.BF16
        if self._fast:
            self._other = cgutils.alloca_once(lanes.builder, _BITS)
            lanes.builder.store(ir.Constant(_BITS, [0] * LANES), self._other)

    def keep(self, own_at: Any, place: Any, p: Any) -> None:
        """Writes ``LANES`` of a block; ``mend`` comes after all of them."""
        lanes, builder = self._lanes, self._lanes.builder
        if not self._fast:
            self._exact(own_at, place, p)
            return
        narrow, other = lanes.rounded(p)
        lanes.store(own_at, place, narrow, OWN)
        builder.store(builder.or_(builder.load(self._other), other), self._other)

    def mend(self, own_at: Any, wide_at: Any, stream: int) -> None:
        """Writes the block again, from its parameters in fp32, if the processor has rounded one of them its own way."""
        if not self._fast:
            return
        lanes, builder = self._lanes, self._lanes.builder
        other = builder.bitcast(builder.load(self._other), _I16)
        zero, step, end = (ir.Constant(_I64, value) for value in (0, LANES, BLOCK))
        with (
            builder.if_then(builder.icmp_signed("!=", other, ir.Constant(_I16, 0)), likely=False),
            cgutils.for_range_slice(builder, zero, end, step, intp=_I64) as (place, _),
        ):
            self._exact(own_at, place, lanes.load(wide_at, place, _FLOAT, stream))

    def _exact(self, own_at: Any, place: Any, p: Any) -> None:
        lanes, builder = self._lanes, self._lanes.builder
        if self._form is Form.FP16:
            narrow = builder.bitcast(builder.fptrunc(p, ir.VectorType(_HALF_FLOAT, LANES)), _SHORTS)
            lanes.store(own_at, place, narrow, OWN)
        if self._form is not Form.BF16:
            return
        bits = lanes.bits(p)
        odd = builder.and_(builder.lshr(bits, lanes.integer(16)), lanes.integer(1))
        rounded = builder.add(bits, builder.add(odd, lanes.integer(0x7FFF)))
        narrow = builder.trunc(builder.lshr(rounded, lanes.integer(16)), _SHORTS)
        quiet = ir.Constant(_SHORTS, [_QUIET_NAN] * LANES)
        # A NaN with a full mantissa would carry into the sign and come out as 0.
        lanes.store(own_at, place, builder.select(builder.fcmp_unordered("uno", p, p), quiet, narrow), OWN)


@final
class _Sums:
    """Writes what is added up over a block: squares of gradients, and the largest of both moments."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._squares = cgutils.alloca_once(lanes.builder, _FLOATS)
        self._most = [cgutils.alloca_once(lanes.builder, _INTS) for _ in range(2)]
        lanes.builder.store(lanes.number(0), self._squares)
        for held in self._most:
            lanes.builder.store(lanes.integer(0), held)

    def add(self, g: Any, moments: list[Any]) -> None:
        """Takes ``LANES`` elements in."""
        lanes, builder = self._lanes, self._lanes.builder
        builder.store(lanes.fma(g, g, builder.load(self._squares)), self._squares)
        # Bits are ordered as magnitudes are, and NaN above all; the second moment has no sign but that of a NaN.
        for size, held in zip((lanes.magnitude(moments[0]), lanes.bits(moments[1])), self._most, strict=True):
            before = builder.load(held)
            builder.store(builder.select(builder.icmp_unsigned(">", size, before), size, before), held)

    def results(self) -> list[Any]:
        """All three, as fp32."""
        lanes, builder = self._lanes, self._lanes.builder
        reduce = f"llvm.vector.reduce.umax.v{LANES}i32"
        largest = [builder.bitcast(lanes.call(reduce, _I32, builder.load(held)), _FLOAT) for held in self._most]
        kind = ir.FunctionType(_FLOAT, [_FLOAT, _FLOATS])
        add_up = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fadd.v{LANES}f32")
        # The order of a sum of squares does not matter.
        whole = [ir.Constant(_FLOAT, 0.0), builder.load(self._squares)]
        return [builder.call(add_up, whole, fastmath=("reassoc",)), *largest]


_NUMBER = types.int64
_PAIR, _TRIPLE = types.UniTuple(_NUMBER, 2), types.UniTuple(_NUMBER, 3)
_FACTORS = types.UniTuple(types.float32, 2)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def begin_block(
    context: Any,
    parameters: Any,
    codes: Any,
    moments: Any,
    tables: Any,
    scales: Any,
    scalars_at: Any,
    forms: Any,
    bits: Any,
    coupled: Any,
) -> Any:
    """Moves the moments of a whole block; returns the sum of the squares of its gradients and the largest of either.

    Addresses: ``parameters`` of gradient and parameter in fp32; ``codes`` of both moments, ``moments`` of where both go
    as fp32, ``tables`` of both codes, ``scalars_at`` of ``adam_scalars``. ``scales``: of both moments. Constants:
    ``forms`` (16 times the parameter's, and the gradient's), ``bits`` and ``coupled`` (0 or 1).
    """
    found = constants(forms, bits, coupled)
    if found is None:
        return None
    given, kinds = Form(found[0] % 16), _kinds(found[1])

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        groups = [cgutils.unpack_tuple(builder, argument) for argument in arguments[:5]]
        (g_at, wide_at), codes_at, new_at, table_at, factors = groups
        lanes = Lanes(context, builder, BOOK)
        step = _Step(lanes, arguments[5], given, coupled=bool(found[2]))
        sums, splats = _Sums(lanes), [lanes.splat(factor) for factor in factors]

        def loop(place: Any, *, usual: bool) -> None:
            held = [
                lanes.decoded(at, place, CODES, table, kind)
                for at, table, kind in zip(codes_at, table_at, kinds, strict=True)
            ]
            for here, *pair in zip(_parts(builder, place, kinds[0]), *held, strict=True):
                m, v = (builder.fmul(value, splat) for value, splat in zip(pair, splats, strict=True))
                g = step.gradients(g_at, here)
                made = step.moments(g, wide_at, here, m, v, usual=usual)
                sums.add(g, made)
                for at, moment, stream in zip(new_at, made, (FIRST, SECOND), strict=True):
                    lanes.store(at, here, moment, stream)

        # Asked once, and not for every vector.
        with builder.if_else(step.usual) as branches:
            for branch, usual in zip(branches, (True, False), strict=True):
                with branch, _places(builder, kinds[0]) as (place, _):
                    loop(place, usual=usual)
        return context.make_tuple(builder, signature.return_type, sums.results())

    result = types.UniTuple(types.float32, 3)
    return result(_PAIR, _PAIR, _PAIR, _PAIR, _FACTORS, _NUMBER, forms, bits, coupled), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def finish_block(
    context: Any,
    parameters: Any,
    codes: Any,
    moments: Any,
    tables: Any,
    inverses: Any,
    scalars_at: Any,
    forms: Any,
    bits: Any,
    coupled: Any,
    apart: Any,
) -> Any:
    """Moves the parameters of a whole block by the moments that ``begin_block`` made, and encodes these.

    Addresses: ``parameters`` of the parameter in fp32, of where it goes, and of where the parameter itself does;
    ``codes`` of where both moments go. ``inverses``: what both are multiplied by before. Constant: ``apart``
    (``Apart``). All else as there.
    """
    found = constants(forms, bits, coupled, apart)
    if found is None:
        return None
    own, given = (Form(form) for form in divmod(found[0], 16))
    kinds, elsewhere = _kinds(found[1]), Apart(found[3])
    to_wide, to_codes = written(TARGET, Apart.WIDE in elsewhere), written(CODES, Apart.MOMENTS in elsewhere)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        groups = [cgutils.unpack_tuple(builder, argument) for argument in arguments[:5]]
        (wide_at, wide_out, own_out), codes_out, new_at, table_at, factors = groups
        lanes = Lanes(context, builder, BOOK)
        step = _Step(lanes, arguments[5], given, coupled=bool(found[2]))
        narrow, splats = _Narrow(lanes, own), [lanes.splat(factor) for factor in factors]
        with _places(builder, kinds[0]) as (place, _):
            made: list[list[Any]] = [[], []]
            for here in _parts(builder, place, kinds[0]):
                new = [lanes.load(at, here, _FLOAT, stream) for at, stream in zip(new_at, (FIRST, SECOND), strict=True)]
                p = step.parameters(lanes.load(wide_at, here, _FLOAT, TARGET), *new)
                lanes.store(wide_out, here, p, to_wide)
                narrow.keep(own_out, here, p)
                for moment, splat, normal in zip(new, splats, made, strict=True):
                    normal.append(builder.fmul(moment, splat))
            for at, normal, table, kind in zip(codes_out, made, table_at, kinds, strict=True):
                low, *high = (lanes.encoded(normal[n :: 1 + kind.packs], table, kind) for n in range(1 + kind.packs))
                lanes.store(at, place, lanes.joined(low, high[0]) if high else low, to_codes)
        narrow.mend(own_out, wide_out, to_wide)
        return context.get_dummy_value()

    return types.void(_TRIPLE, _PAIR, _PAIR, _PAIR, _FACTORS, _NUMBER, forms, bits, coupled, apart), generate
