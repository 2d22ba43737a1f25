"""Hybrid: decisions as fast as in memory, one limit for all processes, and never one too many.

limiter.py       HybridLimiter, AsyncHybridLimiter; stats.py: what their stats() gives
gates.py         one limiter's rule, for threads and for event loops
table.py         the way in for callers; outage.py: what they hear while Redis is away
member.py        a limiter's part in a node, and what callers want who have to wait; errand.py: who waits, what travels
node.py          what to tell Redis next; wheel.py: whom to look at when; farewells.py: who is on the way out;
                 backend.py: whether Redis answers
synchroniser.py  how that is told; drivers.py: by a thread, or by a task of an event loop
protocol.py      what processes and Redis say to each other
lease.py         a process's side of one key
ledger.py        Redis's side of it, in Python; script.py: the same in Lua
simulate.py      a fleet in one process, on a clock of its own (scenario.py, naive.py, plot.py)
"""

from typing import TYPE_CHECKING, Any

from headgate.hybrid.stats import Stats

if TYPE_CHECKING:
    from headgate.hybrid.limiter import AsyncHybridLimiter, HybridLimiter

__all__ = ["AsyncHybridLimiter", "HybridLimiter", "Stats"]


def __getattr__(name: str) -> Any:
    """Import the limiters on first use: they need redis-py, the simulator does not."""
    if name in ("AsyncHybridLimiter", "HybridLimiter"):
        from headgate.stores.base import STORE_CLASSES

        STORE_CLASSES["RedisStore"].load()  # first: without redis-py it says what to install
        from headgate.hybrid import limiter

        return getattr(limiter, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
