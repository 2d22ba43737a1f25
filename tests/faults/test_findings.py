"""What a hostile user once found, kept found."""

import asyncio
import gc
import logging
import operator
import signal
import threading
import time
from typing import Any

import pytest
import redis

from headgate import AsyncLimiter, Limiter
from headgate.stores.breaker import FAILURES_TO_OPEN
from headgate.stores.redis import RedisStore
from tests.support.callers import COLOURS, Callers
from tests.support.clusters import Node, wait_until
from tests.support.outages import paused
from tests.support.proxy import FaultyProxy
from tests.support.pulse import Pulse
from tests.support.stores import OpenStore

pytestmark = [pytest.mark.store_timeout(0.5), pytest.mark.xdist_group("faults")]

QUOTA = "100/30d"
PATIENT = "?timeout=20&connect_timeout=20"


def spent(node: Node) -> int:
    with Limiter(QUOTA, store=node.bare_url + PATIENT) as limiter:
        return 100 - limiter.peek("k", permits=0).remaining


def back(limiter: Limiter) -> None:
    wait_until(lambda: not limiter.peek("other", permits=0).degraded, "the store is in use again")


def test_cancelled_at_once(node: Node) -> None:
    """The task that carries calls is cancelled before its first step: no call hangs, nor does `aclose`."""

    async def worker(limiter: AsyncLimiter) -> None:
        await asyncio.sleep(0)
        try:
            await limiter.try_acquire("k")
        finally:
            await limiter.aclose()

    async def shut_down() -> None:
        task = asyncio.create_task(worker(AsyncLimiter(QUOTA, store=node.url)))
        await asyncio.sleep(0)
        del task

    async def go_on() -> None:
        async with AsyncLimiter(QUOTA, store=node.bare_url + PATIENT) as limiter:
            call = asyncio.create_task(limiter.try_acquire("k"))
            await asyncio.sleep(0)
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await asyncio.gather(call, return_exceptions=True)
            assert not (await asyncio.wait_for(limiter.try_acquire("k"), 20)).degraded

    asyncio.run(asyncio.wait_for(shut_down(), 20))
    asyncio.run(go_on())


async def test_cancelled_probe(node: Node) -> None:
    """When a probe is cancelled another one follows."""
    async with AsyncLimiter(QUOTA, store=node.bare_url + PATIENT) as limiter:
        node.kill()
        for _ in range(5):
            assert (await limiter.try_acquire("k")).degraded
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        node.restart()  # not in a thread: a server dies with the thread that started it
        deadline = time.monotonic() + 20
        while (await limiter.try_acquire("k")).degraded:
            assert time.monotonic() < deadline, "no probe follows"
            await asyncio.sleep(0.01)


def test_no_thread_for_a_probe(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with Limiter(QUOTA, store=node.bare_url + PATIENT) as limiter:
        node.kill()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fail)
            for _ in range(10):
                assert limiter.try_acquire("k").degraded
        node.restart()
        wait_until(lambda: not limiter.try_acquire("k").degraded, "a later call has started a probe")


@pytest.mark.parametrize("colour", COLOURS)
def test_a_debt_is_charged_once(colour: str, node: Node) -> None:
    """Many callers come back at the same moment."""
    with Callers(OpenStore(node.bare_url), colour) as callers:
        limiter = callers.limiter(QUOTA, on_store_error="local")
        limiter.try_acquire("k", permits=3)  # the last word of the store
        node.kill()
        for _ in range(10):
            assert limiter.try_acquire("other").degraded
        for _ in range(6):
            assert limiter.try_acquire("k").allowed
        node.restart()
        back(limiter)
        for call in [callers.start(limiter.try_acquire, "k") for _ in range(10)]:
            assert not call.result().degraded
    assert spent(node) == 6 + 10, "the server came back empty"


def test_a_debt_ages(durable_node: Node) -> None:
    """What was granted in an outage counts as long as it would have counted, and not when the key returns next day."""
    url = durable_node.bare_url + PATIENT
    with Limiter("5/second", algorithm="fixed_window", store=url, on_store_error="local") as limiter:
        limiter.try_acquire("other")
        durable_node.kill()
        for _ in range(5):
            limiter.try_acquire("other")
        assert sum(limiter.try_acquire("k").allowed for _ in range(20)) >= 5
        durable_node.restart()
        back(limiter)
        time.sleep(1.1)
        assert limiter.try_acquire("k").allowed


