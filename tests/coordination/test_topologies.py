"""All tools on a Cluster, and through a failover that Sentinels order."""

import threading

import pytest

from headgate import Budget
from headgate.coordination import CircuitBreaker, Lock, LockTimeout, Pool, Semaphore, SemaphoreStatus, WaitQueue
from headgate.errors import StoreUnavailable
from headgate.stores.redis import RedisStore
from tests.support.clusters import Cluster, Sentinels, wait_until

LONG = 20.0
TIMES = range(6)  # of each tool, so that every server has some


@pytest.mark.xdist_group("faults-cluster")
def test_cluster(cluster: Cluster) -> None:
    url = cluster.bare_url + "?timeout=5"
    for number in TIMES:
        one, other = Lock(f"lock{number}", store=url), Lock(f"lock{number}", store=url)
        assert one.acquire(timeout=LONG)
        assert not other.acquire(timeout=0.05)
        one.ensure_held()
        assert one.release()
        assert other.acquire(timeout=LONG)
        other.release()
    for number in TIMES:
        breaker = CircuitBreaker(f"breaker{number}", store=url)
        for _ in range(3):
            breaker.record_failure()
        assert breaker.state == "OPEN"
    for number in TIMES:
        pool = Pool(f"pool{number}", store=url, quota="10/minute", failures=3)
        pool.add("a", "b")
        for member in "aba":
            with pool.acquire(timeout=LONG) as leased:
                assert leased.member == member
    for number in TIMES:
        queue = WaitQueue(f"queue{number}", store=url)
        queue.enqueue("a")
        queue.enqueue("b")
        assert [len(queue), queue.dequeue(), queue.dequeue(), queue.dequeue()] == [2, "a", "b", None]
    assert all(member.ask("DBSIZE") for member in cluster.primaries())
    queue.close()


@pytest.mark.xdist_group("faults-cluster")
def test_semaphore_on_a_cluster(cluster: Cluster) -> None:
    """All keys of a semaphore are in one slot, also where its weights need a second key, and every server has some."""
    url = cluster.bare_url + "?timeout=5"
    elsewhere = RedisStore(cluster.url, timeout=5)  # shares nothing with what the URL opens but the servers
    for number in TIMES:
        one, other = (Semaphore(f"uploads:{number}", limit=3, store=store) for store in (elsewhere, url))
        held = one.acquire(timeout=LONG, weight=2)
        with other.acquire(timeout=LONG) as light:
            assert light.fence > held.fence
            with pytest.raises(LockTimeout):
                one.acquire(timeout=0)
        timer = threading.Timer(0.1, held.release)  # its message reaches a waiter that listens at another server
        timer.start()
        with other.acquire(timeout=LONG, weight=3) as heavy:
            heavy.ensure_held()
            assert one.status() == SemaphoreStatus(limit=3, in_use=3, holders=1, waiting=0)
        timer.join()
    assert all(member.ask("DBSIZE") for member in cluster.primaries())
    other.close()
    elsewhere.close()


@pytest.mark.xdist_group("faults-cluster")
def test_budgets_on_a_cluster(cluster: Cluster) -> None:
    """All levels of a hierarchy are in the slot of its root, and every server has some."""
    org = Budget(tokens="100/30d", store=cluster.bare_url + "?timeout=5")
    user = Budget(tokens="50/30d", name="user", inside=org)
    for number in TIMES:
        with user.reserve([f"org:{number}", "a"], tokens=20, timeout=LONG) as hold:
            assert org.remaining(f"org:{number}") == {"tokens": 80}
            hold.settle(tokens=7)
        assert user.remaining([f"org:{number}", "a"]) == {"tokens": 43}
    org.close()


@pytest.mark.xdist_group("faults-cluster")
def test_who_waits_on_a_cluster_is_woken(cluster: Cluster) -> None:
    """Whatever server has the lock: a message reaches those who listen at another."""
    elsewhere = RedisStore(cluster.url, timeout=5)
    for number in range(3):
        holder, waiter = (
            Lock(f"woken{number}", store=elsewhere),
            Lock(f"woken{number}", store=cluster.bare_url + "?timeout=5"),
        )
        assert holder.acquire(timeout=LONG)
        timer = threading.Timer(0.1, holder.release)
        timer.start()
        assert waiter.acquire(timeout=LONG)
        timer.join()
        waiter.release()
    waiter.close()
    elsewhere.close()


def is_taken(lock: Lock) -> bool:
    try:
        return not lock.acquire(timeout=0.5)
    except StoreUnavailable:
        return False


@pytest.mark.xdist_group("faults")
def test_sentinel_failover(sentinels: Sentinels) -> None:
    """A planned one: what was held is held, what was counted is counted, and whoever waits gets it in the end."""
    url = sentinels.bare_url + "?timeout=5"
    holder, waiter = Lock("lock", store=url, ttl=20), Lock("lock", store=url)
    breaker, pool, queue = CircuitBreaker("b", store=url), Pool("p", store=url), WaitQueue("q", store=url)
    assert holder.acquire(timeout=LONG)
    breaker.record_failure()
    breaker.record_failure()
    pool.add("a", "b")
    leased = pool.acquire(timeout=LONG)
    room = Semaphore("s", limit=2, store=url).acquire(timeout=LONG)
    queue.enqueue("r1")
    wait_until(sentinels.primary.is_followed, "the replica knows of all that")
    sentinels.fail_over()
    sentinels.wait_for_failover()
    wait_until(lambda: is_taken(waiter), "Redis answers, and somebody has it")
    holder.ensure_held()
    granted: list[bool] = []
    thread = threading.Thread(target=lambda: granted.append(waiter.acquire(LONG)))
    thread.start()
    assert holder.release()
    thread.join()
    assert granted == [True]
    breaker.record_failure()
    assert breaker.state == "OPEN"
    assert leased.release()
    room.ensure_held()
    assert room.release()
    assert pool.status().ready == 2
    assert queue.dequeue() == "r1"
    queue.close()
