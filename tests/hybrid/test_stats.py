"""Figures that only grow, and that say who waited."""

from __future__ import annotations

from headgate.hybrid.limiter import Stats, stats_of
from tests.support.hybrid_alone import Alone


def warm() -> Alone:
    alone = Alone("100000/hour")
    for _ in range(200):
        alone.take()
        alone.sleep(0.001)
    assert alone.lease.balance > 10 * alone.limiter.params.cost
    return alone


def stats(alone: Alone) -> Stats:
    return stats_of([alone.limiter])


def test_every_permit_is_counted_once() -> None:
    alone = warm()
    assert stats(alone).local + stats(alone).remote == 200
    alone.take(3)
    assert stats(alone).local + stats(alone).remote == 203


def test_a_refund_does_not_unask() -> None:
    alone = warm()
    for _ in range(3):
        alone.take()
    before = stats(alone)
    alone.limiter.refund("k", 2)
    assert stats(alone).local == before.local
    assert stats(alone).held == before.held + 2
    alone.sleep(2)
    assert stats(alone).local == before.local, "nor does the report"


def test_what_was_decided_is_counted_while_a_lease_goes_back() -> None:
    alone = warm()
    before = stats(alone)
    alone.limiter.release_all()
    assert stats(alone).local == before.local
    alone.sleep(1)
    assert alone.ledger.out == 0 and stats(alone).local == before.local


def test_who_is_answered_at_once_during_an_outage_did_not_wait() -> None:
    alone = Alone("100000/hour")
    alone.manager.fail(alone.now, (), OSError("away"))
    for _ in range(10):
        assert alone.take().degraded
    assert (stats(alone).local, stats(alone).remote, stats(alone).degraded) == (10, 0, 10)
    assert stats(alone).local_ratio == 1.0


def test_who_waited_in_vain_did_wait() -> None:
    alone = Alone("100000/hour")
    waiter = alone.wait()
    alone.manager.fail(alone.now, alone.manager.gather(alone.now), OSError("away"))
    assert waiter.answer().degraded
    assert (stats(alone).local, stats(alone).remote, stats(alone).degraded) == (0, 1, 1)
    assert stats(alone).local_ratio == 0.0
