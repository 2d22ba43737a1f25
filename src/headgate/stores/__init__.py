"""Stores: where the states of keys live.

base.py          the contract of a store, and the stores that URLs name
memory.py        MemoryStore: in this process
key_table.py     KeyTable: the states of one limiter in a MemoryStore
memory_joint.py  several limiters in one step of a MemoryStore
memory_booking.py  slots of a MemoryStore
shared/          SharedStore: in files that all processes of this machine map
redis.py         RedisStore: in a Redis
postgresql.py    PostgreSQLStore: in a PostgreSQL database
service.py       ServiceStore: in a running headgate service
resp_store.py    what stores share whose server speaks the Redis protocol
breaker.py       internal, not `coordination.CircuitBreaker`: calls are not sent to a server that does not answer
probe.py         looks in the background whether that server is back
connections.py   the connections of threads to a server: idle, in use, waited for
batching.py      the queue of an event loop to a server: calls awaited together become one round trip
remote.py        one rule of a limiter on a server: its calls ask the server, or the fallback when it fails
remote_store.py  what stores on a server share: executors of threads and event loops, health
remote_joint.py  several limiters in one call to a server
settings.py      numbers in the URL of a server, and the URL without its passwords
several.py       SeveralStore: several stores that decide as one
agreement.py     what the two ways of them to decide have in common
majority.py      a majority must answer: the protocol alone
failover.py      the first that answers decides: the protocol alone
polling.py       asks them at the same time
thread_pool.py   a backend that blocks, for async functions under a plain `Limiter`
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headgate.stores.memory import MemoryStore as MemoryStore
    from headgate.stores.postgresql import PostgreSQLStore as PostgreSQLStore
    from headgate.stores.redis import RedisStore as RedisStore
    from headgate.stores.service import ServiceStore as ServiceStore
    from headgate.stores.several import SeveralStore as SeveralStore
    from headgate.stores.shared import SharedStore as SharedStore


def __getattr__(name: str) -> Any:
    """Import a store on first use, so that memory needs neither redis-py nor psycopg."""
    from headgate.stores.base import STORE_CLASSES

    if name in STORE_CLASSES:
        return STORE_CLASSES[name].load()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
