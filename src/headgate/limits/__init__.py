"""The library `limits` on headgate: storages and strategies for it, so that Flask-Limiter and slowapi run unchanged.

    import headgate.limits

    headgate.limits.install()    # from now on memory:// and redis:// of limits are headgate's

Without `install` the import alone registers storages of their own names (``headgate+memory://``,
``headgate+redis://``, ... and ``async+headgate+redis://``) and the strategies token-bucket, leaky-bucket and gcra.

options.py     which store a URL and the options of `limits` mean
operations.py  what a storage does, written once for threads and asyncio
stores.py      runs those operations on a memory store or on Redis
storages.py    the two storage classes, and `install`
strategies.py  token bucket, leaky bucket and GCRA as strategies of `limits`
"""

from __future__ import annotations

try:
    from headgate.limits.storages import AsyncHeadgateStorage, HeadgateStorage, install, uninstall
    from headgate.limits.strategies import register
except ModuleNotFoundError as error:
    if (error.name or "").startswith("headgate"):
        raise
    raise ImportError(f"headgate.limits needs more: pip install 'headgate[limits]' ({error})") from error

register()

__all__ = ["AsyncHeadgateStorage", "HeadgateStorage", "install", "uninstall"]
