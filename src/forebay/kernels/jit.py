"""How kernels are compiled: without the interpreter's lock, in IEEE arithmetic, and kept on disk where that is
possible."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from pathlib import Path
from types import CellType, FunctionType
from typing import Any, TypeVar, cast

import numba

from forebay.kernels.stamp import STAMP, stamp_of

__all__ = ["compiled", "inlined", "part"]

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """``function``, compiled at its first call, or read from beside its source or from the user's cache.

    A division by 0 gives what IEEE 754 says.
    """
    options = {"nogil": True, "error_model": "numpy"}
    stamped = _stamped(function)
    try:
        made: Function = numba.njit(cache=True, **options)(stamped)
    except RuntimeError:
        # numba finds no folder that it may write to: every process compiles for itself.
        made = numba.njit(**options)(stamped)
    return made


def _stamped(function: Function) -> Function:
    """``function`` with a closure that changes with the sources beside its own and with those here (``stamp``). One
    that has a closure of its own is left as it is.

    The code never reads what is added; numba looks at it to tell whether what it has kept is still good.
    """
    plain = cast(FunctionType, function)
    if plain.__closure__ is not None:
        return function
    code = plain.__code__
    stamps = STAMP, stamp_of(Path(code.co_filename).parent)
    made = FunctionType(
        code.replace(co_freevars=("stamps",)),
        plain.__globals__,
        argdefs=plain.__defaults__,
        closure=(CellType(stamps),),
    )
    made.__kwdefaults__ = plain.__kwdefaults__
    return cast(Function, update_wrapper(made, plain))


def part(function: Function) -> Function:
    """``function``, for kernels to call, which have it in their own code: it is kept nowhere by itself.

    Python cannot call it: what would take arguments over from there is left out, which is most of what there is to
    compile where arguments are records of many arrays.
    """
    return _for_kernels(function)


def inlined(function: Function) -> Function:
    """The same, for functions that take records of arrays: never called, but written out in what calls it.

    In a call such a record is handed over number by number, some ten for each array, which takes longer than a short
    function does: the exact search of layouts (``planners.layout.canonical``) is three times as fast without.
    """
    return _for_kernels(function, forceinline=True)


def _for_kernels(function: Function, **more: Any) -> Function:
    options = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True, **more}
    made: Function = numba.njit(**options)(function)
    return made
