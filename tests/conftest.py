"""Servers, places to keep state, and a bound on every test's time."""

import signal
from collections.abc import Iterator
from types import FrameType

import hypothesis
import pytest

from headgate.testing import ManualClock
from tests.support.places import Place
from tests.support.servers import KINDS, Server, quiet_port

pytest.register_assert_rewrite("tests.support.scenario")

# The same examples on every run, so that a red build is always about the change.
# `pytest --hypothesis-profile=explore` looks further.
hypothesis.settings.register_profile("steady", deadline=None, derandomize=True, database=None, max_examples=60)
hypothesis.settings.register_profile("explore", deadline=None, database=None, max_examples=1_000, print_blob=True)
hypothesis.settings.load_profile("steady")

DEFAULT_BOUND = 120  # seconds; against hanging only


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"bounded(seconds): fail after so long; {DEFAULT_BOUND} if not marked")
    config.addinivalue_line("markers", "impatient: with time-outs of Redis that a test can wait for")


@pytest.fixture(autouse=True)
def bound(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that hangs, wherever it hangs: the alarm interrupts locks and sockets too."""
    marker = request.node.get_closest_marker("bounded")
    seconds = marker.args[0] if marker else DEFAULT_BOUND

    def ring(_signal: int, _frame: FrameType | None) -> None:
        pytest.fail(f"the test took longer than {seconds} s")  # a TimeoutError would be a fault of Redis to us

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give servers more time than users would: a busy machine is not what tests are about."""
    impatient = request.node.get_closest_marker("impatient")
    monkeypatch.setattr("headgate.redis.url.TIMEOUT", 0.5 if impatient else 10.0)
    monkeypatch.setattr("headgate.coordination.place.TIMEOUT", 2.0 if impatient else 10.0)
    monkeypatch.setattr("headgate.stores.redis.WITHIN", 1.0 if impatient else 10.0)


@pytest.fixture(scope="session")
def servers() -> Iterator[dict[str, Server]]:
    """Start servers as they are asked for, one of a kind in each worker, and stop them in the end."""
    started: dict[str, Server] = {}
    yield started
    for server in started.values():
        server.stop()


def _empty(servers: dict[str, Server], kind: str) -> Server:
    if kind not in servers:
        servers[kind] = Server(kind)
    servers[kind].flush()
    return servers[kind]


@pytest.fixture
def redis_server(servers: dict[str, Server]) -> Server:
    """The default server, empty."""
    return _empty(servers, KINDS[0])


@pytest.fixture
def redis_url(redis_server: Server) -> str:
    return redis_server.url


@pytest.fixture(params=KINDS)
def any_redis_server(request: pytest.FixtureRequest, servers: dict[str, Server]) -> Server:
    """Every kind of server in turn, empty."""
    return _empty(servers, request.param)


@pytest.fixture
def any_redis_url(any_redis_server: Server) -> str:
    return any_redis_server.url


@pytest.fixture
def mortal_server() -> Iterator[Server]:
    """A server that a test may kill."""
    server = Server(KINDS[0], port=quiet_port)
    yield server
    server.stop()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["memory", KINDS[0]])
def place(request: pytest.FixtureRequest, servers: dict[str, Server]) -> Iterator[Place]:
    """Memory, then the default Redis."""
    with Place(None if request.param == "memory" else _empty(servers, request.param)) as place:
        yield place


@pytest.fixture(params=["memory", *KINDS])
def every_place(request: pytest.FixtureRequest, servers: dict[str, Server]) -> Iterator[Place]:
    """Memory, then every kind of server."""
    with Place(None if request.param == "memory" else _empty(servers, request.param)) as place:
        yield place
