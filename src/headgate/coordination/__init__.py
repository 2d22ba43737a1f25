"""What API clients and crawlers need beside a limiter: lock, circuit breaker, pool and queue, shared by a fleet.

from headgate.coordination import CircuitBreaker, Lock, Pool, WaitQueue

Each works on ``memory://`` within a process and on Redis between many; each has an Async twin with the same methods,
awaited. See docs/coordination.md.
"""

from headgate.coordination.breaker import AsyncCircuitBreaker, CircuitBreaker
from headgate.coordination.leases import AsyncLeased, Leased
from headgate.coordination.lock import AsyncLock, Lock
from headgate.coordination.pool import CRAWLER, AsyncPool, Pool
from headgate.coordination.queue import AsyncWaitQueue, WaitQueue
from headgate.coordination.status import PoolStatus
from headgate.errors import CircuitOpen, LockLost, LockTimeout, PoolExhausted, QueueFull, StoreUnavailable

__all__ = [
    "CRAWLER",
    "AsyncCircuitBreaker",
    "AsyncLeased",
    "AsyncLock",
    "AsyncPool",
    "AsyncWaitQueue",
    "CircuitBreaker",
    "CircuitOpen",
    "Leased",
    "Lock",
    "LockLost",
    "LockTimeout",
    "Pool",
    "PoolExhausted",
    "PoolStatus",
    "QueueFull",
    "StoreUnavailable",
    "WaitQueue",
]
