"""The core of headgate.web without a framework: requests that a test makes, from threads or from an event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Thread
from types import TracebackType
from typing import Any, Self

from headgate.web.core import RateLimitsBase, without_loop
from headgate.web.exchange import CLIENT_LEFT, HANDLER_RAISED, Exchange, ResponseInfo
from headgate.web.limit import Limit

COLOURS = ("threads", "asyncio")


@dataclass
class Request:
    """What the application's functions are called with."""

    method: str = "GET"
    route: str = "GET /"
    peer: str = "192.0.2.1"
    headers: dict[str, str | list[str]] = field(default_factory=dict)
    user: Any = None
    multiprocess: bool = False


class AsyncExchange(Exchange):
    """A request as the core sees it."""

    __slots__ = ("request",)

    def __init__(self, limits: RateLimitsBase[Any], request: Request) -> None:
        super().__init__(limits)
        self.request = request

    @property
    def native(self) -> Any:
        return self.request

    @property
    def method(self) -> str:
        return self.request.method

    @property
    def route(self) -> str:
        return self.request.route

    def peer(self) -> str:
        return self.request.peer

    def get_all(self, key: str) -> list[str]:
        found = {name.lower(): value for name, value in self.request.headers.items()}.get(key, [])
        return [found] if isinstance(found, str) else found

    def is_multiprocess(self) -> bool:
        return self.request.multiprocess


class BlockingExchange(AsyncExchange):
    """The same, from a thread."""

    __slots__ = ()
    blocking = True


class CoreLimits(RateLimitsBase[Limit]):
    limit_class = Limit


class Answer:
    """What came of a request."""

    def __init__(self, limits: CoreLimits, exchange: Exchange, admitted: bool) -> None:
        self.exchange = exchange
        self.admitted = admitted
        self.status = 200
        self.body: dict[str, Any] = {}
        headers = limits.headers(exchange)
        if not admitted:
            self.status, headers, body = limits.refusal(exchange)
            self.body = json.loads(body)
        self.headers = dict(headers)
        assert len(self.headers) == len(headers), "a header came twice"

    def __bool__(self) -> bool:
        return self.admitted

    @property
    def remaining(self) -> int:
        return int(self.headers["x-ratelimit-remaining"])


class Door:
    """Makes requests to limits of one application and runs a handler for those that are admitted."""

    def __init__(self, colour: str) -> None:
        self.colour = colour
        self.loop = asyncio.new_event_loop()
        self._made: list[CoreLimits] = []
        self._threads = ThreadPoolExecutor(64)
        if colour == "asyncio":
            self._thread = Thread(target=self.loop.run_forever)
            self._thread.start()

    def limits(self, **options: Any) -> CoreLimits:
        """The object of an application; closed when the test ends."""
        self._made.append(CoreLimits(**options))
        return self._made[-1]

    def start(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Future[Any]:
        """Run a coroutine of the core as this colour does."""
        if self.colour == "threads":
            return self._threads.submit(lambda: without_loop(work()))
        return asyncio.run_coroutine_threadsafe(work(), self.loop)

    def run(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        return self.start(work).result()

    def send(
        self,
        *asked: Limit | Iterable[Limit],
        answer: int | BaseException | ResponseInfo = 200,
        handler: Callable[[], Any] | None = None,
        **request: Any,
    ) -> Future[Answer]:
        """Start a request. Each of *asked* is a limit, or several that are met at once; *handler* runs if it may."""
        return self.start(lambda: self.request(asked, answer=answer, handler=handler, **request))

    def get(self, *asked: Limit | Iterable[Limit], **request: Any) -> Answer:
        """Make a request and wait for its answer."""
        return self.send(*asked, **request).result()

    def admitted(self, *asked: Limit | Iterable[Limit], times: int, **request: Any) -> int:
        """How many of so many requests, one after the other, are admitted."""
        return sum(bool(self.get(*asked, **request)) for _ in range(times))

    def admitted_at_once(self, *asked: Limit | Iterable[Limit], times: int, **request: Any) -> int:
        """How many of so many requests at once are admitted."""
        return sum(bool(one.result()) for one in [self.send(*asked, **request) for _ in range(times)])

    def handler(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """A handler that runs plain code which may block, and makes requests itself."""
        if self.colour == "threads":
            return function
        return lambda: asyncio.get_running_loop().run_in_executor(self._threads, function)

    def reset(self, limits: CoreLimits, key: object) -> bool:
        async def reset() -> bool:
            return await limits.reset(key)

        return bool(limits.reset(key)) if self.colour == "threads" else bool(self.run(reset))

    async def request(
        self,
        asked: Sequence[Limit | Iterable[Limit]],
        *,
        answer: int | BaseException | ResponseInfo = 200,
        handler: Callable[[], Any] | None = None,
        **request: Any,
    ) -> Answer:
        """What `send` starts."""
        groups = [[one] if isinstance(one, Limit) else list(one) for one in asked]
        limits: CoreLimits = groups[0][0].limits
        exchange = (BlockingExchange if self.colour == "threads" else AsyncExchange)(limits, Request(**request))
        response = ResponseInfo(CLIENT_LEFT)
        try:
            for group in groups:
                if not await limits.admit(exchange, group):
                    return Answer(limits, exchange, False)
            if handler and isinstance(waited := handler(), Awaitable):
                await waited
            if isinstance(answer, BaseException):
                raise answer
            response = answer if isinstance(answer, ResponseInfo) else ResponseInfo(answer)
            return Answer(limits, exchange, True)
        except Exception:
            response = ResponseInfo(HANDLER_RAISED)
            raise
        finally:
            if limits.needs_settling(exchange):
                if self.colour == "threads":
                    await limits.settle(exchange, response)
                else:
                    await limits.settle_later(exchange, response)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for made in self._made:
            if self.colour == "threads":
                made.close()
            else:
                self.run(made.aclose)
        self._threads.shutdown()
        if self.colour == "asyncio":
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
        self.loop.close()
