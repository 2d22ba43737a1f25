"""Three states, a fleet that agrees on them, and never more probes than asked for."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import Context
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headgate import Limiter
from headgate.coordination import AsyncCircuitBreaker, CircuitBreaker, Lock, Pool
from headgate.coordination.active_calls import CallLayer
from headgate.errors import CircuitOpen, HeadgateError, InvalidKey, StoreUnavailable
from headgate.testing import ManualClock
from tests.support.awaited import Tools
from tests.support.clocks import until_async
from tests.support.clusters import wait_until
from tests.support.proxy import FaultyProxy
from tests.support.servers import Server, free_port

ROOT = Path(__file__).parent.parent.parent
LONG = 20.0


def fail(breaker: CircuitBreaker, times: int = 1) -> None:
    for _ in range(times):
        with pytest.raises(ZeroDivisionError), breaker:
            print(1 / 0)


async def test_the_three_states(tools: Tools, url: str, name: str, clock: ManualClock) -> None:
    """By hand, with the defaults of the document: 3 failures, 10 minutes, 3 successes."""
    breaker = tools.CircuitBreaker(name, store=url, clock=clock)
    assert await breaker.state == "CLOSED"
    await breaker.record_failure()
    await breaker.record_failure()
    await breaker.record_success()
    await breaker.record_failure()
    await breaker.record_failure()
    assert await breaker.state == "CLOSED", "they must be in a row"
    await breaker.record_failure()
    assert await breaker.state == "OPEN"
    assert not await breaker.try_recover()
    clock.advance(599.9)
    assert not await breaker.try_recover()
    clock.advance(0.1)
    assert await breaker.state == "OPEN"
    assert await breaker.try_recover()
    assert await breaker.state == "HALF_OPEN"
    assert not await breaker.try_recover()
    await breaker.record_success()
    await breaker.record_success()
    assert await breaker.state == "HALF_OPEN"
    await breaker.record_success()
    assert await breaker.state == "CLOSED"


def test_with(url: str, name: str, clock: ManualClock) -> None:
    """`with` counts failures and raises `CircuitOpen` with the time to wait."""
    breaker = CircuitBreaker(name, store=url, open_for=60.0, clock=clock)
    fail(breaker, 3)
    with pytest.raises(CircuitOpen) as caught, breaker:
        raise AssertionError("it is open")
    assert caught.value.retry_after == 60.0
    assert name in str(caught.value)
    clock.advance(59)
    with pytest.raises(CircuitOpen) as caught, breaker:
        raise AssertionError("it is open")
    assert caught.value.retry_after == 1.0
    clock.advance(1)
    with breaker:
        assert breaker.state == "HALF_OPEN"
    fail(breaker)
    assert breaker.state == "OPEN", "one failure is enough now"
    clock.advance(60)
    for _ in range(3):
        assert breaker.call(max, 1, 2) == 2
    assert breaker.state == "CLOSED"


async def test_async(url: str, name: str, clock: ManualClock) -> None:
    """The same under asyncio, with async functions."""
    breaker = AsyncCircuitBreaker(name, store=url, failures=2, open_for=60.0, successes=2, clock=clock)

    async def bad() -> None:
        print(1 / 0)

    async def good(value: int) -> int:
        return value

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            await breaker.call(bad)
    assert await breaker.state == "OPEN"
    assert CircuitBreaker(name, store=url, clock=clock).state == "OPEN", "threads and tasks share it"
    with pytest.raises(CircuitOpen):
        await breaker.call(good, 5)
    clock.advance(60)
    assert await breaker.try_recover()
    assert await breaker.call(good, 5) == 5
    await breaker.record_success()
    assert await breaker.state == "CLOSED"
    await breaker.record_failure()
    await breaker.force_open()
    await breaker.reset()
    await breaker.force_closed()
    assert await breaker.state == "CLOSED"


async def test_cancelled_probe(url: str, name: str, clock: ManualClock) -> None:
    """A cancelled probe frees its place, and counts for nothing."""
    breaker = AsyncCircuitBreaker(name, store=url, open_for=1.0, successes=1, clock=clock)
    for _ in range(3):
        await breaker.record_failure()
    clock.advance(1)
    inside = asyncio.Event()

    async def slow() -> None:
        inside.set()
        await asyncio.sleep(LONG)

    probe = asyncio.create_task(breaker.call(slow))
    await inside.wait()
    with pytest.raises(CircuitOpen):
        await breaker.call(asyncio.sleep, 0)
    probe.cancel()
    with pytest.raises(asyncio.CancelledError):
        await probe
    await breaker.call(asyncio.sleep, 0)
    assert await breaker.state == "CLOSED", "it counted as nothing, and the next as a success"


def test_ignored(url: str, name: str, clock: ManualClock) -> None:
    """Ignored exceptions count for nothing."""
    by_type = CircuitBreaker(name, store=url, failures=1, ignore=(ZeroDivisionError,), clock=clock)
    by_function = CircuitBreaker(name, store=url, ignore=lambda error: "zero" in str(error), clock=clock)
    fail(by_type, 5)
    fail(by_function, 5)
    assert by_type.state == "CLOSED"
    with pytest.raises(KeyboardInterrupt), by_type:
        raise KeyboardInterrupt
    assert by_type.state == "CLOSED"
    with pytest.raises(KeyError), by_type:
        raise KeyError
    assert by_type.state == "OPEN"


def test_recorded_failure(url: str, name: str, clock: ManualClock) -> None:
    """A failure recorded within `with` is the result of the call."""
    breaker = CircuitBreaker(name, store=url, failures=2, clock=clock)
    for _ in range(2):
        with breaker:
            breaker.record_failure()  # the end of the block is no success after that
    assert breaker.state == "OPEN"


def test_late_results(url: str, name: str, clock: ManualClock) -> None:
    """A call that began before the breaker opened ends when it is half open: that is nobody's probe."""
    breaker, entered, leave = CircuitBreaker(name, store=url, clock=clock), threading.Event(), threading.Event()

    def slow() -> None:
        entered.set()
        assert leave.wait(LONG)
        breaker.record_failure()

    thread = threading.Thread(target=breaker.call, args=(slow,))
    thread.start()
    assert entered.wait(LONG)
    fail(breaker, 3)
    clock.advance(600)
    assert breaker.try_recover()
    leave.set()
    thread.join()
    assert breaker.state == "HALF_OPEN"


