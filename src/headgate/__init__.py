"""headgate: a distributed rate limiter that never admits one too many.

from headgate import Limiter

limiter = Limiter("100/minute")
if limiter.try_acquire("user:123"):
    ...
"""

# quota.py         how much, in what time
# rule.py          what a limiter enforces: name, quotas, algorithm
# decision.py      the answer to one check
# limiter.py       Limiter and AsyncLimiter
# booking.py       slots: places in time that a limiter gives
# joint.py         several limiters and keys at once, all or nothing
# decorators.py    a limit around a function or a block
# fallback.py      what to answer when the store cannot
# keys.py          what a key may be, and its place in a Redis key
# clock.py         time
# testing.py       ManualClock
# errors.py        what can go wrong
# _waiters.py      callers that wait for permits
# _plan.py         logic for threads and asyncio, written once
# _lifecycle.py    forks, exits, and the ends of event loops
# _mypyc.py        what compiled modules need
# __main__.py      python -m headgate
# algorithms/      one file for each algorithm
# stores/          where states are kept
# redis/           how Redis is asked
# postgresql/      how PostgreSQL is asked
# remote/          how a headgate service is asked
# hybrid/          HybridLimiter
# simulate/        fleets of hybrid limiters, simulated
# coordination/    lock, semaphore, circuit breaker, pool, queue
# jobs/            job queues: Celery, Dramatiq, taskiq, arq
# budget/          Budget: amounts reserved before a call and settled after it
# clients/         httpx and requests with a pool
# web/             headgate in web frameworks
# limits/          storages and strategies for the library limits
# service/         headgate over HTTP
# replay/          headgate replay: what a limit would have done to a log
# inspection/      headgate plan, doctor and top: settings, stores and services as operators see them
# telemetry/       figures of the library, for Prometheus and OpenTelemetry
# cli/             the headgate command

from typing import TYPE_CHECKING, Any

from headgate.booking import AsyncSlot, Slot
from headgate.decision import COMPILED, Decision
from headgate.errors import (
    BudgetExceeded,
    CircuitOpen,
    HeadgateError,
    InvalidKey,
    InvalidPermits,
    InvalidQuota,
    LockLost,
    LockTimeout,
    PermitsExceedLimit,
    PoolExhausted,
    QueueFull,
    RateLimited,
    SlotMismatch,
    StoreUnavailable,
)
from headgate.limiter import AsyncLimiter, Limiter
from headgate.quota import Quota
from headgate.rule import AlgorithmName, OnStoreError

if TYPE_CHECKING:
    from headgate.budget import AsyncBudget, Budget
    from headgate.hybrid import AsyncHybridLimiter, HybridLimiter

__version__ = "0.1.0"

__all__ = [
    "COMPILED",
    "AlgorithmName",
    "AsyncBudget",
    "AsyncHybridLimiter",
    "AsyncLimiter",
    "AsyncSlot",
    "Budget",
    "BudgetExceeded",
    "CircuitOpen",
    "Decision",
    "HeadgateError",
    "HybridLimiter",
    "InvalidKey",
    "InvalidPermits",
    "InvalidQuota",
    "Limiter",
    "LockLost",
    "LockTimeout",
    "OnStoreError",
    "PermitsExceedLimit",
    "PoolExhausted",
    "QueueFull",
    "Quota",
    "RateLimited",
    "Slot",
    "SlotMismatch",
    "StoreUnavailable",
]


def __getattr__(name: str) -> Any:
    """Import budgets and hybrid limiters on first use, so that other programs do not pay for them."""
    if name in ("AsyncBudget", "Budget"):
        from headgate import budget

        return getattr(budget, name)
    if name in ("AsyncHybridLimiter", "HybridLimiter"):
        from headgate import hybrid

        return getattr(hybrid, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted((globals().keys() | set(__all__)) - {"Any", "TYPE_CHECKING"})
