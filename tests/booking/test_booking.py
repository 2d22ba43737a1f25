"""Slots: places in time, one behind the other, that belong to an id."""

import asyncio
import random
import sys
from typing import Any

import pytest

from headgate import AsyncLimiter, HybridLimiter, Limiter, Quota, RateLimited
from headgate.errors import InvalidKey, InvalidPermits, PermitsExceedLimit, SlotMismatch, StoreUnavailable
from headgate.stores import PostgreSQLStore, RedisStore
from headgate.testing import ManualClock
from tests.booking.model import Model, check_law
from tests.support.callers import Callers, in_threads
from tests.support.clocks import until
from tests.support.postgres import PostgresServer
from tests.support.proxy import FaultyProxy
from tests.support.quotas import BUCKETS, WINDOWS
from tests.support.servers import Server
from tests.support.stores import OpenStore, OpenStores, rows, service, shared

QUOTAS: list[list[str]] = [
    ["10/second burst 3"],
    ["7/second"],  # a permit each 142857.14... microseconds
    ["80/10m burst 1"],
    ["999983/day burst 5"],
    ["7/3s burst 11", "40/minute", "3/second burst 30"],
]


@pytest.fixture(params=rows(lambda row: row.open is service or (row.whole and row.open is not shared)))
def callers(request: pytest.FixtureRequest, open_stores: OpenStores) -> Any:
    """Callers of every store that keeps slots."""
    name, colour = request.param
    with Callers(open_stores.empty(name), colour) as callers:
        yield callers


def delays(limiter: Limiter, count: int, **arguments: Any) -> list[float]:
    return [limiter.book("k", id=f"job-{i}", **arguments).delay for i in range(count)]


@pytest.mark.parametrize("algorithm", BUCKETS)
def test_slots_follow_each_other(algorithm: Any, callers: Callers) -> None:
    """A burst starts now, the rest at the rate; what books not is denied until the last booked slot has passed."""
    clock = ManualClock()
    limiter = callers.limiter("10/second burst 3", algorithm=algorithm, clock=clock)
    assert delays(limiter, 6) == [0, 0, 0, 0.1, 0.2, 0.3]
    denied = limiter.try_acquire("k")
    assert not denied and denied.remaining == 0 and denied.retry_after == 0.4 and denied.reset_after == 0.6
    assert limiter.peek("k", 0).allowed and limiter.peek("k", 0).remaining == 0
    assert limiter.try_acquire("other")
    clock.advance(0.399999)
    assert not limiter.try_acquire("k")
    clock.advance(0.000001)
    assert limiter.try_acquire("k") and not limiter.try_acquire("k")


def cancelled(callers: Callers, slot: Any) -> bool:
    """What `slot.cancel()` returns, in either colour."""
    done: Any = slot.cancel()
    return bool(callers.run(done) if callers.colour == "async" else done)


def test_an_id_keeps_its_slot(callers: Callers) -> None:
    """Until its grace is over the same id gets the same slot, and nothing more is spent; then it is booked anew."""
    clock = ManualClock()
    limiter = callers.limiter("1/second", clock=clock)
    delays(limiter, 3)
    slot = limiter.book("k", id="mine", grace=5)
    again = limiter.book("k", id="mine", within=0)
    assert (slot.delay, slot.again, again.delay, again.again, again.at) == (3, False, 3, True, slot.at)
    assert slot.at == clock.now() / 1e6 + 3
    clock.advance(8)
    late = limiter.book("k", id="mine")
    assert (late.delay, late.again, late.at) == (0, True, slot.at)
    assert limiter.try_acquire("k")
    clock.advance(0.000001)
    anew = limiter.book("k", id="mine")
    assert not anew.again and anew.delay == 0.999999
    assert limiter.book("other", id="mine").delay == 0


def test_too_late(callers: Callers) -> None:
    """A slot beyond *within* raises, says when to ask again, and takes nothing."""
    clock = ManualClock()
    limiter = callers.limiter(["1/second", "100/minute"], clock=clock)
    delays(limiter, 3, within=2)
    for _ in range(2):
        with pytest.raises(RateLimited) as caught:
            limiter.book("k", id="late", within=2)
        assert caught.value.decision.retry_after == 1 and not caught.value.decision.degraded
    clock.advance(1)
    assert limiter.book("k", id="late", within=2).delay == 2


