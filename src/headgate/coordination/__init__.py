"""What API clients and crawlers need beside a limiter: lock, circuit breaker, pool and queue, shared by a fleet.

from headgate.coordination import CircuitBreaker, Lock, Pool, WaitQueue

Each works on ``memory://`` within a process and on Redis between many; each has an Async twin with the same methods,
awaited. See docs/coordination.md.

lock.py      Lock; holds.py: which thread or task holds it
breaker.py   CircuitBreaker; inside.py: which calls are inside it
pool.py      Pool; leases.py: what it gives out; members.py: the rules and the status of its members
feedback.py  what an HTTP answer or an exception says about a call: success, failure, how long to wait
queue.py     WaitQueue; crowd.py: those of this process who stand in one
states/      the state machine of each, in Lua for Redis and in Python for memory
place.py     where states are: memory.py or redis.py (subscription.py: its wake-ups)
site.py      one tool at one place: runs what it does, for threads and for asyncio
renewal.py   keeps what is held; errand.py: does what nobody waits for; both by timers.py
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
