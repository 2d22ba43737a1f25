"""Any WSGI application: a limit around all of it.

app = RateLimitMiddleware(app, "100/minute", store="redis://localhost:6379/0")
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from headgate.decision import Decision
from headgate.web.core import RateLimitsBase, WholeApp, without_loop
from headgate.web.exchange import CLIENT_LEFT, HANDLER_RAISED, Exchange, ResponseInfo
from headgate.web.headers import LIMIT_HEADERS, MAX_DIGITS, denial_headers
from headgate.web.hot_fields import PlainLimit
from headgate.web.limit import Limit, QuotaSource, SetupError, check_answer
from headgate.web.wsgi_hot_path import LimitedWSGI, WSGIRequest

UNPREFIXED = {"content-type": "CONTENT_TYPE", "content-length": "CONTENT_LENGTH"}  # as CGI names them

Headers = list[tuple[str, str]]
Write = Callable[[bytes], object]


class WSGIExchange(Exchange):
    """A request, by its WSGI environment, and its answer on the way from the application to the server.

    The status of an answer is final when the first bytes of its body are sent: until then it may be started again.
    The application's functions get the environment.
    """

    limits: WSGIRateLimits[Any]
    blocking = True
    route: str = ""
    met = False  # whether the limits of this request have been asked
    settles = False  # whether the answer may decide if permits go back
    status = ""  # of the answer, as the application gave it; '' before
    headers: Sequence[tuple[str, str]] = ()
    response: Any = None  # the framework's response object, where `count_if` may want it
    refused: list[bytes] | None = None  # the body of the 429 that takes the answer's place

    def __init__(
        self, limits: RateLimitsBase[Any], environ: WSGIEnvironment, start_response: StartResponse | None = None
    ) -> None:
        self.limits = limits  # type: ignore[assignment]  # a login has others, and no answer to start
        self.environ = environ
        self.start_response: Any = start_response

    @property
    def native(self) -> Any:
        return self.environ

    @property
    def method(self) -> str:
        return str(self.environ["REQUEST_METHOD"]).upper()

    def peer(self) -> str:
        return self.environ.get("REMOTE_ADDR") or ""

    def get_all(self, key: str) -> list[str]:
        name = UNPREFIXED.get(key) or "HTTP_" + key.upper().replace("-", "_")
        value = self.environ.get(name)
        return [] if value is None else [value]  # servers join the lines of a header by commas

    def is_multiprocess(self) -> bool:
        return bool(self.environ.get("wsgi.multiprocess"))

    def start(self, status: str, headers: Headers, exc_info: Any = None, /) -> Write:
        """What the application calls as `start_response`."""
        if not self.met:
            self.met = True
            if not self.limits.admit_late(self):
                self.refused = self.limits.refuse(self, self.start_response, headers)
        if self.refused is not None:
            return lambda data: None
        self.status, self.headers = status, headers
        if self.decision is not None:
            headers = self._with_limits(status, headers, self.decision)
        write: Write = (
            self.start_response(status, headers, exc_info) if exc_info else self.start_response(status, headers)
        )
        return functools.partial(self._write, write) if self.settles else write

    def keep_plan(self, plan: Any, native: Any) -> None:
        """Remember the *plan* whose limits were met without this exchange, and the framework's request."""

    def settle(self, without_answer: int = CLIENT_LEFT) -> None:
        """Give back what `count_if` says, by the answer, or by *without_answer* if none has started."""
        if not self.settles or self.settled:
            return
        info = ResponseInfo(without_answer)
        if self.status:
            headers = {name.lower(): value for name, value in self.headers}
            info = ResponseInfo(int(self.status[:3]), headers, self.response)
        self.limits.run(self.limits.settle(self, info), [charge.limit for charge in self.taken])

    def fail(self) -> None:
        """The application raised: the server answers in its place, unless bytes of its answer are out already."""
        self.status = ""
        self.settle(HANDLER_RAISED)

    def _write(self, write: Write, data: bytes, /) -> object:
        self.settle()
        return write(data)

    def _with_limits(self, status: str, headers: Headers, made: Decision) -> Headers:
        """*headers* with those of the limits. Those of a limiter further in stay if it is tighter."""
        ours = self.limits.headers(self)
        for name, _ in headers:
            if name.lower() in LIMIT_HEADERS:
                if _remaining(headers) <= _remaining(ours):
                    ours = []
                else:
                    headers = [pair for pair in headers if pair[0].lower() not in LIMIT_HEADERS]
                break
        if not made.allowed and (self.denied_by is not None or status.startswith("429")):
            present = {name.lower() for name, _ in headers}
            ours += [pair for pair in denial_headers(made) if pair[0] not in present]
        return [*headers, *ours]


class WSGIBody:
    """The body of an answer that is settled by its first bytes, or that is not started when the application returns."""

    def __init__(self, exchange: WSGIExchange, body: Iterable[bytes]) -> None:
        self.exchange = exchange
        self.body = body
        self.chunks = iter(body)

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        exchange = self.exchange
        try:
            chunk = next(self.chunks)
        except StopIteration:
            if not exchange.refused:
                exchange.settle()
                raise
            chunk = b""
        except BaseException:
            exchange.fail()
            raise
        if exchange.refused is not None:  # the answer started with its first chunk, and met the default then
            chunk, self.chunks, exchange.refused = b"".join(exchange.refused), iter(()), []
        elif chunk:
            exchange.settle()
        return chunk

    def close(self) -> None:
        """What the server calls when it has sent the answer, or when the client has left."""
        try:
            _close(self.body)
        finally:
            self.exchange.settle()


Result = TypeVar("Result")
AnyLimit = TypeVar("AnyLimit", bound=Limit)


