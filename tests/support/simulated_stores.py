"""A model of several stores and the processes that ask them: the plans of the product on a network that is simulated.

Each store is an exact limiter (a `MemoryStore`) that can die, come back empty or as it was, and whose messages can be
lost, come late, or run after their caller has given up. Time is simulated, and every choice comes from one seed.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import pytest

from headgate._plan import run
from headgate.decision import Decision
from headgate.errors import StoreUnavailable
from headgate.rule import Rule
from headgate.stores import MemoryStore
from headgate.stores.agreement import Agreement, Background, Failure, Poll, TooFewAnswers
from headgate.stores.base import StoreHealth
from headgate.stores.majority import Majority
from headgate.stores.polling import call_store
from headgate.stores.remote import LimiterCall
from headgate.testing import ManualClock

TIMEOUT = 80_000  # microseconds


class SimulatedStore:
    """One store, as a backend of it sees the store."""

    def __init__(self, network: Network, rule: Rule) -> None:
        self.network, self.rule = network, rule
        self.up = True
        self.lives = 0  # deaths so far
        self.lose = self.lose_reply = self.belated = 0.0  # parts of the messages
        self.forget()

    def forget(self) -> None:
        self.table = MemoryStore(clock=self.network.clock).open(self.rule)

    def die(self, *, forget: bool) -> None:
        self.up, self.lives = False, self.lives + 1
        if forget:
            self.forget()

    def heal(self) -> None:
        self.up = True
        self.lose = self.lose_reply = self.belated = 0.0

    def store_health(self) -> StoreHealth:
        return StoreHealth("closed" if self.up else "open")

    def try_acquire(self, key: str, permits: int) -> Any:
        return self.table.try_acquire(key, permits)

    def peek(self, key: str, permits: int) -> Any:
        return self.table.peek(key, permits)

    def refund(self, key: str, permits: int) -> Any:
        return self.table.refund(key, permits)

    def reset(self, key: str) -> Any:
        return self.table.reset(key)


class Network:
    """What happens, in the order of time."""

    def __init__(self, seed: int, delay: float = 300.0) -> None:
        self.random = Random(seed)
        self.clock = ManualClock()
        self.delay = delay  # microseconds of a message, on average
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def seconds(self) -> float:
        return self.clock.now() / 1e6

    def after(self, microseconds: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.clock.now() + int(microseconds), next(self._count), happen))

    def run(self, until: float) -> None:
        """Go on until so many simulated seconds."""
        while self._events and self._events[0][0] <= until * 1e6:
            at, _, happen = heapq.heappop(self._events)
            self.clock.advance((at - self.clock.now()) / 1e6)
            happen()
        self.clock.advance(max(until - self.seconds(), 0.0))

    def trip(self) -> float:
        return self.delay * (0.2 + self.random.expovariate(1.25))

    # ---------------------------------------------------------------------------------------------------- messages

    def send(self, store: SimulatedStore, call: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Have *store* run *call*; *done* gets its result, or the error of the caller."""
        if not store.up:
            self.after(20, partial(done, StoreUnavailable("refused")))
            return
        life, answered = store.lives, [False]

        def once(result: Any) -> None:
            if not answered[0]:
                answered[0] = True
                done(result)

        def arrive(reply: bool) -> None:
            if not store.up or store.lives != life:
                once(StoreUnavailable("broken"))
                return
            result = call()
            if reply:
                self.after(self.trip(), partial(once, result))

        self.after(TIMEOUT, partial(once, StoreUnavailable("no answer")))
        fate = self.random.random()
        if fate < store.lose:
            return
        fate -= store.lose
        if fate < store.lose_reply:
            self.after(self.trip(), partial(arrive, False))
        elif fate - store.lose_reply < store.belated:
            self.after(TIMEOUT + self.trip(), partial(arrive, False))
        else:
            self.after(self.trip(), partial(arrive, True))

    # ------------------------------------------------------------------------------------------------------- plans

    def start(self, plan: Generator[Any, Any, Any], done: Callable[[Any], None]) -> None:
        """Drive *plan*; *done* gets its result, or its error."""
        self._step(plan, done, None)

    def _step(self, plan: Generator[Any, Any, Any], done: Callable[[Any], None], value: Any) -> None:
        try:
            request = plan.throw(value) if isinstance(value, BaseException) else plan.send(value)
        except StopIteration as end:
            done(end.value)
        except (TooFewAnswers, StoreUnavailable, Cancelled) as error:
            done(error)
        else:
            resume = partial(self._step, plan, done)
            if isinstance(request, float):
                self.after(request * 1e6, partial(resume, None))
            elif isinstance(request, Background):
                self.start(request.plan, lambda _: None)
                resume(None)
            elif isinstance(request, Poll):
                SimulatedPoll(self, request, resume)
            else:  # a function of one message, of `call_store`
                self.send(request.func.__self__, request, resume)


