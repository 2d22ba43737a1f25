"""Storages of `limits` in memory and on Redis, for threads and for asyncio, behind one set of blocking methods."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Self

import limits.aio.strategies
import limits.strategies
import pytest
from limits.storage import storage_from_string

import headgate.limits
from headgate.testing import ManualClock
from tests.support.callers import COLOURS, Call, event_loop, in_threads
from tests.support.servers import Server

FOR_THREADS: dict[str, Any] = limits.strategies.STRATEGIES
FOR_ASYNCIO: dict[str, Any] = limits.aio.strategies.STRATEGIES


class Blocking:
    """An object with async methods, which block here until the event loop has their results."""

    def __init__(self, loop: Any, wrapped: Any) -> None:
        self.loop, self.wrapped = loop, wrapped

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.wrapped, name)
        return Call(self.loop, value) if callable(value) else value


class Place:
    """Where storages are made: a URL of `limits`, and a colour."""

    def __init__(self, url: str, colour: str, loop: Any) -> None:
        self.url, self.colour, self.loop = url, colour, loop
        self._end = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._end.close()

    def storage(self, **options: Any) -> Any:
        """A storage of headgate, called as one for threads, and closed when the test ends."""
        if self.colour == "sync":
            made: Any = storage_from_string(f"headgate+{self.url}", **options)
            self._end.callback(made.storage.close)
            return made
        made = Blocking(self.loop, storage_from_string(f"async+headgate+{self.url}", **options))
        self._end.callback(Call(self.loop, made.storage.aclose))
        return made

    def limiter(self, strategy: str, storage: Any = None) -> Any:
        """A strategy on *storage*, or on a new one."""
        storage = storage or self.storage()
        if self.colour == "sync":
            return FOR_THREADS[strategy](storage)
        return Blocking(self.loop, FOR_ASYNCIO[strategy](storage.wrapped))

    def at_once(self, times: int, call: Any, *args: Any) -> list[Any]:
        """Make so many calls at the same time, from threads or from tasks."""
        if isinstance(call, Call):
            return Call(self.loop, call.gather)(times, *args)  # type: ignore[no-any-return]  # a list of results
        return in_threads(times, lambda: call(*args))


@pytest.fixture(scope="session")
def loop() -> Iterator[Any]:
    with event_loop() as running:
        yield running


@pytest.fixture(params=COLOURS)
def memory(request: pytest.FixtureRequest, loop: Any) -> Iterator[Place]:
    """In memory."""
    with Place("memory://", request.param, loop) as place:
        yield place


@pytest.fixture(params=COLOURS)
def redis_place(request: pytest.FixtureRequest, loop: Any, redis_server: Server) -> Iterator[Place]:
    """On a Redis server, empty."""
    with Place(redis_server.url, request.param, loop) as place:
        yield place


ROWS = [
    pytest.param((store, colour), id=f"{store} {colour}", marks=[pytest.mark.server] * (store == "redis"))
    for store in ("memory", "redis")
    for colour in COLOURS
]


@pytest.fixture(params=ROWS)
def place(request: pytest.FixtureRequest, loop: Any) -> Iterator[Place]:
    """Every kind of storage in turn, empty."""
    store, colour = request.param
    url = "memory://" if store == "memory" else request.getfixturevalue("redis_server").url
    with Place(url, colour, loop) as place:
        yield place


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def installed() -> Iterator[None]:
    """memory:// and redis:// of `limits` are headgate's."""
    headgate.limits.install()
    yield
    headgate.limits.uninstall()
