"""Servers, stores and their callers, and a bound on every test's time."""

import gc
import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, get_args, get_type_hints

import hypothesis
import pytest

from headgate import COMPILED
from headgate.testing import ManualClock
from tests.service.browser.chromium import Chromium
from tests.support.callers import Callers, MakeLimiter
from tests.support.clusters import Cluster, Node, Sentinels
from tests.support.left_open import note_openers
from tests.support.postgres import PostgresServer
from tests.support.servers import KINDS, PATIENCE, Server, Servers, quiet_port
from tests.support.service import Service
from tests.support.stores import STORES, OneServer, OpenStores, postgresql, rows, service

pytest.register_assert_rewrite("tests.support.scenario")

# The same examples on every run, so that a red build is always about the change: `quick` is what `make check` runs.
# `pytest --hypothesis-profile=explore` looks further.
hypothesis.settings.register_profile("quick", deadline=None, derandomize=True, database=None, max_examples=8)
hypothesis.settings.register_profile("steady", deadline=None, derandomize=True, database=None, max_examples=40)
hypothesis.settings.register_profile("explore", deadline=None, database=None, max_examples=1_000, print_blob=True)
hypothesis.settings.load_profile("steady")

DEFAULT_BOUND = 120  # seconds; against hanging only

STARTED = (
    Server,
    PostgresServer,
    Sentinels,
    Cluster,
    Service,
    Chromium,
)  # what a fixture gives that starts processes which serve


# What tests/web asks of the core alone.
CORE = ("asgi", "client_ip", "core", "limit", "permits", "quota_function", "wsgi")
WITHOUT_FRAMEWORK = {f"test_{name}.py" for name in CORE}


@pytest.hookimpl(trylast=True)  # after pytest has set its hook for errors of finalizers
def pytest_configure(config: pytest.Config) -> None:
    note_openers()
    config.addinivalue_line("markers", f"bounded(seconds): fail after so long; {DEFAULT_BOUND} if not marked")
    config.addinivalue_line(
        "markers",
        f"store_timeout(seconds): the time-out that the URLs of test servers carry; {PATIENCE:g} if not "
        "marked. None: no setting, so that the shipped time-outs hold",
    )
    config.addinivalue_line("markers", "server: starts a server; set by itself for tests that use a server's fixture")
    config.addinivalue_line("markers", "build(name): is about the build 'plain' or 'compiled'; left out for the other")
    config.addinivalue_line("markers", "once: above what is compiled, so that `make test` runs it with one build only")
    config.addinivalue_line("markers", "slow: needs no server, but more than two seconds; `make check` leaves it out")
    config.addinivalue_line("markers", "framework: needs a web framework; set by itself, `make check` leaves it out")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no web framework where `-m` leaves out all tests that need one: every worker would do so."""
    return True if "not framework" in config.option.markexpr and _needs_framework(collection_path) else None


def _needs_framework(path: Path) -> bool:
    tests = path.name.startswith("test_") and path.name not in WITHOUT_FRAMEWORK
    return tests and path.parent.name in ("web", "limits")


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that need a server: by the types that their fixtures give, and by the rows of their tables.

    A test that starts a server in its body, or another program, is marked by hand. `make check` forbids servers, so a
    mark that was forgotten fails there, on every machine.
    """
    for item in items:
        if _needs_framework(item.path):
            item.add_marker("framework")
        if isinstance(item, pytest.Function) and (_has_server_row(item) or _has_server_fixture(item)):
            item.add_marker("server")
    other = [item for item in items if _build_of(item) not in ("", "compiled" if COMPILED else "plain")]
    items[:] = [item for item in items if item not in other]
    config.hook.pytest_deselected(items=other)


def pytest_collection_finish() -> None:
    """Leave the thousands of collected tests out of every later garbage collection."""
    gc.freeze()


def _build_of(item: pytest.Item) -> str:
    marker = item.get_closest_marker("build")
    return marker.args[0] if marker else ""


def _has_server_row(item: pytest.Function) -> bool:
    rows = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return any(type(row) is str and row in KINDS for row in rows)


def _has_server_fixture(item: pytest.Function) -> bool:
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    return any(_starts_server(overriding[-1].func) for overriding in fixtures)


@cache
def _starts_server(fixture: Callable[..., Any]) -> bool:
    ours = fixture.__module__.startswith("tests.")
    return ours and _mentions_server(get_type_hints(fixture)["return"])


def _mentions_server(kind: Any) -> bool:
    """Whether this type is one of STARTED, or made of one, as Iterator[Server] is."""
    return (isinstance(kind, type) and issubclass(kind, STARTED)) or any(map(_mentions_server, get_args(kind)))


@pytest.fixture(scope="module", autouse=True)
def nothing_left_open() -> Iterator[None]:
    """Find what the tests of a module left open, before a test of another module is blamed for it."""
    yield
    gc.collect()


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
def store_timeout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the URLs of this test's servers say its time-out. The product itself runs as it is shipped."""
    marker = request.node.get_closest_marker("store_timeout")
    if marker:
        monkeypatch.setattr("tests.support.servers.url_timeout", marker.args[0])


