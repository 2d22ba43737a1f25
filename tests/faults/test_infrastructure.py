"""The servers and the proxy of these tests do what they say, without headgate."""

import gc
import socket
import time
import warnings
from contextlib import suppress

import pytest
import redis
from redis.crc import key_slot

from tests.support.clusters import ONCE, Cluster, Node, wait_until
from tests.support.proxy import FaultyProxy
from tests.support.servers import LOGIN

pytestmark = pytest.mark.xdist_group("faults-cluster")


def test_a_cluster_promotes_and_moves(cluster: Cluster) -> None:
    slot = key_slot(b"a")
    victim = cluster.primary(slot)
    victim.ask("SET", "{a}1", "x")
    victim.ask("WAIT", 1, 1000)
    cluster.kill(victim)
    cluster.wait_for_promotion(slot, victim)
    promoted = cluster.primary(slot)
    assert promoted is not victim
    cluster.heal()
    assert len(cluster.primaries()) == 3
    assert list(cluster.migrate(slot)) == ["importing", "migrating", "{a}1", "moved", "moved", "moved"]
    assert cluster.primary(slot) is not promoted
    assert cluster.primary(slot).ask("GET", "{a}1") == "x"


def test_proxy(node: Node) -> None:
    """The proxy breaks what it is told to break."""
    with (
        FaultyProxy(node.port) as proxy,
        redis.Redis.from_url(proxy.bare_url.replace(LOGIN, ""), socket_timeout=20, retry=ONCE) as client,
        redis.Redis.from_url(proxy.bare_url.replace(LOGIN, ""), socket_timeout=0.2, retry=ONCE) as hasty,
    ):
        assert client.ping()
        proxy.delay = 0.1
        begun = time.monotonic()
        assert client.ping()
        assert time.monotonic() - begun >= 0.1
        proxy.delay = 0.0
        for fault in ("swallow_replies", "swallow_requests"):
            node.ask("SET", "n", 0)
            wait_until(hasty.ping, "it is connected")
            setattr(proxy, fault, True)
            with pytest.raises(redis.TimeoutError):
                hasty.incr("n")
            if fault == "swallow_replies":
                wait_until(lambda: node.ask("GET", "n") == "1", "it was done all the same")
            setattr(proxy, fault, False)
            assert client.ping()
            assert int(node.ask("GET", "n")) == (fault == "swallow_replies")
        before = len(proxy.connections)
        proxy.cut()
        with suppress(redis.ConnectionError):  # redis-py may look before it asks
            client.ping()
        assert client.ping()
        assert len(proxy.connections) == before + 1
        sha = client.script_load("return {1, 1, 9, 0, 0}")
        assert client.evalsha(sha, 0) == [1, 1, 9, 0, 0]
        proxy.truncate = 6
        with pytest.raises(redis.ConnectionError):
            client.evalsha(sha, 0)
        assert client.evalsha(sha, 0) == [1, 1, 9, 0, 0]


def test_proxy_that_ends(node: Node) -> None:
    """A client that connects while it ends is cut off: a warning about it would come in the middle of another test."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(50):
            with FaultyProxy(node.port) as proxy:
                port = int(proxy.url.rsplit(":", 1)[1].split("/")[0])
                client = socket.create_connection(("127.0.0.1", port))
            client.close()
        gc.collect()
    assert not [str(warning.message) for warning in seen]
