"""Counters that only grow, and that tell local decisions from waits for Redis."""

from __future__ import annotations

from headgate.hybrid.limiter import Stats, stats_of
from tests.support.hybrid_sole_process import SoleProcess


def warm() -> SoleProcess:
    process = SoleProcess("100000/hour")
    for _ in range(200):
        process.take()
        process.sleep(0.001)
    assert process.lease.balance > 10 * process.limiter.params.cost
    return process


def stats(process: SoleProcess) -> Stats:
    return stats_of([process.limiter])


def test_counted_once() -> None:
    """Every permit is counted once."""
    process = warm()
    assert stats(process).local + stats(process).remote == 200
    process.take(3)
    assert stats(process).local + stats(process).remote == 203


def test_refund_keeps_the_count() -> None:
    """A refund does not lower the count of permits asked for, nor does its report."""
    process = warm()
    for _ in range(3):
        process.take()
    before = stats(process)
    process.limiter.refund("k", 2)
    assert stats(process).local == before.local
    assert stats(process).held == before.held + 2
    process.sleep(2)
    assert stats(process).local == before.local, "nor does the report"


def test_count_during_release() -> None:
    """Decisions of a lease stay counted while it goes back."""
    process = warm()
    before = stats(process)
    process.limiter.release_all()
    assert stats(process).local == before.local
    process.sleep(1)
    assert process.ledger.leased_out == 0 and stats(process).local == before.local


def test_outage_answers_are_local() -> None:
    """A call that the policy answers at once counts as local."""
    process = SoleProcess("100000/hour")
    process.manager.fail(process.now, (), OSError("away"))
    for _ in range(10):
        assert process.take().degraded
    assert (stats(process).local, stats(process).remote, stats(process).degraded) == (10, 0, 10)
    assert stats(process).local_ratio == 1.0


def test_failed_waits_are_remote() -> None:
    """A call that waited for Redis in vain counts as remote."""
    process = SoleProcess("100000/hour")
    waiter = process.wait()
    process.manager.fail(process.now, process.manager.gather(process.now), OSError("away"))
    assert waiter.answer().degraded
    assert (stats(process).local, stats(process).remote, stats(process).degraded) == (0, 1, 1)
    assert stats(process).local_ratio == 0.0
