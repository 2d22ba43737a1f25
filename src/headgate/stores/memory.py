"""Limits kept in this process: a dict of states for each limiter, bounded, thread-safe, without a background thread."""

from __future__ import annotations

import threading
from typing import Any, NoReturn

from headgate._lifecycle import renew_after_fork
from headgate._mypyc import mypyc_attr, set_doc
from headgate.clock import SYSTEM_CLOCK, Clock
from headgate.decision import Decision
from headgate.rule import Rule, check_policy
from headgate.stores.base import NO_PICKLE, Health, InProcessAsync, StateBackend
from headgate.stores.key_table import KeyCount, KeyTable, make_table
from headgate.stores.memory_joint import take_all


@mypyc_attr(native_class=False)
class MemoryStore:
    """States of any number of limiters in this process. Give one to several limiters to share the bound.

    Args:
        max_keys: the bound of all limiters together
        clock: a `headgate.testing.ManualClock`, in tests
    """

    partitioned: bool = False

    kind = "memory"
    in_process = True
    per_process = True

    # Any: compiled code would turn True into 1, and a text into another error, before the check
    def __init__(self, *, max_keys: Any = 1_000_000, clock: Clock | None = None) -> None:
        if isinstance(max_keys, bool) or not isinstance(max_keys, int) or max_keys < 1:
            raise ValueError(f"max_keys must be a whole number of at least 1, got {max_keys!r}")
        self.max_keys = max_keys
        self.clock = clock
        self.shared_objects: dict[str, Any] = {}  # what coordination keeps with the store
        # Reentrant: an exception that a signal handler raises, at whatever line, never leaves it held; and a handler
        # may itself call the limiter.
        self.lock = threading.RLock()
        self.tables: dict[object, KeyTable] = {}
        self.key_count = KeyCount(max_keys)
        renew_after_fork(self)

    @classmethod
    def from_url(cls, url: str, clock: Clock | None = None, **options: Any) -> MemoryStore:
        """The store of ``memory://``; of *options* it takes max_keys."""
        if url != "memory://":
            raise ValueError(f"memory:// has nothing behind it, got {url!r:.40}; its bound is an argument, max_keys=")
        return cls(max_keys=options.get("max_keys", 1_000_000), clock=clock)

    def after_fork(self) -> None:
        """Start with a new lock: a thread that held the old one does not exist in the child."""
        self.lock = threading.RLock()
        for table in self.tables.values():
            table.use_lock(self.lock)

    def __reduce__(self) -> NoReturn:
        raise TypeError(NO_PICKLE)

    def __len__(self) -> int:
        """How many keys are kept now, including expired ones that were not swept yet."""
        return sum([len(table.states) for table in list(self.tables.values())])

    def __repr__(self) -> str:
        return f"MemoryStore(max_keys={self.max_keys})"

    def open(self, rule: Rule, on_store_error: Any = "allow") -> KeyTable:
        """The states of one limiter; limiters of the same rule share them. *on_store_error* is never needed here."""
        check_policy(on_store_error)
        with self.lock:
            if rule.label not in self.tables:
                self.tables[rule.label] = make_table(self, rule.algorithm)
            return self.tables[rule.label]

    def open_async(self, rule: Rule, on_store_error: Any = "allow") -> InProcessAsync:
        """The same for asyncio; the states are shared with those of `open`."""
        return InProcessAsync(self.open(rule, on_store_error))

    def drop(self, rule: Rule) -> None:
        """Forget all states of *rule*: for callers that make rules without end. Its limiters must not be used again."""
        with self.lock:
            table = self.tables.pop(rule.label, None)
            if table is not None:
                self.key_count.keys -= len(table.states)

    def partition(self, key: str) -> int:
        """All keys are together."""
        return 0

    def take_all(self, checks: Any) -> list[Decision]:
        """Spend all *checks* or none, in one step; those of one limiter and key add up."""
        return take_all(self, checks)

    async def take_all_async(self, checks: Any) -> list[Decision]:
        """The same for asyncio; never waits."""
        return take_all(self, checks)

    def states(self) -> StateBackend:
        """What keeps the states of locks, pools, queues and breakers in memory."""
        from headgate.coordination.backend import MemoryStates  # a limiter needs none of it

        return MemoryStates(self.clock or SYSTEM_CLOCK)

    def health(self) -> Health:
        """Always healthy: it needs nothing but this process."""
        return Health(True, role="memory")

    async def ahealth(self) -> Health:
        return self.health()

    def close(self) -> None:
        """Do nothing: there are no connections to close."""

    async def aclose(self) -> None:
        """Do nothing: there are no connections to close."""


set_doc(MemoryStore, "States of any number of limiters, max_keys in all. Give one to several to share the bound.")
