"""The URL of a Redis store, parsed into a value that says which servers to ask and how to connect to them.

redis://user:password@host:6379/0                     one server; rediss:// for TLS, unix:///path for a socket
redis+sentinel://h1:26379,h2:26379/service-name/0     the primary that the Sentinels name
redis+cluster://h1:6379,h2:6379                       a Cluster; these hosts are asked for its map

Behind a question mark: timeout, connect_timeout, retry_pause (seconds), min_connections, max_connections, retries, and
everything that redis-py takes for a connection (ssl_ca_certs, ssl_certfile, ...); for Sentinels also sentinel_username
and sentinel_password. TLS for Sentinel and Cluster is ssl=true.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict, Unpack
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import redis

from headgate.stores.settings import TIMEOUT, count, count_from_zero, number, seconds, without_secrets

FORM = (
    "write redis://user:password@host:6379/0, rediss:// for TLS, unix:///path/to/socket, "
    "redis+sentinel://h1:26379,h2:26379/service-name/0 or redis+cluster://h1:6379,h2:6379"
)

MIN_CONNECTIONS = 4
MAX_CONNECTIONS = 64
RETRY_PAUSE = 0.005  # seconds before a server that said "not now" is asked again

# Without this redis-py sends HELLO and its name and version first: three round trips, for which a check has no time.
_SILENT = (
    {"driver_info": None}
    if "driver_info" in inspect.signature(redis.connection.AbstractConnection.__init__).parameters
    else {"lib_name": None, "lib_version": None}
)

_KINDS = {
    "redis": "single",
    "rediss": "single",
    "unix": "single",
    "redis+sentinel": "sentinel",
    "redis+cluster": "cluster",
}


class Address(NamedTuple):
    """A server; for a Unix socket the host is its path and the port 0."""

    host: str
    port: int
    sentinel: bool = False


@dataclass(frozen=True)
class RedisURL:
    """A parsed URL."""

    kind: str  # single, sentinel or cluster
    hosts: tuple[Address, ...]
    service: str  # for Sentinel
    timeout: float  # seconds for a whole check, connecting included
    connect_timeout: float
    max_connections: int  # to each server, for threads
    options: dict[str, Any] = field(hash=False)  # of a connection
    sentinel_options: dict[str, Any] = field(hash=False)
    connection: type[redis.connection.AbstractConnection] = redis.Connection
    safe_url: str = ""  # the URL without its password
    min_connections: int = MIN_CONNECTIONS  # that a warm-up opens to each server
    retries: int | None = None  # how often a call is sent again where that is safe; None: see `execute.may_retry`
    retry_pause: float = RETRY_PAUSE
    readiness: bytes = b""  # the command by which a probe sees that calls can be made; empty: that of Redis

    def connection_options(self, address: Address) -> dict[str, Any]:
        """The arguments of a redis-py connection to *address*, sync or async."""
        options = dict(self.sentinel_options if address.sentinel else self.options)
        options = {"protocol": 2} | _SILENT | options
        if address.port == 0:
            return options | {"path": address.host}
        ours = {"host": address.host, "port": address.port, "socket_connect_timeout": self.connect_timeout}
        return {"socket_keepalive": True} | options | ours


class RedisOptions(TypedDict, total=False):
    """Options of a `RedisStore`; None is as if left out."""

    timeout: float | None
    connect_timeout: float | None
    max_connections: int | None
    min_connections: int | None
    retries: int | None
    retry_pause: float | None


def parse_url(url: str, *, written: str = "", form: str = FORM, **options: Unpack[RedisOptions]) -> RedisURL:
    """Parse a store's URL; *options* win over the URL's. Raises a ValueError that says what would be right.

    *written* and *form* are for messages about a URL that was written in another form.
    """
    given = {name: _OURS[name](name, value) for name, value in options.items() if value is not None}
    safe_url = without_secrets(written or url)
    try:
        return _read(url, safe_url, given)
    except (ValueError, TypeError, redis.RedisError) as error:
        raise ValueError(f"cannot read the store URL {safe_url!r}: {error}; {form}") from None


def _read(url: str, safe_url: str, given: dict[str, Any]) -> RedisURL:
    parts = urlsplit(url)
    if parts.scheme not in _KINDS:
        raise ValueError(f"unknown scheme {parts.scheme!r}")
    kind = _KINDS[parts.scheme]
    query = {_ALIASES.get(name, name): value for name, value in parse_qsl(parts.query, keep_blank_values=True)}
    said = {name: check(name, number(query.pop(name))) for name, check in _OURS.items() if name in query}
    ours = {"timeout": TIMEOUT, "max_connections": MAX_CONNECTIONS} | said | given
    timeout: float = ours["timeout"]
    connect_timeout: float = ours.get("connect_timeout", timeout)
    most: int = ours["max_connections"]
    least: int = ours.get("min_connections", min(MIN_CONNECTIONS, most))
    if least > most:
        raise ValueError(f"min_connections must be at most max_connections, which is {most}, got {least}")
    if unknown := [name for name in query if name not in _KNOWN and not name.startswith(("ssl_", "sentinel_"))]:
        known = ", ".join([*_OURS, *sorted(_KNOWN)])
        raise ValueError(f"unknown parameter {', '.join(unknown)}; known are {known} and ssl_...")
    sentinel_auth = {name.removeprefix("sentinel_"): query.pop(name) for name in list(query) if name in _SENTINEL_AUTH}
    tls = query.pop("ssl", "false").lower() in ("true", "1", "yes") if kind != "single" else parts.scheme == "rediss"
    user, _, hosts = parts.netloc.rpartition("@")
    service, path = "", parts.path
    if kind == "sentinel":
        service, _, db = path.lstrip("/").partition("/")
        path = "/" + db
        if not service:
            raise ValueError("the name of the Sentinel service is missing behind the hosts")
    if parts.scheme == "unix":
        if not path.strip("/"):
            raise ValueError("the path of the socket is missing")
    elif not re.fullmatch(r"/?|/\d+", path):
        raise ValueError("the database behind the host must be a number")
    if kind == "cluster" and path.strip("/0"):
        raise ValueError("a Cluster has only database 0")
    if kind == "single" and "," in hosts:
        raise ValueError("one host only; several are for redis+sentinel:// and redis+cluster://")
    addresses = tuple(_host(host, 26379 if kind == "sentinel" else 6379, kind) for host in hosts.split(","))
    if parts.scheme == "unix":
        plain = url.split("?")[0] + ("?" + urlencode(query) if query else "")
    else:
        scheme = "rediss" if tls else "redis"
        netloc = (user + "@" if user else "") + (_bracketed(addresses[0].host) if addresses[0].host else "localhost")
        plain = f"{scheme}://{netloc}{path}" + ("?" + urlencode(query, quote_via=quote) if query else "")
    options = redis.connection.parse_url(plain)
    connection = options.pop("connection_class", redis.Connection)
    if parts.scheme == "unix":
        addresses = (Address(options.pop("path"), 0),)
    options.pop("host", None)
    options.pop("port", None)
    connection(**options)  # connects to nothing, but raises for an argument that it does not know
    sentinel_options = {name: value for name, value in options.items() if name.startswith("ssl")} | sentinel_auth
    return RedisURL(
        kind,
        addresses,
        service,
        timeout,
        connect_timeout,
        most,
        options,
        sentinel_options,
        connection,
        safe_url,
        least,
        ours.get("retries"),
        ours.get("retry_pause", RETRY_PAUSE),
    )


_ALIASES = {"socket_timeout": "timeout", "socket_connect_timeout": "connect_timeout"}  # redis-py's names for ours
_KNOWN = {"ssl", "db", "username", "password", "client_name", "protocol", "socket_keepalive", "health_check_interval"}
_KNOWN |= {"encoding", "encoding_errors", "decode_responses", "retry_on_timeout"}  # in URLs of other clients
_SENTINEL_AUTH = ("sentinel_username", "sentinel_password")


def _host(text: str, default_port: int, kind: str) -> Address:
    parts = urlsplit("//" + text)
    try:
        port = default_port if parts.port is None else parts.port
    except ValueError:
        port = 0
    if not 0 < port < 65536:  # not shown: it may be half of a password
        raise ValueError("the port must be a number from 1 to 65535; write / # ? @ of a password as %2F %23 %3F %40")
    if not parts.hostname and kind != "single":
        raise ValueError("a host is missing")
    return Address(parts.hostname or "localhost", port, kind == "sentinel")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


_OURS: dict[str, Callable[[str, object], Any]] = {
    "timeout": seconds,
    "connect_timeout": seconds,
    "max_connections": count,
    "min_connections": count_from_zero,
    "retries": count_from_zero,
    "retry_pause": seconds,
}
