"""Any ASGI application: a limit around all of it, HTTP and WebSocket.

app = RateLimitMiddleware(app, "100/minute", store="redis://localhost:6379/0")
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Generic, TypeVar

from headgate.web.asgi_hot_path import STARTS, ASGIRequest, serve
from headgate.web.core import RateLimitsBase, WholeApp
from headgate.web.exchange import CLIENT_LEFT, HANDLER_RAISED, Exchange, ResponseInfo
from headgate.web.headers import RawXHeaders, denial_headers, with_limit_headers
from headgate.web.hot_fields import PlainLimit
from headgate.web.limit import Limit, check_answer

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

TRY_AGAIN_LATER = 1013  # the code that closes a WebSocket whose client is over its limit
CLOSE = {"type": "websocket.close", "code": TRY_AGAIN_LATER, "reason": "rate limit exceeded"}
QUART_TEST_CLIENT = "_quart._preserve_context"  # in each scope that Quart's test client makes, which has no address
DENIAL = "websocket.http.response"  # the extension of servers that can answer a handshake with a response


class ASGIExchange(Exchange):
    """A request or a WebSocket, by its ASGI scope. The application's functions get the scope."""

    connection: Any = None  # the framework's request, if it is known
    plan: Any = None  # what is known of the route that matched; None: none was met yet
    prefix = ""  # templates of the mounts that lead to it
    accepted = False  # whether it is a WebSocket that the application has accepted
    exempt = False  # whether the default does not count it
    replaced = False  # whether the answer of the application is not sent, but a refusal
    told = False  # whether the 429 is being sent: `refusal` has put the headers on it

    def __init__(self, limits: RateLimitsBase[Any], scope: Scope) -> None:
        self.limits = limits  # as the base class does, whose call would cost more than this
        self.scope = scope

    @property
    def native(self) -> Any:
        return self.scope

    @property
    def method(self) -> str:
        return str(self.scope.get("method", "WEBSOCKET")).upper()

    @property
    def route(self) -> str:
        return ""

    def peer(self) -> str:
        client = self.scope.get("client")
        if client and client[0]:
            return str(client[0])
        return "testclient" if QUART_TEST_CLIENT in self.scope else ""

    def is_preflight(self) -> bool:
        return self.scope.get("method") == "OPTIONS" and super().is_preflight()

    def get_all(self, key: str) -> list[str]:
        wanted = key.encode()
        return [value.decode("latin-1") for name, value in self.scope["headers"] if name == wanted]


AnyLimit = TypeVar("AnyLimit", bound=Limit)


