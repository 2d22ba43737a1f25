"""What surrounds a call: forks, event loops that come and go, no room for a thread, a patched `sleep`."""

import ast
import asyncio
import gc
import multiprocessing
import os
import pickle
import re
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

import headgate
from headgate import AsyncHybridLimiter, AsyncLimiter, HybridLimiter, Limiter
from headgate.clock import SYSTEM_CLOCK
from headgate.coordination import AsyncLock, CircuitBreaker, Lock, Pool, WaitQueue, background_retry, queue_heartbeat
from headgate.coordination import backend as backends
from headgate.fallback import Fallback
from headgate.rule import Rule
from headgate.stores import MemoryStore, RedisStore
from tests.hybrid.test_limiter import out
from tests.support.clocks import until, until_async
from tests.support.servers import Server

NOWHERE = "redis://127.0.0.1:1"


def in_child(promise: Callable[[], object]) -> None:
    """Fork, and see *promise* kept in the child, within thirty seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, which is what is tested
        child = os.fork()
    if child == 0:
        status = 1
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)
        try:
            assert promise()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


@contextmanager
def held_elsewhere(*locks: Any) -> Iterator[None]:
    """Another thread has these locks; it is not in the child, where they stay locked."""
    held, go_on = threading.Event(), threading.Event()

    def hold_all() -> None:
        with ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            held.set()
            go_on.wait()

    thread = threading.Thread(target=hold_all)
    thread.start()
    held.wait()
    try:
        yield
    finally:
        go_on.set()
        thread.join()


# ------------------------------------------------------------------------------------------------------------- forks


@pytest.mark.parametrize("kind", ["memory", "redis", "hybrid"])
def test_fork_and_waiters(kind: str, redis_server: Server) -> None:
    """A child's callers do not stand in line behind threads of its parent."""
    limiter = Limiter("5/day") if kind == "memory" else Limiter("5/day", store=redis_server.patient_url)
    if kind == "hybrid":
        limiter = HybridLimiter("5/day", store=redis_server.patient_url)
    with limiter:
        assert limiter.try_acquire("k", 5)

        stays = threading.Thread(target=limiter.acquire, args=("k", 1, 50))
        stays.start()
        until(lambda: limiter._waiters.queues)

        def acquire() -> object:
            limiter.refund("k", 5)
            return limiter.acquire("k", timeout=20)

        in_child(acquire)
        limiter.reset("k")
        stays.join()


def test_fork_and_memory() -> None:
    """A child uses the memory store though a thread of its parent held the lock."""
    store = MemoryStore()
    limiter = Limiter("5/day", store=store)
    assert limiter.try_acquire("k", 3)
    with held_elsewhere(store.lock):
        in_child(lambda: limiter.try_acquire("k", 2) and len(store) == 1 and limiter.peek("k").remaining == 0)


@pytest.mark.usefixtures("patient_health")
def test_fork_and_redis(redis_server: Server) -> None:
    """A child uses a Redis store though a thread of its parent held its locks."""
    store = RedisStore(redis_server.patient_url)
    with store._health_lock:  # as a thread of the parent has it, which is not in the child
        in_child(lambda: store.health().healthy)
    with store._lock:
        in_child(lambda: Limiter("5/day", store=store, on_store_error="raise").try_acquire("k"))
    store.close()


def test_fork_and_debts() -> None:
    """A child is not charged for what its parent granted in an outage."""
    fallback = Fallback("local", Rule("5/day", "token_bucket", "default"), None)
    assert fallback.take("k", 3, OSError("away"), refused=False, unsure=False)
    with fallback._lock:
        in_child(lambda: fallback.take_debt("k") == 0)
    assert fallback.take_debt("k") == 3