@pytest.fixture
def patient_health(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give `health()` ten seconds: it has one, no setting, and a machine may stand still for longer than that."""
    monkeypatch.setattr("headgate.stores.resp_store.HEALTH_TIMEOUT", 10.0)


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    """Start servers as tests ask for them, one of a kind in each worker, and stop them in the end."""
    servers = Servers()
    yield servers
    servers.stop()


@pytest.fixture
def redis_server(servers: Servers) -> Server:
    """The default server, empty."""
    return servers.empty()


@pytest.fixture
def redis_url(redis_server: Server) -> str:
    return redis_server.url


@pytest.fixture(params=[KINDS[0], *(pytest.param(kind, marks=pytest.mark.once) for kind in KINDS[1:])])
def any_redis_server(request: pytest.FixtureRequest, servers: Servers) -> Server:
    """Every kind of server in turn, empty."""
    return servers.empty(request.param)


@pytest.fixture
def any_redis_url(any_redis_server: Server) -> str:
    return any_redis_server.url


@pytest.fixture(scope="session")
def kept_postgres() -> Iterator[PostgresServer]:
    """One PostgreSQL for all tests of a worker that leave it running."""
    server = PostgresServer()
    yield server
    server.stop()


@pytest.fixture
def postgres_server(kept_postgres: PostgresServer) -> PostgresServer:
    """A PostgreSQL whose database is empty."""
    kept_postgres.rows("DROP SCHEMA public CASCADE; CREATE SCHEMA public AUTHORIZATION headgate")
    return kept_postgres


@pytest.fixture
def mortal_server() -> Iterator[Server]:
    """A server that a test may kill."""
    server = Server(KINDS[0], port=quiet_port)
    yield server
    server.stop()


@pytest.fixture
def node() -> Iterator[Node]:
    """A server that the test may do anything to."""
    node = Node(KINDS[0])
    yield node
    node.stop()


@pytest.fixture
def sentinels() -> Iterator[Sentinels]:
    """New ones for each test: Sentinels wait several seconds between two failovers."""
    sentinels = Sentinels(KINDS[0])
    yield sentinels
    sentinels.stop()


@pytest.fixture(scope="session")
def _cluster() -> Iterator[Cluster]:
    cluster = Cluster(KINDS[0])
    yield cluster
    cluster.stop()


@pytest.fixture
def cluster(_cluster: Cluster) -> Cluster:
    """One Cluster for all tests of a worker; whole and empty."""
    _cluster.heal()
    _cluster.flush()
    return _cluster


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def redis_limiter(redis_server: Server) -> Iterator[MakeLimiter]:
    """Make limiters on the default server."""
    with Callers(OneServer(redis_server), "sync") as callers:
        yield callers.limiter


@pytest.fixture
def any_redis_limiter(any_redis_server: Server) -> Iterator[MakeLimiter]:
    """Make limiters on every kind of server in turn."""
    with Callers(OneServer(any_redis_server), "sync") as callers:
        yield callers.limiter


@pytest.fixture(scope="session")
def open_stores() -> Iterator[OpenStores]:
    """Open stores as tests ask for them, one of each row in a worker, and close them in the end."""
    with OpenStores() as stores:
        yield stores


def _callers(request: pytest.FixtureRequest, stores: OpenStores) -> Callers:
    name, colour = request.param
    return Callers(stores.empty(name), colour, whole=STORES[name].whole, share=STORES[name].share)


@pytest.fixture(params=rows(lambda row: row.whole))
def callers(request: pytest.FixtureRequest, open_stores: OpenStores) -> Iterator[Callers]:
    """Callers of each store, in each colour: see tests/stores."""
    with _callers(request, open_stores) as callers:
        yield callers


@pytest.fixture(params=rows(lambda row: row.whole, colours=("sync",)))
def sync_callers(request: pytest.FixtureRequest, open_stores: OpenStores) -> Iterator[Callers]:
    with _callers(request, open_stores) as callers:
        yield callers


@pytest.fixture(params=rows(lambda row: row.whole, colours=("async",)))
def async_callers(request: pytest.FixtureRequest, open_stores: OpenStores) -> Iterator[Callers]:
    with _callers(request, open_stores) as callers:
        yield callers


@pytest.fixture(params=rows(lambda row: True))
def any_callers(request: pytest.FixtureRequest, open_stores: OpenStores) -> Iterator[Callers]:
    """Callers of every row: also other servers, and other ways to them."""
    with _callers(request, open_stores) as callers:
        yield callers


@pytest.fixture(params=rows(lambda row: row.outages))
def failing_callers(request: pytest.FixtureRequest, open_stores: OpenStores) -> Iterator[Callers]:
    """Callers of a store that can fail."""
    with _callers(request, open_stores) as callers:
        yield callers


@pytest.fixture(params=rows(lambda row: row.outages and row.open not in (postgresql, service)))
def redis_callers(request: pytest.FixtureRequest, open_stores: OpenStores) -> Iterator[Callers]:
    """Callers of one Redis or Valkey that can fail."""
    with _callers(request, open_stores) as callers:
        yield callers