class ASGIRateLimits(RateLimitsBase[AnyLimit], Generic[AnyLimit]):
    """The limits of an application that speaks ASGI: what the frameworks on it share."""

    exchange_class: type[ASGIExchange] = ASGIExchange
    header_class = RawXHeaders

    @functools.cached_property
    def scope_key(self) -> str:
        """Where a scope carries its `ASGIRequest`."""
        return f"headgate.{id(self)}"

    def exchange_for(self, request: Any) -> Exchange:
        return self.exchange_class(self, getattr(request, "scope", request))

    def exchange_in(self, scope: Scope) -> Any:
        """The exchange of a request; None if no limits are around it, or if they are switched off."""
        request: ASGIRequest | None = scope.get(self.scope_key)
        return None if request is None else request.exchange()

    def serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send, outermost: bool) -> Awaitable[None]:
        """Run *app* for one request, put the limits' headers on its answer, and settle what the answer decides.

        *outermost*: limits are decided inside *app*; if its answer starts and none has, `admit_undecided` does.
        """
        awaitable: Awaitable[None] = serve(self, app, scope, receive, send, outermost)
        return awaitable

    async def serve_to_end(self, app: ASGIApp, scope: Scope, receive: Receive, request: ASGIRequest) -> None:
        """Run *app*, and settle what no answer has decided."""
        exchange, status = request.exchange(), CLIENT_LEFT
        try:
            await app(scope, receive, request.send)
        except Exception:
            status = HANDLER_RAISED
            raise
        finally:
            if not request.started and self.needs_settling(exchange):
                await self.settle_later(exchange, ResponseInfo(status))
            scope.pop(self.scope_key, None)  # otherwise only the garbage collector could free the two

    async def start(
        self, exchange: ASGIExchange, receive: Receive, send: Send, message: Message, outermost: bool
    ) -> None:
        """Send *message*, which starts an answer, or a refusal in its place."""
        if outermost and not exchange.decided and not await self.admit_undecided(exchange):
            exchange.replaced = True
            await self._answer_instead(exchange, exchange.scope, receive, send, message)
            return
        exchange.accepted = message["type"] == "websocket.accept"
        if self.needs_settling(exchange):
            await self.settle_later(exchange, response_info(message))
        await send(self.with_headers(exchange, message))

    def with_headers(self, exchange: ASGIExchange, message: Message) -> Message:
        """The start of a response with the limits' headers. Those of a limiter further in stay if it is tighter."""
        if exchange.decision is None or exchange.told or message["type"] == "websocket.close":
            return message
        if self.header_style == "x" and exchange.limiter is not None:
            ours = RawXHeaders(exchange.limiter.rule.quotas).of(exchange.decision)
        else:
            ours = _encoded(self.headers(exchange))
        if exchange.denied_by is not None:
            present = [name for name, _ in message.get("headers") or ()]
            ours += [pair for pair in _encoded(denial_headers(exchange.decision)) if pair[0] not in present]
        return with_limit_headers(message, ours, replace=exchange.denied_by is not None)

    def is_at_once(self, limit: Limit) -> bool:
        """Whether `ASGIRequest.admit` may decide *limit*: a plain one, by address, in memory."""
        return self.in_process and limit.by_address

    async def admit_default(self, exchange: Exchange) -> bool:
        """Take what the default limit asks, if there is one."""
        return self.default is None or await self.admit(exchange, (self.default,))

    async def admit_undecided(self, exchange: ASGIExchange) -> bool:
        """Decide for an answer that begins before a limit was met."""
        return exchange.exempt or await self.admit_default(exchange)

    async def answer_denied(self, exchange: ASGIExchange, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that was denied: by `on_denied`, which gives an ASGI application or None, or by the 429."""
        answer: Any = None
        if (on_denied := self.on_denied_of(exchange)) is not None:
            answer = on_denied(exchange.native, exchange.decision)
            answer = check_answer(await answer if inspect.isawaitable(answer) else answer, "__call__")
        if scope["type"] == "websocket" and (exchange.accepted or DENIAL not in (scope.get("extensions") or {})):
            await send(CLOSE)
        elif answer is not None:
            await answer(scope, receive, send)
        else:
            await self.refuse(exchange, scope, send)

    async def refuse(self, exchange: ASGIExchange, scope: Scope, send: Send) -> None:
        """Send the 429."""
        status, headers, body = self.refusal(exchange)
        exchange.told = True
        pairs = _encoded(headers)
        pairs.append((b"content-length", str(len(body)).encode()))
        kind = DENIAL if scope["type"] == "websocket" else "http.response"
        await send({"type": f"{kind}.start", "status": status, "headers": pairs})
        await send({"type": f"{kind}.body", "body": b"" if scope.get("method") == "HEAD" else body})

    async def _answer_instead(
        self, exchange: ASGIExchange, scope: Scope, receive: Receive, send: Send, replaced: Message
    ) -> None:
        """Answer a denied request instead of *replaced*, whose CORS headers stay: a browser needs them to read it."""
        present = replaced.get("headers") or ()
        kept = [pair for pair in present if pair[0] == b"vary" or pair[0].startswith(b"access-control-")]

        async def send_kept(message: Message) -> None:
            if message["type"].endswith(".start"):
                message = self.with_headers(exchange, message)
                message = {**message, "headers": [*message.get("headers", ()), *kept]}
            await send(message)

        await self.answer_denied(exchange, scope, receive, send_kept)


def response_info(message: Message) -> ResponseInfo:
    """What `count_if` sees of an ASGI response; of a WebSocket 101 if it is accepted, 403 if it is closed before."""
    headers = message.get("headers") or ()
    decoded = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers}
    return ResponseInfo(message.get("status") or STARTS[message["type"]], decoded)


def _encoded(headers: Iterable[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers]


class RateLimitMiddleware(WholeApp, ASGIRateLimits[Limit]):
    """A limit around a whole ASGI application.

    Takes a quota, and by name what `RateLimits` and `limit` take: ``RateLimitMiddleware(app, "100/minute", key=...)``.
    The functions get the ASGI scope; `on_denied` gives an ASGI application, or None for the 429.

    Args:
        app: the application
        quota: of each key, such as ``"100/minute"``
        **options: what `RateLimits` and `limit` take, by name
    """

    app: ASGIApp

    @functools.cached_property
    def _quick(self) -> PlainLimit | None:
        """The limit, if `ASGIRequest.admit` may decide it."""
        return self.plain_limit(self.whole, "")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # servers look whether it is async
        await self.serve(self._limited, scope, receive, send, False)

    def _limited(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        request: ASGIRequest | None = scope.get(self.scope_key)
        if request is None:
            return self.app(scope, receive, send)
        made = None if self._quick is None else request.admit(self._quick)
        if made is None:
            return self._decide(request.exchange(), scope, receive, send)
        return self.app(scope, receive, send) if made else self.answer_denied(request.exchange(), scope, receive, send)

    async def _decide(self, exchange: ASGIExchange, scope: Scope, receive: Receive, send: Send) -> None:
        allowed = await self.admit_default(exchange)
        await (self.app(scope, receive, send) if allowed else self.answer_denied(exchange, scope, receive, send))
