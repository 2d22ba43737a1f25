"""URLs and options of `limits`: which store they mean, and what is said about those that mean none."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import redis
import redis.asyncio
from limits import RateLimitItemPerHour
from limits.errors import ConfigurationError
from limits.storage import storage_from_string
from redis.cluster import ClusterNode

from headgate.limits import AsyncHeadgateStorage, HeadgateStorage
from headgate.redis.url import RedisURL
from tests.limits.conftest import Place
from tests.support.callers import COLOURS
from tests.support.servers import Server
from tests.support.stores import OpenStores


def parsed(uri: str, options: dict[str, Any]) -> RedisURL:
    """What the store of a storage has understood."""
    storage: Any = storage_from_string(f"headgate+{uri}", **options)
    url = storage.storage.url
    assert isinstance(url, RedisURL)
    return url


# URL, options of limits, and what they mean
MEANINGS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("redis://h:1/2", {}, {"kind": "single", "hosts": [("h", 1)], "timeout": 1.0, "connect_timeout": 1.0, "db": 2}),
    ("redis://h:1", {"socket_timeout": 5}, {"timeout": 5.0, "connect_timeout": 5.0}),
    ("redis://h:1", {"socket_connect_timeout": 30}, {"timeout": 1.0, "connect_timeout": 30.0}),
    ("redis://h:1?socket_timeout=3", {"socket_connect_timeout": 2}, {"timeout": 3.0, "connect_timeout": 2.0}),
    ("redis://h:1", {"timeout": 0.2, "connect_timeout": 0.1}, {"timeout": 0.2, "connect_timeout": 0.1}),
    ("redis://h:1", {"max_connections": 7}, {"max_connections": 7}),
    ("redis://h:1", {"username": "u", "password": "a&b=c/%"}, {"username": "u", "password": "a&b=c/%"}),
    ("redis://u:p%2Fq@h:1", {"db": 3}, {"username": "u", "password": "p/q", "db": 3}),
    ("redis://h:1", {"retry_on_timeout": True, "decode_responses": True, "retry": object()}, {"timeout": 1.0}),
    ("redis://h:1", {"socket_keepalive": True, "health_check_interval": 30}, {"health_check_interval": 30}),
    ("redis://h:1", {"client_name": "app", "username": None}, {"client_name": "app"}),
    ("rediss://h:1", {"ssl_ca_certs": "/ca.crt"}, {"ssl_ca_certs": "/ca.crt"}),
    ("redis+unix:///tmp/a.sock", {"db": 1}, {"hosts": [("/tmp/a.sock", 0)], "db": 1}),
    ("redis+unix://:pw@/tmp/a.sock?db=2", {}, {"hosts": [("/tmp/a.sock", 0)], "password": "pw", "db": 2}),
    ("valkey://h:1", {}, {"kind": "single", "hosts": [("h", 1)]}),
    ("valkeys://h:1", {"ssl_ca_certs": "/ca.crt"}, {"ssl_ca_certs": "/ca.crt"}),
    ("valkey+unix:///tmp/a.sock", {}, {"hosts": [("/tmp/a.sock", 0)]}),
    ("redis+cluster://a:1,b:2/", {}, {"kind": "cluster", "hosts": [("a", 1), ("b", 2)]}),
    ("redis+cluster://:pw@a:1", {"ssl": True, "ssl_cert_reqs": "none"}, {"password": "pw", "ssl_cert_reqs": "none"}),
    (
        "valkey+cluster://",
        {"startup_nodes": [ClusterNode("a", 1), ClusterNode("b", 2)], "password": "pw"},
        {"kind": "cluster", "hosts": [("a", 1), ("b", 2)], "password": "pw"},
    ),
    ("redis+sentinel://a:1,b:2/svc", {}, {"kind": "sentinel", "service": "svc", "hosts": [("a", 1), ("b", 2)]}),
    ("redis+sentinel://a:1", {"service_name": "svc", "use_replicas": False}, {"service": "svc"}),
    ("redis+sentinel://:pw@a:1/svc", {}, {"password": "pw", "sentinel_password": "pw"}),
    ("redis+sentinel://a:1/svc", {"password": "pw"}, {"password": "pw", "sentinel_password": "pw"}),
    (
        "valkey+sentinel://u:pw@a:1/svc",
        {"sentinel_kwargs": {"password": "other", "username": None, "socket_timeout": 1}, "db": 4},
        {"username": "u", "password": "pw", "sentinel_password": "other", "sentinel_username": None, "db": 4},
    ),
]


@pytest.mark.parametrize(("uri", "options", "meaning"), MEANINGS, ids=lambda value: str(value)[:60])
def test_meaning(uri: str, options: dict[str, Any], meaning: dict[str, Any]) -> None:
    url = parsed(uri, dict(options))
    for name, value in meaning.items():
        if name == "hosts":
            assert [(address.host, address.port) for address in url.hosts] == value
        elif name.startswith("sentinel_"):
            assert url.sentinel_options.get(name.removeprefix("sentinel_")) == value
        else:
            assert getattr(url, name, url.options.get(name)) == value, name


MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    ("redis+sentinel://a:1", {}, "service"),
    ("redis://h:nine", {}, "port"),
    ("redis://h:1", {"socket_timeout": -1}, "timeout"),
    ("redis://h:1", {"socket_tiemout": 1}, "socket_tiemout"),
    ("redis://h:1", {"credential_provider": object()}, "connection_pool"),
    ("redis://h:1", {"key_prefix": "{a}"}, "braces"),
    ("redis://h:1", {"connection_pool": object()}, "redis.ConnectionPool"),
    ("redis://h:1", {"connection_pool": redis.asyncio.ConnectionPool()}, "redis.ConnectionPool"),
    ("redis+cluster://a:1/3", {}, "database 0"),
]


@pytest.mark.parametrize(("uri", "options", "words"), MISTAKES, ids=lambda value: str(value)[:40])
def test_mistakes(uri: str, options: dict[str, Any], words: str) -> None:
    """They are found when the storage is made, as an error of `limits`, and the error shows no password."""
    with pytest.raises(ConfigurationError, match=words) as caught:
        storage_from_string(f"headgate+{uri}", **options)
    assert "sekret" not in str(caught.value)
    with pytest.raises(ConfigurationError) as caught:
        storage_from_string(f"headgate+{uri}".replace("://", "://:sekret@"), **options)
    assert "sekret" not in str(caught.value)


def test_unknown_scheme() -> None:
    with pytest.raises(ConfigurationError):
        storage_from_string("headgate+mongodb://h:1")
    with pytest.raises(ConfigurationError, match="redis"):
        HeadgateStorage("mongodb://h:1")


def test_memory_ignores_what_is_not_its_own() -> None:
    """As in `limits`, so that a setting can choose between stores."""
    storage: Any = storage_from_string("headgate+memory://", socket_timeout=1, key_prefix="app", max_keys=5)
    assert storage.storage.max_keys == 5


def test_prefix_and_hashed_keys(redis_place: Place, redis_server: Server) -> None:
    """Keys have the prefix of `limits`, or the one that is given; hashed, they show no address."""
    item = RateLimitItemPerHour(5)
    redis_place.limiter("fixed-window").hit(item, "192.0.2.7")
    assert redis_server.names() == ["LIMITS:first_window:{LIMITER/192.0.2.7/5/1/hour}"]
    storage = redis_place.storage(key_prefix="app", hash_keys=True)
    redis_place.limiter("fixed-window", storage).hit(item, "192.0.2.7")
    (name,) = [name for name in redis_server.names() if name.startswith("app:")]
    assert "192.0.2.7" not in name
    assert storage.reset() == 1, "the keys of the other prefix stay"
    assert len(redis_server.names()) == 1


def test_reset_takes_a_prefix_as_text(redis_place: Place, redis_server: Server) -> None:
    """Not as a pattern: the star of a prefix does not stand for the keys of others."""
    with redis_server.client() as client:
        client.set("app:other:key", "1")
    storage = redis_place.storage(key_prefix="app:*")
    storage.incr("k", 60)
    assert storage.reset() == 1
    assert redis_server.names() == ["app:other:key"]


def test_reset_of_many_keys(redis_place: Place, redis_server: Server) -> None:
    """More than the server lists at a time; those that `limits` has left are among them."""
    with redis_server.client() as client:
        client.mset({f"LIMITS:LIMITER/{number}/5/1/hour": 1 for number in range(3000)})
    assert redis_place.storage().reset() == 3000
    assert redis_server.names() == []


def test_connection_pool(redis_server: Server) -> None:
    """The application's own pool is used, and stays open."""
    with closing(redis.ConnectionPool.from_url(redis_server.bare_url, socket_timeout=20)) as pool:
        storage = HeadgateStorage("redis://", connection_pool=pool, socket_timeout=9)
        assert storage.incr("k", 60) == 1
        assert storage.check()
        assert storage.reset() == 1
        storage.storage.close()
        assert redis.Redis(connection_pool=pool).ping()


