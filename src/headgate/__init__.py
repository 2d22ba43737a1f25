"""headgate: a distributed rate limiter that never admits one too many.

from headgate import Limiter

limiter = Limiter("100/minute")
if limiter.try_acquire("user:123"):
    ...
"""

from typing import TYPE_CHECKING, Any

from headgate.decision import COMPILED, Decision
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
from headgate.rule import AlgorithmName, OnStoreError

if TYPE_CHECKING:
    from headgate.hybrid import AsyncHybridLimiter, HybridLimiter

__version__ = "0.1.0"

__all__ = [
    "COMPILED",
    "AlgorithmName",
    "AsyncHybridLimiter",
    "AsyncLimiter",
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
    "StoreUnavailable",
]


def __getattr__(name: str) -> Any:
    """Import on first use what needs more than the standard library."""
    if name not in ("AsyncHybridLimiter", "HybridLimiter"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import headgate.hybrid

        return getattr(headgate.hybrid, name)
    except ImportError as error:
        return _missing(name, str(error))


def _missing(name: str, why: str) -> type:
    """What stands in for a class that cannot be imported: who only names it need not install anything."""

    def refuse(self: object, *_: object, **__: object) -> None:
        raise ImportError(why)

    return type(name, (), {"__init__": refuse, "__doc__": f"Not to be had here: {why}.", "__module__": __name__})


def __dir__() -> list[str]:
    return sorted((globals().keys() | set(__all__)) - {"Any", "TYPE_CHECKING"})
