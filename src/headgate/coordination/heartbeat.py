"""Heartbeats for the entries of this process in a queue: one operation carries those of hundreds of entries.

The reply tells which entries were served or are out, so that no waiter has to ask; messages only make that quicker.
A thread of the backend's timers sends them: an event loop that has 10,000 tasks to attend to may be late.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager

from headgate._lifecycle import in_each_child
from headgate._waiters import Waiter
from headgate.clock import MICROSECONDS
from headgate.coordination.backend import CoordinationBackend, running_loop
from headgate.coordination.runner import RETRY, Runner
from headgate.coordination.states.machine import Operation, Reply
from headgate.coordination.timers import Timer
from headgate.errors import StoreUnavailable

ALIVE = 5.0  # seconds without a heartbeat after which an entry is taken for dead
INTERVAL = 2.0  # seconds between two heartbeats
FIRST = 0.1  # seconds until the first
BATCH = 500  # entries in one operation


class QueueEntry:
    """An entry of this process in a queue, and what became of it: waiting, served or gone."""

    def __init__(self, id: str, token: str, waiter: Waiter) -> None:
        self.id = id
        self.token = token  # tells apart callers that wait with the same id
        self.waiter = waiter
        self.state = "waiting"

    def can_act(self) -> bool:
        """False: its event loop stands still."""
        return self.waiter.runs is None or self.waiter.runs()


class Heartbeat:
    """Sends the heartbeats of all entries of one queue. Thread-safe."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._lock = threading.RLock()  # a garbage collection may call us while we hold it
        self._entries: dict[str, QueueEntry] = {}
        self._due: deque[QueueEntry] = deque()  # entries whose heartbeat is to be sent before the next round
        self._timer: Timer | None = None
        self._between_rounds = False
        self._round_began = runner.clock.now()
        self._round_took = 0  # microseconds
        self._loop: asyncio.AbstractEventLoop | None = None

    def add(self, entry: QueueEntry) -> None:
        with self._lock:
            self._entries[entry.token] = entry
            self._due.append(entry)
            if self._timer is None or self._between_rounds:
                self._schedule(FIRST)
            self._loop = running_loop() or self._loop

    def remove(self, entry: QueueEntry) -> bool:
        """Whether that was the last entry."""
        with self._lock:
            del self._entries[entry.token]
            if not self._entries and self._timer:
                self._timer.cancel()
            return not self._entries

    def _schedule(self, seconds: float, between_rounds: bool = False) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer = self._runner.backend.timers.later(seconds, self._beat)
        self._between_rounds = between_rounds

    def _beat(self) -> None:
        """Send the heartbeats that are due, and wake the waiters whose entries are not in line any more."""
        interval = INTERVAL * min(1.0, self._runner.backend.states.poll)  # shorter where there are no messages
        every, wait = round(interval * MICROSECONDS), RETRY
        with self._lock:
            self._between_rounds = False
            now = self._runner.clock.now()
            new_round = now >= self._round_began + every
            if new_round:
                self._due, self._round_began = deque(self._entries.values()), now
        try:
            while batch := self._next_batch():
                for entry, state in zip(batch, self._send(batch), strict=True):
                    if state != "waiting":
                        entry.state = state
                        entry.waiter.wake()
            took = self._runner.clock.now() - now
            if new_round:  # where a round takes long, the next heartbeat may be late
                self._round_took = min(took, round(ALIVE * MICROSECONDS))
            wait = max((self._round_began + every - now - took) / MICROSECONDS, FIRST)
        except StoreUnavailable:
            with self._lock:
                self._due.extendleft(batch)
        finally:
            with self._lock:
                if self._entries:
                    self._schedule(wait, between_rounds=wait > RETRY)

    def _next_batch(self) -> list[QueueEntry]:
        with self._lock:
            batch: list[QueueEntry] = []
            while self._due and len(batch) < BATCH:
                entry = self._due.popleft()
                if entry.token in self._entries and entry.can_act():
                    batch.append(entry)
            return batch

    def _send(self, batch: list[QueueEntry]) -> Reply:
        alive = round(ALIVE * MICROSECONDS) + self._round_took
        names = (part for entry in batch for part in (entry.id, entry.token))
        heartbeat = Operation("heartbeat", ("", "", alive, 0, alive, "", *names))
        if self._runner.backend.serves(tasks=False):
            return self._runner.execute(heartbeat)
        return self._send_in_loop(heartbeat)

    def _send_in_loop(self, heartbeat: Operation) -> Reply:
        loop = self._loop
        if loop is None or not loop.is_running() or loop is running_loop():
            raise StoreUnavailable("the event loop has ended, or would have to wait for itself")
        sent = asyncio.run_coroutine_threadsafe(self._runner.execute_async(heartbeat), loop)
        try:
            return sent.result(ALIVE)
        except (TimeoutError, CancelledError) as error:
            sent.cancel()
            raise StoreUnavailable("the event loop stands still, or ends") from error


_HEARTBEATS: dict[tuple[CoordinationBackend, str], Heartbeat] = {}
_LOCK = threading.RLock()


@contextmanager
def heartbeats(runner: Runner, id: str, token: str, waiter: Waiter) -> Iterator[QueueEntry]:
    """Send heartbeats for an entry, together with those of all other entries of this process in that queue."""
    key, entry = (runner.backend, runner.channel), QueueEntry(id, token, waiter)
    with _LOCK:
        heartbeat = _HEARTBEATS.get(key)
        if heartbeat is None:
            heartbeat = _HEARTBEATS[key] = Heartbeat(runner)
        heartbeat.add(entry)
    try:
        yield entry
    finally:
        with _LOCK:
            if heartbeat.remove(entry) and _HEARTBEATS.get(key) is heartbeat:
                del _HEARTBEATS[key]


@in_each_child
def _after_fork() -> None:
    global _LOCK
    _LOCK = threading.RLock()
    _HEARTBEATS.clear()  # the parent sends them for its own entries
