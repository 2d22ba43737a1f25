"""Hybrid: decisions as fast as in memory, one limit for all processes, and never one too many.

limiter.py          HybridLimiter, AsyncHybridLimiter, and the Stats that their stats() gives
backend.py          their backends: how a caller waits for Redis, in a thread or in a task
table.py            every decision: from a lease without a round trip (the hot path), or from a reply
fallback_policy.py  whether Redis answers, and what callers get while it does not
limiter_leases.py   one limiter's leases: its waiting callers, and what is given back
manager.py          what to tell Redis next about all leases of a process
schedule.py         when that is due, and the leases that are to be given back
drivers.py          the thread, or the task of an event loop, that sends it; gives everything back at exit
protocol.py         the messages between a process and Redis
lease.py            a process's side of one key
ledger.py           Redis's side of one key, in Python
script.py           Redis's side in Lua
redis_leases.py     the ledgers in a Redis: how a `RedisStore` runs the script
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headgate.hybrid.limiter import AsyncHybridLimiter, HybridLimiter, Stats

__all__ = ["AsyncHybridLimiter", "HybridLimiter", "Stats"]


def __getattr__(name: str) -> Any:
    """Import the limiters on first use: the simulator does not need them."""
    if name in __all__:
        from headgate.hybrid import limiter

        return getattr(limiter, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
