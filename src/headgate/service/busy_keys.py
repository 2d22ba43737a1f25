"""The busiest keys: every seventeenth check is counted, so that the others cost nothing.

The keys are shown to the operator and are never labels of a metric; a metric has the rate of each rule's busiest key.
"""

from __future__ import annotations

import logging
from heapq import nlargest
from operator import itemgetter
from time import monotonic
from typing import Any

logger = logging.getLogger("headgate.service")

EVERY = 17  # a prime, so that keys that take turns are all seen
WINDOW = 10.0  # seconds over which a rate is measured
KEPT = 500
SHOWN = 20
HOT = 200  # checks a second on one key, from which leases save most round trips

HINT = "most of these checks need a round trip to the store; with hybrid = true in the rule they would not"

Row = tuple[str, str, float]  # rule, key, checks a second


class BusyKeys:
    """Counts sampled checks by rule and key in windows of ten seconds, within a bound."""

    def __init__(self) -> None:
        self.until_next = EVERY
        self._counts: dict[tuple[str, str], int] = {}
        self._began = monotonic()
        self._last: list[Row] = []
        self._hinted: set[str] = set()

    def add(self, rule: str, key: str) -> None:
        """Count a check that was sampled; `top` multiplies its count by EVERY."""
        self.until_next = EVERY
        entry = rule, key
        if entry not in self._counts and len(self._counts) >= 2 * KEPT:
            self._counts = dict(nlargest(KEPT, self._counts.items(), key=itemgetter(1)))
        self._counts[entry] = self._counts.get(entry, 0) + 1

    def top(self) -> list[Row]:
        """The busiest keys of the last full window; before there is one, of the time so far."""
        now = monotonic()
        if now - self._began < WINDOW and self._last:
            return self._last
        seconds = max(now - self._began, 1.0)
        top = nlargest(SHOWN, self._counts.items(), key=itemgetter(1))
        rows = [(rule, key, round(count * EVERY / seconds, 1)) for (rule, key), count in top]
        if now - self._began >= WINDOW:
            self._counts, self._began, self._last = {}, now, rows
        return rows

    def log_hints(self, rows: list[Row], hintable: frozenset[str]) -> None:
        """Log once for each rule in *hintable* that one of its keys is so busy that leases would pay."""
        for rule, _, rate in rows:
            if rate >= HOT and rule in hintable and rule not in self._hinted:
                self._hinted.add(rule)
                logger.info("Rule %s: one key gets about %.0f checks a second in a worker; %s", rule, rate, HINT)


def rows_for_page(rows: list[Row], hintable: frozenset[str]) -> list[dict[str, Any]]:
    """The rows of a live event; *hintable* are the rules that ask Redis for every check and need not."""
    shown: list[dict[str, Any]] = []
    for rule, key, rate in rows:
        row: dict[str, Any] = {"key": key, "rule": rule, "perSecond": rate}
        if rate >= HOT and rule in hintable:
            row["hint"] = HINT
        shown.append(row)
    return shown
