"""Every store that there is, as a table: `tests/stores` runs the same promises against each row.

To add a store, write a subclass of `OpenStore` and a row in `STORES`:

    "shared": Row(shared, processes=True, server=False),

where `shared` is a context manager that gives the open store. Everything in `tests/stores` then runs against it.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import redis
import redis.asyncio

from headgate.stores import MemoryStore, RedisStore, ServiceStore, SharedStore
from headgate.stores.thread_pool import ThreadPoolStore
from tests.support.callers import COLOURS, Callers
from tests.support.clusters import Cluster, Sentinels
from tests.support.postgres import PostgresServer
from tests.support.resp import ServiceInThread
from tests.support.servers import KINDS, Server, quiet_port

SERVICE_WHOLE = "HEADGATE_SERVICE_WHOLE" in os.environ  # the code of its client is that of Redis: soak runs the rest
PATIENT = {"timeout": 20.0, "connect_timeout": 20.0}  # seconds; a busy machine is not what these tests are about


class OpenStore:
    """One store that is open for tests.

    url   for limiters, and for other processes; empty where the state belongs to this one
    """

    def __init__(self, url: str = "") -> None:
        self.url = url

    def connect(self, callers: Callers, **options: Any) -> dict[str, Any]:
        """What a limiter is given: the store, a URL or an object, and the *options* if it is a URL."""
        return {"store": self.url, **PATIENT, **options}

    @property
    def patient_url(self) -> str:
        """The URL for another process."""
        return f"{self.url}?timeout={PATIENT['timeout']}&connect_timeout={PATIENT['connect_timeout']}"

    def clear(self) -> None:
        """Forget all that is kept, before each test."""
        raise NotImplementedError

    def count(self) -> int:
        """How many records are kept: keys in Redis, entries in memory."""
        raise NotImplementedError

    def gone(self) -> AbstractContextManager[None]:
        """An outage: connections are refused, and when it ends the store is empty."""
        raise NotImplementedError

    def silent(self) -> AbstractContextManager[None]:
        """An outage: requests are taken and not answered until it ends."""
        raise NotImplementedError


@dataclass(frozen=True)
class Row:
    """How a store is opened, and what it is.

    processes   its URL gives every process of this machine the same state
    outages     it can be `gone` and `silent`
    whole       runs the whole suite; a row that is only another way to the same code runs the shorter one
    colours     sync and async, or one of them
    share       of the random steps that the whole suite has: a store whose calls take longer makes fewer
    group       rows that are slow to start run in one worker of pytest-xdist
    once        above what is compiled: `make test` runs the row with one of the two builds
    """

    open: Callable[[], AbstractContextManager[OpenStore]]
    processes: bool = False
    outages: bool = False
    whole: bool = True
    colours: tuple[str, ...] = COLOURS
    server: bool = True
    share: float = 1.0
    group: str = ""
    once: bool = True


class Memory(OpenStore):
    """One `MemoryStore` for all limiters that a test makes by one clock."""

    def __init__(self) -> None:
        super().__init__()
        self.stores: dict[Any, MemoryStore] = {}

    def connect(self, callers: Callers, clock: Any = None, **_options: Any) -> dict[str, Any]:
        if clock not in self.stores:
            self.stores[clock] = MemoryStore(clock=clock)
        return {"store": self.stores[clock]}

    def clear(self) -> None:
        self.stores.clear()

    def count(self) -> int:
        return sum(len(store) for store in self.stores.values())


@contextmanager
def memory() -> Iterator[OpenStore]:
    yield Memory()


class Shared(OpenStore):
    """A directory of files that processes map; one for each clock, as time in a file never goes back."""

    def __init__(self, root: str) -> None:
        super().__init__(f"shared://{root}/system-clock")
        self.root = root
        self.stores: dict[Any, SharedStore] = {}

    @property
    def patient_url(self) -> str:
        return self.url

    def connect(self, callers: Callers, clock: Any = None, **_options: Any) -> dict[str, Any]:
        if clock not in self.stores:
            url = self.url if clock is None else f"shared://{self.root}/{len(self.stores)}"
            self.stores[clock] = SharedStore(url, max_keys=1_000, clock=clock)
        return {"store": self.stores[clock]}

    def clear(self) -> None:
        self.stores.clear()
        shutil.rmtree(self.root)
        os.mkdir(self.root, 0o700)

    def count(self) -> int:
        return sum(len(store) for store in self.stores.values())


@contextmanager
def shared() -> Iterator[OpenStore]:
    root = tempfile.mkdtemp(prefix="headgate-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    try:
        yield Shared(root)
    finally:
        shutil.rmtree(root)


class OneServer(OpenStore):
    """A Redis server of our own."""

    def __init__(self, server: Server, url: str = "") -> None:
        super().__init__(url or server.bare_url)
        self.server = server
        self.clear, self.kill = server.flush, server.kill  # type: ignore[method-assign]  # the same thing

    def count(self) -> int:
        return len(self.server.names())

    @contextmanager
    def gone(self) -> Iterator[None]:
        self.server.kill()
        try:
            yield
        finally:
            self.server.restart()

    @contextmanager
    def silent(self) -> Iterator[None]:
        os.kill(self.server.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.server.process.pid, signal.SIGCONT)


@contextmanager
def redis_server(kind: str, of: type[OneServer] = OneServer) -> Iterator[OpenStore]:
    server = Server(kind, port=quiet_port)
    try:
        yield of(server)
    finally:
        server.stop()


class ByClient(OneServer):
    """A `RedisStore` around a client that the application has made."""

    def connect(self, callers: Callers, **options: Any) -> dict[str, Any]:
        if callers.colour == "sync":
            client: Any = redis.Redis.from_url(self.url, socket_timeout=20.0)
            callers.at_end(client.close)
        else:
            client = redis.asyncio.Redis.from_url(self.url, socket_timeout=20.0)
            callers.at_end(client.aclose)
        store = RedisStore(client, **options)
        callers.at_end(store.close if callers.colour == "sync" else store.aclose)
        return {"store": store}


class InThreadPool(OneServer):
    """A store for threads, behind asyncio."""

    def connect(self, callers: Callers, **options: Any) -> dict[str, Any]:
        plain = RedisStore(self.url, **{**PATIENT, **options})
        callers.at_end(plain.aclose)
        return {"store": PlainStore(plain)}


class PlainStore:
    """What a store without methods for asyncio gives to an `AsyncLimiter`."""

    def __init__(self, plain: RedisStore) -> None:
        self.plain = plain
        self.open, self.health, self.close = plain.open, plain.health, plain.close

    def open_async(self, rule: Any, on_store_error: str = "allow") -> ThreadPoolStore:
        return ThreadPoolStore(self.plain, self.plain.open(rule, on_store_error))

    async def ahealth(self) -> Any:
        return await ThreadPoolStore(self.plain, None).ahealth()  # type: ignore[arg-type]  # no limiter, no backend

    async def aclose(self) -> None:
        self.plain.close()


@contextmanager
def sentinels() -> Iterator[OpenStore]:
    started = Sentinels(KINDS[0])
    try:
        yield OneServer(started.primary, started.bare_url)
    finally:
        started.stop()


class WholeCluster(OpenStore):
    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster.bare_url)
        self.cluster = cluster

    def clear(self) -> None:
        for member in self.cluster.primaries():
            member.ask("FLUSHALL")

    def count(self) -> int:
        return sum(len(member.names()) for member in self.cluster.primaries())


@contextmanager
def cluster() -> Iterator[OpenStore]:
    started = Cluster(KINDS[0])
    try:
        yield WholeCluster(started)
    finally:
        started.stop()


class OneDatabase(OpenStore):
    """A PostgreSQL server of our own."""

    def __init__(self, server: PostgresServer) -> None:
        super().__init__(server.bare_url)
        self.server = server
        self.clear = server.flush  # type: ignore[method-assign]  # the same thing
        self.silent = server.frozen  # type: ignore[method-assign]

    def count(self) -> int:
        if "headgate_state" not in self.server.tables():
            return 0
        return int(self.server.rows("SELECT count(*) FROM headgate_state")[0][0])

    @contextmanager
    def gone(self) -> Iterator[None]:
        self.server.kill()
        try:
            yield
        finally:
            self.server.restart()


@contextmanager
def postgresql() -> Iterator[OpenStore]:
    server = PostgresServer()
    try:
        yield OneDatabase(server)
    finally:
        server.stop()


class OneService(OpenStore):
    """A headgate service with a store in memory; one more for each manual clock, as its store decides by that."""

    def __init__(self, services: Callable[[Any], ServiceInThread]) -> None:
        self.services = services
        self.service = services(None)
        super().__init__(f"headgate://127.0.0.1:{self.service.port}")
        self.gone, self.silent = self.service.gone, self.service.silent  # type: ignore[method-assign]  # the same
        self.by_clock: dict[Any, ServiceInThread] = {}

    def connect(self, callers: Callers, clock: Any = None, **options: Any) -> dict[str, Any]:
        service = self.service
        if clock is not None:
            service = self.by_clock.get(clock) or self.by_clock.setdefault(clock, self.services(clock))
        store = ServiceStore(f"headgate://127.0.0.1:{service.port}", clock=clock, **{**PATIENT, **options})
        callers.at_end(store.close if callers.colour == "sync" else store.aclose)
        return {"store": store}

    def clear(self) -> None:
        self.service.clear()
        while self.by_clock:
            self.by_clock.popitem()[1].stop()

    def count(self) -> int:
        return len(self.service.store)


@contextmanager
def service() -> Iterator[OpenStore]:
    with ExitStack() as ends:

        def start(clock: Any) -> ServiceInThread:
            started = ServiceInThread(clock)
            ends.callback(started.forget)
            return started

        yield OneService(start)


class ThreeServers(OpenStore):
    """Three Redis servers of our own that decide by majority."""

    def __init__(self, servers: list[Server]) -> None:
        super().__init__()
        self.servers = servers

    def connect(self, callers: Callers, **options: Any) -> dict[str, Any]:
        return {"store": [server.bare_url for server in self.servers], "agree": "majority", **PATIENT, **options}

    def clear(self) -> None:
        for server in self.servers:
            server.flush()

    def count(self) -> int:
        return max(len(server.names()) for server in self.servers)


@contextmanager
def three_servers() -> Iterator[OpenStore]:
    with ExitStack() as started:
        servers = [Server(KINDS[0], port=quiet_port) for _ in range(3)]
        for server in servers:
            started.callback(server.stop)
        yield ThreeServers(servers)


STORES = {
    "memory": Row(memory, server=False, once=False),
    "shared": Row(shared, processes=True, server=False, once=False),
    KINDS[0]: Row(partial(redis_server, KINDS[0]), processes=True, outages=True, once=False),
    **{kind: Row(partial(redis_server, kind), processes=True, outages=True, whole=False) for kind in KINDS[1:]},
    "postgresql": Row(postgresql, processes=True, outages=True, share=0.3),
    "service": Row(service, processes=SERVICE_WHOLE, outages=SERVICE_WHOLE, whole=SERVICE_WHOLE, share=0.3),
    "majority": Row(three_servers, whole=False, colours=("sync",)),
    "redis client": Row(partial(redis_server, KINDS[0], ByClient), whole=False),
    "thread pool": Row(partial(redis_server, KINDS[0], InThreadPool), whole=False, colours=("async",)),
    "sentinels": Row(sentinels, processes=True, whole=False, group="stores-sentinels"),
    "cluster": Row(cluster, processes=True, whole=False, group="stores-cluster"),
}


def rows(wanted: Callable[[Row], bool], colours: tuple[str, ...] = COLOURS) -> list[Any]:
    """The parameters of a fixture: each wanted row in each colour."""
    found = []
    for name, row in STORES.items():
        marks = [pytest.mark.server] * row.server + [pytest.mark.xdist_group(row.group)] * bool(row.group)
        marks += [pytest.mark.once] * row.once
        for colour in row.colours:
            if wanted(row) and colour in colours:
                found.append(pytest.param((name, colour), id=f"{name} {colour}", marks=marks))
    return found


class OpenStores(ExitStack):
    """The rows that this process has opened so far."""

    def __init__(self) -> None:
        super().__init__()
        self.open: dict[str, OpenStore] = {}

    def empty(self, name: str) -> OpenStore:
        if name not in self.open:
            self.open[name] = self.enter_context(STORES[name].open())
        self.open[name].clear()
        return self.open[name]
