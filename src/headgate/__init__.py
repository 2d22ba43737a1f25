"""headgate: a distributed rate limiter that never admits one too many.

from headgate import Limiter

limiter = Limiter("100/minute")
if limiter.try_acquire("user:123"):
    ...
"""

from headgate.decision import Decision
from headgate.errors import (
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
    StoreUnavailable,
)
from headgate.limiter import AsyncLimiter, Limiter
from headgate.quota import Quota
from headgate.stores.memory import COMPILED

__version__ = "0.1.0"

__all__ = [
    "COMPILED",
    "AsyncLimiter",
    "CircuitOpen",
    "Decision",
    "HeadgateError",
    "InvalidKey",
    "InvalidPermits",
    "InvalidQuota",
    "Limiter",
    "LockLost",
    "LockTimeout",
    "PermitsExceedLimit",
    "PoolExhausted",
    "QueueFull",
    "Quota",
    "RateLimited",
    "StoreUnavailable",
]
