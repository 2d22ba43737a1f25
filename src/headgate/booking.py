"""`Slot` and `AsyncSlot`, what `Limiter.book` and `AsyncLimiter.book` return: a place in time.

slot = limiter.book("tenant:7", id=job_id)
if slot.delay:
    queue.enqueue(job, delay=slot.delay)    # when it is back, the same id gets the same slot
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

from headgate.algorithms.booking import DENIED, EXACT, KNOWN, Booked, Booking
from headgate.algorithms.bucket import Bucket
from headgate.clock import MICROSECONDS
from headgate.errors import RateLimited, SlotMismatch
from headgate.keys import check_key
from headgate.rule import Rule, check_permits
from headgate.stores.base import takes_bookings

WITHIN = 900.0  # seconds
GRACE = 10.0  # seconds
LONGEST = 1e9  # seconds, about 30 years


class BookedSlot:
    """What a slot is, for threads and for asyncio.

    Attributes:
        delay: seconds from the booking to the slot; 0.0 if it has come
        at: when it is, in seconds since the epoch by the clock of the store
        key: what it was booked for
        id: what it was booked for
        permits: what it spends
        again: whether the id had it already
        decision: how the quotas stand with it
        degraded: the store was down and ``on_store_error`` gave it
    """

    def __init__(self, asked: Booking, booked: Booked) -> None:
        self.key = asked.key
        self.id = asked.id
        self.permits = booked.permits
        self.delay = max(booked.at - booked.now, 0) / MICROSECONDS
        self.at = booked.at / MICROSECONDS
        self.again = booked.outcome == KNOWN
        self.decision = booked.decision
        self.degraded = booked.decision.degraded

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.key!r} for {self.id!r}: in {self.delay} s, permits={self.permits}>"


class Slot(BookedSlot):
    """A place in time that `Limiter.book` gave."""

    def __init__(self, asked: Booking, booked: Booked, cancel: Callable[[str, str], bool]) -> None:
        super().__init__(asked, booked)
        self._cancel = cancel

    def cancel(self) -> bool:
        """Give the slot up. Another booking gets it, or the permits go back if none were spent since.

        False: they stay spent, because its time has come and others were spent after it, it was given up before, its
        grace is over, or the store is down.
        """
        return self._cancel(self.key, self.id)


class AsyncSlot(BookedSlot):
    """A place in time that `AsyncLimiter.book` gave."""

    def __init__(self, asked: Booking, booked: Booked, cancel: Callable[[str, str], Coroutine[Any, Any, bool]]) -> None:
        super().__init__(asked, booked)
        self._cancel = cancel

    async def cancel(self) -> bool:
        """Give the slot up, as `Slot.cancel` does."""
        return await self._cancel(self.key, self.id)


def check_booking(
    rule: Rule, backend: object, key: str, id: str | None, permits: int, within: float, grace: float
) -> Booking:
    """The booking with these arguments; raises if the rule or its store cannot make it."""
    _check_bookable(rule, backend)
    asked = Booking(
        "book",
        check_key(key),
        uuid.uuid4().hex if id is None else check_key(id, "id"),
        check_permits(permits, rule.capacity),
        check_duration("within", within),
        check_duration("grace", grace),
    )
    most = min(_longest(part) for part in rule.parts if isinstance(part, Bucket))
    if asked.within > most:
        raise ValueError(f"within may be at most {most // MICROSECONDS} s for this quota, got {within!r:.40}")
    return asked


def check_cancel(rule: Rule, backend: object, key: str, id: str) -> tuple[str, str]:
    """The key and the id of a slot to cancel; raises if there can be no such slot."""
    _check_bookable(rule, backend)
    return check_key(key), check_key(id, "id")


def _check_bookable(rule: Rule, backend: object) -> None:
    if not rule.is_bucket:
        raise ValueError(
            f"book() needs a bucket, this limiter is {rule.kind}, in which no place is known before its window begins; "
            "use algorithm='token_bucket', 'gcra' or 'leaky_bucket'"
        )
    if not takes_bookings(backend):
        raise ValueError(
            "book() needs a Limiter or AsyncLimiter on one store that keeps slots: memory://, redis://, postgresql:// "
            "or headgate://; shared://, several stores at once and hybrid limiters keep none"
        )


def check_booked(asked: Booking, booked: Booked) -> Booked:
    """Return *booked* if it is a slot for what was asked; else raise."""
    if booked.outcome == DENIED:
        raise RateLimited(asked.key, booked.decision)
    if booked.permits != asked.permits:
        raise SlotMismatch(
            f"{asked.id!r} has a slot of {booked.permits} permits, not {asked.permits}; cancel it, or choose another id"
        )
    return booked


def _longest(part: Bucket) -> int:
    """Microseconds of waiting that Lua can count exactly beside a full bucket."""
    return (EXACT - part.room - part.cost) // part.rate - 1


def check_duration(what: str, seconds: object) -> int:
    """A number of seconds that may be 0, in microseconds."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
        raise ValueError(f"{what} must be a number of seconds of at least 0, got {seconds!r:.40}")
    return round(min(seconds, LONGEST) * MICROSECONDS)
