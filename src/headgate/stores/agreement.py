"""How several stores decide as one: the protocol alone, as plans (see `headgate._plan`), without input and output.

`Majority`: all stores are asked at the same time. A call is admitted if a majority of all stores answers and each store
that answers admits it; otherwise the stores that took permits get them back. A bare vote would not do. Three stores
whose votes differ a little (their refills are not in phase) could serve A and B, then B and C, then C and A: each
permit counts in two stores of three, and the limit would be exceeded by half.

So a grant is counted by every store that answers, and one of them that has missed nothing suffices to keep the limit. A
store that has missed something is made good: a grant whose call failed is charged to it at once, and a store that has
counted less than the others (it was away, or has lost its state) is charged the difference when it next answers.

`FirstThatAnswers`: the first store of the list decides, the next one if it does not answer. A store that decides about
a key in place of another starts from what this process has last seen of the key, in both directions.
"""

from __future__ import annotations

from collections.abc import Container, Generator, Iterator, Mapping, Sequence
from hashlib import blake2b
from math import ceil
from time import monotonic
from typing import Any, NamedTuple, Protocol

from headgate.clock import Clock
from headgate.decision import Decision, decision
from headgate.fallback import MAX_DEBTS, Fallback
from headgate.rule import Rule
from headgate.stores.remote import LimiterCall

SECOND_TRIES = 3  # for a call that the first store admits and another refuses, perhaps only until a third gives back
PAUSE = 0.001  # seconds before each, doubled each time
LOOKS = (0.005, 0.01)  # seconds before each look at two stores of which one seems to have counted too little
TURN, TURNS = 0.05, 20  # seconds for which a process waits for another to charge a store, and how often
CHARGES = 12  # attempts to charge a call to a store that missed it
WINDOW_MARGIN = 0.25  # seconds: what would reach a store so close to the end of its window is left to the end


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
    keep: frozenset[int] = frozenset()  # stores to which a caller that leaves gives nothing back


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
        if call.op == "take":
            return self.take(call.key, call.permits, seconds)
        return self.ask(call, seconds)

    def take(self, key: str, permits: int, seconds: float | None) -> Plan:
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

    def raise_to(self, store: int, key: str, remaining: int, seconds: float | None = None) -> Plan:
        """Charge *store* until no more than *remaining* permits are left there; returns a failure if it has one."""
        votes = yield self.poll(LimiterCall("peek", key, 0), seconds, (store,))
        ahead = votes[store]
        if isinstance(ahead, Decision) and ahead.remaining > remaining:
            votes = yield self.poll(LimiterCall("take", key, ahead.remaining - remaining), seconds, (store,))
        return votes[store] if isinstance(votes[store], Failure) else None


