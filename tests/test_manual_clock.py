"""A clock that is never advanced: a caller that waits by it, alone, is told so."""

import asyncio
import threading

import pytest

from headgate import AsyncLimiter, Limiter
from headgate.testing import ManualClock


def spent(clock: ManualClock) -> Limiter:
    limiter = Limiter("1/minute", clock=clock)
    limiter.try_acquire("k")
    return limiter


@pytest.mark.parametrize("timeout", [None, 2.0])
def test_alone_in_a_thread(timeout: float | None) -> None:
    limiter = spent(ManualClock(patience=0.05))
    with pytest.raises(RuntimeError, match="was not advanced"):
        limiter.acquire("k", timeout=timeout)
    assert limiter.peek("k").allowed is False  # and the line is free


@pytest.mark.parametrize("timeout", [None, 2.0])
def test_alone_in_an_event_loop(timeout: float | None) -> None:
    async def wait() -> None:
        limiter = AsyncLimiter("1/minute", clock=ManualClock(patience=0.05))
        await limiter.try_acquire("k")
        with pytest.raises(RuntimeError, match="was not advanced"):
            await limiter.acquire("k", timeout=timeout)

    asyncio.run(wait())


def test_a_clock_that_moves_slowly() -> None:
    clock = ManualClock(patience=0.01)

    class Moving(threading.Event):
        """The clock is advanced a little before patience runs out."""

        def wait(self, timeout: float | None = None) -> bool:
            clock.advance(1.0)
            return self.is_set()

    begun = clock.now()
    clock.wait(Moving(), 5.0)
    assert clock.now() - begun == 5_000_000


def test_others_wait_on() -> None:
    """A daemon, as the threads that libraries start in the background; and a task that has company."""
    clock = ManualClock(patience=0.01)
    limiter, done = spent(clock), threading.Event()

    def wait() -> None:
        limiter.acquire("k")
        done.set()

    daemon = threading.Thread(target=wait, daemon=True)
    daemon.start()
    assert not done.wait(0.2)
    clock.advance(60.0)
    assert done.wait(30)

    async def in_company() -> None:
        clock = ManualClock(patience=0.01)
        limiter = AsyncLimiter("1/minute", clock=clock)
        await limiter.try_acquire("k")
        waiting = asyncio.create_task(limiter.acquire("k"))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        clock.advance(60.0)
        assert await waiting

    asyncio.run(in_company())
