"""A limiter that is not closed leaves nothing behind that would trip `filterwarnings = error`."""

import gc
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis

from headgate import Limiter
from headgate.stores.redis import RedisStore
from tests.support.left_open import is_of_a_tests_client
from tests.support.servers import Server

ROOT = Path(__file__).parent.parent

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
def test_end_of_an_event_loop(door: str, redis_server: Server) -> None:
    """A limiter that was not closed makes no warning at the end of its event loop."""
    command = [sys.executable, "-W", "error", "-c", PROGRAM, redis_server.url, door]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stderr) == (0, "")


class Witness:
    """Sees, when a garbage collection has found it, which sockets are closed already."""

    def __init__(self, saw: list[bool]) -> None:
        self.saw = saw
        self.ring: list[object] = []
        self.sockets: list[socket.socket] = []

    def __del__(self) -> None:
        self.saw += [socket.fileno() == -1 for socket in self.sockets]


def sockets_of(store: RedisStore) -> list[socket.socket]:
    """Those that it has opened for threads: for calls, unless a client was handed in, and for `health`."""
    found = []
    for executor in (store.sync_executor(), store._health_executor):
        for node in executor.connections() if executor else ():
            pool: Any = node._source
            ours = store.url is None and executor is store._health_executor
            idle = pool._available_connections if ours else [connection for connection, _ in node._idle]
            found += [connection._sock for connection in idle]
    return found


@pytest.mark.parametrize("by_client", [False, True])
def test_garbage_collection(by_client: bool, redis_server: Server) -> None:
    """Sockets are closed before the collector comes to them: a socket that is still open complains."""
    saw: list[bool] = []
    with redis.Redis.from_url(redis_server.bare_url) as client:
        older = Witness(saw)
        store = RedisStore(client if by_client else redis_server.url)
        limiter = Limiter("10/minute", store=store)
        assert limiter.try_acquire("k") and limiter.health().healthy
        younger = Witness(saw)
        for witness in (older, younger):
            witness.sockets = sockets_of(store)
            witness.ring = [older, younger, store, limiter]
        del older, store, limiter, younger, witness
        gc.collect()
    assert saw == [True] * (2 if by_client else 4)  # of two witnesses


@pytest.mark.parametrize("by_client", [False, True])
def test_close(by_client: bool, redis_server: Server) -> None:
    """`close` closes what the store has opened, not the connections of a client that was handed in."""
    with redis.Redis.from_url(redis_server.bare_url) as client:
        store = RedisStore(client if by_client else redis_server.url)
        with Limiter("10/minute", store=store) as limiter:
            assert limiter.try_acquire("k") and limiter.health().healthy
        sockets = sockets_of(store)
        store.close()
        assert [socket.fileno() for socket in sockets] == [-1] * (1 if by_client else 2)
        assert all(connection._sock.fileno() != -1 for connection in client.connection_pool._available_connections)


def test_clients_of_tests_are_told_apart(redis_server: Server) -> None:
    """A socket that redis-py opened is headgate's if headgate made the call, and else of a client of the test."""
    with redis_server.client() as client, Limiter("10/minute", store=redis_server.url) as limiter:
        assert client.ping() and limiter.try_acquire("k")
        assert is_of_a_tests_client(client.connection_pool._available_connections[0]._sock)
        ours = sockets_of(limiter.store)  # type: ignore[arg-type]  # it is a RedisStore
        assert [is_of_a_tests_client(socket) for socket in ours] == [False]


LEAK = """
import socket

def test_careless():
    ring = [socket.socket()]
    ring.append(ring)

def test_last_of_its_module():
    pass
"""


def test_suite_names_who_left_a_socket_open(tmp_path: Path) -> None:
    """The error comes at the end of the module, and says which test opened the socket and where."""
    (tmp_path / "test_leak.py").write_text(LEAK)
    (tmp_path / "test_other.py").write_text("def test_innocent(): pass")
    ours = ["-p", "tests.conftest", "-c", "pyproject.toml", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *ours, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert "3 passed, 1 error" in done.stdout, done.stdout + done.stderr
    assert "test_last_of_its_module - pytest.PytestUnraisable" in done.stdout
    assert "test_leak.py::test_careless (call), by the thread 'MainThread', at" in done.stdout
    assert "test_leak.py:5 in test_careless" in done.stdout
