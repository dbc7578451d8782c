"""Writing past the caches, in whole lines that nobody has to read first.

A processor that writes to a line which it has not in a cache reads it from memory before. In place it has just read it;
an update into another copy would read as many bytes as it writes, for nothing. So a block of what is written apart is
made in *lines*, a few KiB of the stack, and goes out from there with stores that do not pass through the caches (LLVM's
``nontemporal``; on x86 ``movnt``): whole lines one after the other, since parts of lines would be the slower way.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from forebay.kernels.jit import part
from forebay.kernels.native import copy_bytes
from forebay.kernels.shares import BLOCK

__all__ = ["copy_past_caches", "drain", "lines_for", "place_in", "send"]

_LINE: Final = 64
_SLOT: Final = 4 * BLOCK
"""Bytes of a block of anything."""

_FLOATS: Final = ir.VectorType(ir.FloatType(), _LINE // 4)
_I8: Final = ir.IntType(8)
_I32: Final = ir.IntType(32)
_I64: Final = ir.IntType(64)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def lines_for(context: Any, slots: Any) -> Any:
    """The address of memory for blocks of so many streams (a constant), which is there until the kernel returns."""
    if not isinstance(slots, types.IntegerLiteral):
        return None
    room = ir.ArrayType(_I8, slots.literal_value * _SLOT)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        # Not cgutils.alloca_once: that fills it with zeros, one store a byte.
        with builder.goto_entry_block():
            memory = builder.alloca(room)
        memory.align = _LINE
        return builder.ptrtoint(memory, _I64)

    return types.int64(slots), generate


@intrinsic  # type: ignore[untyped-decorator]
def _send(context: Any, source: Any, target: Any, nbytes: Any) -> Any:
    """Copies ``nbytes`` from ``source``: past the caches if the target is whole lines. Belongs to no stream, like
    ``native.copy_bytes``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, target, nbytes = arguments
        odd = builder.and_(builder.or_(target, nbytes), ir.Constant(_I64, _LINE - 1))
        whole = builder.icmp_unsigned("==", odd, ir.Constant(_I64, 0))
        mark = builder.module.add_metadata([ir.Constant(_I32, 1)])
        with builder.if_else(whole) as (in_lines, otherwise):
            with in_lines:
                zero, step = ir.Constant(_I64, 0), ir.Constant(_I64, _LINE)
                with cgutils.for_range_slice(builder, zero, nbytes, step, intp=_I64) as (at, _):
                    here, there = (
                        builder.inttoptr(builder.add(base, at), _FLOATS.as_pointer()) for base in (source, target)
                    )
                    stored = builder.store(builder.load(here, align=1), there, align=_LINE)
                    stored.set_metadata("nontemporal", mark)
            with otherwise:
                places = [builder.inttoptr(address, _I8.as_pointer()) for address in (target, source)]
                cgutils.raw_memcpy(builder, places[0], places[1], nbytes, 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _drain(context: Any) -> Any:
    """Waits until everybody sees what this thread has written."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if context.codegen().magic_tuple()[0].startswith("x86_64"):
            # A fence of LLVM's may become a locked instruction, which is not said to order these stores everywhere.
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse.sfence"), [])
        else:
            builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@part
def copy_past_caches(source: Any, target: Any, nbytes: Any) -> None:
    """Copies ``nbytes`` between two addresses; what is no whole line of the target, at its begin and end, as ever."""
    head = min((_LINE - target % _LINE) % _LINE, nbytes)
    whole = (nbytes - head) // _LINE * _LINE
    copy_bytes(source, target, head)
    _send(source + head, target + head, whole)
    copy_bytes(source + head + whole, target + head + whole, nbytes - head - whole)
    _drain()


@part
def drain(lines: Any) -> None:
    """What has been sent is there for whoever waits for this thread: stores past the caches keep no order by
    themselves. Without lines (0) nothing was."""
    if lines:
        _drain()


@part
def place_in(lines: Any, slot: Any, out: Any, block: Any, itemsize: Any) -> Any:
    """Where a stream that goes ``out`` begins while the block of elements from ``block`` on is made: so that these are
    in its slot of ``lines``. Without lines (0) they are where they belong."""
    return lines + slot * _SLOT - block * itemsize if lines else out


@part
def send(lines: Any, slot: Any, out: Any, block: Any, itemsize: Any, size: Any) -> None:
    """Has the ``size`` elements of a block in their slot go ``out``; without lines (0) they are there."""
    if lines:
        _send(lines + slot * _SLOT, out + block * itemsize, size * itemsize)