@pytest.mark.parametrize("kind", ["memory", "redis"])
def test_fork_and_coordination(kind: str, redis_server: Server) -> None:
    """A child has its own timers, heartbeats and subscription."""
    url = redis_server.patient_url if kind == "redis" else "memory://"
    queue, lock = WaitQueue("forks", store=url), Lock("forks", store=url)
    backend: Any = lock._runner.backend
    queue.enqueue("first")
    waits = threading.Thread(target=queue.wait, args=("first",))
    waits.start()
    until(lambda: (backend, queue._runner.channel) in queue_heartbeat._HEARTBEATS)
    assert lock.acquire()  # a thread renews it
    listens = getattr(backend.states, "_subscription", None)
    assert (listens is None) == (kind == "memory")

    def coordinate() -> bool:
        assert not queue_heartbeat._HEARTBEATS
        done = threading.Event()
        backend.timers.later(0.0, done.set)
        assert done.wait(), "by a thread of our own"
        assert Lock("of the child", store=url).acquire(timeout=0)
        stands = threading.Thread(target=WaitQueue("of the child", store=url).wait, args=("one",), daemon=True)
        stands.start()
        until(lambda: queue_heartbeat._HEARTBEATS)
        return kind == "memory" or backend.states._subscription is not listens  # whose connection is the parent's

    with held_elsewhere(queue_heartbeat._LOCK, backends._OPENING, backend.states._lock, backend.timers._lock):
        in_child(coordinate)
    assert queue.dequeue() == "first"
    waits.join()
    lock.release()


def test_fork_and_retries(mortal_server: Server) -> None:
    """A retry in the background stays with the parent."""
    lock = Lock("k", store=mortal_server.patient_url)
    assert lock.acquire()
    mortal_server.kill()
    others = set(background_retry._PENDING)
    assert lock.release()  # is tried again and again
    ours = background_retry._PENDING - others
    assert ours
    in_child(lambda: not background_retry._PENDING)
    mortal_server.restart()
    until(lambda: not ours & background_retry._PENDING)


# ------------------------------------------------------------------------------------------------------- event loops


async def hold(limiter: AsyncHybridLimiter) -> int:
    """Call until something is on lease, and leave it so; how many permits that took."""
    while limiter.stats().held < 2:
        assert await limiter.try_acquire("k")
        await asyncio.sleep(0.001)
    return limiter.stats().local + limiter.stats().remote


def test_loop_end(redis_server: Server) -> None:
    """An event loop that ends gives its leases back."""
    limiter, spent = AsyncHybridLimiter("1000/day", store=redis_server.patient_url), 0
    for _ in range(3):
        spent += asyncio.run(hold(limiter))
        assert out(redis_server) == 0
    with HybridLimiter("1000/day", store=redis_server.patient_url) as another:
        assert another.peek("k", 0).remaining == 1000 - spent


def test_loop_end_in_mid_trip(redis_server: Server) -> None:
    """An event loop that ends in the middle of a round trip gives its leases back."""
    limiter = AsyncHybridLimiter("1000/day", store=redis_server.patient_url)

    async def leave() -> None:
        await hold(limiter)
        asking = [asyncio.create_task(limiter.try_acquire(f"k{i}")) for i in range(50)]
        await until_async(lambda: any(leases.manager.trip_under_way for leases in limiter.store.loops.values()))
        assert asking

    asyncio.run(leave())
    assert out(redis_server) == 0


@pytest.mark.parametrize("trouble", [signal.SIGKILL, signal.SIGSTOP], ids=["is gone", "hangs"])
def test_loop_end_in_outage(trouble: int, mortal_server: Server) -> None:
    """An event loop ends soon where Redis is gone or hangs."""
    url = f"{mortal_server.bare_url}?socket_timeout=50&socket_connect_timeout=50"
    limiter = AsyncHybridLimiter("1000/day", store=url)

    async def lose() -> int:
        await hold(limiter)
        os.kill(mortal_server.process.pid, trouble)
        return SYSTEM_CLOCK.now()

    assert SYSTEM_CLOCK.now() - asyncio.run(lose()) < 8_000_000  # a second, and not what the URL says
    gc.collect()  # complains of a task or a connection that was left behind
    os.kill(mortal_server.process.pid, signal.SIGCONT)


def hold_in_a_loop(url: str) -> None:
    asyncio.run(hold(AsyncHybridLimiter("1000/day", store=url)))


