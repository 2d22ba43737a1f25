"""The limits of Envoy's rules: from a descriptor of the YAML, or a limit in a request, to a limiter on the store.

Rules of one domain with the same quota share a limiter. Their keys tell them apart: a descriptor meets one rule only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from headgate.decision import Decision
from headgate.keys import digest
from headgate.limiter import AsyncLimiter, Limiter
from headgate.quota import Quota
from headgate.rule import check_algorithm
from headgate.service.envoy_settings import (
    MAX_COUNT,
    SECONDS,
    UNITS,
    EnvoyDescriptor,
    EnvoyLimit,
    EnvoySettings,
    bounded,
    domain_text,
    quotas_of,
    side_settings,
)
from headgate.service.rules import ALGORITHM_NAMES
from headgate.service.shared_counters import SLOT_WORDS, TIMING_WORDS
from headgate.stores.base import Store, is_in_process, kind_of
from headgate.stores.memory import MemoryStore

if TYPE_CHECKING:
    from headgate.service.envoy_rules import EnvoyMeter

MAX_OVERRIDES = 1_000  # different limits in requests; the one that was not used for longest makes room
MAX_SHARED_OVERRIDES = 64  # in a shared store, where each has a file
MAX_TIME_LIMITS = 16  # different deadlines of calls that a rule keeps a limiter for
MAX_LABEL = 96  # bytes; a slot of the counters has room for 128, with `envoy/` and the algorithm


class BadRateLimitRequest(ValueError):
    """A call that cannot be decided; the text says what would be right."""


class EnvoyRule:
    """One limit: of a descriptor in the YAML, or of a request that brings its own.

    `take_now` and `peek_now` decide without awaiting; they are None on a store that needs a round trip.
    """

    __slots__ = (
        *(
            "capacity",
            "counter",
            "drain",
            "extra",
            "kind",
            "limit",
            "limiter",
            "name",
            "now_limiter",
            "on_store_error",
            "peek_now",
            "plain",
        ),
        *("quota", "replaces", "shadow", "slot", "take_now", "timing", "unlimited", "window", "within"),
    )

    def __init__(self, name: str, limit: EnvoyLimit, algorithm: str, counter: str) -> None:
        self.name = name  # in metrics
        self.kind = check_algorithm(algorithm)
        self.limit = (limit.name, limit.requests_per_unit, limit.unit)  # as Envoy is told
        self.replaces = limit.replaces
        self.unlimited = limit.unlimited
        self.counter = counter  # the name of its limiters
        self.shadow = self.quota = self.drain = False
        self.plain = False  # needs no round trip, and is neither in shadow_mode nor in quota_mode
        self.capacity = self.extra = (
            0  # extra: what the limit of the YAML has above MAX_COUNT, which quotas cannot count
        )
        self.window = 0  # microseconds of a fixed window
        if self.kind == "fixed_window" and limit.unit:
            self.window = SECONDS[limit.unit] * 1_000_000
        self.slot = self.timing = 0
        self.on_store_error = ""
        self.limiter: AsyncLimiter | None = None
        self.now_limiter: Limiter | None = None
        self.take_now: Callable[[str, int], Decision] | None = None
        self.peek_now: Callable[[str, int], Decision] | None = None
        self.within: dict[int, AsyncLimiter] = {}  # limiters by the milliseconds that they have

    def use(self, limiter: AsyncLimiter, now_limiter: Limiter | None) -> None:
        """Decide by these limiters, which have the same quotas."""
        self.limiter, self.now_limiter = limiter, now_limiter
        self.capacity = limiter.rule.capacity
        if self.capacity == MAX_COUNT:
            self.extra = max(self.limit[1] - MAX_COUNT, 0)
        self.window = limiter.rule.quotas[0].period_us if is_window(self.kind, limiter.rule.quotas) else 0
        if now_limiter is not None:
            self.take_now, self.peek_now = now_limiter.try_acquire, now_limiter.peek
            self.plain = not (self.shadow or self.quota)

    def limiter_within(self, seconds: float | None) -> AsyncLimiter:
        """The limiter, with at most *seconds* for each call to the store."""
        assert self.limiter is not None
        if seconds is None:
            return self.limiter
        milliseconds = max(int(seconds * 1000), 1)
        found = self.within.get(milliseconds)
        if found is None:
            if len(self.within) >= MAX_TIME_LIMITS:
                self.within.clear()
            found = self.within[milliseconds] = self.limiter.with_timeout(milliseconds / 1000)
        return found


class EnvoyRuleMaker:
    """Makes rules on one store; without a *meter* they have no counters."""

    def __init__(self, settings: EnvoySettings, store: Store, meter: EnvoyMeter | None) -> None:
        self._settings = settings
        self._store = store
        self._meter = meter
        self._limiters: dict[tuple[object, ...], tuple[AsyncLimiter, Limiter | None]] = {}
        self._overrides: OrderedDict[tuple[str, int, int], EnvoyRule] = OrderedDict()
        self._in_files: set[int] = set()  # ids of limiters, which `_limiters` keeps alive

    def make(self, name: str, one: EnvoyDescriptor) -> EnvoyRule:
        """The rule *name* of a descriptor that has a limit."""
        limit = one.rate_limit
        assert limit is not None
        algorithm, given, drain = side_settings(self._settings, name)
        quotas = quotas_of(limit, given)
        if given is not None and quotas:
            units = {seconds * 1_000_000: unit for unit, seconds in SECONDS.items()}
            unit = units.get(quotas[0].period_us, 0)
            limit = EnvoyLimit(quotas[0].limit, unit, False, limit.name, limit.replaces)
        rule = EnvoyRule(f"envoy/{label_text(name)}", limit, algorithm, _counter(name, algorithm, quotas))
        rule.shadow, rule.quota, rule.drain = one.shadow_mode or self._settings.shadow, one.quota_mode, drain
        self._equip(rule, quotas)
        self._in_files.add(id(rule.limiter))
        return rule

    def override(self, domain: str, given: tuple[int, int]) -> EnvoyRule:
        """The rule of a limit that came with a request: requests and unit."""
        requests, unit = given
        rule = self._overrides.get((domain, requests, unit))
        if rule is not None:
            self._overrides.move_to_end((domain, requests, unit))
            return rule
        if unit not in SECONDS:
            raise BadRateLimitRequest(f"the unit of a limit is one of {', '.join(UNITS)}, got the number {unit}")
        self._make_room()
        limit = EnvoyLimit(requests, unit)
        quotas = quotas_of(limit, None)
        algorithm, _, drain = side_settings(self._settings, domain_text(domain))
        name = f"{domain_text(domain)}/(request)"
        rule = EnvoyRule(f"envoy/{label_text(name)}", limit, algorithm, _counter(name, algorithm, quotas))
        rule.shadow, rule.drain = self._settings.shadow, drain
        self._equip(rule, quotas)
        self._overrides[domain, requests, unit] = rule
        return rule

    def _equip(self, rule: EnvoyRule, quotas: Sequence[Quota]) -> None:
        """Give *rule* its limiters and its counters."""
        rule.on_store_error = self._settings.on_store_error
        if quotas:
            label = (rule.counter, rule.kind, *quotas)
            if label not in self._limiters:
                self._limiters[label] = self._open(rule, quotas)
            rule.use(*self._limiters[label])
        if self._meter is not None:
            rule.slot = self._meter.slot(f"{rule.name} {rule.kind.upper()}") * SLOT_WORDS
        rule.timing = 2 * ALGORITHM_NAMES.index(rule.kind) * TIMING_WORDS

    def _open(self, rule: EnvoyRule, quotas: Sequence[Quota]) -> tuple[AsyncLimiter, Limiter | None]:
        options: dict[str, Any] = {
            "algorithm": rule.kind,
            "store": self._store,
            "name": rule.counter,
            "on_store_error": self._settings.on_store_error,
        }
        return AsyncLimiter(quotas, **options), Limiter(quotas, **options) if is_in_process(self._store) else None

    def _make_room(self) -> None:
        """Forget the limit of requests that was not used for longest, if there are too many."""
        if kind_of(self._store) == "shared" and len(self._overrides) >= MAX_SHARED_OVERRIDES:
            why = f"more than {MAX_SHARED_OVERRIDES} limits came in requests, and a shared store has a file for each"
            raise BadRateLimitRequest(f"{why}; use another store, or rules in files")
        if len(self._overrides) < MAX_OVERRIDES:
            return
        _, oldest = self._overrides.popitem(last=False)
        limiter = oldest.limiter
        if limiter is None or id(limiter) in self._in_files:
            return
        self._limiters.pop((oldest.counter, oldest.kind, *limiter.rule.quotas), None)
        if isinstance(self._store, MemoryStore):
            self._store.drop(limiter.rule)


def is_window(kind: str, quotas: Sequence[Quota]) -> bool:
    return kind == "fixed_window" and len(quotas) == 1


def _counter(name: str, algorithm: str, quotas: Sequence[Quota]) -> str:
    """The name of a rule's limiters. On Redis, a fixed window keeps its count when only its limit changes."""
    shown = f"{quotas[0].period:g}s" if is_window(algorithm, quotas) else " ".join(str(quota) for quota in quotas)
    return bounded(f"envoy/{name.partition('/')[0]}/{shown}")


def label_text(name: str) -> str:
    """*name* as the value of a label: no quotes, spaces or control characters, and at most MAX_LABEL bytes."""
    text = quote(name, safe="/:*=|,.;@+~!$&()-_%")
    return text if len(text) <= MAX_LABEL else f"{text[: MAX_LABEL - 13]}~{digest(name)[:12]}"
