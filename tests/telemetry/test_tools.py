"""What locks, semaphores, breakers, pools, queues and budgets count."""

import gc

import pytest

from headgate import CircuitOpen, LockTimeout, PoolExhausted, QueueFull, RateLimited
from headgate.budget import Budget
from headgate.coordination import CircuitBreaker, Lock, Pool, Semaphore, WaitQueue
from tests.telemetry.conftest import Figures

pytestmark = pytest.mark.once


def test_lock(figures: Figures) -> None:
    """Requests by result, the time they took, and what is held."""
    lock, other = Lock(figures.name), Lock(figures.name)
    with lock:
        assert figures("headgate.lock.held") == 1
        assert not other.acquire(timeout=0)
    assert figures("headgate.lock.held") == 0
    assert figures("headgate.lock.acquires", result="acquired") == 1
    assert figures("headgate.lock.acquires", result="timeout") == 1
    assert figures("headgate.lock.wait.time") > 0
    assert figures("headgate.lock.lost") == 0
    lock.acquire()
    lock.force_release()
    with pytest.raises(Exception, match="not ours"):
        lock.ensure_held()
    assert figures("headgate.lock.lost") == 1
    del lock, other
    gc.collect()
    assert figures("headgate.lock.acquires") == 3
    assert not figures.has("headgate.lock.held")


def test_semaphore(figures: Figures) -> None:
    """The weight of the leases that are held, and the limit."""
    semaphore = Semaphore(figures.name, limit=5)
    with semaphore.acquire(weight=3):
        assert figures("headgate.semaphore.in_use") == 3
        assert figures("headgate.semaphore.limit") == 5
        with pytest.raises(LockTimeout):
            semaphore.acquire(timeout=0, weight=3)
    assert figures("headgate.semaphore.in_use") == 0
    assert figures("headgate.semaphore.acquires", result="acquired") == 1
    assert figures("headgate.semaphore.acquires", result="timeout") == 1


def test_breaker(figures: Figures) -> None:
    """Calls by outcome, the state that was seen last, and how often it changed."""
    breaker = CircuitBreaker(figures.name, failures=2)
    with breaker:
        pass
    assert figures("headgate.breaker.state", state="closed") == 1
    for _ in range(2):
        with pytest.raises(OSError, match="down"), breaker:
            raise OSError("down")
    with pytest.raises(CircuitOpen), breaker:
        pass
    outcomes = ("success", "failure", "refused", "ignored")
    assert [figures("headgate.breaker.calls", outcome=outcome) for outcome in outcomes] == [1, 2, 1, 0]
    assert figures("headgate.breaker.state", state="open") == 1
    assert figures("headgate.breaker.state", state="closed") == 0
    assert figures("headgate.breaker.changes") == 1


def test_pool(figures: Figures) -> None:
    """Members by state, and those that this process has."""
    pool = Pool(figures.name)
    pool.add("a", "b")
    with pool.acquire(timeout=0):
        assert figures("headgate.pool.leased") == 1
        assert figures("headgate.pool.members", state="leased") == 1
        assert figures("headgate.pool.members", state="ready") == 1
        with pool.acquire(timeout=0), pytest.raises(PoolExhausted):
            pool.acquire(timeout=0)
    assert figures("headgate.pool.leased") == 0
    assert figures("headgate.pool.acquires", result="acquired") == 2
    assert figures("headgate.pool.acquires", result="timeout") == 1


def test_queue(figures: Figures) -> None:
    """Entries by what happened to them, and how many wait."""
    queue = WaitQueue(figures.name, max_length=1)
    queue.enqueue("a")
    assert figures("headgate.queue.length") == 1
    with pytest.raises(QueueFull):
        queue.enqueue("b")
    queue.dequeue()
    assert not queue.wait("late", timeout=0.01)
    assert figures("headgate.queue.length") == 0
    events = ("enqueued", "full", "dequeued", "expired", "served")
    assert [figures("headgate.queue.entries", event=event) for event in events] == [1, 1, 1, 1, 0]


def test_budget(figures: Figures) -> None:
    """Reservations by result; what was reserved and settled, and the debt, by amount."""
    budget = Budget(tokens="100/hour", usd="5.0/hour", name=figures.name)
    with budget.reserve("tenant", tokens=60, usd="1.5", timeout=0) as hold:
        assert figures("headgate.budget.holds") == 1
        with pytest.raises(RateLimited):
            budget.reserve("tenant", tokens=60, timeout=0)
        hold.settle(tokens=70, usd="1.25")
    assert figures("headgate.budget.acquires", result="acquired") == 1
    assert figures("headgate.budget.acquires", result="timeout") == 1
    assert figures("headgate.budget.reserved", amount="tokens") == 60
    assert figures("headgate.budget.settled", amount="tokens") == 70
    assert figures("headgate.budget.debt", amount="tokens") == 10
    assert figures("headgate.budget.reserved", amount="usd") == 1.5
    assert figures("headgate.budget.settled", amount="usd") == 1.25
    assert figures("headgate.budget.debt", amount="usd") == 0
    assert figures("headgate.budget.holds") == 0
