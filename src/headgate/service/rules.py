"""Rules ready to decide: for each rule and algorithm a limiter, all of them on one store.

A lane is one rule under one algorithm; an override is a lane of its own with other quotas. Lanes that nobody has asked
for yet are made when somebody does. A new file makes a new book; lanes whose quotas have not changed find their state
in the store again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from headgate.algorithms import ALGORITHMS
from headgate.decision import Decision
from headgate.limiter import AsyncLimiter, Limiter
from headgate.service.address import Address, Network, network, within
from headgate.service.board import SLOT_WORDS, TIMING_WORDS, Board
from headgate.service.http import Refusal
from headgate.service.ietf import policy_header
from headgate.service.settings import Quotas, RuleSettings, Settings, planned, quotas_for
from headgate.stores.base import Store
from headgate.stores.memory import MemoryStore

KINDS = tuple(ALGORITHMS)


class Lane:
    """One rule under one algorithm: what decides, and where it is counted. `take` is None where a call must wait."""

    __slots__ = (
        "capacity",
        "cost",
        "exempt_keys",
        "exempt_networks",
        "kind",
        "label",
        "limit_header",
        "limiter",
        "middle",
        "name",
        "overrides",
        "parts",
        "peek",
        "plain",
        "policy",
        "quotas",
        "shadow",
        "slot",
        "tail",
        "take",
        "timing",
    )

    def __init__(self, name: str, kind: str, rule: RuleSettings, quotas: Quotas, store: Store, slot: int) -> None:
        self.name = name
        self.kind = kind
        self.label = kind.upper()
        self.limiter = AsyncLimiter(quotas, algorithm=kind, store=store, name=name, on_store_error=rule.on_store_error)
        self.take: Callable[[str, int], Decision] | None = None
        self.peek: Callable[[str, int], Decision] | None = None
        if isinstance(store, MemoryStore):  # it answers at once: a coroutine would cost more than the decision
            direct = Limiter(quotas, algorithm=kind, store=store, name=name)
            self.take, self.peek = direct.try_acquire, direct.peek
        self.quotas = [str(quota) for quota in self.limiter.rule.quotas]
        self.capacity = self.limiter.rule.capacity
        # of every answer, what does not change
        self.limit_header = ("x-ratelimit-limit", str(self.capacity))
        self.middle = f',"algorithm":"{self.label}","limit":'
        self.tail = "}" if name == "default" else f',"rule":"{name}"}}'
        self.policy = policy_header(name, self.limiter.rule.quotas)
        self.parts = None if rule.key == ["key"] else [part.lower() for part in rule.key]
        self.cost = rule.cost
        self.shadow = rule.shadow
        networks = [found for text in rule.exempt if (found := _network(text))]
        self.exempt_networks: Sequence[Network] | None = networks or None
        self.exempt_keys = frozenset(rule.exempt) or None
        self.plain = self.parts is None and self.exempt_keys is None  # the key alone decides
        self.overrides: dict[str, Lane] | None = None
        self.slot = slot * SLOT_WORDS
        self.timing = 2 * KINDS.index(kind) * TIMING_WORDS  # of what is denied; what is allowed comes behind it

    def is_exempt(self, key: str, address: Callable[[], Address | None]) -> bool:
        """Whether *key*, or the client that sends it, is always allowed."""
        if self.exempt_keys is not None and key in self.exempt_keys:
            return True
        client = address() if self.exempt_networks is not None else None
        return client is not None and within(client, self.exempt_networks or ())


Charge = tuple[Lane, str, int]  # a key, and the permits that a check has spent of it


class Book:
    """All rules of one reading of the settings."""

    def __init__(self, settings: Settings, store: Store, board: Board) -> None:
        self._settings = settings
        self._store = store
        self._board = board
        self.rules = {"default": RuleSettings(), **settings.rules}
        self._lanes: dict[tuple[str | None, str | None], Lane] = {}
        if self.rules["default"].quotas is None or isinstance(self.rules["default"].quotas, dict):
            for kind in KINDS:
                with suppress(Refusal):  # an override with a burst fits no window: whoever asks for that one is told
                    self.lane(None, kind.upper())
        for name in self.rules:
            self.lane(name, None)

    def lane(self, rule: str | None, algorithm: str | None) -> Lane:
        """The lane of a request's *rule* and *algorithm* as they were written; raises `Refusal`."""
        found = self._lanes.get((rule, algorithm))
        return found or self._resolve(rule, algorithm)

    def lanes(self) -> list[Lane]:
        """Every lane that was made so far."""
        return list({id(lane): lane for lane in self._lanes.values()}.values())

    def _resolve(self, rule: str | None, algorithm: str | None) -> Lane:
        name = "default" if rule is None else rule
        if name not in self.rules:
            known = ", ".join(list(self.rules)[:20])
            raise Refusal(400, f"unknown rule {name!r:.80}; known are {known}")
        kind = (self.rules[name].algorithm if algorithm is None else algorithm).lower()
        if kind not in ALGORITHMS:
            known = ", ".join(known.upper() for known in KINDS)
            raise Refusal(400, f"unknown algorithm {algorithm!r:.80}; use one of {known}")
        lane = self._lanes.get((name, kind))
        if lane is None:
            lane = self._lanes[name, kind] = self._make(name, kind)
        for spelling in (algorithm, kind.upper()):  # others are as many as a client likes to write
            if spelling is None or spelling in (kind, kind.upper()):
                self._lanes[rule, spelling] = lane
        return lane

    def _make(self, name: str, kind: str) -> Lane:
        rule = self.rules[name]
        slot = self._board.slot(f"{name} {kind.upper()}")
        try:
            lane = Lane(name, kind, rule, quotas_for(name, rule, kind), self._store, slot)
            if rule.overrides:
                lane.overrides = {}
                made: dict[str, Lane] = {}  # many keys, few plans
                for key, quotas in rule.overrides.items():
                    quotas = planned(quotas, self._settings.plans)
                    if str(quotas) not in made:
                        made[str(quotas)] = Lane(name, kind, rule, quotas, self._store, slot)
                    lane.overrides[key] = made[str(quotas)]
        except ValueError as error:  # a burst under a window: the file was checked with the rule's own algorithm
            raise Refusal(400, f"rule {name!r} cannot be applied as {kind.upper()}: {error}") from None
        return lane


def _network(text: str) -> Network | None:
    try:
        return network(text)
    except ValueError:
        return None  # a key


def info(book: Book) -> list[dict[str, Any]]:
    """The rules as people read them."""
    shown = []
    for name, rule in book.rules.items():
        lane = book.lane(name, None)
        entry: dict[str, Any] = {"rule": name, "algorithm": lane.label, "quotas": lane.quotas}
        if rule.shadow:
            entry["shadow"] = True
        shown.append(entry)
    return shown
