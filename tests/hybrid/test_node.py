"""A node against ledgers, on a clock of its own: callers who wait, more keys than there is room for, lost trips."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from headgate.hybrid.lease import MILLISECOND, SECOND, TICK
from headgate.hybrid.ledger import Ledger
from headgate.hybrid.limiter_leases import LeaseWaiter, LimiterLeases
from headgate.hybrid.manager import BATCH, LeaseManager, SyncItem
from headgate.hybrid.protocol import OK, PROFILES, LeaseReply
from headgate.rule import Rule

CAPACITY = 20


class Town:
    """One node with one limiter, and a ledger for each key."""

    def __init__(
        self, max_keys: int, quota: str = f"{CAPACITY}/day", policy: str = "deny", apart: bool = False
    ) -> None:
        self.now = 1000 * SECOND
        self.manager = LeaseManager(random.Random(1), apart)
        self.limiter = LimiterLeases(
            self.manager, Rule(quota), PROFILES["high"], policy, str, lambda: self.now, lambda *_: None, max_keys
        )
        self.ledgers: dict[str, Ledger] = {}
        self.waiters: list[tuple[str, LeaseWaiter]] = []
        self.local: Counter[str] = Counter()

    def wait(self, key: str, op: str = "take", permits: int = 1) -> LeaseWaiter:
        waiter = LeaseWaiter(op, permits, lambda: None)
        self.waiters.append((key, waiter))
        self.limiter.queue_waiter(key, waiter, self.now)
        return waiter

    def call(self, key: str) -> None:
        """From the lease, or wait."""
        made = self.limiter.try_acquire(key)
        if made is None:
            self.wait(key)
        else:
            self.local[key] += made.allowed

    def gather(self) -> list[SyncItem]:
        self.now += TICK
        return self.manager.gather(self.now)

    def answer(self, items: list[SyncItem]) -> None:
        params, profile = self.limiter.params, self.limiter.profile
        asked = [(self.ledgers.setdefault(item.lease.key, Ledger()), item.request) for item in items]
        replies = [ledger.sync(self.now // 1000, params, profile, request) for ledger, request in asked]
        self.now += MILLISECOND
        self.manager.deliver(self.now, items, replies)
        self.manager.busy = False

    def turn(self) -> None:
        items = self.gather()
        if items:
            self.answer(items)

    def admitted(self, key: str) -> int:
        waited = [w for k, w in self.waiters if k == key and w.op == "take" and w.result and w.result.allowed]
        return self.local[key] + sum(waiter.permits for waiter in waited)

    def check(self) -> None:
        live = [lease.key for lease in self.limiter.leases.values()]
        assert set(self.manager.waiters) <= set(self.limiter.leases.values()), "who waits, waits for a live lease"
        assert not set(live) & {key for _, key in self.manager.releases}, "one lease a key"
        for key in self.ledgers:
            assert self.admitted(key) <= CAPACITY, f"{self.admitted(key)} of {CAPACITY} for {key}"


def test_a_lease_that_somebody_waits_for_is_not_evicted() -> None:
    town = Town(max_keys=1)
    for _ in range(10):
        town.wait("x")
    town.wait("x", "peek")  # who comes after it has the next trip
    for _ in range(8):
        town.wait("x")
    town.wait("y")
    town.wait("x")
    for _ in range(45):
        town.turn()
        town.wait("x")
        town.check()
    assert town.admitted("x") == CAPACITY
    assert town.admitted("y") == 1


def test_a_lease_under_way_is_not_evicted() -> None:
    town = Town(max_keys=1)
    town.wait("x")
    items = town.gather()
    lease = town.limiter.leases["x"]
    town.wait("y")
    assert town.limiter.leases["x"] is lease
    town.answer(items)
    town.wait("z")
    assert len(town.limiter.leases) <= 2, "there is room again once it has come back"


def test_closed_while_under_way_and_used_again() -> None:
    town = Town(max_keys=10)
    for _ in range(3):
        town.wait("x")
        town.turn()
    town.wait("x")
    items = town.gather()
    lease = town.limiter.leases["x"]
    town.limiter.release_all()
    town.wait("x")
    assert town.limiter.leases["x"] is lease, "the one that the ledger knows"
    town.answer(items)
    town.check()


def test_closed_while_under_way_gives_everything_back() -> None:
    town = Town(max_keys=10)
    for _ in range(10):
        town.wait("x")
    items = town.gather()
    town.limiter.release_all()
    town.answer(items)
    assert town.ledgers["x"].out > 0
    town.turn()
    assert town.ledgers["x"].out == 0
    assert not town.manager.releases


def test_a_debt_survives_eviction_and_a_lost_farewell() -> None:
    town = Town(max_keys=1, policy="allow")
    town.wait("x")
    town.turn()
    town.manager.fail(town.now, (), OSError("away"))
    owed = town.wait("x").permits
    town.wait("y")  # x leaves
    town.now += 2 * SECOND
    items = town.gather()
    for item in items:
        assert item.request.op != "release" or item.request.debt == owed
    town.wait("x")
    town.manager.fail(town.now, items, OSError("away"))
    for _ in range(5):
        town.now += 2 * SECOND
        town.turn()
    assert (
        town.ledgers["x"].free
        <= (CAPACITY - 1 - 2 * owed) * town.limiter.params.cost + town.limiter.params.room // 1000
    )


@pytest.mark.parametrize("max_keys", [1, 2, 3])
def test_random_walks_of_a_crowded_node(max_keys: int) -> None:
    """Whatever the order of callers, trips, losses and closings: no key gets more than its capacity."""
    for seed in range(60):
        dice = random.Random(f"{max_keys} {seed}")
        town = Town(max_keys)
        away: list[SyncItem] = []
        for _ in range(120):
            event = dice.random()
            key = dice.choice("xxxyz")
            if event < 0.45:
                for _ in range(dice.choice([1, 1, 4])):
                    town.call(key)
            elif event < 0.55:
                town.wait(key, "peek", 0)
            elif event < 0.57:
                town.limiter.release_all()
            elif away:
                if dice.random() < 0.1:  # nobody knows whether it arrived
                    arrived = dice.random() < 0.5
                    for item in away if arrived else ():
                        ledger = town.ledgers.setdefault(item.lease.key, Ledger())
                        ledger.sync(town.now // 1000, town.limiter.params, town.limiter.profile, item.request)
                    town.manager.fail(town.now, away, OSError("away"))
                    town.manager.busy = False
                    town.now += 2 * SECOND
                else:
                    town.answer(away)
                away = []
            else:
                away = town.gather()
            try:
                town.check()
            except AssertionError as error:
                raise AssertionError(f"max_keys {max_keys}, seed {seed}") from error


@pytest.mark.parametrize("policy", ["local", "deny"])
def test_keys_that_were_forgotten_are_not_new(policy: str) -> None:
    town = Town(max_keys=2, policy=policy)
    town.wait("a")
    town.turn()
    town.manager.fail(town.now, (), OSError("away"))
    allowed: Counter[str] = Counter()
    for _ in range(50):
        for key in ("x", "y", "z"):
            waiter = town.wait(key)
            assert waiter.result is not None
            allowed[key] += waiter.result.allowed
    assert max(allowed.values(), default=0) <= 1
    assert sum(allowed.values()) <= 2, "the table was full after two keys"


def test_no_trust_in_a_full_table() -> None:
    town = Town(max_keys=2)
    granted = [bool(town.limiter.grant_unasked(f"k{i % 5}", 1, town.now)) for i in range(50)]
    assert sum(granted) == 2


def test_what_others_hold_is_not_promised_soon() -> None:
    town = Town(max_keys=2, quota="1000/second")
    lease = town.limiter.lease_for("x", town.now)
    free = 999 * town.limiter.params.cost
    made = town.limiter.decide_waiter(lease, LeaseReply(OK, free=free, others=1), 1000, False, town.now)
    assert made.retry_after >= 1
    alone = town.limiter.decide_waiter(lease, LeaseReply(OK, free=free), 1000, False, town.now)
    assert 0 < alone.retry_after < 0.01


def test_who_waits_leaves_room_for_others() -> None:
    town = Town(max_keys=1000)
    for _ in range(3):
        town.wait("goes")
        town.wait("due")
        town.turn()
    lease = town.limiter.leases.pop("goes")
    town.manager.releases.add(lease)
    town.limiter.leases["due"].due = town.now
    town.manager.schedule.add(town.limiter.leases["due"])
    for number in range(200):
        town.wait(f"k{number}")
    asked = {(item.lease.key, item.request.op) for item in town.gather()}
    assert {("goes", "release"), ("due", "sync")} <= asked
    assert len(asked) == BATCH, "and nobody travels half empty"


def test_what_runs_out_on_its_way_is_burned() -> None:
    town = Town(max_keys=10)
    for _ in range(3):
        town.wait("x")
        town.turn()
    lease = town.limiter.leases.pop("x")
    held = lease.balance // town.limiter.params.cost
    town.manager.releases.add(lease)
    town.now += 60 * SECOND
    town.turn()
    assert held > 0 and town.limiter.burned == held and not town.manager.releases


def test_a_farewell_waits_for_nobody_else() -> None:
    town = Town(max_keys=10)
    town.wait("x")
    items = town.gather()
    assert items and town.manager.busy
    other = LimiterLeases(
        town.manager, Rule("5/day"), PROFILES["high"], "deny", str, lambda: town.now, lambda *_: None, max_keys=10
    )
    other.release_all()
    assert not other.is_releasing()
    town.limiter.release_all()
    assert town.limiter.is_releasing(), "what is under way has to come back first"


def test_a_release_that_was_lost_is_told_again() -> None:
    town = Town(max_keys=10)
    for _ in range(3):
        town.wait("x")
        town.turn()
    town.limiter.release_all()
    items = town.gather()
    assert [item.request.op for item in items] == ["release"]
    assert town.limiter.is_releasing(), "it is not known to have arrived"
    town.manager.fail(town.now, items, OSError("away"))
    town.now += 2 * SECOND
    town.turn()
    assert town.ledgers["x"].out == 0 and not town.limiter.is_releasing()


def test_a_release_that_is_refused_is_not_told_again() -> None:
    town = Town(max_keys=10)
    for key in ("x", "x", "x", "y"):
        town.wait(key)
        town.turn()
    town.manager.releases.add(town.limiter.leases.pop("x"))
    town.wait("y", "peek")
    items = town.gather()
    assert {item.request.op for item in items} == {"peek", "release"}
    refusals: list[LeaseReply | str] = [
        "WRONGTYPE" if item.request.op == "release" else LeaseReply(OK) for item in items
    ]
    town.manager.deliver(town.now, items, refusals)
    assert not town.manager.releases


def test_a_server_that_is_away_says_nothing_of_the_others() -> None:
    town = Town(max_keys=10, apart=True)
    sick, well = town.wait("sick"), town.wait("well")
    items = town.gather()
    town.manager.fail(town.now, [item for item in items if item.lease.key == "sick"], OSError("away"))
    assert sick.result is not None and sick.result.degraded and well.result is None
    assert town.manager.health.current_error(town.now)
    town.answer([item for item in items if item.lease.key == "well"])
    assert well.result is not None and well.result.allowed and not well.result.degraded
    again, new = town.wait("sick"), town.wait("new")
    assert again.result is not None and again.result.degraded, "nobody requests for a while"
    assert new.result is None
    town.turn()
    assert new.result is not None and new.result.allowed
    town.now += 2 * SECOND
    later = town.wait("sick")
    town.turn()
    assert later.result is not None and not later.result.degraded


def test_a_lease_is_in_one_batch_at_a_time() -> None:
    town = Town(max_keys=10, apart=True)
    first = town.wait("x")
    items = town.gather()
    second, other = town.wait("x"), town.wait("y")
    batch = town.gather()
    assert [item.lease.key for item in batch] == ["y"]
    pause = town.manager.pause(town.now)
    assert pause is not None and pause > 0, "there is nothing to do for x before its trip is over"
    town.answer(batch)
    town.answer(items)
    town.turn()
    assert all(waiter.result is not None and waiter.result.allowed for waiter in (first, second, other))


def test_nobody_is_left_and_redis_is_away() -> None:
    town = Town(max_keys=10, policy="allow")
    town.manager.fail(town.now, (), OSError("away"))
    town.wait("x")
    town.limiter.release_all()
    for _ in range(10):
        town.manager.fail(town.now, town.gather(), OSError("away"))
        town.now += 2 * SECOND
    assert town.manager.pause(town.now) is None, "a driver may end"
