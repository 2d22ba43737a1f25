"""The semaphore in Lua and in Python gives the same replies, and never grants more than its limit in any trace."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.clock import MICROSECONDS, SYSTEM_CLOCK
from headgate.coordination.backend import MemoryStates
from headgate.coordination.redis_states import RedisStates
from headgate.coordination.states.machine import Operation
from headgate.coordination.states.semaphore import MAX_RELEASED, RELEASED_TTL, SEMAPHORE
from headgate.stores.base import StateBackend
from headgate.stores.redis import RedisStore
from tests.support.servers import Server
from tests.support.twins import Twins

SECOND = MICROSECONDS
LEASE = 10 * SECOND

IDS = st.sampled_from(["a", "b", "c", "d", "ra", "na", "ea"])  # some look like the marks of released ones
TERMS = st.tuples(st.sampled_from([LEASE, 3 * SECOND]), st.integers(1, 5), st.integers(1, 3))
ACTIONS = st.one_of(
    st.tuples(st.just("acquire"), IDS, TERMS),
    st.tuples(st.sampled_from(["acquire", "renew", "release", "peek"]), IDS, TERMS),
    st.tuples(st.just("evict"), st.sampled_from(["x", "y"]), TERMS),
    st.tuples(st.just("advance"), st.sampled_from([0.25, 3.0, 10.0, 61.0]), TERMS),
)


def test_every_trace(redis_server: Server) -> None:
    """The leases of a model, which has an end and a weight for each id, are those of both."""

    @given(st.lists(st.tuples(ACTIONS, st.integers(1, 2)), max_size=30))
    def check(trace: list[tuple[tuple[str, Any, tuple[int, int, int]], int]]) -> None:
        twins = Twins(SEMAPHORE, redis_server)
        held: dict[str, tuple[int, int]] = {}  # end and weight
        for (op, id, (lease, limit, weight)), times in trace:
            if op == "advance":
                twins.clock.advance(id)
                continue
            now = twins.clock.now()
            held = {each: kept for each, kept in held.items() if kept[0] > now}
            used = sum(kept[1] for kept in held.values())
            answer = twins.step(op, id, lease, limit, weight, times=times)
            if op == "acquire" and answer[0] == 1:
                assert id in held or used + weight <= limit, "more than the limit"
                held[id] = (now + lease, held[id][1] if id in held else weight)
            elif op == "acquire" and answer[0] == 0:
                assert id not in held and used + weight > limit, "refused with room"
                assert answer[2] == min((end - now for end, _ in held.values()), default=-1)
            elif op == "renew":
                assert answer[0] == (id in held)
                if id in held:
                    held[id] = (now + lease, held[id][1])
            elif op == "release":
                assert id not in held or answer[0] == 1
                held.pop(id, None)
            elif op == "peek":
                assert answer[0] == (id in held)
            elif op == "evict" and answer[1] == 0:
                held = {}
            assert answer[1] == sum(kept[1] for kept in held.values()), "the sum of the weights is wrong"
        twins.close()

    check()


def test_a_lower_limit(redis_server: Server) -> None:
    """Under a lower limit nothing is granted until enough leases were released; those that are there stay."""
    twins = Twins(SEMAPHORE, redis_server)
    for id in "abcd":
        assert twins.step("acquire", id, LEASE, 4, 1)[0] == 1
    assert twins.step("acquire", "e", LEASE, 2, 1) == [0, 4, LEASE]
    assert twins.step("renew", "a", LEASE, 2, 1) == [1, 4]
    for id, left in ("b", 3), ("c", 2):
        assert twins.step("release", id, LEASE, 2, 1) == [1, left]
        assert twins.step("acquire", "e", LEASE, 2, 1)[0] == 0
    twins.step("release", "d", LEASE, 2, 1)
    assert twins.step("acquire", "e", LEASE, 2, 1) == [1, 2, LEASE]
    twins.close()


def test_leases_end_by_themselves(redis_server: Server) -> None:
    """A lease that is not renewed ends at its time, weights included, and one that is renewed does not."""
    twins = Twins(SEMAPHORE, redis_server)
    twins.step("acquire", "dies", LEASE, 4, 3)
    twins.step("acquire", "lives", LEASE, 4, 1)
    twins.clock.advance(9.999_999)
    twins.step("renew", "lives", LEASE, 4, 1)
    assert twins.step("acquire", "next", LEASE, 4, 1) == [0, 4, 1]
    twins.clock.advance(0.000_001)
    assert twins.step("renew", "dies", LEASE, 4, 1) == [0, 1]
    assert twins.step("acquire", "next", LEASE, 4, 3) == [1, 4, LEASE]
    assert twins.step("release", "dies", LEASE, 4, 1) == [0, 4]
    twins.close()


def test_an_acquire_that_comes_late(redis_server: Server) -> None:
    """An acquire that arrives after its release takes no room, as no caller would give it back."""
    twins = Twins(SEMAPHORE, redis_server)
    assert twins.step("release", "late", LEASE, 1, 1, times=2) == [0, 0]
    assert twins.step("acquire", "late", LEASE, 1, 1, times=2) == [-1, 0, 0]
    twins.clock.advance(RELEASED_TTL / SECOND)
    assert twins.step("acquire", "late", LEASE, 1, 1) == [1, 1, LEASE]
    twins.close()


def test_what_is_kept(redis_server: Server) -> None:
    """Every key has a TTL, ids are forgotten after a minute or when there are too many, and at last nothing is left."""
    twins = Twins(SEMAPHORE, redis_server)
    client, keys = redis_server.client(), SEMAPHORE.keys(twins.name)
    assert keys[0] == "semaphore:{twins}"
    twins.step("acquire", "a", LEASE, 5, 2)
    for number in range(MAX_RELEASED + 5):
        twins.step("release", str(number), LEASE, 5, 1)
    state = twins.memory._states["semaphore", twins.name]
    assert len(state.released) == client.zcard(keys[2]) == MAX_RELEASED
    assert all(0 < client.pttl(key) <= 60_000 for key in keys), "a key without a TTL"
    assert client.pttl(keys[0]) <= 10_000 and client.pttl(keys[1]) <= 10_000
    twins.step("renew", "a", LEASE // 5, 5, 1)
    assert client.pttl(keys[0]) <= 2_000
    for _ in range(100):  # a renewal leaves nothing behind
        twins.step("renew", "a", LEASE, 5, 1)
    assert len(state.ends) < 30
    twins.clock.advance(100)
    twins.step("release", "last", LEASE, 5, 1)
    assert len(state.released) == client.zcard(keys[2]) == 1
    twins.clock.advance(100)
    assert state.is_expired(twins.clock.now())
    twins.close()


def test_leases_that_redis_evicted(redis_server: Server) -> None:
    """If Redis drops one of the keys, no weight is counted for a lease that is not there."""
    twins = Twins(SEMAPHORE, redis_server)
    client, keys = redis_server.client(), SEMAPHORE.keys(twins.name)

    def ask(op: str, id: str, weight: int) -> list[Any]:
        return twins.redis.run(SEMAPHORE, twins.name, Operation(op, (id, LEASE, 5, weight)))

    assert ask("acquire", "a", 5) == [1, 5, LEASE]
    client.delete(keys[0])
    assert ask("acquire", "b", 4) == [1, 4, LEASE]
    client.delete(keys[1])
    assert ask("release", "b", 4) == [1, 0]
    assert ask("acquire", "c", 5) == [1, 5, LEASE]
    twins.close()


@pytest.mark.parametrize("kind", ["memory", "redis"])
def test_sixty_at_once(kind: str, redis_server: Server) -> None:
    """Of 60 threads that acquire at once, 20 get a lease."""
    store = RedisStore(redis_server.url, timeout=20)
    states: StateBackend = MemoryStates(SYSTEM_CLOCK) if kind == "memory" else RedisStates(store)
    barrier = threading.Barrier(60)

    def acquire(number: int) -> int:
        barrier.wait()
        reply = states.run(SEMAPHORE, "crowd", Operation("acquire", (str(number), 600 * SECOND, 20, 1)))
        return int(reply[0])

    with ThreadPoolExecutor(60) as threads:
        assert sum(threads.map(acquire, range(60))) == 20
    store.close()
