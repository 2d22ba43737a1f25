"""Threads that ask Redis at the same moment share a trip, and each gets the answer that it would have got alone."""

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest

from headgate import Decision, Limiter
from headgate.errors import StoreUnavailable
from headgate.joint import JointCheck, try_acquire_all
from headgate.redis import shared_trips
from headgate.redis.shared_trips import SharedTrips
from headgate.stores.redis import RedisStore
from tests.support.callers import in_threads
from tests.support.clusters import Node, wait_until
from tests.support.proxy import FaultyProxy
from tests.support.servers import Server
from tests.support.signals import done_by_another, interrupt
from tests.test_processes import in_child

pytestmark = pytest.mark.xdist_group("faults")

QUOTA = "1000/30d"
NO_REQUEST: Any = object()
NEVER = 100.0  # seconds, longer than a test may take

Call = Callable[[], Any]


def trips_of(limiter: Limiter) -> SharedTrips:
    """The trips to the only server."""
    assert isinstance(limiter.store, RedisStore)
    limiter.peek("known from now on")
    [trips] = limiter.store.sync_executor()._servers.values()
    return trips


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller waits for the trip of another for as long as it takes."""
    monkeypatch.setattr(shared_trips, "PATIENCE", NEVER)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(70) as pool:
        yield pool


def begin_trip(trips: SharedTrips) -> None:
    """As if a caller began a trip, and all others were to wait for it."""
    trips._senders.add(id(NO_REQUEST))
    trips._at_once = 1


@contextmanager
def trip_under_way(trips: SharedTrips) -> Iterator[None]:
    """As if a caller had a trip under way, which ends with this."""
    begin_trip(trips)
    try:
        yield
    finally:
        trips._hand_over(NO_REQUEST)


def together(trips: SharedTrips, pool: ThreadPoolExecutor, *calls: Call) -> list[Future[Any]]:
    """The results of these calls, which share a trip."""
    with trip_under_way(trips):
        started = []
        for number, call in enumerate(calls, start=1):
            started.append(pool.submit(call))
            wait_until(lambda: len(trips._waiting) == number, "it waits")  # noqa: B023  # called before the next
    return started


@pytest.mark.usefixtures("patience")
def test_one_command(redis_server: Server, pool: ThreadPoolExecutor) -> None:
    """Those that wait are one call of the script, decided in their order."""
    with Limiter(QUOTA, store=redis_server.url, on_store_error="raise") as limiter:
        trips = trips_of(limiter)
        before = redis_server.calls("evalsha")
        done = together(trips, pool, *[partial(limiter.try_acquire, "k")] * 16)
        assert [call.result().remaining for call in done] == list(range(999, 983, -1))
        assert redis_server.calls("evalsha") == before + 1


def test_exact_under_load(redis_server: Server) -> None:
    """16 threads on limiters and joint checks of one store: exactly the limit, in fewer commands than calls."""
    store = RedisStore(redis_server.url)
    limiters = [Limiter("500/30d", store=store, name=name, on_store_error="raise") for name in ("a", "b")]
    before = redis_server.calls("evalsha")

    def work() -> int:
        admitted = 0
        for _ in range(40):
            admitted += sum(limiter.try_acquire("k").allowed for limiter in limiters)
            admitted += 2 * all(try_acquire_all([JointCheck(limiter, "k", 1) for limiter in limiters]))
        return admitted

    assert sum(in_threads(16, work)) == 1000
    assert [limiter.peek("k", permits=0).remaining for limiter in limiters] == [0, 0]
    assert redis_server.calls("evalsha") - before < 16 * 40 * 3
    store.close()


@pytest.mark.usefixtures("patience")
def test_a_full_trip(redis_server: Server, pool: ThreadPoolExecutor) -> None:
    """A trip takes 64 quotas, the next sender the rest: no caller works for others once it has its answer."""
    with Limiter(QUOTA, store=redis_server.url, on_store_error="raise") as limiter:
        trips = trips_of(limiter)
        before = redis_server.calls("evalsha")
        done = together(trips, pool, *[partial(limiter.try_acquire, "k")] * 70)
        assert sorted(call.result().remaining for call in done) == list(range(930, 1000))
        assert redis_server.calls("evalsha") == before + 2


@pytest.mark.usefixtures("patience")
def test_error_of_one(redis_server: Server, pool: ThreadPoolExecutor) -> None:
    """An error that the server answers to one call reaches its caller only."""
    with Limiter(QUOTA, store=redis_server.url, on_store_error="raise") as limiter:
        trips = trips_of(limiter)
        with redis_server.client() as client:
            client.set("rate_limiter:token_bucket:{broken}", "text")
        keys = ["a", "broken", "c"]
        a, broken, c = together(trips, pool, *[partial(limiter.try_acquire, key) for key in keys])
        assert (a.result().remaining, c.result().remaining) == (999, 999)
        with pytest.raises(StoreUnavailable, match="WRONGTYPE"):
            broken.result()
        assert limiter.store_health().failures == 0


@pytest.mark.usefixtures("patience")
def test_forgotten_script(redis_server: Server, pool: ThreadPoolExecutor) -> None:
    with Limiter(QUOTA, store=redis_server.url, on_store_error="raise") as limiter:
        trips = trips_of(limiter)
        with redis_server.client() as client:
            client.script_flush()
        done = together(trips, pool, *[partial(limiter.try_acquire, "k")] * 8)
        assert sorted(call.result().remaining for call in done) == list(range(992, 1000))


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("length", [0, 6, 40])
def test_lost_replies(length: int, node: Node, pool: ThreadPoolExecutor) -> None:
    """The connection dies in mid-trip: each call is spent once, the policy answers, and the server failed once."""
    with (
        FaultyProxy(node.port) as proxy,
        Limiter(QUOTA, store=node.patient_url) as direct,
        Limiter(QUOTA, store=proxy.patient_url) as limiter,
    ):
        trips = trips_of(limiter)
        proxy.truncate = length
        done = together(trips, pool, *[partial(limiter.try_acquire, "k")] * 5)
        assert all(call.result().degraded for call in done)
        assert direct.peek("k", permits=0).remaining == 995
        assert limiter.store_health().failures == 1
        assert limiter.try_acquire("k").remaining == 994


@pytest.mark.usefixtures("patience")
def test_server_that_hangs(node: Node, pool: ThreadPoolExecutor) -> None:
    """Every caller is answered by its policy when its time is over, and each of them has waited in vain."""
    with FaultyProxy(node.port) as proxy, Limiter(QUOTA, store=proxy.bare_url, timeout=1.0) as limiter:
        trips = trips_of(limiter)
        proxy.swallow_replies = True
        done = together(trips, pool, *[partial(limiter.try_acquire, "k")] * 3)
        assert all(call.result().degraded for call in done)
        assert limiter.store_health().state == "open"


def test_sender_that_hangs(redis_server: Server, pool: ThreadPoolExecutor) -> None:
    """It holds no other caller up, and those that wait for it share a trip all the same."""
    with Limiter(QUOTA, store=redis_server.url, on_store_error="raise") as limiter:
        trips = trips_of(limiter)
        begin_trip(trips)
        done = [pool.submit(limiter.try_acquire, "k") for _ in range(16)]
        assert sorted(call.result().remaining for call in done) == list(range(984, 1000))
        assert not trips._senders, "a lost turn is found again"


@pytest.mark.usefixtures("patience")
def test_sender_that_hangs_with_the_call(redis_server: Server, pool: ThreadPoolExecutor) -> None:
    """A call that another thread took is not sent again; its caller waits until its own time is over."""
    with Limiter(QUOTA, store=redis_server.bare_url, timeout=0.3) as limiter:
        trips = trips_of(limiter)
        with trip_under_way(trips):
            call = pool.submit(limiter.try_acquire, "k")
            wait_until(lambda: trips._waiting, "it waits")
            assert trips._waiting[0].take("a sender that hangs")
            assert call.result().degraded
        assert limiter.with_timeout(20).peek("k", permits=0).remaining == 1000


@pytest.mark.usefixtures("patience")
def test_own_time_limit(redis_server: Server) -> None:
    """A call with less time than the others travels alone: it neither waits for them nor cuts their time."""
    with (
        Limiter(QUOTA, store=redis_server.patient_url, on_store_error="raise") as limiter,
        trip_under_way(trips_of(limiter)),
    ):
        assert limiter.with_timeout(5).try_acquire("k")


@pytest.mark.usefixtures("patience")
def test_fork(redis_server: Server) -> None:
    """A child has no trips of its parent to wait for."""
    with (
        Limiter(QUOTA, store=redis_server.patient_url, on_store_error="raise") as limiter,
        trip_under_way(trips_of(limiter)),
    ):
        in_child(lambda: limiter.try_acquire("k"))


@pytest.mark.usefixtures("patience")
def test_close(redis_server: Server, pool: ThreadPoolExecutor) -> None:
    """Callers that wait when the store is closed get their answers."""
    limiter = Limiter(QUOTA, store=redis_server.url, on_store_error="raise")
    trips = trips_of(limiter)
    with trip_under_way(trips):
        done = [pool.submit(limiter.try_acquire, "k") for _ in range(5)]
        wait_until(lambda: len(trips._waiting) == 5, "they wait")
        limiter.close()
    assert sorted(call.result().remaining for call in done) == list(range(995, 1000))
    trips.connections.close()


def interrupted(number: int, call: Call) -> bool:
    """Whether *call* was interrupted at the line of that *number* in the module that shares trips."""
    came = False

    def handler() -> None:
        nonlocal came
        came = True
        raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        interrupt(number, call, handler, at="line", files=lambda name: name == shared_trips.__file__)
    return came


def interrupted_at_each_line(limiter: Limiter, pool: ThreadPoolExecutor, caller: Callable[..., Any]) -> Iterator[Any]:
    """The answers of three callers that wait behind a call that *caller* makes and that is interrupted.

    The call is the first that waits for a trip under way, so it is to send the others.
    """
    trips = trips_of(limiter)

    def wait_behind(over: threading.Event) -> list[Decision]:
        wait_until(lambda: over.is_set() or trips._waiting, "it waits")
        others = [pool.submit(limiter.try_acquire, "k") for _ in range(3)]
        wait_until(lambda: sum(not call.is_taken() for call in trips._waiting) >= 3 or others[0].done(), "they wait")
        trips._hand_over(NO_REQUEST)
        return [other.result() for other in others]

    for number in itertools.count(1):
        over = threading.Event()
        begin_trip(trips)
        others = pool.submit(wait_behind, over)
        came = caller(interrupted, number, partial(limiter.try_acquire, "k"))
        over.set()
        yield from others.result()
        assert all(call.is_taken() for call in trips._waiting), "what an interrupted caller leaves is not sent"
        wait_until(lambda: limiter.store_health().state == "closed", "those that got no answer in time are forgotten")
        assert done_by_another(lambda: limiter.try_acquire("k"))
        if not came:
            assert number > 20
            return


def test_main_thread_interrupted(
    redis_server: Server, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever a signal ends a call of the main thread, the calls of others are answered by the store."""
    monkeypatch.setattr(shared_trips, "PATIENCE", 0.2)  # all wait before the first loses its patience
    with Limiter("1000000/30d", store=redis_server.patient_url) as limiter:
        answers = list(interrupted_at_each_line(limiter, pool, lambda call, *arguments: call(*arguments)))
        assert not any(answer.degraded for answer in answers)


