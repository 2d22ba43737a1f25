"""Whether Redis answers, as far as a node has heard, and when to try again while it does not."""

from __future__ import annotations

import random

from headgate.hybrid.lease import MILLISECOND, SECOND

FIRST_RETRY = 50 * MILLISECOND  # after a failure; then doubled up to the next
LAST_RETRY = SECOND


class Backend:
    """*apart*: keys lie at several servers, so that one of them does not answer says nothing of the others."""

    def __init__(self, dice: random.Random, apart: bool) -> None:
        self.apart = apart
        self.down: Exception | None = None  # why nobody is asked; apart, that is each lease's own matter (`ill`)
        self.last_error: Exception | None = None
        self.failures = 0  # trips, ever
        self.failed = 0  # the same in a row
        self.outages = 0  # times that all went well before
        self.retry_at = 0
        self._failed_at = 0
        self._retry = FIRST_RETRY
        self._dice = dice

    def sick(self, now: int) -> Exception | None:
        """Why Redis, or a part of it, is not asked now; None: it is."""
        lately = self.apart and self.last_error is not None and now < self._failed_at + 2 * SECOND
        return self.last_error if lately else self.down

    def answered(self) -> None:
        self.failed = 0
        self._retry = FIRST_RETRY
        self.down = None

    def missed(self, now: int, error: Exception) -> None:
        """A trip failed."""
        self.failures += 1
        self.failed += 1
        self.outages += self.sick(now) is None
        self.last_error, self._failed_at = error, now
        if not self.apart:  # there each server has a breaker of its own, which says at once that it is away
            self.down = error
            self.retry_at = now + int(self._retry * self._dice.uniform(0.8, 1.2))
            self._retry = min(2 * self._retry, LAST_RETRY)

    def long_gone(self) -> bool:
        """Whether it has not answered for a while."""
        return self.down is not None and self._retry >= LAST_RETRY
