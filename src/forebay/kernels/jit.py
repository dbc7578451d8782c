"""How kernels are compiled: without the interpreter's lock, in IEEE arithmetic, and kept on disk where that is
possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

__all__ = ["compiled", "inlined", "part"]

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """``function``, compiled at its first call, or read from beside its source or from the user's cache.

    A division by 0 gives what IEEE 754 says.
    """
    options = {"nogil": True, "error_model": "numpy"}
    try:
        made: Function = numba.njit(cache=True, **options)(function)
    except RuntimeError:
        # numba finds no folder that it may write to: every process compiles for itself.
        made = numba.njit(**options)(function)
    return made


def part(function: Function) -> Function:
    """``function``, for kernels to call, which have it in their own code: it is kept nowhere by itself.

    Python cannot call it: what would take arguments over from there is left out, which is most of what there is to
    compile where arguments are records of many arrays.
    """
    made: Function = numba.njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)
    return made


def inlined(function: Function) -> Function:
    """The same, for functions that take records of arrays: never called, but written out in what calls it.

    In a call such a record is handed over number by number, some ten for each array, which takes longer than a short
    function does: the exact search of layouts (``planners.layout.canonical``) is three times as fast without.
    """
    made: Function = numba.njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, forceinline=True)(
        function
    )
    return made
