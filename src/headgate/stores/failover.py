"""Several stores of which the first that answers decides: the protocol alone, as plans (see `headgate._plan`).

The first store of the list decides, the next one if it does not answer. A store that decides about
a key in place of another starts from what this process has last seen of the key, in both directions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import monotonic
from typing import Any

from headgate.clock import Clock
from headgate.decision import Decision
from headgate.fallback import MAX_DEBTS, Fallback
from headgate.rule import Rule
from headgate.stores.agreement import Agreement, Failure, Plan, Vote
from headgate.stores.remote import LimiterCall


class FirstThatAnswers(Agreement):
    """The first store of the list that answers decides."""

    @staticmethod
    def needed_of(stores: int) -> int:
        return 1

    def __init__(self, rule: Rule, backends: Sequence[Any], clock: Clock | None) -> None:
        super().__init__(rule, backends, clock)
        self._seen = Fallback("local", rule, clock)  # its local limiter follows every decision
        self._elsewhere: dict[str, int] = {}  # keys about which another store than the first has decided last

    def take(self, call: LimiterCall, seconds: float | None) -> Plan:
        return self._spend(call, seconds)

    def ask(self, call: LimiterCall, seconds: float | None) -> Plan:
        if call.op == "reset":
            return self._reset(call, seconds)
        return self._spend(call, seconds) if call.op == "charge" else self._tell(call, seconds)

    def _spend(self, call: LimiterCall, seconds: float | None) -> Plan:
        """Take or charge."""
        votes: dict[int, Vote] = {}
        for store, left in self._turns(seconds):
            failure = None
            if self._elsewhere.get(call.key, 0) != store:
                failure = yield from self._carry_over(store, call.key, left)
            votes |= {store: failure} if failure else (yield self.poll(call, left, (store,)))
            made = votes[store]
            if isinstance(made, Decision):
                self._note(store, call.key, made)
                return made
        raise self.too_few(votes)

    def _tell(self, call: LimiterCall, seconds: float | None) -> Plan:
        """Peek or refund."""
        votes: dict[int, Vote] = {}
        for store, left in self._turns(seconds):
            votes |= yield self.poll(call, left, (store,))
            if not isinstance(votes[store], Failure):
                if call.op == "refund" and self._seen.local:
                    self._seen.local.refund(call.key, call.permits)
                return votes[store]
        raise self.too_few(votes)

    def _reset(self, call: LimiterCall, seconds: float | None) -> Plan:
        """Tell all stores: any of them may decide next."""
        self._seen.reset(call.key)
        self._elsewhere.pop(call.key, None)
        votes: dict[int, Vote] = yield self.poll(call, seconds)
        if all(isinstance(vote, Failure) for vote in votes.values()):
            raise self.too_few(votes)
        return True

    def _turns(self, seconds: float | None) -> Iterator[tuple[int, float | None]]:
        """The stores in order, each with its share of the seconds that are left."""
        deadline = None if seconds is None else monotonic() + seconds
        for store in self.backends:
            left = None if deadline is None else max(deadline - monotonic(), 0.001) / (len(self.backends) - store)
            yield store, left

    def _carry_over(self, store: int, key: str, seconds: float | None) -> Plan:
        """Charge *store* what the store that decided before it has counted, as far as this process has seen that."""
        assert self._seen.local is not None
        remaining = self._seen.local.peek(key, 0).remaining
        if remaining == self.capacity:
            return None
        return (yield from self._raise_to(store, key, remaining, seconds))

    def _note(self, store: int, key: str, made: Decision) -> None:
        self._seen.follow_store(key, made)
        if store == 0:
            self._elsewhere.pop(key, None)
        elif key in self._elsewhere or len(self._elsewhere) < MAX_DEBTS:
            self._elsewhere[key] = store

    def _raise_to(self, store: int, key: str, remaining: int, seconds: float | None = None) -> Plan:
        """Charge *store* until no more than *remaining* permits are left there; returns a failure if it has one."""
        votes = yield self.poll(LimiterCall("peek", key, 0), seconds, (store,))
        ahead = votes[store]
        if isinstance(ahead, Decision) and ahead.remaining > remaining:
            votes = yield self.poll(LimiterCall("take", key, ahead.remaining - remaining), seconds, (store,))
        return votes[store] if isinstance(votes[store], Failure) else None
