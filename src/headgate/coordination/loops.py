"""The event loop and the task that a caller is in, if any."""

from __future__ import annotations

import asyncio
from typing import Any


def running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def running_task() -> asyncio.Task[Any] | None:
    return asyncio.current_task() if running_loop() else None
