"""What the holds of a budget are of: the terms of a `Budget` object, and what a key means.

In memory nearly every call finds no waiter, and room. It takes a short way then, past plan, request and reply: the
lock, one step of the state, and back. All others go on as if it had not been tried.
"""

from __future__ import annotations

import itertools
import os
import secrets
import threading
from decimal import Decimal
from time import monotonic_ns
from typing import Any, Final, Protocol

from headgate._lifecycle import in_each_child
from headgate.budget.amounts import Amount, Amounts, BucketSpec
from headgate.budget.records import buckets_of, packed, spec_of
from headgate.budget.server_calls import ServerCalls
from headgate.budget.state import SWEEP_EVERY, BudgetState
from headgate.clock import EPOCH, MICROSECONDS, SYSTEM_CLOCK, Clock
from headgate.coordination.arguments import check_timeout
from headgate.coordination.backend import MemoryStates
from headgate.coordination.runner import Runner
from headgate.coordination.states.machine import Operation, entry_channel
from headgate.keys import check_key
from headgate.rule import OnStoreError
from headgate.telemetry.counts import AmountTotals

_SYSTEM: Final = SYSTEM_CLOCK
_EPOCH: Final[int] = EPOCH
_USUAL_TIMEOUT: Final = 3600.0  # seconds


class _Process:
    """This process. Compiled code reads attributes quicker than globals that change."""

    __slots__ = ("counter", "counting", "hold_id", "id")

    def __init__(self) -> None:
        self.counter = itertools.count()
        self.renew()

    def renew(self) -> None:
        self.hold_id = secrets.token_hex(10) + "-%x"  # compiled, an f-string takes more than twice as long
        self.id = os.getpid()
        self.counting = threading.RLock()


_PROCESS: Final = _Process()
in_each_child(_PROCESS.renew)


def unique_id() -> str:
    """An id that no other hold has, in any process."""
    return _PROCESS.hold_id % next(_PROCESS.counter)


def process_id() -> int:
    """`os.getpid`, without a call of the system."""
    return _PROCESS.id


def count_lock() -> Any:
    """Held while what was spent is added up, as threads may share a hold. A signal handler may spend, too."""
    return _PROCESS.counting


def read(clock: Clock) -> int:
    """`clock.now`, without a call of Python if it is the clock of the machine."""
    return monotonic_ns() // 1000 + _EPOCH if clock is _SYSTEM else clock.now()


def check_any_timeout(timeout: Any) -> None:
    """`check_timeout`, without a call of Python for the usual ones."""
    if type(timeout) is not float or not 0.0 <= timeout <= _USUAL_TIMEOUT:
        check_timeout(timeout)


class OpenHold(Protocol):
    """What the terms know of a hold that is not settled."""

    id: str
    ends_at: int

    @property
    def reserved(self) -> dict[str, int | Decimal]: ...


class BudgetTerms:
    """What all holds of a `Budget` object have in common."""

    def __init__(self, runner: Runner, hold: float, on_lost: str, on_store_error: OnStoreError, amounts: int) -> None:
        self.runner = runner
        self.totals = AmountTotals(amounts)
        self.clock = runner.clock
        self.hold_us = round(hold * MICROSECONDS)
        self.on_lost = on_lost
        self.on_store_error = on_store_error
        self.open_holds: dict[str, OpenHold] = {}  # of this process, not yet settled

    def opened(self, name: str, hold: OpenHold) -> None:
        self.open_holds[name] = hold
        if len(self.open_holds) % 1024 == 0:  # callers may have dropped some without settling them
            self.forget_expired()

    def forget_expired(self) -> None:
        """Forget the holds whose time is over."""
        now = self.clock.now()
        for name, hold in list(self.open_holds.items()):
            if hold.ends_at <= now:
                self.open_holds.pop(name, None)


class BudgetSubject:
    """What a key, or the keys of a hierarchy, mean: which state, which buckets, which queue."""

    def __init__(self, runner: Runner, amounts: Amounts, names: list[str], shown: str) -> None:
        self.runner = runner
        self.amounts = amounts
        self.shown = shown
        self._names = names
        self.spec = self.spec_of(amounts.buckets)
        self.path = names[-1] if len(names) > 1 else ""
        self.zeros = packed([0] * len(amounts.buckets))
        self._root = runner.channel.partition("\n")[0]
        self._channel = runner.channel
        self._waiters = runner.backend.waiters
        self._buckets = buckets_of(self.spec)
        states = runner.backend.states
        self._memory = states if type(states) is MemoryStates else None
        self._index: Any = (runner.machine.prefix, runner.name)  # Any: compiled code would make a new tuple at each use
        self._clock = runner.clock
        self.calls: ServerCalls | None = None  # the short way on a server, for threads

    def spec_of(self, buckets: list[BucketSpec]) -> bytes:
        """These buckets as the state reads them."""
        return spec_of([(self._names[each.level], each.label, each.room, each.rate) for each in buckets])

    def values_of(self, id: str | None, amounts: dict[str, Amount]) -> list[int]:
        """The amounts of a reservation; raises what is wrong with it."""
        if id is not None:
            check_key(id, "id")
        if not amounts:
            raise TypeError(f"reserve what? Name an amount, such as {self.amounts.names[0]}=1")
        values = self.amounts.encode(amounts)
        self.amounts.check_capacity(values)
        return values

    def operation(self, name: str, id: str, values: list[int] | None, *more: str | int | bytes) -> Operation:
        units = self.zeros if values is None else packed(self.amounts.units(values))
        return Operation(name, (id, self.spec, units, *more))

    def ask_locally(self, operation: Operation, size: int) -> list[Any]:
        """Run *operation* on the state of this process, in place of the store's."""
        reply = self.runner.backend.local_states.run(self.runner.machine, self.runner.name, operation)
        self.wake(reply, size)
        return reply

    def wake(self, reply: list[Any], size: int) -> None:
        """Wake the waiters of this process that a *reply* names behind *size* values."""
        if len(reply) > size:
            for path in reply[size:]:
                self._waiters.wake(entry_channel(self._root, path))

    def wake_own(self) -> None:
        """Wake the waiters of this process for this subject."""
        if self._has_waiters():
            self._waiters.wake(self._channel)

    def _has_waiters(self) -> bool:
        """`WaiterQueue.is_empty`, without a call of Python."""
        return self._channel in self._waiters.queues

    # ------------------------------------------------------------------------------- the short way, in memory alone

    def grant(self, id: str, values: list[int], hold_us: int, lost: str) -> int:
        """Reserve *values* for an *id* that is new; the time of it, or 0: nothing was done, ask as all others do."""
        memory = self._memory
        if memory is None or self._has_waiters():
            return 0
        with memory._lock:
            state: BudgetState | None = memory._states.get(self._index)
            if state is None:
                return 0
            now = read(self._clock)
            try:
                granted = state.grant(now, id, self.spec, self._buckets, self.amounts.units(values), hold_us, lost)
            except BaseException:  # see `MemoryStates`
                memory.mend(self._index)
                raise
            if state.operations % SWEEP_EVERY == 0:
                memory._sweep(now)
        return now if granted else 0

    def settle(self, id: str, values: list[int]) -> bool:
        """Settle what `grant` reserved; False: nothing was done, ask as all others do."""
        memory = self._memory
        if memory is None:
            return False
        with memory._lock:
            state: BudgetState | None = memory._states.get(self._index)
            if state is None:
                return False
            try:
                settled = state.settle_granted(read(self._clock), id, self._buckets, self.amounts.units(values))
            except BaseException:
                memory.mend(self._index)
                raise
        if settled:
            self.wake_own()
        return settled
