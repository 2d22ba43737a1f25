"""A manager against ledgers, on a clock of its own: waiting callers, more keys than there is room for, lost trips."""

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


class ManagerHarness:
    """One manager with one limiter, driven by hand, and a ledger for each key."""

    def __init__(
        self, max_keys: int, quota: str = f"{CAPACITY}/day", policy: str = "deny", partitioned: bool = False
    ) -> None:
        self.now = 1000 * SECOND
        self.manager = LeaseManager(lambda: self.now, random.Random(1), partitioned)
        self.limiter = LimiterLeases(self.manager, Rule(quota), PROFILES["high"], policy, max_keys=max_keys)
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
        self.manager.trip_under_way = False

    def turn(self) -> None:
        items = self.gather()
        if items:
            self.answer(items)

    def admitted(self, key: str) -> int:
        waited = [w for k, w in self.waiters if k == key and w.op == "take" and w.result and w.result.allowed]
        return self.local[key] + sum(waiter.permits for waiter in waited)

    def check(self) -> None:
        live = [lease.key for lease in self.limiter.leases.values()]
        assert set(self.manager.waiters) <= set(self.limiter.leases.values()), "waiters wait for live leases"
        assert not set(live) & {key for _, key in self.manager.releases}, "one lease a key"
        for key in self.ledgers:
            assert self.admitted(key) <= CAPACITY, f"{self.admitted(key)} of {CAPACITY} for {key}"


def test_awaited_lease_stays() -> None:
    """A lease with waiters is not evicted."""
    harness = ManagerHarness(max_keys=1)
    for _ in range(10):
        harness.wait("x")
    harness.wait("x", "peek")  # later waiters have the next trip
    for _ in range(8):
        harness.wait("x")
    harness.wait("y")
    harness.wait("x")
    for _ in range(45):
        harness.turn()
        harness.wait("x")
        harness.check()
    assert harness.admitted("x") == CAPACITY
    assert harness.admitted("y") == 1


def test_lease_in_flight_stays() -> None:
    """A lease in a report is not evicted."""
    harness = ManagerHarness(max_keys=1)
    harness.wait("x")
    items = harness.gather()
    lease = harness.limiter.leases["x"]
    harness.wait("y")
    assert harness.limiter.leases["x"] is lease
    harness.answer(items)
    harness.wait("z")
    assert len(harness.limiter.leases) <= 2, "there is room again once it has come back"


def test_reuse_of_a_released_lease() -> None:
    """A key that is used again before its lease went back goes on with that lease."""
    harness = ManagerHarness(max_keys=10)
    for _ in range(3):
        harness.wait("x")
        harness.turn()
    harness.wait("x")
    items = harness.gather()
    lease = harness.limiter.leases["x"]
    harness.limiter.release_all()
    harness.wait("x")
    assert harness.limiter.leases["x"] is lease, "the one that the ledger knows"
    harness.answer(items)
    harness.check()


def test_release_after_a_report() -> None:
    """A lease that is released during its report gives everything back afterwards."""
    harness = ManagerHarness(max_keys=10)
    for _ in range(10):
        harness.wait("x")
    items = harness.gather()
    harness.limiter.release_all()
    harness.answer(items)
    assert harness.ledgers["x"].leased_out > 0
    harness.turn()
    assert harness.ledgers["x"].leased_out == 0
    assert not harness.manager.releases


def test_debt_survives_a_lost_release() -> None:
    """A debt survives eviction and a lost release."""
    harness = ManagerHarness(max_keys=1, policy="allow")
    harness.wait("x")
    harness.turn()
    harness.manager.fail(harness.now, (), OSError("away"))
    owed = harness.wait("x").permits
    harness.wait("y")  # x leaves
    harness.now += 2 * SECOND
    items = harness.gather()
    for item in items:
        assert item.request.op != "release" or item.request.debt == owed
    harness.wait("x")
    harness.manager.fail(harness.now, items, OSError("away"))
    for _ in range(5):
        harness.now += 2 * SECOND
        harness.turn()
    assert (
        harness.ledgers["x"].free
        <= (CAPACITY - 1 - 2 * owed) * harness.limiter.params.cost + harness.limiter.params.capacity_units // 1000
    )


