"""Who counts: everything that was made and is still there, found without keeping it alive.

An object that counts hands its counts to `watch` and keeps what that returns. When the object is collected, its
counters are added to the totals of their series, so that no counter ever vanishes or falls; its gauges go. In the child
of a fork all counters start at 0: the parent reports its own.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any, NamedTuple, Protocol

from headgate._lifecycle import in_each_child

logger = logging.getLogger("headgate")

MAX_NAMES = 100  # of limiters, of locks and so on: those beyond share the name OTHER
OTHER = "other"
FOLD_AT = 100  # collected objects whose counters were not added to the totals yet

Labels = tuple[tuple[str, str], ...]


class Sample(NamedTuple):
    """A number of one family, with labels beyond those of the object."""

    family: str
    labels: Labels
    value: float


class Counts(Protocol):
    """The counters of one object. They must not refer to it."""

    def samples(self) -> Iterable[Sample]: ...
    def reset(self) -> None:
        """Start at 0, in the child of a fork."""
        ...


Gauges = Callable[[Any], Iterable[Sample]]


class Watched:
    """What an object keeps as long as it counts: when this is collected, so is the object."""

    __slots__ = ("__weakref__",)


class _Entry(NamedTuple):
    mark: weakref.ref[Watched]  # kept, as its callback notes the end
    labels: Labels
    counts: Counts
    owner: weakref.ref[Any] | None
    gauges: Gauges | None


_lock = threading.RLock()  # reentrant: a collection while it is held may run a finalizer that makes a limiter
_entries: dict[int, _Entry] = {}
_gone: deque[int] = deque()
_totals: dict[tuple[str, Labels], float] = {}
_names: dict[str, set[str]] = {}
_numbers = count()


def watch(
    kind: str, name: str, labels: Labels, counts: Counts, owner: Any = None, gauges: Gauges | None = None
) -> Watched:
    """Report *counts* under ``kind=name`` and *labels*, and *gauges* of *owner* while it lives.

    The object that counts keeps the result.
    """
    mark, number = Watched(), next(_numbers)

    def ended(_: object) -> None:
        _gone.append(number)  # no more than that: the garbage collector may have interrupted anything

    with _lock:
        all_labels = ((kind, bounded(kind, name)), *labels)
        reference = weakref.ref(owner) if owner is not None else None
        _entries[number] = _Entry(weakref.ref(mark, ended), all_labels, counts, reference, gauges)
        if len(_gone) >= FOLD_AT:
            _fold()
    return mark


def bounded(kind: str, name: str) -> str:
    """*name*, or `OTHER` if there are `MAX_NAMES` of that kind already: names may be made of keys."""
    known = _names.setdefault(kind, set())
    if name in known:
        return name
    if len(known) < MAX_NAMES:
        known.add(name)
        return name
    if OTHER not in known:
        known.add(OTHER)
        logger.warning(
            "telemetry: there are more than %d names of kind %r; the others are counted together as %r=%r",
            MAX_NAMES,
            kind,
            kind,
            OTHER,
        )
    return OTHER


def counters() -> dict[tuple[str, Labels], float]:
    """All counters by family and labels; those of equal labels are added up."""
    with _lock:
        _fold()
        found = dict(_totals)
        for entry in list(_entries.values()):
            _add(found, entry)
    return found


def gauges() -> list[Sample]:
    """The gauges of all that is there, with all labels; several may have the same."""
    with _lock:
        entries = list(_entries.values())
    found: list[Sample] = []
    for entry in entries:
        owner = entry.owner() if entry.owner is not None else None
        if owner is None or entry.gauges is None:
            continue
        try:
            found += [Sample(family, entry.labels + more, value) for family, more, value in entry.gauges(owner)]
        except RuntimeError:  # a dict changed while it was read: it is seen at the next scrape
            continue
    return found


def _add(totals: dict[tuple[str, Labels], float], entry: _Entry) -> None:
    for family, more, value in entry.counts.samples():
        series = (family, entry.labels + more)
        totals[series] = totals.get(series, 0) + value


def _fold() -> None:
    """Add the counters of collected objects to the totals."""
    while _gone:
        entry = _entries.pop(_gone.popleft(), None)
        if entry is not None:
            _add(_totals, entry)


@in_each_child
def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()
    _totals.clear()
    for entry in list(_entries.values()):
        entry.counts.reset()
