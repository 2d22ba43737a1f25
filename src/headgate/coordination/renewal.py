"""Renew locks and leases when they are due, for as long as their holder refers to them.

The timers of the backend keep the time; a lock of an event loop is renewed in that loop. The references here are weak:
a holder that drops its lock object without a release is as good as dead, and the lock expires. A renewal is a plan
(see `headgate._plan`).
"""

from __future__ import annotations

import asyncio
import weakref
from typing import Any, Protocol

from headgate.coordination.backend import running_loop
from headgate.coordination.runner import Plan, Runner
from headgate.coordination.timers import Timer


class Renewable(Protocol):
    """A lock or a lease, from when it was granted."""

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
        by_hand = runner.backend.in_process and running_loop() is loop  # a ManualClock was advanced in *loop* itself
        if loop is None or by_hand:
            runner.run(held.renew())
            keep_renewed(runner, held, loop)
        elif not loop.is_closed():
            loop.call_soon_threadsafe(lambda: runner.start(_renew_in_loop(runner, held, loop)))

    held.timer = runner.backend.timers.later(held.seconds_to_renewal(), due)


async def _renew_in_loop(runner: Runner, held: Renewable, loop: asyncio.AbstractEventLoop) -> None:
    await runner.arun(held.renew())
    keep_renewed(runner, held, loop)