def test_sender_interrupted(redis_server: Server, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a thread that sends for others is interrupted, they get their answers, or the policy's in time."""
    monkeypatch.setattr(shared_trips, "PATIENCE", 0.1)
    with Limiter("1000000/30d", store=redis_server.bare_url, timeout=0.25) as limiter:
        answers = list(interrupted_at_each_line(limiter, pool, lambda *call: pool.submit(*call).result()))
        assert all(answer.allowed for answer in answers)
        assert sum(answer.degraded for answer in answers) < len(answers) / 2


def test_lone_caller_interrupted(
    redis_server: Server, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for a caller that others wait for."""
    with Limiter("1000000/30d", store=redis_server.patient_url, on_store_error="raise") as limiter:
        trips = trips_of(limiter)
        on_connection, others = trips.connections.on_connection, list[Future[Decision]]()

        def with_others_behind(*arguments: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                others.extend(pool.submit(limiter.try_acquire, "k") for _ in range(3))
            return on_connection(*arguments)

        monkeypatch.setattr(trips.connections, "on_connection", with_others_behind)
        for number in itertools.count(1):
            came = interrupted(number, partial(limiter.try_acquire, "k"))
            assert done_by_another(lambda: limiter.try_acquire("k"))
            if not came:
                break
        assert number > 5
        assert all(other.result().allowed for other in others)
