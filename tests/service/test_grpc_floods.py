"""Floods of HTTP/2 over real sockets: a polite client beside them gets every answer, and the service does not grow."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from envoy.service.ratelimit.v3 import rls_pb2, rls_pb2_grpc

from tests.support.floods import NEVER_CUT_OFF, OVER_SOCKETS, Flooder
from tests.support.grpc_worker import LIMITS, PATIENCE, SERVED
from tests.support.servers import free_port
from tests.support.service import Service, eventually

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("grpc floods")]  # one service for all of them

GROWTH = 32 << 20  # bytes that all floods together may add to the worker
CALLS = 30  # of the polite client, at least
SENT = 1 << 19  # bytes of a flood that is not cut off, at least
CUT_OFF = 2  # connections of each flood, at least


class FloodedService:
    """A service and the port that is flooded."""

    def __init__(self) -> None:
        self.port = free_port()
        self.service = Service("--grpc-port", str(self.port), config=SERVED, files={"limits.yaml": LIMITS})
        with grpc.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            for _ in range(100):
                call_politely(channel)
        self.before = self.memory()

    def memory(self) -> int:
        """Resident bytes of the worker (Linux)."""
        [worker] = self.service.workers()
        found = next(line for line in Path(f"/proc/{worker}/status").read_text().splitlines() if "VmRSS" in line)
        return 1024 * int(found.split()[1])


@pytest.fixture(scope="module")
def flooded() -> Iterator[FloodedService]:
    made = FloodedService()
    yield made
    made.service.forget()


def call_politely(channel: grpc.Channel) -> None:
    request = rls_pb2.RateLimitRequest(domain="demo", descriptors=[{"entries": [{"key": "now", "value": "polite"}]}])
    answer = rls_pb2_grpc.RateLimitServiceStub(channel).ShouldRateLimit(request, timeout=PATIENCE)
    assert answer.overall_code == rls_pb2.RateLimitResponse.OK
    assert answer.statuses[0].current_limit.requests_per_unit == 1_000_000


@pytest.mark.parametrize("name", OVER_SOCKETS)
def test_polite_client(flooded: FloodedService, name: str) -> None:
    """Every call of a polite client is answered while others flood the port; almost all are cut off again and again."""
    flooder = Flooder(name, flooded.port, connections=2)
    calls = 0

    def enough() -> bool:
        nonlocal calls
        if calls < CALLS or not calls % 10:
            call_politely(channel)
        calls += 1
        return calls >= CALLS and (flooder.sent >= SENT if name in NEVER_CUT_OFF else flooder.cut_off >= CUT_OFF)

    try:
        with grpc.insecure_channel(f"127.0.0.1:{flooded.port}") as channel:
            eventually(enough, f"the flood is cut off: {flooder.cut_off} times after {flooder.sent} bytes")
    finally:
        flooder.stop()
    assert flooded.memory() - flooded.before < GROWTH
    assert "Traceback" not in flooded.service.log()
