"""Which store a URL and the options of `limits` mean. Errors are `limits.errors.ConfigurationError`, as there.

Options that headgate knows: key_prefix, connection_pool, socket_timeout, socket_connect_timeout, max_connections,
service_name, sentinel_kwargs, startup_nodes, username, password, db, ssl and ssl_...; and its own: timeout,
connect_timeout, hash_keys, max_keys, on_store_error. What only tunes another client is ignored.
"""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

import redis
import redis.asyncio
from limits.errors import ConfigurationError

from headgate.clock import SystemClock
from headgate.stores.memory import MemoryStore
from headgate.stores.redis import RedisStore
from headgate.stores.settings import without_secrets

# Schemes of `limits` without async+, and what headgate calls them.
SCHEMES = {
    "memory": "memory",
    "redis": "redis",
    "rediss": "rediss",
    "redis+unix": "unix",
    "redis+sentinel": "redis+sentinel",
    "redis+cluster": "redis+cluster",
    "valkey": "redis",
    "valkeys": "rediss",
    "valkey+unix": "unix",
    "valkey+sentinel": "redis+sentinel",
    "valkey+cluster": "redis+cluster",
}

PREFIX = "LIMITS"  # as in `limits`, so that an ACL for its keys stays right

# Seconds for a call. Longer than headgate's own: here a call that is late is an exception in a request.
TIMEOUT = 1.0

_STEP_BACK = 1_000_000  # microseconds; less is two threads that read the clock one after the other

# Options of redis-py and coredis that have no meaning for headgate, which makes its own connections and retries.
_IGNORED = {
    *("retry", "retry_on_error", "retry_on_timeout", "single_connection_client", "auto_close_connection_pool"),
    *("require_full_coverage", "read_from_replicas", "reinitialize_steps", "dynamic_startup_nodes", "use_replicas"),
    *("cluster_error_retry_attempts", "load_balancing_strategy", "implementation", "decode_responses", "protocol"),
    *("encoding", "encoding_errors", "max_idle_time", "idle_check_interval", "stream_timeout", "min_other_sentinels"),
}


class WallClock(SystemClock):
    """`time.time()`, so that tests which patch it move the windows in memory, as they do in `limits`.

    When the wall clock is set back, this clock goes on from where it was.
    """

    def __init__(self) -> None:
        self._latest = 0
        self._ahead = 0  # microseconds that the wall clock was set back in all

    def now(self) -> int:
        now = int(time.time() * 1_000_000) + self._ahead
        if now < self._latest - _STEP_BACK:
            self._ahead += self._latest - now
        self._latest = max(now, self._latest)
        return self._latest


def is_memory(uri: str) -> bool:
    """Whether *uri* is one of memory://, with or without async+ and headgate+ before it."""
    return _scheme(uri) == "memory"


def memory_store(options: dict[str, Any]) -> MemoryStore:
    """A store in this process; of *options* it takes max_keys, and a clock in tests."""
    return MemoryStore(max_keys=options.get("max_keys", 1_000_000), clock=options.get("clock") or WallClock())


def redis_store(uri: str, options: dict[str, Any], *, blocking: bool) -> RedisStore:
    """The Redis of *uri*, for threads if *blocking*, else for asyncio."""
    given = {name: value for name, value in options.items() if value is not None and name not in _IGNORED}
    ours = {"prefix": given.pop("key_prefix", PREFIX), "hash_keys": given.pop("hash_keys", False)}
    pool = given.pop("connection_pool", None)
    try:
        if pool is not None:
            return RedisStore(_client(pool, blocking), **ours)
        return RedisStore(_url(uri, given), **ours)
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"headgate cannot use {without_secrets(uri)!r} as a storage: {error}") from error


def _client(pool: Any, blocking: bool) -> redis.Redis | redis.asyncio.Redis:
    if blocking and isinstance(pool, redis.ConnectionPool):
        return redis.Redis(connection_pool=pool)
    if not blocking and isinstance(pool, redis.asyncio.ConnectionPool):
        return redis.asyncio.Redis(connection_pool=pool)
    wanted = "redis.ConnectionPool" if blocking else "redis.asyncio.ConnectionPool"
    raise TypeError(f"connection_pool must be a {wanted}, got {type(pool).__module__}.{type(pool).__name__}")


def _scheme(uri: str) -> str:
    scheme = uri.partition("://")[0].removeprefix("async+").removeprefix("headgate+")
    if scheme not in SCHEMES:
        raise ConfigurationError(f"headgate.limits does not know the scheme {scheme!r:.40}; use {', '.join(SCHEMES)}")
    return SCHEMES[scheme]


def _url(uri: str, options: dict[str, Any]) -> str:
    """*uri* and *options* as one URL of headgate, which says what is wrong with it."""
    parts, scheme = urlsplit(uri), _scheme(uri)
    hosts, path, query = parts.netloc, parts.path, dict(parse_qsl(parts.query, keep_blank_values=True))
    if nodes := options.pop("startup_nodes", None):
        hosts = ",".join(f"{node.host}:{node.port}" for node in nodes)
    if scheme == "redis+sentinel":
        path = path.strip("/") or quote(options.pop("service_name", ""), safe="")
        path = "/" + path
        options.pop("service_name", None)
        query |= _sentinel_auth(parts.username, parts.password, options)
    if not {"timeout", "socket_timeout"} & {*query, *options}:
        query["timeout"] = str(TIMEOUT)
    query |= {name: _text(name, value) for name, value in options.items()}
    return f"{scheme}://{hosts}{path}?{urlencode(query, quote_via=quote)}"


def _sentinel_auth(username: str | None, password: str | None, options: dict[str, Any]) -> dict[str, str]:
    """The user and password for Sentinels: those of the servers, as in `limits`, unless sentinel_kwargs has others."""
    auth = {"username": username and unquote(username), "password": password and unquote(password)}
    auth |= {name: options[name] for name in auth if name in options}
    auth |= {name: value for name, value in options.pop("sentinel_kwargs", {}).items() if name in auth}
    return {f"sentinel_{name}": str(value) for name, value in auth.items() if value}


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    raise TypeError(f"the option {name} must be text or a number; for more hand in a connection_pool")
