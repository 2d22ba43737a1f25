"""Hybrid: decisions as fast as in memory, one limit for all processes, and never one too many.

protocol.py      what processes and Redis say to each other
ledger.py        Redis's side, in Python; script.py: the same in Lua
lease.py         a process's side of one key
table.py         the way in for callers; outage.py: what they hear while Redis is away
member.py        a limiter's part in a node, and what its callers want; errand.py: those who wait, and what travels
node.py          what to tell Redis next (wheel.py: whom to look at when; farewells.py, backend.py: whether it answers)
synchroniser.py  how that is told; drivers.py: by a thread, or a task of an event loop (bell.py)
gates.py         one rule for threads, and for event loops; limiter.py: HybridLimiter, AsyncHybridLimiter
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
        import headgate.stores.redis  # noqa: F401  # first: without redis-py it says what to install
        from headgate.hybrid import limiter

        return getattr(limiter, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
