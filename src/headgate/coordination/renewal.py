"""The heartbeat of what is held: renewed before it expires, while its holder refers to it.

A timer of the backend starts each renewal: in its own thread, or for a lock of asyncio in the event loop of its holder.
The references here are weak: if a holder drops its lock object without a release, the lock is not renewed and expires.
What is renewed sends the request itself and learns from the reply whether it is lost: `Acquisition.renew`, for a lock.
A renewal is a plan (see `headgate._plan`).
"""

from __future__ import annotations

import asyncio
import weakref
from typing import Any, Protocol

from headgate.coordination.backend import running_loop
from headgate.coordination.runner import Plan, Runner
from headgate.coordination.timers import Timer


class Renewable(Protocol):
    """An acquisition of a lock or a semaphore, or a lease of a member, once it is granted."""

    over: bool  # released or lost
    timer: Timer | None

    def renew(self) -> Plan[Any]: ...
    def seconds_to_renewal(self) -> float: ...


def keep_renewed(runner: Runner, held: Renewable, loop: asyncio.AbstractEventLoop | None = None) -> None:
    """Renew *held* again and again until it is over; in *loop*, or in a thread of the timers."""
    if held.over:
        return
    reference = weakref.ref(held)

    def due() -> None:
        held = reference()
        if held is None or held.over:
            return
        in_our_loop = runner.backend.in_process and running_loop() is loop  # a ManualClock was advanced there
        if loop is None or in_our_loop:
            runner.run(held.renew())
            keep_renewed(runner, held, loop)
        elif not loop.is_closed():
            loop.call_soon_threadsafe(lambda: runner.start(_renew_in_loop(runner, held, loop)))

    held.timer = runner.backend.timers.later(held.seconds_to_renewal(), due)


async def _renew_in_loop(runner: Runner, held: Renewable, loop: asyncio.AbstractEventLoop) -> None:
    await runner.arun(held.renew())
    keep_renewed(runner, held, loop)
