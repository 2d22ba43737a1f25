"""Limits whose rules clients bring along: a headgate service as the store of limiters in other processes.

`headgate.remote.commands` says how a rule is written. The first call with a rule opens its limiter on the service's
store; its state is apart from that of the rules in the file. `client_limits` says how many such rules a worker keeps.
When there is no room for another, those go that were not used for as long as their keys take to be as good as new, so
that nothing is forgotten which counts; if there are none, the new rule is refused.

With `client_limits_hybrid` a rule that leases can serve is decided from leases of the worker, as hybrid rules of the
file are (`headgate.service.hybrid_rules`); the others ask the store as ever.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from time import monotonic
from typing import TYPE_CHECKING

from headgate.decision import Decision
from headgate.keys import MAX_BYTES, digest
from headgate.limiter import AsyncLimiter, Limiter
from headgate.remote.commands import parse_rule
from headgate.rule import Rule
from headgate.service.lease_settings import rule_refusal
from headgate.service.resolve import KeyedRule
from headgate.service.settings import CLIENT_RULE, RuleSettings
from headgate.stores.base import is_in_process, is_per_process
from headgate.stores.memory import MemoryStore
from headgate.web.headers import recovery_us

if TYPE_CHECKING:
    from headgate.service.app import App

NAMESPACE = "client:"  # what the names of these limiters begin with; the name of a rule in the file has no colon
IDLE_PERIODS = 2  # a window may still count in the next one
NOT_ALLOWED = (
    "this service takes no limits from clients; allow a number of them with client_limits in its file, "
    "HEADGATE_CLIENT_LIMITS or headgate serve --client-limits 100"
)


class ClientLimit(KeyedRule):
    """The limiter of one rule.

    `take_now` decides without awaiting on a store in the process, and where a lease suffices; else it gives what has to
    be awaited. It is None where each check needs a round trip.
    """

    __slots__ = ("idle_after", "in_process", "leased", "limiter", "take_now", "used_at")

    def __init__(self, rule: Rule, app: App, leased: bool = False) -> None:
        settings = RuleSettings(on_store_error="raise")  # the policy is the client's
        slot = app.counters.slot(f"{CLIENT_RULE} {rule.kind.upper()}")
        super().__init__(CLIENT_RULE, rule.kind, settings, slot)
        name = NAMESPACE + rule.name
        if len(name.encode()) > MAX_BYTES:
            name = NAMESPACE + digest(rule.name)
        kind, start, store = rule.kind, rule.start, app.store
        self.in_process = is_in_process(store)
        self.leased = leased and start == "clock" and not rule_refusal(rule)
        self.limiter: AsyncLimiter
        self.take_now: Callable[[str, int], Decision | Awaitable[Decision]] | None = None
        if self.leased:
            hybrid = app.hybrids.get(name, kind, rule.quotas, "raise", "high", slot)
            self.limiter, self.take_now = hybrid, hybrid.try_acquire_now
        else:
            self.limiter = AsyncLimiter(
                rule.quotas, algorithm=kind, start=start, store=store, name=name, on_store_error="raise"
            )
        if self.in_process:
            self.take_now = Limiter(
                rule.quotas, algorithm=kind, start=start, store=store, name=name, on_store_error="raise"
            ).try_acquire
        self.idle_after = IDLE_PERIODS * max(recovery_us(quota) for quota in rule.quotas) / 1_000_000  # seconds
        self.used_at = monotonic()


class ClientLimits:
    """The rules that clients of one worker have brought, by their text as it was sent."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._known: dict[bytes, ClientLimit] = {}
        self._probe: ClientLimit | None = None
        self._leased = False  # client_limits_hybrid

    def __len__(self) -> int:
        return len(self._known)

    def check_allowed(self) -> int:
        """How many there may be. Raises ValueError if the service takes none."""
        most = self._app.state.settings.client_limits
        if not most:
            raise ValueError(NOT_ALLOWED)
        return most

    def follow_settings(self, leased: bool) -> None:
        """Open all anew if client_limits_hybrid has changed; their states are other ones then."""
        if leased != self._leased:
            self._leased = leased
            self._known.clear()

    def limiters(self) -> Iterator[AsyncLimiter]:
        """The limiters that are in use."""
        return (limit.limiter for limit in self._known.values())

    def probe(self) -> ClientLimit:
        """A limit of no client, by which the service sees whether its store answers."""
        self.check_allowed()
        if self._probe is None:
            self._probe = ClientLimit(Rule("1/second", name="probe of clients"), self._app)
        return self._probe

    def get(self, text: bytes) -> ClientLimit:
        """The limiter of a rule. Raises ValueError for what is no rule, and where there is no room for another."""
        most = self.check_allowed()
        found = self._known.get(text)
        if found is None:
            found = self._open(text, most)
        found.used_at = monotonic()
        return found

    def _open(self, text: bytes, most: int) -> ClientLimit:
        rule = parse_rule(text.decode())
        if len(self._known) >= most:
            self._drop_idle()
        if len(self._known) >= most:
            raise ValueError(f"{most} different limits of clients are in use, as many as client_limits allows")
        found = self._known[text] = ClientLimit(rule, self._app, self._leased)
        return found

    def _drop_idle(self) -> None:
        store, now = self._app.store, monotonic()
        if is_in_process(store) and not is_per_process(store):
            return  # the files of a shared store stay
        dropped = [text for text, limit in self._known.items() if now - limit.used_at > limit.idle_after]
        for limit in [self._known.pop(text) for text in dropped]:
            if isinstance(store, MemoryStore):
                store.drop(limit.limiter.rule)
        if self._leased:
            self._app.keep_leases()
