"""What a limit is: its arguments, checked where they are written, so that a typo is found when the program starts."""

from __future__ import annotations

import copy
import difflib
import functools
import inspect
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Self, TypedDict

from headgate.decision import Decision
from headgate.errors import InvalidPermits
from headgate.keys import check_key
from headgate.rule import AlgorithmName, OnStoreError, Quotas, Rule, check_algorithm, check_permits, check_policy
from headgate.web.exchange import Exchange
from headgate.web.subject import KeySource as KeySource
from headgate.web.subject import SetupError as SetupError
from headgate.web.subject import Subject

QuotaSource = Quotas | Callable[[Any], Quotas | Awaitable[Quotas | None] | None]
OnDenied = Callable[..., Any]

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "QUERY", "WEBSOCKET")
MORE_METHODS = (  # the others that are registered, and those of caches and UPnP
    "ACL BASELINE-CONTROL BIND CHECKIN CHECKOUT COPY LABEL LINK LOCK MERGE MKACTIVITY MKCALENDAR MKCOL MKREDIRECTREF "
    "MKWORKSPACE MOVE ORDERPATCH PROPFIND PROPPATCH REBIND REPORT SEARCH UNBIND UNCHECKOUT UNLINK UNLOCK UPDATE "
    "UPDATEREDIRECTREF VERSION-CONTROL BAN PURGE REFRESH M-SEARCH NOTIFY SUBSCRIBE UNSUBSCRIBE"
)


class LimitOptions(TypedDict, total=False):
    """The named arguments of `RateLimits.limit`. What is left out comes from `RateLimits`.

    Attributes:
        key: "address", "header:NAME", a function of the request (plain or async), or a list: several subjects
        scope: limits of one scope and quota share their state; default: the route's template
        cost: permits of a request: a number, or a function of the request; 0: this request is free
        methods: only requests with these methods; GET stands for HEAD too
        exempt_when: a function of the request: true for requests that are not limited
        count_if: a function of the response: false gives the permits back
        algorithm: token_bucket, leaky_bucket, fixed_window, sliding_window, sliding_window_counter or gcra
        on_store_error: what to answer when the store cannot: allow, deny, local or raise
        shadow: decide and log, but never refuse
        timeout: seconds to wait in line for the permits instead of refusing
        on_denied: a function of the request and the decision that gives the response instead of the 429
    """

    key: KeySource | Sequence[KeySource]
    scope: str
    cost: int | Callable[[Any], int | Awaitable[int]]
    methods: Iterable[str]
    exempt_when: Callable[[Any], Any]
    count_if: Callable[[Any], Any]
    algorithm: AlgorithmName
    on_store_error: OnStoreError
    shadow: bool
    timeout: float
    on_denied: OnDenied


class MissingQuota(SetupError, AttributeError):
    """``@limits.limit`` without a quota took the view for a quota, and the framework asks it for the view's name.

    It is an `AttributeError` too, so that ``hasattr(limit, "__name__")`` is False and does not raise.
    """


class Limit:
    """One limit as `RateLimits.limit` makes it. In each framework it is also what goes on a route."""

    limits: Any  # the `RateLimits` that made it
    missing_quota: type[SetupError] = MissingQuota

    def __init__(
        self,
        quota: QuotaSource,
        *,
        key: KeySource | Sequence[KeySource] = "address",
        scope: str = "",
        cost: int | Callable[[Any], Any] = 1,
        methods: Iterable[str] = (),
        exempt_when: Callable[[Any], Any] | None = None,
        count_if: Callable[[Any], Any] | None = None,
        algorithm: AlgorithmName = "token_bucket",
        on_store_error: OnStoreError = "allow",
        shadow: bool = False,
        timeout: float | None = None,
        on_denied: OnDenied | None = None,
    ) -> None:
        self.algorithm = check_algorithm(algorithm)
        self.quota_function = _of_request(quota) if callable(quota) else None
        self.rule = None if callable(quota) else Rule(quota, self.algorithm)  # raises where the quota is written
        self.subjects = _subjects(key)
        self.scope = check_key(scope, "scope") if scope else ""
        self.cost = cost if callable(cost) else check_cost(cost, self.rule.capacity if self.rule else 0)
        self.methods = _methods(methods)
        self.exempt_when = check_function("exempt_when", exempt_when)
        self.count_if = check_function("count_if", count_if)
        self.on_store_error = check_policy(on_store_error)
        self.shadow = check_bool("shadow", shadow)
        self.timeout = _seconds(timeout)
        self.on_denied = check_function("on_denied", on_denied)
        self.limiters: dict[str, list[Any]] = {}  # by route: what counts it, where the quota is not a function's
        # the application's functions that are called before the decision; most limits have none
        given = (*(subject.source for subject in self.subjects), self.quota_function, cost, exempt_when)
        self.functions = tuple(each for each in given if callable(each))
        self.plain = (
            not (self.functions or self.methods or shadow or timeout or count_if)
            and len(self.subjects) == 1
            and cost == 1
        )
        self.by_address = self.plain and not self.subjects[0].header

    def __getattr__(self, name: str) -> Any:
        """Raise. A framework that needs the name of a view was given the limit in the place of the view."""
        if name == "__name__" and self.__dict__.get("quota_function") is not None:
            raise self.missing_quota(without_quota(self.quota_function))
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __deepcopy__(self, _: object) -> Self:
        return self  # as functions do: a framework may copy routes, and a copy would be another limit

    def __repr__(self) -> str:
        quotas = getattr(self.quota_function, "__qualname__", "") or ", ".join(map(str, self.rule.quotas))  # type: ignore[union-attr]
        return f"<{type(self).__name__} {quotas} by {', '.join(subject.name for subject in self.subjects)}>"

    def needs_no_more_than(self, earlier: Limit) -> bool:
        """Whether it has the subjects of *earlier* and calls no other functions: both can be decided at once."""
        sources, others = ([subject.source for subject in each.subjects] for each in (self, earlier))
        return sources == others and all(function in earlier.functions for function in self.functions)

    def untouched(self) -> Decision:
        """The decision for a request that is not limited: all permits remain; 0 of 0 if a function gives the quota."""
        capacity = 0 if self.rule is None else self.rule.capacity
        return Decision(limit=capacity, remaining=capacity)

    async def quotas(self, exchange: Exchange) -> Quotas | None:
        """The quotas of this request, where a function of the request gives them; None: it is not limited."""
        assert self.quota_function is not None
        found: Any = self.quota_function(exchange.native)
        quotas: Quotas | None = await found if inspect.isawaitable(found) else found
        return quotas

    async def permits(self, exchange: Exchange) -> int:
        """What the request costs."""
        if not callable(self.cost):
            return self.cost
        found: Any = self.cost(exchange.native)
        return check_cost(await found if inspect.isawaitable(found) else found)

    def costing(self, cost: int) -> Self:
        """This limit with another cost; their states are the same."""
        made = copy.copy(self)
        made.cost, made.plain, made.by_address = check_cost(cost), False, False
        return made

    async def applies(self, exchange: Exchange) -> bool:
        """Whether the request is one that this limit counts."""
        if self.methods and exchange.method not in self.methods:
            return False
        if self.exempt_when is None:
            return True
        found = self.exempt_when(exchange.native)
        return not (await found if inspect.isawaitable(found) else found)


