"""limit(): a limit around a function or a block."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from headgate import AsyncLimiter, Limiter
from headgate.errors import InvalidKey, RateLimited
from headgate.testing import ManualClock
from tests.support.callers import Callers
from tests.support.clocks import PATIENCE, WatchedClock, until, until_async


def test_function(callers: Callers) -> None:
    """It runs as before, until its key is denied."""
    limiter = callers.limiter("2/minute", clock=ManualClock())

    @limiter.limit(key="k")
    def add(a: int, *, b: int) -> int:
        """Add."""
        return a + b

    assert add(1, b=2) == 3
    assert add(3, b=4) == 7
    with pytest.raises(RateLimited) as caught:
        add(5, b=6)
    assert caught.value.decision == limiter.peek("k")
    assert caught.value.decision.retry_after == 30.0
    assert (add.__name__, add.__doc__) == ("add", "Add.")


async def double(a: int) -> int:
    """Double."""
    await asyncio.sleep(0)
    return 2 * a


def test_async_function(callers: Callers) -> None:
    """It stays an async function, under either kind of limiter."""
    limiter: Any = callers.limiter("2/minute")
    real = limiter if callers.colour == "sync" else limiter.limiter
    limited = real.limit(key="k")(double)
    assert inspect.iscoroutinefunction(limited)
    assert (limited.__name__, limited.__doc__) == ("double", "Double.")

    async def check() -> None:
        assert [await limited(1), await limited(2)] == [2, 4]
        with pytest.raises(RateLimited):
            await limited(3)

    asyncio.run(check()) if callers.colour == "sync" else callers.run(check())


def test_key_of_arguments(callers: Callers) -> None:
    """The key may be a function of the arguments."""
    limiter = callers.limiter("1/minute", clock=ManualClock())

    @limiter.limit(key=lambda user, *_, **__: f"user:{user}")
    def greet(user: str, greeting: str = "hello") -> str:
        return f"{greeting} {user}"

    assert greet("ann") == "hello ann"
    assert greet("bob", greeting="hi") == "hi bob"
    with pytest.raises(RateLimited):
        greet("ann", "hi")
    assert not limiter.peek("user:ann")
    assert not limiter.peek("user:bob")
    assert limiter.peek("user:cyd")


def test_method(sync_callers: Callers) -> None:
    """The key may be of the object whose method it is."""
    limiter = sync_callers.limiter("1/minute", clock=ManualClock())

    class Account:
        def __init__(self, name: str) -> None:
            self.name = name

        @limiter.limit(key=lambda self: self.name)
        def pay(self) -> str:
            return f"{self.name} pays"

    assert Account("ann").pay() == "ann pays"
    assert Account("bob").pay() == "bob pays"
    with pytest.raises(RateLimited):
        Account("ann").pay()


def test_denied_does_not_run(callers: Callers) -> None:
    limiter = callers.limiter("2/minute", clock=ManualClock())
    ran = []

    @limiter.limit(key="k", permits=2)
    def run() -> None:
        ran.append(1)

    run()
    with pytest.raises(RateLimited):
        run()
    assert ran == [1]


def test_errors_pass_through(callers: Callers) -> None:
    """What the function or the block raises comes out; the call was made, so it counts."""
    limiter = callers.limiter("3/minute", clock=ManualClock())

    @limiter.limit(key="k")
    def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    with pytest.raises(KeyError), limiter.limit(key="k"):
        raise KeyError
    assert limiter.peek("k", permits=0).remaining == 1


def test_bad_key(callers: Callers) -> None:
    """A key function that gives no key is an error of the call."""
    limiter = callers.limiter("2/minute", clock=ManualClock())

    @limiter.limit(key=lambda user: user)
    def greet(user: str) -> None: ...

    with pytest.raises(InvalidKey):
        greet("")


def test_timeout(callers: Callers) -> None:
    """With a time-out a call waits, and gives up."""
    clock = WatchedClock()
    limiter = callers.limiter("1/minute", clock=clock)

    @limiter.limit(key="k", timeout=60.0)
    def run() -> float:
        return clock.seconds

    assert run() == 0.0
    waits = callers.start(run)
    until(lambda: clock.sleeping == 1)
    gives_up = callers.start(run)
    until(lambda: clock.sleeping == 2)
    clock.advance(60.0)
    assert waits.result(PATIENCE) == 60.0
    assert isinstance(gives_up.exception(PATIENCE), RateLimited)


def test_cancelled(sync_callers: Callers) -> None:
    """An async function of a plain limiter leaves the line when it is cancelled: others get what comes back."""
    limiter = sync_callers.limiter("1/30d")
    limiter.try_acquire("k")

    @limiter.limit(key="k", timeout=30.0)
    async def run() -> None: ...

    async def check() -> None:
        call = asyncio.ensure_future(run())
        await asyncio.sleep(0.05)
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
        limiter.refund("k")
        await asyncio.sleep(0.05)
        await until_async(lambda: limiter.peek("k", permits=0).remaining == 1)

    asyncio.run(check())


def test_context_manager(callers: Callers) -> None:
    limiter = callers.limiter("3/minute", clock=ManualClock())
    guard = limiter.limit(key="k", permits=2)
    with guard as decision:
        assert decision.remaining == 1
    with pytest.raises(RateLimited), guard:
        pytest.fail("denied, so the block does not run")
    with limiter.limit(key="k") as decision:
        assert decision.remaining == 0


def test_a_block_needs_a_text() -> None:
    """A block has no arguments of which a function could make a key."""
    with Limiter("3/minute") as limiter, pytest.raises(TypeError, match="text"), limiter.limit(key=lambda: "k"):
        pass


def test_plain_function_refused() -> None:
    """An async limiter guards async functions only."""
    limiter = AsyncLimiter("3/minute")
    plain: Callable[[], Any] = lambda: None  # noqa: E731  # the point is that it is plain
    with pytest.raises(TypeError, match="async"):
        limiter.limit(key="k")(plain)
    with pytest.raises(TypeError, match="async"):
        AsyncLimiter("3/minute", algorithm="leaky_bucket").paced(key="k")(plain)
