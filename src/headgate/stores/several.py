"""Several stores that decide as one: `SeveralStore`, which a limiter makes of a list of stores and ``agree=``.

`headgate.stores.majority` and `headgate.stores.failover` have the protocols, `headgate.stores.polling` asks the stores.
Each member has its own connections, time-out and circuit breaker; `on_store_error` answers when too few of them decide.
"""

from __future__ import annotations

import asyncio
import threading
import time
import warnings
from collections.abc import Sequence
from time import monotonic
from typing import Any, NoReturn, Unpack

from headgate.clock import Clock
from headgate.rule import Rule
from headgate.stores.agreement import Agreement, TooFewAnswers, TooManyRefuse
from headgate.stores.base import (
    NO_PICKLE,
    Agree,
    Health,
    LeaseBackend,
    Store,
    StoreHealth,
    StoreOptions,
    is_per_process,
    open_store,
    takes_floors,
)
from headgate.stores.failover import FirstThatAnswers
from headgate.stores.majority import Majority
from headgate.stores.polling import TaskPolls, ThreadPolls
from headgate.stores.remote import RuleForTasks, RuleForThreads, RuleOnServer

WAYS: dict[Agree, type[Agreement]] = {"first": FirstThatAnswers, "majority": Majority}
CLOSE_TIMEOUT = 5.0  # seconds for calls that are still under way when a store is closed


class RuleOnSeveral(RuleOnServer):
    """What both backends share: the agreement in place of a script, and the state of all members as one."""

    store_errors, refusals, unsent = (TooFewAnswers,), TooManyRefuse, TooFewAnswers
    script: Agreement

    def may_have_run(self, error: Exception) -> bool:
        return False  # what some of them took was given back

    @property
    def takes_floors(self) -> bool:
        return all(takes_floors(backend) for backend in self.script.backends.values())

    def _health(self, executor: object) -> StoreHealth:
        members = [backend.store_health() for backend in self.script.backends.values()]
        working = sum(member.state == "closed" for member in members)
        return StoreHealth(
            state="closed" if working >= self.script.needed else "open",
            failures=max(member.failures for member in members),
            opened=sum(member.opened for member in members),
            degraded=self.fallback.answers,
            last_error=next((member.last_error for member in members if member.last_error), ""),
        )


class SeveralBackend(RuleOnSeveral, RuleForThreads):
    """One rule on several stores, for threads."""


class AsyncSeveralBackend(RuleOnSeveral, RuleForTasks):
    """One rule on several stores, for asyncio."""


