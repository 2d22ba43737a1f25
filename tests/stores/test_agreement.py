"""Several stores as one, on a model: the plans of the product, on a network and stores that fail in every known way."""

from __future__ import annotations

import os
from typing import Any

import pytest

from headgate.decision import Decision
from headgate.errors import StoreUnavailable
from headgate.rule import Rule
from headgate.stores.agreement import TooFewAnswers, TooManyRefuse, decisions
from headgate.stores.base import StoreHealth
from headgate.stores.failover import FirstThatAnswers
from headgate.stores.majority import Majority
from headgate.stores.remote import LimiterCall
from tests.support.simulated_stores import Load, Network, SimulatedStore, fleet, single

WALKS = int(os.environ.get("HEADGATE_AGREEMENT_WALKS", "1"))  # of each kind
KINDS: dict[str, dict[str, Any]] = {
    "a few callers": {"callers": 8, "pause": 1_000.0},
    "many callers": {"callers": 32, "pause": 2_000.0},
    "calls far apart": {"callers": 32, "pause": 30_000.0},
    "several permits": {"callers": 16, "pause": 5_000.0, "permits": (1, 2, 5)},
    "callers in a hurry": {"callers": 16, "pause": 5_000.0, "seconds": 0.0006},
}


def fail_in_turn(network: Network, stores: list[SimulatedStore], until: float) -> None:
    """One store after another loses messages, or dies, and most of them come back empty; then it has a moment."""
    while network.seconds() < until:
        store = network.random.choice(stores)
        if network.random.random() < 0.5:
            store.lose = store.lose_reply = store.belated = 0.03
            network.run(network.seconds() + network.random.uniform(0.0, 0.1))
        if network.random.random() < 0.8:
            store.die(forget=network.random.random() < 0.7)
            network.run(network.seconds() + network.random.uniform(0.02, 0.3))
        store.heal()
        network.run(network.seconds() + 0.25)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(WALKS))
