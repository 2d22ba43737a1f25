"""The semaphore in Lua and in Python gives the same replies; any trace keeps its limit, and the order of waiters."""

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.clock import MICROSECONDS, SYSTEM_CLOCK
from headgate.coordination.backend import MemoryStates
from headgate.coordination.redis_states import RedisStates
from headgate.coordination.states.machine import Operation
from headgate.coordination.states.semaphore import LAST_TTL, MAX_RELEASED, RELEASED_TTL, SEMAPHORE
from headgate.stores.base import StateBackend
from headgate.stores.redis import RedisStore
from tests.support.servers import Server
from tests.support.twins import Twins

SECOND = MICROSECONDS
LEASE = 10 * SECOND
WAITER = 5 * SECOND

ADAPTIVE = ["2:1:4:1:500", "3:2:5:2:900", "1:1:2:0:1"]  # start, low, high, successes to grow, thousandths left

IDS = st.sampled_from(["a", "b", "c", "d", "ra", "na", "ea"])  # some look like the marks of released ones
TERMS = st.tuples(st.sampled_from([LEASE, 3 * SECOND]), st.integers(1, 5), st.integers(1, 3))
ACTIONS = st.one_of(
    st.tuples(st.just("acquire"), IDS, TERMS),
    st.tuples(st.sampled_from(["acquire", "renew", "release", "peek", "status"]), IDS, TERMS),
    st.tuples(st.sampled_from(["claim", "configure", "try"]), IDS, TERMS),
    st.tuples(st.sampled_from(["adapt", *ADAPTIVE]), IDS, TERMS),
    st.tuples(st.sampled_from(["succeed", "overload"]), IDS, TERMS),
    st.tuples(st.just("evict"), st.sampled_from(["x", "y"]), TERMS),
    st.tuples(st.just("advance"), st.sampled_from([0.25, 3.0, 10.0, 61.0]), TERMS),
)


