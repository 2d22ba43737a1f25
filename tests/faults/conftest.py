"""A server that keeps what it has written."""

from collections.abc import Iterator

import pytest

from tests.support.clusters import Node
from tests.support.servers import KINDS


@pytest.fixture
def durable_node() -> Iterator[Node]:
    """One that writes down every change before it answers, and reads it all when it starts again."""
    node = Node(KINDS[0], {"appendonly": "yes", "appendfsync": "always"})
    yield node
    node.stop()