def test_never_over(kind: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens to one store at a time, all processes together admit no more than the limit."""
    shape = dict(KINDS[kind])
    callers = shape.pop("callers")
    network, stores, processes = fleet(monkeypatch, seed, Rule("100/30d"))
    load = Load(network, processes, **shape)
    load.begin(callers)
    fail_in_turn(network, stores, network.seconds() + 2.0)
    assert 50 <= load.granted <= 100


@pytest.mark.slow
@pytest.mark.parametrize("quota", ["200/second", "1000/second burst 50"])
def test_never_over_while_it_refills(quota: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With faults, a quota that refills is served at its rate: not more, and nearly all of it."""
    rule = Rule(quota, "gcra")
    network, stores, processes = fleet(monkeypatch, 7, rule)
    begun, rate = network.seconds(), rule.quotas[0].limit / rule.quotas[0].period
    load = Load(network, processes)
    load.begin(16)
    fail_in_turn(network, stores, begun + 2.0)
    exact = rule.capacity + rate * (network.seconds() - begun)
    assert 0.9 * exact < load.granted < exact + 1


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["token_bucket", "fixed_window", "sliding_window_counter"])
def test_nearly_all_is_admitted(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers that compete for each permit in eight processes get at least 99 % of what an exact limiter admits."""
    rule = Rule("200/second", algorithm)
    network, _, processes = fleet(monkeypatch, 3, rule, processes=8)
    alone = Network(3)
    one = SimulatedStore(alone, rule)
    exact = Load(alone, [Majority(rule, [one], alone.clock) for _ in range(8)], pause=2_000.0)
    load = Load(network, processes, pause=2_000.0)
    for each in (load, exact):
        each.begin(32)
        each.network.run(each.network.seconds() + 0.99)
    assert 197 <= exact.granted <= 398
    assert load.granted >= 0.99 * exact.granted


class Voting(Majority):
    """A protocol that suggests itself: each store votes, and most votes decide."""

    def take(self, call: LimiterCall, seconds: float | None) -> Any:
        votes = yield self.poll(call)
        answers = decisions(votes)
        if sum(map(bool, answers.values())) < self.needed:
            yield from self._give_back(call, votes, 0.0)
        return sum(map(bool, answers.values())) >= self.needed


class NeverLevel(Majority):
    def _level(self, store: int, key: str) -> Any:
        yield 0.0


class NeverLook(Majority):
    def _audit_is_due(self, key: str, now: float) -> bool:
        return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "quota", "pause"),
    [(Voting, "200/second", 5_000.0), (NeverLevel, "100/30d", 30_000.0), (NeverLook, "100/30d", 30_000.0)],
)
def test_the_model_notices(broken: type[Majority], quota: str, pause: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part of the protocol is needed: without it such walks admit too many."""
    rule = Rule(quota)
    for seed in range(12):
        network, stores, processes = fleet(monkeypatch, seed, rule, of=broken)
        begun = network.seconds()
        load = Load(network, processes, pause=pause)
        load.begin(32)
        fail_in_turn(network, stores, begun + 2.0)
        refilled = (network.seconds() - begun) * rule.quotas[0].limit / rule.quotas[0].period
        if load.granted > rule.capacity + refilled + 1:
            return
    pytest.fail("no walk admitted too many")


# ------------------------------------------------------------------------------------------------------ without chance


def stores_of(rule: Rule, count: int = 3) -> list[SimulatedStore]:
    network = Network(0)
    return [SimulatedStore(network, rule) for _ in range(count)]


class Silent:
    """A store that does not answer."""

    def fail(self, key: str, permits: int) -> Decision:
        raise StoreUnavailable("silent")

    try_acquire = peek = refund = fail

    def store_health(self) -> StoreHealth:
        return StoreHealth("open")


class Refusing(Silent):
    def refused(self, error: Exception) -> bool:
        return True


def take(agreement: Majority | FirstThatAnswers, permits: int = 1) -> Decision:
    made: Decision = single(agreement.plan(LimiterCall("take", "k", permits), None))
    return made


def test_the_tightest_answer_counts() -> None:
    """What is left, and how long to wait, holds at every store that answered; refused permits are given back."""
    rule = Rule("10/30d")
    stores = stores_of(rule)
    agreement = Majority(rule, stores, None)
    stores[1].try_acquire("k", 4)
    assert take(agreement, 3).remaining == 3
    denied = take(agreement, 4)
    assert (denied.allowed, denied.remaining) == (False, 3)
    assert denied.retry_us == stores[1].peek("k", 4).retry_us
    assert [store.peek("k", 0).remaining for store in stores] == [7, 3, 7]


@pytest.mark.parametrize(("stores", "silent"), [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (7, 3)])
def test_how_many_may_fail(stores: int, silent: int) -> None:
    """A majority of all stores must answer; with one less there is no decision, and nothing is spent."""
    rule = Rule("10/30d")
    live = stores_of(rule, stores - silent)
    assert take(Majority(rule, [*live, *[Silent()] * silent], None)).remaining == 9
    fewer = [*live[1:], *[Silent()] * (silent + 1)]
    with pytest.raises(TooFewAnswers, match=f"of {stores} stores answered and it takes {stores // 2 + 1}"):
        take(Majority(rule, fewer, None))
    assert {store.peek("k", 0).remaining for store in live} == {9}


def test_refilled_stores_are_not_doubted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the first store refuses, what refills until the others are looked at does not count as missed by them."""
    levelled: list[int] = []

    class Noted(Majority):
        def _level(self, store: int, key: str) -> Any:
            levelled.append(store)
            yield 0.0

    network, stores, [process] = fleet(monkeypatch, 0, Rule("1000/second"), processes=1, of=Noted)
    network.delay = 5_000.0  # microseconds: five permits
    for store in stores:
        assert store.try_acquire("k", 1000)
    for _ in range(3):
        network.start(process.plan(LimiterCall("take", "k", 900), None), lambda made: None)
        network.run(network.seconds() + 0.2)
    assert not levelled


def test_stores_that_refuse() -> None:
    """An error that all missing stores answered with is told from silence: it is logged once."""
    rule = Rule("10/30d")
    with pytest.raises(TooManyRefuse):
        take(Majority(rule, [*stores_of(rule, 1), Refusing(), Refusing()], None))
    with pytest.raises(TooFewAnswers) as raised:
        take(Majority(rule, [*stores_of(rule, 1), Silent(), Refusing()], None))
    assert type(raised.value) is TooFewAnswers


def test_the_next_store_starts_where_the_first_ended() -> None:
    """When the first store dies, and when it is back, with or without its state, a key gets no second quota."""
    rule = Rule("10/30d")
    stores = stores_of(rule, 2)
    agreement = FirstThatAnswers(rule, stores, None)
    assert take(agreement, 4).remaining == 6
    agreement.backends[0] = Silent()
    assert take(agreement, 2).remaining == 4
    stores[0].forget()
    agreement.backends[0] = stores[0]
    assert take(agreement, 1).remaining == 3
    assert single(agreement.plan(LimiterCall("refund", "k", 2), None)) is True
    agreement.backends[0] = Silent()
    assert take(agreement, 1).remaining == 3  # it was not told of the refund
