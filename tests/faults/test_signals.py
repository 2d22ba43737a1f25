"""An exception of a signal handler in mid-call, wherever it comes: no other caller is stuck because of it."""

import gc
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from headgate import Limiter
from headgate._waiters import SignalSafeEvent, Waiter, WaiterQueue
from headgate.redis.execute import ConnectionsExhausted
from headgate.redis.sync_client import ServerConnections, SyncExecutor
from headgate.redis.url import parse_url
from headgate.stores.breaker import Breaker
from headgate.testing import ManualClock
from tests.support.clusters import wait_until
from tests.support.servers import Server, free_port
from tests.support.signals import done_by_another, signal_at

pytestmark = pytest.mark.xdist_group("faults")


def interrupted(prepare: Callable[[], Callable[[], object]], afterwards: Callable[[], object]) -> None:
    """Interrupt the call that *prepare* returns at one point after the other; and *afterwards*, something else."""
    gc.collect()
    gc.freeze()  # garbage is collected after each of them: what was there before need not be looked through
    try:
        for number in itertools.count(1):
            came = signal_at(number, prepare())
            afterwards()
            if not came:
                assert number > 1
                return
    finally:
        gc.unfreeze()


@pytest.fixture
def connections(redis_server: Server) -> Iterator[ServerConnections]:
    """A single one."""
    target = parse_url(redis_server.url, timeout=None, connect_timeout=None, max_connections=1)
    connections = ServerConnections(target, target.hosts[0])
    yield connections
    connections.close()


def in_20_s() -> float:
    return time.monotonic() + 20


def test_waiting_for_a_connection(connections: ServerConnections) -> None:
    used: list[Any] = []

    def prepare() -> Callable[[], object]:
        used.append(connections.acquire(in_20_s()))
        return wait

    def wait() -> None:
        with pytest.raises(ConnectionsExhausted):
            connections.acquire(time.monotonic() + 0.001)

    def afterwards() -> None:
        assert done_by_another(wait)
        assert done_by_another(lambda: connections.release(used.pop(), clean=True))
        assert done_by_another(lambda: connections.release(connections.acquire(in_20_s()), clean=True))
        assert (connections.in_use(), connections.idle(), connections.waiting) == (0, 1, 0)

    interrupted(prepare, afterwards)


def test_handing_on_a_connection(connections: ServerConnections) -> None:
    """It gets that, or a new one if that was lost."""
    waiters: list[threading.Thread] = []

    def prepare() -> Callable[[], object]:
        used = [connections.acquire(in_20_s())]
        waiters.append(threading.Thread(target=borrow, daemon=True))
        waiters[-1].start()
        wait_until(lambda: connections.waiting == 1, "it waits")
        return lambda: connections.release(used.pop(), clean=True)

    def borrow() -> None:
        connections.release(connections.acquire(in_20_s()), clean=True)

    def afterwards() -> None:
        gc.collect()
        waiters[-1].join(20)
        assert not waiters[-1].is_alive()
        assert (connections.in_use(), connections.waiting) == (0, 0)

    interrupted(prepare, afterwards)


@pytest.mark.parametrize("timeout", [None, 5.0])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a signal may come in a __del__
def test_waiting_for_permits(timeout: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that wakes the waiter is not held up, and a later waiter does not stand behind it."""
    clock = ManualClock(patience=0.001)
    limiter = Limiter("1/30d", clock=clock)
    queue, waiters = limiter._waiters, list[Waiter]()

    def join(waiter: Waiter, *at_front: bool) -> None:
        waiters.append(waiter)
        WaiterQueue.join(queue, waiter, *at_front)

    monkeypatch.setattr(queue, "join", join)

    def prepare() -> Callable[[], object]:
        limiter.reset("k")
        limiter.try_acquire("k")
        return partial(limiter.acquire, "k", timeout=timeout)

    def afterwards() -> None:
        gc.collect()
        assert not queue.queues
        assert all(done_by_another(waiter.wake) for waiter in waiters)
        waiters.clear()
        assert done_by_another(partial(limiter.refund, "k"))
        assert done_by_another(partial(clock.advance, 6.0))
        assert done_by_another(partial(limiter.acquire, "k"))

    interrupted(prepare, afterwards)


def test_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe that was interrupted as it started does not keep others from starting."""
    probes: list[Breaker] = []

    def probe(_link: object, breaker: Breaker, _slot: int) -> None:
        probes.append(breaker)
        breaker.release_probe()

    class Thread(threading.Thread):
        """Under a name of its own: one whose start is interrupted stays for ever, for other tests to count."""

        def __init__(self, *, name: str, **options: Any) -> None:
            super().__init__(name=f"not {name}", **options)

    monkeypatch.setattr("headgate.stores.probe.probe_in_thread", probe)
    monkeypatch.setattr("headgate.stores.probe.threading.Thread", Thread)
    breakers: list[Breaker] = []
    link = SyncExecutor(parse_url(f"redis://127.0.0.1:{free_port()}"), "Redis")

    def prepare() -> Callable[[], object]:
        breakers.append(Breaker("Redis"))
        return partial(link.start_probe, breakers[-1], 0)

    def afterwards() -> None:
        assert not breakers[-1]._probing or wait_until(lambda: breakers[-1] in probes, "it does so") is None
        probes.clear()
        link.start_probe(breakers[-1], 0)
        wait_until(lambda: probes, "another looks")

    interrupted(prepare, afterwards)


class Unlucky:
    """The lock of an event that is set while a thread waits; and just then a signal comes."""

    def __init__(self, event: SignalSafeEvent) -> None:
        self._lock, self._set = event._unset, event.set
        self.release = self._lock.release

    def acquire(self, timeout: float) -> bool:
        self._set()
        assert self._lock.acquire(timeout=timeout)
        raise KeyboardInterrupt


def test_event_set_as_a_signal_comes() -> None:
    """Other threads that wait for the event are woken all the same."""
    event = SignalSafeEvent()
    lock, event._unset = event._unset, Unlucky(event)  # type: ignore[assignment]  # as much of a lock as is needed
    with pytest.raises(KeyboardInterrupt):
        event.wait(20)
    event._unset = lock
    assert event.is_set() and event.wait(20) and lock.acquire(blocking=False)
    event.clear()
    assert not event.is_set() and not event.wait(0.0)


@pytest.mark.bounded(20)
def test_handler_calls_during_an_outage() -> None:
    """A signal handler may call a limiter that answers by `local` when it interrupts the bookkeeping of its debts."""
    limiter = Limiter("1000/hour", store=f"redis://127.0.0.1:{free_port()}", on_store_error="local")
    backend: Any = limiter._backend
    with backend.fallback._lock:  # as a handler finds it
        assert limiter.try_acquire("k").degraded
    limiter.close()
