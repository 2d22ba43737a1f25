"""headgate migrate, doctor and top: make the tables of a store, see whether it is fit, and what a service does.

Exit codes of doctor: 0, 3 with a warning, 1 with a problem, 2 for a bad URL; of top: 1 if the service does not answer;
of migrate: 1 if the tables cannot be made, 2 for a store that has none.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from http.client import HTTPException
from typing import Any

from headgate.cli.service import add_json, refuse
from headgate.errors import StoreUnavailable
from headgate.stores.base import SCHEMES, scheme_of
from headgate.stores.settings import without_secrets

CODES = {"ok": 0, "unknown": 0, "warning": 3, "problem": 1}
DOCTOR = (
    "Look at a store as a limiter would: does all that it needs work, how fast, is the server set up to keep limits? "
    "Rights are tried with keys of its own. What a server hides is unknown, which is no problem."
)
MIGRATE = (
    "Make the tables and functions of a PostgreSQL store, and replace the functions by those of this headgate. It can "
    "be run again, and from several hosts at a time. Tables of the same names that are not of headgate are an error, "
    "and stay as they are; so are those of another version of it, without --replace."
)
TOP = "Show the rules of a running service and their rates, until Ctrl-C. With headgate[cli] it has colours."


def add_migrate(commands: Any) -> None:
    parser = commands.add_parser("migrate", help="make the tables of a PostgreSQL store", description=MIGRATE)
    parser.add_argument("url", metavar="URL", help="postgresql://user:password@host:5432/database")
    parser.add_argument("--prefix", help="what the names of tables and functions start with (default headgate)")
    parser.add_argument("--sql", action="store_true", help="print the statements instead of running them")
    parser.add_argument(
        "--replace", action="store_true", help="drop tables of another version, so that all limits start anew"
    )
    parser.set_defaults(run=migrate)


def migrate(options: argparse.Namespace) -> int:
    """For where a limiter, which makes its tables on first use, may not: run this once as a user that may."""
    kind = SCHEMES.get(scheme_of(options.url))
    if kind is None or kind.name != "PostgreSQLStore":
        return refuse(f"only a postgresql:// store has tables, got {scheme_of(options.url)!r}", 2)
    given = {"prefix": options.prefix} if options.prefix is not None else {}
    try:
        store: Any = kind.load().from_url(options.url, **given)
        if options.sql:
            print(store.schema_sql(replace=options.replace))
            return 0
        store.migrate(replace=options.replace)
    except (ValueError, StoreUnavailable) as error:
        return refuse(error, 1)
    print(f"ready: {store.display_name}, tables {store.url.prefix}_state, {store.url.prefix}_log")
    return 0


def add_doctor(commands: Any) -> None:
    parser = commands.add_parser("doctor", help="whether a store is fit for limits", description=DOCTOR)
    forms = "redis://host:6379/0, postgresql://..., shared://name, ...; several decide by majority"
    parser.add_argument("urls", metavar="URL", nargs="+", help=forms)
    add_json(parser, "the findings")
    parser.set_defaults(run=doctor)


def doctor(options: argparse.Namespace) -> int:
    from headgate.inspection.doctor import examine, worst

    try:
        found = examine(*options.urls)
    except ValueError as error:
        return refuse(error, 2)
    if options.json:
        print(json.dumps({"state": worst(found), "findings": [finding._asdict() for finding in found]}, indent=2))
    else:
        for finding in found:
            print(f"{finding.state:8} {finding.check}: {finding.detail}")
    return CODES[worst(found)]


def add_top(commands: Any) -> None:
    parser = commands.add_parser("top", help="what a running service does now", description=TOP)
    parser.add_argument("url", metavar="URL", nargs="?", default="http://127.0.0.1:8080", help="of the service")
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="between readings (default 1)")
    parser.add_argument("--once", action="store_true", help="print one table after one interval, and end")
    parser.add_argument("--json", action="store_true", help="print it as JSON, a line for each reading")
    parser.set_defaults(run=top)


def top(options: argparse.Namespace) -> int:
    from headgate.inspection.top import as_lines, headline, rates, read_metrics

    if not 0.05 <= options.interval <= 3600:
        return refuse(f"--interval must be from 0.05 to 3600 seconds, got {options.interval}", 2)
    token = os.environ.get("HEADGATE_TOKEN")  # not an option: the arguments of a process are seen by all users
    show = _screen(options)
    try:
        before = read_metrics(options.url, token)
        while True:
            time.sleep(options.interval)
            now = read_metrics(options.url, token)
            rows, title = rates(before, now), headline(options.url, now)
            if options.json:
                print(json.dumps({"service": options.url, "rules": [row._asdict() for row in rows]}), flush=True)
            else:
                show(title, rows, as_lines(rows))
            if options.once:
                return 0
            before = now
    except KeyboardInterrupt:
        return 0
    except (OSError, ValueError, HTTPException) as error:
        return refuse(f"{without_secrets(options.url)}: {error}", 1)


def _screen(options: argparse.Namespace) -> Any:
    """What shows a table: with rich if it is there and a person looks, else plain text."""
    alive = not options.once and sys.stdout.isatty()
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return lambda title, rows, lines: print("\033[H\033[2J" * alive + "\n".join([title, *lines]), flush=True)
    from headgate.inspection.top import COLUMNS, cells

    console = Console()
    if not alive:
        return lambda title, rows, lines: print("\n".join([title, *lines]), flush=True)

    def show(title: str, rows: Any, lines: Any) -> None:
        table = Table(title=title)
        for number, column in enumerate(COLUMNS):
            table.add_column(column, justify="left" if number < 2 else "right")
        for row in rows:
            table.add_row(*cells(row), style="red" if row.denied else None)
        console.clear()
        console.print(table)

    return show
