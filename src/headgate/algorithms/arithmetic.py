"""A product that nothing can interrupt.

CPython looks for signals while it multiplies large integers, and a handler that raises there (Ctrl-C, a time limit)
takes compiled code down with it: mypyc reads a failed multiplication as lack of memory and aborts. So compiled code
multiplies in halves, each small enough to be done in a register. Plain Python just multiplies.
"""

from __future__ import annotations

from types import FunctionType
from typing import Final

_HALF: Final = 29
_LOW: Final = (1 << _HALF) - 1


def times(a: int, b: int) -> int:
    """a * b, for whole numbers of less than 58 bits."""
    if PLAIN:
        return a * b
    high_a, low_a, high_b, low_b = a >> _HALF, a & _LOW, b >> _HALF, b & _LOW
    return ((high_a * high_b) << (2 * _HALF)) + ((high_a * low_b + low_a * high_b) << _HALF) + low_a * low_b


PLAIN: Final = isinstance(times, FunctionType)
