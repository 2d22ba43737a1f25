"""Limits whose rules clients bring along: a headgate service as the store of limiters in other processes.

`headgate.remote.commands` says how a rule is written. The first call with a rule opens its limiter on the service's
store; its state is apart from that of the rules in the file. `client_limits` says how many such rules a worker keeps.
When there is no room for another, those go that were not used for as long as their keys take to be as good as new, so
that nothing is forgotten which counts; if there are none, the new rule is refused.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from headgate.keys import MAX_BYTES, digest
from headgate.limiter import AsyncLimiter, Limiter
from headgate.remote.commands import parse_rule
from headgate.rule import Rule
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
    """The limiter of one rule; `direct` decides without awaiting, and is None on a store that needs a round trip."""

    __slots__ = ("direct", "idle_after", "limiter", "used_at")

    def __init__(self, rule: Rule, app: App) -> None:
        settings = RuleSettings(on_store_error="raise")  # the policy is the client's
        super().__init__(CLIENT_RULE, rule.kind, settings, app.counters.slot(f"{CLIENT_RULE} {rule.kind.upper()}"))
        name = NAMESPACE + rule.name
        if len(name.encode()) > MAX_BYTES:
            name = NAMESPACE + digest(rule.name)
        kind, start, store = rule.kind, rule.start, app.store
        self.limiter = AsyncLimiter(
            rule.quotas, algorithm=kind, start=start, store=store, name=name, on_store_error="raise"
        )
        self.direct: Limiter | None = None
        if is_in_process(store):
            self.direct = Limiter(
                rule.quotas, algorithm=kind, start=start, store=store, name=name, on_store_error="raise"
            )
        self.idle_after = IDLE_PERIODS * max(recovery_us(quota) for quota in rule.quotas) / 1_000_000  # seconds
        self.used_at = monotonic()


class ClientLimits:
    """The rules that clients of one worker have brought, by their text as it was sent."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._known: dict[bytes, ClientLimit] = {}
        self._probe: ClientLimit | None = None

    def __len__(self) -> int:
        return len(self._known)

    def check_allowed(self) -> int:
        """How many there may be. Raises ValueError if the service takes none."""
        most = self._app.state.settings.client_limits
        if not most:
            raise ValueError(NOT_ALLOWED)
        return most

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
        found = self._known[text] = ClientLimit(rule, self._app)
        return found

    def _drop_idle(self) -> None:
        store, now = self._app.store, monotonic()
        if is_in_process(store) and not is_per_process(store):
            return  # the files of a shared store stay
        for text, limit in list(self._known.items()):
            if now - limit.used_at > limit.idle_after:
                del self._known[text]
                if isinstance(store, MemoryStore):
                    store.drop(limit.limiter.rule)