def test_cancel(callers: Callers) -> None:
    """The last slot goes back; one before it goes to the next booking; one whose time has come stays spent."""
    clock = ManualClock()
    limiter = callers.limiter("1/second burst 2", clock=clock)
    slots = [limiter.book("k", id=f"job-{i}") for i in range(5)]
    assert [slot.delay for slot in slots] == [0, 0, 1, 2, 3]
    assert cancelled(callers, slots[4]) and not cancelled(callers, slots[4])
    assert cancelled(callers, slots[2]) is True
    assert limiter.book("k", id="a", permits=2).delay == 4  # of more permits than the cancelled slot has
    assert limiter.book("k", id="b").delay == 1
    assert limiter.book("k", id="c").delay == 5
    assert not cancelled(callers, slots[0])
    clock.advance(10)
    assert cancelled(callers, limiter.book("k", id="now"))
    assert limiter.try_acquire("k", 2)


def test_reset_forgets_slots(callers: Callers) -> None:
    clock = ManualClock()
    limiter = callers.limiter("1/second", clock=clock)
    slots = [limiter.book("k", id=f"job-{i}") for i in range(4)]
    cancelled(callers, slots[1])
    limiter.reset("k")
    assert limiter.book("k", id="job-3").delay == 0
    assert limiter.book("k", id="job-4").delay == 1
    assert cancelled(callers, slots[2]) is False


def test_same_id_other_permits(callers: Callers) -> None:
    """An id that has a slot of other permits is an error, and keeps its slot."""
    limiter = callers.limiter("5/30d")
    slot = limiter.book("k", id="a", permits=2)
    with pytest.raises(SlotMismatch, match="slot of 2 permits, not 3"):
        limiter.book("k", id="a", permits=3)
    assert limiter.book("k", id="a", permits=2).again and limiter.peek("k", 0).remaining == 3
    assert cancelled(callers, slot)


def test_without_id(callers: Callers) -> None:
    """Each booking without an id is one of its own."""
    limiter = callers.limiter("2/30d")
    first, second = limiter.book("k"), limiter.book("k")
    assert first.id != second.id and not second.again
    assert cancelled(callers, second) and limiter.peek("k", 0).remaining == 1


def test_waiters_are_woken(callers: Callers) -> None:
    """A caller that waits in line takes what a cancelled slot gives back."""
    clock = ManualClock()
    limiter = callers.limiter("1/hour", clock=clock)
    slot = limiter.book("k")
    waiting = callers.start(limiter.acquire, "k")
    until(lambda: not limiter._waiters.is_empty("k"))
    assert cancelled(callers, slot)
    assert waiting.result(timeout=20).allowed


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"id": ""}, InvalidKey, "id is empty"),
        ({"id": 5}, InvalidKey, "id must be text"),
        ({"key": ""}, InvalidKey, "key is empty"),
        ({"permits": 0}, InvalidPermits, "at least 1"),
        ({"permits": 4}, PermitsExceedLimit, "at most 3"),
        ({"within": -1}, ValueError, "within must be a number"),
        ({"within": float("nan")}, ValueError, "within must be a number"),
        ({"grace": "5"}, ValueError, "grace must be a number"),
        ({"grace": True}, ValueError, "grace must be a number"),
    ],
    ids=str,
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    limiter = Limiter("3/30d")
    with pytest.raises(error, match=words):
        limiter.book(**{"key": "k", **arguments})
    assert limiter.peek("k", 0).remaining == 3


@pytest.mark.parametrize("algorithm", WINDOWS)
def test_windows_have_no_slots(algorithm: Any) -> None:
    with pytest.raises(ValueError, match="book\\(\\) needs a bucket, this limiter is " + algorithm):
        Limiter("3/minute", algorithm=algorithm).book("k")


def test_numbers_that_lua_cannot_count() -> None:
    """Where so long a wait would be rounded, the error says how long it may be."""
    limiter = Limiter("999983/day")
    with pytest.raises(ValueError, match=r"within may be at most \d+ s for this quota"):
        limiter.book("k", within=10_000_000)
    assert limiter.book("k", within=3600).delay == 0


def test_stores_without_slots(open_stores: OpenStores, redis_server: Server) -> None:
    """A store or limiter that keeps no slots says which do."""
    with (
        Callers(open_stores.empty("shared"), "sync") as callers,
        pytest.raises(ValueError, match="memory://, redis://"),
    ):
        callers.limiter("3/minute").book("k")
    with (
        HybridLimiter("3/minute", store=redis_server.url) as hybrid,
        pytest.raises(ValueError, match="Limiter on one st"),
    ):
        hybrid.book("k")


# ------------------------------------------------------------------------------------------------- model and twins


