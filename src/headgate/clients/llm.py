"""Transports for httpx that keep all processes inside the limits of an LLM server.

    budget = Budget(requests="500/minute", tokens="100000/minute", store="redis://...", name="gpt")
    client = openai.OpenAI(http_client=httpx.Client(transport=BudgetTransport(budget)))

Each request reserves what it may cost, in line with those of all processes, and is settled by the usage in its answer.
The amounts of the budget may be ``requests``, ``tokens`` (input and output together), ``input`` and ``output``.

Some SDKs use `httpx2`, which has the same classes under another name. The transports serve both: which one they are
called by, they see from the request.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime
from functools import cache
from typing import Any, ClassVar, Generic, TypeVar

try:
    import httpx
except ImportError as error:
    raise ImportError("headgate.clients.llm needs httpx: pip install 'headgate[httpx]'") from error

from headgate.budget import AsyncBudget, Budget
from headgate.budget.budget import Keys
from headgate.clients.usage import (
    OutputQuantile,
    StreamReader,
    TokenUsage,
    count_characters,
    output_limit,
    pauses_in,
    read_body,
)
from headgate.errors import RateLimited

KINDS = ("requests", "tokens", "input", "output")
DEFAULT_OUTPUT = 500  # tokens, before there was an answer of the model
MOST_MODELS = 1000  # whose outputs are remembered; their names may come from users
MOST_TOKENS = 1_000_000_000  # that a budget can count in a call; servers that report more do not mean it

Counter = Callable[[dict[str, Any]], int]
AnyBudget = TypeVar("AnyBudget", bound=Budget | AsyncBudget)
AnyTransport = TypeVar("AnyTransport", bound=httpx.BaseTransport | httpx.AsyncBaseTransport)

# Errors after which nothing was sent, in both libraries.
_UNSENT = frozenset({"UnsupportedProtocol", "LocalProtocolError", "PoolTimeout", "ConnectError", "ConnectTimeout"})


def _library(request: Any) -> Any:
    """The module that *request* is of: httpx or httpx2."""
    return sys.modules[type(request).__module__.partition(".")[0]]


class _BudgetedTransport(Generic[AnyBudget, AnyTransport]):
    """The arguments of both transports, and what a call costs."""

    _budget_type: ClassVar[type[Budget | AsyncBudget]]
    _transport_name: ClassVar[str]  # of httpx's own

    def __init__(
        self,
        budget: AnyBudget,
        *,
        key: Keys | Callable[[httpx.Request], Keys] = "default",
        timeout: float | None = 60.0,
        count: Counter = count_characters,
        transport: AnyTransport | None = None,
    ) -> None:
        if not isinstance(budget, self._budget_type):
            name, expected = type(self).__name__, self._budget_type.__name__
            raise TypeError(f"budget of {name} must be of type {expected}, got {type(budget).__name__}")
        most = [int(budget.capacity.get(name, MOST_TOKENS)) for name in ("tokens", "output")]
        self._most_output = min(most)  # tokens that can be reserved, whatever a request allows
        self._names = [name for name in KINDS if name in budget.capacity]
        if not self._names:
            raise ValueError(f"the budget needs one of these amounts: {', '.join(KINDS)}; it has {[*budget.capacity]}")
        self._budget: AnyBudget = budget
        self._key = key
        self._timeout = timeout
        self._count = count
        self._outputs: dict[str, OutputQuantile] = {}  # by model
        self._inner: AnyTransport | None = transport

    def _sender(self, request: Any) -> AnyTransport:
        inner = self._inner
        if inner is None:
            inner = self._inner = getattr(_library(request), self._transport_name)()
        return inner

    def _key_of(self, request: httpx.Request) -> Keys:
        return self._key(request) if callable(self._key) else self._key

    def _estimate(self, body: dict[str, Any]) -> TokenUsage:
        """What the call may cost: its input as counted, its output by its own limit or by earlier answers."""
        limit = output_limit(body)
        learned = self._usual_output(str(body.get("model")), DEFAULT_OUTPUT)
        return TokenUsage(self._count(body), min(learned if limit is None else limit, self._most_output))

    def _usual_output(self, model: str, otherwise: int) -> int:
        known = self._outputs.get(model)
        return otherwise if known is None else known.estimate(otherwise)

    def _amounts(self, usage: TokenUsage, *, capped: bool = False) -> dict[str, int]:
        used = {"requests": 1, "tokens": usage.total, "input": usage.input, "output": usage.output}
        most = self._budget.capacity
        return {name: min(used[name], int(most[name]) if capped else MOST_TOKENS) for name in self._names}

    def _pauses(self, response: httpx.Response) -> list[tuple[float, list[str]]]:
        found = pauses_in(response.status_code, response.headers, datetime.now(UTC))
        named = [(seconds, [name for name in self._names if kind in ("", name)]) for kind, seconds in found]
        return [(seconds, names) for seconds, names in named if names]

    def _reader(self, response: httpx.Response) -> StreamReader:
        return StreamReader(response.headers.get("content-type", "").lower().startswith("text/event-stream"))

    def _used(self, model: str, estimate: TokenUsage, reader: StreamReader, status: int) -> dict[str, int]:
        """What an answer cost in the end, by its usage; without one by what has come of it."""
        reader.close()
        if reader.usage is not None:
            if model not in self._outputs and len(self._outputs) >= MOST_MODELS:
                self._outputs.popitem()  # the newest: a flood of names does not push out those that are in use
            self._outputs.setdefault(model, OutputQuantile()).add(reader.usage.output)
            return self._amounts(reader.usage)
        if status >= 400:
            return self._amounts(TokenUsage(0, 0))  # refused, or failed before it began
        # Broken off: the server has gone further than we have read, and may have come to the end of its answer.
        likely = min(self._usual_output(model, estimate.output), estimate.output)
        return self._amounts(TokenUsage(estimate.input, max(reader.output_so_far, likely)))

    def _after_error(self, error: BaseException, estimate: TokenUsage) -> dict[str, int]:
        """What a call without an answer cost: nothing if it was not sent, else its input."""
        if any(kind.__name__ in _UNSENT for kind in type(error).__mro__):
            return dict.fromkeys(self._names, 0)
        return self._amounts(TokenUsage(estimate.input, 0))

    def _refusal(self, request: httpx.Request, refused: RateLimited) -> httpx.Response:
        """The answer in place of the server's, which clients know how to retry."""
        wait = refused.decision.retry_after
        problem = {"message": f"headgate: {refused}", "type": "rate_limit_error", "code": "rate_limit_exceeded"}
        headers = {"retry-after-ms": f"{wait * 1000:.0f}", "retry-after": f"{wait:.3f}"}
        made: httpx.Response = _library(request).Response(
            429, json={"error": problem}, headers=headers, request=request
        )
        return made


