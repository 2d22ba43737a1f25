"""Time-outs are short where a test waits for silence; but a machine may stand still for as long."""

import time
from collections.abc import Callable
from typing import TypeVar

from headgate.errors import StoreUnavailable

T = TypeVar("T")


def answered(call: Callable[[], T]) -> T:
    """What *call* gives as soon as Redis answers it in time."""
    until = time.monotonic() + 20
    while True:
        try:
            return call()
        except StoreUnavailable:
            assert time.monotonic() < until, "no answer ever comes"
