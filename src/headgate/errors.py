"""What can go wrong, as one tree.

    HeadgateError
    ├── InvalidQuota        (ValueError)  the quota does not parse, or does not fit the algorithm
    ├── InvalidKey          (ValueError)  the key is empty, too long or has control characters
    ├── InvalidPermits      (ValueError)  permits is not a whole number of at least 1
    │   ├── PermitsExceedLimit            more than the capacity: waiting would never help
    │   └── SlotMismatch                  the id has booked a slot of other permits
    ├── RateLimited                       the time to wait ran out; ``.decision`` says why, ``.retry_after`` when
    ├── BudgetExceeded                    a hold spent more than it has, and its budget has no more
    ├── StoreUnavailable                  the store did not answer and the policy is ``raise``
    ├── LockTimeout         (TimeoutError)  the lock, or room in the semaphore, did not come free in time
    ├── LockLost                          the lock or lease is not ours any more: it expired, or was released by force
    ├── CircuitOpen                       the breaker rejects calls; ``.retry_after`` says how long
    ├── PoolExhausted                     no member came free in time; ``.reasons`` says why, ``.retry_after`` when
    └── QueueFull                         the queue has as many as it may

A denial is not an error: ``try_acquire`` returns it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headgate.decision import Decision


class HeadgateError(Exception):
    """The root of every error that headgate raises on purpose."""


class InvalidQuota(HeadgateError, ValueError):
    """The quota does not parse, is out of range, or does not fit the algorithm."""


class InvalidKey(HeadgateError, ValueError):
    """The key is not text, or is empty, longer than 256 bytes, or has control characters."""


class InvalidPermits(HeadgateError, ValueError):
    """``permits`` is not a whole number of at least 1 (0 is fine for ``peek``)."""


class PermitsExceedLimit(InvalidPermits):
    """More permits than the capacity: no wait would ever be long enough."""


class SlotMismatch(InvalidPermits):
    """The id of a booking has a slot of other permits already."""


class RateLimited(HeadgateError):
    """The permits did not come in time.

    Attributes:
        key: that was asked for
        decision: the refusal, with its `retry_after`
    """

    def __init__(self, key: str, decision: Decision) -> None:
        super().__init__(key, decision)
        self.key = key
        self.decision = decision

    @property
    def retry_after(self) -> float:
        """Seconds until the same call succeeds, as the decision says."""
        return self.decision.retry_after

    def __str__(self) -> str:
        d = self.decision
        return f"{self.key!r} is over its limit of {d.limit}; retry in {d.retry_after:.3f} s"


class BudgetExceeded(HeadgateError):
    """A hold has spent more of an *amount* than it reserved, and its budget has no more: stop, and settle.

    Attributes:
        key: whose budget
        amount: what there is no more of
    """

    def __init__(self, key: str, amount: str) -> None:
        super().__init__(key, amount)
        self.key, self.amount = key, amount

    def __str__(self) -> str:
        return f"the budget of {self.key!r} has no more {self.amount}"


class StoreUnavailable(HeadgateError):
    """The store did not answer. A limiter raises it only where ``on_store_error="raise"`` asks for it."""


class LockTimeout(HeadgateError, TimeoutError):
    """A ``with`` block did not get its lock in time, or `Semaphore.acquire` no room."""


class LockLost(HeadgateError):
    """This process no longer has the lock or lease: it expired before it was renewed, or was released by force."""


class CircuitOpen(HeadgateError):
    """The breaker rejects the call; ``retry_after`` is when to try again, in seconds.

    While it is open: when it will admit a probe. While other calls probe: soon, after a second or as long as the probes
    have taken so far, and never later than their places are free even if their processes have died.

    Attributes:
        name: of the breaker
        retry_after: seconds
    """

    def __init__(self, name: str, retry_after: float) -> None:
        super().__init__(name, retry_after)
        self.name = name
        self.retry_after = retry_after

    def __str__(self) -> str:
        return f"the circuit breaker {self.name!r} is open; retry in {self.retry_after:.3f} s"


class PoolExhausted(HeadgateError):
    """No member came free in time.

    Attributes:
        name: of the pool
        retry_after: seconds until one may be free; None if no time will bring one back, as in an empty pool
        reasons: how many members are in use, cooling, limited, open or retired
    """

    def __init__(self, name: str, retry_after: float | None, reasons: dict[str, int]) -> None:
        super().__init__(name, retry_after, reasons)
        self.name = name
        self.retry_after = retry_after
        self.reasons = reasons

    def __str__(self) -> str:
        why = ", ".join(f"{count} {reason}" for reason, count in self.reasons.items() if count) or "it has no members"
        when = "" if self.retry_after is None else f"; the next may be free in {self.retry_after:.3f} s"
        return f"the pool {self.name!r} has nothing free: {why}{when}"


class QueueFull(HeadgateError):
    """The queue has as many as its ``max_length`` allows."""