class WSGIRateLimits(RateLimitsBase[AnyLimit], Generic[AnyLimit]):
    """The limits of an application that speaks WSGI."""

    exchange_class: type[WSGIExchange] = WSGIExchange

    @functools.cached_property
    def environ_key(self) -> str:
        """Where an environment carries the `Exchange` of its request."""
        return f"headgate.{id(self)}"

    def exchange_in(self, environ: WSGIEnvironment) -> Any:
        """The exchange of the request that *environ* carries; None: these limits are not around it."""
        request: WSGIRequest | None = environ.get(self.environ_key)
        return None if request is None else request.exchange()

    def finish(self, exchange: WSGIExchange, body: Iterable[bytes]) -> Iterable[bytes]:
        """The body of an answer that the application has returned, which settles what the answer decides."""
        if exchange.refused is not None:
            _close(body)
            return exchange.refused
        if exchange.status and not exchange.settles:
            return body  # as it is, so that a server can send a file itself
        if exchange.status and isinstance(body, list | tuple):
            exchange.settle()
            return body
        return WSGIBody(exchange, body)

    def exchange_for(self, request: Any) -> Exchange:
        return self.exchange_class(self, getattr(request, "environ", request))

    def is_at_once(self, limit: Limit) -> bool:
        """Whether `WSGIRequest.meet` may decide *limit*: a plain one, by address, on any store."""
        return limit.by_address

    def admit_in_thread(self, exchange: WSGIExchange, limits: tuple[Limit, ...]) -> bool:
        """`admit`, for a framework that calls from threads."""
        return self.run(self.admit(exchange, limits), limits)

    def run(self, work: Coroutine[Any, Any, Result], limits: Iterable[Limit]) -> Result:
        """Run a coroutine of the core that calls functions of *limits*."""
        return without_loop(work)

    def admit_late(self, exchange: WSGIExchange) -> bool:
        """Take what the default asks of a request that is answered although no limit was asked."""
        limit = self.default
        return limit is None or self.admit_in_thread(exchange, (limit,))

    def refuse(
        self, exchange: Exchange, start_response: StartResponse, keep: Iterable[tuple[str, str]] = ()
    ) -> list[bytes]:
        """Answer a request that was denied. *keep*: headers of the answer that this one replaces; CORS ones stay."""
        _, headers, body = self.refusal(exchange)
        headers += [pair for pair in keep if pair[0].lower().startswith("access-control-") or pair[0].lower() == "vary"]
        headers.append(("content-length", str(len(body))))
        start_response("429 Too Many Requests", headers)
        return [] if exchange.method == "HEAD" else [body]


def _remaining(headers: Iterable[tuple[str, str]]) -> int:
    """What X-RateLimit-Remaining says; -1 if it is not there."""
    found = (value for name, value in headers if name.lower() == "x-ratelimit-remaining" and len(value) < MAX_DIGITS)
    return int(next((value for value in found if value.isdecimal()), -1))


def _close(body: Iterable[bytes]) -> None:
    close = getattr(body, "close", None)
    if close is not None:
        close()


class WholePlan(NamedTuple):
    """What a middleware asks of every request, as `WSGIRequest.meet` takes it."""

    limits: tuple[Limit, ...]
    met: frozenset[Limit]
    quick: PlainLimit | None  # where the address is all that the limit asks for


class RateLimitMiddleware(WholeApp, WSGIRateLimits[Limit]):
    """A limit around a whole WSGI application.

    Takes a quota, and by name what `RateLimits` and `limit` take: ``RateLimitMiddleware(app, "100/minute", key=...)``.
    The functions get the WSGI environment; `on_denied` gives a WSGI application, or None for the 429.

    Args:
        app: the application
        quota: of each key, such as ``"100/minute"``
        **options: what `RateLimits` and `limit` take, by name
    """

    app: WSGIApplication

    def __init__(self, app: WSGIApplication, quota: QuotaSource, **options: Any) -> None:
        super().__init__(app, quota, **options)
        if found := async_functions(self.whole):
            raise SetupError(f"{', '.join(found)} must be a plain function: WSGI has no event loop")
        self._plan = WholePlan((self.whole,), frozenset((self.whole,)), self.plain_limit(self.whole, ""))
        self._serve = LimitedWSGI(self, self._limited)

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        body: Iterable[bytes] = self._serve(environ, start_response)
        return body

    def _limited(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        request: WSGIRequest | None = environ.get(self.environ_key)
        if request is None or request.plan is not None:
            return self.app(environ, start_response)
        met = environ["REQUEST_METHOD"] != "OPTIONS" and request.meet(self._plan, None)
        if met and request.decision:
            return self.app(environ, start_response)
        exchange = request.exchange()
        if not met:
            if exchange.met:
                return self.app(environ, start_response)
            exchange.met, exchange.settles = True, self.whole.count_if is not None
            if self.admit_in_thread(exchange, (self.whole,)):
                return self.app(environ, start_response)
        on_denied = self.on_denied_of(exchange)
        answer = check_answer(on_denied(environ, exchange.decision), "__call__") if on_denied else None
        return self.refuse(exchange, start_response) if answer is None else answer(environ, start_response)


def async_functions(limit: Limit) -> list[str]:
    """The arguments of *limit* that are async functions."""
    functions = {
        "quota": limit.quota_function,
        "cost": limit.cost,
        "exempt_when": limit.exempt_when,
        "count_if": limit.count_if,
        "on_denied": limit.on_denied,
    }
    functions |= {f"key {subject.name}": subject.source for subject in limit.subjects}
    return [name for name, function in functions.items() if inspect.iscoroutinefunction(function)]
