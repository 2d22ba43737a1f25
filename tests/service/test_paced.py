"""`wait` on a leaky bucket: answers come evenly spaced, each at its own place in time."""

import asyncio
import threading
import time
from urllib.parse import urlencode

import pytest

from headgate import AsyncLimiter
from headgate.errors import RateLimited
from headgate.service.paced import PacedChecks
from tests.service.conftest import Start
from tests.support.servers import Server
from tests.support.service import API, Service, eventually

RULES = """
[rules.drip]
quotas = "10/second burst 10"
algorithm = "leaky_bucket"

[rules.slow]
quotas = "1/10s burst 100"
algorithm = "leaky_bucket"

[rules.two]
quotas = ["5/second", "100/minute"]
algorithm = "leaky_bucket"
"""


@pytest.mark.parametrize("place", ["memory", "redis"])
def test_evenly_spaced(start: Start, redis_server: Server, place: str) -> None:
    """No answer comes before its place: the fifth of ten a second not before 0.4 s after the first was asked."""
    service = start("--store", "memory://" if place == "memory" else redis_server.patient_url, config=RULES)
    times: list[float] = []

    def ask() -> None:
        answer = service.check("k", rule="drip", wait=20)
        times.append(time.monotonic())
        assert answer.status == 200

    threads = [threading.Thread(target=ask) for _ in range(5)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, answered in enumerate(sorted(times)):
        assert answered - began >= number * 0.1 - 0.005
    labels = 'algorithm="LEAKY_BUCKET",allowed="true"'
    assert service.metrics()[f"rate_limiter_requests_total{{{labels}}}"] == 5


def test_too_late(start: Start) -> None:
    """A check whose place comes later than it would wait, or that finds no place, is denied and spends nothing."""
    service = start(config=RULES)
    assert service.check("k", rule="slow", permits=3, wait=20).status == 200
    denied = service.check("k", rule="slow", wait=20)
    assert denied.status == 429 and 1 <= int(denied.headers["retry-after"]) <= 10
    assert service.remaining("k", rule="slow").json["remaining"] == 97
    assert service.check("full", rule="slow", permits=100).status == 200
    assert service.check("full", rule="slow", wait=20).status == 429
    assert service.check("k", rule="slow", permits=101, wait=1).status == 400
    for _ in range(5):  # several quotas have no common place in time: such a check waits for its permits
        assert service.check("k", rule="two", wait=20).status == 200


def test_disconnected(start: Start) -> None:
    """A client that disconnects before its place has come spends nothing."""
    service: Service = start(config=RULES)
    assert service.check("k", rule="slow", permits=2).status == 200
    connection = service.connect()
    query = urlencode({"key": "k", "rule": "slow", "permits": 50, "wait": 30})
    connection.request("GET", f"{API}/check?{query}")

    def left() -> int:
        found: int = service.remaining("k", rule="slow").json["remaining"]
        return found

    eventually(lambda: left() <= 50, "the check to take its place")
    connection.close()
    eventually(lambda: left() >= 98, "the permits to go back")


def test_others_move_up() -> None:
    """When a check leaves, those behind it move up by its length, and its permits go back."""

    async def check() -> None:
        limiter, paced = AsyncLimiter("1/10s burst 100", algorithm="leaky_bucket"), PacedChecks()
        await limiter.try_acquire("k", 2)
        waits = []
        for permits in (1, 3, 1):
            waits.append(asyncio.ensure_future(paced.wait(limiter, "k", permits, 1000.0)))
            await asyncio.sleep(0.01)
        [line] = paced._lines.values()
        before = [place.due for place in line]
        waits[1].cancel()
        await asyncio.wait({waits[1]})
        await asyncio.sleep(0.01)
        after = [place.due for place in line]
        assert after[0] == before[0] and after[1] == pytest.approx(before[2] - 30.0)
        assert (await limiter.peek("k", 0)).remaining in (96, 97)
        with pytest.raises(RateLimited):
            await paced.wait(limiter, "k", 1, 1.0)
        for wait in (waits[0], waits[2]):
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        await asyncio.sleep(0.01)
        assert (await limiter.peek("k", 0)).remaining >= 98
        assert not paced._lines

    asyncio.run(check())
