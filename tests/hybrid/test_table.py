"""What a process may do with a lease on its own, and what it may not: the small print."""

from __future__ import annotations

from headgate.hybrid.lease import SECOND, Lease
from headgate.hybrid.manager import LeaseManager
from headgate.hybrid.protocol import quota_params
from headgate.hybrid.table import LeaseTable
from headgate.rule import Rule

RULE = Rule("100/hour")
LAW = quota_params(RULE)
NOW = 1000 * SECOND


def table_with(balance: int, expires: int = NOW + SECOND) -> tuple[LeaseTable, Lease]:
    """A table of one key, whose lease had ten permits."""
    table = LeaseTable(LeaseManager(lambda: NOW), RULE, "deny")
    lease = Lease("k", 0, NOW)
    lease.balance, lease.balance_at_last_count, lease.expires = balance * LAW.cost, 10 * LAW.cost, expires
    lease.free_in_redis = 40 * LAW.cost
    table.leases["k"] = lease
    return table, lease


def test_spend_expired() -> None:
    """spend() takes nothing from a lease that ran out."""
    table, lease = table_with(5, expires=NOW)
    assert not table.spend(lease, LAW.cost, NOW)
    table, lease = table_with(5)
    assert table.spend(lease, LAW.cost, NOW) and lease.balance == 4 * LAW.cost


def test_refund_expired() -> None:
    """A refund does not go into a lease that ran out, but into the next report."""
    table, lease = table_with(5, expires=NOW)
    assert not table.refund_locally("k", 2)
    assert lease.balance == 5 * LAW.cost and lease.refund == 2


def test_refund_locally() -> None:
    """A refund of permits that were not reported yet goes back into the lease."""
    table, lease = table_with(5)
    assert table.refund_locally("k", 2)
    assert lease.balance == 7 * LAW.cost and lease.refund == 0


def test_refund_is_capped() -> None:
    """No more is reported of a refund than fills the bucket."""
    table, lease = table_with(10)
    lease.others = 20
    table.refund_locally("k", 100)
    assert lease.refund == 100 - 10 - 40 - 20
    table.refund_locally("k", 100)
    assert lease.refund == 30


def test_peek_empty_lease() -> None:
    """A peek for 0 permits at an empty lease is a question for Redis."""
    table, _ = table_with(0)
    assert table.peek_locally("k", 0) is None
    table, _ = table_with(1)
    assert table.peek_locally("k", 0)


def test_refund_ends_a_denial() -> None:
    """A refund ends a denial: the next call asks Redis."""
    table, lease = table_with(0)
    lease.balance_at_last_count = 0  # what was spent has been reported: it goes back there, and not here
    lease.deny_until, lease.deny_min_units = NOW + SECOND, LAW.cost
    assert table.try_acquire("k") is not None
    table.refund_locally("k", 1)
    assert table.try_acquire("k") is None, "Redis is asked"


def test_reset_after_of_a_denial() -> None:
    """The reset_after of a denial is never below its retry_after."""
    table, lease = table_with(0)
    lease.free_in_redis, lease.expected_free, lease.deny_min_units = 0, LAW.cost, LAW.cost
    lease.deny_until, lease.deny_extra_time = NOW + SECOND, 5000 * SECOND  # a debt of more than the capacity
    made = table.try_acquire("k")
    assert made.reset_after >= made.retry_after > 5000
