"""One rule of a limiter on one PostgreSQL: what its errors mean for a call, and how a call passes the breaker.

`headgate.stores.remote` has the calls; `PostgresBackend` makes them for threads, `AsyncPostgresBackend` for asyncio.
"""

from __future__ import annotations

from collections.abc import Generator
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from headgate.clock import Clock
from headgate.postgresql.bookings import BookingStatements
from headgate.postgresql.connection import NoFreeConnection, NotConnected, ServerError
from headgate.postgresql.statements import AnyStatements, Asked, LimiterStatements, StatementMaker
from headgate.postgresql.url import PostgresURL
from headgate.rule import Rule
from headgate.stores.breaker import Breaker
from headgate.stores.remote import RuleForTasks, RuleForThreads, RuleOnServer
from headgate.telemetry.tally import StoreCalls
from headgate.telemetry.watching import Watched

if TYPE_CHECKING:
    from headgate.stores.postgresql import PostgreSQLStore


class RuleOnPostgres(RuleOnServer):
    """What both backends share."""

    store_errors, refusals, unsent = (OSError, ServerError), ServerError, NotConnected

    def __init__(self, store: PostgreSQLStore, rule: Rule, on_store_error: str) -> None:
        super().__init__(store, rule, on_store_error)
        self.script: LimiterStatements = LimiterStatements(rule, store.hash_keys)
        if rule.is_bucket:
            self.booking = BookingStatements(rule, self.script, store.url.prefix)


class PostgresBackend(RuleOnPostgres, RuleForThreads):
    """One rule on one PostgreSQL, for threads."""


class AsyncPostgresBackend(RuleOnPostgres, RuleForTasks):
    """One rule on one PostgreSQL, for asyncio."""


class CallRequest(NamedTuple):
    """A request: make this call by the deadline."""

    asked: Asked
    deadline: float
    counts_queue_time: bool  # True: time in the queue of a batch counts towards the deadline


class PostgresExecutor:
    """What threads and event loops share: the breaker, and the statements. There is one server, or what libpq finds."""

    connections: Any  # those of threads, or of an event loop

    def __init__(self, url: PostgresURL, display_name: str, clock: Clock | None) -> None:
        self.url = url
        self.timeout = url.timeout
        self.closed = False
        self.statements = StatementMaker(url.prefix, clock)
        self._display_name = display_name
        self.calls = StoreCalls()
        self.watched: Watched | None = None
        self._breaker = Breaker(display_name, on_open=self.calls.open)

    def plan(
        self, script: AnyStatements, call: Any, time_limit: float | None
    ) -> Generator[CallRequest, Any, tuple[int, ...]]:
        """The reply to *call*; raises at once while the breaker is open. *time_limit*: None for the time-out."""
        breaker = self._breaker
        calls = self.calls
        if breaker.open:
            calls.skip()
            self.start_probe(breaker)
            raise NotConnected(f"{breaker.server} does not answer: {breaker.last_error}")
        begun = monotonic()
        seconds = self.timeout if time_limit is None else min(time_limit, self.timeout)
        shortened = seconds < self.timeout
        try:
            reply: tuple[int, ...] = yield CallRequest((script, call), begun + seconds, shortened)
        except NoFreeConnection:
            calls.fail(begun)
            raise  # the server did not fail
        except OSError as error:
            calls.fail(begun)
            if breaker.failed(error, begun, self.timeout if shortened else 0.0):
                self.start_probe(breaker)
            raise
        except ServerError:
            calls.fail(begun, refused=True)
            raise
        calls.answer(begun)
        if breaker.failures:
            breaker.answered()
        return reply

    def connection_counts(self) -> dict[str, int]:
        """Connections in use and idle, and callers that wait for one."""
        connections = self.connections
        return {"in_use": connections.in_use(), "idle": connections.idle(), "waiting": connections.waiting}

    def breakers(self) -> list[Breaker]:
        return [self._breaker]

    def start_probe(self, breaker: Breaker) -> None:
        """Look for the server in the background, unless a probe does so already."""
        raise NotImplementedError
