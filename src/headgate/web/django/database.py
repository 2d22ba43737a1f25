"""The setting HEADGATE["DATABASE"]: the store in a PostgreSQL that Django's DATABASES names, by connections of its own.

Only where the database is, and as which user, is taken from Django. A limit neither waits for the transaction of a
request (ATOMIC_REQUESTS) nor is rolled back with it, so it never uses the connection of a request.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, urlencode

from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.db.utils import ConnectionDoesNotExist

from headgate.web.limit import SetupError

# What headgate's URL says itself: a project's connect_timeout of seconds is not what a check should wait.
NOT_TAKEN = {"connect_timeout", "timeout", "prefix", "min_connections", "max_connections", "client_encoding"}


def database_url(alias: Any) -> str:
    """The URL of the store in the database *alias*. Raises a `SetupError` if there is none, or it is no PostgreSQL."""
    known = ", ".join(map(repr, connections.settings))
    if not isinstance(alias, str):
        raise SetupError(f"HEADGATE['DATABASE'] is the name of one of DATABASES ({known}), got {alias!r:.60}")
    try:
        database = connections[alias]
        if database.vendor != "postgresql":
            raise SetupError(
                f"HEADGATE['DATABASE'] is {alias!r}, a database of the engine {database.settings_dict['ENGINE']!r}; it "
                "needs a PostgreSQL: name another database, or use 'STORE': 'redis://...' or 'shared://NAME'"
            )
        from psycopg import pq  # the extra, which a project on another store does not need

        found = database.get_connection_params()
    except ConnectionDoesNotExist:
        raise SetupError(f"HEADGATE['DATABASE'] is {alias!r}, and DATABASES has {known}") from None
    except ImproperlyConfigured as error:
        raise SetupError(f"HEADGATE['DATABASE'] is {alias!r}, which Django cannot use: {error}") from error
    except ModuleNotFoundError as error:
        raise SetupError(f"HEADGATE['DATABASE'] needs more: pip install 'headgate[postgresql]' ({error})") from error
    libpq = {option.keyword.decode() for option in pq.Conninfo.get_defaults()}
    taken = {name: str(found[name]) for name in found if name in libpq - NOT_TAKEN and found[name] not in (None, "")}
    return "postgresql:///?" + urlencode(taken, quote_via=quote, safe="")
