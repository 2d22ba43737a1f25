"""Look in the background whether a server that did not answer is back.

`Executor.start_probe` starts a probe in a thread or a task, one at a time for each circuit breaker. A probe sends
commands to the server until they are answered in time, and then closes the breaker. `probe_until_back` and `probe` are
plans (see `headgate._plan`).
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from random import Random
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from redis.exceptions import ClusterDownError, TimeoutError

from headgate._plan import arun, run
from headgate.redis.breaker import Breaker
from headgate.redis.script import pack
from headgate.redis.topology import ServerCommand, Topology, cluster_is_ok

if TYPE_CHECKING:
    from headgate.redis.async_client import AsyncExecutor
    from headgate.redis.sync_client import SyncExecutor

FIRST_PROBE = 0.05  # seconds; then doubled up to the next
SLOWEST_PROBE = 0.5
PROBE_TIMEOUT = 1.0  # more than a check has: no caller waits for a probe, and a far server may need it to connect

JITTER = Random()  # its own: a program may seed the common one, and some tests watch it


class Probe(NamedTuple):
    """A request: see whether *executor* can ask for *slot* again."""

    executor: Any  # a SyncExecutor or an AsyncExecutor
    slot: int


def probe_in_thread(executor: weakref.ref[SyncExecutor], breaker: Breaker, slot: int) -> None:
    """What the thread of a probe runs."""

    def answer(request: float | Probe) -> None:
        if isinstance(request, Probe):
            request.executor.probe(request.slot)
        else:
            time.sleep(request)

    try:
        run(probe_until_back(executor, breaker, slot), answer)
    finally:
        breaker.release_probe()


async def probe_in_task(executor: weakref.ref[AsyncExecutor], breaker: Breaker, slot: int) -> None:
    """What the task of a probe runs; the executor releases the probe, even if the task never began."""

    async def answer(request: float | Probe) -> None:
        if isinstance(request, Probe):
            await request.executor.probe(request.slot)
        else:
            await asyncio.sleep(request)

    await arun(probe_until_back(executor, breaker, slot), answer)


def probe_until_back(
    executor: Callable[[], SyncExecutor | AsyncExecutor | None], breaker: Breaker, slot: int
) -> Generator[float | Probe, None, None]:
    """Probe the server of *slot* until it answers, and open or close *breaker* accordingly.

    *executor* is a weak reference: the probe ends when no limiter uses the executor any more.
    """
    for interval in probe_intervals():
        yield interval if breaker.open else 0.0  # not open yet: probe at once, to decide whether to open
        alive = executor()
        if alive is None or alive.closed or not breaker.failures:
            return
        try:
            yield Probe(alive, slot)
        except Exception as error:  # any error: no caller would hear of it
            breaker.give_up(error)
            del alive  # the executor can be collected while the probe sleeps
        else:
            breaker.answered()
            return


def probe(topology: Topology, slot: int, check_timeout: float, deadline: float) -> Generator[ServerCommand, Any, None]:
    """Return if *slot* can be asked for in the *check_timeout* seconds that a check has; raise if not."""
    address = yield from topology.discover(slot, deadline)
    yield ServerCommand(address, pack("PING"), deadline)  # connects, which may take longer
    begun = monotonic()
    yield ServerCommand(address, pack("EVAL", "return 1", 0), deadline)  # a server may answer PING and hold scripts up
    if (took := monotonic() - begun) > check_timeout:
        raise TimeoutError(f"it answers, but in {took:.2f} s, and a check has {check_timeout} s")
    if topology.partitioned and not cluster_is_ok((yield ServerCommand(address, pack("CLUSTER", "INFO"), deadline))):
        raise ClusterDownError("CLUSTERDOWN as the server itself says")


def probe_intervals() -> Iterator[float]:
    """Seconds to wait before each probe: short at first, then longer, and never in step with other processes."""
    interval = FIRST_PROBE
    while True:
        yield interval * JITTER.uniform(0.8, 1.2)
        interval = min(2 * interval, SLOWEST_PROBE)
