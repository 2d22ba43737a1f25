"""Waiting for permits: first come, first served, and never asking more often than the answer says.

Each key has a queue of waiters. Only the first waiter asks the store; it sleeps for the `retry_after` of the denial and
asks again. The others sleep until they are first. A waiter that leaves, served or not, wakes the next one.
`acquire` is a plan (see `headgate._plan`), which `Limiter` and `AsyncLimiter` drive.
"""

from __future__ import annotations

import enum
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator

from headgate._lifecycle import renew_after_fork
from headgate.clock import MICROSECONDS, Clock
from headgate.decision import Decision, decision
from headgate.errors import RateLimited
from headgate.rule import Rule


class SignalSafeEvent(threading.Event):
    """A `threading.Event` that stays usable when a signal handler interrupts it or raises inside it.

    The standard event holds a Python-level lock inside `set` and `wait`; a signal handler that interrupts one of them
    can leave that lock held for ever. This one is a single lock, acquired in one step: `_unset` is held until `set`.
    """

    def __init__(self) -> None:
        self._flag = False
        self._unset = threading.Lock()
        self._unset.acquire()

    def __repr__(self) -> str:
        return f"<SignalSafeEvent: {'set' if self._flag else 'unset'}>"

    def is_set(self) -> bool:
        return self._flag

    def set(self) -> None:
        self._flag = True
        try:
            self._unset.release()
        except RuntimeError:
            pass  # it was set already

    def clear(self) -> None:
        self._flag = False
        self._unset.acquire(blocking=False)

    def wait(self, timeout: float | None = None) -> bool:
        was_set = self._flag
        if not was_set:
            try:
                was_set = self._unset.acquire(timeout=-1 if timeout is None else max(timeout, 0.0))
            finally:
                # Leave the lock free for the other waiters until `clear`, even if a signal arrived just now.
                if self._flag:
                    try:
                        self._unset.release()
                    except RuntimeError:
                        pass
        return was_set


class WaiterRequest(enum.Enum):
    """What a waiter asks of its limiter. A number of seconds asks it to sleep so long, None until it is woken."""

    TAKE = "take"
    PEEK = "peek"


Wait = Generator[WaiterRequest | float | None, Decision, Decision]


class Waiter:
    """A thread or a task that waits for *key*. *wake* ends its sleep, and may be called from any thread.

    *runs* tells whether the waiter can act: a task in an event loop that is stopped must not hold up the others.
    """

    def __init__(self, key: str, wake: Callable[[], object], runs: Callable[[], bool] | None = None) -> None:
        self.key = key
        self.wake = wake
        self.runs = runs


class WaiterQueue:
    """The waiters of one limiter, in a queue for each key."""

    def __init__(self) -> None:
        self.after_fork()
        renew_after_fork(self)

    def after_fork(self) -> None:
        """Start empty in the child of a fork: the waiters are threads of the parent and would never leave."""
        self._lock = threading.RLock()  # reentrant: a garbage collection under the lock may make a waiter leave
        self.queues: dict[str, OrderedDict[Waiter, None]] = {}

    def join(self, waiter: Waiter, at_front: bool = False) -> None:
        """Join the end of the queue, or its front: for a caller that came when there was none."""
        with self._lock:
            queue = self.queues.setdefault(waiter.key, OrderedDict())
            queue[waiter] = None
            if at_front:
                queue.move_to_end(waiter, last=False)

    def __len__(self) -> int:
        """How many callers wait, for whatever key."""
        return sum([len(queue) for queue in list(self.queues.values())])

    def __bool__(self) -> bool:
        return True

    def is_empty(self, key: str) -> bool:
        """Whether no caller waits for *key*."""
        return key not in self.queues

    def is_first(self, waiter: Waiter) -> bool:
        with self._lock:
            return self._first(waiter.key) is waiter

    def leave(self, waiter: Waiter) -> None:
        """Leave the queue. May be called twice: a signal may have interrupted the first call."""
        with self._lock:
            queue = self.queues.get(waiter.key, OrderedDict())
            queue.pop(waiter, None)
            if not queue:
                self.queues.pop(waiter.key, None)
        self.wake(waiter.key)

    def wake(self, key: str) -> None:
        """Let the first waiter for *key* ask again: something may have changed."""
        with self._lock:
            first = self._first(key)
        if first:
            first.wake()

    def wake_all(self) -> None:
        """Let the first waiter of every key ask again."""
        with self._lock:
            keys = list(self.queues)
        for key in keys:
            self.wake(key)

    def _first(self, key: str) -> Waiter | None:
        for waiter in self.queues.get(key, ()):
            if waiter.runs is None or waiter.runs():
                return waiter
        return None


class Queued:
    """Context manager for a place in a queue; the waiter leaves it even if a signal interrupts `with` itself."""

    at_front = False  # True: join the queue at its front
    _joined = False

    def __init__(self, queue: WaiterQueue, waiter: Waiter) -> None:
        self.waiter = waiter
        self._queue = queue

    def __enter__(self) -> None:
        self._joined = True
        self._queue.join(self.waiter, self.at_front)

    def __exit__(self, *_: object) -> None:
        self._queue.leave(self.waiter)
        self._joined = False

    def __del__(self) -> None:
        if self._joined:
            self.__exit__()


def acquire(queue: WaiterQueue, waiter: Waiter, clock: Clock, timeout: float | None) -> Wait:
    """Wait until the permits are granted; raise `RateLimited` once *timeout* seconds have passed."""
    deadline = None if timeout is None else clock.now() + round(timeout * MICROSECONDS)
    denial, asked_at, pause = None, 0, None
    with Queued(queue, waiter):
        while True:
            if queue.is_first(waiter):
                denial = yield WaiterRequest.TAKE
                if denial.allowed:
                    return denial
                asked_at, pause = clock.now(), denial.retry_us
            if deadline is not None:
                left = deadline - clock.now()
                if left <= 0:
                    if denial is None:  # the waiter was never first
                        denial, asked_at = (yield WaiterRequest.PEEK), clock.now()
                    raise RateLimited(waiter.key, _aged(denial, clock.now() - asked_at))
                pause = left if pause is None else min(pause, left)
            yield None if pause is None else pause / MICROSECONDS


def pace(rule: Rule, key: str, permits: int, timeout: float | None) -> Wait:
    """Pour into the bucket now, and sleep until the water of earlier calls has run out.

    A caller that is cancelled while it sleeps keeps its place: a refund would let a new call start together with the
    next one.
    """
    patience = None if timeout is None else round(timeout * MICROSECONDS)
    quota = rule.quotas[0]
    own = -(-permits * quota.period_us // quota.limit)  # the time that this call's own water takes to run out
    for ask in (WaiterRequest.TAKE,) if patience is None else (WaiterRequest.PEEK, WaiterRequest.TAKE):
        answer = yield ask
        if not answer.allowed:
            raise RateLimited(key, answer)
        delay = max(answer.reset_us - own, 0)
        if patience is not None and delay > patience:
            late = decision(False, answer.limit, answer.remaining, answer.reset_us, delay - patience)
            raise RateLimited(key, late)
    if delay:
        yield delay / MICROSECONDS
    return answer


def _aged(denial: Decision, by: int) -> Decision:
    """The denial as it would read *by* microseconds later; at least one microsecond is left to wait."""
    retry, reset = max(denial.retry_us - by, 1), max(denial.reset_us - by, 1)
    return decision(False, denial.limit, denial.remaining, reset, retry, denial.degraded)
