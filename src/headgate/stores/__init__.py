"""Stores: where the states of keys live.

base.py          the contract of a store, and the stores that URLs name
memory.py        MemoryStore: in this process
key_table.py     KeyTable: the states of one limiter in a MemoryStore
memory_joint.py  several limiters in one step of a MemoryStore
shared/          SharedStore: in files that all processes of this machine map
redis.py         RedisStore: in a Redis
thread_pool.py   a backend that blocks, for async functions under a plain `Limiter`
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headgate.stores.memory import MemoryStore as MemoryStore
    from headgate.stores.redis import RedisStore as RedisStore
    from headgate.stores.shared import SharedStore as SharedStore


def __getattr__(name: str) -> Any:
    """Import a store on first use, so that memory needs no redis-py."""
    from headgate.stores.base import STORE_CLASSES

    if name in STORE_CLASSES:
        return STORE_CLASSES[name].load()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