@pytest.mark.parametrize("max_keys", [1, 2, 3])
def test_random_walks(max_keys: int) -> None:
    """Whatever the order of callers, trips, losses and closings: no key gets more than its capacity."""
    for seed in range(60):
        dice = random.Random(f"{max_keys} {seed}")
        harness = ManagerHarness(max_keys)
        away: list[SyncItem] = []
        for _ in range(120):
            event = dice.random()
            key = dice.choice("xxxyz")
            if event < 0.45:
                for _ in range(dice.choice([1, 1, 4])):
                    harness.call(key)
            elif event < 0.55:
                harness.wait(key, "peek", 0)
            elif event < 0.57:
                harness.limiter.release_all()
            elif away:
                if dice.random() < 0.1:  # lost, before or after it arrived
                    arrived = dice.random() < 0.5
                    for item in away if arrived else ():
                        ledger = harness.ledgers.setdefault(item.lease.key, Ledger())
                        ledger.sync(harness.now // 1000, harness.limiter.params, harness.limiter.profile, item.request)
                    harness.manager.fail(harness.now, away, OSError("away"))
                    harness.manager.trip_under_way = False
                    harness.now += 2 * SECOND
                else:
                    harness.answer(away)
                away = []
            else:
                away = harness.gather()
            try:
                harness.check()
            except AssertionError as error:
                raise AssertionError(f"max_keys {max_keys}, seed {seed}") from error


@pytest.mark.parametrize("policy", ["local", "deny"])
def test_evicted_keys_are_not_new(policy: str) -> None:
    """A key that may have been evicted gets no first permit in an outage."""
    harness = ManagerHarness(max_keys=2, policy=policy)
    harness.wait("a")
    harness.turn()
    harness.manager.fail(harness.now, (), OSError("away"))
    allowed: Counter[str] = Counter()
    for _ in range(50):
        for key in ("x", "y", "z"):
            waiter = harness.wait(key)
            assert waiter.result is not None
            allowed[key] += waiter.result.allowed
    assert max(allowed.values(), default=0) <= 1
    assert sum(allowed.values()) <= 2, "the table was full after two keys"


def test_no_unasked_grant_in_a_full_table() -> None:
    """A full table grants nothing unasked: an unknown key need not be new."""
    harness = ManagerHarness(max_keys=2)
    granted = [bool(harness.limiter.grant_unasked(f"k{i % 5}", 1, harness.now)) for i in range(50)]
    assert sum(granted) == 2


def test_retry_for_permits_of_others() -> None:
    """A caller that needs permits which others hold is told to retry after a second."""
    harness = ManagerHarness(max_keys=2, quota="1000/second")
    lease = harness.limiter.lease_for("x", harness.now)
    free = 999 * harness.limiter.params.cost
    made = harness.limiter.decide_waiter(lease, LeaseReply(OK, free=free, others=1), 1000, False, harness.now)
    assert made.retry_after >= 1
    process = harness.limiter.decide_waiter(lease, LeaseReply(OK, free=free), 1000, False, harness.now)
    assert 0 < process.retry_after < 0.01


def test_batch_has_room() -> None:
    """Waiters leave room in a batch for releases and for leases that are due, and the batch is full."""
    harness = ManagerHarness(max_keys=1000)
    for _ in range(3):
        harness.wait("goes")
        harness.wait("due")
        harness.turn()
    lease = harness.limiter.leases.pop("goes")
    harness.manager.releases.add(lease)
    harness.limiter.leases["due"].due = harness.now
    harness.manager.schedule.add(harness.limiter.leases["due"])
    for number in range(200):
        harness.wait(f"k{number}")
    asked = {(item.lease.key, item.request.op) for item in harness.gather()}
    assert {("goes", "release"), ("due", "sync")} <= asked
    assert len(asked) == BATCH, "and the batch is full"


def test_expired_release() -> None:
    """A released lease that runs out before it went back counts as burned."""
    harness = ManagerHarness(max_keys=10)
    for _ in range(3):
        harness.wait("x")
        harness.turn()
    lease = harness.limiter.leases.pop("x")
    held = lease.balance // harness.limiter.params.cost
    harness.manager.releases.add(lease)
    harness.now += 60 * SECOND
    harness.turn()
    assert held > 0 and harness.limiter.burned == held and not harness.manager.releases


def test_releases_of_one_limiter() -> None:
    """A limiter waits only for its own releases."""
    harness = ManagerHarness(max_keys=10)
    harness.wait("x")
    items = harness.gather()
    assert items and harness.manager.trip_under_way
    other = LimiterLeases(harness.manager, Rule("5/day"), PROFILES["high"], "deny", max_keys=10)
    other.release_all()
    assert not other.is_releasing()
    harness.limiter.release_all()
    assert harness.limiter.is_releasing(), "what is under way has to come back first"


def test_lost_release() -> None:
    """A release that was lost is sent again."""
    harness = ManagerHarness(max_keys=10)
    for _ in range(3):
        harness.wait("x")
        harness.turn()
    harness.limiter.release_all()
    items = harness.gather()
    assert [item.request.op for item in items] == ["release"]
    assert harness.limiter.is_releasing(), "it is not known to have arrived"
    harness.manager.fail(harness.now, items, OSError("away"))
    harness.now += 2 * SECOND
    harness.turn()
    assert harness.ledgers["x"].leased_out == 0 and not harness.limiter.is_releasing()


def test_refused_release() -> None:
    """A release that Redis refuses is not sent again."""
    harness = ManagerHarness(max_keys=10)
    for key in ("x", "x", "x", "y"):
        harness.wait(key)
        harness.turn()
    harness.manager.releases.add(harness.limiter.leases.pop("x"))
    harness.wait("y", "peek")
    items = harness.gather()
    assert {item.request.op for item in items} == {"peek", "release"}
    refusals: list[LeaseReply | str] = [
        "WRONGTYPE" if item.request.op == "release" else LeaseReply(OK) for item in items
    ]
    harness.manager.deliver(harness.now, items, refusals)
    assert not harness.manager.releases


def test_one_server_down() -> None:
    """In a Cluster the failure of one server says nothing about keys of the others."""
    harness = ManagerHarness(max_keys=10, partitioned=True)
    sick, well = harness.wait("sick"), harness.wait("well")
    items = harness.gather()
    harness.manager.fail(harness.now, [item for item in items if item.lease.key == "sick"], OSError("away"))
    assert sick.result is not None and sick.result.degraded and well.result is None
    assert harness.manager.health.current_error(harness.now)
    harness.answer([item for item in items if item.lease.key == "well"])
    assert well.result is not None and well.result.allowed and not well.result.degraded
    again, new = harness.wait("sick"), harness.wait("new")
    assert again.result is not None and again.result.degraded, "Redis is not asked for a while"
    assert new.result is None
    harness.turn()
    assert new.result is not None and new.result.allowed
    harness.now += 2 * SECOND
    later = harness.wait("sick")
    harness.turn()
    assert later.result is not None and not later.result.degraded


def test_one_batch_per_lease() -> None:
    """A lease is in one batch at a time."""
    harness = ManagerHarness(max_keys=10, partitioned=True)
    first = harness.wait("x")
    items = harness.gather()
    second, other = harness.wait("x"), harness.wait("y")
    batch = harness.gather()
    assert [item.lease.key for item in batch] == ["y"]
    seconds = harness.manager.seconds_until_work(harness.now)
    assert seconds is not None and seconds > 0, "there is nothing to do for x before its trip is over"
    harness.answer(batch)
    harness.answer(items)
    harness.turn()
    assert all(waiter.result is not None and waiter.result.allowed for waiter in (first, second, other))


def test_background_may_end() -> None:
    """The background thread may end in an outage once no limiter holds leases."""
    harness = ManagerHarness(max_keys=10, policy="allow")
    harness.manager.fail(harness.now, (), OSError("away"))
    harness.wait("x")
    harness.limiter.release_all()
    for _ in range(10):
        harness.manager.fail(harness.now, harness.gather(), OSError("away"))
        harness.now += 2 * SECOND
    assert harness.manager.seconds_until_work(harness.now) is None, "it may end"


def test_peek_and_a_due_report() -> None:
    """A report that is due while a caller peeks at its key is sent with a later trip."""
    harness = ManagerHarness(max_keys=5, policy="allow")
    harness.wait("x")
    harness.manager.fail(harness.now, harness.gather(), OSError("down"))
    lease = harness.limiter.leases["x"]
    assert lease.debt == 1
    harness.now += 5 * SECOND
    harness.wait("y")
    harness.turn()  # the store is back
    harness.now = max(harness.now, lease.due)
    harness.wait("x", "peek")
    for _ in range(300):
        harness.turn()
    assert lease.debt == 0 and harness.ledgers["x"].free < CAPACITY * harness.limiter.cost
