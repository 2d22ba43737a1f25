"""Limits shared through PostgreSQL: one statement and one round trip for each decision, by the server's clock."""

from __future__ import annotations

import asyncio
import dataclasses
from time import monotonic, time
from typing import TYPE_CHECKING, Any, Unpack

from headgate.clock import Clock
from headgate.errors import StoreUnavailable
from headgate.postgresql import schema
from headgate.postgresql.async_client import PostgresTasks, connect
from headgate.postgresql.async_client import wait_for as wait_for_async
from headgate.postgresql.backend import AsyncPostgresBackend, PostgresBackend
from headgate.postgresql.connection import PostgresConnection, ServerError, Waiting
from headgate.postgresql.statements import JointStatements
from headgate.postgresql.sync_client import PostgresThreads, wait_for
from headgate.postgresql.url import PostgresOptions, parse_url
from headgate.stores.base import Health, StoreOptions
from headgate.stores.batching import ServerTimeout
from headgate.stores.remote_joint import JointScripts
from headgate.stores.remote_store import StoreOnServer
from headgate.stores.settings import check_flag

if TYPE_CHECKING:
    from headgate.hybrid.postgres_leases import PostgresLeases

HEALTH_TIMEOUT = 1.0  # seconds for the whole check
MIGRATE_TIMEOUT = 60.0  # seconds to make tables and functions
SLOW = 0.05  # seconds for a statement that is slow
SKEW = 1.0  # seconds by which the server's clock may differ from this host's
_HEALTH = "SELECT (date_part('epoch', clock_timestamp()) * 1000000)::bigint, pg_is_in_recovery()"


