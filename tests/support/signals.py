"""An exception of a signal handler, at every point where one may come."""

import gc
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from headgate import _waiters
from headgate.coordination import timers
from headgate.redis import shared_trips, sync_client

OURS = {str(module.__file__) for module in (_waiters, timers, shared_trips, sync_client, threading)}


def interrupt(
    number: int, call: Callable[[], object], handler: Callable[[], object], *, at: str, files: Callable[[str], bool]
) -> bool:
    """Whether *handler* ran within *call*, at the event (*at* a "line", a "return") of that *number* in these *files*.

    Meanwhile no garbage is collected: what earlier tests left behind has lines and returns of its own.
    """
    left, before = number, sys.gettrace()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if not files(frame.f_code.co_filename):
            return None
        left -= event == at
        if event == at and left == 0:
            handler()
        return trace

    gc.disable()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        gc.enable()
    return left <= 0


def signal_at(number: int, call: Callable[[], object]) -> bool:
    """Whether *call* was interrupted where, for the time of that *number*, a function of these files returns.

    It is there that Python looks for signals.
    """
    came = False

    def handler() -> None:
        nonlocal came
        came = True
        raise KeyboardInterrupt

    with suppress(KeyboardInterrupt, RuntimeError):  # an error of the standard library's, which stumbles over it
        interrupt(number, call, handler, at="return", files=OURS.__contains__)
    return came


def done_by_another(call: Callable[[], object]) -> bool:
    """Whether another thread, which no signal interrupts, gets to the end of *call*."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(20)
    return not thread.is_alive()
