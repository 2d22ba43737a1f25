"""Where a tool keeps its state: memory, then a real server."""

from collections.abc import Iterator

import pytest

from headgate.stores.redis import RedisStore
from tests.support.awaited import Tools
from tests.support.servers import KINDS, Server, Servers


@pytest.fixture(params=["memory", KINDS[0]])
def url(request: pytest.FixtureRequest, servers: Servers) -> str:
    """Memory's, whose states nobody clears: tests take names of their own; then an empty server's."""
    if request.param == "memory":
        return "memory://"
    return servers.empty(request.param).url


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A name that no other test has."""
    return str(request.node.name)[-200:]


@pytest.fixture
def store(redis_server: Server) -> Iterator[RedisStore]:
    store = RedisStore(redis_server.url, timeout=10)
    yield store
    store.close()


@pytest.fixture(params=["threads", "asyncio"])
def tools(request: pytest.FixtureRequest) -> Tools:
    """The tools for threads, then those for asyncio, with one surface."""
    return Tools(request.param)
