"""Servers to be killed, frozen and failed over."""

from collections.abc import Iterator

import pytest

from tests.support.clusters import Cluster, Node, Sentinels
from tests.support.servers import KINDS


@pytest.fixture
def node() -> Iterator[Node]:
    """A server that the test may do anything to."""
    node = Node(KINDS[0])
    yield node
    node.stop()


@pytest.fixture
def durable_node() -> Iterator[Node]:
    """One that writes down every change before it answers, and reads it all when it starts again."""
    node = Node(KINDS[0], {"appendonly": "yes", "appendfsync": "always"})
    yield node
    node.stop()


@pytest.fixture
def sentinels() -> Iterator[Sentinels]:
    """New ones for each test: Sentinels wait several seconds between two failovers."""
    sentinels = Sentinels(KINDS[0])
    yield sentinels
    sentinels.stop()


@pytest.fixture(scope="module")
def _cluster() -> Iterator[Cluster]:
    cluster = Cluster(KINDS[0])
    yield cluster
    cluster.stop()


@pytest.fixture
def cluster(_cluster: Cluster) -> Cluster:
    """One Cluster for all tests of a file; whole and empty."""
    _cluster.heal()
    _cluster.flush()
    return _cluster
