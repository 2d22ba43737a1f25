"""Heartbeats for the `WaitQueue` entries of this process: one operation carries those of hundreds of entries.

The reply tells which entries were dequeued or removed, so that no waiter has to ask; messages only make that quicker.
A thread of the backend's timers sends them: an event loop that has 10,000 tasks to attend to may be late.

A round sends a heartbeat for every entry, in batches; the next round begins `INTERVAL` after it began. An entry that is
added between two rounds gets its first heartbeat after `FIRST`.
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
from headgate.coordination.states.queue import queue_operation
from headgate.coordination.timers import Timer
from headgate.errors import StoreUnavailable

HEARTBEAT_TTL = 5.0  # seconds without a heartbeat after which an entry is taken for dead
INTERVAL = 2.0  # seconds from the beginning of a round to that of the next
FIRST = 0.1  # seconds until the first heartbeat of a new entry
BATCH = 500  # entries in one operation


class QueueEntry:
    """An entry of this process in a queue, and what became of it: waiting, served or gone."""

    def __init__(self, id: str, token: str, waiter: Waiter) -> None:
        self.id = id
        self.token = token  # the store's name for the waiter: callers with the same id have different ones
        self.waiter = waiter
        self.state = "waiting"

    def can_act(self) -> bool:
        """Whether its thread or its event loop runs; the entry of a loop that stands still must expire."""
        return self.waiter.runs is None or self.waiter.runs()


class Heartbeat:
    """Sends the heartbeats of all entries of one queue. Thread-safe."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._lock = threading.RLock()  # reentrant: a garbage collection under the lock may remove an entry
        self._entries: dict[str, QueueEntry] = {}
        self._unsent: deque[QueueEntry] = deque()  # entries that get a heartbeat before the next round begins
        self._timer: Timer | None = None
        self._idle = False  # True: the timer waits for the next round, so a new entry sets an earlier one
        self._round_began = runner.clock.now()
        self._round_took = 0  # microseconds
        self._loop: asyncio.AbstractEventLoop | None = None

    def add(self, entry: QueueEntry) -> None:
        with self._lock:
            self._entries[entry.token] = entry
            self._unsent.append(entry)
            if self._timer is None or self._idle:
                self._schedule(FIRST)
            self._loop = running_loop() or self._loop

    def remove(self, entry: QueueEntry) -> bool:
        """Send no more heartbeats for *entry*; whether it was the last one."""
        with self._lock:
            del self._entries[entry.token]
            if not self._entries and self._timer:
                self._timer.cancel()
            return not self._entries

    def _schedule(self, seconds: float, idle: bool = False) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer = self._runner.backend.timers.later(seconds, self._send_heartbeats)
        self._idle = idle

    def _send_heartbeats(self) -> None:
        """Send heartbeats, for all entries if a round is due, and wake the waiters whose entries left the queue."""
        interval = INTERVAL * min(1.0, self._runner.backend.states.poll)  # shorter where there are no messages
        every, wait = round(interval * MICROSECONDS), RETRY
        with self._lock:
            self._idle = False
            now = self._runner.clock.now()
            new_round = now >= self._round_began + every
            if new_round:
                self._unsent, self._round_began = deque(self._entries.values()), now
        try:
            while batch := self._next_batch():
                for entry, state in zip(batch, self._send(batch), strict=True):
                    if state != "waiting":
                        entry.state = state
                        entry.waiter.wake()
            took = self._runner.clock.now() - now
            if new_round:  # add a long round's time to the allowed silence
                self._round_took = min(took, round(HEARTBEAT_TTL * MICROSECONDS))
            wait = max((self._round_began + every - now - took) / MICROSECONDS, FIRST)
        except StoreUnavailable:
            with self._lock:
                self._unsent.extendleft(batch)
        finally:
            with self._lock:
                if self._entries:
                    self._schedule(wait, idle=wait > RETRY)

    def _next_batch(self) -> list[QueueEntry]:
        with self._lock:
            batch: list[QueueEntry] = []
            while self._unsent and len(batch) < BATCH:
                entry = self._unsent.popleft()
                if entry.token in self._entries and entry.can_act():
                    batch.append(entry)
            return batch

    def _send(self, batch: list[QueueEntry]) -> Reply:
        ttl = round(HEARTBEAT_TTL * MICROSECONDS) + self._round_took
        waiters = tuple(part for entry in batch for part in (entry.id, entry.token))
        heartbeat = queue_operation("heartbeat", heartbeat_ttl=ttl, waiters=waiters)
        if self._runner.backend.serves(tasks=False):
            return self._runner.execute(heartbeat)
        return self._send_in_loop(heartbeat)

    def _send_in_loop(self, heartbeat: Operation) -> Reply:
        loop = self._loop
        if loop is None or not loop.is_running() or loop is running_loop():
            raise StoreUnavailable("the event loop has ended, or it is running this call")
        sent = asyncio.run_coroutine_threadsafe(self._runner.execute_async(heartbeat), loop)
        try:
            return sent.result(HEARTBEAT_TTL)
        except (TimeoutError, CancelledError) as error:
            sent.cancel()
            raise StoreUnavailable("the event loop stands still, or has ended") from error


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
    _HEARTBEATS.clear()  # the entries are the parent's, and so are their heartbeats
