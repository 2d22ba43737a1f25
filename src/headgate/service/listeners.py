"""TCP ports of a worker beside HTTP: opened on its event loop before the loop runs, drained when the worker stops.

A listener is a row of `LISTENERS`, a setting `NAME_port`, and a class of connections. Such a class is an
`asyncio.Protocol` or `asyncio.BufferedProtocol` that is made with the application and its listener:

    connection_made   calls `listener.add`; if that is False the connection is being closed, and takes nothing
    connection_lost   calls `listener.remove`
    listener.admit    is called once the client has shown that it speaks the protocol and may use it; a connection that
                      is not admitted in time is closed
    drain, abort      are called when the worker stops, see `ListenerConnection`
    listener.turn     bounds the calls that are answered in one turn of the event loop, see `TurnBudget`
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import socket
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from headgate.service.certificates import certificates_in, check_tls, server_context
from headgate.service.settings import PORTS, BadFile, Settings, TLSSettings

if TYPE_CHECKING:
    from headgate.service.app import App

logger = logging.getLogger("headgate.service")

MAX_CONNECTIONS = 4096  # of one listener in one worker
BACKLOG = 1024
ADMIT_WITHIN = 10.0  # seconds
DRAIN_WITHIN = 3.0  # seconds; after that, what is left is cut off
HANDSHAKE_WITHIN = 10.0  # seconds for TLS
KEEP_ALIVE_IDLE, KEEP_ALIVE_INTERVAL, KEEP_ALIVE_PROBES = 60, 15, 4  # seconds, seconds: finds peers that are gone
CALLS_PER_TURN = 256  # about a millisecond on the memory store
RESERVED = 64  # of them for connections that do not wait in line: a client with few calls does not wait for floods
LINE_SHARE = 64  # calls of one connection from the line, while others wait there
NEW_SHARE = 8  # calls of a connection that has just been read, while others wait in line


class ListenerKind(NamedTuple):
    """One row of `LISTENERS`."""

    schemes: tuple[str, str]  # of its URL, without TLS and with it
    module: str  # imported if the listener is used
    connection: str  # the class of its connections
    alpn: tuple[str, ...] = ()
    refusal: bytes = b""  # what a connection is told that finds no room


LISTENERS = {
    "resp": ListenerKind(
        schemes=("redis", "rediss"),
        module="headgate.service.resp.connection",
        connection="RespConnection",
        refusal=b"-ERR max number of clients reached\r\n",
    ),
    "grpc": ListenerKind(
        schemes=("grpc", "grpcs"),
        module="headgate.service.grpc",
        connection="GrpcConnection",
        alpn=("h2",),
    ),
}


class ListenerConnection(Protocol):
    """What a listener asks of its connections."""

    def drain(self) -> None:
        """Answer the calls that were received, take no new ones, then close."""
        ...

    def abort(self) -> None:
        """Close at once."""
        ...


class TurnBudget:
    """The calls that connections may still answer in this turn of the event loop, so that HTTP gets its share.

    A connection answers up to `share` calls and takes them off with `spend`. When none is left for it, it stops
    reading and calls `wait`; it is called back in a later turn, in order.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.left = CALLS_PER_TURN
        self._loop = loop
        self._waiting: deque[Callable[[], None]] = deque()
        self._scheduled = self._calling = False

    @property
    def share(self) -> int:
        """How many calls one connection may answer now; may be below 0."""
        left = self.left - RESERVED if self._calling else self.left
        if not self._waiting:
            return left
        return min(left, LINE_SHARE if self._calling else NEW_SHARE)

    def spend(self, calls: int) -> None:
        self.left -= calls
        if not self._scheduled:
            self._schedule()

    def wait(self, callback: Callable[[], None]) -> None:
        """Call *callback* in a later turn."""
        self._waiting.append(callback)
        if not self._scheduled:
            self._schedule()

    def _schedule(self) -> None:
        self._scheduled = True
        self._loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._scheduled = False
        self.left = CALLS_PER_TURN
        self._calling = True
        try:
            for _ in range(len(self._waiting)):  # those that come to wait meanwhile have another turn
                if self.left <= RESERVED:
                    break
                self._waiting.popleft()()
        finally:
            self._calling = False
            if self._waiting and not self._scheduled:
                self._schedule()


