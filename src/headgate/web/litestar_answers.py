"""What Litestar answers, seen on its way to the server: headers, refusals, and what the answer decides.

A hook of Litestar sees every message to the server, also of exceptions, 404 and 405, which no guard and no middleware
sees. It may change a message, but not drop it or send another one.
"""

from __future__ import annotations

import inspect
from typing import Any, Generic, TypeVar

from litestar import Response, WebSocket
from litestar.connection import ASGIConnection
from litestar.exceptions import TooManyRequestsException

from headgate.decision import Decision
from headgate.web.asgi import TRY_AGAIN_LATER, ASGIExchange, ASGIRateLimits, Scope, response_info
from headgate.web.asgi_hot_path import STARTS
from headgate.web.headers import denial_headers
from headgate.web.limit import Limit, check_answer
from headgate.web.problem import CONTENT_TYPE

AnyLimit = TypeVar("AnyLimit", bound=Limit)

CORS = (b"access-control-", b"vary")  # headers that a 429 keeps of the answer that it replaces


class LimitExceededException(TooManyRequestsException):
    """A request was denied. An exception handler of the application for it, or for 429, may answer instead."""

    def __init__(self, decision: Decision, response: Response[Any]) -> None:
        super().__init__(detail="rate limit exceeded")
        self.decision = decision
        self.response = response


class LitestarExchange(ASGIExchange):
    """A request or a WebSocket. The application's functions get Litestar's `Request` or `WebSocket`."""

    __slots__ = ("answered", "body", "connection")

    def __init__(
        self, limits: LitestarAnswers[Any], scope: Scope, connection: ASGIConnection[Any, Any, Any, Any] | None
    ) -> None:
        super().__init__(limits, scope)
        self.connection = connection
        self.answered = False
        self.body: bytes | None = None  # what is sent in place of the body of an answer; None: it is left alone

    @property
    def native(self) -> Any:
        if self.connection is None:
            app = self.scope.get("litestar_app") or self.scope["app"]  # as old versions name it
            self.connection = app.request_class(self.scope)
        return self.connection

    @property
    def route(self) -> str:
        return self.limits.route_of(self.scope)  # type: ignore[attr-defined,no-any-return]  # of `LitestarAnswers`


class LitestarAnswers(ASGIRateLimits[AnyLimit], Generic[AnyLimit]):
    """The part of `RateLimits` that answers."""

    def exchange_for(self, request: Any) -> LitestarExchange:
        return LitestarExchange(self, request.scope, request)

    def route_of(self, scope: Any) -> str:
        """The default scope of limits where *scope* leads to; '' if it leads nowhere."""
        raise NotImplementedError

    def is_exempt(self, scope: Any) -> bool:
        """Whether the default is not for where *scope* leads to."""
        raise NotImplementedError

    async def denial(self, exchange: LitestarExchange) -> Response[Any]:
        """The answer to a request that was denied: by `on_denied`, or the 429."""
        on_denied = self.on_denied_of(exchange)
        if on_denied is not None:
            answer = on_denied(exchange.native, exchange.decision)
            answer = check_answer(await answer if inspect.isawaitable(answer) else answer, "to_asgi_response")
            if answer is not None:
                return answer  # type: ignore[no-any-return]  # what the application gives
        status, headers, body = self.refusal(exchange)
        return Response(body, status_code=status, headers=dict(headers), media_type=CONTENT_TYPE)

    async def before_send(self, message: Any, scope: Any) -> None:
        """Called by Litestar for every message to the server."""
        exchange: LitestarExchange | None = scope["state"].get(self.scope_key)
        if exchange is not None and exchange.answered:
            if exchange.body is not None and message["type"].startswith("http.response."):
                more = message.get("more_body", False)
                message.clear()
                message.update({"type": "http.response.body", "body": exchange.body, "more_body": more})
                exchange.body = b""
            return
        if not self.enabled or message["type"] not in STARTS or (exchange is None and self.default is None):
            return
        if exchange is None:  # no guard has run: 404, 405, or a middleware has answered
            exchange = scope["state"][self.scope_key] = LitestarExchange(self, scope, None)
        exchange.answered = True
        if not exchange.decided and not self.is_exempt(scope) and not await self.admit_default(exchange):
            await self._replace(exchange, message)
        if self.needs_settling(exchange):
            await self.settle_later(exchange, response_info(message))
        if message["type"] == "websocket.close":
            await self._refuse_websocket(exchange, message)
        elif exchange.decision is not None:
            self._add_headers(exchange, exchange.decision, message)

    def _add_headers(self, exchange: LitestarExchange, decision: Decision, message: Any) -> None:
        ours = {name.encode(): value.encode() for name, value in self.headers(exchange)}
        headers = list(message.get("headers") or ())
        if not decision:
            ours |= {name.encode(): value.encode() for name, value in denial_headers(decision)}
            present = {name.lower() for name, _ in headers}
            ours = {name: value for name, value in ours.items() if name not in present}
        elif message.get("status") == 429:
            return  # by a limiter of what is mounted
        # The message may be one that is sent again and again, from a cache: it must not gather headers.
        message["headers"] = [*[pair for pair in headers if pair[0].lower() not in ours], *ours.items()]

    async def _replace(self, exchange: LitestarExchange, message: Any) -> None:
        """Make the first message of another answer that of a refusal; `body` takes the place of the others."""
        if message["type"] != "http.response.start":
            return
        sent: list[Any] = []

        async def collect(part: Any) -> None:
            sent.append(part)

        scope: Any = exchange.scope
        answer = (await self.denial(exchange)).to_asgi_response(app=None, request=exchange.native)
        await answer(scope, exchange.native.receive, collect)
        exchange.body = b"" if exchange.method == "HEAD" else b"".join(part.get("body", b"") for part in sent[1:])
        kept = [pair for pair in message.get("headers") or () if pair[0].lower().startswith(CORS)]
        message.update(status=sent[0]["status"], headers=[*sent[0]["headers"], *kept])

    async def _refuse_websocket(self, exchange: LitestarExchange, message: Any) -> None:
        """Say why a WebSocket is closed before it was accepted, if a limit did it."""
        if exchange.denied_by is None:
            return
        extensions = exchange.scope.get("extensions") or {}
        if "websocket.http.response" not in extensions or not isinstance(exchange.connection, WebSocket):
            message.update(code=TRY_AGAIN_LATER, reason="rate limit exceeded")
            return
        status, headers, body = self.refusal(exchange)
        pairs = [(name.encode(), value.encode()) for name, value in headers]
        start: Any = {"type": "websocket.http.response.start", "status": status, "headers": pairs}
        await exchange.connection.send(start)
        message.clear()
        message.update({"type": "websocket.http.response.body", "body": body, "more_body": False})
