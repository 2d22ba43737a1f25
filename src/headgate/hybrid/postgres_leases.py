"""The ledgers of leases in a PostgreSQL: one statement for any number of keys."""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

from headgate._lifecycle import ClosingExchange
from headgate._plan import arun, run
from headgate.errors import StoreUnavailable
from headgate.hybrid.ledger_sql import FIELDS, MOST, OPERATIONS, sync_sql
from headgate.hybrid.protocol import LeaseReply
from headgate.keys import digest, label
from headgate.postgresql.connection import ServerError, Statement
from headgate.postgresql.statements import SWEEP_EVERY, ReadyStatement, bigints, integers, texts
from headgate.rule import Rule
from headgate.stores.base import LeaseCall

if TYPE_CHECKING:
    from headgate.postgresql.async_client import PostgresTasks
    from headgate.postgresql.backend import PostgresExecutor
    from headgate.stores.postgresql import PostgreSQLStore

Replies = list[LeaseReply | str]
_DATA_EXCEPTION = "22"  # the class of errors about values, such as a number out of range
_READY = ReadyStatement()


class PostgresLeases:
    """See `headgate.stores.base.LeaseBackend`."""

    partitioned = False

    def __init__(self, store: PostgreSQLStore) -> None:
        self._store = store
        self._sql = sync_sql(store.url.prefix).encode()
        self._unswept = 0

    def key_function(self, rule: Rule) -> Callable[[str], str]:
        """The function that turns a client's key into the key of its row; a changed quota keeps the row."""
        before = f"{rule.kind}:{label(rule.name)}:"
        if self._store.hash_keys:
            return lambda key: before + digest(key)
        return lambda key: before + key

    def partition(self, key: str) -> int:
        """All keys are in one database."""
        return 0

    def exchange(self, calls: Sequence[LeaseCall], timeout: float | None = None) -> Replies:
        executor = self._store.sync_executor()
        return run(self._replies(executor, calls, timeout), executor.answer)

    async def exchange_async(self, calls: Sequence[LeaseCall]) -> Replies:
        return await self._exchange_on(self._store.async_executor(), calls)

    def closing_exchange(self, timeout: float) -> ClosingExchange:
        """`exchange_async` on a new connection."""
        return ClosingExchange(self._exchange_on, self._store.spare_executor(timeout))

    async def close_loop(self) -> None:
        await self._store.close_loop()

    async def _exchange_on(self, executor: PostgresTasks, calls: Sequence[LeaseCall]) -> Replies:
        return await arun(self._replies(executor, calls, None), executor.answer)

    def _replies(
        self, executor: PostgresExecutor, calls: Sequence[LeaseCall], time_limit: float | None
    ) -> Generator[Any, Any, Replies]:
        """The plan (see `headgate._plan`) of an exchange. A value that the server cannot take fails for its key alone.

        The server has then done nothing of the statement, so each call is sent by itself.
        """
        try:
            numbers = yield from executor.plan(_READY, self._statement(calls), time_limit)
        except ServerError as error:
            if not error.sqlstate.startswith(_DATA_EXCEPTION):
                raise StoreUnavailable(str(error)) from error
            if len(calls) == 1:
                return [str(error)]
            replies: Replies = []
            for call in calls:
                replies += yield from self._replies(executor, [call], time_limit)
            return replies
        except OSError as error:
            raise StoreUnavailable(str(error)) from error
        return [LeaseReply(*numbers[at : at + FIELDS]) for at in range(0, len(numbers), FIELDS)]

    def _statement(self, calls: Sequence[LeaseCall]) -> Statement:
        """The statement for *calls*; every so often it also removes rows that are gone."""
        clock = self._store.clock
        made: dict[str, int] = {}
        for call in calls:
            made[call.key] = made.get(call.key, 0) | (call.request.op != "peek")
        keys = sorted(made, key=str.encode)  # all callers lock in the same order, so that none waits in a ring
        places = {key: place for place, key in enumerate(keys, start=1)}
        requests = [call.request for call in calls]
        self._unswept += len(calls)
        pages, self._unswept = divmod(self._unswept, SWEEP_EVERY)
        parameters = [
            struct.pack(">q", clock.now()) if clock else None,
            texts(keys),
            integers([made[key] for key in keys]),
            integers([places[call.key] for call in calls]),
            integers([OPERATIONS[request.op] for request in requests]),
            texts([request.node for request in requests]),
            texts([call.params.text for call in calls]),
            bigints([number for call in calls for number in _numbers(call)]),
            integers([len(request.waiting) for request in requests]),
            bigints([number for request in requests for group in request.waiting for number in group]),
            struct.pack(">i", pages),
        ]
        return Statement(b"headgate_sync", self._sql, parameters)


def _numbers(call: LeaseCall) -> list[int]:
    """What a call says in numbers, in the order in which the function reads them."""
    _, params, profile, request = call
    numbers = (*params[1:], profile.leased, profile.report, profile.report_full, *request[2:9], *request[10:])
    return [min(number, MOST) for number in numbers]