class _Stream:
    """The body of an answer, read as it passes; settles the hold when it is closed."""

    def __init__(self, stream: Any, reader: StreamReader, settle: Callable[[], object]) -> None:
        self._stream, self._reader, self._settle = stream, reader, settle

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._stream:
            self._reader.feed(chunk)
            yield chunk

    def close(self) -> None:
        try:
            self._stream.close()
        finally:
            self._settle()


@cache
def _of_library(kind: type[Any], stream: type[Any]) -> Callable[..., Any]:
    """*kind* as a stream of the library, whose client checks that it is one."""
    return type(kind.__name__, (kind, stream), {})


class BudgetTransport(_BudgetedTransport[Budget, httpx.BaseTransport], httpx.BaseTransport):
    """For `httpx.Client`.

    Args:
        budget: what the server allows to all processes together
        key: of the budget, or a function of the request that gives it; one for each account at the server
        timeout: seconds that a request waits for the budget; then it is answered with a 429 of our own. None: for ever
        count: counts the input tokens of a request, given its JSON; if not given, characters / 4
        transport: what sends the request; httpx's own if not given
    """

    _budget_type = Budget
    _transport_name = "HTTPTransport"

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.method != "POST":
            return self._sender(request).handle_request(request)
        body, key = read_body(request.read()), self._key_of(request)
        estimate = self._estimate(body)
        try:
            amounts: dict[str, Any] = self._amounts(estimate, capped=True)
            hold = self._budget.reserve(key, timeout=self._timeout, **amounts)
        except RateLimited as refused:
            return self._refusal(request, refused)
        request.headers["accept-encoding"] = "identity"  # the usage is read from the bytes as they pass
        try:
            response = self._sender(request).handle_request(request)
        except BaseException as error:
            hold.settle(**self._after_error(error, estimate))
            raise
        reader, model, status = self._reader(response), str(body.get("model")), response.status_code
        response.stream = stream = _of_library(_Stream, _library(request).SyncByteStream)(
            response.stream, reader, lambda: hold.settled or hold.settle(**self._used(model, estimate, reader, status))
        )
        try:
            if response.is_closed:  # the transport has read it all, as that of a test or of a cache does
                reader.feed(response.content)
                stream.close()
            for seconds, names in self._pauses(response):
                self._budget.pause(key, seconds, *names)
        except BaseException:
            response.close()  # settles
            raise
        return response

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()


class _AsyncStream:
    """The body of an answer, read as it passes; settles the hold when it is closed."""

    def __init__(self, stream: Any, reader: StreamReader, settle: Callable[[], Any]) -> None:
        self._stream, self._reader, self._settle = stream, reader, settle

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._stream:
            self._reader.feed(chunk)
            yield chunk

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        finally:
            await self._settle()


class AsyncBudgetTransport(_BudgetedTransport[AsyncBudget, httpx.AsyncBaseTransport], httpx.AsyncBaseTransport):
    """For `httpx.AsyncClient`, with an `AsyncBudget`; the rest as in `BudgetTransport`."""

    _budget_type = AsyncBudget
    _transport_name = "AsyncHTTPTransport"

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.method != "POST":
            return await self._sender(request).handle_async_request(request)
        body, key = read_body(await request.aread()), self._key_of(request)
        estimate = self._estimate(body)
        try:
            amounts: dict[str, Any] = self._amounts(estimate, capped=True)
            hold = await self._budget.reserve(key, timeout=self._timeout, **amounts)
        except RateLimited as refused:
            return self._refusal(request, refused)
        request.headers["accept-encoding"] = "identity"  # the usage is read from the bytes as they pass
        try:
            response = await self._sender(request).handle_async_request(request)
        except BaseException as error:
            await hold.settle(**self._after_error(error, estimate))
            raise
        reader, model, status = self._reader(response), str(body.get("model")), response.status_code

        async def settle() -> None:
            if not hold.settled:
                await hold.settle(**self._used(model, estimate, reader, status))

        kind = _of_library(_AsyncStream, _library(request).AsyncByteStream)
        response.stream = stream = kind(response.stream, reader, settle)
        try:
            if response.is_closed:
                reader.feed(response.content)
                await stream.aclose()
            for seconds, names in self._pauses(response):
                await self._budget.pause(key, seconds, *names)
        except BaseException:
            await response.aclose()  # settles
            raise
        return response

    async def aclose(self) -> None:
        if self._inner is not None:
            await self._inner.aclose()
