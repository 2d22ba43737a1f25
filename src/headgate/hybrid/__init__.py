"""Hybrid: decisions as fast as in memory, one limit for all processes, and never one too many.

limiter.py          HybridLimiter, AsyncHybridLimiter, and the Stats that their stats() gives
backend.py          their backends: a caller waits for Redis, in a thread or in a task
table.py            every local decision (the hot path), and the answer to a caller when a reply comes
fallback_policy.py  whether Redis answers, and what callers get while it does not
limiter_leases.py   one limiter's leases: its waiting callers, and what it gives back
manager.py          picks what to tell Redis next, for all limiters on one store; takes in the replies
schedule.py         when a lease is due; the queue of leases that go back
background.py       the thread or task that makes the round trips; gives all leases back when the process or loop ends
figures.py          what telemetry reports of hybrid limiters
protocol.py         the messages between a process and Redis
inflow.py           what comes into a lease by itself, below the accuracy `high`
lease.py            a process's side of one key: what it holds, when it reports, how much it asks for
ledger.py           Redis's side of one key, in Python
script.py           the same in Lua
ledger_sql.py       the same in PL/pgSQL
redis_leases.py     runs the script on a `RedisStore`
postgres_leases.py  calls the function on a `PostgreSQLStore`
shared_leases.py    keeps ledgers in files of a `SharedStore`
several_leases.py   asks several stores, of which a majority must lend, or the first that answers
several_keys.py     one process's leases of one key at several stores: what each is told, what their replies say
several_lease.py    its lease at one of them, and what that store has yet to be told
several_levels.py   compares stores that may have missed something with the others
failover_keys.py    the same at the first of several stores that answers, and what the next one is told
stock.py            regions: the ledger of a region with its floor and its stock from home, and home's, in Python, for
                    the simulator and the tests
region_script.py    the same in Lua, which Redis runs
region_leases.py    runs those scripts, and fetches the region's stock from home
region_store.py     the two stores of a limiter in a region, and the checks of its arguments

In all of it Redis means the store of the ledgers, which may be a PostgreSQL or the files of ``shared://`` as well.

lease           permits of one key that one process may spend without asking; what is left when it expires is burned
report          what a process tells Redis about one key: what it still holds, gives back, and wants
round trip      one call of the script, with the reports of up to 64 keys
sync            a report that also asks for permits; the other operations are release, reset and peek
ledger          what Redis keeps about one key: free units, and the lease of each process
home            the Redis that the Redis of each region leases from
floor           a region's own share of the quota, which it has even if home does not answer
stock           what a region has on lease from home
reserve permit  one permit that a process holds for the next caller of a key that is called now and then
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
