"""The URL of a service that is used as a store.

headgate://:token@host:6380      its port of the Redis protocol; headgates:// for TLS

Behind a question mark: timeout, connect_timeout, retry_pause (seconds), min_connections, max_connections, retries, and
for TLS ssl_ca_certs, ssl_certfile, ssl_keyfile and the other ssl_... of redis-py.
"""

from __future__ import annotations

import dataclasses
from typing import Unpack
from urllib.parse import urlsplit

from headgate.redis.url import RedisOptions, RedisURL, parse_url
from headgate.remote.commands import READY
from headgate.stores.settings import without_secrets

FORM = "write headgate://:token@host:6380, or headgates:// for TLS"
PORT = 6380
_SCHEMES = {"headgate": "redis", "headgates": "rediss"}


def parse_service_url(url: str, **options: Unpack[RedisOptions]) -> RedisURL:
    """Parse a store's URL; *options* win over the URL's. Raises a ValueError that says what would be right."""
    safe_url = without_secrets(url)
    scheme = url.partition("://")[0]
    try:
        parts = urlsplit(url)
        if scheme not in _SCHEMES:
            raise ValueError(f"unknown scheme {scheme!r:.40}")
        if parts.path.strip("/"):
            raise ValueError("there is nothing behind the port but options, which follow a question mark")
        if not parts.hostname:
            raise ValueError("the host is missing")
        given, at, host = parts.netloc.rpartition("@")
        if given and ":" not in given:
            given = ":" + given  # a token without a user
        if ":" not in host.rpartition("]")[2]:
            host = f"{host}:{PORT}"
        query = f"?{parts.query}" if parts.query else ""
    except ValueError as error:
        raise ValueError(f"cannot read the store URL {safe_url!r}: {error}; {FORM}") from None
    found = parse_url(f"{_SCHEMES[scheme]}://{given}{at}{host}{query}", written=url, form=FORM, **options)
    return dataclasses.replace(found, readiness=READY)
