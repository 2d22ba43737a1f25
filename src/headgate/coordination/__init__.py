"""What API clients and crawlers need beside a limiter: lock, circuit breaker, pool and queue, shared by a fleet.

from headgate.coordination import CircuitBreaker, Lock, Pool, WaitQueue

Each works on ``memory://`` within a process and on Redis between many; each has an Async twin with the same methods,
awaited. See docs/coordination.md.

lock.py          Lock
ownership.py     the acquisitions of a lock, and which thread or task they belong to
breaker.py       CircuitBreaker
active_calls.py  the calls that run through a circuit breaker
pool.py          Pool
leases.py        what a pool gives out
members.py       rules and status of the members of a pool
feedback.py      what an HTTP answer or an exception says about a member
queue.py         WaitQueue
heartbeat.py     heartbeats for the entries of this process in a queue
arguments.py     checks of the arguments that all of them take
states/          what each of them does to its state, in Lua for Redis and in Python for memory
backend.py       where states are, in memory or in a store
redis_states.py  states in Redis
runner.py        runs operations and waits in line, for threads and for asyncio
background.py    retries operations that failed
renewal.py       renews locks and leases in time
timers.py        the threads that renew
"""

from headgate.coordination.breaker import AsyncCircuitBreaker, CircuitBreaker
from headgate.coordination.leases import AsyncLeased, Leased
from headgate.coordination.lock import AsyncLock, Lock
from headgate.coordination.members import PoolStatus
from headgate.coordination.pool import CRAWLER, AsyncPool, Pool
from headgate.coordination.queue import AsyncWaitQueue, WaitQueue
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