def test_50_workers_half_open(url: str, name: str, clock: ManualClock) -> None:
    """Of 50 callers at once, as many probe as successes are missing."""
    breaker = CircuitBreaker(name, store=url, open_for=1.0, successes=3, lease=5.0, clock=clock)
    breaker.force_open()
    breaker.reset()
    fail(breaker, 3)
    clock.advance(1)
    through, refused = [], []
    done, start = threading.Event(), threading.Barrier(50)

    def work() -> None:
        mine = CircuitBreaker(name, store=url, open_for=1.0, successes=3, lease=5.0, clock=clock)
        start.wait()
        try:
            with mine:
                through.append(1)
                done.wait(LONG)
        except CircuitOpen as error:
            refused.append(error.retry_after)

    threads = [threading.Thread(target=work) for _ in range(50)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(through) + len(refused) == 50, "all have been answered")
    assert len(through) == 3
    assert all(0 < wait <= 5.0 for wait in refused)
    done.set()
    for thread in threads:
        thread.join()
    assert breaker.state == "CLOSED"


def test_endless_probe(url: str, name: str, clock: ManualClock) -> None:
    """The place of a probe that never ends is free after its lease."""
    breaker = CircuitBreaker(name, store=url, open_for=1.0, successes=1, lease=5.0, clock=clock)
    fail(breaker, 3)
    clock.advance(1)
    Context().run(breaker.__enter__)  # by another caller, which dies
    refused = 0
    for _ in range(10):
        try:
            with breaker:
                break
        except CircuitOpen:
            refused += 1
            clock.advance(1)
    assert refused == 5
    assert breaker.state == "CLOSED"


def test_rate(url: str, name: str, clock: ManualClock) -> None:
    """One in three is fine, however many are in a row; half of them is not. What is old is forgotten."""
    breaker = CircuitBreaker(name, store=url, rate=0.5, window=60.0, min_calls=10, clock=clock)
    for number in range(30):
        breaker.record_failure() if number % 3 == 0 else breaker.record_success()
        clock.advance(0.1)
    assert breaker.state == "CLOSED"
    clock.advance(70)
    for _ in range(9):
        breaker.record_failure()
    assert breaker.state == "CLOSED", "too few to tell"
    breaker.record_failure()
    assert breaker.state == "OPEN"


def test_on_change(url: str, name: str, clock: ManualClock) -> None:
    """`on_change` is called once for each change."""
    heard: list[tuple[str, str, str]] = []
    fleet = [
        CircuitBreaker(name, store=url, on_change=lambda *change: heard.append(change), clock=clock) for _ in "abc"
    ]
    for breaker in fleet:
        breaker.record_failure()
    clock.advance(600)
    for breaker in fleet:
        with breaker:
            pass
    states = [(was, now) for _, was, now in heard]
    assert states == [("CLOSED", "OPEN"), ("OPEN", "HALF_OPEN"), ("HALF_OPEN", "CLOSED")]


def test_on_change_that_fails(url: str, name: str, clock: ManualClock) -> None:
    """An error of `on_change` is logged, and the call goes on."""
    breaker = CircuitBreaker(name, store=url, failures=1, on_change=lambda *_: print(1 / 0), clock=clock)
    breaker.record_failure()
    assert breaker.state == "OPEN"


