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
    lease.balance, lease.counted_balance, lease.expires = balance * LAW.cost, 10 * LAW.cost, expires
    lease.free_in_redis = 40 * LAW.cost
    table.leases["k"] = lease
    return table, lease


def test_who_waits_is_not_served_from_a_lease_that_ran_out() -> None:
    table, lease = table_with(5, expires=NOW)
    assert not table.spend(lease, LAW.cost, NOW)
    table, lease = table_with(5)
    assert table.spend(lease, LAW.cost, NOW) and lease.balance == 4 * LAW.cost


def test_nothing_is_put_back_into_a_lease_that_ran_out() -> None:
    table, lease = table_with(5, expires=NOW)
    assert not table.refund_locally("k", 2)
    assert lease.balance == 5 * LAW.cost and lease.refund == 2


def test_what_was_spent_here_is_put_back_here() -> None:
    table, lease = table_with(5)
    assert table.refund_locally("k", 2)
    assert lease.balance == 7 * LAW.cost and lease.refund == 0


def test_no_more_is_told_of_a_refund_than_makes_the_bucket_full() -> None:
    table, lease = table_with(10)
    lease.others = 20
    table.refund_locally("k", 100)
    assert lease.refund == 100 - 10 - 40 - 20
    table.refund_locally("k", 100)
    assert lease.refund == 30


def test_to_look_without_taking_anything_is_not_an_answer_about_an_empty_lease() -> None:
    table, _ = table_with(0)
    assert table.peek_locally("k", 0) is None
    table, _ = table_with(1)
    assert table.peek_locally("k", 0)


def test_a_refund_ends_a_refusal() -> None:
    table, lease = table_with(0)
    lease.counted_balance = 0  # what was spent has been reported: it goes back there, and not here
    lease.deny_until, lease.deny_from = NOW + SECOND, LAW.cost
    assert table.try_acquire("k") is not None
    table.refund_locally("k", 1)
    assert table.try_acquire("k") is None, "Redis is asked"


def test_a_refusal_never_says_that_it_is_full_before_it_can_be_asked_again() -> None:
    table, lease = table_with(0)
    lease.free_in_redis, lease.expected_free, lease.deny_from = 0, LAW.cost, LAW.cost
    lease.deny_until, lease.deny_extension = NOW + SECOND, 5000 * SECOND  # a debt of more than the capacity
    made = table.try_acquire("k")
    assert made.reset_after >= made.retry_after > 5000
