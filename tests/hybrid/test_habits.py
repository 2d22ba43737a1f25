"""What a manager does by itself: give back in time, remember unasked grants, probe, forget; and what a fork leaves."""

from __future__ import annotations

import pytest

from headgate.hybrid.lease import MILLISECOND, SECOND
from headgate.hybrid.ledger import Ledger
from headgate.hybrid.protocol import PROFILES, LeaseRequest
from tests.hybrid.test_manager import CAPACITY, ManagerHarness
from tests.support.hybrid_sole_process import SoleProcess


@pytest.mark.parametrize("accuracy", PROFILES)
def test_idle_lease_goes_back(accuracy: str) -> None:
    """An idle lease goes back within a second, however long its pause between reports; its spare permit after 20 s."""
    process = SoleProcess("1000/minute", accuracy=accuracy)
    for _ in range(1300):
        process.take()
        process.sleep(0.03)
    assert process.lease.balance > process.limiter.params.cost, "it holds a lease"
    assert accuracy == "high" or process.lease.report_interval > 2 * SECOND, "and would report much later"
    trips = process.trips
    process.sleep(2 * 0.5 + 0.05)
    assert process.lease.balance <= process.limiter.params.cost and process.ledger.leased_out <= 1
    assert process.trips <= trips + 3
    process.sleep(21)
    assert process.ledger.leased_out == 0


def test_rare_calls_keep_the_lease() -> None:
    """A usual gap between two calls does not make a lease idle: giving back and asking again would be two trips."""
    process = SoleProcess("1000/minute", accuracy="low")
    for _ in range(100):
        process.take()
        process.sleep(1.0)
    trips = process.trips
    for _ in range(100):
        process.take()
        process.sleep(1.0)
    assert process.trips - trips < 30


def test_unasked_grant_once() -> None:
    """A key that was granted a call unasked is remembered: 2 an hour are 2 an hour, whenever the calls come."""
    harness = ManagerHarness(1000, "2/hour")
    granted = 0
    for _ in range(40):
        made = harness.limiter.grant_unasked("k", 1, harness.now)
        if made is None:
            waiter = harness.wait("k")
            while waiter.result is None:
                harness.turn()
            made = waiter.answer()
        granted += made.allowed
        for _ in range(10):
            harness.now += SECOND // 4
            harness.turn()
    assert granted == 2
    for _ in range(7300):  # until there can be one
        harness.now += SECOND // 4
        harness.turn()
    assert not harness.limiter.leases, "then it is forgotten"
    assert harness.limiter.grant_unasked("k", 1, harness.now)


def test_unasked_grant_is_paid() -> None:
    """One unasked grant is one call too many at most, and is paid for before the next."""
    harness = ManagerHarness(1000, "100/hour")
    start, granted = harness.now, 0
    while harness.now < start + 3600 * SECOND:
        granted += harness.limiter.grant_unasked("k", 100, harness.now) is not None
        harness.now += 5 * SECOND // 2
        harness.turn()
    assert granted == 2, "the first was there, the second is one call too many, and is paid for"