def test_forced(url: str, name: str, clock: ManualClock) -> None:
    """A forced state lasts until `reset`."""
    breaker = CircuitBreaker(name, store=url, clock=clock)
    breaker.force_open()
    clock.advance(86_400)
    with pytest.raises(CircuitOpen), breaker:
        raise AssertionError("it is open")
    assert not breaker.try_recover()
    breaker.force_closed()
    fail(breaker, 10)
    assert breaker.state == "CLOSED"
    breaker.reset()
    fail(breaker, 3)
    assert breaker.state == "OPEN"
    breaker.reset()
    assert breaker.state == "CLOSED"


def test_calls_run_at_once(url: str, name: str) -> None:
    """Calls through one breaker run at the same time."""
    breaker, barrier = CircuitBreaker(name, store=url), threading.Barrier(5)
    threads = [threading.Thread(target=breaker.call, args=(barrier.wait, LONG)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not barrier.broken, "five calls were inside at once"


def test_redis_keys(redis_server: Server) -> None:
    """The documented hash."""
    breaker = CircuitBreaker("api", store=redis_server.url, open_for=60)
    breaker.record_failure()
    client = redis_server.client()
    assert client.type("circuit_breaker:{api}") == "hash"
    assert client.hgetall("circuit_breaker:{api}")["state"] == "CLOSED"
    assert client.hgetall("circuit_breaker:{api}")["consecutive_failures"] == "1"
    breaker.record_failure()
    breaker.record_failure()
    assert client.hgetall("circuit_breaker:{api}")["state"] == "OPEN"
    assert client.pttl("circuit_breaker:{api}") > 60_000
    assert all(client.pttl(key) > 0 for key in client.keys("*"))


def test_redis_is_down(name: str, clock: ManualClock) -> None:
    """A breaker of the same rules in this process, shared by all of the same name."""
    url = f"redis://127.0.0.1:{free_port()}?timeout=0.5"
    breaker = CircuitBreaker(name, store=url, open_for=60, clock=clock)
    assert breaker.state == "CLOSED"
    fail(breaker, 3)
    with pytest.raises(CircuitOpen), CircuitBreaker(name, store=url, open_for=60, clock=clock):
        raise AssertionError("it is open")
    assert not breaker.try_recover()
    clock.advance(60)
    assert breaker.try_recover()
    for _ in range(3):
        with breaker:
            pass
    assert breaker.state == "CLOSED"
    breaker.close()


def test_redis_fails_during_a_call(mortal_server: Server, name: str) -> None:
    """A call that began on Redis ends without an error when Redis is gone."""
    breaker = CircuitBreaker(name, store=mortal_server.patient_url, failures=2)
    with breaker:
        mortal_server.kill()
        breaker.record_failure()
    fail(breaker)
    assert breaker.state == "OPEN"
    mortal_server.restart()
    wait_until(lambda: breaker.state == "CLOSED", "Redis decides again, and knows nothing")
    breaker.close()


PROBE = """
import sys, time
from headgate.coordination import CircuitBreaker
with CircuitBreaker(sys.argv[2], store=sys.argv[1], open_for=0.2, successes=1, lease=3.0):
    print("in", flush=True)
    time.sleep(60)
"""


def test_retry_after_half_open(url: str, name: str, clock: ManualClock) -> None:
    """A result may come any moment, so not when the lease is over; but less often the longer a probe takes."""
    breaker, other = (
        CircuitBreaker(name, store=url, open_for=60.0, successes=1, lease=30.0, clock=clock) for _ in range(2)
    )
    fail(breaker, 3)
    clock.advance(60)

    def wait_as_told() -> float:
        with pytest.raises(CircuitOpen) as caught:
            Context().run(other.call, lambda: None)  # by another caller
        clock.advance(caught.value.retry_after)
        return caught.value.retry_after

    with breaker:
        assert [wait_as_told() for _ in range(6)] == [1.0, 1.0, 2.0, 4.0, 8.0, 14.0]
        assert Context().run(other.call, lambda: "let in") == "let in", "the lease is over: whoever has it may be dead"


def test_killed_probe(redis_server: Server, name: str) -> None:
    """The place of a killed process is free after the lease."""
    breaker = CircuitBreaker(name, store=redis_server.patient_url, open_for=0.2, successes=1, lease=3.0)
    fail(breaker, 3)
    time.sleep(0.2)
    probe = subprocess.Popen(
        [sys.executable, "-c", PROBE, redis_server.patient_url, name], cwd=ROOT, stdout=subprocess.PIPE
    )
    assert probe.stdout and probe.stdout.readline() == b"in\n"
    with pytest.raises(CircuitOpen) as caught, breaker:
        raise AssertionError("the probe has the only place")
    assert caught.value.retry_after <= 3.0
    os.kill(probe.pid, signal.SIGKILL)
    probe.communicate()
    deadline = time.monotonic() + LONG
    while True:
        try:
            with breaker:
                break
        except CircuitOpen:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert breaker.state == "CLOSED"


# Ten workers that probe again and again, for nothing that counts, until they are told to succeed.
WORKERS = """
import sys, threading, time
import redis
from headgate.coordination import CircuitBreaker
from headgate.errors import CircuitOpen

url, name, port, me = sys.argv[1:]
seen = redis.Redis(port=int(port))
enter = seen.register_script('''
redis.call('SADD', 'inside', ARGV[1])
redis.call('INCR', 'entries')
redis.call('SET', 'most', math.max(tonumber(redis.call('GET', 'most') or 0), redis.call('SCARD', 'inside')))
''')

def work(who):
    breaker = CircuitBreaker(name, store=url, open_for=0.2, successes=3, lease=5.0, ignore=KeyError)
    while not seen.exists("over"):
        try:
            with breaker:
                enter(args=[who])
                time.sleep(0.02)
                seen.srem("inside", who)
                if not seen.exists("succeed"):
                    raise KeyError
        except KeyError:
            pass
        except CircuitOpen:
            seen.sadd("refused", who)
            time.sleep(0.02)

for number in range(10):
    threading.Thread(target=work, args=(f"{me} {number}",)).start()
"""


def test_50_workers_one_process_killed(redis_server: Server, name: str) -> None:
    """Never more probes at once than successes are missing, though all try all the time."""
    url, client = redis_server.patient_url, redis_server.client()
    breaker = CircuitBreaker(name, store=url, open_for=0.2, successes=3, lease=5.0)
    fail(breaker, 3)
    command = [sys.executable, "-c", WORKERS, url, name, str(redis_server.port)]
    processes = {str(number): subprocess.Popen([*command, str(number)], cwd=ROOT) for number in range(5)}
    try:
        wait_until(lambda: client.scard("refused") == 50, "all have been refused", timeout=40)
        while not (inside := client.smembers("inside")):
            pass
        victim = next(iter(inside)).split()[0]
        processes[victim].kill()
        processes[victim].wait()
        client.srem("inside", *(f"{victim} {number}" for number in range(10)))
        entries = int(client.get("entries"))
        wait_until(lambda: int(client.get("entries")) >= entries + 20, "those who live go on", timeout=LONG)
        assert client.get("most") == "3"
        assert breaker.state == "HALF_OPEN"
        client.set("succeed", "now")
        wait_until(lambda: breaker.state == "CLOSED", "three have succeeded, one in place of the dead", timeout=LONG)
    finally:
        client.set("over", "now")
        for process in processes.values():
            process.kill()
            process.wait()


async def later(*_: Any) -> bool:
    return False


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"name": ""}, InvalidKey, "256"),
    ({"name": "x", "failures": 0}, ValueError, "failures"),
    ({"name": "x", "failures": 1.5}, ValueError, "failures"),
    ({"name": "x", "successes": 0}, ValueError, "successes"),
    ({"name": "x", "open_for": 0}, ValueError, "open_for"),
    ({"name": "x", "open_for": float("nan")}, ValueError, "open_for"),
    ({"name": "x", "lease": -1}, ValueError, "lease"),
    ({"name": "x", "rate": 0}, ValueError, "rate"),
    ({"name": "x", "rate": 1.5}, ValueError, "rate"),
    ({"name": "x", "window": "60"}, ValueError, "window"),
    ({"name": "x", "min_calls": True}, ValueError, "min_calls"),
    ({"name": "x", "ignore": "KeyError"}, ValueError, "ignore"),
    ({"name": "x", "ignore": ("KeyError",)}, ValueError, "ignore"),
    ({"name": "x", "ignore": later}, ValueError, "ignore"),  # would be true of everything
    ({"name": "x", "on_change": later}, ValueError, "on_change"),  # would never run
]


