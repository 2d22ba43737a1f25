"""The calls of a limiter as statements: `check` for one quota and key, `decide` for everything else.

A row of the database is one quota of one client's key. Its key names the algorithm, the limiter and its quotas, so
that a limiter whose quotas were changed starts anew. Parameters are written in PostgreSQL's binary format.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from headgate.clock import Clock
from headgate.decision import Decision, Units, decision_in
from headgate.keys import digest, label
from headgate.postgresql import schema
from headgate.postgresql.connection import Statement
from headgate.rule import Rule, check_permits
from headgate.stores.remote import LimiterCall, binding, share_of
from headgate.stores.remote_joint import JointCall

OPERATIONS = {
    "take": schema.TAKE,
    "peek": schema.PEEK,
    "refund": schema.REFUND,
    "reset": schema.RESET,
    "charge": schema.CHARGE,
}
_LOCKS = {
    schema.TAKE: schema.MAKE,
    schema.PEEK: schema.READ,
    schema.REFUND: schema.LOCK,
    schema.RESET: schema.LOCK,
    schema.CHARGE: schema.MAKE,
}
SWEEP_EVERY = 16  # calls: then a page of the table is looked through for rows that are gone
_INT4, _INT8, _TEXT = 23, 20, 25  # object ids of types
_FOUR = struct.Struct(">20x" + "4xq" * 4)  # an array of four bigints, as an answer has it
_ELEMENT = 12  # bytes of a bigint in an array, its length before it
_HEAD = 20  # bytes before the elements of an array


def operation(op: str) -> int:
    """The number of an operation; that of a take has the share that it leaves above it."""
    return OPERATIONS.get(op) or schema.TAKE + schema.SHARE * share_of(op)


class Part(NamedTuple):
    """One quota of a call."""

    row: str
    law: int
    permits: int
    numbers: tuple[int, int, int, int]


class LimiterStatements:
    """The calls of one limiter."""

    def __init__(self, rule: Rule, hash_keys: bool) -> None:
        self.capacity = rule.capacity
        self.capacities = [part.limit for part in rule.parts]
        self.quota_count = len(rule.parts)
        self.law = rule.spec.sql.number
        self.numbers = [part.sql_arguments() for part in rule.parts]
        self._units = [Units(part.limit, 1, 1) for part in rule.parts]
        quotas = ",".join(str(quota).replace(" ", "") for quota in rule.quotas)
        self.start = start = f"{rule.state_kind}:{label(rule.name)}:{quotas}:"
        self.patterns = [start] if self.quota_count == 1 else [f"{start}{at}:" for at in range(self.quota_count)]
        self.name_of: Callable[[str], str] = digest if hash_keys else str
        self._packed = [struct.pack(">i", self.law), *[struct.pack(">q", number) for number in self.numbers[0]]]

    def parts(self, call: LimiterCall) -> list[Part]:
        """The quotas of a call. Nothing is given back beyond the capacity, so more is as good as all."""
        name = self.name_of(call.key)
        pairs = zip(self.patterns, self.numbers, strict=True)
        return [Part(pattern + name, self.law, min(call.permits, n[0]), n) for pattern, n in pairs]

    def single(self, call: LimiterCall) -> list[bytes | None] | None:
        """The parameters of a call that decides one quota, without time and pages; None for any other call."""
        if self.quota_count > 1 or not call.op.startswith(("take", "peek")):
            return None
        row = (self.patterns[0] + self.name_of(call.key)).encode()
        law, *numbers = self._packed
        return [struct.pack(">i", operation(call.op)), law, row, struct.pack(">q", call.permits), *numbers]

    def decision(self, reply: Sequence[int]) -> Decision:
        allowed, binds, remaining, reset, retry = binding(reply)
        units = self._units[binds - 1]
        return decision_in(units, allowed == 1, units.limit - remaining, reset, retry)

    def refunds(self, call: LimiterCall, reply: Sequence[int]) -> list[tuple[LimiterStatements, LimiterCall]]:
        """The calls that give back what *call* took, by its *reply*."""
        return [(self, call._replace(op="refund"))] if call.op.startswith("take") and all(reply[::4]) else []


class JointStatements:
    """The checks of these limiters, in this order."""

    def __init__(self, limiters: Sequence[LimiterStatements]) -> None:
        self.limiters = limiters
        self.quota_count = sum(limiter.quota_count for limiter in limiters)

    def check_totals(self, call: JointCall) -> None:
        """Raise if the checks that share a state ask for more of it than its capacity."""
        totals: Counter[tuple[str, str]] = Counter()
        for limiter, key, permits in zip(self.limiters, call.keys, call.permits, strict=True):
            for pattern, capacity in zip(limiter.patterns, limiter.capacities, strict=True):
                totals[pattern, key] += permits
                check_permits(totals[pattern, key], capacity)

    def parts(self, call: JointCall) -> list[Part]:
        """The quotas of all checks; of those that share a row the first has the permits of all."""
        found: dict[str, Part] = {}
        for part in self._all(call):
            known = found.get(part.row)
            found[part.row] = part if known is None else known._replace(permits=known.permits + part.permits)
        return list(found.values())

    def single(self, call: JointCall) -> None:
        """It is never one quota alone."""

    def replies(self, call: JointCall, reply: Sequence[int]) -> list[int]:
        """The answers of all quotas, from those of the rows."""
        rows = {part.row: 4 * at for at, part in enumerate(self.parts(call))}
        return [number for part in self._all(call) for number in reply[rows[part.row] : rows[part.row] + 4]]

    def decisions(self, reply: Sequence[int]) -> list[Decision]:
        """A decision for each check."""
        made, at = [], 0
        for limiter in self.limiters:
            end = at + 4 * limiter.quota_count
            made.append(limiter.decision(reply[at:end]))
            at = end
        return made

    def refunds(self, call: JointCall, reply: Sequence[int]) -> list[tuple[LimiterStatements, LimiterCall]]:
        """The calls that give back what *call* took, by its *reply*."""
        if not all(reply[::4]):
            return []
        checks = zip(self.limiters, call.keys, call.permits, strict=True)
        return [(limiter, LimiterCall("refund", key, permits)) for limiter, key, permits in checks]

    def _all(self, call: JointCall) -> list[Part]:
        checks = zip(self.limiters, call.keys, call.permits, strict=True)
        return [part for limiter, key, count in checks for part in limiter.parts(LimiterCall("take", key, count))]


class LoneStatement:
    """A call that travels alone; it is answered by all numbers of its answer."""

    quota_count = 1

    def parts(self, call: Any) -> list[Part]:
        """It is in no statement with others."""
        return []

    def single(self, call: Any) -> None:
        """The same."""

    def statement(self, call: Any, maker: StatementMaker) -> Statement:
        raise NotImplementedError

    def refunds(self, call: Any, reply: Sequence[int]) -> list[tuple[Any, Any]]:
        """The calls that give back what *call* took, by its *reply*."""
        raise NotImplementedError


class ReadyStatement(LoneStatement):
    """A call that is a `Statement` already."""

    def statement(self, call: Statement, maker: StatementMaker) -> Statement:
        return call

    def refunds(self, call: Statement, reply: Sequence[int]) -> list[tuple[Any, Any]]:
        """Nothing is given back for a caller that is gone."""
        return []


AnyStatements = LimiterStatements | JointStatements | LoneStatement
Asked = tuple[AnyStatements, Any]  # a call, and what it is a call of


class StatementMaker:
    """Makes the statements of one process or event loop, and lets some of them sweep."""

    def __init__(self, prefix: str, clock: Clock | None) -> None:
        self._check = (b"headgate_check", schema.check_sql(prefix).encode())
        self._decide = (b"headgate_decide", schema.decide_sql(prefix).encode())
        self._clock = clock
        self._unswept = 0

    def now(self) -> bytes | None:
        """The time as a parameter; None for the server's."""
        return struct.pack(">q", self._clock.now()) if self._clock else None

    def pages(self, calls: int) -> bytes:
        """How many pages so many calls sweep, as a parameter."""
        pages, self._unswept = divmod(self._unswept + calls, SWEEP_EVERY)
        return struct.pack(">i", pages)

    def statement(self, asked: Sequence[Asked]) -> Statement:
        """One statement for all calls; `answers` reads its answer."""
        lone = asked[0][0]
        if isinstance(lone, LoneStatement):
            return lone.statement(asked[0][1], self)
        now, swept = self.now(), self.pages(len(asked))
        if len(asked) == 1:
            statements, call = asked[0]
            single = statements.single(call)
            if single is not None:
                return Statement(*self._check, [now, *single, swept])
        calls = [(operation(call.op), statements.parts(call)) for statements, call in asked]
        locks: dict[str, int] = {}
        for op, parts in calls:
            for part in parts:
                lock = schema.LOCK if part.law == schema.LOG and op == schema.PEEK else _LOCKS[op % schema.SHARE]
                locks[part.row] = max(locks.get(part.row, 0), lock)
        rows = sorted(locks, key=str.encode)  # all callers lock in the same order, so that none waits in a ring
        places = {row: place for place, row in enumerate(rows, start=1)}
        flat = [part for _, parts in calls for part in parts]
        parameters = [
            now,
            texts(rows),
            integers([locks[row] for row in rows]),
            integers([op for op, _ in calls]),
            integers([len(parts) for _, parts in calls]),
            integers([places[part.row] for part in flat]),
            integers([part.law for part in flat]),
            bigints([part.permits for part in flat]),
            bigints([number for part in flat for number in part.numbers]),
            swept,
        ]
        return Statement(*self._decide, parameters)