def without_quota(function: Any) -> str:
    """What to tell an application that puts a limit on *function* and does not say which."""
    name = getattr(function, "__qualname__", repr(function))
    return f"the limit of {name:.60} has no quota; write limits.limit('5/minute') with the parentheses"


def _of_request(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return *function* if it can be called with a request; a view that cannot has taken the place of the quota."""
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise SetupError(f"{without_quota(function)}; or give a function of the request: {error}") from None
    except ValueError:  # a function without a signature, in C
        return function
    if isinstance(function, type):
        raise SetupError(without_quota(function))
    return function


def _subjects(key: KeySource | Subject | Sequence[KeySource | Subject]) -> tuple[Subject, ...]:
    sources = [key] if isinstance(key, str) or not isinstance(key, Sequence) else list(key)
    if not sources:
        raise SetupError("key is an empty list; give 'address', 'header:NAME' or a function of the request")
    own = [source for i, source in enumerate(sources) if source not in sources[:i]]
    return tuple(source if isinstance(source, Subject) else Subject(source) for source in own)


def _methods(methods: Iterable[str]) -> frozenset[str]:
    listed = () if isinstance(methods, str) else tuple(methods or ())
    if isinstance(methods, str) or not all(isinstance(method, str) and method for method in listed):
        raise SetupError(f"methods is a list of texts, such as ['POST'], got {methods!r:.40}")
    named = frozenset(method.upper() for method in listed)
    if unknown := sorted(named.difference(METHODS, MORE_METHODS.split())):
        raise SetupError(
            f"{', '.join(unknown)} is no method of HTTP; methods may be {', '.join(METHODS)} and those of WebDAV. "
            "For others, say exempt_when="
        )
    return named | {"HEAD"} if "GET" in named else named  # frameworks answer HEAD with the function for GET


def check_bool(what: str, given: object) -> bool:
    """Return *given* if it is True or False: the text "False" would be true."""
    if isinstance(given, bool):
        return given
    raise SetupError(f"{what} must be True or False, got {given!r:.40}")


def check_cost(cost: object, capacity: int = 0) -> int:
    """Return *cost* if it is a count of permits, of at most *capacity* unless that is 0; else raise."""
    try:
        return check_permits(cost, capacity, 0)
    except InvalidPermits as error:
        raise type(error)(str(error).replace("permits", "cost", 1)) from None


def unknown_arguments(what: str, unknown: Iterable[str], known: Iterable[str]) -> str:
    """What to tell a caller of *what* that gives arguments which it does not take."""
    wrong, right = sorted(unknown), sorted(known)
    close = [found for name in wrong for found in difflib.get_close_matches(name, right, 1)]
    meant = f"; did you mean {', '.join(close)}?" if close else ""
    return f"{what} takes no {', '.join(wrong)}; it takes {', '.join(right)}{meant}"


def check_function(what: str, given: Any) -> Any:
    if given is not None and not callable(given):
        raise SetupError(f"{what} must be a function, got {type(given).__name__} {given!r:.40}")
    return given


def check_answer(answer: Any, attribute: str) -> Any:
    """Return what `on_denied` gave if it has the *attribute* of a response, or is None for the 429; else raise."""
    if answer is None or (hasattr(answer, attribute) and not isinstance(answer, type)):
        return answer
    raise SetupError(f"on_denied must give a response, or None for the 429, got {type(answer).__name__} {answer!r:.60}")


def _seconds(timeout: float | None) -> float | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= sys.float_info.max:
        raise SetupError(f"timeout must be seconds above 0, or left out to refuse at once, got {timeout!r:.40}")
    return float(timeout)


def own_marks(target: Any, attribute: str) -> tuple[Any, ...]:
    """What `mark` has left on *target*; a class does not have what is said of its bases."""
    found: tuple[Any, ...] = getattr(target, attribute, ())
    return found if not isinstance(target, type) or attribute in vars(target) else ()


def mark(function: Any, attribute: str, value: Any) -> None:
    """Add *value* to a tuple that *function* carries; through `functools.partial` and bound methods too."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    setattr(function, attribute, (value, *getattr(function, attribute, ())))
