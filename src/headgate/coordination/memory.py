"""Tools whose states are in this process."""

from __future__ import annotations

import threading
from typing import Any

from headgate.clock import SYSTEM_CLOCK, Clock
from headgate.coordination.machine import Machine, Reply, Step, wake
from headgate.coordination.timers import Timers
from headgate.waiting import Line

POLL = 1.0  # seconds after which whoever waits asks again, woken or not

_SYSTEM_TIMERS = Timers(SYSTEM_CLOCK)


def _timers(clock: Clock) -> Timers:
    return _SYSTEM_TIMERS if clock is SYSTEM_CLOCK else Timers(clock)


class Memory:
    """States in this process: shared by all threads and event loops, gone when it ends."""

    poll = POLL

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.timers = _timers(clock)
        self.restart()
        self._states: dict[tuple[str, str], Any] = {}
        self._steps = 0

    def restart(self) -> None:
        self.line = Line()
        self._lock = threading.RLock()

    def step(self, machine: Machine, name: str, step: Step) -> Reply:
        key = (machine.prefix, name)
        with self._lock:
            now = self.clock.now()
            state = self._states.get(key)
            if state is None:
                state = self._states[key] = machine.state()
            reply: Reply = getattr(state, step.op)(now, *step.arguments)
            self._steps += 1
            if self._steps % 1024 == 0:
                for old in [key for key, state in self._states.items() if state.idle(now)]:
                    del self._states[old]
        wake(self.line, machine.keys(name)[0], step, reply)
        return reply

    async def astep(self, machine: Machine, name: str, step: Step) -> Reply:
        return self.step(machine, name, step)

    def check(self, *, tasks: bool) -> None:
        """It serves everybody."""

    def listen(self, channel: str) -> None:
        """Whoever changes a state wakes the line itself."""

    def leave(self, channel: str) -> None: ...
    def close(self) -> None: ...
    async def aclose(self) -> None: ...
