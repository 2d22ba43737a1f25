"""An exception of a signal handler, at every point where one may come."""

import sys
import threading
from collections.abc import Callable
from typing import Any

OURS = ("timers.py", "bell.py", "threads.py", "threading.py", "waiting.py")


def signal_at(number: int, call: Callable[[], object]) -> bool:
    """Whether *call* was interrupted where, for the time of that *number*, a function of these files returns.

    It is there that Python looks for signals.
    """
    left, before = number, sys.gettrace()

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(OURS):
            return None
        left -= event == "return"
        if left == 0:
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except (KeyboardInterrupt, RuntimeError):  # an error of the standard library's, which stumbles over it
        pass
    finally:
        sys.settrace(before)
    return left <= 0


def done_by_another(call: Callable[[], object]) -> bool:
    """Whether another thread, which no signal interrupts, gets to the end of *call*."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(20)
    return not thread.is_alive()