@pytest.mark.parametrize("door", [CircuitBreaker, AsyncCircuitBreaker])
@pytest.mark.parametrize(
    ("arguments", "error", "word"), BAD, ids=[", ".join(row[0]) + f" {number}" for number, row in enumerate(BAD)]
)
def test_bad_arguments(door: Any, arguments: dict[str, Any], error: type[Exception], word: str) -> None:
    """The error says what would be right."""
    with pytest.raises(error, match=word):
        door(**arguments)


def test_exceptions() -> None:
    """`CircuitOpen` is an error of headgate."""
    assert issubclass(CircuitOpen, HeadgateError)


def test_fewer_successes_half_open(url: str, name: str, clock: ManualClock) -> None:
    """With fewer successes to reach, one more probe is always admitted."""
    before = CircuitBreaker(name, store=url, failures=1, open_for=10, successes=3, clock=clock)
    before.record_failure()
    clock.advance(10)
    with before:
        pass
    assert before.state == "HALF_OPEN"
    after = CircuitBreaker(name, store=url, failures=1, open_for=10, successes=1, clock=clock)
    with after:
        pass
    assert after.state == "CLOSED"


def test_reset_clears_the_rate(url: str, name: str, clock: ManualClock) -> None:
    """`reset` drops the counts of the window."""
    breaker = CircuitBreaker(name, store=url, rate=0.5, min_calls=4, clock=clock)
    for _ in range(3):
        breaker.record_failure()
    breaker.reset()
    breaker.record_failure()
    assert breaker.state == "CLOSED"


