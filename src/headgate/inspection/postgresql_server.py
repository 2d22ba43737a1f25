"""What a PostgreSQL server says of itself and of the tables of headgate, as findings."""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic, time
from typing import TYPE_CHECKING, Any

from headgate.inspection.finding import Finding, clock_finding, connections_finding

if TYPE_CHECKING:
    from headgate.stores.postgresql import PostgreSQLStore

OLDEST = 14
TIME_LIMIT = 5.0  # seconds for each question

SERVER = """SELECT current_setting('server_version'), current_setting('server_version_num'),
    extract(epoch FROM clock_timestamp()), pg_is_in_recovery(), current_setting('max_connections'),
    (SELECT sum(numbackends) FROM pg_stat_database), current_setting('autovacuum')"""
TABLES = """SELECT coalesce(string_agg(DISTINCT relpersistence::text, ''), ''),
    coalesce(sum(pg_total_relation_size(oid)), 0)
    FROM pg_class WHERE oid IN (to_regclass('{prefix}_state'), to_regclass('{prefix}_log'))"""
REPLICAS = "SELECT count(*) FROM pg_stat_replication"


def of_postgresql(store: PostgreSQLStore) -> Iterator[Finding]:
    """Version, role, clock, connections, tables; what the user may not read is unknown."""
    try:
        version, number, clock, standby, most, used, autovacuum = _ask(store, SERVER)
    except Exception as error:  # whatever it is, the other findings stand, and this one says why
        yield Finding("server", "unknown", f"it does not say: {error}")
        return
    new_enough = int(number) // 10_000 >= OLDEST
    yield Finding("version", "ok" if new_enough else "problem", f"PostgreSQL {version}; {OLDEST} or newer is needed")
    if standby == "t":
        yield Finding("role", "problem", "it is a standby, which takes no writes")
    yield clock_finding(float(clock) - time())
    yield connections_finding(int(used), int(most))
    yield (
        Finding("autovacuum", "ok", "on")
        if autovacuum == "on"
        else Finding("autovacuum", "warning", "off: tables that are written all the time grow without end")
    )
    yield from _of_tables(store)


def _of_tables(store: PostgreSQLStore) -> Iterator[Finding]:
    try:
        kinds, size = _ask(store, TABLES.format(prefix=store.url.prefix))
        (replicas,) = _ask(store, REPLICAS)
    except Exception as error:  # as above
        yield Finding("tables", "unknown", f"it does not say: {error}")
        return
    if not kinds:
        yield Finding("tables", "warning", "there are none; the first check makes them, or headgate migrate")
        return
    yield Finding("size", "ok", f"{int(size):,} bytes in {store.url.prefix}_state and {store.url.prefix}_log")
    followed = f", and the {replicas} standbys that follow do not have them" if replicas != "0" else ""
    if kinds == "u":
        detail = f"UNLOGGED: kept by a restart in order; a crash or a failover begins anew{followed}"
    else:
        detail = "in the write-ahead log: kept by a crash, but a check waits for the disk"
    yield Finding("persistence", "ok" if kinds == "u" else "warning", detail)


def _ask(store: PostgreSQLStore, sql: str) -> list[str]:
    """The one row of *sql*, as text, on a connection of its own."""
    from headgate.postgresql.connection import PostgresConnection
    from headgate.postgresql.sync_client import wait_for

    connection, deadline = PostgresConnection(store.url), monotonic() + TIME_LIMIT
    try:
        wait_for(connection.connect_to_ask(), connection, deadline)
        result: Any = wait_for(connection.ask(sql), connection, deadline)
        return [(result.get_value(0, column) or b"").decode() for column in range(result.nfields)]
    finally:
        connection.close()
