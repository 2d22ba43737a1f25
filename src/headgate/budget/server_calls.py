"""The requests of a budget to Redis, packed once for each subject but for their ids and amounts.

They are those of `BudgetSubject.operation`, in the same order. Packed one by one, the arguments of a reservation and
its settlement take as long as a tenth of both trips.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final

from headgate.clock import MICROSECONDS

if TYPE_CHECKING:
    from headgate.budget.subjects import BudgetSubject, BudgetTerms

WAITER_TTL: Final = 5 * MICROSECONDS  # without a request for so long, a waiter is taken for dead


class ServerCalls:
    """Reservations that no caller has given an id, and their settlements."""

    def __init__(self, reserve: Any, settle: Any, subject: BudgetSubject, terms: BudgetTerms) -> None:
        count = len(subject.amounts.buckets)
        self._reserve = reserve  # a `PackedOperation` of the store
        self._settle = settle
        self._units = struct.Struct(f"<{count}d").pack
        self._spec = _packed(subject.spec) + b"$%d\r\n" % (8 * count)
        begin = b"\r\n" + _packed(b"%d" % terms.hold_us) + _packed(b"") + _packed(terms.on_lost.encode())
        end = _packed(subject.path.encode())
        self._waits = begin + _packed(b"%d" % WAITER_TTL) + end
        self._does_not_wait = begin + _packed(b"0") + end
        self._end = b"\r\n" + _packed(b"") + _packed(b"0")

    def reserve(self, id: str, units: list[int], waits: bool) -> list[Any]:
        """The reply to a reservation; raises `StoreUnavailable`. It may wait in the queue, or not."""
        end = self._waits if waits else self._does_not_wait
        arguments = _packed(id.encode()) + self._spec + self._units(*units) + end
        reply: list[Any] = self._reserve.run(arguments)
        return reply

    def settle(self, id: str, units: list[int]) -> list[Any]:
        """The reply to a settlement of what the store has granted; raises `StoreUnavailable`."""
        reply: list[Any] = self._settle.run(_packed(id.encode()) + self._spec + self._units(*units) + self._end)
        return reply


def _packed(argument: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(argument), argument)


def server_calls(subject: BudgetSubject, terms: BudgetTerms) -> ServerCalls | None:
    """The packed requests of *subject*; None where the store packs none, as in memory."""
    runner = subject.runner
    pack_operation: Any = getattr(runner.backend.states, "packed_operation", None)
    if pack_operation is None:
        return None
    reserve = pack_operation(runner.machine, runner.name, "reserve", 8)
    settle = pack_operation(runner.machine, runner.name, "settle", 5)
    return ServerCalls(reserve, settle, subject, terms)