class Majority(Agreement):
    """A majority must answer, and all that answer must admit."""

    @staticmethod
    def needed_of(stores: int) -> int:
        return stores // 2 + 1

    def __init__(self, rule: Rule, backends: Sequence[Any], clock: Clock | None) -> None:
        super().__init__(rule, backends, clock)
        self.may_lag = len(backends) - self.needed  # how many stores may have counted too little at a time
        self._by_clock = rule.kind == "fixed_window"  # windows end, and what is given back later is the next window's
        self._comparable = len(rule.quotas) == 1  # a decision tells of one quota
        self._failures = [0] * len(backends)
        self._seen_level: dict[tuple[int, str], int] = {}  # of a store and a key: its failures by then
        self._levelling: set[tuple[int, str]] = set()

    def ask(self, call: LimiterCall, seconds: float | None) -> Plan:
        votes: dict[int, Vote] = yield self.poll(call, seconds)
        answers = [vote for vote in votes.values() if not isinstance(vote, Failure)]
        if len(answers) < self.needed:
            raise self.too_few(votes)
        return tightest(answers) if call.op == "peek" else True

    def take(self, key: str, permits: int, seconds: float | None) -> Plan:
        begun, call = monotonic(), LimiterCall("take", key, permits)
        doubtful = frozenset(store for store in self.backends if self._doubtful(store, key))
        votes: dict[int, Vote] = yield self.poll(call, seconds)._replace(keep=doubtful)
        answers = decisions(votes)
        try:
            for attempt in range(SECOND_TRIES):
                refusing = [store for store, made in answers.items() if not made]
                # one of the callers that hold permits must go on, or none of them would get what they compete for
                if not refusing or min(refusing) == min(answers) or len(answers) < self.needed:
                    break
                pause = PAUSE * 2**attempt
                left = None if seconds is None else seconds - (monotonic() - begun) - pause
                if left is not None and left <= 0:
                    break
                yield pause
                votes |= yield self.poll(call, left, refusing)._replace(keep=doubtful)
                answers = decisions(votes)
        except GeneratorExit:
            raise  # the event loop is gone, and with it the way to give back
        except BaseException:
            yield Background(self._give_back(call, votes, begun, keep=doubtful))
            raise
        enough = len(answers) >= self.needed
        admitted = enough and all(answers.values())
        ahead = self._ahead(call, answers, admitted) if self._comparable and enough else {}
        if not admitted:
            yield from self._give_back(call, votes, begun, keep=ahead)
        for store, vote in votes.items():
            if isinstance(vote, Failure):
                self._failures[store] += 1
                if admitted and not vote.late:
                    yield Background(self._charge_missing(call, store))
        if not enough:
            raise self.too_few(votes)
        for store, right in ahead.items():
            if (store, key) not in self._levelling:
                self._levelling.add((store, key))
                yield Background(self._level(store, right, key))
        return tightest(list(answers.values()))

    def _give_back(self, call: LimiterCall, votes: Mapping[int, Vote], begun: float, keep: Container[int] = ()) -> Plan:
        """Give back what a call took that was not admitted, except to the stores that *keep* it."""
        elapsed = monotonic() - begun
        held = []
        for store, vote in votes.items():
            if isinstance(vote, Failure):
                if vote.late:
                    vote.late.give_back()
            elif isinstance(vote, Decision) and vote and store not in keep and not self._window_ends(vote, elapsed):
                held.append(store)
        if held:
            yield self.poll(call._replace(op="refund"), None, held)

    def _window_ends(self, vote: Decision, elapsed: float) -> bool:
        """Whether what is given back would reach the next window, where it was not taken."""
        return self._by_clock and vote.reset_after < elapsed + WINDOW_MARGIN

    # ----------------------------------------------------------------------------------------- what stores have missed

    def _charge_missing(self, call: LimiterCall, store: int) -> Plan:
        """Charge an admitted call to a store that may not have counted it, unless the store is known to be down.

        If it did count it, it has counted it twice then, which is on the safe side.
        """
        rest = amount = call.permits
        for attempt in range(CHARGES):
            if self.backends[store].store_health().state != "closed":
                return
            made = (yield self.poll(call._replace(permits=amount), None, (store,)))[store]
            if isinstance(made, Decision) and made:
                rest -= amount
                if not rest:
                    return
            amount = rest
            if isinstance(made, Decision) and 0 < made.remaining < rest:
                amount = made.remaining
            else:  # it is down, or other calls hold the permits that they will give back
                yield PAUSE * 2 ** min(attempt, 5)

    def _ahead(self, call: LimiterCall, answers: Mapping[int, Decision], admitted: bool) -> dict[int, int]:
        """The stores that may have missed something and have more left than they should, each with one that is right.

        A store may have missed something for as long as this process has not seen it level with the others since its
        last failure, and if it does not know a key at all that the others know well. At most `may_lag` stores have: the
        most generous of the others is right, or too strict. What a refused call has taken from a store that is ahead is
        not given back: the store had that much too little.
        """
        key, given = call.key, call.permits
        left = {store: made.remaining + (given if made and not admitted else 0) for store, made in answers.items()}
        right = sorted(left, key=left.__getitem__)[max(len(left) - self.may_lag, 1) - 1]
        unknown = self.capacity - given if admitted else self.capacity
        ahead = {}
        for store, remaining in left.items():
            new = remaining == unknown and left[right] < 0.9 * self.capacity - 2
            if not self._doubtful(store, key) and not new:
                continue
            if remaining <= left[right]:
                self._note_level(store, key)
            elif not self._other_window(answers[store], answers[right]):
                ahead[store] = right
        return ahead

    def _doubtful(self, store: int, key: str) -> bool:
        """Whether *store* may have missed something of *key*."""
        return self._seen_level.get((store, key), 0) < self._failures[store]

    def _note_level(self, store: int, key: str) -> None:
        if len(self._seen_level) >= MAX_DEBTS:
            self._seen_level.clear()
        self._seen_level[store, key] = self._failures[store]

    def _other_window(self, one: Decision, other: Decision) -> bool:
        """Whether the clocks of two stores are in different windows, or will be soon."""
        ends = (one.reset_after, other.reset_after)
        return self._by_clock and (min(ends) < WINDOW_MARGIN or abs(ends[0] - ends[1]) > WINDOW_MARGIN)

    def _level(self, store: int, right: int, key: str) -> Plan:
        """Charge *store* what it has counted less than the store *right*.

        One process at a time does so: what several of them charge at the same time would add up. They take turns by a
        key of their own, of which one of them takes all permits; one that dies keeps the others waiting for a second.
        """
        turn = LimiterCall("take", "level:" + blake2b(key.encode(), digest_size=16).hexdigest(), self.capacity)
        free = turn._replace(op="reset")
        try:
            for _ in range(TURNS):
                votes: dict[int, Vote] = yield self.poll(turn, None, (store,))
                if isinstance(votes[store], Failure) or votes[store]:
                    break
                yield TURN
            if not isinstance(votes[store], Failure):
                yield from self._charge_difference(store, right, key)
                yield self.poll(free, None, (store,))
        finally:
            self._levelling.discard((store, key))

    def _charge_difference(self, store: int, right: int, key: str) -> Plan:
        """Look at both, and charge. *store* is asked first: calls under way count against it, not in its favour."""
        missed, peek = 0, LimiterCall("peek", key, 0)
        for pause in LOOKS:
            yield pause
            begun, failures = monotonic(), self._failures[store]
            one = (yield self.poll(peek, None, (store,)))[store]
            other = (yield self.poll(peek, None, (right,)))[right]
            if isinstance(one, Failure) or isinstance(other, Failure) or self._other_window(one, other):
                return
            missed = one.remaining - other.remaining
            if missed <= 0:
                break
            missed += self._refilled(monotonic() - begun)
        if missed > 0:
            charge = LimiterCall("charge", key, min(missed, self.capacity))
            one = (yield self.poll(charge, None, (store,)))[store]
        if not isinstance(one, Failure) and failures == self._failures[store]:
            self._note_level(store, key)

    def _refilled(self, seconds: float) -> int:
        """Permits that came back in so many seconds, at most."""
        quota = self.rule.quotas[0]
        return 0 if self._by_clock else ceil(quota.limit * seconds / quota.period)


