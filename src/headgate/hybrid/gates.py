"""One rule behind leases: a gate for threads, and one for each event loop. What the doors of `limiter.py` open."""

from __future__ import annotations

import asyncio
import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

from headgate.clock import SYSTEM_CLOCK, Clock
from headgate.decision import Decision
from headgate.hybrid.drivers import FAREWELL, LoopSynchroniser, ThreadSynchroniser
from headgate.hybrid.errand import Waiter
from headgate.hybrid.member import Member
from headgate.hybrid.protocol import STYLES, law_of
from headgate.hybrid.synchroniser import Synchroniser
from headgate.keys import check_key, digest, hash_tag, label
from headgate.rule import Rule, check_permits
from headgate.stores.base import Health, StoreHealth
from headgate.stores.redis import RedisStore


class HybridStore:
    """A Redis behind leases. Opened once, by one limiter."""

    def __init__(self, store: RedisStore, owned: bool, accuracy: str, cold: str, max_keys: int) -> None:
        style = STYLES.get(accuracy.lower()) if isinstance(accuracy, str) else None
        if style is None:
            raise ValueError(f"accuracy must be one of {', '.join(STYLES)}, got {accuracy!r:.40}")
        if cold not in ("wait", "optimistic"):
            raise ValueError(f"cold must be wait or optimistic, got {cold!r:.40}")
        if isinstance(max_keys, bool) or not isinstance(max_keys, int) or max_keys < 1:
            raise ValueError(f"max_local_keys must be a whole number of at least 1, got {max_keys!r:.40}")
        self.redis = store
        self.owned = owned
        self.style = style
        self.optimistic = cold == "optimistic"
        self.max_keys = max_keys
        self.gates: list[HybridBackend] = []
        self.loops: dict[asyncio.AbstractEventLoop, AsyncHybridBackend] = {}

    def __repr__(self) -> str:
        return repr(self.redis)

    def open(self, rule: Rule, on_store_error: str = "local") -> HybridBackend:
        law_of(rule)  # refuses what leases cannot serve
        self.redis.open(rule)  # refuses a client of the other kind
        gate = HybridBackend(self, rule, on_store_error)
        self.gates.append(gate)
        return gate

    def open_async(self, rule: Rule, on_store_error: str = "local") -> AsyncHybridGates:
        law_of(rule)  # refuses what leases cannot serve
        self.redis.open_async(rule)
        return AsyncHybridGates(self, rule, on_store_error)

    def namer(self, rule: Rule) -> Callable[[str], str]:
        """What turns a key into the name of its Hash in Redis."""
        before = f"{self.redis.prefix}:hybrid:{rule.kind}:"
        after = "" if rule.name == "default" else ":" + label(rule.name)
        if self.redis.hash_keys:
            return lambda key: before + "{" + digest(key) + "}" + after
        return lambda key: before + hash_tag(key) + after

    def health(self) -> Health:
        return self.redis.health()

    async def ahealth(self) -> Health:
        return await self.redis.ahealth()

    def close(self) -> None:
        """Give the leases back, a second at most, and let go of connections that are ours."""
        for gate in self.gates:
            gate.close()
        if self.owned:
            self.redis.close()

    def retire(self) -> None:
        """The limiter is gone, and nobody has closed it: give the leases back. Anything may have been interrupted."""
        gates: list[Gate] = [*self.gates, *list(self.loops.values())]
        for gate in gates:
            gate.node.later.append(gate.member.desert)

    async def aclose(self) -> None:
        """The same for the running event loop."""
        gate = self.loops.get(asyncio.get_running_loop())
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
        self.node = synchroniser.node
        self.now = synchroniser.read_clock
        self.nudge = synchroniser.nudge
        self.inside = synchroniser.inside
        self.member = Member(
            self.node, rule, store.style, on_store_error, store.namer(rule), self.now, self._remote, store.max_keys
        )
        self._optimistic = store.optimistic
        self._hurry: dict[int, float] = {}  # seconds that a thread has

    def store_health(self) -> StoreHealth:
        backend, sick = self.node.backend, self.node.backend.sick(self.now())
        return StoreHealth(
            state="open" if sick else "closed",
            failures=backend.failed,
            opened=backend.outages,
            degraded=self.member.outage.answers,
            last_error=f"{type(sick).__name__}: {sick}" if sick else "",
        )

    def _remote(self, key: str, permits: int) -> Any:
        """What the table cannot answer."""
        if self._optimistic and not self.inside():
            made = self.member.trust(key, int(permits), self.now())
            if made:
                self.nudge()
                return made
        return self._ask("take", key, int(permits), self._hurry.get(threading.get_ident()))

    def _ask(self, op: str, key: str, permits: int, patience: float | None = None) -> Any:
        raise NotImplementedError

    def _join(self, key: str, waiter: Waiter) -> None:
        """Have *waiter* answered, sooner or later."""
        self.member.wait(key, waiter, self.now())
        self.nudge()

    def _give_back(self, key: str, permits: int) -> None:
        key, permits, node = check_key(key), check_permits(permits), self.node
        if self.inside():
            node.later.append(lambda: self.member.refund(key, permits, self.now()))
        else:
            self.member.check_reachable(key, self.now())
            self.member.refund(key, permits, self.now())
        self.nudge()

    def _hurried(self, key: str, permits: int, patience: float) -> Any:
        """`try_acquire` that waits no longer than *patience* seconds; then the policy answers."""
        own = threading.get_ident()
        before = self._hurry.get(own)  # this may be a signal handler in the middle of the same
        self._hurry[own] = patience
        try:
            return self.member.table.try_acquire(key, permits)
        finally:
            if before is None:
                self._hurry.pop(own, None)
            else:
                self._hurry[own] = before


