"""Rules ready to decide: one limiter for each rule and algorithm, all of them on one store.

A `CompiledRule` is one rule of the settings under one algorithm; an override has a compiled rule of its own with other
quotas. A pair of rule and algorithm that is not the default is compiled at its first request. Each reload of the
settings makes a new `RuleSet`; the store keeps the state of rules whose quotas have not changed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from headgate.algorithms import ALGORITHMS
from headgate.decision import Decision
from headgate.limiter import AsyncLimiter, Limiter
from headgate.rule import check_algorithm
from headgate.service.concurrency_rules import ACQUIRE, ConcurrencyRule, open_slots
from headgate.service.hybrid_rules import HybridLimiters
from headgate.service.lease_settings import LEASED, accuracy_of
from headgate.service.resolve import KeyedRule
from headgate.service.rsgi import HTTPError
from headgate.service.settings import Quotas, RuleSettings, Settings, quota_overrides, quotas_for, resolve_plan
from headgate.service.shared_counters import SharedCounters
from headgate.stores.base import Store, is_in_process
from headgate.web.headers import policy_header, policy_names, recovery_us

ALGORITHM_NAMES = tuple(ALGORITHMS)
CHECK = "spend from it with /api/v1/rate-limit/check or the command HEADGATE.CHECK"


class CompiledRule(KeyedRule):
    """One rule under one algorithm: its limiter, its counters, and the parts of its responses that do not change.

    `take_now` and `peek_now` decide without awaiting; they are None on a store that needs a round trip. `take_leased`,
    of a hybrid rule, decides without awaiting where a lease suffices, and otherwise gives what has to be awaited.
    """

    __slots__ = (
        "algorithm",
        "capacity",
        "cost",
        "json_middle",
        "limit_header",
        "limiter",
        "overrides",
        "paces",
        "peek_now",
        "policy",
        "policy_names",
        "quotas",
        "recoveries",
        "take_leased",
        "take_now",
    )

    def __init__(
        self,
        name: str,
        algorithm: str,
        settings: RuleSettings,
        quotas: Quotas,
        store: Store,
        slot: int,
        hybrids: HybridLimiters | None = None,
    ) -> None:
        super().__init__(name, algorithm, settings, slot)
        self.algorithm = check_algorithm(algorithm)
        policy = settings.on_store_error
        accuracy = accuracy_of(settings.hybrid)
        self.limiter: AsyncLimiter
        self.take_leased: Callable[[str, int], Decision | Awaitable[Decision]] | None = None
        if accuracy and hybrids is not None and algorithm in LEASED:
            hybrid = hybrids.get(name, self.algorithm, quotas, policy, accuracy, slot)
            self.limiter, self.take_leased = hybrid, hybrid.try_acquire_now
        else:
            self.limiter = AsyncLimiter(quotas, algorithm=self.algorithm, store=store, name=name, on_store_error=policy)
        self.take_now: Callable[[str, int], Decision] | None = None
        self.peek_now: Callable[[str, int], Decision] | None = None
        if is_in_process(store):  # its decisions need no await; a coroutine would cost more than they do
            direct = Limiter(quotas, algorithm=self.algorithm, store=store, name=name, on_store_error=policy)
            self.take_now, self.peek_now = direct.try_acquire, direct.peek
        self.quotas = [str(quota) for quota in self.limiter.rule.quotas]
        self.capacity = self.limiter.rule.capacity
        self.limit_header = ("x-ratelimit-limit", str(self.capacity))
        self.json_middle = f',"algorithm":"{self.label}","limit":'
        own = self.limiter.rule.quotas
        self.policy = policy_header(name, own)
        names = zip(own, policy_names(name, own), strict=True)
        self.policy_names = {quota.capacity: policy for quota, policy in reversed(list(names))}
        # of several quotas, by capacity: the time until the one that binds is as good as new, at the latest
        slowest_last = sorted(own, key=recovery_us) if len(own) > 1 else []
        self.recoveries = {quota.capacity: recovery_us(quota) for quota in slowest_last}
        self.paces = self.algorithm == "leaky_bucket" and len(own) == 1  # a check that waits gets a place in time
        self.cost = settings.cost
        self.overrides: dict[str, CompiledRule] | None = None

    def info(self) -> dict[str, Any]:
        """How /actuator/info shows it."""
        return {"algorithm": self.label, "quotas": self.quotas}


Charge = tuple[CompiledRule, str, int]  # a key, and the permits that a check spent of it


class RuleSet:
    """All rules of one reading of the settings."""

    def __init__(
        self, settings: Settings, store: Store, counters: SharedCounters, hybrids: HybridLimiters | None = None
    ) -> None:
        self._settings = settings
        self._hybrids = hybrids
        self._store = store
        self._counters = counters
        self.rules = {"default": RuleSettings(), **settings.rules}
        self._compiled: dict[tuple[str | None, str | None], CompiledRule] = {}
        self.concurrency_rules = self._compile_concurrency()
        if self.rules["default"].quotas is None or isinstance(self.rules["default"].quotas, dict):
            for algorithm in ALGORITHM_NAMES:
                with suppress(HTTPError):  # an override with a burst fits no window: a request for it gets the error
                    self.get(None, algorithm.upper())
        for name in self.rules:
            if name not in self.concurrency_rules:
                self.get(name, None)

    def get(self, name: str | None, algorithm: str | None) -> CompiledRule:
        """The rule for *name* and *algorithm* as a request spells them; raises `HTTPError`."""
        found = self._compiled.get((name, algorithm))
        return found or self._resolve(name, algorithm)

    def concurrency(self, name: str | None) -> ConcurrencyRule:
        """The rule that limits concurrency under this name; raises `HTTPError`."""
        found = self.concurrency_rules.get(name or "")
        if found is not None:
            return found
        known = ", ".join(list(self.concurrency_rules)[:20]) or "none; a rule needs concurrency = 20 in the file"
        if name is None:
            raise HTTPError(400, f"give rule=NAME; rules with concurrency are: {known}")
        if name in self.rules:
            why = f"rule {name!r} has quotas and no slots; {CHECK}"
            raise HTTPError(400, f"{why}. Rules with concurrency are: {known}")
        raise HTTPError(400, f"unknown rule {name!r:.80}; rules with concurrency are: {known}")

    def compiled(self) -> list[CompiledRule]:
        """Every rule that was compiled so far."""
        return list({id(rule): rule for rule in self._compiled.values()}.values())

    def compile_known(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Compile what requests have asked for under earlier settings, as far as the rules are still there."""
        for name, algorithm in pairs:
            if name in self.rules:
                with suppress(HTTPError):
                    self.get(name, algorithm)

    def limiters(self) -> Iterator[AsyncLimiter]:
        """The limiters of every rule that was compiled so far, those of overrides included."""
        for rule in self.compiled():
            yield rule.limiter
            for override in (rule.overrides or {}).values():
                yield override.limiter

    def info(self) -> list[dict[str, Any]]:
        """The rules as /actuator/info shows them."""
        shown = []
        for name, settings in self.rules.items():
            slots = self.concurrency_rules.get(name)
            entry = {"rule": name} | (slots.info() if slots else self.get(name, None).info())
            if settings.shadow:
                entry["shadow"] = True
            if accuracy := accuracy_of(settings.hybrid):
                entry["hybrid"] = accuracy
            shown.append(entry)
        return shown

    def _resolve(self, given_name: str | None, given_algorithm: str | None) -> CompiledRule:
        name = "default" if given_name is None else given_name
        if name not in self.rules:
            known = ", ".join(list(self.rules)[:20])
            raise HTTPError(400, f"unknown rule {name!r:.80}; known are {known}")
        if name in self.concurrency_rules:
            raise HTTPError(400, f"rule {name!r} limits concurrency, so a check holds nothing; {ACQUIRE}")
        algorithm = (self.rules[name].algorithm if given_algorithm is None else given_algorithm).lower()
        if algorithm not in ALGORITHMS:
            known = ", ".join(known.upper() for known in ALGORITHM_NAMES)
            raise HTTPError(400, f"unknown algorithm {given_algorithm!r:.80}; use one of {known}")
        rule = self._compiled.get((name, algorithm))
        if rule is None:
            rule = self._compiled[name, algorithm] = self._compile(name, algorithm)
        for spelling in (given_algorithm, algorithm.upper()):  # mixed spellings are too many to remember
            if spelling is None or spelling in (algorithm, algorithm.upper()):
                self._compiled[given_name, spelling] = rule
        return rule

    def _compile_concurrency(self) -> dict[str, ConcurrencyRule]:
        chosen = {name: rule for name, rule in self.rules.items() if rule.concurrency is not None}
        if not chosen:
            return {}
        backend = open_slots(self._store, self._settings)
        return {
            name: ConcurrencyRule(name, rule, backend, self._counters.slot(f"{name} {ConcurrencyRule.LABEL}"))
            for name, rule in chosen.items()
        }

    def _compile(self, name: str, algorithm: str) -> CompiledRule:
        settings = self.rules[name]
        slot = self._counters.slot(f"{name} {algorithm.upper()}")
        try:
            quotas = quotas_for(name, settings, algorithm)
            rule = CompiledRule(name, algorithm, settings, quotas, self._store, slot, self._hybrids)
            if overrides := quota_overrides(settings):
                rule.overrides = {}
                by_quotas: dict[str, CompiledRule] = {}  # many keys share few plans
                for key, override in overrides.items():
                    override = resolve_plan(override, self._settings.plans)
                    text = str(override)
                    if text not in by_quotas:
                        by_quotas[text] = CompiledRule(
                            name, algorithm, settings, override, self._store, slot, self._hybrids
                        )
                    rule.overrides[key] = by_quotas[text]
        except ValueError as error:  # a burst under a window: the file was checked with the rule's own algorithm
            raise HTTPError(400, f"rule {name!r} cannot be applied as {algorithm.upper()}: {error}") from None
        return rule