class SeveralStore:
    """Stores that decide together, for limiters of either kind. Thread-safe; usable in the child of a fork.

    Args:
        stores: URLs or store objects, in order
        agree: first: the first that answers decides. majority: a majority must answer, and all that answer must admit
        clock: tests only: the time of all stores; calls wait for what is done in the background otherwise
        **options: for the stores that URLs name
    """

    kind = "several"

    def __init__(
        self, stores: Sequence[str | Store], agree: Agree, clock: Clock | None = None, **options: Unpack[StoreOptions]
    ) -> None:
        self.agree: Agree = check_agree(agree)
        _check_list(stores, agree)
        opened: list[tuple[Store, bool]] = []
        urls = any(isinstance(store, str) for store in stores)  # without one, clock and options are an error
        for store in stores:
            own = isinstance(store, str) or not urls
            opened.append(open_store(store, clock if own else None, options if own else {}))
        self.stores = [store for store, _ in opened]
        self._owned = [store for store, owned in opened if owned]
        self._names = [str(getattr(store, "display_name", store)) for store in self.stores]
        _check_stores(self.stores, self._names)
        clocks: list[Clock | None] = [getattr(store, "clock", None) for store in self.stores]
        self.clock = clock or next((given for given in clocks if given), None)
        self.needed = WAYS[agree].needed_of(len(self.stores))
        self.shared_objects: dict[str, Any] = {}  # what hybrid keeps with the store
        # A test that moves the clock gets the same answers each time: stores are not compared across the move.
        in_background = self.clock is None
        self._threads = ThreadPolls(dict(enumerate(self._names)), in_background=in_background)
        self._tasks = TaskPolls(in_background=in_background)

    def __reduce__(self) -> NoReturn:
        raise TypeError(NO_PICKLE)

    def __repr__(self) -> str:
        return f"<SeveralStore: {self.agree} of {', '.join(map(repr, self.stores))}>"

    def open(self, rule: Rule, on_store_error: str = "allow") -> SeveralBackend:
        """The backend of *rule* for threads."""
        backend = SeveralBackend(self, rule, on_store_error)
        backend.script = self._agreement(rule, [store.open(rule, "raise") for store in self.stores])
        return backend

    def open_async(self, rule: Rule, on_store_error: str = "allow") -> AsyncSeveralBackend:
        """The backend of *rule* for asyncio."""
        backend = AsyncSeveralBackend(self, rule, on_store_error)
        backend.script = self._agreement(rule, [store.open_async(rule, "raise") for store in self.stores])
        return backend

    def _agreement(self, rule: Rule, backends: Sequence[Any]) -> Agreement:
        return WAYS[self.agree](rule, backends, self.clock)

    def sync_executor(self) -> ThreadPolls:
        return self._threads

    def async_executor(self) -> TaskPolls:
        return self._tasks

    latest_executor = async_executor

    def leases(self) -> LeaseBackend:
        """The ledgers of `HybridLimiter` in all stores, which lend together."""
        from headgate.hybrid.several_leases import SeveralLeases  # which needs the stores

        return SeveralLeases(self)

    # ----------------------------------------------------------------------------------------------------- health

    def health(self) -> Health:
        """Check all stores at the same time; healthy means that enough of them can decide."""
        seen: dict[int, Health] = {}

        def check(place: int) -> None:
            seen[place] = self.stores[place].health()

        threads = [threading.Thread(target=check, args=(place,), daemon=True) for place in range(len(self.stores))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self._together([seen[place] for place in range(len(self.stores))])

    async def ahealth(self) -> Health:
        """The same for asyncio."""
        return self._together(await asyncio.gather(*[store.ahealth() for store in self.stores]))

    def _together(self, seen: Sequence[Health]) -> Health:
        problems = []
        for name, health in zip(self._names, seen, strict=True):
            if not health.healthy:
                problems.append(f"{name}: {health.reason}")
            problems += [f"{name}: {problem}" for problem in health.problems]
        healthy = sum(health.healthy for health in seen) >= self.needed
        down = next((health.reason for health in seen if not health.healthy), "ok")
        latency = max((health.latency for health in seen if health.healthy), default=0.0)
        return Health(healthy, "ok" if healthy else down, tuple(problems), latency, role=self.agree)

    # ----------------------------------------------------------------------------------------------------- the end

    def close(self) -> None:
        """Close the connections for threads of the stores that URLs named, after what is still under way."""
        deadline = monotonic() + CLOSE_TIMEOUT
        while self._threads.busy() and monotonic() < deadline:
            time.sleep(0.001)
        for store in self._owned:
            store.close()

    async def aclose(self) -> None:
        """Close the running event loop's connections, and those for threads."""
        await self._tasks.finish()
        for store in self._owned:
            await store.aclose()


def check_agree(agree: object) -> Agree:
    """Return *agree* if it is a way to decide together; else raise."""
    for known in WAYS:
        if known == agree:
            return known
    raise ValueError(f"agree must be {' or '.join(map(repr, WAYS))}, got {agree!r:.40}")


def _check_list(stores: Sequence[str | Store], agree: Agree) -> None:
    if not stores:
        raise ValueError("store is an empty list; name at least one store, such as 'redis://localhost:6379/0'")
    if any(isinstance(store, list | tuple) for store in stores):
        raise ValueError("store is a list in a list; one list names all stores")
    if agree == "majority" and len(stores) == 2:
        warnings.warn(
            "agree='majority' of two stores needs both: if one fails, on_store_error answers. Name three, of which one "
            "may fail, or use agree='first'",
            stacklevel=4,
        )


def _check_stores(stores: Sequence[Store], names: Sequence[str]) -> None:
    for place, store in enumerate(stores):
        if isinstance(store, SeveralStore):
            raise ValueError("a SeveralStore cannot be one of several stores; name its stores in one list")
        if is_per_process(store):
            raise ValueError(
                "memory:// counts for each process alone and cannot be one of several stores; for answers while no "
                "store is there, use on_store_error='local'"
            )
        if store in stores[:place] or names[place] in names[:place]:
            raise ValueError(f"{names[place]} is in the list twice; it would count as two stores and fail as one")
