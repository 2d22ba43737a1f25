"""The bookings of a limiter as statements of their own."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from headgate.algorithms.booking import BOOKED, DENIED, Booked, Booking
from headgate.decision import Decision, Units, decision_in
from headgate.postgresql import booking_sql
from headgate.postgresql.connection import Statement
from headgate.postgresql.statements import LimiterStatements, LoneStatement, StatementMaker, bigints, texts
from headgate.rule import Rule

OPERATIONS = {"book": booking_sql.BOOK, "cancel": booking_sql.CANCEL, "reset": booking_sql.RESET}


class BookingStatements(LoneStatement):
    """The bookings of one limiter, and its resets, which forget slots too."""

    def __init__(self, rule: Rule, limiter: LimiterStatements, prefix: str) -> None:
        self.quota_count = limiter.quota_count
        self._limiter = limiter
        self._units = [Units(part.limit, 1, 1) for part in rule.parts]
        self._order = sorted(range(self.quota_count), key=lambda quota: limiter.patterns[quota].encode())
        self._numbers = bigints([number for quota in self._order for number in limiter.numbers[quota]])
        self._sql = (b"headgate_book", booking_sql.book_sql(prefix).encode())

    def statement(self, call: Booking, maker: StatementMaker) -> Statement:
        name = self._limiter.name_of(call.key)
        rows = [self._limiter.patterns[quota] + name for quota in self._order]
        own = [(self._limiter.start + name).encode(), texts(rows), self._numbers, struct.pack(">q", call.permits)]
        times = [struct.pack(">q", time) for time in (call.within, call.grace)]
        operation = struct.pack(">i", OPERATIONS[call.op])
        return Statement(*self._sql, [maker.now(), operation, *own, call.id.encode(), *times, maker.pages(1)])

    def booked(self, reply: Sequence[int], within: int) -> Booked:
        """What *reply* says to a booking that may be *within* so many microseconds."""
        outcome, at, now, permits, *numbers = reply
        left, full = numbers[::2], numbers[1::2]  # in the order of the rows
        binds = min(range(self.quota_count), key=lambda place: (left[place], self._order[place]))
        units = self._units[self._order[binds]]
        retry = at - now - within if outcome == DENIED else 0
        made: Decision = decision_in(units, outcome != DENIED, units.limit - left[binds], max(full), retry)
        return Booked(outcome, at, now, permits, made)

    def refunds(self, call: Booking, reply: Sequence[int]) -> list[tuple[Any, Any]]:
        """A booking whose caller is gone is cancelled."""
        return [(self, call._replace(op="cancel"))] if call.op == "book" and reply[0] == BOOKED else []
