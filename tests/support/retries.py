"""Calls with a short time-out, which a busy machine may exceed although Redis answers."""

import time
from collections.abc import Callable
from typing import TypeVar

from headgate.errors import StoreUnavailable

T = TypeVar("T")


def answered(call: Callable[[], T]) -> T:
    """The result of *call*, which is repeated until Redis answers in time."""
    until = time.monotonic() + 20
    while True:
        try:
            return call()
        except StoreUnavailable:
            assert time.monotonic() < until, "no reply in 20 seconds"
