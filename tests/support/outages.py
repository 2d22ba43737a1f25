"""Ways in which one server can fail its callers, each with the way back."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import redis

from tests.support.clusters import ONCE, Node, wait_until
from tests.support.proxy import FaultyProxy

Outage = Callable[[Node, FaultyProxy], AbstractContextManager[None]]


@contextmanager
def killed(node: Node, _proxy: FaultyProxy) -> Iterator[None]:
    """Dead; comes back empty."""
    node.kill()
    yield
    node.restart()


@contextmanager
def frozen(node: Node, _proxy: FaultyProxy) -> Iterator[None]:
    """SIGSTOP: the kernel goes on accepting connections and requests, and the server does not read them."""
    node.freeze()
    yield
    node.thaw()


@contextmanager
def replies_lost(_node: Node, proxy: FaultyProxy) -> Iterator[None]:
    """The server does what it is asked, but the caller does not hear of it."""
    proxy.swallow_replies = True
    yield
    proxy.swallow_replies = False
    proxy.cut()  # what is left of the connections would be without their first replies


@contextmanager
def requests_lost(_node: Node, proxy: FaultyProxy) -> Iterator[None]:
    proxy.swallow_requests = True
    yield
    proxy.swallow_requests = False
    proxy.cut()


@contextmanager
def late(_node: Node, proxy: FaultyProxy) -> Iterator[None]:
    """Replies that come when no call waits for them any more."""
    proxy.delay = 20.0
    yield
    proxy.delay = 0.0


@contextmanager
def out_of_memory(node: Node, _proxy: FaultyProxy) -> Iterator[None]:
    """`maxmemory-policy noeviction`, which is the right one, and no memory left."""
    node.ask("CONFIG", "SET", "maxmemory", 1)
    yield
    node.ask("CONFIG", "SET", "maxmemory", 0)


@contextmanager
def read_only(node: Node, _proxy: FaultyProxy) -> Iterator[None]:
    """The server has become a replica."""
    node.ask("REPLICAOF", "127.0.0.1", 1)
    yield
    node.ask("REPLICAOF", "NO", "ONE")


@contextmanager
def busy(node: Node, _proxy: FaultyProxy | None = None) -> Iterator[None]:
    """A script of another application runs for ever."""
    node.ask("CONFIG", "SET", "lua-time-limit", 10)

    def loop() -> None:
        with redis.Redis(port=node.port, socket_timeout=60, retry=ONCE) as client:
            try:
                client.eval("while true do end", 0)
            except redis.RedisError:  # it is killed in the end
                pass

    thread = threading.Thread(target=loop)
    thread.start()
    wait_until(lambda: _refuses(node, "BUSY"), "the script runs")
    try:
        yield
    finally:
        node.ask("SCRIPT", "KILL")
        thread.join()


@contextmanager
def loading(node: Node, _proxy: FaultyProxy) -> Iterator[None]:
    """It was started again and reads what it had saved, for five seconds if it may."""
    node.ask("CONFIG", "SET", "rdbcompression", "no")
    node.ask("EVAL", "for i = 1, 200 do redis.call('SET', i, string.rep('x', 200000)) end", 0)
    node.ask("SAVE")
    node.options["key-load-delay"] = "25000"  # microseconds; it looks at its clients every two megabytes
    node.launch()
    wait_until(lambda: _refuses(node, "loading"), "the server loads")
    yield
    del node.options["key-load-delay"]
    node.restart()
    wait_until(lambda: node.ask("PING"), "the server has loaded")


@contextmanager
def paused(node: Node, _proxy: FaultyProxy | None = None) -> Iterator[None]:
    """CLIENT PAUSE, as before a planned failover: a client that writes is kept waiting."""
    node.ask("CLIENT", "PAUSE", 60_000, "WRITE")
    yield
    node.ask("CLIENT", "UNPAUSE")


def _refuses(node: Node, why: str) -> bool:
    try:
        node.ask("PING")
    except redis.RedisError as error:
        return why in str(error)
    return False


OUTAGES: dict[str, Outage] = {
    "killed": killed,
    "frozen": frozen,
    "replies lost": replies_lost,
    "requests lost": requests_lost,
    "late": late,
    "out of memory": out_of_memory,
    "read-only": read_only,
    "busy script": busy,
    "loading": loading,
    "paused": paused,
}
