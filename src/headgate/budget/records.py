"""What the state of a budget in memory is made of: buckets, holds and waiters; and the numbers that its twins share."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final

from headgate.clock import MICROSECONDS

LOST_TTL: Final = 3600 * MICROSECONDS  # how long a lost hold can be settled
DONE_TTL: Final = 30 * MICROSECONDS  # a settled hold is remembered for so long, and until the next multiple of it
CLOCK_STEP: Final = 60 * MICROSECONDS  # a state so far ahead of the clock means that the clock was put back
MOST: Final = 2**53 - 1  # a larger debt is cut: a double counts no further
MAX_WOKEN: Final = 20  # waiters that are told of a change
PAUSE: Final = "\n"  # begins the id of what holds a bucket while it is paused; no id of a caller begins so
ROOT: Final = "-"  # the level that has the name of the state


SpecBuckets = tuple[tuple[str, int, int], ...]


def spec_of(buckets: Iterable[tuple[str, str, int, int]]) -> bytes:
    """These buckets as text: level, label, room and rate of each."""
    return b"".join(
        [struct.pack("<dd", room, rate) + f"{level}\0{label}\0".encode() for level, label, room, rate in buckets]
    )


@lru_cache(4096)
def buckets_of(spec: bytes) -> SpecBuckets:
    """The buckets that *spec* names: level and label, room and rate of each."""
    found = []
    at = 0
    while at < len(spec):
        room, rate = struct.unpack_from("<dd", spec, at)
        level_end = spec.index(b"\0", at + 16)
        label_end = spec.index(b"\0", level_end + 1)
        index = f"{spec[at + 16 : level_end].decode()} {spec[level_end + 1 : label_end].decode()}"
        found.append((index, int(room), int(rate)))
        at = label_end + 1
    return tuple(found)


def packed(units: Sequence[int]) -> bytes:
    """The *units* of a call, a number for each bucket. One above 2**53 may be rounded: it is more than any debt."""
    return struct.pack(f"<{len(units)}d", *units)


def numbers(units: bytes) -> list[int]:
    return [int(number) for number in struct.unpack(f"<{len(units) // 8}d", units)]


class BudgetBucket:
    """What is owed of one quota, and what is held of it."""

    __slots__ = ("at", "debt", "ends", "held", "rate")

    def __init__(self, at: int, rate: int) -> None:
        self.at = at
        self.rate = rate
        self.debt = 0
        self.held = 0
        self.ends = 0  # when the last of the holds is over

    def drain(self, time: int) -> None:
        if time > self.at:
            passed, self.at = time - self.at, time  # first: a signal between both must not let time pass twice
            if self.debt:
                self.debt = max(self.debt - passed * self.rate, 0)

    def charge(self, amount: int) -> None:
        self.debt = max(min(self.debt + amount, MOST), 0)

    def release(self, amount: int) -> None:
        self.held = max(self.held - amount, 0)

    def hold(self, amount: int, now: int, till: int) -> None:
        self.held = self.held_at(now) + amount
        if till > self.ends:
            self.ends = till

    def held_at(self, now: int) -> int:
        return self.held if self.ends > now else 0


class HoldRecord:
    """A hold, or what is remembered of one."""

    __slots__ = ("kind", "lost", "nonce", "spec", "spent", "till", "units")

    def __init__(self, kind: str, nonce: str, lost: str, spec: bytes, units: list[int]) -> None:
        self.kind = kind  # live, lost, done, pause
        self.nonce = nonce
        self.lost = lost  # what becomes of it then: charge, release, spent
        self.spec = spec
        self.units = units
        self.spent: list[int] = []  # empty: nothing was reported
        self.till = 0  # when it is over, or forgotten

    def charged(self) -> list[int]:
        """What was charged when it was lost."""
        if self.lost == "charge":
            return self.units
        return self.spent if self.spent and self.lost == "spent" else [0] * len(self.units)


class BudgetWaiter:
    """A reservation that waits, until it is taken for dead."""

    __slots__ = ("path", "spec", "till", "units")

    def __init__(self, till: int, path: str, spec: bytes, units: list[int]) -> None:
        self.till = till
        self.path = path
        self.spec = spec
        self.units = units


def forget_at(now: int) -> int:
    """When to forget a hold that is settled: together with others, so that most calls find nothing to forget."""
    return (now // DONE_TTL + 2) * DONE_TTL
