"""headgate: a distributed rate limiter that never admits one too many.

from headgate import Limiter

limiter = Limiter("100/minute")
if limiter.try_acquire("user:123"):
    ...
"""

from importlib.util import find_spec
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

if TYPE_CHECKING:
    from headgate.hybrid import AsyncHybridLimiter, HybridLimiter

__version__ = "0.1.0"

__all__ = [
    "COMPILED",
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
    "PermitsExceedLimit",
    "PoolExhausted",
    "QueueFull",
    "Quota",
    "RateLimited",
    "StoreUnavailable",
]

try:
    _redis = find_spec("redis") is not None
except (ImportError, ValueError):  # somebody hides it
    _redis = False
if not _redis:  # `import *` takes what there is; by name they say what to install
    __all__[:] = [name for name in __all__ if "Hybrid" not in name]


def __getattr__(name: str) -> Any:
    """Import on first use what needs more than the standard library."""
    if name in ("AsyncHybridLimiter", "HybridLimiter"):
        import headgate.hybrid

        return getattr(headgate.hybrid, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