def test_rate_is_kept(name: str, clock: ManualClock) -> None:
    """Memory keeps the counts of a window that is not over."""
    breaker = CircuitBreaker(name, rate=0.5, min_calls=20, clock=clock)
    other = CircuitBreaker(name + "'", clock=clock)
    for _ in range(19):
        breaker.record_failure()
    for _ in range(1100):
        assert other.state == "CLOSED"
    breaker.record_failure()
    assert breaker.state == "OPEN"


def test_left_in_another_thread(url: str, name: str) -> None:
    """A call may end in another thread than it began."""
    breaker = CircuitBreaker(name, store=url, failures=1)
    thread = threading.Thread(target=breaker.__enter__)
    thread.start()
    thread.join()
    breaker.__exit__(OSError, OSError(), None)
    assert breaker.state == "OPEN"
    with pytest.raises(RuntimeError, match="left"):
        breaker.__exit__(None, None, None)


def test_local_state_ends_with_the_outage(mortal_server: Server, name: str) -> None:
    """The local state is dropped when Redis answers again."""
    breaker = CircuitBreaker(name, store=mortal_server.patient_url, failures=2)
    breaker.record_success()
    mortal_server.kill()
    breaker.record_failure()
    breaker.record_failure()
    assert breaker.state == "OPEN"
    mortal_server.restart()
    wait_until(lambda: breaker.state == "CLOSED", "Redis answers")
    mortal_server.kill()
    with breaker:
        pass  # refused, it would be CircuitOpen


def test_ignore_that_fails(name: str) -> None:
    """An error of `ignore` does not replace the error of the call."""
    breaker = CircuitBreaker(name, failures=1, ignore=lambda error: bool(1 / 0))
    with pytest.raises(KeyError), breaker:
        raise KeyError
    assert breaker.state == "OPEN"


async def test_plain_function_async(name: str) -> None:
    """`AsyncCircuitBreaker.call` takes plain functions, too."""
    breaker = AsyncCircuitBreaker(name, failures=1)
    assert await breaker.call(max, 1, 2) == 2
    assert await breaker.call(lambda: asyncio.sleep(0, 5)) == 5, "one that gives something to await is awaited"
    assert await breaker.state == "CLOSED"
    with pytest.raises(ZeroDivisionError):
        await breaker.call(lambda: 1 / 0)
    assert await breaker.state == "OPEN"


@pytest.mark.parametrize("options", [{"ignore": int}, {"ignore": (5,)}, {"on_change": 5}], ids=repr)
def test_bad_functions(options: Any) -> None:
    """`ignore` and `on_change` must be plain functions."""
    with pytest.raises(ValueError, match=next(iter(options))):
        CircuitBreaker("b", **options)


def test_a_redis_that_is_read_only(mortal_server: Server, name: str) -> None:
    """It still says that the breaker is closed, and hears of no failure: that is none that answers."""
    client = mortal_server.client()
    breaker = CircuitBreaker(name, store=mortal_server.patient_url, failures=3)
    breaker.record_success()
    client.replicaof("127.0.0.1", str(free_port()))
    for _ in range(2):
        fail(breaker, 3)
        assert breaker.state == "OPEN"
        with pytest.raises(CircuitOpen), breaker:
            raise AssertionError("it is open")
        client.replicaof("NO", "ONE")
        assert breaker.state == "CLOSED", "Redis decides again"
        client.replicaof("127.0.0.1", str(free_port()))
    breaker.close()


