"""headgate migrate URL: make the tables and functions of a PostgreSQL store, or see that they are there.

A limiter makes them itself on first use, if its user may. Where it may not, this command runs once as a user that may.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from headgate.errors import StoreUnavailable
from headgate.stores.base import SCHEMES, scheme_of

MIGRATE = (
    "Make the tables and functions of a PostgreSQL store, and replace the functions by those of this headgate. It can "
    "be run again, and from several hosts at a time. Tables of the same names that are not of headgate, or of another "
    "version of it, are an error, and are left as they are."
)


def add_migrate(commands: Any) -> None:
    parser = commands.add_parser("migrate", help="make the tables of a PostgreSQL store", description=MIGRATE)
    parser.add_argument("url", metavar="URL", help="postgresql://user:password@host:5432/database")
    parser.add_argument("--prefix", help="what the names of tables and functions start with (default headgate)")
    parser.add_argument("--sql", action="store_true", help="print the statements instead of running them")
    parser.set_defaults(run=migrate)


def migrate(options: argparse.Namespace) -> int:
    kind = SCHEMES.get(scheme_of(options.url))
    if kind is None or kind.name != "PostgreSQLStore":
        print(f"headgate: only a postgresql:// store has tables, got {scheme_of(options.url)!r}", file=sys.stderr)
        return 2
    given = {"prefix": options.prefix} if options.prefix is not None else {}
    try:
        store: Any = kind.load().from_url(options.url, **given)
        if options.sql:
            print(store.schema_sql())
            return 0
        store.migrate()
    except (ValueError, StoreUnavailable) as error:
        print(f"headgate: {error}", file=sys.stderr)
        return 1
    print(f"ready: {store.display_name}, tables {store.url.prefix}_state, {store.url.prefix}_log")
    return 0