def hold_in_a_thread(url: str) -> None:
    limiter = HybridLimiter("1000/day", store=url)
    while limiter.stats().held < 2:
        assert limiter.try_acquire("k")


def run_child(method: str, target: Callable[[str], None], url: str) -> None:
    """Let `multiprocessing` do *target* in a child, to its end."""
    context: Any = multiprocessing.get_context(method)
    child = context.Process(target=target, args=(url,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    child.join(50)
    assert child.exitcode == 0


@pytest.mark.parametrize("target", [hold_in_a_thread, hold_in_a_loop])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_multiprocessing(method: str, target: Any, redis_server: Server) -> None:
    """A child process that ends gives its leases back."""
    run_child(method, target, redis_server.patient_url)
    assert redis_server.names() and out(redis_server) == 0


def release_late(url: str) -> None:
    background_retry.AT_EXIT = 20.0  # a busy machine may take longer than usual
    lock = Lock("k", store=url + "?timeout=0.2", ttl=300.0)
    assert lock.acquire(timeout=20)
    with redis.Redis.from_url(re.sub("//.*@", "//", url)) as client:
        client.execute_command("CLIENT", "PAUSE", "500", "ALL")
    lock.release()


def test_multiprocessing_and_late_release(redis_server: Server) -> None:
    """A child process that ends releases its lock though Redis did not answer at first."""
    run_child("fork", release_late, redis_server.bare_url)
    assert Lock("k", store=redis_server.patient_url).acquire(timeout=0)


# ----------------------------------------------------------------------------------------------------------- threads


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As in a process that has as many as it may, or one that ends, by some releases of Python."""

    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    return monkeypatch


def test_no_thread_for_hybrid(redis_server: Server, no_threads: pytest.MonkeyPatch) -> None:
    """Without a thread the policy answers, until there can be one."""
    with HybridLimiter("5/day", store=redis_server.patient_url, on_store_error="deny") as limiter:
        made = [limiter.try_acquire("k") for _ in range(3)]
        assert all(each.degraded and not each for each in made)
        no_threads.undo()
        until(lambda: limiter.try_acquire("k"))


def test_no_thread_for_coordination(redis_server: Server, no_threads: pytest.MonkeyPatch) -> None:
    """Locks and pools work without a thread of their own."""
    store = RedisStore(redis_server.patient_url)  # a place of its own, without threads from before
    lock, other = Lock("k", store=store), Lock("k", store=store)
    with lock:
        assert not other.acquire(timeout=0.01)
        assert lock.held
    assert other.acquire(timeout=0) and other.release()
    pool = Pool("p", store=store)
    pool.add("m")
    with pool.acquire(timeout=1) as leased:
        assert leased.member == "m"
    no_threads.undo()
    waits = threading.Thread(target=lambda: other.acquire(timeout=5) and other.release())
    with lock:
        waits.start()
        until(lambda: redis_server.client().pubsub_channels("lock:*"))
    waits.join()
    lock.close()
    store.close()


# -------------------------------------------------------------------------------------------------------- surprises


@pytest.mark.parametrize(
    "thing",
    [
        Limiter("5/day"),
        Limiter("5/day", store=NOWHERE),
        AsyncLimiter("5/day"),
        HybridLimiter("5/day", store=NOWHERE),
        AsyncHybridLimiter("5/day", store=NOWHERE),
        RedisStore(NOWHERE),
        Lock("x"),
        AsyncLock("x", store=NOWHERE),
        CircuitBreaker("x", store=NOWHERE),
        Pool("x", store=NOWHERE),
        WaitQueue("x"),
    ],
    ids=lambda thing: repr(thing)[:40],
)
def test_pickle(thing: object) -> None:
    """What belongs to one process says so when it is pickled."""
    with pytest.raises(TypeError, match="make one in each"):
        pickle.dumps(thing)


def test_sleep_can_be_replaced() -> None:
    """gevent does, perhaps after headgate was imported: the real one would stop all greenlets."""
    for path in Path(headgate.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "time":
                assert "sleep" not in {each.name for each in node.names}, path
