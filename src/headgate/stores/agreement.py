"""How several stores decide as one: the protocol alone, as plans (see `headgate._plan`), without input and output.

This is what the two ways have in common: `headgate.stores.majority` and `headgate.stores.failover`.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from headgate.clock import Clock
from headgate.decision import Decision, decision
from headgate.rule import Rule
from headgate.stores.remote import LimiterCall


class LateCall(Protocol):
    """A call that was not waited for any longer."""

    def give_back(self) -> None:
        """Give back what the call has taken, or will have taken when it ends."""
        ...


class Failure(NamedTuple):
    """What a store said that could not decide."""

    error: Exception
    refused: bool = False  # it answered, with an error
    late: LateCall | None = None


Vote = Decision | Failure | bool  # a bool: what a refund or a reset returned


class Poll(NamedTuple):
    """A request: ask these stores at the same time; the answer is a vote for each. None: no limit but their own."""

    backends: Mapping[int, Any]  # by their place in the list
    op: str
    key: str
    permits: int
    seconds: float | None


class Background(NamedTuple):
    """A request: run this plan, and do not wait for it."""

    plan: Generator[Any, Any, None]


class TooFewAnswers(ConnectionError):
    """Fewer stores answered than it takes; what they took is given back."""


class TooManyRefuse(TooFewAnswers):
    """The same, and every store that did not decide answered with an error."""


Plan = Generator[Any, Any, Any]


class Agreement:
    """One rule on several stores: what both ways have in common."""

    def __init__(self, rule: Rule, backends: Sequence[Any], clock: Clock | None) -> None:
        self.needed = self.needed_of(len(backends))
        self.rule = rule
        self.capacity = rule.capacity
        self.backends = dict(enumerate(backends))

    @staticmethod
    def needed_of(stores: int) -> int:
        """How many of so many stores must answer."""
        raise NotImplementedError

    def decision(self, reply: Decision) -> Decision:
        return reply

    def plan(self, call: LimiterCall, seconds: float | None) -> Plan:
        """What the stores say to *call* together, within *seconds*; raises `TooFewAnswers`."""
        if call.op.startswith("take"):
            return self.take(call, seconds)
        return self.ask(call, seconds)

    def take(self, call: LimiterCall, seconds: float | None) -> Plan:
        raise NotImplementedError

    def ask(self, call: LimiterCall, seconds: float | None) -> Plan:
        """Peek, refund, reset, or charge what was granted while too few answered."""
        raise NotImplementedError

    def poll(self, call: LimiterCall, seconds: float | None = None, stores: Sequence[int] | None = None) -> Poll:
        asked = self.backends if stores is None else {store: self.backends[store] for store in stores}
        return Poll(asked, call.op, call.key, call.permits, seconds)

    def too_few(self, votes: Mapping[int, Vote]) -> TooFewAnswers:
        failures = [vote for vote in votes.values() if isinstance(vote, Failure)]
        kind = TooManyRefuse if all(failure.refused for failure in failures) else TooFewAnswers
        answered = len(votes) - len(failures)
        last = failures[-1].error
        return kind(f"{answered} of {len(self.backends)} stores answered and it takes {self.needed}: {last}")


def decisions(votes: Mapping[int, Vote]) -> dict[int, Decision]:
    return {store: vote for store, vote in votes.items() if isinstance(vote, Decision)}


def tightest(answers: Sequence[Any]) -> Decision:
    """What holds for all of *answers*: allowed by each, the fewest permits, the longest waits."""
    least = min(answers, key=lambda made: made.remaining)
    return decision(
        all(answers),
        least.limit,
        least.remaining,
        max(made.reset_us for made in answers),
        max(made.retry_us for made in answers),
    )
