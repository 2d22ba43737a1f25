"""TLS with a CA and a client certificate, and Unix sockets: real handshakes, real files.

The servers of the wheels are built without TLS, so a relay of ours ends it, as stunnel would.
"""

import asyncio
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trustme

from headgate import AsyncLimiter, Limiter
from headgate.errors import StoreUnavailable
from tests.support.clusters import Node
from tests.support.servers import KINDS, LOGIN

pytestmark = pytest.mark.xdist_group("faults")


class Certificates:
    """A CA, the server's certificate and a client's, as files."""

    def __init__(self, directory: Path) -> None:
        self.authority = trustme.CA()
        self.ca, self.cert, self.key = (str(directory / name) for name in ("ca.pem", "client.pem", "client.key"))
        self.authority.cert_pem.write_to_path(self.ca)
        client = self.authority.issue_cert("client@headgate.test")
        client.private_key_pem.write_to_path(self.key)
        client.cert_chain_pems[0].write_to_path(self.cert)

    def server(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.authority.issue_cert("127.0.0.1").configure_cert(context)
        self.authority.configure_trust(context)
        context.verify_mode = ssl.CERT_REQUIRED  # a client needs a certificate of this CA
        return context

    def query(self, *, ca: str = "") -> str:
        return f"?ssl_ca_certs={ca or self.ca}&ssl_certfile={self.cert}&ssl_keyfile={self.key}&timeout=10"


@contextmanager
def relay(port: int, context: ssl.SSLContext) -> Iterator[int]:
    """Listen with TLS, speak to *port* without; gives the port to connect to."""
    started, stop, ports = threading.Event(), asyncio.Event(), list[int]()
    loops: list[asyncio.AbstractEventLoop] = []

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, theirs[1]), copy(theirs[0], writer), return_exceptions=True)

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
        ports.append(server.sockets[0].getsockname()[1])
        started.set()
        await stop.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    assert started.wait(10)
    yield ports[0]
    loops[0].call_soon_threadsafe(stop.set)
    thread.join()


def both_doors(url: str) -> None:
    """Spend from two sides of one limit."""

    async def check() -> None:
        async with AsyncLimiter("5/30d", store=url, on_store_error="raise") as limiter:
            assert (await limiter.try_acquire("k", permits=2)).remaining == 2

    with Limiter("5/30d", store=url, on_store_error="raise") as limiter:
        assert limiter.try_acquire("k").remaining == 4
    asyncio.run(check())


def test_tls(node: Node, tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    with relay(node.port, certificates.server()) as port:
        both_doors(f"rediss://{LOGIN}127.0.0.1:{port}/0{certificates.query()}")


@pytest.mark.parametrize("what", ["another CA", "no certificate"])
def test_tls_refused(what: str, node: Node, tmp_path: Path) -> None:
    """Whom the certificates do not vouch for gets no answer, and the error says why."""
    certificates = Certificates(tmp_path)
    query = f"?ssl_ca_certs={certificates.ca}&timeout=10"
    if what == "another CA":
        other = str(tmp_path / "other.pem")
        trustme.CA().cert_pem.write_to_path(other)
        query = certificates.query(ca=other)
    url = f"rediss://{LOGIN}127.0.0.1:"
    with (
        relay(node.port, certificates.server()) as port,
        Limiter("5/30d", store=f"{url}{port}/0{query}", on_store_error="raise") as limiter,
        pytest.raises(StoreUnavailable, match=r"certificate|alert|closed|reset|SSL"),
    ):
        limiter.try_acquire("k")
    assert "EVALSHA" not in str(node.ask("INFO", "commandstats")).upper()


@pytest.mark.server
def test_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    node = Node(KINDS[0], {"unixsocket": str(path)})
    try:
        both_doors(f"unix://{LOGIN}{path}?db=0&timeout=10")
        with Limiter("5/30d", store=f"unix://{LOGIN}{path}?db=3&timeout=10", on_store_error="raise") as limiter:
            assert limiter.try_acquire("k").remaining == 4, "another database"
    finally:
        node.stop()
