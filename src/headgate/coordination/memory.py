"""Tools whose states are in this process."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, NoReturn

from headgate._lifecycle import renew_after_fork
from headgate._waiters import WaiterQueue
from headgate.clock import SYSTEM_CLOCK, Clock
from headgate.coordination.states.machine import Operation, Reply, StateMachine, wake_waiters
from headgate.coordination.timers import Timers
from headgate.stores.base import NO_PICKLE

POLL = 1.0  # seconds after which whoever waits asks again, woken or not

_SYSTEM_TIMERS = Timers(SYSTEM_CLOCK)


class Memory:
    """States in this process: shared by all threads and event loops, gone when it ends."""

    poll = POLL
    shown = "memory://"

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.timers = _SYSTEM_TIMERS if clock is SYSTEM_CLOCK else Timers(clock)
        self.line = WaiterQueue()
        self._states: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self.after_fork()
        renew_after_fork(self)

    def after_fork(self) -> None:
        self._lock = threading.RLock()

    def __reduce__(self) -> NoReturn:
        raise TypeError(NO_PICKLE)

    def step(self, machine: StateMachine, name: str, step: Operation) -> Reply:
        key = (machine.prefix, name)
        with self._lock:
            now = self.clock.now()
            if key not in self._states:
                self._states[key] = machine.state()
            reply: Reply = self._ask(key, step.name, now, *step.arguments)
            self._sweep(now)
        wake_waiters(self.line, machine.keys(name)[0], step, reply)
        return reply

    def _ask(self, key: tuple[str, str], op: str, *arguments: Any) -> Any:
        try:
            return getattr(self._states[key], op)(*arguments)
        except BaseException:  # of a signal's handler, anywhere: what is half done is worse than what is forgotten
            self._states.pop(key, None)
            raise

    def _sweep(self, now: int) -> None:
        """Look at two states, in turn, and forget those that say nothing any more: faster than a step can make new."""
        for _ in range(min(2, len(self._states))):
            key = next(iter(self._states))
            if self._ask(key, "is_expired", now):
                del self._states[key]
            else:
                self._states.move_to_end(key)

    async def astep(self, machine: StateMachine, name: str, step: Operation) -> Reply:
        return self.step(machine, name, step)

    def check(self, *, tasks: bool) -> None:
        """It serves everybody."""

    def listen(self, channel: str) -> None:
        """Whoever changes a state wakes the line itself."""

    def leave(self, channel: str) -> None: ...
    def close(self) -> None: ...
    async def aclose(self) -> None: ...