class Listener:
    """One open port of this worker, and its connections."""

    def __init__(self, name: str, app: App, loop: asyncio.AbstractEventLoop, settings: Settings) -> None:
        self.kind = LISTENERS[name]
        self.name = name
        self.turn = TurnBudget(loop)
        self.connections: set[ListenerConnection] = set()
        self.shared: Any = None  # what its connections have in common, theirs to set
        self.tls = settings.tls is not None
        self._silent: dict[ListenerConnection, float] = {}  # when each connection came that is not admitted yet
        self._closing = False
        self._empty = asyncio.Event()
        self._sock = bound_socket(settings.host, getattr(settings, f"{name}_port"), shared=True)
        make: Callable[[App, Listener], Any] = getattr(importlib.import_module(self.kind.module), self.kind.connection)
        self._make = lambda: make(app, self)
        self._certificates = b"" if settings.tls is None else certificates_in(settings.tls)
        context = None if settings.tls is None else server_context(settings.tls, self.kind.alpn)
        self._server = loop.run_until_complete(self._serve(loop, context))

    async def _serve(self, loop: asyncio.AbstractEventLoop, context: ssl.SSLContext | None) -> asyncio.Server:
        """Accept connections from now on."""
        return await loop.create_server(
            self._make,
            sock=self._sock.dup(),  # a server closes its own; the port stays open while another takes over
            backlog=BACKLOG,
            ssl=context,
            ssl_handshake_timeout=HANDSHAKE_WITHIN if context else None,
        )

    async def renew(self, tls: TLSSettings) -> None:
        """Take the certificates and authorities that the files have now, for new connections. Raises `BadFile`.

        A new context, and not the old one with other files: that would go on to accept the authorities that were
        taken out of the file, and clients that resume a session which one of them has opened.
        """
        found = certificates_in(tls)
        if not self.tls or self._closing or found == self._certificates:
            return
        context = server_context(tls, self.kind.alpn)
        before, self._server = self._server, await self._serve(asyncio.get_running_loop(), context)
        self._certificates = found
        before.close()

    def add(self, connection: ListenerConnection, transport: asyncio.Transport) -> bool:
        """Register a new connection. False: there is no room for it, and it is being closed."""
        if self._closing or len(self.connections) >= MAX_CONNECTIONS:
            transport.write(self.kind.refusal)
            transport.close()
            return False
        self.connections.add(connection)
        self._silent[connection] = monotonic()
        return True

    def admit(self, connection: ListenerConnection) -> None:
        """Keep *connection* for as long as its client wants."""
        self._silent.pop(connection, None)

    def remove(self, connection: ListenerConnection) -> None:
        """Forget a connection that was lost, even one that was never added."""
        self.connections.discard(connection)
        self._silent.pop(connection, None)
        if not self.connections:
            self._empty.set()

    def close_silent(self) -> None:
        """Close the connections that were not admitted in time; called once a second."""
        latest = monotonic() - ADMIT_WITHIN
        for connection, since in list(self._silent.items()):
            if since > latest:
                break  # the oldest come first
            connection.abort()

    def info(self) -> dict[str, Any]:
        """What /actuator/info shows."""
        port = self._sock.getsockname()[1]
        return {"name": self.name, "port": port, "tls": self.tls}

    async def close(self) -> None:
        """Stop accepting, let every connection finish its calls, then cut off what is left."""
        self._closing = True
        self._server.close()
        self._sock.close()
        self._empty.clear()
        for connection in list(self.connections):
            connection.drain()
        if self.connections:
            try:
                async with asyncio.timeout(DRAIN_WITHIN):
                    await self._empty.wait()
            except TimeoutError:
                logger.warning("%d connections of %s are cut off", len(self.connections), self.name)
        for connection in list(self.connections):
            connection.abort()
        await asyncio.sleep(0)  # the event loop closes sockets in its next turn


def open_listeners(app: App, loop: asyncio.AbstractEventLoop, settings: Settings) -> list[Listener]:
    """Open the ports that *settings* has, before *loop* runs. Raises OSError for one that is taken."""
    names = [name for name in LISTENERS if getattr(settings, f"{name}_port") is not None]
    return [Listener(name, app, loop, settings) for name in names]


async def close_listeners(listeners: Sequence[Listener]) -> None:
    """Close all at the same time."""
    await asyncio.gather(*(listener.close() for listener in listeners))


async def renew_certificates(listeners: Sequence[Listener], tls: TLSSettings | None) -> None:
    """Read the certificates again, for new connections; bad ones change nothing but the log."""
    if tls is None:
        return
    try:
        for listener in listeners:
            await listener.renew(tls)
    except BadFile as error:
        logger.error("The new certificates are not used, the old ones stay in force: %s", error)


def check_listeners(settings: Settings) -> None:
    """Raise `BadFile` for a listener that cannot be opened, its port aside."""
    for name in (setting.removesuffix("_port") for setting in PORTS[1:]):
        if name not in LISTENERS and getattr(settings, f"{name}_port") is not None:
            raise BadFile(f"{name}_port: this version of headgate has no such listener")
    check_tls(settings.tls)


def bound_socket(host: str, port: int, shared: bool = False) -> socket.socket:
    """A socket bound to the first address of *host*; *shared*: with other workers. Raises OSError."""
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # connections inherit it
        for option, value in (
            ("TCP_KEEPIDLE", KEEP_ALIVE_IDLE),
            ("TCP_KEEPINTVL", KEEP_ALIVE_INTERVAL),
            ("TCP_KEEPCNT", KEEP_ALIVE_PROBES),
        ):
            if hasattr(socket, option):  # not on every system
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(where)
    except BaseException:
        sock.close()
        raise
    return sock