@pytest.mark.parametrize("texts", QUOTAS, ids=str)
@pytest.mark.parametrize("algorithm", BUCKETS)
def test_model(algorithm: Any, texts: list[str]) -> None:
    """Bookings and checks on random walks: each slot is the earliest that the law allows, and the law holds."""
    quotas = [Quota.parse(text) for text in texts]
    for seed in range(8):
        chosen, clock = random.Random(seed), ManualClock()
        limiter, model = Limiter(quotas, algorithm=algorithm, clock=clock), Model(quotas)
        starts: list[tuple[int, int]] = []
        step = min(quota.period / quota.limit for quota in quotas)
        for number in range(150):
            permits = chosen.randint(1, min(limiter.rule.capacity, 3))
            now, take = clock.now(), chosen.random() < 0.2
            within = 0 if take else chosen.choice([1, 60, 900]) * 1_000_000
            expected = model.book(now, permits, within)
            try:
                if take:
                    found = now if limiter.try_acquire("k", permits) else None
                else:
                    found = round(limiter.book("k", str(number), permits, within=within / 1e6).at * 1e6)
            except RateLimited:
                found = None
            assert found == expected
            if found is not None:
                starts.append((found, permits))
            clock.advance(chosen.choice([0, 0, 0.000001, step * chosen.random(), step * 20 * chosen.random()]))
        for quota in quotas:
            check_law(quota, starts)


class Walk:
    """The same random calls to two limiters that must answer alike."""

    def __init__(self, seed: int, clock: ManualClock, *limiters: Limiter) -> None:
        self.random, self.clock, self.limiters = random.Random(seed), clock, limiters
        self.starts: dict[str, tuple[int, int]] = {}

    def both(self, name: str, *arguments: Any, **more: Any) -> Any:
        answers = []
        for limiter in self.limiters:
            try:
                made = getattr(limiter, name)(*arguments, **more)
            except (RateLimited, InvalidPermits) as error:
                made = (type(error), getattr(error, "decision", str(error)))
            answers.append((made.at, made.delay, made.again, made.permits) if hasattr(made, "again") else made)
        assert answers[1:] == answers[:-1], (name, arguments)
        return answers[0]

    def step(self, seconds: float) -> None:
        id, permits = f"job-{self.random.randrange(30)}", self.random.choice([1, 1, 1, 2])
        call = self.random.choice(["book"] * 6 + ["cancel"] * 3 + ["take", "peek", "look", "refund", "rest"])
        if call == "book":
            within, grace = self.random.choice([0, 5, 900]), self.random.choice([0.5, 10])
            made = self.both("book", "k", id, min(permits, self.limiters[0].rule.capacity), within=within, grace=grace)
            if isinstance(made[0], float):
                self.starts[id + str(made[0])] = (round(made[0] * 1e6), made[3])
        elif call == "cancel":
            self.both("cancel_slot", "k", id)
        elif call in ("take", "peek"):
            self.both("try_acquire" if call == "take" else "peek", "k", 1)
        elif call == "look":
            self.both("peek", "k", 0)
        elif call == "refund" and self.random.random() < 0.3:
            self.both("refund", "k", 1)
        elif call == "rest" and self.random.random() < 0.1:
            self.both("reset", "k")
        pause = self.random.choice(
            [0, 0, 0, 0.000001, seconds * self.random.random(), seconds * 8 * self.random.random()]
        )
        self.clock.advance(pause)


@pytest.mark.parametrize("texts", QUOTAS, ids=str)
@pytest.mark.parametrize("algorithm", BUCKETS)
def test_twins(algorithm: Any, texts: list[str], redis_server: Server) -> None:
    """Python and Lua give the same slots, decisions and refusals, step by step."""
    clock = ManualClock()
    with Limiter(
        texts, algorithm=algorithm, store=RedisStore(redis_server.url, clock=clock), on_store_error="raise"
    ) as remote:
        walk = Walk(7, clock, Limiter(texts, algorithm=algorithm, clock=clock), remote)
        seconds = max(quota.period / quota.limit for quota in remote.rule.quotas)
        for _ in range(400):
            walk.step(seconds)
        remote.store.close()