class FirstThatAnswers(Agreement):
    """The first store of the list that answers decides."""

    @staticmethod
    def needed_of(stores: int) -> int:
        return 1

    def __init__(self, rule: Rule, backends: Sequence[Any], clock: Clock | None) -> None:
        super().__init__(rule, backends, clock)
        self._seen = Fallback("local", rule, clock)  # its local limiter follows every decision
        self._elsewhere: dict[str, int] = {}  # keys about which another store than the first has decided last

    def take(self, key: str, permits: int, seconds: float | None) -> Plan:
        votes: dict[int, Vote] = {}
        for store, left in self._turns(seconds):
            failure = None
            if self._elsewhere.get(key, 0) != store:
                failure = yield from self._carry_over(store, key, left)
            votes |= (
                {store: failure} if failure else (yield self.poll(LimiterCall("take", key, permits), left, (store,)))
            )
            made = votes[store]
            if isinstance(made, Decision):
                self._note(store, key, made)
                return made
        raise self.too_few(votes)

    def ask(self, call: LimiterCall, seconds: float | None) -> Plan:
        if call.op == "reset":
            return (yield from self._reset(call, seconds))
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
        return (yield from self.raise_to(store, key, remaining, seconds))

    def _note(self, store: int, key: str, made: Decision) -> None:
        self._seen.follow_store(key, made)
        if store == 0:
            self._elsewhere.pop(key, None)
        elif key in self._elsewhere or len(self._elsewhere) < MAX_DEBTS:
            self._elsewhere[key] = store


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
