"""What counts the requests of a limit: a limiter for each scope, subject and quota, made when it is first needed."""

from __future__ import annotations

import functools
import re
from typing import TypeVar

from headgate._waiters import WaiterQueue
from headgate.keys import MAX_BYTES, digest
from headgate.limiter import AsyncLimiter, Limiter
from headgate.rule import OnStoreError, Quotas, Rule
from headgate.stores.base import Store
from headgate.web.headers import recovery_us
from headgate.web.limit import Limit
from headgate.web.subject import Subject

AnyLimiter = TypeVar("AnyLimiter", Limiter, AsyncLimiter)

DEFAULT_SCOPE = "default"
MAX_LIMITERS = 10_000  # a quota function may give any number of quotas; the oldest limiters are forgotten then


class ScopedLimiter:
    """The limiters of one rule, for threads and for asyncio; their states and their waiters are the same."""

    def __init__(self, rule: Rule, store: Store, scope: str, on_store_error: OnStoreError, subject: Subject) -> None:
        self.rule = rule
        self.scope = scope
        self.subject = subject
        self.waiters = WaiterQueue()
        self._store = store
        self.policy = on_store_error

    @functools.cached_property
    def blocking(self) -> Limiter:
        """For threads."""
        return self._open(Limiter)

    @functools.cached_property
    def waiting(self) -> AsyncLimiter:
        """For asyncio."""
        return self._open(AsyncLimiter)

    @functools.cached_property
    def recovery_us(self) -> int:
        """Microseconds after which time alone has given back what was spent."""
        windows = 2 if self.rule.kind == "sliding_window_counter" else 1
        return windows * max(map(recovery_us, self.rule.quotas))

    @functools.cached_property
    def policy_name(self) -> str:
        """A name for the RateLimit headers, which need no escapes for it."""
        return re.sub(r"[^A-Za-z0-9_.]+", "-", self.scope).strip("-") or "limit"

    def _open(self, kind: type[AnyLimiter]) -> AnyLimiter:
        rule, policy = self.rule, self.policy
        made = kind(rule.quotas, algorithm=rule.kind, store=self._store, name=rule.name, on_store_error=policy)
        made._waiters = self.waiters  # permits that a thread gives back wake a task, too
        return made


class ScopedLimiters:
    """All limiters of an application, on one store. Those of one scope, subject, algorithm and quota are one."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name
        self._known: dict[tuple[object, ...], ScopedLimiter] = {}
        self._rules: dict[tuple[str, str], Rule] = {}  # of quota functions

    def all(self) -> list[ScopedLimiter]:
        return list(self._known.values())

    def of(self, limit: Limit, route: str) -> list[ScopedLimiter]:
        """The limiters of a limit on *route*, one for each subject. The limit must have a quota that is no function."""
        found: list[ScopedLimiter] | None = limit.limiters.get(route)
        if found is None:
            assert limit.rule is not None
            found = limit.limiters[route] = self._of_rule(limit, route, limit.rule)
        return found

    def of_quotas(self, limit: Limit, route: str, quotas: Quotas) -> list[ScopedLimiter]:
        """The same for a limit whose quota function gave *quotas*."""
        place = (limit.algorithm, quotas) if isinstance(quotas, str) else None
        rule = self._rules.get(place) if place else None
        if rule is None:
            rule = Rule(quotas, limit.algorithm)
            if place and len(self._rules) < MAX_LIMITERS:
                self._rules[place] = rule
        return self._of_rule(limit, route, rule)

    def _of_rule(self, limit: Limit, route: str, rule: Rule) -> list[ScopedLimiter]:
        scope = limit.scope or route or DEFAULT_SCOPE
        return [self._limiter(scope, subject, rule, limit.on_store_error) for subject in limit.subjects]

    def _limiter(self, scope: str, subject: Subject, rule: Rule, policy: OnStoreError) -> ScopedLimiter:
        label = (scope, subject.name, rule.kind, policy, *rule.quotas)
        known = self._known.get(label)
        if known is None:
            named = Rule(rule.quotas, rule.kind, self._rule_name(scope, subject, rule))
            made = ScopedLimiter(named, self._store, scope, policy, subject)
            known = self._known.setdefault(label, made)  # another thread may have been quicker
            if len(self._known) > MAX_LIMITERS:
                self._known.pop(next(iter(self._known)), None)
        return known

    def _rule_name(self, scope: str, subject: Subject, rule: Rule) -> str:
        quotas = ",".join(str(quota).replace(" ", "") for quota in rule.quotas)
        # the only part with spaces is the scope, so that other parts cannot make the same name
        name = f"{_without_spaces(self._name)} {scope} {_without_spaces(subject.name)} {quotas}"
        return name if len(name.encode()) <= MAX_BYTES else digest(name)


def _without_spaces(text: str) -> str:
    return text.replace("%", "%25").replace(" ", "%20")
