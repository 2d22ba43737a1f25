"""Look in the background whether a server that did not answer is back.

An executor starts a probe in a thread or a task, one at a time for each circuit breaker. A probe asks the server until
it answers in time, and then closes the breaker. `probe_until_back` is a plan (see `headgate._plan`); what a probe asks
is the method `probe` of the executor.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from random import Random
from time import monotonic
from typing import Any, NamedTuple, Protocol

from headgate._plan import arun, run
from headgate.stores.breaker import Breaker

FIRST_PROBE = 0.05  # seconds; then doubled up to the next
SLOWEST_PROBE = 0.5
PROBE_TIMEOUT = 1.0  # more than a check has: no caller waits for a probe, and a far server may need it to connect

JITTER = Random()  # its own: a program may seed the common one, and some tests watch it


class Probed(Protocol):
    """An executor: what makes calls to a server, from threads or from an event loop."""

    closed: bool

    def probe(self, slot: int) -> Any:
        """Raise if the server of *slot* does not answer as a check needs it; awaited in an event loop."""
        ...


class Probe(NamedTuple):
    """A request: see whether *executor* can ask for *slot* again."""

    executor: Probed
    slot: int


def start_in_thread(executor: Probed, breaker: Breaker, slot: int) -> None:
    """Probe in a thread, unless a probe does so already."""
    try:
        if executor.closed or not breaker.claim_probe():
            return
        arguments = (weakref.ref(executor), breaker, slot)
        threading.Thread(target=probe_in_thread, args=arguments, name="headgate-probe", daemon=True).start()
    except BaseException as error:  # no more threads; or a signal, which may have kept the thread from starting
        breaker.release_probe()  # so that one of the next calls can start a probe
        if not isinstance(error, RuntimeError):
            raise


def start_in_task(executor: Probed, breaker: Breaker, slot: int, probes: set[asyncio.Task[None]]) -> None:
    """Probe in a task of the running event loop, which is in *probes* until it ends."""
    if executor.closed or not breaker.claim_probe():
        return
    task = asyncio.get_running_loop().create_task(probe_in_task(weakref.ref(executor), breaker, slot))
    probes.add(task)

    def ended(task: asyncio.Task[None]) -> None:  # called even if the task was cancelled before it began
        probes.discard(task)
        breaker.release_probe()

    task.add_done_callback(ended)


def probe_in_thread(executor: weakref.ref[Probed], breaker: Breaker, slot: int) -> None:
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


async def probe_in_task(executor: weakref.ref[Probed], breaker: Breaker, slot: int) -> None:
    """What the task of a probe runs; `start_in_task` releases the probe, even if the task never began."""

    async def answer(request: float | Probe) -> None:
        if isinstance(request, Probe):
            await request.executor.probe(request.slot)
        else:
            await asyncio.sleep(request)

    await arun(probe_until_back(executor, breaker, slot), answer)


def probe_until_back(
    executor: Callable[[], Probed | None], breaker: Breaker, slot: int
) -> Generator[float | Probe, None, None]:
    """Probe the server of *slot* until it answers, and open or close *breaker* accordingly.

    *executor* is a weak reference: the probe ends when no limiter uses the executor any more.
    """
    waited = 0.0  # seconds that the last probe took: one that waited for a silent server has used up the interval
    for interval in probe_intervals():
        pause = max(interval - waited, interval / 8)
        yield pause if breaker.open else 0.0  # not open yet: probe at once, to decide whether to open
        begun = monotonic()
        alive = executor()
        if alive is None or alive.closed or not breaker.failures:
            return
        try:
            yield Probe(alive, slot)
        except Exception as error:  # any error: no caller would hear of it
            breaker.give_up(error)
            waited = monotonic() - begun
            del alive  # the executor can be collected while the probe sleeps
        else:
            breaker.answered()
            return


def probe_intervals() -> Iterator[float]:
    """Seconds from one probe to the next: short at first, then longer, and never in step with other processes."""
    interval = FIRST_PROBE
    while True:
        yield interval * JITTER.uniform(0.8, 1.2)
        interval = min(2 * interval, SLOWEST_PROBE)