class HybridBackend(Gate):
    """One rule, for threads."""

    _patience: float | None = None

    def __init__(self, store: HybridStore, rule: Rule, on_store_error: str) -> None:
        self.synchroniser = _shared(store.redis)
        super().__init__(store, rule, on_store_error, self.synchroniser)
        self.try_acquire: Callable[..., Decision] = self.member.table.try_acquire

    def peek(self, key: str, permits: int = 1) -> Decision:
        key, permits = check_key(key), check_permits(permits, self.rule.capacity, 0)
        known = self.member.table.peek(key, permits)
        return self._ask("peek", key, permits, self._patience) if known is None else known

    def refund(self, key: str, permits: int = 1) -> bool:
        self._give_back(key, permits)
        return True

    def reset(self, key: str) -> bool:
        return not self._ask("reset", check_key(key), 0, self._patience).degraded

    def within(self, seconds: float) -> HybridBackend:
        gate = copy.copy(self)
        gate._patience = seconds
        gate.try_acquire = lambda key, permits=1: self._hurried(key, permits, seconds)
        return gate

    def close(self) -> None:
        if self.inside():  # a signal handler: who was interrupted has to go on first
            self.node.later.append(self.member.dismiss)
            self.nudge()
            return
        self.member.dismiss()
        self.synchroniser.settle(self.member, FAREWELL)
        self.member.forget()

    def _ask(self, op: str, key: str, permits: int, patience: float | None = None) -> Decision:
        done = threading.Lock()  # and no Event, in which a signal handler can keep others from telling anybody
        done.acquire()
        waiter = Waiter(op, permits, done.release)
        if self.inside():  # whoever could answer waits for the lock of what was interrupted
            return self.member.interrupted(key, waiter, self.now())
        try:
            self._join(key, waiter)
            while self.synchroniser.unable or not done.acquire(timeout=1.0 if patience is None else max(patience, 0.0)):
                if patience is not None or self.synchroniser.unable:
                    return self.member.give_up(key, waiter, self.now(), self.synchroniser.unable)
                self.nudge()  # should the thread have died, there is a new one
        except BaseException:
            self.member.abandon(key, waiter)
            raise
        return waiter.answer()