def test_unasked_grant_beside_others() -> None:
    """That another process holds a lease, and may give it back, is no reason for a second unasked grant."""
    harness = ManagerHarness(1000, "100/hour")
    params, profile = harness.limiter.params, harness.limiter.profile
    ledger = harness.ledgers["k"] = Ledger()
    other = LeaseRequest("sync", "other", 0, 1, 0, 0, 0, 0, 0, ((80, 1),), 15, 0, 100_000_000, 30_000_000)
    assert ledger.sync(harness.now // 1000, params, profile, other).granted > 0
    granted = 0
    for _ in range(10):
        granted += harness.limiter.grant_unasked("k", 20, harness.now) is not None
        harness.now += 5 * SECOND // 2
        harness.turn()
    assert granted == 1


def test_after_fork() -> None:
    """The child of a fork has no leases, waiters or lock of its parent, and another node id."""
    harness = ManagerHarness(max_keys=10)
    for key in "ab":
        harness.wait(key)
    harness.turn()
    harness.wait("b")
    harness.manager.releases.add(harness.limiter.leases.pop("a"))
    harness.manager.refill_queue.append(harness.limiter.leases["b"])
    old, name = harness.manager.lock, harness.limiter.node_id
    old.acquire()  # by a thread that is not in the child
    harness.manager.after_fork()
    manager, table = harness.manager, harness.limiter
    assert manager.lock is not old and table.lock is manager.lock
    for release in (table.acquire_lock(), table.release_lock):
        assert release is not False
    assert not (manager.waiters or manager.releases or manager.refill_queue or table.leases)
    assert harness.limiter.node_id != name
    harness.now += 10 * SECOND
    assert harness.gather() == []


def test_lost_release_keeps_its_debt() -> None:
    """The debt in a release that was lost is charged although the key is used again meanwhile."""
    harness = ManagerHarness(max_keys=10, policy="allow")
    harness.manager.fail(harness.now, (), OSError("away"))
    harness.wait("x")
    harness.manager.releases.add(harness.limiter.leases.pop("x"))
    harness.now += 2 * SECOND
    items = harness.gather()
    assert [(item.request.op, item.request.debt) for item in items] == [("release", 1)]
    harness.wait("x")  # met again while that is under way
    harness.manager.fail(harness.now, items, OSError("away"))
    for _ in range(4):
        harness.now += 2 * SECOND
        harness.turn()
    free = harness.ledgers["x"].free + harness.ledgers["x"].leased_out * harness.limiter.params.cost
    assert CAPACITY * harness.limiter.params.cost - free >= 1.9 * harness.limiter.params.cost, "both are charged"


def test_reset_in_outage() -> None:
    """A reset during an outage drops the debt of the key."""
    harness = ManagerHarness(max_keys=10, policy="allow")
    harness.manager.fail(harness.now, (), OSError("away"))
    for _ in range(3):
        harness.wait("x")
    assert harness.limiter.leases["x"].debt == 3
    harness.wait("x", "reset", 0)
    assert harness.limiter.leases["x"].debt == 0


def test_probes() -> None:
    """One key at a time probes whether Redis is back, less and less often."""
    harness = ManagerHarness(max_keys=100)
    for number in range(20):
        harness.wait(f"k{number}")
    harness.manager.fail(harness.now, harness.gather(), OSError("away"))
    waits = []
    for _ in range(8):
        waits.append(harness.manager.health.retry_at - harness.now)
        assert harness.gather() == [], "not before its time"
        harness.now = harness.manager.health.retry_at
        harness.wait(f"k{len(waits)}")
        probe = harness.manager.gather(harness.now)
        assert len(probe) == 1
        harness.manager.fail(harness.now, probe, OSError("away"))
    assert waits[0] < 100 * MILLISECOND and waits[4] > 4 * waits[0] and SECOND // 2 < max(waits) < 2 * SECOND


def test_blocked_key() -> None:
    """A key of another type in Redis is not asked about for a second; the policy answers its callers, and no others."""
    harness = ManagerHarness(max_keys=10)
    bad, good = harness.wait("bad"), harness.wait("good")
    items = harness.gather()
    assert [item.lease.key for item in items] == ["bad", "good"]
    ledger = harness.ledgers.setdefault("good", Ledger())
    params, profile = harness.limiter.params, harness.limiter.profile
    reply = ledger.sync(harness.now // 1000, params, profile, items[1].request)
    harness.manager.deliver(harness.now, items, ["WRONGTYPE of another kind", reply])
    assert bad.answer().degraded and not good.answer().degraded
    assert harness.wait("bad").answer().degraded, "at once"
    harness.now += 2 * SECOND
    assert harness.wait("bad").result is None, "asked again"


def test_nodes_seen() -> None:
    """The number of processes, of which a share in an outage is a part, fades slowly; a new key starts with it."""
    harness = ManagerHarness(max_keys=10)
    params, profile = harness.limiter.params, harness.limiter.profile
    ledger = harness.ledgers["x"] = Ledger()
    for number in range(9):
        request = LeaseRequest("sync", f"p{number}", 0, 1, 0, 0, 0, 0, 0, (), 0, 0, 0, 6_000_000)
        ledger.sync(harness.now // 1000, params, profile, request)
    harness.wait("x")
    harness.turn()
    assert harness.manager.nodes_seen == 10
    harness.wait("y")
    assert harness.limiter.leases["y"].nodes == 10
    del harness.limiter.leases["x"]
    harness.turn()
    assert 8 <= harness.manager.nodes_seen < 10, "y is its own, and says nothing of x"


def test_eviction_order() -> None:
    """The least recently used lease is evicted first, but not one with a debt."""
    harness = ManagerHarness(max_keys=4, policy="allow")
    for key in "abcd":
        harness.wait(key)
        harness.turn()
        harness.now += 60 * MILLISECOND
    leases = harness.limiter.leases
    leases["a"].debt = 1
    harness.wait("e")
    assert "b" not in leases and "a" in leases and {"c", "d", "e"} <= leases.keys()


def test_evicted_debt() -> None:
    """The debt of an evicted key is reported."""
    harness = ManagerHarness(max_keys=10, policy="allow")
    harness.manager.fail(harness.now, (), OSError("away"))
    harness.wait("x")
    lease = harness.limiter.leases.pop("x")
    harness.manager.releases.add(lease)
    assert lease.debt == 1 and lease in harness.manager.releases.values()


def test_refund_is_reported() -> None:
    """A refund of permits that were reported as spent makes the next report due at once."""
    harness = ManagerHarness(max_keys=10)
    harness.wait("x", permits=10)
    for _ in range(100):
        harness.turn()
    assert harness.limiter.leases["x"].due > harness.now + SECOND // 4, "it has nothing to say"
    harness.limiter.refund("x", 5)
    requests = [item.request for item in harness.gather()]
    assert [request.refund for request in requests] == [5]


def test_outage_is_shared() -> None:
    """A limiter that is first used during an outage knows of it, and of its end."""
    harness = ManagerHarness(max_keys=10)
    harness.manager.fail(harness.now, (), OSError("away"))
    assert harness.wait("x").answer().degraded
    assert isinstance(harness.manager.health.outage_error, OSError)
    harness.now += 2 * SECOND
    harness.answer(harness.gather())
    assert harness.manager.health.outage_error is None
