"""Keep what is held: renew it when it is due, as long as somebody refers to it.

Threads of its place keep the time (see `headgate.coordination.timers`); what belongs to an event loop is renewed there.
Who forgets what it holds is as good as dead: the references are weak.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import Any, Protocol, TypeVar

from headgate.coordination.loops import running_loop
from headgate.coordination.memory import Memory
from headgate.coordination.site import Plan, Site
from headgate.coordination.timers import Timer

T = TypeVar("T", bound="Held")
T_contra = TypeVar("T_contra", bound="Held", contravariant=True)


class Held(Protocol):
    """A lock or a lease, from when it was granted."""

    over: bool  # released or lost
    timer: Timer | None


class Keeper(Protocol[T_contra]):
    """Whoever knows how to renew it."""

    site: Site

    def renew(self, held: T_contra, /) -> Plan[Any]: ...
    def next_renewal(self, held: T_contra, /) -> float:
        """Seconds until it is to be renewed."""
        ...


def keep(keeper: Keeper[T], held: T, loop: asyncio.AbstractEventLoop | None = None) -> None:
    """Renew *held* again and again until it is over; in *loop*, or in a thread of the timers."""
    if held.over:
        return
    its_keeper, its_held = weakref.ref(keeper), weakref.ref(held)

    def due() -> None:
        keeper, held = its_keeper(), its_held()
        if keeper is None or held is None or held.over:
            return
        moved_in_loop = isinstance(keeper.site.place, Memory) and running_loop() is loop  # a clock, by hand
        if loop is None or moved_in_loop:
            keeper.site.run(lambda _: keeper.renew(held))
            keep(keeper, held, loop)
        elif not loop.is_closed():
            loop.call_soon_threadsafe(lambda: keeper.site.start(_renew(keeper, held, loop)))

    held.timer = keeper.site.place.timers.later(keeper.next_renewal(held), due)


async def _renew(keeper: Keeper[T], held: T, loop: asyncio.AbstractEventLoop) -> None:
    await keeper.site.arun(lambda _: keeper.renew(held))
    keep(keeper, held, loop)