class Cancelled(BaseException):
    """A caller that does not wait any longer."""


class SimulatedPoll:
    """Calls to several stores at the same time."""

    def __init__(self, network: Network, poll: Poll, resume: Callable[[Any], None]) -> None:
        self.network, self.poll, self.resume = network, poll, resume
        self.votes: dict[int, Any] = {}
        self.over = False
        self.unwanted: set[int] = set()
        for store, backend in poll.backends.items():
            plan = call_store(backend, poll.op, poll.key, poll.permits)
            network.start(plan, partial(self.arrive, store))
        if poll.seconds is not None:
            network.after(poll.seconds * 1e6, self.give_up)
        if poll.op == "take" and len(poll.backends) > 1 and network.random.random() < CANCELLED:
            network.after(network.random.random() * 2 * network.delay, self.cancel)

    def arrive(self, store: int, vote: Any) -> None:
        self.votes[store] = vote
        if store in self.unwanted:
            self.refund(store)
        elif len(self.votes) == len(self.poll.backends) and not self.over:
            self.over = True
            self.resume({store: self.votes[store] for store in self.poll.backends})

    def give_up(self) -> None:
        if not self.over:
            self.over = True
            late = {store: Failure(TimeoutError(), late=Late(self, store)) for store in self.poll.backends}
            self.resume({store: self.votes.get(store, late[store]) for store in self.poll.backends})

    def cancel(self) -> None:
        if not self.over:
            self.over = True
            for store in self.poll.backends:
                self.give_back(store)
            self.resume(Cancelled())

    def give_back(self, store: int) -> None:
        if store in self.votes:
            self.refund(store)
        self.unwanted.add(store)

    def refund(self, store: int) -> None:
        vote = self.votes[store]
        if self.poll.op == "take" and isinstance(vote, Decision) and vote:
            refund = call_store(self.poll.backends[store], "refund", self.poll.key, self.poll.permits)
            self.network.start(refund, lambda _: None)


CANCELLED = 0.01  # of the calls that take


@dataclass(frozen=True)
class Late:
    poll: SimulatedPoll
    store: int

    def give_back(self) -> None:
        self.poll.give_back(self.store)


@dataclass
class Load:
    """Callers in several processes that ask for one key without a pause, and what they got."""

    network: Network
    processes: list[Agreement]
    pause: float = 1_000.0  # microseconds between the calls of a caller, on average
    seconds: float | None = None  # that a caller waits
    permits: tuple[int, ...] = (1,)
    grants: list[tuple[float, float, int]] = field(default_factory=list)  # begun, ended, permits
    outcomes: dict[str, int] = field(default_factory=dict)

    def begin(self, callers: int) -> None:
        for number in range(callers):
            process = self.processes[number % len(self.processes)]
            self.network.after(self.network.random.random() * self.pause, partial(self.ask, process))

    def ask(self, process: Agreement) -> None:
        begun, permits = self.network.seconds(), self.network.random.choice(self.permits)

        def ended(result: Any) -> None:
            kind = "error" if isinstance(result, BaseException) else "granted" if result else "denied"
            self.outcomes[kind] = self.outcomes.get(kind, 0) + 1
            if kind == "granted":
                self.grants.append((begun, self.network.seconds(), permits))
            pause = self.network.random.expovariate(1 / self.pause)
            self.network.after(pause, partial(self.ask, process))

        self.network.start(process.plan(LimiterCall("take", "k", permits), self.seconds), ended)

    @property
    def granted(self) -> int:
        return sum(permits for _, _, permits in self.grants)


def fleet(
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    rule: Rule,
    *,
    stores: int = 3,
    processes: int = 4,
    of: Callable[..., Agreement] = Majority,
) -> tuple[Network, list[SimulatedStore], list[Agreement]]:
    """Stores, and processes that ask them."""
    network = Network(seed)
    monkeypatch.setattr("headgate.stores.majority.monotonic", network.seconds)
    made = [SimulatedStore(network, rule) for _ in range(stores)]
    return network, made, [of(rule, made, network.clock) for _ in range(processes)]


def single(plan: Generator[Any, Any, Any]) -> Any:
    """What *plan* returns if every message arrives at once."""

    def answer(request: Any) -> Any:
        if isinstance(request, Poll):
            return {
                store: run(call_store(backend, request.op, request.key, request.permits), lambda ask: ask())
                for store, backend in request.backends.items()
            }
        return run(request.plan, answer) if isinstance(request, Background) else None

    return run(plan, answer)
