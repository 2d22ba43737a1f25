"""The URL of a PostgreSQL store, parsed into a value that says where the database is and how long a call may take.

postgresql://user:password@host:5432/database      also postgres://; several hosts are separated by commas

Behind a question mark: timeout, connect_timeout (seconds), min_connections, max_connections, prefix, and everything
that libpq knows (sslmode, sslrootcert, target_session_attrs, host=/path/of/a/socket, ...). The password may also be in
PGPASSWORD or in a password file, as for every program that uses libpq.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypedDict, Unpack
from urllib.parse import parse_qsl, quote, urlsplit

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from headgate.postgresql.schema import check_prefix
from headgate.stores.settings import TIMEOUT, count, count_from_zero, number, seconds, without_secrets

FORM = "write postgresql://user:password@host:5432/database"
SCHEMES = ("postgresql", "postgres")
MIN_CONNECTIONS = 2
MAX_CONNECTIONS = 8  # of a process, for its threads: a server has 100 for all
PREFIX = "headgate"
_ESCAPE = "write / # ? @ of a password as %2F %23 %3F %40"


@dataclass(frozen=True)
class PostgresURL:
    """A parsed URL."""

    timeout: float  # seconds for a whole check, connecting included
    connect_timeout: float
    min_connections: int  # that a warm-up opens
    max_connections: int  # for threads
    prefix: str  # of the names of tables and functions
    parameters: dict[str, Any] = field(hash=False, repr=False)  # of libpq
    safe_url: str = ""  # the URL without its password

    def conninfo(self, **more: str) -> bytes:
        """What libpq connects by."""
        return make_conninfo(**{**self.parameters, **more}).encode()


class PostgresOptions(TypedDict, total=False):
    """Options of a `PostgreSQLStore`; None is as if left out."""

    timeout: float | None
    connect_timeout: float | None
    max_connections: int | None
    min_connections: int | None
    prefix: str | None


def parse_url(url: str, **options: Unpack[PostgresOptions]) -> PostgresURL:
    """Parse a store's URL; *options* win over the URL's. Raises a ValueError that says what would be right."""
    known = PostgresOptions.__annotations__
    if unknown := [name for name in options if name not in known]:
        raise TypeError(f"PostgreSQLStore has no option {unknown[0]!r}; known are {', '.join(known)}, hash_keys, clock")
    given = {name: _OURS[name](name, value) for name, value in options.items() if value is not None}
    safe_url = without_secrets(url)
    try:
        return _read(url, safe_url, given)
    except ValueError as error:
        raise ValueError(f"cannot read the store URL {safe_url!r}: {error}; {FORM}") from None


def _read(url: str, safe_url: str, given: dict[str, Any]) -> PostgresURL:
    scheme = urlsplit(url).scheme
    if scheme not in SCHEMES:
        raise ValueError(f"unknown scheme {scheme!r}")
    plain, _, query = url.partition("?")
    pairs = parse_qsl(query, keep_blank_values=True)
    said = {name: _OURS[name](name, _read_option(name, value)) for name, value in pairs if name in _OURS}
    rest = "&".join(f"{quote(name)}={quote(value, safe='')}" for name, value in pairs if name not in _OURS)
    try:
        parameters = conninfo_to_dict(f"{plain}?{rest}" if rest else plain)
    except psycopg.ProgrammingError as error:
        # its words are not shown: they may have half of a password in them
        why = "a parameter is unknown" if "invalid URI query parameter" in str(error) else "libpq cannot read it"
        raise ValueError(f"{why}; {_ESCAPE}") from None
    ours: dict[str, Any] = {"timeout": TIMEOUT, "max_connections": MAX_CONNECTIONS, "prefix": PREFIX} | said | given
    most: int = ours["max_connections"]
    least: int = ours.get("min_connections", min(MIN_CONNECTIONS, most))
    if least > most:
        raise ValueError(f"min_connections must be at most max_connections, which is {most}, got {least}")
    for port in str(parameters.get("port", "5432")).split(","):
        if port and not (port.isdecimal() and 0 < int(port) < 65536):  # empty: that of libpq
            raise ValueError(f"the port must be a number from 1 to 65535; {_ESCAPE}")
    parameters.setdefault("application_name", "headgate")
    connect_timeout = ours.get("connect_timeout", ours["timeout"])
    return PostgresURL(ours["timeout"], connect_timeout, least, most, ours["prefix"], parameters, safe_url)


def _read_option(name: str, value: str) -> int | float | str:
    return value if name == "prefix" else number(value)


_OURS: dict[str, Callable[[str, object], Any]] = {
    "timeout": seconds,
    "connect_timeout": seconds,
    "max_connections": count,
    "min_connections": count_from_zero,
    "prefix": lambda _, value: check_prefix(value),
}
