"""limit(): a limit around a function or a block."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from headgate import AsyncLimiter, Limiter
from headgate.errors import InvalidKey, RateLimited
from headgate.testing import ManualClock
from tests.support.clocks import WatchedClock, until_async
from tests.support.places import Place


def test_a_plain_function(place: Place) -> None:
    limiter = place.limiter("2/minute", clock=ManualClock())

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


def test_an_async_function_under_either_limiter(place: Place) -> None:
    async def check(limiter: Limiter | AsyncLimiter) -> None:
        async def double(a: int) -> int:
            """Double."""
            await asyncio.sleep(0)
            return 2 * a

        limited = limiter.limit(key="k")(double)
        assert inspect.iscoroutinefunction(limited)
        assert (limited.__name__, limited.__doc__) == ("double", "Double.")
        assert [await limited(1), await limited(2)] == [2, 4]
        with pytest.raises(RateLimited):
            await limited(3)

    async def check_async() -> None:
        async with place.async_limiter("2/minute", name="other") as limiter:
            await check(limiter)

    asyncio.run(check(place.limiter("2/minute")))
    asyncio.run(check_async())


def test_the_key_may_be_a_function_of_the_arguments(place: Place) -> None:
    limiter = place.limiter("1/minute", clock=ManualClock())

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


def test_the_key_of_a_method(place: Place) -> None:
    limiter = place.limiter("1/minute", clock=ManualClock())

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


def test_a_denied_function_does_not_run(place: Place) -> None:
    limiter = place.limiter("2/minute", clock=ManualClock())
    ran = []

    @limiter.limit(key="k", permits=2)
    def run() -> None:
        ran.append(1)

    run()
    with pytest.raises(RateLimited):
        run()
    assert ran == [1]


def test_errors_of_the_function_pass_through(place: Place) -> None:
    limiter = place.limiter("2/minute", clock=ManualClock())

    @limiter.limit(key="k")
    def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert limiter.peek("k", permits=0).remaining == 1, "the call was made, so it counts"


def test_a_bad_key_from_the_function_is_an_error(place: Place) -> None:
    limiter = place.limiter("2/minute", clock=ManualClock())

    @limiter.limit(key=lambda user: user)
    def greet(user: str) -> None: ...

    with pytest.raises(InvalidKey):
        greet("")


def test_with_a_timeout_it_waits(place: Place) -> None:
    async def check() -> None:
        clock = WatchedClock()
        async with place.async_limiter("1/minute", clock=clock) as limiter:

            @limiter.limit(key="k", timeout=60.0)
            async def run() -> float:
                return clock.seconds

            assert await run() == 0.0
            waits, gives_up = asyncio.ensure_future(run()), asyncio.ensure_future(run())
            await until_async(lambda: clock.sleeping == 2)
            clock.advance(60.0)
            assert await waits == 60.0
            with pytest.raises(RateLimited):
                await gives_up

    asyncio.run(check())


def test_a_cancelled_call_is_no_longer_in_line(place: Place) -> None:
    """An async function under a plain limiter: what comes back after the cancellation is there for others."""
    limiter = place.limiter("1/30d")
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


def test_a_plain_function_waits_too(place: Place) -> None:
    limiter = place.limiter("20/second burst 1")

    @limiter.limit(key="k", timeout=30.0)
    def run() -> int:
        return 1

    assert sum(run() for _ in range(3)) == 3


def test_as_a_context_manager(place: Place) -> None:
    limiter = place.limiter("3/minute", clock=ManualClock())
    guard = limiter.limit(key="k", permits=2)
    with guard as decision:
        assert decision.remaining == 1
    with pytest.raises(RateLimited), guard:
        pytest.fail("denied, so the block does not run")
    with limiter.limit(key="k") as decision:
        assert decision.remaining == 0


def test_as_an_async_context_manager(place: Place) -> None:
    async def check() -> None:
        async with place.async_limiter("3/minute", clock=ManualClock()) as limiter:
            async with limiter.limit(key="k", permits=2) as decision:
                assert decision.remaining == 1
            with pytest.raises(RateLimited):
                async with limiter.limit(key="k", permits=2):
                    pytest.fail("denied, so the block does not run")

    asyncio.run(check())


def test_errors_in_the_block_pass_through(place: Place) -> None:
    limiter = place.limiter("3/minute", clock=ManualClock())
    with pytest.raises(KeyError), limiter.limit(key="k"):
        raise KeyError


def test_a_block_has_no_arguments_to_make_a_key_of() -> None:
    with Limiter("3/minute") as limiter, pytest.raises(TypeError, match="text"), limiter.limit(key=lambda: "k"):
        pass


def test_an_async_limiter_needs_an_async_function() -> None:
    limiter = AsyncLimiter("3/minute")
    plain: Callable[[], Any] = lambda: None  # noqa: E731  # the point is that it is plain
    with pytest.raises(TypeError, match="async"):
        limiter.limit(key="k")(plain)
    with pytest.raises(TypeError, match="async"):
        AsyncLimiter("3/minute", algorithm="leaky_bucket").paced(key="k")(plain)