async def test_async_connection_pool(redis_server: Server) -> None:
    pool = redis.asyncio.ConnectionPool.from_url(redis_server.bare_url, socket_timeout=20)
    storage = AsyncHeadgateStorage("async+redis://", connection_pool=pool, implementation="redispy")
    assert await storage.incr("k", 60) == 1
    assert await storage.reset() == 1
    await storage.storage.aclose()
    await pool.disconnect()


@pytest.mark.server
@pytest.mark.xdist_group("stores-cluster")
@pytest.mark.parametrize("colour", COLOURS)
def test_cluster(colour: str, open_stores: OpenStores, loop: Any) -> None:
    """Every operation finds the server of its key, and `reset` all servers."""
    with Place(open_stores.empty("cluster").url, colour, loop) as place:
        every_operation(place.storage(socket_timeout=20), 20)


@pytest.mark.server
@pytest.mark.xdist_group("stores-sentinels")
@pytest.mark.parametrize("colour", COLOURS)
def test_sentinels(colour: str, open_stores: OpenStores, loop: Any) -> None:
    """These Sentinels want no password, so the one of the servers is not for them."""
    with Place(open_stores.empty("sentinels").url.removesuffix("/0"), colour, loop) as place:
        none = {"username": None, "password": None}
        every_operation(place.storage(socket_timeout=20, sentinel_kwargs=none), 3)


def every_operation(storage: Any, keys: int) -> None:
    item = RateLimitItemPerHour(3)
    for number in range(keys):
        key = item.key_for(str(number))
        assert storage.incr(key, 3600, 2) == storage.get(key) == 2
        assert storage.acquire_entry(key, 3, 3600, 3)
        assert not storage.acquire_entry(key, 3, 3600)
        assert storage.get_moving_window(key, 3, 3600)[1] == 3
        assert storage.acquire_sliding_window_entry(key, 3, 3600)
        assert sum(storage.get_sliding_window(key, 3600)[::2]) == 1
    storage.clear(item.key_for("0"))
    assert storage.get(item.key_for("0")) == 0
    assert storage.check()
    assert storage.reset() == 3 * (keys - 1)
