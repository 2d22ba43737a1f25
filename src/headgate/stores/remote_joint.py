"""Several limiters on one server in one call to it, or what their policies answer when it does not.

A server's own script for such a call is made once for each list of limiters: `JointScripts` keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from headgate.decision import Decision
from headgate.fallback import take_all as take_all_locally
from headgate.keys import check_key
from headgate.rule import check_permits
from headgate.stores.base import StoreCheck
from headgate.stores.remote import ServerExecutor


class JointCall(NamedTuple):
    """A call of a joint script: the client's key and the permits of each check."""

    keys: tuple[str, ...]
    permits: tuple[int, ...]
    op: str = "take"

    @property
    def key(self) -> str:
        """The key that decides the slot: in a Cluster all have the same."""
        return self.keys[0]


class JointRules(Protocol):
    """What a server runs for several rules at once."""

    def check_totals(self, call: JointCall) -> None:
        """Raise if the checks that share a state ask for more of it than its capacity."""
        ...

    def decisions(self, reply: Any) -> list[Decision]:
        """A decision for each check."""
        ...


Joint = TypeVar("Joint", bound=JointRules)


class JointScripts(Generic[Joint]):
    """The joint scripts of one store, each made once."""

    MOST = 1000  # limiters may come and go, and their scripts with them

    def __init__(self, make: Callable[[tuple[Any, ...]], Joint]) -> None:
        self._make = make
        self._known: dict[tuple[Any, ...], Joint] = {}

    def of(self, parts: tuple[Any, ...]) -> Joint:
        found = self._known.get(parts)
        if found is None:
            if len(self._known) >= self.MOST:
                self._known = {}
            found = self._known[parts] = self._make(parts)
        return found


def take_all(
    scripts: JointScripts[Any], executor: ServerExecutor, checks: Sequence[StoreCheck[Any]]
) -> Generator[Any, Any, list[Decision]]:
    """The plan (see `headgate._plan`) of a joint check: one call to the server, or what the policies answer."""
    backends = [backend for backend, _, _ in checks]
    keys = tuple([check_key(key) for _, key, _ in checks])
    permits = tuple([check_permits(count, backend.script.capacity) for backend, _, count in checks])
    script, call = scripts.of(tuple([backend.script for backend in backends])), JointCall(keys, permits)
    script.check_totals(call)
    made: list[Decision]
    time_limit = min((backend.time_limit for backend in backends if backend.time_limit is not None), default=None)
    try:
        for backend, key in zip(backends, keys, strict=True):
            if backend.fallback.debts and (debt := backend.fallback.take_debt(key)):
                time_limit = yield from backend.charge(executor, key, debt, time_limit)
        reply = yield from executor.plan(script, call, time_limit)
    except backends[0].store_errors as error:
        local = [(backend.fallback, key, count) for backend, key, count in zip(backends, keys, permits, strict=True)]
        refused, unsure = backends[0].refused(error), backends[0].may_have_run(error)
        with backends[0].counted_failure():
            made = take_all_locally(local, error, refused=refused, unsure=unsure)
        _count(backends, made, permits)
        return made
    made = script.decisions(reply)
    _count(backends, made, permits)
    for backend, key, decision in zip(backends, keys, made, strict=True):
        if backend.fallback.refused_at:
            backend.fallback.record_success()
        if backend.fallback.local:
            backend.fallback.follow_store(key, decision)
    return made


def _count(backends: Sequence[Any], made: Sequence[Decision], permits: Sequence[int]) -> None:
    """Count the decisions; a limiter that would have allowed what another refused has decided nothing."""
    spent = all(made)
    for backend, decision, count in zip(backends, made, permits, strict=True):
        if spent or not decision:
            backend.counts.add(decision, count)