class Model:
    """What a semaphore should do, written for a reader: leases, a queue, the kept limit and the last fence."""

    def __init__(self) -> None:
        self.held: dict[str, tuple[int, int, int]] = {}  # end, weight, fence
        self.queue: dict[str, tuple[int, int]] = {}  # when it is taken for dead, weight
        self.limit = 0
        self.last_fence = 0
        self.adaptive = ""  # settings
        self.successes: list[str] = []  # since the limit changed
        self.lowered: set[str] = set()  # the leases that were there when it was lowered

    def pass_time(self, now: int) -> None:
        self.held = {id: kept for id, kept in self.held.items() if kept[0] > now}
        self.queue = {id: kept for id, kept in self.queue.items() if kept[0] > now}

    @property
    def used(self) -> int:
        return sum(weight for _, weight, _ in self.held.values())

    def fits(self, id: str, limit: int, weight: int) -> bool:
        ahead = list(self.queue)[: list(self.queue).index(id)] if id in self.queue else self.queue
        return self.used + sum(self.queue[each][1] for each in ahead) + weight <= limit

    def hold(self, id: str, until: int, weight: int, fence: int = 0) -> None:
        if id in self.held:
            _, weight, known = self.held[id]
            fence = known or fence
        if fence and fence != self.held.get(id, (0, 0, 0))[2]:
            assert fence > self.last_fence, "a fence that does not grow"
            self.last_fence = fence
        self.held[id] = (until, weight, fence)

    def check_acquire(self, now: int, id: str, lease: int, limit: int, weight: int, answer: list[int]) -> None:
        granted = id in self.held or self.fits(id, limit, weight)
        assert answer[0] == granted, "refused with room, or more than the limit"
        if granted:
            self.hold(id, now + lease, weight)

    def end_lease(self, id: str, outcome: int) -> None:
        """The limit grows by one after enough successes, and what it was lowered for does not lower it again."""
        used = self.used
        if id not in self.held or not self.held.pop(id)[2] or not outcome or not self.adaptive or id in self.lowered:
            return
        _, low, high, enough, left = map(int, self.adaptive.split(":"))
        if outcome < 0:
            self.limit = max(low, min(self.limit - 1, self.limit * left // 1000))
            self.lowered, self.successes = {*self.held, id}, []
        elif used >= self.limit / 2:
            self.successes.append(id)
            if len(self.successes) >= (enough or self.limit):
                self.limit, self.successes = min(high, self.limit + 1), []

    def check_claim(
        self,
        now: int,
        id: str,
        lease: int,
        limit: int,
        weight: int,
        ttl: int,
        configures: int,
        adaptive: str,
        answer: list[int],
    ) -> None:
        if not self.limit or (configures and id not in self.held and (not adaptive or adaptive != self.adaptive)):
            self.limit, self.adaptive, self.successes, self.lowered = limit, adaptive, [], set()
        if id not in self.held and weight > self.limit:
            assert answer[0] == -2 and answer[2] == self.limit
            self.queue.pop(id, None)
            return
        granted = id in self.held or self.fits(id, self.limit, weight)
        assert answer[0] == granted, "refused with room, out of turn, or more than the limit"
        if granted:
            assert answer[3] > 0 and self.held.get(id, (0, 0, 0))[2] in (0, answer[3]), "a lease keeps its fence"
            self.queue.pop(id, None)
            if not self.held.get(id, (0, 0, 0))[2]:  # a new lease, or one without a fence until now
                self.lowered.discard(id)
            self.hold(id, now + lease, weight, answer[3])
        elif ttl:
            self.queue[id] = (now + ttl, weight)
        else:
            self.queue.pop(id, None)


def test_every_trace(redis_server: Server) -> None:
    """Both do what the model does."""

    @given(st.lists(st.tuples(ACTIONS, st.integers(1, 2)), max_size=30))
    def check(trace: list[tuple[tuple[str, Any, tuple[int, int, int]], int]]) -> None:
        twins = Twins(SEMAPHORE, redis_server)
        model = Model()
        for (op, id, (lease, limit, weight)), times in trace:
            if op == "advance":
                twins.clock.advance(id)
                continue
            now = twins.clock.now()
            model.pass_time(now)
            if op in ("claim", "configure", "try", "adapt", *ADAPTIVE):
                settings = op if op in ADAPTIVE else ADAPTIVE[0] if op == "adapt" else ""
                limit = int(settings.partition(":")[0]) if settings else limit
                queue_for = (0 if op == "try" else WAITER, int(op not in ("claim", "adapt", "try")))
                adaptive = (settings,) if settings else ()
                answer = twins.step("claim", id, lease, limit, weight, *queue_for, *adaptive, times=times)
                if answer[0] != -1:
                    model.check_claim(now, id, lease, limit, weight, *queue_for, settings, answer)
                op = "claim"
            elif op in ("succeed", "overload"):
                outcome = 1 if op == "succeed" else -1
                answer = twins.step("release", id, lease, limit, weight, outcome, times=times)
                assert answer[0] == 1 or id not in model.held
                model.end_lease(id, outcome)
                model.queue.pop(id, None)
            else:
                answer = twins.step(op, id, lease, limit, weight, times=times)
            if op == "acquire" and answer[0] != -1:
                model.check_acquire(now, id, lease, limit, weight, answer)
            elif op == "renew":
                assert answer[0] == (id in model.held)
                if id in model.held:
                    model.hold(id, now + lease, weight)
            elif op == "release":
                assert id not in model.held or answer[0] == 1
                model.held.pop(id, None)
                model.queue.pop(id, None)
            elif op == "peek":
                assert answer[0] == (id in model.held)
            elif op == "evict" and answer[1] == 0:
                model.held = {}
            if op == "status":
                assert answer == [model.used, len(model.held), len(model.queue), model.limit or limit]
            else:
                assert answer[1] == model.used, "the sum of the weights is wrong"
            if answer[0] == 0 and op in ("acquire", "peek", "claim"):
                assert answer[2] == min((end - now for end, _, _ in model.held.values()), default=-1)
        twins.close()

    check()


def test_the_limit_adapts(redis_server: Server) -> None:
    """It grows after as many successes as it is, while half is in use, and calls under way lower it once."""
    twins = Twins(SEMAPHORE, redis_server)
    numbers = count()

    def limit() -> int:
        return int(twins.step("status", "", LEASE, 9, 1)[3])

    def claim(id: str, settings: str = "4:2:6:0:500") -> int:
        start = int(settings.partition(":")[0])
        return int(twins.step("claim", id, LEASE, start, 1, WAITER, 1, *filter(None, [settings]), times=2)[0])

    def call(outcome: int, beside: int = 1) -> None:
        """A call that ends so, with some others under way."""
        ids = [f"{next(numbers)}" for _ in range(beside + 1)]
        assert [claim(id) for id in ids] == [1] * len(ids)
        twins.step("release", ids[0], LEASE, 9, 1, outcome, times=2)
        for id in ids[1:]:
            twins.step("release", id, LEASE, 9, 1)

    call(1, beside=0)
    assert limit() == 4, "one of four in use says nothing"
    for _ in range(3):
        call(1)
    assert limit() == 4
    call(1)
    assert limit() == 5
    for _ in range(5):
        call(1)
    assert limit() == 5, "two of five in use"
    for _ in range(20):
        call(1, beside=2)
    assert limit() == 6, "its highest"
    for id in "abcdef":
        assert claim(id) == 1
    for id in "abcde":
        twins.step("release", id, LEASE, 9, 1, -1, times=2)
    assert limit() == 3, "five calls under way, one overload"
    assert claim("g") == claim("h") == 1 and claim("i") == 0
    twins.step("release", "g", LEASE, 9, 1, -1)
    twins.step("release", "f", LEASE, 9, 1, 1)
    assert limit() == 2, "its lowest"
    twins.step("release", "h", LEASE, 9, 1, -1)
    assert limit() == 2
    assert claim("j") == claim("i") == 1, "the first in the queue, and no more"
    assert claim("k") == 0
    assert claim("k", "5:2:6:0:500") == 1 and limit() == 5, "other settings start it again"
    twins.step("claim", "l", LEASE, 3, 1, WAITER, 1)
    twins.step("release", "k", LEASE, 9, 1, -1)
    assert limit() == 3, "a fixed limit stays"
    twins.close()


def test_a_long_adaptive_trace(redis_server: Server) -> None:
    """Many calls with an adaptive limit: both do what the model does, and never admit more than the limit is then."""
    twins, model, dice, numbers = Twins(SEMAPHORE, redis_server), Model(), Random(7), count()
    limits = set()
    for step in range(800):
        now = twins.clock.now()
        model.pass_time(now)
        if dice.random() < 0.55:
            id, weight = f"{next(numbers)}", dice.randint(1, 2)
            answer = twins.step("claim", id, LEASE, 8, weight, 0, 1, "8:2:10:2:700")
            model.check_claim(now, id, LEASE, 8, weight, 0, 1, "8:2:10:2:700", answer)
            assert answer[0] != 1 or answer[1] <= model.limit
        elif model.held:
            id, outcome = dice.choice(list(model.held)), dice.choice([1, 1, 1, 1, 0, -1 if step // 100 % 2 else 1])
            assert twins.step("release", id, LEASE, 8, 1, outcome)[0] == 1
            model.end_lease(id, outcome)
        twins.clock.advance(dice.choice([0, 0, 0.1, 1.0]))
        model.pass_time(twins.clock.now())
        assert twins.step("status", "", LEASE, 8, 1)[3] == model.limit
        limits.add(model.limit)
    assert limits == set(range(2, 11)), "the trace has gone through all of them"
    twins.close()


def test_first_come_first_served(redis_server: Server) -> None:
    """No light one takes the room that a heavy one waits for, until the heavy one is served, leaves or dies."""
    twins = Twins(SEMAPHORE, redis_server)

    def claim(id: str, weight: int = 1, ttl: int = WAITER, configures: int = 0, limit: int = 4) -> list[int]:
        return twins.step("claim", id, LEASE, limit, weight, ttl, configures, times=2)

    assert [claim(id)[:2] for id in "ab"] == [[1, 1], [1, 2]]
    for _ in range(3):
        assert claim("heavy", 3)[0] == 0
        assert claim("light")[0] == 0 and claim("try", ttl=0)[0] == 0
        assert twins.step("acquire", "other", LEASE, 4, 1)[0] == 0, "also beside callers without a fence"
    assert twins.step("status", "", LEASE, 4, 1) == [2, 2, 2, 4]
    twins.step("release", "a", LEASE, 4, 1)
    assert claim("light")[0] == 0
    assert claim("heavy", 3)[:2] == [1, 4]
    twins.step("release", "b", LEASE, 4, 1)
    assert claim("light")[:2] == [1, 4]
    assert claim("heavy 2", 4)[0] == 0
    assert claim("light 2")[0] == 0
    twins.step("release", "heavy", LEASE, 4, 3)
    assert claim("light 2")[0] == 0, "there is room for it, but not its turn"
    twins.step("release", "heavy 2", LEASE, 4, 4)  # it gives up
    assert claim("light 2")[0] == 1
    assert claim("heavy 3", 3)[0] == claim("light 3", 2)[0] == 0
    twins.clock.advance(WAITER / SECOND / 2)
    assert claim("light 3", 2)[0] == 0
    twins.clock.advance(WAITER / SECOND / 2)  # the heavy one is taken for dead, and was not
    assert claim("heavy 3", 3)[0] == 0 and claim("light 3", 2)[0] == 1, "it is behind the light one now"
    twins.step("release", "light 2", LEASE, 4, 1)
    twins.clock.advance(WAITER / SECOND)
    assert twins.step("acquire", "other", LEASE, 4, 1)[0] == 1, "dead, it holds up no caller"
    twins.step("evict", "all", LEASE, 4, 1)
    assert claim("all", 4)[0] == 1 and claim("dies")[0] == claim("heavy 4", 4)[0] == 0
    twins.clock.advance(WAITER / SECOND / 2)
    assert claim("heavy 4", 4)[0] == 0
    twins.clock.advance(WAITER / SECOND / 2)
    twins.step("release", "all", LEASE, 4, 4)
    assert claim("dies")[0] == 0, "there is room where it was, but it lost its turn"
    assert claim("heavy 4", 4)[0] == 1
    twins.close()


def test_the_last_limit_holds(redis_server: Server) -> None:
    """A claim that configures sets the limit of all; one of a holder does not, nor does a claim without."""
    twins = Twins(SEMAPHORE, redis_server)
    assert twins.step("claim", "a", LEASE, 2, 1, WAITER, 1)[0] == 1
    assert twins.step("claim", "b", LEASE, 1, 1, WAITER, 1)[0] == 0
    assert twins.step("claim", "a", LEASE, 2, 1, WAITER, 1)[0] == 1, "the same again"
    assert twins.step("status", "", LEASE, 9, 1)[3] == 1
    assert twins.step("claim", "c", LEASE, 2, 1, WAITER, 0)[0] == 0
    assert twins.step("claim", "d", LEASE, 2, 2, WAITER, 0) == [-2, 1, 1, 0], "waiting would not help"
    assert twins.step("claim", "e", LEASE, 5, 2, 0, 1)[0] == 1, "two wait for one each"
    assert twins.step("claim", "d", LEASE, 2, 2, WAITER, 0)[0] == 0
    twins.close()


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
    assert all(0 < client.pttl(key) <= 60_000 for key in keys[:3]), "a key without a TTL"
    assert client.exists(*keys) == 3, "keys of a queue and a fence, and there is neither"
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
    twins.step("claim", "b", LEASE, 1, 1, WAITER, 1)
    twins.step("claim", "c", LEASE, 1, 1, WAITER, 1)
    assert client.exists(*keys[3:]) == 3
    assert all(0 < client.pttl(key) <= LAST_TTL // 1000 for key in client.keys("*")), "a key without a TTL"
    twins.clock.advance(20)
    assert not state.is_expired(twins.clock.now()), "the limit and the fence are kept"
    twins.clock.advance(LAST_TTL / SECOND)
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
