"""Throttling of logins: failures count, for the address and for the username, and a success is forgotten.

    throttle = LoginThrottle(store="redis://localhost:6379/0", per_username="5/15 minutes", per_address="20/hour")

    with throttle.attempt(request, username) as attempt:  # raises LoginRefused, before the password is looked at
        if authenticate(username, password):
            attempt.succeeded()

An attempt takes its permits first, and a success gives them back: so attempts at the same time cannot exceed a limit
together, and neither an exception nor a client that leaves makes an attempt free.

An address from which a user has logged in is known for that username, and has an allowance of its own for it. All other
addresses share the allowance of the username. A success gives back its own permits and renews the allowance of its
address for its username. All else stays counted: what other addresses tried for the username, and what the address
tried for other usernames.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

from headgate.clock import Clock
from headgate.decision import Decision
from headgate.errors import RateLimited
from headgate.keys import digest
from headgate.rule import OnStoreError, Quotas
from headgate.stores.base import Store, StoreOptions
from headgate.web.asgi import ASGIExchange
from headgate.web.core import RateLimitsBase, tighter, without_loop
from headgate.web.exchange import Charge, Exchange
from headgate.web.headers import retry_seconds
from headgate.web.limit import Limit, SetupError, check_bool
from headgate.web.permits import Permits, as_taken
from headgate.web.problem import problem
from headgate.web.startup import FORWARDED
from headgate.web.wsgi import WSGIExchange

MAX_CHARACTERS = 1000  # of a username; what comes after them tells no two usernames apart


class LoginRefused(RateLimited):
    """Too many logins have failed. ``decision`` says when to try again, ``answer()`` is the 429 for the client."""

    def __str__(self) -> str:
        return f"Too many failed logins; retry in {retry_seconds(self.decision)} s"

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body: problem+json, the same for usernames that exist and for those that do not."""
        seconds = retry_seconds(self.decision)
        status, headers, body = problem(429, str(self), ("retry-after", str(seconds)), retryAfterSeconds=seconds)
        return status, dict(headers), body


class LoginLimits(RateLimitsBase[Limit]):
    """The limits of a `LoginThrottle`, and how they find the address of a client."""

    limit_class = Limit
    owner = "LoginThrottle"

    def address_of_attempt(self, exchange: Exchange) -> str:
        """The key of the client's address; the first attempts are searched for a proxy that is not trusted."""
        if self.watched:
            self.look_at(exchange)
        return self.address(exchange)


class LoginThrottle:
    """Counts failed logins.

    Args:
        per_username: the quota of a username at all addresses together that are not known for it, and at each that is
        per_address: the quota of an address, for all usernames together
        remember: how long an address is known for a username after a login
        on_store_error: what to do when the store does not answer; "local" counts in this process meanwhile
        enabled: False: nothing is counted; may be changed at any time
        store: as for `RateLimits`
        trusted_proxies: as for `RateLimits`
        name: as for `RateLimits`
        forwarded: as for `RateLimits`
        ipv6_prefix: as for `RateLimits`
        clock: as for `RateLimits`
        **options: as for `RateLimits`
    """

    def __init__(
        self,
        *,
        store: str | Store = "memory://",
        per_username: Quotas = "5/15 minutes",
        per_address: Quotas = "20/hour",
        remember: str = "30 days",
        trusted_proxies: Iterable[str] = (),
        on_store_error: OnStoreError = "local",
        enabled: bool = True,
        name: str = "login",
        forwarded: Sequence[str] = FORWARDED,
        ipv6_prefix: int = 64,
        clock: Clock | None = None,
        **options: Unpack[StoreOptions],
    ) -> None:
        self.limits = LoginLimits(
            store=store,
            trusted_proxies=trusted_proxies,
            on_store_error=on_store_error,
            name=name,
            forwarded=forwarded,
            ipv6_prefix=ipv6_prefix,
            clock=clock,
            **options,
        )
        self.permits = Permits(self.limits.store)
        self.enabled = check_bool("enabled", enabled)
        self.by_address = self.limits.limit(per_address, scope="address")
        self.by_username = self.limits.limit(per_username, scope="username")
        self.by_both = self.limits.limit(per_username, scope="username at address")
        self.known = self.limits.limit(f"1/{remember}", scope="known")  # denies where an address is known

    def attempt(self, request: Any, username: str) -> LoginAttempt:
        """A login that is about to be tried, for ``with`` or ``async with``.

        Args:
            request: that of any framework of headgate, a WSGI environment, an ASGI scope, or the client's address as
                text
            username: as the user typed it

        Raises:
            LoginRefused: too many failures
        """
        return LoginAttempt(self, self.address(request), username)

    def address(self, request: Any) -> str:
        """The key of the client's address."""
        return self.limits.address_of_attempt(_exchange(self.limits, request))

    def reset(self, username: str = "", address: str = "") -> Awaitable[bool]:
        """Forget the failures of a username, of an address, or with both also those of the one at the other.

        To be awaited in async code; False: the store could not.

        Args:
            username: whose failures
            address: of which address
        """
        where = LoginAttempt(self, self.address(address) if address else "", username)
        charges = [where.charge(self.by_username)] if username else []
        charges += [where.charge(self.by_address)] if address else []
        charges += [where.charge(self.by_both)] if username and address else []
        return self.limits.reset_states([(charge.limiter, charge.key) for charge in charges])

    def close(self) -> None:
        """Close the store's connections, unless the store was handed in."""
        self.limits.close()

    async def aclose(self) -> None:
        """The same in async code."""
        await self.limits.aclose()


