"""The URL of a service that is used as a store.

headgate://:token@host:6380          its port of the Redis protocol; headgates:// for TLS
headgate+http://:token@host:8080     its HTTP port, where the other is closed; headgate+https:// by a proxy with TLS

Behind a question mark: timeout, connect_timeout, retry_pause (seconds), min_connections, max_connections, retries, and
for TLS ssl_ca_certs, ssl_certfile, ssl_keyfile and the other ssl_... of redis-py.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Unpack
from urllib.parse import urlsplit

import redis

from headgate.redis.url import RedisOptions, RedisURL, parse_url
from headgate.remote.commands import READY
from headgate.remote.http import HTTPConnection, HTTPSConnection
from headgate.stores.settings import without_secrets

FORM = (
    "write headgate://:token@host:6380, or headgates:// for TLS; over HTTP headgate+http://:token@host:8080, or "
    "headgate+https://"
)


class Scheme(NamedTuple):
    """What a URL with this scheme connects to."""

    redis: str  # the scheme of a Redis that is connected to in the same way
    port: int  # if the URL has none
    connection: type[redis.connection.AbstractConnection] | None = None  # None: that of Redis


SCHEMES = {
    "headgate": Scheme("redis", 6380),
    "headgates": Scheme("rediss", 6380),
    "headgate+http": Scheme("redis", 8080, HTTPConnection),
    "headgate+https": Scheme("rediss", 443, HTTPSConnection),
}


def parse_service_url(url: str, **options: Unpack[RedisOptions]) -> RedisURL:
    """Parse a store's URL; *options* win over the URL's. Raises a ValueError that says what would be right."""
    safe_url = without_secrets(url)
    try:
        parts = urlsplit(url)
        if parts.scheme not in SCHEMES:
            raise ValueError(f"unknown scheme {parts.scheme!r:.40}")
        scheme = SCHEMES[parts.scheme]
        if parts.path.strip("/"):
            raise ValueError("there is nothing behind the port but options, which follow a question mark")
        if not parts.hostname:
            raise ValueError("the host is missing")
        given, at, host = parts.netloc.rpartition("@")
        if given and ":" not in given:
            given = ":" + given  # a token without a user
        if ":" not in host.rpartition("]")[2]:
            host = f"{host}:{scheme.port}"
        query = f"?{parts.query}" if parts.query else ""
    except ValueError as error:
        raise ValueError(f"cannot read the store URL {safe_url!r}: {error}; {FORM}") from None
    found = parse_url(f"{scheme.redis}://{given}{at}{host}{query}", written=url, form=FORM, **options)
    if scheme.connection is None:
        return dataclasses.replace(found, readiness=READY)
    own = {name: value for name, value in found.options.items() if name not in ("username", "password")}
    own["token"] = found.options.get("password") or ""
    return dataclasses.replace(found, readiness=READY, connection=scheme.connection, options=own)
