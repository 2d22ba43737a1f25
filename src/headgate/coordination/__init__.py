"""What API clients and crawlers need beside a limiter: lock, semaphore, circuit breaker, pool and queue, shared.

from headgate.coordination import CircuitBreaker, Lock, Pool, Semaphore, WaitQueue

These five are called tools. Each works on ``memory://`` within a process and on Redis between many; each has an Async
twin with the same methods, awaited. See docs/coordination.md.

lock.py              Lock: acquire, release, fence
acquisition.py       one acquisition of a lock or semaphore: its renewal, its end, its loss; which thread has a lock
semaphore.py         Semaphore: acquire, status
adaptive.py          Adaptive: what makes the limit of a semaphore grow and shrink, in Lua and in Python
semaphore_leases.py  one lease of a semaphore, from the request until it is released
breaker.py           CircuitBreaker: admits calls, and reports how they ended
active_calls.py      which calls run through a breaker, and which of them the running code is part of
pool.py              Pool: leases its members to callers
leases.py            one lease of a member, from the request until it is settled
members.py           encodes the rules of a pool, and decodes the status of its members
feedback.py          what an HTTP answer or an exception says about a server, or about a member
queue.py             WaitQueue: enqueue, dequeue, wait
queue_heartbeat.py   tells the store that the waiters in a WaitQueue are alive

arguments.py         checks the arguments of all tools
runner.py            runs operations, for threads and for asyncio; lets callers queue until one succeeds
background_retry.py  repeats a release, an undo or a report in the background until the store answers
timers.py            the threads that make a call at its time, for renewal, background_retry and queue_heartbeat
backend.py           what all tools on one store share; the states in memory
redis_states.py      the states in Redis
states/              what each tool does to its state, in Lua for Redis and in Python for memory
"""

from headgate.coordination.adaptive import Adaptive
from headgate.coordination.breaker import AsyncCircuitBreaker, CircuitBreaker
from headgate.coordination.leases import AsyncLeased, Leased
from headgate.coordination.lock import AsyncLock, Lock
from headgate.coordination.members import PoolStatus
from headgate.coordination.pool import CRAWLER, AsyncPool, Pool
from headgate.coordination.queue import AsyncWaitQueue, WaitQueue
from headgate.coordination.semaphore import AsyncSemaphore, Semaphore, SemaphoreStatus
from headgate.coordination.semaphore_leases import AsyncSemaphoreLease, SemaphoreLease
from headgate.errors import (
    CircuitOpen,
    LockLost,
    LockTimeout,
    PermitsExceedLimit,
    PoolExhausted,
    QueueFull,
    StoreUnavailable,
)

__all__ = [
    "CRAWLER",
    "Adaptive",
    "AsyncCircuitBreaker",
    "AsyncLeased",
    "AsyncLock",
    "AsyncPool",
    "AsyncSemaphore",
    "AsyncSemaphoreLease",
    "AsyncWaitQueue",
    "CircuitBreaker",
    "CircuitOpen",
    "Leased",
    "Lock",
    "LockLost",
    "LockTimeout",
    "PermitsExceedLimit",
    "Pool",
    "PoolExhausted",
    "PoolStatus",
    "QueueFull",
    "Semaphore",
    "SemaphoreLease",
    "SemaphoreStatus",
    "StoreUnavailable",
    "WaitQueue",
]
