"""`HybridLimiter` and `AsyncHybridLimiter`: decisions from a lease, without a round trip, and never one too many.

    limiter = HybridLimiter("10000/second", store="redis://localhost:6379/0")
    if limiter.try_acquire("tenant:42"):
        ...

The first decision about a key waits for one round trip; then a lease is held, and decisions are local. They have the
methods of `Limiter` and `AsyncLimiter`, and `stats()`.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import threading
import weakref
from collections.abc import Callable
from time import monotonic
from typing import Any, Literal, Unpack

from headgate.clock import SYSTEM_CLOCK, Clock
from headgate.decision import Decision
from headgate.hybrid.node import Member, Waiter
from headgate.hybrid.protocol import STYLES, law_of
from headgate.hybrid.stats import Stats, stats_of
from headgate.hybrid.synchroniser import LoopSynchroniser, Synchroniser, ThreadSynchroniser
from headgate.keys import check_key, digest, hash_tag, label
from headgate.limiter import AsyncLimiter, Limiter
from headgate.rule import Quotas, Rule, check_permits, check_policy
from headgate.stores import Store, StoreHealth, StoreOptions, open_store
from headgate.stores.redis import RedisStore

MAX_KEYS = 100_000
FAREWELL = 1.0  # seconds that closing may take to give leases back; then they run out by themselves

Accuracy = Literal["high", "medium", "low"]
Cold = Literal["wait", "optimistic"]

_OPEN: weakref.WeakSet[HybridStore] = weakref.WeakSet()


class HybridStore:
    """A Redis behind leases. Opened once, by one limiter."""

    def __init__(self, store: RedisStore, owned: bool, accuracy: str, cold: str, max_keys: int) -> None:
        if cold not in ("wait", "optimistic"):
            raise ValueError(f"cold must be wait or optimistic, got {cold!r:.40}")
        if accuracy not in STYLES:
            raise ValueError(f"accuracy must be one of {', '.join(STYLES)}, got {accuracy!r:.40}")
        if isinstance(max_keys, bool) or not isinstance(max_keys, int) or max_keys < 1:
            raise ValueError(f"max_local_keys must be a whole number of at least 1, got {max_keys!r:.40}")
        self.redis = store
        self.owned = owned
        self.style = STYLES[accuracy]
        self.optimistic = cold == "optimistic"
        self.max_keys = max_keys
        self.gates: list[HybridGate] = []
        self.loops: dict[asyncio.AbstractEventLoop, AsyncHybridGate] = {}
        _OPEN.add(self)

    def open(self, rule: Rule, on_store_error: str = "local") -> HybridGate:
        law_of(rule)
        check_policy(on_store_error)
        self.redis.open(rule)  # refuses a client of the other kind
        gate = HybridGate(self, rule, on_store_error)
        self.gates.append(gate)
        return gate

    def open_async(self, rule: Rule, on_store_error: str = "local") -> AsyncHybridGates:
        law_of(rule)
        check_policy(on_store_error)
        self.redis.open_async(rule)
        return AsyncHybridGates(self, rule, on_store_error)

    def namer(self, rule: Rule) -> Callable[[str], str]:
        """What turns a key into the name of its Hash in Redis."""
        before = f"{self.redis.prefix}:hybrid:{rule.kind}:"
        after = "" if rule.name == "default" else ":" + label(rule.name)
        if self.redis.hash_keys:
            return lambda key: before + "{" + digest(key) + "}" + after
        return lambda key: before + hash_tag(key) + after

    def close(self) -> None:
        """Give the leases back, a second at most, and let go of connections that are ours."""
        for gate in self.gates:
            gate.close()
        if self.owned:
            self.redis.close()

    async def aclose(self) -> None:
        """The same for the running event loop."""
        gate = self.loops.pop(asyncio.get_running_loop(), None)
        if gate:
            await gate.aclose()
        if self.owned:
            await self.redis.aclose()


class Gate:
    """What both gates share: the member of a node, and the answers that need nobody."""

    in_process = False

    def __init__(self, store: HybridStore, rule: Rule, on_store_error: str, synchroniser: Synchroniser) -> None:
        self.clock: Clock = synchroniser.clock
        self.rule = rule
        self.synchroniser = synchroniser
        self.node = synchroniser.node
        name, now = store.namer(rule), synchroniser.read_clock
        self.member = Member(self.node, rule, store.style, on_store_error, name, now, self._remote, store.max_keys)
        self.node.members.append(self.member)
        self.now = now
        self._optimistic = store.optimistic

    def _remote(self, key: str, permits: int) -> Any:
        """What the table cannot answer."""
        if self._optimistic:
            made = self.node.trust(self.member, key, int(permits), self.now())
            if made:
                self.nudge()
                return made
        return self._ask("take", key, int(permits))

    def _ask(self, op: str, key: str, permits: int) -> Any:
        raise NotImplementedError

    def nudge(self) -> None:
        raise NotImplementedError

    def _join(self, key: str, waiter: Waiter) -> None:
        """Have *waiter* answered."""
        self.node.wait(self.member, key, waiter, self.now())
        self.nudge()

    def _give_back(self, key: str, permits: int) -> None:
        self.node.refund(self.member, check_key(key), check_permits(permits), self.now())
        self.nudge()

    def store_health(self) -> StoreHealth:
        node = self.node
        return StoreHealth(
            state="open" if node.down else "closed",
            failures=node.failures if node.down else 0,
            opened=node.failures,
            degraded=self.member.outage.answers,
            last_error=f"{type(node.down).__name__}: {node.down}" if node.down else "",
        )


class HybridGate(Gate):
    """One rule, for threads."""

    def __init__(self, store: HybridStore, rule: Rule, on_store_error: str) -> None:
        self.synchroniser: ThreadSynchroniser = _shared(store.redis)
        super().__init__(store, rule, on_store_error, self.synchroniser)
        self.nudge = self.synchroniser.nudge  # type: ignore[method-assign]  # a call less
        self.try_acquire = self.member.table.try_acquire

    def peek(self, key: str, permits: int = 1) -> Decision:
        key, permits = check_key(key), check_permits(permits, self.rule.capacity, 0)
        return self.member.table.peek(key, permits) or self._ask("peek", key, permits)

    def refund(self, key: str, permits: int = 1) -> None:
        self._give_back(key, permits)

    def reset(self, key: str) -> None:
        self._ask("reset", check_key(key), 0)

    def close(self) -> None:
        self.node.dismiss(self.member)
        self.synchroniser.settle(FAREWELL)
        if self.member in self.node.members:
            self.node.members.remove(self.member)

    def _ask(self, op: str, key: str, permits: int) -> Decision:
        done = threading.Event()
        waiter = Waiter(op, permits, done.set)
        try:
            self._join(key, waiter)
            while not done.wait(1.0):
                self.nudge()  # should the thread have died, there is a new one
        except BaseException:
            self.node.abandon(self.member, key, waiter)
            raise
        if waiter.error:
            raise waiter.error
        assert waiter.result is not None
        return waiter.result


class AsyncHybridGate(Gate):
    """One rule, for one event loop."""

    def __init__(self, store: HybridStore, rule: Rule, on_store_error: str) -> None:
        self.synchroniser: LoopSynchroniser = LoopSynchroniser(store.redis)
        super().__init__(store, rule, on_store_error, self.synchroniser)
        self.nudge = self.synchroniser.nudge  # type: ignore[method-assign]  # a call less
        self.loop = self.synchroniser.loop
        self.try_local = self.member.table.try_acquire

    async def peek(self, key: str, permits: int = 1) -> Decision:
        key, permits = check_key(key), check_permits(permits, self.rule.capacity, 0)
        return self.member.table.peek(key, permits) or await self._ask("peek", key, permits)

    async def refund(self, key: str, permits: int = 1) -> None:
        self._give_back(key, permits)

    async def reset(self, key: str) -> None:
        await self._ask("reset", check_key(key), 0)

    async def aclose(self) -> None:
        self.node.dismiss(self.member)
        await self.synchroniser.settle(FAREWELL)
        await self.synchroniser.stop()

    async def _ask(self, op: str, key: str, permits: int) -> Decision:
        done: asyncio.Future[None] = self.loop.create_future()
        waiter = Waiter(op, permits, functools.partial(_set, done))
        self._join(key, waiter)
        try:
            await done
        except asyncio.CancelledError:
            self.node.abandon(self.member, key, waiter)
            raise
        if waiter.error:
            raise waiter.error
        assert waiter.result is not None
        return waiter.result


class AsyncHybridGates:
    """One rule, for any event loop: each has a gate, and leases, of its own."""

    in_process = False

    def __init__(self, store: HybridStore, rule: Rule, on_store_error: str) -> None:
        self._store = store
        self._rule = rule
        self._policy = on_store_error
        self._latest: AsyncHybridGate | None = None

    @property
    def clock(self) -> Clock:
        return self._store.redis.clock or SYSTEM_CLOCK

    def gate(self) -> AsyncHybridGate:
        loop = asyncio.get_running_loop()
        latest = self._latest
        if latest is not None and latest.loop is loop:
            return latest
        gates = self._store.loops
        if loop not in gates:
            for closed in [other for other in gates if other.is_closed()]:
                del gates[closed]
            gates[loop] = AsyncHybridGate(self._store, self._rule, self._policy)
        self._latest = gates[loop]
        return gates[loop]

    async def try_acquire(self, key: str, permits: int = 1) -> Decision:
        made = self.gate().try_local(key, permits)
        return made if isinstance(made, Decision) else await made

    async def peek(self, key: str, permits: int = 1) -> Decision:
        return await self.gate().peek(key, permits)

    async def refund(self, key: str, permits: int = 1) -> None:
        await self.gate().refund(key, permits)

    async def reset(self, key: str) -> None:
        await self.gate().reset(key)

    def store_health(self) -> StoreHealth:
        return self.gate().store_health()


class HybridLimiter(Limiter):
    """`Limiter` on Redis without a round trip for each decision, and still never one too many.

    quota           one quota, as for `Limiter`
    algorithm       token_bucket, gcra, fixed_window or sliding_window_counter
    store           the URL of a Redis, or a `RedisStore`; limiters that are given the same one share its trips
    accuracy        high, medium or low: fewer trips against what a burst may find out on leases. None over-admits
    cold            wait: the first decision about a key waits for Redis. optimistic: it is granted at once and charged
                    afterwards, so each process may grant one call too many to a key that it has not seen for a while
    on_store_error  what to answer when a lease is used up and Redis cannot be asked: local (a share of the rate by the
                    number of processes last seen), deny, allow or raise
    max_local_keys  leases that are held at most; the one unused longest goes back for a new one
    options         prefix, hash_keys, timeout, connect_timeout, max_connections
    """

    _gate: HybridGate

    def __init__(
        self,
        quota: Quotas,
        *,
        store: str | RedisStore = "redis://localhost:6379/0",
        algorithm: str = "token_bucket",
        name: str = "default",
        accuracy: Accuracy = "high",
        cold: Cold = "wait",
        on_store_error: str = "local",
        max_local_keys: int = MAX_KEYS,
        clock: Clock | None = None,
        **options: Unpack[StoreOptions],
    ) -> None:
        hybrid = _hybrid_store(store, clock, options, accuracy, cold, max_local_keys)
        super().__init__(quota, algorithm=algorithm, store=hybrid, name=name, on_store_error=on_store_error)
        self._owned = True  # the leases are ours to give back, whoever the connections belong to

    def stats(self) -> Stats:
        """How it has decided so far; asks nobody."""
        return stats_of([self._gate.member])


class AsyncHybridLimiter(AsyncLimiter):
    """`HybridLimiter` for asyncio: the same arguments, the same methods, awaited. A lease belongs to an event loop."""

    store: Any

    def __init__(
        self,
        quota: Quotas,
        *,
        store: str | RedisStore = "redis://localhost:6379/0",
        algorithm: str = "token_bucket",
        name: str = "default",
        accuracy: Accuracy = "high",
        cold: Cold = "wait",
        on_store_error: str = "local",
        max_local_keys: int = MAX_KEYS,
        clock: Clock | None = None,
        **options: Unpack[StoreOptions],
    ) -> None:
        hybrid = _hybrid_store(store, clock, options, accuracy, cold, max_local_keys)
        super().__init__(quota, algorithm=algorithm, store=hybrid, name=name, on_store_error=on_store_error)
        self._owned = True

    def stats(self) -> Stats:
        """How it has decided so far, in all event loops that are open; asks nobody."""
        return stats_of([gate.member for gate in self.store.loops.values()])


def _hybrid_store(
    store: str | Store, clock: Clock | None, options: StoreOptions, accuracy: str, cold: str, max_keys: int
) -> HybridStore:
    if store == "memory://":
        raise ValueError("HybridLimiter shares a limit through Redis; memory:// has nobody to share with: use Limiter")
    opened, owned = open_store(store, clock, options)
    if not isinstance(opened, RedisStore):
        raise ValueError(f"HybridLimiter needs a Redis: a URL or a RedisStore, got {type(opened).__name__}")
    return HybridStore(opened, owned, accuracy, cold, max_keys)


def _shared(store: RedisStore) -> ThreadSynchroniser:
    """The synchroniser of *store* for threads: one for all limiters that are given the same store."""
    found: ThreadSynchroniser | None = vars(store).get("_synchroniser")
    if found is None:
        found = ThreadSynchroniser(store)
        found = vars(store).setdefault("_synchroniser", found)  # kept there, so that it lives as long
    return found


def _set(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


def _farewell() -> None:
    """Give back what is held when the process ends, a second at most in all."""
    gates = [gate for store in list(_OPEN) for gate in store.gates]
    for gate in gates:
        gate.node.dismiss(gate.member)
    until = monotonic() + FAREWELL
    for gate in gates:
        gate.synchroniser.settle(until - monotonic())


atexit.register(_farewell)
