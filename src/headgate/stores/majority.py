"""Several stores of which a majority must answer: the protocol alone, as plans (see `headgate._plan`).

A call is admitted if a majority of all stores answers, and each store that answers admits it; otherwise the
stores that took permits get them back. A bare vote would not do. Three stores whose refills are not in phase could
serve A and B, then B and C, then C and A: each permit would count in two stores of three, and half the limit be
admitted too many. So a grant is counted by every store that answers, and one that has missed nothing keeps the limit.

One store is asked first, and the others, at the same time, only if it admits. So callers that compete for a permit do
so at one store, and hold nothing at the others: what a store has counted was admitted, but for what is under way.

A store that has missed something is made good. A grant that it did not answer is charged to it at once. If it was away,
or has lost its state, it is in doubt: it is asked last, and charged what the others have counted and it has not. Where
the first store refuses, the others are looked at now and then, so that they are found out too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from time import monotonic
from typing import Any

from headgate.algorithms.bucket import Bucket
from headgate.clock import Clock
from headgate.decision import Decision
from headgate.fallback import MAX_DEBTS
from headgate.rule import Rule
from headgate.stores.agreement import Agreement, Background, Failure, Plan, Vote, decisions, tightest
from headgate.stores.base import StoreHealth
from headgate.stores.remote import LimiterCall

PAUSE = 0.001  # seconds after which a store that did not answer is charged again; doubled each time
CHARGES = 6  # attempts
AUDIT = 0.1  # seconds from one look at the other stores to the next, for a key that the first store refuses
LOOK = 0.01  # seconds from one look at a store that is in doubt to the next
TURNS = 10  # looks for which a process waits for another to charge a store, before it takes the turn away
WINDOW_MARGIN = 0.25  # seconds: what would reach a store so close to the end of its window is left to the end


class Majority(Agreement):
    """A majority must answer, and all that answer must admit."""

    @staticmethod
    def needed_of(stores: int) -> int:
        return stores // 2 + 1

    def __init__(self, rule: Rule, backends: Sequence[Any], clock: Clock | None) -> None:
        super().__init__(rule, backends, clock)
        self._windows = rule.kind == "fixed_window"  # they end, and what is given back later is the next window's
        self._comparable = len(rule.quotas) == 1  # a decision tells of one quota
        self._failures = [0] * len(backends)
        self._level_at: dict[tuple[int, str], int] = {}  # of a store and a key: its failures when it was seen level
        self._levelling: set[tuple[int, str]] = set()
        self._strict: dict[str, int] = {}  # the store that is asked first, if it is not the first of the list
        self._audited: dict[str, float] = {}  # when, by key

    def ask(self, call: LimiterCall, seconds: float | None) -> Plan:
        votes: dict[int, Vote] = yield self.poll(call, seconds)
        answers = [vote for vote in votes.values() if not isinstance(vote, Failure)]
        if len(answers) < self.needed:
            raise self.too_few(votes)
        return tightest(answers) if call.op == "peek" else True

    def take(self, call: LimiterCall, seconds: float | None) -> Plan:
        begun, key = monotonic(), call.key
        strict = self._strict.get(key, 0)
        order = sorted(self.backends, key=lambda store: (self._in_doubt(store, key), store != strict, store))
        votes: dict[int, Vote] = {}
        try:
            while order and not decisions(votes):
                votes |= yield self.poll(call, _left(seconds, begun), (order.pop(0),))
            first = decisions(votes)
            if order and all(first.values()):
                votes |= yield self.poll(call, _left(seconds, begun), order)
        except GeneratorExit:
            raise  # the event loop is gone, and with it the way to give back
        except BaseException:
            yield Background(self._give_back(call, votes, begun))
            raise
        answers = decisions(votes)
        for store, vote in votes.items():
            self._failures[store] += isinstance(vote, Failure)
        denied = first and not all(first.values())  # one store that says no is enough
        if not denied and len(answers) < self.needed:
            yield from self._give_back(call, votes, begun)
            raise self.too_few(votes)
        if all(answers.values()):
            for store, vote in votes.items():
                if isinstance(vote, Failure) and not vote.late:
                    yield Background(self._charge_missing(call, store))
        else:
            if len(answers) > 1:
                self._ask_first(key, min(store for store, made in answers.items() if not made))
            yield from self._give_back(call, votes, begun)
        if self._comparable:
            if not all(answers.values()) and self._audit_is_due(key, begun):
                if len(answers) > 1:
                    self._note_generous(call, answers)
                elif order:
                    yield Background(self._audit(key, answers))
            self._note_unknown(call, answers)
            for store in self.backends:
                if self._in_doubt(store, key) and (store, key) not in self._levelling and self._is_up(store):
                    self._levelling.add((store, key))
                    yield Background(self._level(store, key))
        return tightest(list(answers.values()))

    def _give_back(self, call: LimiterCall, votes: Mapping[int, Vote], begun: float) -> Plan:
        """Give back what a call took that was not admitted."""
        elapsed = monotonic() - begun
        held = []
        for store, vote in votes.items():
            if isinstance(vote, Failure):
                if vote.late:
                    vote.late.give_back()
            elif isinstance(vote, Decision) and vote and not self._window_ends(vote, elapsed):
                held.append(store)
        if held:
            yield self.poll(call._replace(op="refund"), None, held)

    def _window_ends(self, vote: Decision, elapsed: float) -> bool:
        """Whether what is given back would reach the next window, where it was not taken."""
        return self._windows and vote.reset_after < elapsed + WINDOW_MARGIN

    def _others(self, store: int) -> list[int]:
        return [other for other in self.backends if other != store]

    def _is_up(self, store: int) -> bool:
        health: StoreHealth = self.backends[store].store_health()
        return health.state == "closed"

    # ----------------------------------------------------------------------------------------- what stores have missed

    def _charge_missing(self, call: LimiterCall, store: int) -> Plan:
        """Charge an admitted call to a store that may not have counted it, unless the store is known to be down.

        If it did count it, it has counted it twice then, which is on the safe side.
        """
        for attempt in range(CHARGES):
            if not self._is_up(store):
                return
            votes = yield self.poll(call._replace(op="charge"), None, (store,))
            if not isinstance(votes[store], Failure):
                return
            yield PAUSE * 2**attempt

    def _in_doubt(self, store: int, key: str) -> bool:
        """Whether *store* may have missed something of *key*: it has failed since it was last seen level."""
        return self._level_at.get((store, key), 0) < self._failures[store]

    def _ask_first(self, key: str, store: int) -> None:
        """Ask the strictest store first: what the others would admit before it is only given back."""
        if len(self._strict) >= MAX_DEBTS:
            self._strict.clear()
        self._strict[key] = store

    def _note_generous(self, call: LimiterCall, answers: Mapping[int, Decision]) -> None:
        """Doubt the stores that admitted what another refused."""
        for store, made in answers.items():
            if made:
                self._note_level(store, call.key, -1)

    def _note_unknown(self, call: LimiterCall, answers: Mapping[int, Decision]) -> None:
        """Doubt the stores that know nothing of a key that others know well."""
        fewest = min(made.remaining for made in answers.values())
        if fewest < 0.9 * self.capacity - 2:
            for store, made in answers.items():
                if made and made.remaining + call.permits == self.capacity:
                    self._note_level(store, call.key, -1)

    def _audit_is_due(self, key: str, now: float) -> bool:
        if now < self._audited.get(key, 0.0) + AUDIT:
            return False
        if len(self._audited) >= MAX_DEBTS:
            self._audited.clear()
        self._audited[key] = now
        return True

    def _audit(self, key: str, answers: Mapping[int, Decision]) -> Plan:
        """Look at the stores that were not asked because the first one refused."""
        [(first, refusal)] = answers.items()
        peek = LimiterCall("peek", key, 0)
        votes: dict[int, Vote] = yield self.poll(peek, None, self._others(first))
        for store, vote in votes.items():
            self._failures[store] += isinstance(vote, Failure)
        ahead = {store: made for store, made in decisions(votes).items() if made.remaining > refusal.remaining}
        if ahead:  # since it refused, the first store has refilled too: what it says now, after them, tells them apart
            now = (yield self.poll(peek, None, (first,)))[first]
            for store, made in ahead.items():
                if isinstance(now, Decision) and self._difference(made, now) > 0:
                    self._note_level(store, key, -1)

    def _note_level(self, store: int, key: str, failures: int) -> None:
        if len(self._level_at) >= MAX_DEBTS:
            self._level_at.clear()
        self._level_at[store, key] = failures

    def _level(self, store: int, key: str) -> Plan:
        """Charge *store* what it has counted less than the others, and doubt it no longer.

        One process at a time does so: what several of them charge at the same time would add up. They take turns by a
        key of their own, of which one of them takes all permits; one that dies keeps the others waiting for a moment.
        """
        failures = self._failures[store]
        turn = LimiterCall("take", "level:" + blake2b(key.encode(), digest_size=16).hexdigest(), self.capacity)
        try:
            looks = 0
            while (missed := (yield from self._missed(store, key))) == 0 and looks < 1:
                looks += 1
                yield LOOK  # once more: a call that is under way can hide what the store has missed
            if missed:
                for wait in range(1, 3 * TURNS):
                    mine = (yield self.poll(turn, None, (store,)))[store]
                    if isinstance(mine, Failure) or mine:
                        break
                    yield LOOK
                    if wait % TURNS == 0:
                        yield self.poll(turn._replace(op="reset"), None, (store,))
                while missed:
                    yield LOOK
                    before, missed = missed, (yield from self._missed(store, key))
                    charge = missed and LimiterCall("take", key, min(before, missed))
                    made = charge and (yield self.poll(charge, None, (store,)))[store]
                    if isinstance(made, Decision) and made:
                        missed = 0
                yield self.poll(turn._replace(op="reset"), None, (store,))
            if missed == 0:
                self._note_level(store, key, failures)
        finally:
            self._levelling.discard((store, key))

    def _missed(self, store: int, key: str) -> Plan:
        """How much *store* has counted less than the others; None if that cannot be told now.

        It is asked before the others: calls that are under way count against it, not in its favour. It is one of the
        stores that have missed something, of which there are fewer than a majority. So there can be so many less among
        the others, and the most generous that is left counts.
        """
        peek = LimiterCall("peek", key, 0)
        one = (yield self.poll(peek, None, (store,)))[store]
        others = decisions((yield self.poll(peek, None, self._others(store))))
        if isinstance(one, Failure) or not others or len(others) + 1 < self.needed:
            return None
        by_rest = sorted(others.values(), key=lambda made: made.remaining)
        may_lag = len(self.backends) - self.needed
        right = by_rest[min(max(len(by_rest) - may_lag, 0), len(by_rest) - 1)]
        if self._windows and self._other_window(one, right):
            return None
        return min(max(self._difference(one, right), 0), one.remaining)

    def _other_window(self, one: Decision, other: Decision) -> bool:
        """Whether the clocks of two stores are in different windows, or will be soon."""
        ends = [made.reset_after for made in (one, other) if made.reset_us]  # 0: it knows nothing of the key
        return min(ends) < WINDOW_MARGIN or max(ends) - min(ends) > WINDOW_MARGIN if ends else False

    def _difference(self, one: Decision, right: Decision) -> int:
        """Permits that the store of *one* has counted less than that of *right*.

        Buckets are never in phase: to charge a part of a permit as a whole one would make the other the more generous.
        """
        if isinstance(self.rule.algorithm, Bucket):
            quota = self.rule.quotas[0]
            return round((right.reset_after - one.reset_after) * quota.limit / quota.period)
        return one.remaining - right.remaining


def _left(seconds: float | None, begun: float) -> float | None:
    return None if seconds is None else max(seconds - (monotonic() - begun), 0.001)