class PostgreSQLStore(StoreOnServer[PostgresThreads, PostgresTasks]):
    """One PostgreSQL database, for limiters of either kind.

    Args:
        url: see `headgate.postgresql.url`
        hash_keys: store a digest of the client's key instead of the key: no addresses in the database
        clock: tests only: this time instead of the server's

    Keyword Args:
        prefix: what the names of tables and functions start with; they are made on first use
        timeout: seconds that a check may take in all; then on_store_error answers
        connect_timeout: seconds of those to connect
        min_connections: that `warm_up` opens; nothing connects before it or the first check
        max_connections: for threads; a caller that finds none free waits within the time-out. An event loop has at most
            two
    """

    kind = "postgresql"
    backends = (PostgresBackend, AsyncPostgresBackend)

    def __init__(
        self, url: str, *, hash_keys: bool = False, clock: Clock | None = None, **options: Unpack[PostgresOptions]
    ) -> None:
        if not isinstance(url, str):
            raise TypeError(f"PostgreSQLStore takes a URL (text), got {type(url).__name__}")
        self.url = parse_url(url, **options)
        self.display_name = self.url.safe_url  # without password
        self.hash_keys = check_flag("hash_keys", hash_keys)
        self.clock = clock
        self.joint_scripts = JointScripts(JointStatements)
        self.shared_objects: dict[str, Any] = {}  # what hybrid keeps with the store
        super().__init__()

    @classmethod
    def from_url(cls, url: str, clock: Clock | None = None, **options: Unpack[StoreOptions]) -> PostgreSQLStore:
        """The store of a PostgreSQL URL, without the options that are another store's.

        Args:
            url: of the server
            clock: tests only
            **options: of any store
        """
        for name in ("max_keys", "retries", "retry_pause"):
            options.pop(name, None)  # type: ignore[misc]  # a key of a TypedDict that is not a literal
        return cls(url, clock=clock, **options)  # type: ignore[misc]  # those are not there any more

    def __repr__(self) -> str:
        return f"<PostgreSQLStore: {self._server_name()}>"

    def leases(self) -> PostgresLeases:
        """What keeps the leases of `HybridLimiter` here."""
        from headgate.hybrid.postgres_leases import PostgresLeases  # its SQL stands beside its Python twin

        return PostgresLeases(self)

    def schema_sql(self, *, replace: bool = False) -> str:
        """The statements by which `migrate` makes tables and functions.

        Args:
            replace: with those that drop tables of another version first
        """
        return (schema.replace_sql if replace else schema.create_sql)(self.url.prefix).strip()

    def migrate(self, *, replace: bool = False) -> None:
        """Make the tables and functions that are not there, and replace functions by those of this headgate.

        Raises `StoreUnavailable` if the database cannot be reached, or has tables of that name that are not ours, or
        of another version.

        Args:
            replace: drop tables of another version first, with all that they keep
        """
        patient = dataclasses.replace(self.url, timeout=MIGRATE_TIMEOUT, connect_timeout=MIGRATE_TIMEOUT)
        connection, deadline = PostgresConnection(patient), monotonic() + MIGRATE_TIMEOUT
        try:
            wait_for(connection.connect_to_ask(), connection, deadline)
            wait_for(connection.ask(self.schema_sql(replace=replace)), connection, deadline)
        except (ServerError, OSError) as error:
            raise StoreUnavailable(f"cannot prepare {self._server_name()}: {error}") from error
        finally:
            connection.close()

    # ------------------------------------------------------------------------------------------------ connections

    def _open_threads(self) -> PostgresThreads:
        return PostgresThreads(self.url, self._server_name(), self.clock)

    def _open_tasks(self) -> PostgresTasks:
        return PostgresTasks(self.url, self._server_name(), self.clock)

    def spare_executor(self, timeout: float) -> PostgresTasks:
        """An executor for the end of an event loop, which the caller closes."""
        url = dataclasses.replace(self.url, timeout=timeout, connect_timeout=timeout)
        return PostgresTasks(url, self._server_name(), self.clock)

    def warm_up(self) -> None:
        """Open `min_connections`, for threads, so that the first checks find them; makes the tables if need be.

        Raises `StoreUnavailable` if the database cannot be reached, or has tables that are not ours.
        """
        try:
            self.sync_executor().warm_up(self.url.min_connections)
        except (ServerError, OSError) as error:
            raise StoreUnavailable(f"cannot connect to {self._server_name()}: {error}") from error

    async def awarm_up(self) -> None:
        """The same for the running event loop."""
        try:
            await self.async_executor().warm_up(self.url.min_connections)
        except (ServerError, OSError) as error:
            raise StoreUnavailable(f"cannot connect to {self._server_name()}: {error}") from error

    def connections(self) -> dict[str, int]:
        """The connections of the latest event loop: in_use, idle, and calls that wait for one."""
        return _counts(self._latest_executor)

    def close(self) -> None:
        """Close the connections for threads."""
        executor, self._sync_executor = self._sync_executor, None
        if executor:
            executor.close()

    def _server_name(self) -> str:
        return f"PostgreSQL at {self.display_name}"

    # ----------------------------------------------------------------------------------------------------- health

    def health(self) -> Health:
        """Check the server's health on a connection of its own; the answer is good for a second."""
        with self._health_lock:
            if self._health is None or monotonic() - self._health_at > 1.0:
                connection = PostgresConnection(self.url)
                deadline = monotonic() + HEALTH_TIMEOUT
                try:
                    wait_for(connection.connect(), connection, deadline)
                    seen: Health = wait_for(self._questions(connection), connection, deadline)
                except (ServerError, OSError) as error:
                    seen = _unhealthy(error)
                finally:
                    connection.close()
                self._health = self._keep_health(seen, self._sync_executor)
            return self._health

    async def _examine(self) -> Health:
        connection, loop = PostgresConnection(self.url), asyncio.get_running_loop()
        try:
            async with ServerTimeout(loop, HEALTH_TIMEOUT):
                await connect(connection)
                seen: Health = await wait_for_async(self._questions(connection), loop)
        except (ServerError, OSError) as error:
            seen = _unhealthy(error)
        finally:
            connection.close()
        return self._keep_health(seen, self._latest_executor)

    def _keep_health(self, seen: Health, executor: PostgresThreads | PostgresTasks | None) -> Health:
        self._health, self._health_at = dataclasses.replace(seen, connections=_counts(executor)), monotonic()
        return self._health

    def _questions(self, connection: PostgresConnection) -> Waiting:
        """A plan: what a connection that was just made says of its server."""
        begun = monotonic()
        result = yield from connection.ask(_HEALTH)
        latency = monotonic() - begun
        skew = int(result.get_value(0, 0)) / 1_000_000 - time()
        role = "standby" if result.get_value(0, 1) == b"t" else "primary"
        reason = "read-only" if connection.read_only else "slow" if latency > self.url.timeout else "ok"
        problems = []
        if latency > SLOW:
            problems.append(f"slow: a statement took {1000 * latency:.0f} ms")
        if abs(skew) > SKEW:
            problems.append(f"its clock is {skew:+.1f} s off this host's: windows start by the server's")
        return Health(reason == "ok", reason, tuple(problems), latency, role, connection.version)


def _unhealthy(error: Exception) -> Health:
    reason = "refuses" if isinstance(error, ServerError) else "down"
    return Health(False, reason, (f"{type(error).__name__}: {error}",))


def _counts(executor: Any) -> dict[str, int]:
    counts: dict[str, int] = executor.connection_counts() if executor else {"in_use": 0, "idle": 0, "waiting": 0}
    return counts
