"""A limiter that nobody closes leaves nothing behind that would trip `filterwarnings = error`."""

import subprocess
import sys

import pytest

from tests.servers import Server

PROGRAM = """
import asyncio, gc, sys
from headgate import AsyncHybridLimiter, AsyncLimiter

KEPT = []
door = {"AsyncLimiter": AsyncLimiter, "AsyncHybridLimiter": AsyncHybridLimiter}[sys.argv[2]]

async def use(keep, close):
    limiter = door("10000/minute", store=sys.argv[1], timeout=10.0)
    assert not (await limiter.try_acquire("k")).degraded
    assert all(await asyncio.gather(*[limiter.try_acquire(f"k{n}") for n in range(500)]))
    if keep:
        KEPT.append(limiter)
    if close:
        await limiter.aclose()

async def leave_early():
    await use(keep=False, close=False)
    gc.collect()
    await asyncio.sleep(0.05)

for keep in (False, True):
    for close in (False, True):
        asyncio.run(use(keep, close))
        gc.collect()
asyncio.run(leave_early())
if door is AsyncLimiter:
    for _ in range(2):  # one limiter in one event loop after another
        assert asyncio.run(KEPT[0].try_acquire("k"))
        gc.collect()
KEPT.clear()
gc.collect()
"""


@pytest.mark.parametrize("door", ["AsyncLimiter", "AsyncHybridLimiter"])
def test_no_warning_at_the_end_of_an_event_loop(door: str, redis_server: Server) -> None:
    command = [sys.executable, "-W", "error", "-c", PROGRAM, redis_server.url, door]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stderr) == (0, "")
