"""The limits of a Django project, and one request as they see it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.conf.urls.i18n import is_language_prefix_patterns_used
from django.http.response import HttpResponseBase
from django.utils.translation import gettext

from headgate.decision import Decision
from headgate.keys import digest
from headgate.web.client_ip import in_networks, parse_address, parse_network
from headgate.web.core import RateLimitsBase, tighter
from headgate.web.django.answers import give_headers, refuse, tell
from headgate.web.exchange import Charge, Exchange, ResponseInfo
from headgate.web.limit import Limit
from headgate.web.limiters import ScopedLimiter
from headgate.web.permits import counted_once
from headgate.web.wsgi import UNPREFIXED

if TYPE_CHECKING:
    from headgate.web.django.decorators import ratelimit

TEST_CLIENT = "testserver"
THROTTLE = "throttle "  # what the scopes of throttles begin with
EXCHANGE = "_headgate"  # the attribute of a request that has its exchange


class DjangoLimit(Limit):
    """A limit of a view. One that does not *block* only takes note: the view runs, with `request.limited` true."""

    block = True


class DjangoExchange(Exchange):
    """One request. Its parts may run in a thread and on an event loop in turn, so each says where it runs."""

    __slots__ = ("blocking", "default_met", "handler", "managed", "met", "request", "threaded")

    def __init__(self, limits: DjangoRateLimits, request: Any) -> None:
        super().__init__(limits)
        self.request = request
        self.handler = ""  # the method of a class view whose limits are being met: GET, or a view set's action
        self.managed = False  # the middleware or an outer decorator finishes this request
        self.met = False  # the view's own limits have been met, whether they counted the request or not
        self.default_met = False
        self.runs(threaded=True)

    def runs(self, *, threaded: bool) -> None:
        """Say where the next part runs. A WSGI request has an event loop for itself, if any, and may block it."""
        self.threaded = threaded
        self.blocking = threaded or not hasattr(self.request, "scope")

    def aside(self) -> DjangoExchange:
        """The same request, for limits whose refusal does not refuse it."""
        made = DjangoExchange(self.limits, self.request)  # type: ignore[arg-type]
        made.handler, made.threaded, made.blocking = self.handler, self.threaded, self.blocking
        return made

    def hear(self, decision: Decision, limiter: ScopedLimiter | None, limit: Limit | None) -> None:
        """Tell the client of *decision*, if it is tighter than what it would hear."""
        if tighter(decision, self.decision):
            self.decision, self.limiter, self.limit = decision, limiter, limit

    @property
    def native(self) -> Any:
        return self.request

    @property
    def method(self) -> str:
        return str(self.request.method or "").upper()

    @property
    def route(self) -> str:
        match = self.request.resolver_match
        return "" if match is None else f"{self.handler}/{without_language(self.request, match.route)}"

    def peer(self) -> str:
        return str(self.request.META.get("REMOTE_ADDR") or "")

    def get_all(self, key: str) -> list[str]:
        scope = getattr(self.request, "scope", None)
        if scope is not None:
            wanted = key.encode("latin-1")  # literally: in META, X_Forwarded_For may pass for X-Forwarded-For
            return [value.decode("latin-1") for name, value in scope["headers"] if name == wanted]
        value = self.request.META.get(UNPREFIXED.get(key) or "HTTP_" + key.upper().replace("-", "_"))
        return [] if value is None else [value]

    def is_multiprocess(self) -> bool:
        meta = self.request.META  # Django's test client and ASGI requests always say so
        told = not hasattr(self.request, "scope") and meta.get("SERVER_NAME") != TEST_CLIENT
        return told and bool(meta.get("wsgi.multiprocess"))


class DjangoRateLimits(RateLimitsBase[DjangoLimit]):
    """The limits of a project, made from the setting HEADGATE; see `headgate.web.django.settings`."""

    limit_class = DjangoLimit
    owner = "HEADGATE"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._trusted = [parse_network(name) for name in options.get("trusted_proxies", ()) if name != "unix"]
        self._declared: dict[ratelimit, DjangoLimit] = {}
        self._throttles: dict[Hashable, DjangoLimit] = {}

    def exchange_for(self, request: Any) -> DjangoExchange:
        return DjangoExchange(self, getattr(request, "_request", request))

    def exchange(self, request: Any, *, threaded: bool) -> DjangoExchange:
        """The exchange of *request*: one for its whole way, also where REST framework has wrapped it."""
        plain = getattr(request, "_request", request)
        exchange: DjangoExchange | None = getattr(plain, EXCHANGE, None)
        if exchange is None or exchange.limits is not self:
            exchange = DjangoExchange(self, plain)
            setattr(plain, EXCHANGE, exchange)
            plain.ratelimit, plain.limited = None, False
        exchange.request = request
        exchange.runs(threaded=threaded)
        return exchange

    def behind(self, exchange: DjangoExchange, proxies: int | None) -> str:
        """The key of the client's address behind at most so many *proxies*; None: however many are trusted.

        Forwarded headers are read only from trusted proxies: with 0, or from another peer, it is the peer's address.
        """
        peer = exchange.peer()
        hops = exchange.get_all("x-forwarded-for") if proxies else []
        if proxies is None or not peer or not hops:
            return self._client_ip.named_host_key(peer) if proxies == 0 and peer else self.address(exchange)
        client = peer
        for hop in reversed(",".join(hops).split(",")[-proxies:]):
            seen_by, address = parse_address(client), parse_address(hop)
            if seen_by is None or address is None or not in_networks(seen_by, self._trusted):
                break
            client = str(address)
        return self._client_ip.named_host_key(client)

    def of(self, declared: ratelimit) -> DjangoLimit:
        """The limit of a decorator: its own arguments, and the settings' for those that it leaves out."""
        found = self._declared.get(declared)
        if found is None:
            made = self.limit(declared.rate, **declared.options)
            made.block = declared.block
            found = self._declared.setdefault(declared, made)  # another thread may have been quicker
        return found

    def of_throttle(self, label: Hashable, quotas: Any, scope: str, **options: Any) -> DjangoLimit:
        """The limit of a throttle, the same one for the same *label*. Its keys are given with each request."""
        found = self._throttles.get(label)
        if found is None:
            made = self.limit(quotas, scope=THROTTLE + scope, key=client, **options)
            found = self._throttles.setdefault(label, made)
        return found

    def stored_keys(self, limiter: ScopedLimiter, key: str) -> set[str]:
        """The keys of a client in *limiter*. *key*: an address, ``user:ID``, or the value of a header or a field."""
        found = super().stored_keys(limiter, key)
        if limiter.subject.source is client:
            ident = self._client_ip.named_host_key(key.removeprefix("user:"))
            return {*found, limiter.subject.text(f"throttle_{limiter.scope.removeprefix(THROTTLE)}_{ident}")}
        address = limiter.subject.text(self._client_ip.named_host_key(key))
        if limiter.subject.name.partition("#")[0] == "user":
            return {*found, address}
        if limiter.subject.name.startswith(("get:", "post:")):
            return {digest(key.encode(errors="backslashreplace").decode()), address}
        return found

    # ---------------------------------------------------------------------------------------- what a request meets

    async def meet(self, exchange: DjangoExchange, limits: Sequence[DjangoLimit]) -> bool:
        """Take what a view's own limits ask of the request, in one step; False: it is refused."""
        await self._begin(exchange)
        allowed = await self.admit(exchange, [limit for limit in limits if limit.block])
        limited = not allowed
        noted = [limit for limit in limits if not limit.block and limit not in exchange.decided]
        if allowed and noted:
            limited = not await self._take_note(exchange, noted)
        if limited:
            await tell(exchange)
        self._publish(exchange, limited)
        return allowed

    async def meet_keys(self, exchange: DjangoExchange, asked: Sequence[tuple[DjangoLimit, str, int]]) -> bool:
        """The same for throttles, which give a key and the permits themselves."""
        await self._begin(exchange)
        if not self.enabled or exchange.is_preflight():
            return True
        if self.watched:
            self.look_at(exchange)
        charges = [
            Charge(limit, self.limiters_of(limit, "")[0], limit.subjects[0].text(key), permits)
            for limit, key, permits in asked
        ]
        if exchange.denied_by is not None:  # frameworks ask every throttle, and tell the longest wait
            return all([await self._look(exchange, charge) for charge in charges])
        charges = counted_once(exchange.taken, charges)
        allowed = not charges or await self._take(exchange, charges)
        if not allowed:
            await tell(exchange)
        self._publish(exchange, not allowed)
        return allowed

    async def meet_default(self, exchange: DjangoExchange) -> bool:
        """Take what the default limit asks, if there is one."""
        if self.default is None:
            return True
        exchange.default_met = True
        allowed = await self.admit(exchange, (self.default,))
        if not allowed:
            await tell(exchange)
        self._publish(exchange, not allowed)
        return allowed

    async def use(self, exchange: DjangoExchange, limit: DjangoLimit, *, take: bool) -> Decision | None:
        """What one limit says to the request, which goes on; None if it does not apply. *take*: it counts it, too."""
        aside = exchange.aside()
        if take:
            await self.admit(aside, [limit])
        elif self.enabled:
            for charge in await self._charges(limit, aside):
                await self._look(aside, charge)
        return aside.decision

    async def withdraw(self, exchange: DjangoExchange) -> None:
        """Give back all that the request has taken: something else has refused it."""
        await self._permits.give_back(exchange, exchange.taken)

    async def refuse(self, exchange: DjangoExchange) -> Any:
        """The answer to a request that was refused."""
        return await refuse(self, exchange)

    async def finish(self, exchange: DjangoExchange, response: Any) -> None:
        """Settle what the response decides, and put the limits' headers on it."""
        if self.needs_settling(exchange):
            seen = response_info(response)
            await (self.settle(exchange, seen) if exchange.threaded else self.settle_later(exchange, seen))
        give_headers(self, exchange, response)

    def denial_text(self, quota: str, seconds: int) -> str:
        words = gettext("Rate limit exceeded (%(quotas)s); retry in %(seconds)d s")
        return str(words % {"quotas": quota, "seconds": seconds})

    def unchecked_text(self, seconds: int) -> str:
        return str(gettext("The rate limit could not be checked; retry in %(seconds)d s") % {"seconds": seconds})

    def impossible_text(self, quotas: str) -> str:
        words = gettext("This request costs more than the limit ever has (%(quotas)s), so it can never be admitted")
        return str(words % {"quotas": quotas})

    # ------------------------------------------------------------------------------------------------------ inside

    async def _begin(self, exchange: DjangoExchange) -> None:
        """Note that a limit of the view's own is met. The default limit does not count the request then."""
        exchange.met = True
        if exchange.default_met:  # the middleware could not see that the view has limits
            exchange.default_met = False
            await self._permits.give_back(
                exchange, [charge for charge in exchange.taken if charge.limit is self.default]
            )
            exchange.decision = exchange.limiter = exchange.limit = None

    async def _take_note(self, exchange: DjangoExchange, limits: Sequence[DjangoLimit]) -> bool:
        """Take what limits that do not block ask; the request goes on, so each of them counts it if it can."""
        together = await self._admit_aside(exchange, limits)
        if together or len(limits) == 1:
            return together
        return all([await self._admit_aside(exchange, [limit]) for limit in limits])

    async def _admit_aside(self, exchange: DjangoExchange, limits: Sequence[DjangoLimit]) -> bool:
        aside = exchange.aside()
        allowed = await self.admit(aside, limits)
        exchange.decided |= aside.decided
        exchange.taken += aside.taken
        if aside.decision is not None:
            exchange.hear(aside.decision, aside.limiter, aside.limit)
        return allowed

    async def _look(self, exchange: DjangoExchange, charge: Charge) -> Decision:
        """What a limit would say to the request; nothing is taken."""
        limiter, key, permits = charge.limiter, charge.key, charge.permits
        if not charge.is_possible():
            [(_, made)] = await self._permits.take_at_once(exchange, [charge])  # takes nothing
        elif exchange.blocking or self.in_process:
            made = limiter.blocking.peek(key, permits)
        else:
            made = await limiter.waiting.peek(key, permits)
        exchange.hear(made, charge.limiter, charge.limit)
        return made

    def _publish(self, exchange: DjangoExchange, limited: bool) -> None:
        """Let the view see the decision, on REST framework's request and on Django's."""
        for request in {id(each): each for each in (exchange.request, plain_request(exchange.request))}.values():
            request.ratelimit = exchange.decision
            request.limited = limited or request.limited


def plain_request(request: Any) -> Any:
    """Django's own request, where REST framework has wrapped it."""
    return getattr(request, "_request", request)


def client(request: Any) -> str:
    """The key function of throttles, which is not called: they give their keys themselves."""
    raise NotImplementedError


def without_language(request: Any, route: str) -> str:
    """A route without the language that `i18n_patterns` puts before it: a client has one limit, not one for each."""
    urlconf = getattr(request, "urlconf", None) or settings.ROOT_URLCONF
    if not isinstance(urlconf, str) or not is_language_prefix_patterns_used(urlconf)[0]:
        return route
    first, _, rest = route.partition("/")
    return rest if first == settings.LANGUAGE_CODE or first in dict(settings.LANGUAGES) else route


def response_info(response: Any) -> ResponseInfo:
    """What `count_if` sees of a response; of what a django-ninja operation returns, at least a status."""
    if isinstance(response, ResponseInfo):
        return response
    headers = (
        {name.lower(): value for name, value in response.items()} if isinstance(response, HttpResponseBase) else {}
    )
    return ResponseInfo(getattr(response, "status_code", 200), headers, response)