@pytest.mark.once
@pytest.mark.parametrize("texts", QUOTAS, ids=str)
def test_twins_in_sql(texts: list[str], postgres_server: PostgresServer) -> None:
    """Python and PL/pgSQL do, too; and a clock that is set back adds nothing to a debt that bookings have made."""
    clock = ManualClock()
    behind = ManualClock(clock.now() / 1e6 - 5000)
    stores = [PostgreSQLStore(postgres_server.url, clock=each) for each in (clock, behind)]
    remote, late = (Limiter(texts, store=store, on_store_error="raise") for store in stores)
    walk = Walk(7, clock, Limiter(texts, clock=clock), remote)
    seconds = max(quota.period / quota.limit for quota in remote.rule.quotas)
    for _ in range(200):
        walk.step(seconds)
    clock.advance(seconds * 1000)
    delays(remote, 20, within=9_000)
    behind.advance(clock.now() / 1e6 - behind.now() / 1e6 - 5000)
    assert late.peek("k", 1).retry_after == remote.peek("k", 1).retry_after
    for store in stores:
        store.close()


@pytest.mark.parametrize("texts", QUOTAS, ids=str)
def test_cancelled_slots_keep_the_law(texts: list[str]) -> None:
    """Whatever is booked and cancelled, what remains to start never exceeds the limit in any stretch of time."""
    for seed in range(20):
        chosen, clock = random.Random(seed), ManualClock()
        limiter = Limiter(texts, clock=clock)
        step = min(quota.period / quota.limit for quota in limiter.rule.quotas)
        live: dict[str, Any] = {}
        for number in range(200):
            if live and chosen.random() < 0.4:
                id = chosen.choice(list(live))
                if live[id].cancel():
                    del live[id]
            else:
                permits = chosen.choice([1, 1, min(2, limiter.rule.capacity)])
                live[str(number)] = limiter.book("k", str(number), permits, within=3600, grace=0)
            clock.advance(chosen.choice([0, 0, step * chosen.random() * 2]))
        starts = [(round(slot.at * 1e6), slot.permits) for slot in live.values()]
        for quota in limiter.rule.quotas:
            check_law(quota, starts)


