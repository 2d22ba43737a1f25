"""The Redis protocol from the client's side, and a listener in this process."""

from __future__ import annotations

import asyncio
import re
import socket
import tempfile
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import hiredis

from headgate.clock import Clock
from headgate.service.app import App, State
from headgate.service.client_limits import ClientLimits
from headgate.service.files import LastGoodConfig, Sources
from headgate.service.listeners import Listener, close_listeners
from headgate.service.settings import Settings
from headgate.service.shared_counters import COUNTERS_FILE, create
from headgate.service.tokens import digest
from headgate.stores.base import Store
from headgate.stores.memory import MemoryStore
from tests.support.service import Service

Result = TypeVar("Result")

RULES = """
[rules.login]
quotas = "5/hour"
algorithm = "sliding_window"
overrides = { "vip" = "50/hour" }
exempt = ["monitoring"]
[rules.costly]
quotas = "10/hour"
cost = 3
[rules.trial]
quotas = "1/hour"
shadow = true
[rules.pair]
quotas = "5/hour"
key = ["key", "address"]
[rules.tenant]
quotas = "5/hour"
key = ["header:X-Tenant"]
"""


def command(*words: object) -> bytes:
    """A command as clients send it."""
    raw = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return b"*%d\r\n" % len(raw) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in raw)


def port_of(service: Service) -> int:
    """The port of the Redis protocol, from the banner."""
    found = re.search(r"^  resp +rediss?://\S+:(\d+)/$", service.log(), re.MULTILINE)
    assert found, service.log()
    return int(found[1])


class RespSocket:
    """A connection that sends bytes as they are. An error is text that begins with a minus."""

    def __init__(self, where: Service | int) -> None:
        port = where if isinstance(where, int) else port_of(where)
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._reader = hiredis.Reader()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def reply(self) -> Any:
        """The next reply; raises EOFError if the connection ends instead."""
        while True:
            found = self._reader.gets()
            if found is not False:
                return _plain(found)
            data = self.socket.recv(65536)
            if not data:
                raise EOFError
            self._reader.feed(data)

    def ask(self, *words: object) -> Any:
        self.send(command(*words))
        return self.reply()

    def replies(self) -> list[Any]:
        """All replies until the connection ends."""
        found = []
        while True:
            try:
                found.append(self.reply())
            except (EOFError, ConnectionError):
                return found


def _plain(found: Any) -> Any:
    if isinstance(found, hiredis.ReplyError):
        return f"-{found}"
    if isinstance(found, list):
        return [_plain(one) for one in found]
    if isinstance(found, dict):
        return {_plain(name): _plain(value) for name, value in found.items()}
    return found.decode() if isinstance(found, bytes) else found


class RespListener:
    """A listener in this process, on an event loop that runs only inside `run`."""

    def __init__(
        self, folder: Path, store: Store | None = None, token: str = "", port: int = 0, client_limits: int = 0
    ) -> None:
        self.loop = asyncio.new_event_loop()
        settings = Settings(resp_port=port, client_limits=client_limits)
        create(folder / COUNTERS_FILE, 1, int(time.time()))
        self.app = App(Sources(None, {}, {}), settings, folder)
        own = self.app.counters.claim()
        self.app.gauges, self.app.slots, self.app.timings = own.gauges, own.slots, own.timings
        self.app.store = MemoryStore() if store is None else store  # an empty store is false
        config = LastGoodConfig(settings, [(digest(token), "check")] if token else [], {})
        self.app.state = State(config, self.app.store, self.app.counters)
        self.app.debug = False
        self.listener = Listener("resp", self.app, self.loop, settings)
        self.port: int = self.listener.info()["port"]

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self.loop.run_until_complete(asyncio.wait_for(work, 60))

    async def connect(self) -> AsyncRespSocket:
        return AsyncRespSocket(*await asyncio.open_connection("127.0.0.1", self.port))

    def close(self) -> None:
        self.run(close_listeners([self.listener]))
        self.run(self.app.store.aclose())
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()


class ServiceInThread:
    """A listener for limits of clients, in a thread of its own. Its store is in memory, by *clock* if there is one."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock
        self.port = 0
        self._folder = tempfile.TemporaryDirectory(prefix="headgate-test-")
        self.start()

    def start(self) -> None:
        """Listen, on the same port as before, with an empty store."""
        self.store = MemoryStore(clock=self.clock)
        self.listener = RespListener(Path(self._folder.name), self.store, port=self.port, client_limits=1000)
        self.port = self.listener.port
        self._thread = threading.Thread(target=self.listener.loop.run_forever, name="service", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Cut all connections off, and listen no more."""
        loop = self.listener.loop
        if loop.is_closed():
            return
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join()
        for connection in list(self.listener.listener.connections):
            connection.abort()
        self.listener.close()

    def clear(self) -> None:
        """Forget all limits and states."""
        app = self.listener.app
        self.store = app.store = MemoryStore(clock=self.clock)
        app.client_limits = ClientLimits(app)

    @contextmanager
    def gone(self) -> Iterator[None]:
        self.stop()
        try:
            yield
        finally:
            self.start()

    @contextmanager
    def silent(self) -> Iterator[None]:
        """The event loop stands still; the kernel takes connections and bytes."""
        go_on = threading.Event()
        self.listener.loop.call_soon_threadsafe(go_on.wait)
        try:
            yield
        finally:
            go_on.set()

    def forget(self) -> None:
        self.stop()
        self._folder.cleanup()


class AsyncRespSocket:
    """`RespSocket` on the event loop of a `RespListener`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self._stream = reader
        self._reader = hiredis.Reader()

    async def reply(self) -> Any:
        while True:
            found = self._reader.gets()
            if found is not False:
                return _plain(found)
            data = await self._stream.read(65536)
            if not data:
                raise EOFError
            self._reader.feed(data)

    async def ask(self, *words: object) -> Any:
        self.writer.write(command(*words))
        return await self.reply()

    async def ended(self) -> bool:
        """Wait until the server ends the connection."""
        try:
            while await self._stream.read(65536):
                pass
        except ConnectionError:
            pass
        return True