class AsyncHybridBackend(Gate):
    """One rule, for one event loop."""

    def __init__(self, store: HybridStore, rule: Rule, on_store_error: str) -> None:
        self.synchroniser = _shared_in_loop(store.redis)
        super().__init__(store, rule, on_store_error, self.synchroniser)
        self.loop = self.synchroniser.loop
        self.try_local = self.member.table.try_acquire

    async def aclose(self) -> None:
        self.member.dismiss()
        await self.synchroniser.settle(self.member, FAREWELL)
        self.member.forget()
        if not self.node.members:
            await self.synchroniser.stop()

    async def _ask(self, op: str, key: str, permits: int, patience: float | None = None) -> Decision:
        done: asyncio.Future[None] = self.loop.create_future()
        waiter = Waiter(op, permits, functools.partial(_set, done))
        try:
            self._join(key, waiter)
            async with asyncio.timeout(patience):
                await done
        except TimeoutError:
            return self.member.give_up(key, waiter, self.now())
        except asyncio.CancelledError:
            self.member.abandon(key, waiter)
            raise
        return waiter.answer()


class AsyncHybridGates:
    """One rule, for any event loop: each has a gate, and leases, of its own."""

    in_process = False

    def __init__(self, store: HybridStore, rule: Rule, on_store_error: str) -> None:
        self.clock: Clock = store.redis.clock or SYSTEM_CLOCK
        self._store = store
        self._rule = rule
        self._policy = on_store_error
        self._latest: AsyncHybridBackend | None = None
        self._patience: float | None = None

    def gate(self) -> AsyncHybridBackend:
        loop = asyncio.get_running_loop()
        latest = self._latest
        if latest is not None and latest.loop is loop:
            return latest
        gates = self._store.loops
        if loop not in gates:
            for closed in [other for other in gates if other.is_closed()]:
                del gates[closed]
            gates[loop] = AsyncHybridBackend(self._store, self._rule, self._policy)
        self._latest = gates[loop]
        return gates[loop]

    async def try_acquire(self, key: str, permits: int = 1) -> Decision:
        gate = self.gate()
        made = gate.try_local(key, permits) if self._patience is None else gate._hurried(key, permits, self._patience)
        return made if isinstance(made, Decision) else await made

    async def peek(self, key: str, permits: int = 1) -> Decision:
        key, permits = check_key(key), check_permits(permits, self._rule.capacity, 0)
        gate = self.gate()
        known = gate.member.table.peek(key, permits)
        return await gate._ask("peek", key, permits, self._patience) if known is None else known

    async def refund(self, key: str, permits: int = 1) -> bool:
        self.gate()._give_back(key, permits)
        return True

    async def reset(self, key: str) -> bool:
        return not (await self.gate()._ask("reset", check_key(key), 0, self._patience)).degraded

    def within(self, seconds: float) -> AsyncHybridGates:
        gates = copy.copy(self)
        gates._patience = seconds
        return gates

    def store_health(self) -> StoreHealth:
        """Of the running event loop, or of the last one where the limiter was used."""
        try:
            gate = self._store.loops.get(asyncio.get_running_loop(), self._latest)
        except RuntimeError:
            gate = self._latest
        return gate.store_health() if gate else StoreHealth("closed")


def _shared(store: RedisStore) -> ThreadSynchroniser:
    """The synchroniser of *store* for threads: one for all limiters that are given the same store."""
    found: ThreadSynchroniser | None = vars(store).get("_synchroniser")
    if found is None:
        found = vars(store).setdefault("_synchroniser", ThreadSynchroniser(store))  # kept there, to live as long
    return found


def _shared_in_loop(store: RedisStore) -> LoopSynchroniser:
    """The same for the running event loop."""
    shared: dict[asyncio.AbstractEventLoop, LoopSynchroniser] = vars(store).setdefault("_loop_synchronisers", {})
    loop = asyncio.get_running_loop()
    if loop not in shared:
        for closed in [other for other in shared if other.is_closed()]:
            del shared[closed]
        shared[loop] = LoopSynchroniser(store)
    return shared[loop]


def _set(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)