def test_grace(redis_server: Server) -> None:
    """Jobs that start late, but within their grace, start at most capacity + rate * (t + grace) in any time t."""
    quota, grace = Quota.parse("10/second burst 5"), 2.0
    chosen, clock = random.Random(1), ManualClock()
    limiter, starts = Limiter(quota, clock=clock), []
    due = [(clock.now(), number) for number in range(400)]
    while due:
        due.sort()
        at, number = due.pop(0)
        clock.advance(max(at - clock.now(), 0) / 1e6)
        slot = limiter.book("k", f"job-{number}", grace=grace)
        if slot.delay:
            late = chosen.choice([0, 0, 0, 0, 3])  # the worker looks for jobs that are due every 1.9 s; some come later
            tick = -(-(clock.now() + round((slot.delay + late) * 1e6)) // 1_900_000)
            due.append((tick * 1_900_000, number))
        else:
            starts.append((clock.now(), 1))
    assert len(starts) == 400
    check_law(quota, starts, round(grace * 1e6))
    with pytest.raises(AssertionError):
        check_law(quota, starts)


# ------------------------------------------------------------------------------------------------------------ Redis


def test_redis_keys(redis_server: Server) -> None:
    """All keys of a client share a hash tag and expire, none before its slots; one script makes a booking."""
    with Limiter(["1/second", "90/minute"], store=redis_server.url, name="jobs", on_store_error="raise") as limiter:
        for number in range(4):
            limiter.book("a{b", id=f"job-{number}", grace=30)
        limiter.book("a{b", id="job-2").cancel()
    with redis_server.client() as client:
        keys = sorted(client.keys("*"))
        assert len(keys) == 5 and all("{a%7Bb}" in key for key in keys)
        slots = "rate_limiter:token_bucket_slots:{a%7Bb}:jobs:1/second,90/minute"
        assert [key for key in keys if "slots" in key] == [slots, slots + ":ends", slots + ":freed"]
        assert all(0 < client.ttl(key) <= 65 for key in keys)
        assert client.ttl(slots) >= 30


@pytest.mark.parametrize("algorithm", BUCKETS)
def test_time_to_live_of_a_debt(algorithm: Any, redis_server: Server) -> None:
    """The bucket lives until the last booking is paid, also if other calls write it."""
    with Limiter("1/second burst 2", algorithm=algorithm, store=redis_server.url, on_store_error="raise") as limiter:
        delays(limiter, 100)
        limiter.refund("k")
        with redis_server.client() as client:
            assert 95 < client.ttl(f"rate_limiter:{algorithm}:{{k}}") <= 101


@pytest.mark.parametrize("algorithm", BUCKETS)
def test_clock_steps_back(algorithm: Any, redis_server: Server) -> None:
    """A clock that is set back adds at most nothing to a debt that bookings have made."""
    clock = ManualClock()
    behind = ManualClock(clock.now() / 1e6 - 5000)
    with (
        Limiter("1/second burst 5", algorithm=algorithm, store=RedisStore(redis_server.url, clock=clock)) as before,
        Limiter("1/second burst 5", algorithm=algorithm, store=RedisStore(redis_server.url, clock=behind)) as after,
    ):
        delays(before, 20)
        assert after.peek("k", 1).retry_after == 16
        assert after.book("k", id="next").delay == 16
        before.store.close()
        after.store.close()


def test_bookings_at_once(callers: Callers) -> None:
    """Many callers at the same moment get different slots, none twice and none left out."""
    clock = ManualClock()
    limiter = callers.limiter("10/second burst 1", clock=clock)
    made = [slot.delay for slot in callers.at_once(limiter.book, 64, "k")]
    assert sorted(made) == [number / 10 for number in range(64)]


def test_first_bookings_of_threads() -> None:
    """Threads that book first at the same moment, beside checks, share the slots; nothing is lost or spent twice."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(50):
            limiter = Limiter("1000/3650d")

            def work(limiter: Limiter = limiter) -> int:
                limiter.book("k")
                return 1 + bool(limiter.try_acquire("k")) + bool(limiter.try_acquire("k", floor=0.1))

            assert 1000 - sum(in_threads(8, work)) == limiter.peek("k", 0).remaining
    finally:
        sys.setswitchinterval(interval)


def test_cancelled_task(redis_server: Server) -> None:
    """A task that is cancelled in book() leaves no slot behind."""

    async def main() -> None:
        async with AsyncLimiter("2/30d", store=redis_server.url, on_store_error="raise") as limiter:
            await limiter.peek("k")
            for turns in range(6):
                task = asyncio.ensure_future(limiter.book("k"))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                if task.cancelled():
                    async with asyncio.timeout(20):
                        while (await limiter.peek("k", 0)).remaining < 2:
                            pass
                else:
                    assert await task.result().cancel()

    asyncio.run(main())


def test_outages(redis_server: Server) -> None:
    """allow: a slot now; deny: RateLimited; local: a slot of this process; raise: StoreUnavailable."""
    url = "redis://127.0.0.1:1?connect_timeout=0.2&timeout=0.2"

    def limiter(policy: Any) -> Limiter:
        return Limiter("1/second", store=url, on_store_error=policy)

    with limiter("allow") as allow, limiter("deny") as deny, limiter("local") as local, limiter("raise") as raises:
        for _ in range(4):
            slot = allow.book("k")
            assert slot.delay == 0 and slot.degraded and slot.cancel() is False
        with pytest.raises(RateLimited) as caught:
            deny.book("k")
        assert caught.value.decision.degraded and caught.value.decision.retry_after == 1
        first, second = local.book("k", id="a"), local.book("k", id="b")
        assert first.degraded and first.delay == 0 and 0 < second.delay <= 1
        assert local.book("k", id="b").again and second.cancel()
        with pytest.raises(RateLimited):
            local.book("k", within=0)
        with pytest.raises(StoreUnavailable):
            raises.book("k")


@pytest.mark.server
@pytest.mark.xdist_group("stores-cluster")
def test_cluster(open_stores: OpenStores) -> None:
    """Buckets and slots of a key lie at one server of a Cluster, whatever the key."""
    with Callers(open_stores.empty("cluster"), "sync") as callers:
        limiter = callers.limiter(["1/30d", "5/30d"])
        for key in ("a", "b", "{a}b", "c}"):
            assert limiter.book(key, id="x").delay == 0 and limiter.book(key, id="x").again
            late = limiter.book(key, id="y", within=3_000_000)
            assert 2_500_000 < late.delay < 2_600_000 and late.cancel() and limiter.reset(key)


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_lost_reply(colour: str, redis_server: Server) -> None:
    """A booking whose reply is lost is sent again, and takes one slot."""
    with (
        FaultyProxy(redis_server.port) as proxy,
        Callers(OpenStore(proxy.bare_url), colour) as callers,
        Limiter("5/30d", store=redis_server.url, on_store_error="raise") as direct,
    ):
        limiter = callers.limiter("5/30d")
        limiter.book("k")
        proxy.truncate = 4  # bytes of the next reply that come
        assert limiter.book("k").delay == 0
        assert direct.peek("k", 0).remaining == 3
