"""`RateLimitsBase`: the limits of one application, on one store. Each framework has a subclass that calls it.

Everything that may wait is written once, as a coroutine. A framework that runs in threads calls it through
`without_loop`: then every call to the store is a plain one and nothing is ever awaited.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from typing import Any, Generic, Never, TypeVar, Unpack

from headgate._plan import without_waiting
from headgate.clock import Clock
from headgate.decision import Decision
from headgate.errors import StoreUnavailable
from headgate.keys import check_key
from headgate.quota import Quota
from headgate.rule import AlgorithmName, OnStoreError
from headgate.stores.base import Store, StoreOptions, is_per_process, open_store
from headgate.web.exchange import CLIENT_LEFT, HANDLER_RAISED, Charge, Exchange, ResponseInfo
from headgate.web.headers import (
    HeaderStyle,
    XHeaders,
    binding_quota,
    check_style,
    header_names,
    limit_headers,
    retry_seconds,
)
from headgate.web.hot_fields import LimitsFields, PlainLimit
from headgate.web.limit import (
    KeySource,
    Limit,
    LimitOptions,
    OnDenied,
    QuotaSource,
    SetupError,
    check_bool,
    check_function,
    unknown_arguments,
)
from headgate.web.limiters import DEFAULT_SCOPE, ScopedLimiter, ScopedLimiters
from headgate.web.permits import Permits, as_taken, counted_once
from headgate.web.problem import problem
from headgate.web.startup import FORWARDED, FirstRequests, make_client_ip
from headgate.web.subject import SubjectNames, key_text

logger = logging.getLogger("headgate.web")

Result = TypeVar("Result")
AnyLimit = TypeVar("AnyLimit", bound=Limit)


# Runs a coroutine in a thread without an event loop.
without_loop = without_waiting(
    SetupError, "a key, cost, quota or condition of a limit is an async function; in a plain view it must be plain"
)


class Done(Generic[Result]):
    """A result that may be awaited and need not be. It is a coroutine to `asyncio.run`, without a frame to close."""

    def __init__(self, result: Result) -> None:
        self.result = result

    def __bool__(self) -> bool:
        return bool(self.result)

    def __await__(self) -> Generator[Any, Any, Result]:
        return self.result
        yield

    def send(self, _: object) -> Never:
        raise StopIteration(self.result)

    def throw(self, error: Any, *_: object) -> Never:
        raise error

    def close(self) -> None:
        """Do nothing."""


class RateLimitsOptions(StoreOptions, total=False):
    """The arguments of `RateLimitsBase`, for frameworks whose `RateLimits` takes the application before them."""

    store: str | Store
    default: QuotaSource | None
    key: KeySource | Sequence[KeySource]
    trusted_proxies: Iterable[str]
    headers: HeaderStyle | None
    algorithm: AlgorithmName
    on_store_error: OnStoreError
    on_denied: OnDenied | None
    enabled: bool
    name: str
    forwarded: Sequence[str]
    ipv6_prefix: int
    clock: Clock | None


class RateLimitsBase(LimitsFields, Generic[AnyLimit]):
    """The limits of one application.

    Args:
        store: a URL (``memory://``, ``redis://...``) or a store object
        default: the quota of everything that has no limit of its own: other routes, 404s, mounted applications. All of
            them together share it
        key: whose permits are spent, where a limit does not say so: see `LimitOptions`
        trusted_proxies: networks of the proxies whose forwarded headers are read; "unix" for peers on a Unix socket
        headers: "x" for X-RateLimit-*, "ietf" for RateLimit and RateLimit-Policy, "both", or None
        on_denied: a function of the request and the decision that gives the response instead of the 429
        enabled: False: nothing is limited; may be changed at any time, in tests for example
        algorithm: of limits that do not name one
        on_store_error: what to answer when the store cannot, for limits that do not say so
        name: tells applications on one store apart
        forwarded: the headers to read the address from, the first one present counts. Best name only the one that your
            proxies write: they may hand on what a client claims in another
        ipv6_prefix: an IPv6 client is known by its network of that many bits
        clock: a `headgate.testing.ManualClock`, in tests
        **options: of the store, as for a `Limiter`
    """

    limit_class: type[AnyLimit]
    installation = "limits.install(app)"  # how an application gets its limits
    owner = "RateLimits"  # what the application has made, which warnings name
    arguments = frozenset(RateLimitsOptions.__annotations__)
    header_class = XHeaders

    def __init__(
        self,
        *unnamed: Never,
        store: str | Store = "memory://",
        default: QuotaSource | None = None,
        key: KeySource | Sequence[KeySource] = "address",
        trusted_proxies: Iterable[str] = (),
        headers: HeaderStyle | None = "x",
        algorithm: AlgorithmName = "token_bucket",
        on_store_error: OnStoreError = "allow",
        on_denied: OnDenied | None = None,
        enabled: bool = True,
        name: str = "web",
        forwarded: Sequence[str] = FORWARDED,
        ipv6_prefix: int = 64,
        clock: Clock | None = None,
        **options: Unpack[StoreOptions],
    ) -> None:
        if unnamed:
            raise TypeError(self.unnamed_text(unnamed[0]))
        if unknown := options.keys() - StoreOptions.__annotations__.keys():
            raise TypeError(unknown_arguments(type(self).__name__, unknown, self.arguments))
        self.store, self._owned = open_store(store, clock, options)
        self.name = check_key(name, "name")
        self.enabled = check_bool("enabled", enabled)
        self.header_style = check_style(headers)
        self.on_denied: OnDenied | None = check_function("on_denied", on_denied)
        self._fallback: LimitOptions = {"key": key, "algorithm": algorithm, "on_store_error": on_store_error}
        Limit("1/second", **self._fallback)  # wrong arguments raise here, where they are written
        self._client_ip = make_client_ip(trusted_proxies, forwarded, ipv6_prefix)
        self.key_of_peer = self._client_ip.key_of_peer
        self._limiters = ScopedLimiters(self.store, self.name)
        self._subject_names = SubjectNames()
        self._permits = Permits(self.store)
        self.in_process = self._permits.in_process
        self._first_requests = FirstRequests(
            self.owner, forwarded=not trusted_proxies, per_process=is_per_process(self.store)
        )
        self.watched = self._first_requests.count
        self.default = None if default is None else self.limit(default, scope=DEFAULT_SCOPE)

    def limit(self, quota: QuotaSource, **options: Unpack[LimitOptions]) -> AnyLimit:
        """A limit for a route; wrong arguments raise here.

        Args:
            quota: text, a `Quota`, a list: all must allow; or a function of the request that gives one
            **options: see `LimitOptions`
        """
        if unknown := options.keys() - LimitOptions.__annotations__.keys():
            raise TypeError(unknown_arguments("limit()", unknown, LimitOptions.__annotations__))
        given: Any = {**self._fallback, **options}
        made = self.limit_class(quota, **given)
        made.limits = self
        self._subject_names.tell_apart(made.subjects, made.scope)
        self.settles = self.settles or made.count_if is not None
        if made.scope:
            self.limiters_of(made, "")  # known before its first request, so that a key can be reset
        return made

    def unnamed_text(self, given: object) -> str:
        """What to tell an application that gives something without its name: a quota, or the application."""
        if isinstance(given, str | Quota | Sequence):
            return f"the quota of everything needs its name: RateLimits(default={given!r:.80})"
        return (
            f"RateLimits takes named arguments, such as RateLimits(default='5/minute'), got {given!r:.60}; an "
            f"application gets its limits by {self.installation}"
        )

    def _place(self, limit: Limit) -> tuple[object, ...]:
        """What tells the counters of limits apart: two limits with the same would count a request twice."""
        quotas = limit.rule.label if limit.rule else limit.quota_function
        return (self.name, limit.scope, quotas, [subject.source for subject in limit.subjects])

    def is_at_once(self, limit: Limit) -> bool:
        """Whether *limit* is decided in one call, without an `Exchange`. Where it may be, a framework says so."""
        return False

    def plain_limit(self, limit: Limit, route: str) -> PlainLimit | None:
        """What decides *limit* on *route*, if it `is_at_once`."""
        if not self.is_at_once(limit):
            return None
        [limiter] = self.limiters_of(limit, route)
        return PlainLimit(limit, limiter, self.header_class(limiter.rule.quotas))

    # ---------------------------------------------------------------------------------------- one request

    async def admit(self, exchange: Exchange, limits: Iterable[Limit]) -> bool:
        """Take what *limits* ask of the request, all or nothing; False: one of them refuses, see `exchange`.

        May be called several times for one request, with more limits: what was taken before goes back on a refusal,
        and a limit counts a request once.
        """
        if not self.enabled or exchange.is_preflight():
            return True
        if self.watched:
            self.look_at(exchange)
        limits = [limit for limit in limits if limit not in exchange.decided]
        exchange.decided = exchange.decided.union(limits)
        if self.default is not None and limits and not exchange.exempt and self.default not in exchange.decided:
            method = exchange.method
            if all([limit.methods and method not in limit.methods for limit in exchange.decided]):
                limits.append(self.default)  # the route has limits, and none of them is for this method
                exchange.decided = exchange.decided.union(limits)
        if len(limits) == 1 and limits[0].plain and not exchange.taken:
            [limit] = limits
            [limiter] = self._limiters.of(limit, exchange.route)
            charges = [Charge(limit, limiter, await limit.subjects[0].key(exchange), 1)]
        else:
            charges = []
            for limit in limits:
                try:
                    charges += await self._charges(limit, exchange)
                except Exception as error:
                    error.add_note(f"while {limit!r} was decided for {exchange.route or exchange.method}")
                    raise
            charges = counted_once(exchange.taken, charges)
        return not charges or await self._take(exchange, charges)

    def look_at(self, exchange: Exchange) -> None:
        """Look at one of the first requests for what is wrong with the set-up."""
        self.watched -= 1
        self._first_requests.look_at(exchange)

    async def check(self, exchange: Exchange, limit: Limit, cost: int | None = None) -> Decision:
        """Take permits of *limit* for a request that is being served: *cost* of them, or what the limit says.

        A *cost* of 0 takes nothing and tells how things stand.
        A decision of its own, as often as it is asked: if it denies, what the request has taken before stays taken, and
        the caller answers. For costs that are known late, such as that of a GraphQL query.
        """
        asked = copy.copy(exchange)
        asked.decided, asked.taken, asked.decision, asked.denied_by = frozenset(), (), None, None
        if self.default is not None and limit is not self.default:
            asked.decided = frozenset((self.default,))
        priced = limit if cost is None else limit.costing(cost)
        await self.admit(asked, (priced,))
        exchange.decided |= {limit}
        exchange.taken += asked.taken
        if asked.decision is None:  # switched off, exempt, or free
            return (await self._peek(asked, limit) if cost == 0 and self.enabled else None) or limit.untouched()
        if tighter(asked.decision, exchange.decision):
            exchange.decision, exchange.limiter, exchange.limit = asked.decision, asked.limiter, asked.limit
        return asked.decision

    async def settle(self, exchange: Exchange, response: ResponseInfo) -> None:
        """Give back the permits of limits whose `count_if` is false for *response*. Does so once for a request.

        A `count_if` that raises is logged, and its permits stay spent: the handler has done its work, and an error here
        would take its answer from the client.
        """
        if exchange.settled:
            return
        exchange.settled = True
        for limit in dict.fromkeys(charge.limit for charge in exchange.taken):
            if limit.count_if is not None:
                try:
                    counts = limit.count_if(response)
                    counts = bool(await counts if inspect.isawaitable(counts) else counts)
                except Exception:
                    logger.exception("count_if of %r failed: its permits stay spent", limit)
                    continue
                if not counts:
                    its = [charge for charge in exchange.taken if charge.limit is limit]
                    await self._permits.give_back(exchange, self._permits.still_spent(its))

    def settle_later(self, exchange: Exchange, response: ResponseInfo) -> Awaitable[None]:
        """`settle` in a task that a cancellation of the caller does not reach."""
        return self._permits.shielded(self.settle(exchange, response))

    def settle_at_end(self, exchange: Exchange) -> Callable[[], object]:
        """Settle when the current task ends, if no response did so before: then the client has left.

        The result ends the watch; it is for servers whose task goes on to the next request of a connection.
        """

        def ended(task: asyncio.Task[Any]) -> None:
            if not exchange.settled:
                failed = not task.cancelled() and task.exception() is not None
                self.settle_later(exchange, ResponseInfo(HANDLER_RAISED if failed else CLIENT_LEFT))

        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(ended)
        return lambda: task.remove_done_callback(ended)

    def needs_settling(self, exchange: Exchange) -> bool:
        """Whether the response decides if permits go back: most requests need not wait for it."""
        return self.settles and any([charge.limit.count_if is not None for charge in exchange.taken])

    def address(self, exchange: Exchange) -> str:
        """The key of the client's address."""
        key = self._client_ip.host_key(exchange.peer(), exchange)
        if not key:
            raise SetupError(self._client_ip.without_address())
        return key

    def address_of(self, request: Any) -> str:
        """The client's address, as limits by address know it: read through `trusted_proxies`, IPv6 as its network.

        For key functions: ``key=lambda request: user_of(request) or limits.address_of(request)``. *request* is what
        such a function is called with.
        """
        return self.address(self.exchange_for(request))

    def exchange_for(self, request: Any) -> Exchange:
        """Another exchange for a framework's *request*. Implemented by each framework."""
        raise NotImplementedError

    # ---------------------------------------------------------------------------------------- what clients see

    @property
    def header_names(self) -> list[str]:
        """The headers that answers carry, for the list of what a browser may read (CORS: expose headers)."""
        return header_names(self.header_style)

    def headers(self, exchange: Exchange) -> list[tuple[str, str]]:
        """The headers of an answer, from the decision that was made: the tightest limit's. None without a decision."""
        if exchange.decision is None or exchange.limiter is None:
            return []
        limiter = exchange.limiter
        return limit_headers(self.header_style, exchange.decision, limiter.policy_name, limiter.rule.quotas)

    def refusal(self, exchange: Exchange) -> tuple[int, list[tuple[str, str]], bytes]:
        """The answer to a request that was denied: status, headers, body."""
        assert exchange.decision is not None and exchange.limiter is not None
        seconds = retry_seconds(exchange.decision)
        quotas = exchange.limiter.rule.quotas
        headers = self.headers(exchange)
        if not seconds:
            return problem(429, self.impossible_text(", ".join(map(str, quotas))), *headers)
        if exchange.decision.degraded and exchange.limiter.policy == "deny":
            text = self.unchecked_text(seconds)
        else:
            text = self.denial_text(str(quotas[binding_quota(exchange.decision, quotas)]), seconds)
        return problem(429, text, ("retry-after", str(seconds)), *headers, retryAfterSeconds=seconds)

    def denial_text(self, quota: str, seconds: int) -> str:
        """What a client that was refused reads; a framework may translate it."""
        return f"Rate limit exceeded ({quota}); retry in {seconds} s"

    def unchecked_text(self, seconds: int) -> str:
        """The same if the store did not answer, and `on_store_error` is "deny"."""
        return f"The rate limit could not be checked; retry in {seconds} s"

    def impossible_text(self, quotas: str) -> str:
        """The same if the request asks for more permits than the limit ever has."""
        return f"This request costs more than the limit ever has ({quotas}), so it can never be admitted"

    def on_denied_of(self, exchange: Exchange) -> OnDenied | None:
        """The function of the application that answers a denied request; None: `refusal` does."""
        return (exchange.denied_by.on_denied if exchange.denied_by else None) or self.on_denied

    # -------------------------------------------------------------------------------------- looking after keys

    def limiters_of(self, limit: Limit, route: str) -> list[ScopedLimiter]:
        """The limiters of a limit on *route*, one for each subject; none if a function gives its quota."""
        return [] if limit.rule is None else self._limiters.of(limit, route)

    def known_limiters(self) -> list[ScopedLimiter]:
        """The limiters that requests have used so far, and those that a framework has declared."""
        return self._limiters.all()

    def stored_keys(self, limiter: ScopedLimiter, key: str) -> set[str]:
        """The keys of a client in *limiter*. *key*: an address, the value of a header, or what a key function gives.

        An IPv6 address is kept as its network, the value of a header as a digest.
        """
        return limiter.subject.stored(key, self._client_ip.named_host_key(key))

    def reset(self, key: object) -> Awaitable[bool]:
        """Forget *key* in every limit, as if never seen. To be awaited in async code; False: the store could not.

        Args:
            key: an address, the value of a header, or what a key function gives
        """
        text = key_text(key)
        if not text.strip():
            raise SetupError(f"reset() takes the key of a client, such as an address or a user's id, got {key!r:.60}")
        limiters = self.known_limiters()
        return self.reset_states([(each, stored) for each in limiters for stored in self.stored_keys(each, text)])

    def reset_states(self, states: Sequence[tuple[ScopedLimiter, str]]) -> Awaitable[bool]:
        """Forget each key in its limiter. As `reset`."""
        if not self._in_loop():
            return Done(all([limiter.blocking.reset(key) for limiter, key in states]))
        return self._reset(states)

    def close(self) -> None:
        """Close the store's connections, unless the store was handed in."""
        if self._owned:
            self.store.close()

    async def aclose(self) -> None:
        """The same in async code."""
        if self._owned:
            await self.store.aclose()

    # ------------------------------------------------------------------------------------------------ inside

    async def _charges(self, limit: Limit, exchange: Exchange) -> list[Charge]:
        """What *limit* asks of the request: one charge for each subject, none if it does not apply."""
        if not await limit.applies(exchange):
            return []
        permits = await limit.permits(exchange)
        if not permits:
            return []
        if limit.rule is not None:
            limiters = self._limiters.of(limit, exchange.route)
        else:
            quotas = await limit.quotas(exchange)
            if quotas is None:
                return []
            limiters = self._limiters.of_quotas(limit, exchange.route, quotas)
        keys = [await subject.key(exchange) for subject in limit.subjects]
        return [Charge(limit, limiter, key, permits) for limiter, key in zip(limiters, keys, strict=True)]

    async def _peek(self, exchange: Exchange, limit: Limit) -> Decision | None:
        """The tightest decision for a request that takes nothing; None if *limit* is not for this request."""
        charges = await self._charges(limit.costing(1), exchange)
        made = [await self._permits.peek(exchange, charge) for charge in charges]
        return min(made, key=lambda each: each.remaining, default=None)

    async def _take(self, exchange: Exchange, charges: list[Charge]) -> bool:
        if any([charge.limit.shadow for charge in charges]):
            await self._take_in_shadow(exchange, [charge for charge in charges if charge.limit.shadow])
            charges = [charge for charge in charges if not charge.limit.shadow]
            if not charges:
                return True
        answers = await self._permits.take(exchange, charges)
        allowed = True
        for charge, made in answers:
            allowed = allowed and made.allowed
            if tighter(made, exchange.decision):
                exchange.decision, exchange.limiter, exchange.limit = made, charge.limiter, charge.limit
        if allowed:
            exchange.taken += tuple(as_taken(answers, self._permits.now()))
            return True
        exchange.denied_by = exchange.limit
        await self._permits.give_back(exchange, exchange.taken)
        return False

    async def _take_in_shadow(self, exchange: Exchange, charges: list[Charge]) -> None:
        """Take the charges of each shadow limit that would allow the request; it does not wait, and never raises."""
        for limit in dict.fromkeys(charge.limit for charge in charges):
            try:
                answers = await self._permits.take_at_once(exchange, [each for each in charges if each.limit is limit])
            except StoreUnavailable as error:
                logger.warning("the shadow limit %r cannot decide: %s", limit, error)
                continue
            if all([made for _, made in answers]):
                exchange.taken += tuple(as_taken(answers, self._permits.now()))
            else:
                logger.info("the shadow limit %r would refuse a request to %s", limit, exchange.route or "no route")

    async def _reset(self, states: Sequence[tuple[ScopedLimiter, str]]) -> bool:
        return all([await limiter.waiting.reset(key) for limiter, key in states])

    def _in_loop(self) -> bool:
        if self.in_process:
            return False
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return False
        return True


class WholeApp(RateLimitsBase[Limit]):
    """The limits of a middleware: one limit around all of an application."""

    limit_class = Limit
    owner = "RateLimitMiddleware"
    arguments = RateLimitsBase.arguments - {"default"} | LimitOptions.__annotations__.keys()

    def __init__(self, app: Any, quota: QuotaSource, **options: Any) -> None:
        for_limit = {name: options.pop(name) for name in options.keys() & LimitOptions.__annotations__.keys()}
        super().__init__(**options)
        self.app = app
        self.whole = self.default = self.limit(quota, **{"scope": DEFAULT_SCOPE, **for_limit})
        if isinstance(app, RateLimitsBase) and app.default is not None:
            ours, theirs = self._place(self.whole), app._place(app.default)
            if ours == theirs and type(app.store) is type(self.store):
                raise SetupError(f"{self.whole!r} is around the application twice: each request would count twice")


def tighter(made: Decision, than: Decision | None) -> bool:
    """Whether *made* limits the client more than *than*, so that the client is told the numbers of *made*."""
    if than is None:
        return True
    if made.allowed != than.allowed:
        return than.allowed
    if made.allowed:
        return made.remaining < than.remaining
    return than.retry_us > 0 and (made.retry_us > than.retry_us or made.retry_us == 0)  # 0: no wait is long enough