def answers(asked: Sequence[Asked], value: bytes) -> list[tuple[int, ...] | list[int]]:
    """What each call is answered: four numbers for each of its quotas."""
    if len(asked) == 1 and asked[0][0].quota_count == 1 and len(value) == _FOUR.size:
        return [_FOUR.unpack(value)]
    count = (len(value) - _HEAD) // _ELEMENT
    numbers = struct.unpack(">20x" + "4xq" * count, value) if count > 0 else ()
    if isinstance(asked[0][0], LoneStatement):
        return [numbers]
    found: list[tuple[int, ...] | list[int]] = []
    at = 0
    for statements, call in asked:
        end = at + 4 * len(statements.parts(call))
        reply = numbers[at:end]
        found.append(statements.replies(call, reply) if isinstance(statements, JointStatements) else reply)
        at = end
    return found


def _array(kind: int, count: int, data: bytes) -> bytes:
    return struct.pack(">iiiii", 1, 0, kind, count, 1) + data


def integers(values: list[int]) -> bytes:
    return _array(
        _INT4, len(values), struct.pack(">" + "ii" * len(values), *[x for value in values for x in (4, value)])
    )


def bigints(values: list[int]) -> bytes:
    return _array(
        _INT8, len(values), struct.pack(">" + "iq" * len(values), *[x for value in values for x in (8, value)])
    )


def texts(values: list[str]) -> bytes:
    encoded = [value.encode() for value in values]
    return _array(_TEXT, len(values), b"".join([struct.pack(">i", len(text)) + text for text in encoded]))