@pytest.mark.parametrize("op", ["reset", "refund"])
def test_a_debt_that_is_forgiven(op: str, node: Node) -> None:
    with Limiter("5/30d", store=node.bare_url + PATIENT, on_store_error="local") as limiter:
        limiter.try_acquire("other")
        node.kill()
        for _ in range(5):
            assert limiter.try_acquire("other").degraded
        for _ in range(5):
            assert limiter.try_acquire("k").allowed
        node.restart()
        back(limiter)
        if op == "reset":
            limiter.reset("k")
        else:
            limiter.refund("k", permits=5)
        assert [limiter.try_acquire("k").remaining for _ in range(3)] == [4, 3, 2]


def test_local_believes_a_refusal(node: Node) -> None:
    """Another process has spent everything, and we know: the outage is not worth a second quota."""
    with (
        Limiter("5/30d", store=node.bare_url + PATIENT, on_store_error="local") as limiter,
        Limiter("5/30d", store=node.bare_url + PATIENT) as other,
    ):
        other.try_acquire("k", permits=5)
        assert not limiter.try_acquire("k").allowed
        node.kill()
        assert not any(limiter.try_acquire("k").allowed for _ in range(10))


def test_cancelled_guard(node: Node) -> None:
    """A guarded async function that is cancelled gives back no more than it took."""

    async def check(limiter: Limiter) -> None:
        @limiter.limit(key="k")
        async def work() -> None: ...

        tasks = [asyncio.ensure_future(work()) for _ in range(2)]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        proxy.swallow_requests = False  # what is sent after the calls were given up arrives
        await asyncio.sleep(1.0)

    with FaultyProxy(node.port) as proxy, Limiter(QUOTA, store=proxy.url, timeout=0.3) as limiter:
        limiter.with_timeout(20).try_acquire("k", permits=50)
        proxy.swallow_requests = True
        asyncio.run(check(limiter))
    wait_until(lambda: spent(node) == 50, "as much as before")


def test_patient_caller(node: Node) -> None:
    """A caller with more time makes no other caller wait."""

    async def check(url: str) -> None:
        async with AsyncLimiter(QUOTA, store=url, timeout=0.2) as limiter:
            await limiter.try_acquire("k")
            proxy.swallow_replies = True
            with Pulse() as pulse:
                begun = time.monotonic()
                patient = asyncio.ensure_future(limiter.with_timeout(30).try_acquire("k"))
                assert (await limiter.try_acquire("k")).degraded
                took = time.monotonic() - begun
            assert took < 0.2 + pulse.slack
            proxy.cut()
            await patient

    with FaultyProxy(node.port) as proxy:
        asyncio.run(check(proxy.url))


def test_given_up_calls(node: Node) -> None:
    """All callers were hasty, and the replies come all the same."""

    async def check(url: str) -> None:
        async with AsyncLimiter(QUOTA, store=url, timeout=20) as limiter:
            await limiter.try_acquire("k", permits=5)
            proxy.delay = 20.0
            hasty = limiter.with_timeout(0.02)
            assert all(
                decision.degraded for decision in await asyncio.gather(*(hasty.try_acquire("k") for _ in "12345"))
            )
            proxy.delay = 0.0
            deadline = time.monotonic() + 20
            while (await limiter.peek("k", permits=0)).remaining != 95:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)

    with FaultyProxy(node.port) as proxy:
        asyncio.run(check(proxy.url))


def test_budget_with_a_client(node: Node) -> None:
    """A client that was handed in keeps to the time of a call."""
    with FaultyProxy(node.port) as proxy:
        client = redis.Redis.from_url(proxy.bare_url, socket_timeout=30)
        store = RedisStore(client)
        with Limiter(QUOTA, store=store) as limiter:
            assert not limiter.try_acquire("k").degraded
            proxy.swallow_replies = True
            begun = time.monotonic()
            assert limiter.with_timeout(0.05).try_acquire("k").degraded
            assert not limiter.health().healthy
            assert time.monotonic() - begun < 5
        store.close()
        client.close()


