"""One request and what its limits have decided: the part that each framework implements, and the part they share."""

from __future__ import annotations

from collections.abc import Mapping
from threading import local
from typing import TYPE_CHECKING, Any, NamedTuple

from headgate.decision import Decision

if TYPE_CHECKING:
    from headgate.web.core import RateLimitsBase
    from headgate.web.limit import Limit
    from headgate.web.limiters import ScopedLimiter


class Charge(NamedTuple):
    """Permits of one key that a request asks for, or has taken."""

    limit: Limit
    limiter: ScopedLimiter
    key: str
    permits: int
    degraded: bool = False  # `on_store_error` granted it, and not the store
    taken_at: int = 0  # microseconds; 0 where no response can give it back

    def is_possible(self) -> bool:
        """Whether a wait could bring the permits: more than the capacity can never be had."""
        return self.permits <= self.limiter.rule.capacity


class ResponseInfo:
    """What `count_if` is called with, in every framework.

    status_code  of the response; 500 if the handler raised, 499 if it was cancelled before there was a response
    headers      of the response, by lower-case name; empty if there is no response
    native       the framework's own response object, where there is one
    """

    __slots__ = ("headers", "native", "status_code")

    def __init__(self, status_code: int, headers: Mapping[str, str] | None = None, native: Any = None) -> None:
        self.status_code = status_code
        self.headers = {} if headers is None else headers
        self.native = native


CLIENT_LEFT, HANDLER_RAISED = 499, 500  # the status of a request without a response


class ServedView(local):
    """The view whose limits have been met by the request that this thread serves, so that the view need not ask."""

    met: Any = None


served_view: Any = ServedView()


class Exchange:
    """A request, as the limits see it. A framework's subclass implements what is marked so."""

    # What most requests never change has its first value on the class: one is made for every request.
    exempt = False  # whether the default does not count it
    blocking = False  # whether the framework calls from a thread: then the store is called without await
    decided: frozenset[Limit] = frozenset()  # limits that this request has met, whether they counted it or not
    taken: tuple[Charge, ...] = ()
    decision: Decision | None = None  # the tightest limit's; None: no limit has decided
    limiter: ScopedLimiter | None = None  # the one that made `decision`
    limit: Limit | None = None
    denied_by: Limit | None = None
    settled = False

    def __init__(self, limits: RateLimitsBase[Any]) -> None:
        self.limits = limits

    # ------------------------------------------------------------------------------- what a framework implements

    @property
    def native(self) -> Any:
        """The framework's request, which the application's functions are called with."""
        raise NotImplementedError

    @property
    def method(self) -> str:
        """The HTTP method, in capitals; WEBSOCKET for a WebSocket."""
        raise NotImplementedError

    @property
    def route(self) -> str:
        """The default scope: methods and template of the route, such as `GET /items/{id}`; '' if none matched."""
        raise NotImplementedError

    def peer(self) -> str:
        """The host of the TCP peer; '' if the server knows none, as on a Unix socket."""
        raise NotImplementedError

    def get_all(self, key: str) -> list[str]:
        """The values of a header, by its lower-case name."""
        raise NotImplementedError

    def is_multiprocess(self) -> bool:
        """Whether the server says that other processes serve the same application."""
        return False

    # ----------------------------------------------------------------------------------------- what they share

    def is_preflight(self) -> bool:
        """Whether a browser asks what it may send (CORS). It must not be refused, or counted: it is not the request."""
        return self.method == "OPTIONS" and bool(self.get_all("access-control-request-method"))

    def address(self) -> str:
        """The key of the client's address."""
        return self.limits.address(self)