def test_a_redis_that_refuses(redis_server: Server, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Somebody else's key is in its place: it goes on alone, and says so, once."""
    breaker = CircuitBreaker(name, store=redis_server.patient_url, failures=3)
    with redis_server.client() as client:
        client.rpush(breaker._runner.channel, "not ours")
        fail(breaker, 3)
        assert breaker.state == "OPEN"
        assert [each.getMessage() for each in caplog.records if "alone" in each.getMessage()] == [
            each.getMessage() for each in caplog.records if "WRONGTYPE" in each.getMessage()
        ]
        assert len([each for each in caplog.records if "alone" in each.getMessage()]) == 1
        client.delete(breaker._runner.channel)
    assert breaker.state == "CLOSED"
    assert "shares its state again" in caplog.text


def test_own_refusals_are_ignored(url: str, name: str, clock: ManualClock) -> None:
    """A limiter, a pool or another breaker says no: the server was not asked."""
    breaker = CircuitBreaker(name, store=url, failures=1, clock=clock)
    other = CircuitBreaker(f"{name}'", store=url, clock=clock)
    limiter, pool = Limiter("1/hour"), Pool(name, store=url, clock=clock)
    other.force_open()
    limiter.try_acquire("a")
    for refuse in (other.__enter__, partial(limiter.acquire, "a", timeout=0), partial(pool.acquire, timeout=0)):
        with pytest.raises(HeadgateError):
            breaker.call(refuse)
    assert breaker.state == "CLOSED"
    breaker.reset()
    fail(breaker)
    assert breaker.state == "OPEN"


async def test_recorded_in_a_task_of_its_own(url: str, name: str, clock: ManualClock) -> None:
    """As `asyncio.wait_for` may do it."""
    breaker = AsyncCircuitBreaker(name, store=url, failures=2, clock=clock)
    for _ in range(2):
        async with breaker:
            await asyncio.create_task(breaker.record_failure())
    assert await breaker.state == "OPEN"


async def test_recorded_after_the_call(url: str, name: str, clock: ManualClock) -> None:
    """A task that outlives the block it was started in is not inside any more."""
    breaker, over = AsyncCircuitBreaker(name, store=url, failures=1, clock=clock), asyncio.Event()

    async def late() -> None:
        await over.wait()
        await breaker.record_failure()

    async with breaker:
        task = asyncio.create_task(late())
        await asyncio.sleep(0)
    over.set()
    await task
    assert await breaker.state == "OPEN"


async def test_calls_that_never_end(name: str) -> None:
    """Calls that never end do not fill the memory."""
    breaker = AsyncCircuitBreaker(name)
    for _ in range(1500):
        await asyncio.create_task(breaker.__aenter__())
    for _ in range(1500):
        await breaker.__aenter__()  # in one task
    assert len(breaker._calls._open) == 1000
    gc.collect()
    kept = sum(type(each) is CallLayer and each.owner is breaker._calls for each in gc.get_objects())
    assert kept <= 1001


def test_left_in_another_thread_while_inside(url: str, name: str, clock: ManualClock) -> None:
    """The one that was entered last is left; the other is still a probe."""
    breaker = CircuitBreaker(name, store=url, failures=1, open_for=10, successes=2, clock=clock)
    breaker.record_failure()
    clock.advance(10)
    with breaker:
        for method in (breaker.__enter__, partial(breaker.__exit__, OSError, KeyboardInterrupt(), None)):
            with ThreadPoolExecutor(1) as executor:
                executor.submit(Context().run, method).result()
    assert breaker.state == "HALF_OPEN"
    with breaker:
        pass
    assert breaker.state == "CLOSED", "the body was the first success"


def test_async_function_refused(name: str) -> None:
    """`CircuitBreaker.call` refuses async functions, without calling them."""
    breaker, called = CircuitBreaker(name), list[int]()

    async def function() -> None:
        called.append(1)

    class Callable:
        async def __call__(self) -> None:
            called.append(1)

    for each in (function, partial(function), Callable()):
        with pytest.raises(TypeError, match="AsyncCircuitBreaker"):
            _ = breaker.call(each)
    assert not called


def test_forced_in_redis(redis_server: Server, name: str) -> None:
    """However long it takes until somebody resets it."""
    breaker, key = CircuitBreaker(name, store=redis_server.url), f"circuit_breaker:{{{name}}}"
    breaker.force_open()
    assert redis_server.client().pttl(key) == -1
    breaker.reset()
    assert redis_server.client().pttl(key) > 0


def test_forced_in_memory(name: str, clock: ManualClock) -> None:
    """A forced state is never swept."""
    breaker, other = CircuitBreaker(name, clock=clock), CircuitBreaker(name + "'", clock=clock)
    breaker.force_open()
    clock.advance(400 * 86_400)
    for _ in range(1100):
        assert other.state == "CLOSED"
    assert breaker.state == "OPEN"


def test_number_of_probes(url: str, name: str, clock: ManualClock) -> None:
    """No more probes at once than successes are missing."""
    breaker = CircuitBreaker(name, store=url, failures=1, open_for=10, successes=2, clock=clock)
    breaker.record_failure()
    clock.advance(10)
    with breaker:
        pass
    with breaker, pytest.raises(CircuitOpen):
        Context().run(breaker.__enter__)  # by another caller: one is missing, and under way
    assert breaker.state == "CLOSED"


def test_a_server_whose_clock_is_behind(redis_server: Server, name: str) -> None:
    """After a failover, say: nobody waits for longer than it is open."""
    breaker, client = CircuitBreaker(name, store=redis_server.url, failures=1, open_for=60), redis_server.client()
    breaker.record_failure()
    client.hincrby(f"circuit_breaker:{{{name}}}", "opened_at", 3_600_000_000)
    with pytest.raises(CircuitOpen) as caught, breaker:
        raise AssertionError("it is open")
    assert caught.value.retry_after <= 60


def test_keys_expire(redis_server: Server, name: str) -> None:
    """All keys of a breaker that is not forced expire."""
    client, clock = redis_server.client(), ManualClock()
    url = redis_server.patient_url
    breaker = CircuitBreaker(name, store=url, rate=0.5, min_calls=2, window=60, open_for=10, lease=30, clock=clock)
    breaker.record_failure()
    assert 0 < client.pttl(f"circuit_breaker:{{{name}}}:window") <= 120_000
    breaker.record_failure()
    clock.advance(10)
    with breaker:
        assert 0 < client.pttl(f"circuit_breaker:{{{name}}}:probes") <= 30_000
        assert all(client.pttl(key) > 0 for key in client.keys("*"))


async def test_lost_admission_is_undone(redis_server: Server, name: str) -> None:
    """Cancelled while it asks: the place of the probe is free long before its lease is over."""
    with FaultyProxy(redis_server.port) as proxy:
        rules: Any = {"failures": 1, "open_for": 0.05, "successes": 1, "lease": 100.0}
        direct = AsyncCircuitBreaker(name, store=redis_server.patient_url, **rules)
        breaker = AsyncCircuitBreaker(name, store=f"{proxy.bare_url}?timeout=10", **rules)
        await direct.record_failure()
        while not await direct.try_recover():  # noqa: ASYNC110  # nobody tells when it is time
            await asyncio.sleep(0.01)
        before, proxy.hold_back = proxy.held_back, 30.0
        task = asyncio.create_task(breaker.__aenter__())
        await until_async(lambda: proxy.held_back > before)
        with pytest.raises(CircuitOpen):
            await direct.__aenter__()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        proxy.cut()  # nobody waits for what is held back
        probes = f"circuit_breaker:{{{name}}}:probes"
        await until_async(lambda: not redis_server.client().exists(probes))
        async with direct:
            pass
        assert await direct.state == "CLOSED"
        await breaker.aclose()


async def test_cancelled_report_is_retried(redis_server: Server, name: str) -> None:
    """A report that was cancelled is retried in the background."""
    with FaultyProxy(redis_server.port) as proxy:
        breaker = AsyncCircuitBreaker(name, store=f"{proxy.bare_url}?timeout=10", failures=1)
        assert await breaker.state == "CLOSED"
        proxy.swallow_requests = True
        task = asyncio.create_task(breaker.record_failure())
        await until_async(lambda: proxy.swallowed)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        proxy.swallow_requests = False
        proxy.cut()  # nobody waits for what was swallowed
        key = f"circuit_breaker:{{{name}}}"
        await until_async(lambda: redis_server.client().hget(key, "state") == "OPEN")
        await breaker.aclose()


def test_what_began_alone_ends_alone(mortal_server: Server, name: str) -> None:
    """Redis is back when the call ends: it did not let it in, and its result is about another time."""
    url = mortal_server.patient_url
    breaker = CircuitBreaker(name, store=url, failures=1)

    def answers() -> bool:
        try:
            return Lock(name, store=url).acquire(timeout=0)
        except StoreUnavailable:
            return False

    mortal_server.kill()
    breaker.__enter__()
    mortal_server.restart()
    direct = CircuitBreaker(name, store=f"{mortal_server.bare_url}?timeout=10", failures=1)
    wait_until(answers, "Redis is back")
    breaker.__exit__(OSError, OSError(), None)
    assert direct.state == "CLOSED"
    breaker.close()


async def half_open(breaker: Any, clock: ManualClock) -> None:
    """Open it, and wait until the next call may probe."""
    for _ in range(3):
        await breaker.record_failure()
    clock.advance(600)


@pytest.mark.parametrize("same", [True, False], ids=["one object", "two objects"])
async def test_layers_half_open(tools: Tools, same: bool, url: str, name: str, clock: ManualClock) -> None:
    """One call through two layers of a breaker is one probe: three calls close it, not a state that expires."""
    outer = tools.CircuitBreaker(name, store=url, clock=clock)
    inner = outer if same else tools.CircuitBreaker(name, store=url, clock=clock)
    await half_open(outer, clock)
    for _ in range(3):
        assert await outer.state != "CLOSED"
        async with outer:
            async with inner:
                pass
            async with inner:
                pass
    assert await outer.state == "CLOSED"


@pytest.mark.parametrize("same", [True, False], ids=["one object", "two objects"])
async def test_layers_closed(tools: Tools, same: bool, url: str, name: str, clock: ManualClock) -> None:
    """A failure counts once, however many layers it passes; also one that an outer layer catches."""
    outer = tools.CircuitBreaker(name, store=url, clock=clock)
    inner = outer if same else tools.CircuitBreaker(name, store=url, clock=clock)
    with pytest.raises(ZeroDivisionError):
        async with outer, inner, outer:
            print(1 / 0)
    assert await outer.failure_count == 1
    async with outer:
        with pytest.raises(ZeroDivisionError):
            async with inner:
                print(1 / 0)
    assert await outer.failure_count == 2
    async with outer:
        with pytest.raises(ZeroDivisionError):
            async with inner:
                print(1 / 0)
        async with inner:
            pass
    assert await outer.failure_count == 0, "it was tried again, and succeeded"
    with suppress(ZeroDivisionError):
        async with outer:
            async with inner:
                pass
            print(1 / 0)
    assert await outer.failure_count == 1, "what the outer layer saw counts, too"
    with suppress(asyncio.CancelledError):
        async with outer:
            with pytest.raises(ZeroDivisionError):
                async with inner:
                    print(1 / 0)
            raise asyncio.CancelledError
    assert await outer.failure_count == 2, "a cancellation takes nothing back"


async def test_layers_recorded(tools: Tools, url: str, name: str, clock: ManualClock) -> None:
    """What is recorded in an inner layer is the result of the whole call."""
    breaker = tools.CircuitBreaker(name, store=url, clock=clock)
    async with breaker, breaker:
        await breaker.record_failure()
    assert await breaker.failure_count == 1
    with suppress(ZeroDivisionError):
        async with breaker, breaker:
            await breaker.record_success()
            print(1 / 0)
    assert await breaker.failure_count == 0


async def test_layers_in_a_child_task(url: str, name: str, clock: ManualClock) -> None:
    """A task that is started inside a call is part of it until the call ends; then it is a caller like any other."""
    breaker, over = AsyncCircuitBreaker(name, store=url, clock=clock), asyncio.Event()
    await half_open(breaker, clock)

    async def inner() -> None:
        async with breaker:
            await over.wait()

    async with breaker:
        early, late = asyncio.create_task(breaker.call(asyncio.sleep, 0)), asyncio.create_task(inner())
        await early
    assert await breaker.state == "HALF_OPEN"
    over.set()
    await late
    async with breaker:
        pass
    assert await breaker.state == "HALF_OPEN", "one that outlives the call counts for nothing"
    await asyncio.create_task(breaker.call(asyncio.sleep, 0))
    assert await breaker.state == "CLOSED"


def test_layers_of_a_call_that_takes_long(url: str, name: str, clock: ManualClock) -> None:
    """Its layers are one call for a lease; a layer entered later asks again, and may be refused."""
    breaker = CircuitBreaker(name, store=url, lease=30.0, clock=clock)
    with breaker:
        CircuitBreaker(name, store=url, clock=clock).force_open()
        clock.advance(29)
        with breaker:
            clock.advance(2)
        with pytest.raises(CircuitOpen), breaker:
            raise AssertionError("it is open")


def test_layers_in_contexts_of_their_own(url: str, name: str, clock: ManualClock) -> None:
    """A breaker cannot know that two threads are layers of one call. It closes all the same, and soon."""
    breaker = CircuitBreaker(name, store=url, clock=clock)
    for _ in range(3):
        breaker.record_failure()
    clock.advance(600)

    def inner() -> None:
        with ThreadPoolExecutor(1) as executor:
            executor.submit(Context().run, lambda: breaker.call(max, 1, 2)).result()  # a thread may inherit a context

    refused = 0
    while breaker.state != "CLOSED":
        try:
            breaker.call(inner)
        except CircuitOpen:
            refused += 1
            assert refused <= 3
    assert refused


async def test_failure_count(tools: Tools, url: str, name: str, clock: ManualClock) -> None:
    """Failures in a row, which open it; 0 once it is open."""
    breaker = tools.CircuitBreaker(name, store=url, clock=clock)
    assert await breaker.failure_count == 0
    for count in (1, 2):
        await breaker.record_failure()
        assert await breaker.failure_count == count
    await breaker.record_success()
    assert await breaker.failure_count == 0
    for _ in range(3):
        await breaker.record_failure()
    assert (await breaker.state, await breaker.failure_count) == ("OPEN", 0)


async def test_decorator(url: str, name: str, clock: ManualClock) -> None:
    """A breaker around a function; each kind takes its own kind of function."""
    breaker = CircuitBreaker(name, store=url, failures=1, clock=clock)
    async_breaker = AsyncCircuitBreaker(name, store=url, failures=1, clock=clock)

    @breaker
    def divide(a: int, b: int) -> float:
        """Divide."""
        return a / b

    @async_breaker
    async def divide_async(a: int, *, b: int) -> float:
        return a / b

    assert (divide(4, b=2), divide.__name__, divide.__doc__) == (2.0, "divide", "Divide.")
    assert await divide_async(4, b=2) == 2.0
    with pytest.raises(ZeroDivisionError):
        await divide_async(1, b=0)
    with pytest.raises(CircuitOpen):
        divide(1, 1)
    with pytest.raises(CircuitOpen):
        await divide_async(1, b=1)


async def _coroutine_function() -> None: ...
def _generator_function() -> Iterator[int]:
    yield 1


async def _async_generator_function() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("kind", "function", "word"),
    [
        (CircuitBreaker, _coroutine_function, "use AsyncCircuitBreaker"),
        (CircuitBreaker, _generator_function, "with"),
        (CircuitBreaker, _async_generator_function, "with"),
        (CircuitBreaker, 5, "function"),
        (AsyncCircuitBreaker, print, "use CircuitBreaker"),
        (AsyncCircuitBreaker, _generator_function, "with"),
        (AsyncCircuitBreaker, _async_generator_function, "with"),
        (AsyncCircuitBreaker, 5, "function"),
    ],
)
def test_decorator_wrong_kind(kind: Any, function: Any, word: str) -> None:
    """Each kind of breaker refuses the other kind of function, and generators."""
    with pytest.raises(TypeError, match=word):
        kind("x")(function)