def test_slow_server(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    """It answers, but too late for a check, and it answers PING while it holds scripts up: one outage, one line."""
    with FaultyProxy(node.port) as proxy, Limiter(QUOTA, store=proxy.url, timeout=0.1) as limiter:
        limiter.try_acquire("k")
        with paused(node):
            deadline = time.monotonic() + 1
            while time.monotonic() < deadline:
                assert limiter.try_acquire("k").degraded
                time.sleep(0.01)
            assert limiter.store_health().opened == 1
        back(limiter)
        proxy.delay = 0.3
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline:
            limiter.try_acquire("k")
            time.sleep(0.01)
        assert limiter.store_health().opened <= 3


def test_broken_together(node: Node) -> None:
    """A load balancer restarts: 32 callers lose their connections in the same moment, of a server that is well."""
    over = threading.Event()
    with FaultyProxy(node.port) as proxy, Limiter("1000000/30d", store=proxy.url, timeout=20) as limiter:
        degraded, answered = [0] * 32, [0] * 32

        def call(number: int) -> None:
            while not over.wait(0.001):
                alone = limiter.try_acquire("k").degraded
                degraded[number] += alone
                answered[number] += not alone

        def all_are_answered() -> None:
            before = list(answered)
            wait_until(lambda: all(map(operator.gt, answered, before)), "all callers are answered")

        threads = [threading.Thread(target=call, args=(number,)) for number in range(32)]
        for thread in threads:
            thread.start()
        for _ in range(3):
            all_are_answered()
            proxy.cut()
        all_are_answered()
        over.set()
        for thread in threads:
            thread.join()
        assert limiter.store_health().opened == 0
        assert sum(degraded) <= 3 * 32


@pytest.mark.parametrize("door", [Limiter, AsyncLimiter])
async def test_broken_late(door: Any, node: Node) -> None:
    """Others have told of the cut already; a call that began only then tells of it once more."""
    with FaultyProxy(node.port) as proxy:
        limiter = door("1000000/30d", store=proxy.url, timeout=20)

        async def degraded() -> bool:
            made = limiter.try_acquire("k")
            return bool((made if door is Limiter else await made).degraded)

        assert not await degraded()
        store = limiter.store
        told = (store.sync_executor() if door is Limiter else store.async_executor()).breakers()[0]
        for _ in range(FAILURES_TO_OPEN - 1):
            told.failed(redis.ConnectionError("reset"), time.monotonic())
        proxy.truncate = 0
        assert await degraded()
        assert told.opened == 0
        assert not await degraded()
        for _ in range(FAILURES_TO_OPEN):  # one that was made since then is one
            assert told.opened == 0
            proxy.truncate = 0
            assert await degraded()
        assert told.opened == 1
        await limiter.aclose() if door is AsyncLimiter else limiter.close()


def test_many_looks_are_one(node: Node) -> None:
    async def check() -> None:
        store = RedisStore(node.url)
        seen = await asyncio.gather(*(store.ahealth() for _ in range(200)))
        assert all(one is seen[0] for one in seen)
        await store.aclose()

    node.ask("CONFIG", "RESETSTAT")
    asyncio.run(check())
    assert node.ask("INFO", "stats")["total_connections_received"] < 5


def test_log_of_a_bad_key(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    """One bad key does not fill the log."""
    node.ask("SADD", "rate_limiter:token_bucket:{bad}", "x")
    with Limiter(QUOTA, store=node.bare_url + PATIENT) as limiter:
        for _ in range(50):
            assert limiter.try_acquire("bad").degraded
            assert not limiter.try_acquire("good").degraded
    ours = [record for record in caplog.records if record.name.startswith("headgate")]
    assert len([record for record in ours if record.levelno >= logging.WARNING]) <= 2


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # a signal may come as a socket is handed on
def test_interrupts(node: Node) -> None:
    class Ring(Exception):
        pass

    def ring(*_: object) -> None:
        raise Ring

    with Limiter("1000000/30d", store=node.url, timeout=20, max_connections=2) as limiter:
        limiter.try_acquire("k")
        before = signal.signal(signal.SIGPROF, ring)
        try:
            for number in range(60):
                try:
                    signal.setitimer(signal.ITIMER_PROF, 0.0005 + number * 0.00001)
                    for _ in range(200):
                        limiter.try_acquire("k")
                    signal.setitimer(signal.ITIMER_PROF, 0)  # it may ring just before
                except Ring:
                    pass
        finally:
            signal.signal(signal.SIGPROF, before)
        gc.collect()
        connections = limiter.store.sync_executor().connections()[0]  # type: ignore[attr-defined]  # a RedisStore
        assert connections.in_use() == 0
        assert not limiter.try_acquire("k").degraded


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hunter2/x@h/0",
        "redis://:hunter2#x@h:1/0",
        "redis+sentinel://:hunter2/x@h:1/s/0",
        "redis://h/0?pass%77ord=hunter2&foo=1",
        b"redis://:hunter2@h",
    ],
)
def test_no_password_in_a_message(url: Any) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        RedisStore(url)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("redis://h/abc", "number"),
        ("redis://h/1/2", "number"),
        ("redis://h1,h2/0", "one host"),
        ("redis://h:0", "port"),
        ("redis+cluster://h:1/3", "database 0"),
        ("unix://", "path"),
        ("rediss://h?ssl_cert_reqs=bogus", "ssl_cert_reqs|Invalid"),
        ("redis://h?redis_connect_func=x", "unknown parameter"),
        ("redis://h?credential_provider=x", "unknown parameter"),
        ("redis://h?socket_keepalive_options=x", "unknown parameter"),
    ],
)
def test_bad_url(url: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        RedisStore(url)
