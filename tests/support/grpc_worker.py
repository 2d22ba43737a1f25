"""The gRPC listener on a port of its own, in a thread, with rules that do what a test wants to see."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
import trustme
import uvloop

from headgate.errors import StoreUnavailable
from headgate.service.envoy_settings import GrpcSettings
from headgate.service.listeners import Listener
from headgate.service.rls_messages import OK, OVER_LIMIT, DescriptorStatus, RateLimitRequest, RateLimitResponse
from headgate.service.settings import Settings, TLSSettings
from headgate.service.shared_counters import PROBLEMS, STOPPING
from headgate.service.tokens import Tokens, digest
from tests.support.servers import check_allowed

T = TypeVar("T")
PATIENCE = 30.0  # seconds
LIMITS = "domain: demo\ndescriptors:\n- {key: now, rate_limit: {unit: hour, requests_per_unit: 1000000}}\n"
SERVED = "[envoy]\nfiles = ['limits.yaml']\n"


class ScriptedRules:
    """Decides by the key of the first entry of a request; its value is the number that remains."""

    def __init__(self) -> None:
        self.timeouts: list[float | None] = []
        self.waiting = 0
        self.cancelled = 0
        self.go_on = asyncio.Event()

    def decide_now(self, request: RateLimitRequest) -> RateLimitResponse | None:
        what, value = request.descriptors[0].entries[0]
        if what == "now":
            return answer(int(value))
        if what == "over":
            return RateLimitResponse(OVER_LIMIT, [DescriptorStatus(OVER_LIMIT)], [("retry-after", value)])
        if what == "bug":
            raise RuntimeError("a bug")
        if what == "outage now":
            raise StoreUnavailable("nothing at redis:6379")
        return None

    async def decide(self, request: RateLimitRequest, timeout: float | None) -> RateLimitResponse:
        self.timeouts.append(timeout)
        what, value = request.descriptors[0].entries[0]
        if what == "outage":
            raise StoreUnavailable("nothing at redis:6379")
        if what == "wrong":
            raise ValueError("the domain is empty")
        if what == "bug later":
            raise RuntimeError("a bug")
        if what == "later":
            await asyncio.sleep(0)
            return answer(int(value))
        self.waiting += 1
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.waiting -= 1
        return answer(int(value))


def answer(remaining: int) -> RateLimitResponse:
    return RateLimitResponse(OK, [DescriptorStatus(OK, ("", 100, 2), remaining, 59.5)])


class GrpcWorker:
    """A listener as a worker of the service has it, without the rest of the worker."""

    def __init__(
        self,
        *,
        rules: bool = True,
        tokens: Sequence[tuple[str, str]] = (),
        tls: TLSSettings | None = None,
        port: int = 0,
        grpc: GrpcSettings | None = None,
        new_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
    ) -> None:
        check_allowed()
        self.loop = new_loop()
        self.rules = ScriptedRules()
        settings = Settings(grpc_port=port, tls=tls, grpc=grpc or GrpcSettings())
        self.state = SimpleNamespace(
            envoy=self.rules if rules else None,
            tokens=Tokens([(digest(token), scope) for token, scope in tokens]),
            settings=settings,
        )
        header, gauges = [0] * (STOPPING + 1), [0] * (PROBLEMS + 1)
        app = SimpleNamespace(state=self.state, counters=SimpleNamespace(header=header), gauges=gauges)
        self.app: Any = app
        self.listener = Listener("grpc", cast(Any, app), self.loop, settings)
        self.port: int = self.listener.info()["port"]
        self.target = f"127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run *coroutine* on the worker's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE)

    def let_go(self) -> None:
        """End the calls that wait."""
        self.loop.call_soon_threadsafe(self.rules.go_on.set)

    def failures(self) -> int:
        found: int = self.app.gauges[PROBLEMS]
        return found

    def close_listener(self) -> None:
        self.run(self.listener.close())

    def stop(self) -> None:
        self.close_listener()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE)
        self.loop.close()


Worker = Callable[..., GrpcWorker]


@pytest.fixture
def start_worker() -> Iterator[Worker]:
    """Start workers that end with the test."""
    started: list[GrpcWorker] = []

    def begin(**options: Any) -> GrpcWorker:
        started.append(GrpcWorker(**options))
        return started[-1]

    yield begin
    for one in started:
        one.let_go()
        one.stop()


class Certificates:
    """An authority, a server's certificate, and a client's, as files."""

    def __init__(self, folder: Path) -> None:
        authority = trustme.CA()
        self.authority = authority.cert_pem.bytes()
        server = authority.issue_cert("127.0.0.1", "localhost")
        authority.cert_pem.write_to_path(folder / "ca.pem")
        server.private_key_pem.write_to_path(folder / "key.pem")
        for one in server.cert_chain_pems:
            one.write_to_path(folder / "cert.pem", append=True)
        client = authority.issue_cert("client.example")
        self.client_key = client.private_key_pem.bytes()
        self.client_chain = b"".join(one.bytes() for one in client.cert_chain_pems)
        self.plain = TLSSettings(str(folder / "cert.pem"), str(folder / "key.pem"))
        self.mutual = TLSSettings(str(folder / "cert.pem"), str(folder / "key.pem"), str(folder / "ca.pem"))
