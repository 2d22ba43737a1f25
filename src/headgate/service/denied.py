"""The keys that are denied most, bounded: for the operator's eyes, never a label of a metric."""

from __future__ import annotations

from heapq import nlargest
from operator import itemgetter
from typing import Any

import msgspec

SHOWN = 20
KEPT = 500


class DeniedKeys:
    """Counts denials by rule and key. When it is full the least denied go; once a minute every count is halved."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], int] = {}

    def add(self, rule: str, key: str) -> None:
        place = rule, key
        count = self.counts.get(place)
        if count is not None:
            self.counts[place] = count + 1
            return
        if len(self.counts) >= 2 * KEPT:
            self.counts = dict(nlargest(KEPT, self.counts.items(), key=itemgetter(1)))
        self.counts[place] = 1

    def fade(self) -> None:
        self.counts = {place: count // 2 for place, count in self.counts.items() if count > 1}

    def encoded(self) -> bytes:
        """The top of the list, for the board."""
        top = nlargest(SHOWN, self.counts.items(), key=itemgetter(1))
        return msgspec.json.encode([[rule, key, count] for (rule, key), count in top])


def merged(bodies: list[bytes]) -> list[dict[str, Any]]:
    """The lists of all workers as one. A list that was read while it was being written is left out."""
    counts: dict[tuple[str, str], int] = {}
    for body in bodies:
        try:
            rows = msgspec.json.decode(body, type=list[tuple[str, str, int]]) if body else []
        except msgspec.DecodeError:
            continue
        for rule, key, count in rows:
            counts[rule, key] = counts.get((rule, key), 0) + count
    top = nlargest(SHOWN, counts.items(), key=itemgetter(1))
    return [{"key": key, "rule": rule, "denied": count} for (rule, key), count in top]
