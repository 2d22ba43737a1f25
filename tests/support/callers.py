"""One test for both colours: limiters that are called from threads, or from the tasks of an event loop.

A test makes its limiters with `callers.limiter(...)` and calls them as a `Limiter`. For "async" each is an
`AsyncLimiter` behind the same methods: each call becomes a task of an event loop that runs in a thread of its own.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from headgate import AsyncLimiter, Decision, Limiter
from headgate.joint import JointCheck, try_acquire_all, try_acquire_all_async
from tests.support.clocks import WatchedClock, until
from tests.support.quotas import law

if TYPE_CHECKING:
    from tests.support.stores import OpenStore

T = TypeVar("T")

MakeLimiter = Callable[..., Limiter]  # the arguments of a limiter, without its store

COLOURS = ("sync", "async")


class Call:
    """An async function, called from a thread: blocks until the event loop's task has its result."""

    def __init__(self, loop: asyncio.AbstractEventLoop, function: Callable[..., Any]) -> None:
        self.loop, self.function = loop, function
        functools.update_wrapper(self, function)

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Start a task; to cancel the future cancels the task."""
        return asyncio.run_coroutine_threadsafe(self._run(*args, **kwargs), self.loop)

    async def _run(self, *args: Any, **kwargs: Any) -> Any:
        result = self.function(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.submit(*args, **kwargs).result()

    async def gather(self, times: int, *args: Any, **kwargs: Any) -> list[Any]:
        """Start so many tasks in one turn of the event loop."""
        return await asyncio.gather(*(self._run(*args, **kwargs) for _ in range(times)))


class BlockingGuard:
    """What `AsyncLimiter.limit` and `paced` return, as a context manager and decorator of plain code."""

    def __init__(self, loop: asyncio.AbstractEventLoop, guard: Any) -> None:
        self.loop, self.guard = loop, guard

    def __enter__(self) -> Decision:
        return cast(Decision, Call(self.loop, self.guard.__aenter__)())

    def __exit__(self, *error: object) -> None:
        Call(self.loop, self.guard.__aexit__)(*error)

    def __call__(self, function: Callable[..., Any]) -> Call:
        @functools.wraps(function)
        async def run(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return Call(self.loop, self.guard(run))


class BlockingLimiter:
    """An `AsyncLimiter` with the methods of a `Limiter`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limiter: AsyncLimiter) -> None:
        self.loop, self.limiter = loop, limiter

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.limiter, name)
        if name in ("within", "with_timeout"):
            return lambda seconds: BlockingLimiter(self.loop, value(seconds))
        if name in ("limit", "paced"):
            return lambda key, **options: BlockingGuard(self.loop, value(key, **options))
        return Call(self.loop, value) if callable(value) else value


class Callers:
    """Make limiters of one colour on one store, call them, and close them when the test ends."""

    def __init__(self, store: OpenStore, colour: str, *, whole: bool = True, share: float = 1.0) -> None:
        self.store, self.colour = store, colour
        self.share = share  # of random steps, from threads
        self.whole = whole  # else fewer cases will do: others run the same code
        self._end = ExitStack()

    def __enter__(self) -> Self:
        self._end.__enter__()
        self._pool = ThreadPoolExecutor(100)
        self._end.callback(self._pool.shutdown, wait=False, cancel_futures=True)
        if self.colour == "async":
            self.loop = self._end.enter_context(event_loop())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.__exit__(kind, error, trace)

    def limiter(self, quota: Any, **options: Any) -> Limiter:
        """A limiter that raises when the store fails, unless *options* say otherwise.

        The option *beside* is a limiter on whose store object it is to be.
        """
        beside = options.pop("beside", None)
        ours: dict[str, Any] = {name: options.pop(name) for name in ("name",) if name in options}
        ours |= law(options.pop("algorithm", "token_bucket"))
        ours["on_store_error"] = options.pop("on_store_error", "raise")
        ours |= {"store": beside.store} if beside else self.store.connect(self, **options)
        if self.colour == "sync":
            limiter = Limiter(quota, **ours)
            self.at_end(limiter.close)
            return limiter
        asynchronous = AsyncLimiter(quota, **ours)
        self.at_end(asynchronous.aclose)
        return cast(Limiter, BlockingLimiter(self.loop, asynchronous))

    @property
    def try_acquire_all(self) -> Callable[[Sequence[tuple[Limiter, str, int]]], list[Decision]]:
        """`try_acquire_all` for limiters of these callers."""
        if self.colour == "sync":
            return lambda checks: try_acquire_all([JointCheck(*check) for check in checks])
        return Call(self.loop, _take_all_async)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run *coroutine* in the event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def at_end(self, close: Callable[[], Any]) -> None:
        """Call *close* when the test ends; for "async" in the event loop."""
        self._end.callback(close if self.colour == "sync" else Call(self.loop, close))

    def start(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        """Begin *call* in a thread or a task of its own."""
        return call.submit(*args, **kwargs) if isinstance(call, Call) else self._pool.submit(call, *args, **kwargs)

    def wait_in_line(self, clock: WatchedClock, limiter: Limiter, **arguments: Any) -> Future[Decision]:
        """Begin to acquire "k"; return when that caller sleeps."""
        sleeping = clock.sleeping
        future = self.start(limiter.acquire, "k", **arguments)
        until(lambda: clock.sleeping > sleeping)
        return future

    def at_once(self, call: Callable[..., Any], times: int, *args: Any, **kwargs: Any) -> list[Any]:
        """Make so many calls at the same time: from 64 threads, or 8 where that will do, or from as many tasks."""
        if isinstance(call, Call):
            return self.run(call.gather(times, *args, **kwargs))
        threads = min(times, 64 if self.whole else 8)
        results = in_threads(threads, lambda: [call(*args, **kwargs) for _ in range(-(-times // threads))])
        return [result for some in results for result in some]


async def _take_all_async(checks: Sequence[tuple[Any, str, int]]) -> list[Decision]:
    return await try_acquire_all_async([JointCheck(limiter.limiter, key, permits) for limiter, key, permits in checks])


def in_threads(count: int, work: Callable[[], Any]) -> list[Any]:
    """Run *work* in so many threads that start together; list what they return."""
    results: list[Any] = []
    barrier = threading.Barrier(count)

    def run() -> None:
        barrier.wait()
        results.append(work())

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == count, "a thread died"
    return results


@contextmanager
def event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop in a thread of its own."""
    loops: list[asyncio.AbstractEventLoop] = []
    started, stop = threading.Event(), asyncio.Event()

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        started.set()
        await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=(main(),), name="event loop")
    thread.start()
    started.wait()
    try:
        yield loops[0]
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join()