class LoginAttempt:
    """One login: raises `LoginRefused` when it begins, and counts as failed when it ends without `succeeded`."""

    def __init__(self, throttle: LoginThrottle, address: str, username: str) -> None:
        if not isinstance(username, str):
            raise SetupError(f"a username is text, got {type(username).__name__}; use '' if there is none")
        self.throttle = throttle
        user = digest(normalised(username))  # so that usernames cannot be read in the store
        self._keys = {throttle.by_address: address, throttle.by_username: user}
        self._keys |= dict.fromkeys((throttle.by_both, throttle.known), f"{address} {user}")
        self._exchange = AddressExchange(throttle.limits, address)
        self._is_known = self._is_success = False
        self._taken: list[Charge] = []

    def succeeded(self) -> None:
        """Say that the password was right: the attempt is given back when the block ends."""
        self._is_success = True

    def charge(self, limit: Limit) -> Charge:
        """What this attempt takes of *limit*."""
        [limiter] = self.throttle.limits.limiters_of(limit, "")
        return Charge(limit, limiter, self._keys[limit], 1)

    def __enter__(self) -> Self:
        self._exchange.blocking = True
        without_loop(self._begin())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        without_loop(self._end())

    async def __aenter__(self) -> Self:
        await self._begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.throttle.permits.shielded(self._end())

    async def _begin(self) -> None:
        throttle = self.throttle
        self._is_success, self._taken = False, []
        if not throttle.enabled:
            return
        self._is_known = not await self._ask("peek", throttle.known)
        whose = throttle.by_both if self._is_known else throttle.by_username
        charges = [self.charge(throttle.by_address), self.charge(whose)]
        answers = await throttle.permits.take_at_once(self._exchange, charges)
        denied: Decision | None = None
        for _, made in answers:
            if not made.allowed and tighter(made, denied):
                denied = made
        if denied is not None:
            raise LoginRefused(self._keys[whose], denied)
        self._taken = as_taken(answers, throttle.permits.now())

    async def _end(self) -> None:
        if not self._is_success or not self.throttle.enabled:
            return
        permits = self.throttle.permits
        await permits.give_back(self._exchange, permits.still_spent(self._taken))
        if self._is_known:
            await self._ask("reset", self.throttle.by_both)
        else:
            await self._ask("try_acquire", self.throttle.known)

    async def _ask(self, method: str, limit: Limit) -> Any:
        charge = self.charge(limit)
        if self._exchange.blocking:
            return getattr(charge.limiter.blocking, method)(charge.key)
        return await getattr(charge.limiter.waiting, method)(charge.key)


class AddressExchange(Exchange):
    """A client that is known by its address alone."""

    def __init__(self, limits: RateLimitsBase[Any], peer: str) -> None:
        super().__init__(limits)
        self.blocking = False
        self._peer = peer

    def peer(self) -> str:
        return self._peer

    def get_all(self, key: str) -> list[str]:
        return []


class TransportExchange(AddressExchange):
    """A request that knows its transport: aiohttp's and Sanic's."""

    def __init__(self, limits: RateLimitsBase[Any], request: Any) -> None:
        transport = request.transport
        peer = transport.get_extra_info("peername") if transport is not None else getattr(request, "remote", "")
        super().__init__(limits, str(peer[0]) if isinstance(peer, tuple | list) else peer or "")
        self._request = request

    def get_all(self, key: str) -> list[str]:
        values: list[str] = self._request.headers.getall(key, [])
        return values


def _exchange(limits: RateLimitsBase[Any], request: Any) -> Exchange:
    if isinstance(request, str):
        return AddressExchange(limits, request)
    if isinstance(request, Mapping) and "REQUEST_METHOD" in request:
        return WSGIExchange(limits, dict(request))
    if isinstance(request, Mapping) and "type" in request and "headers" in request:
        return ASGIExchange(limits, dict(request))
    environ = getattr(request, "META", None) or getattr(request, "environ", None)  # Django has both; Flask
    if environ is not None:
        return WSGIExchange(limits, environ)
    if hasattr(request, "transport"):
        return TransportExchange(limits, request)
    scope = getattr(request, "scope", None)
    if scope is not None:
        return ASGIExchange(limits, scope)
    raise SetupError(f"no address in a {type(request).__name__}; give a request, or the client's address as text")


def normalised(username: str) -> str:
    """*username* without what can be written in several ways: case, forms of a character, spaces, invisible characters.

    Names that an application tells apart may become one here; then they share their allowance.
    """
    folded = unicodedata.normalize("NFKC", username[:MAX_CHARACTERS]).casefold()
    seen = [" " if each.isspace() else each for each in unicodedata.normalize("NFKC", folded) if not _is_hidden(each)]
    return " ".join("".join(seen).split())


def _is_hidden(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cf", "Cs") and not character.isspace()
