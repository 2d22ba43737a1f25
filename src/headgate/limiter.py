"""The public classes: `Limiter`, and `AsyncLimiter` with the same methods, awaited.

    limiter = Limiter("100/minute")
    if limiter.try_acquire("user:123"):
        ...

A limiter is safe to share between threads; an async one between tasks, and between event loops.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import math
from collections.abc import Sequence
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, Unpack

from headgate._plan import arun, run
from headgate._waiters import SignalSafeEvent, Wait, Waiter, WaiterQueue, WaiterRequest, acquire, pace
from headgate.algorithms.booking import Booked
from headgate.booking import GRACE, WITHIN, AsyncSlot, Slot, check_booked, check_booking, check_cancel
from headgate.clock import Clock
from headgate.decision import Decision
from headgate.decorators import AsyncGuard, Guard, Key
from headgate.errors import RateLimited
from headgate.keys import check_key
from headgate.rule import AlgorithmName, OnStoreError, Quotas, Rule, Start, check_floor, check_permits, check_policy
from headgate.stores.base import (
    NO_PICKLE,
    Agree,
    AsyncBackend,
    Backend,
    Health,
    InProcessAsync,
    Store,
    StoreHealth,
    StoreOptions,
    kind_of,
    open_store,
    takes_floors,
)
from headgate.stores.key_table import KeyTable, TryAcquire
from headgate.stores.thread_pool import ThreadPoolStore
from headgate.telemetry.limiters import watch_backend, watch_waits
from headgate.telemetry.tally import WaitCounts
from headgate.telemetry.watching import Watched

LONGEST_WAIT = 1e9  # seconds, about 30 years, which every clock can count


class _OnStore:
    """What `Limiter` and `AsyncLimiter` share: the constructor, and the methods that do not wait for the store."""

    _backend: Any
    _origin: Self | None = None  # the limiter that `with_timeout` was called on
    _watched: Watched | None = None

    def __init__(
        self,
        quota: Quotas,
        *,
        algorithm: AlgorithmName = "token_bucket",
        start: Start = "clock",
        store: str | Store | Sequence[str | Store] = "memory://",
        agree: Agree | None = None,
        name: str = "default",
        on_store_error: OnStoreError = "allow",
        clock: Clock | None = None,
        **options: Unpack[StoreOptions],
    ) -> None:
        self.rule = Rule(quota, algorithm, name, start)
        self.store, self._owned = open_store(store, clock, options, agree)
        self._use(self._open(check_policy(on_store_error)))
        self._clock: Clock = self._backend.clock
        self._waiters = WaiterQueue()
        self._waits: WaitCounts | None = None  # of callers that waited, from the first on
        watch_backend(self.rule, self.store, kind_of(self.store), self._backend)

    def with_timeout(self, seconds: float) -> Self:
        """This limiter with *seconds* for each call to its store, instead of the store's own `timeout`.

        For a caller with a deadline: ``limiter.with_timeout(0.02).try_acquire(key)``. Then `on_store_error` answers.

        Args:
            seconds: for each call to the store, above 0
        """
        other = copy.copy(self)
        other._use(self._backend.with_timeout(_check_seconds(seconds)))
        other._owned = False  # the first limiter closes the store
        other._origin = self._origin or self  # alive as long: a hybrid limiter that is collected gives its leases back
        return other

    def within(self, seconds: float) -> Self:
        """Another name of `with_timeout`.

        Args:
            seconds: as for `with_timeout`
        """
        return self.with_timeout(seconds)

    def store_health(self) -> StoreHealth:
        """How the store has served this limiter, from its calls so far; makes no call, so it costs nothing."""
        health: StoreHealth = self._backend.store_health()
        return health

    def __reduce__(self) -> NoReturn:
        raise TypeError(NO_PICKLE)

    def __copy__(self) -> Self:
        other = type(self).__new__(type(self))
        for name, value in vars(self).items():
            setattr(other, name, value)
        other._use(self._backend)
        return other

    def __repr__(self) -> str:
        quotas = ", ".join(str(quota) for quota in self.rule.quotas)
        return f"<{type(self).__name__} {self.rule.name!r}: {quotas}, {self.rule.kind} in {self.store!r}>"

    def _open(self, on_store_error: OnStoreError) -> Backend | AsyncBackend:
        raise NotImplementedError

    def _use(self, backend: Any) -> None:
        self._backend = backend

    def _count_wait(self, result: str, begun: float) -> None:
        """Count a call that has waited since *begun*."""
        limiter = self._origin or self
        if limiter._waits is None:
            limiter._waits = WaitCounts()  # two threads may come at once: the waits of one of them are lost
            store = getattr(self.store, "store", self.store)  # a hybrid limiter's is behind its leases
            limiter._watched = watch_waits(self.rule, kind_of(store), limiter)
        limiter._waits.add(result, begun)


class Limiter(TryAcquire, _OnStore):
    """Decides whether a key may go on, by one quota or by several at once.

    Args:
        quota: text such as ``"100/minute"`` or ``"10/second burst 100"``, a `Quota`, or a list: all must allow
        algorithm: token_bucket, leaky_bucket, fixed_window, sliding_window, sliding_window_counter or gcra
        start: of fixed windows: clock (they start at multiples of the period), or first (at a key's first call)
        store: a URL (``memory://``, ``shared://name``, ``redis://host:port/db``, ``postgresql://host/db``,
            ``headgate://host:port``) or a store object; or a list of those, with *agree*
        agree: how several stores decide: first (the first that answers) or majority (docs/several.md)
        name: tells limiters on one store apart. Limiters of one name, algorithm and quota share their state; on Redis
            other quotas under the same name would mix with it, so give each a name of its own
        on_store_error: what to answer when the store cannot: allow, deny, local or raise
        clock: a `headgate.testing.ManualClock`, in tests
        **options: max_keys (memory, shared); prefix, hash_keys, timeout, connect_timeout, max_connections,
            min_connections, retries, retry_pause (Redis). A store ignores the options of others, so that a setting can
            choose between them
    """

    _backend: Backend

    if TYPE_CHECKING:  # the types of `TryAcquire.try_acquire`, which takes Any

        def try_acquire(self, key: str, permits: int = 1, floor: float | None = None) -> Decision:
            """Spend *permits* from *key*; nothing is spent when denied. One round trip.

            Args:
                key: the client's, such as `user:123`: text of at most 256 bytes
                permits: how many to spend, at least 1 and at most the capacity
                floor: a share of the capacity, such as 0.2, that must remain: a fifth is left to more important callers

            Returns:
                The decision, true when the call may go on.

            Raises:
                InvalidKey: the key is no such text
                PermitsExceedLimit: more permits than the capacity
                StoreUnavailable: the store did not answer and `on_store_error` is raise
            """
            raise NotImplementedError

    def _take_above(self, key: str, permits: int, floor: float) -> Decision:
        permits, share = _check_floor(self.rule, self._backend, permits, floor)
        made: Decision = self._backend.try_acquire_above(key, permits, share)  # type: ignore[attr-defined]  # checked
        return made

    def _open(self, on_store_error: OnStoreError) -> Backend:
        return self.store.open(self.rule, on_store_error)

    def _use(self, backend: Backend) -> None:
        self._backend = backend
        self._table = backend if isinstance(backend, KeyTable) else None
        self._call = backend.try_acquire

    def acquire(self, key: str, permits: int = 1, timeout: float | None = None) -> Decision:
        """Wait for the permits, first come first served.

        Args:
            key: the client's, such as `user:123`: text of at most 256 bytes
            permits: how many to spend, at least 1 and at most the capacity
            timeout: seconds to wait; None: for ever

        Returns:
            The decision that granted them.

        Raises:
            RateLimited: the time ran out; nothing is spent
        """
        key, permits, timeout = _check_wait(self.rule, key, permits, timeout)
        wake = SignalSafeEvent()
        return self._wait(acquire(self._waiters, Waiter(key, wake.set), self._clock, timeout), key, permits, wake)

    def pace(self, key: str, permits: int = 1, timeout: float | None = None) -> Decision:
        """Take the next free moment of a leaky bucket and sleep until it comes; calls start evenly spaced.

        Args:
            key: the client's, such as `user:123`: text of at most 256 bytes
            permits: how many to spend, at least 1 and at most the capacity
            timeout: the longest sleep in seconds; None: any

        Raises:
            RateLimited: the bucket is full, or the sleep would be longer than *timeout*; at once
        """
        key, permits, timeout = _check_pace(self.rule, key, permits, timeout)
        return self._wait(pace(self.rule, key, permits, timeout), key, permits, SignalSafeEvent())

    def book(
        self, key: str, id: str | None = None, permits: int = 1, *, within: float = WITHIN, grace: float = GRACE
    ) -> Slot:
        """Book a place in time for *permits*: at ``slot.delay`` seconds from now, behind all earlier bookings.

        For work that is done later, at the pace of the limit, as in a job queue. A job may ask each time that it is
        delivered; after *grace* seconds it is booked anew. One round trip.

        Args:
            key: the client's, such as `user:123`: text of at most 256 bytes
            id: of the work; the same id gets the same slot again. None: a new one
            permits: what the slot spends
            within: seconds; no slot later than that is given
            grace: seconds after the slot for which its id keeps it

        Raises:
            RateLimited: the slot would be later than *within*; nothing is spent
            SlotMismatch: the id has a slot of other permits
        """
        asked = check_booking(self.rule, self._backend, key, id, permits, within, grace)
        booked: Booked = self._backend.book(asked)  # type: ignore[attr-defined]  # checked by the line above
        return Slot(asked, check_booked(asked, booked), self.cancel_slot)

    def cancel_slot(self, key: str, id: str) -> bool:
        """What `Slot.cancel` does, for a caller that has no more than the id.

        Args:
            key: what the slot was booked for
            id: of the booking
        """
        key, id = check_cancel(self.rule, self._backend, key, id)
        done: bool = self._backend.cancel_slot(key, id)  # type: ignore[attr-defined]  # checked by the line above
        self._waiters.wake(key)
        return done

    def peek(self, key: str, permits: int = 1) -> Decision:
        """The answer that `try_acquire` would give, with nothing spent.

        Args:
            key: the client's, such as `user:123`: text of at most 256 bytes
            permits: what would be spent; 0: how things stand
        """
        return self._backend.peek(key, permits)

    def refund(self, key: str, permits: int = 1) -> bool:
        """Give *permits* back, never above the capacity; waiters for the key ask again.

        Args:
            key: the client's, such as `user:123`: text of at most 256 bytes
            permits: how many to give back

        Returns:
            False: the store could not be told, and `on_store_error` is allow, deny or local; raise raises.
        """
        done = self._backend.refund(key, permits)
        self._waiters.wake(check_key(key))
        return done

    def reset(self, key: str) -> bool:
        """Forget *key*, as if never seen.

        Args:
            key: the client's, such as `user:123`: text of at most 256 bytes

        Returns:
            False, as for `refund`: the store could not be told, and still knows it.
        """
        done = self._backend.reset(key)
        self._waiters.wake(check_key(key))
        return done

    def limit(self, key: Key, *, permits: int = 1, timeout: float | None = None) -> Guard:
        """A decorator for functions, async ones too, and a context manager.

        Args:
            key: a text, or a function of the call's arguments that returns one
            permits: what a call spends
            timeout: seconds to wait for them; None: do not wait

        Raises:
            RateLimited: the call is denied, or its wait is over
        """
        enter = functools.partial(_take, self) if timeout is None else functools.partial(self.acquire, timeout=timeout)
        enter = functools.partial(enter, permits=permits)
        return Guard(key, enter, lambda: self._for_async().limit(key, permits=permits, timeout=timeout))

    def paced(self, key: Key, *, permits: int = 1, timeout: float | None = None) -> Guard:
        """The same through `pace`: calls run later and evenly spaced instead of being refused.

        Args:
            key: a text, or a function of the call's arguments that returns one
            permits: what a call spends
            timeout: the longest sleep in seconds; None: any
        """
        enter = functools.partial(self.pace, permits=permits, timeout=timeout)
        return Guard(key, enter, lambda: self._for_async().paced(key, permits=permits, timeout=timeout))

    def health(self) -> Health:
        """Check the store's health, within a second, on a separate connection; the result is kept for a second."""
        return self.store.health()

    def close(self) -> None:
        """Close the store's connections, unless the store was handed in."""
        if self._owned:
            self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _for_async(self) -> AsyncLimiter:
        """The limiter for async functions under `limit`: the same rule, store and waiters, without blocking."""
        rule, store = self.rule, self.store if self._backend.in_process else ThreadPoolStore(self.store, self._backend)
        twin = AsyncLimiter(rule.quotas, algorithm=rule.kind, start=rule.start, store=store, name=rule.name)
        twin._waiters = self._waiters
        return twin

    def _wait(self, plan: Wait, key: str, permits: int, wake: SignalSafeEvent) -> Decision:
        """Drive *plan* (see `headgate._plan`): ask the store, or wait until *wake* is set."""

        def answer(request: WaiterRequest | float | None) -> Decision | None:
            if request is WaiterRequest.TAKE:
                wake.clear()
                return self.try_acquire(key, permits)
            if request is WaiterRequest.PEEK:
                return self.peek(key, permits)
            self._clock.wait(wake, request)
            return None

        begun, result = monotonic(), "ended"
        try:
            made = run(plan, answer)
            result = "allowed"
            return made
        except RateLimited:
            result = "denied"
            raise
        finally:
            self._count_wait(result, begun)


class AsyncLimiter(_OnStore):
    """`Limiter` for asyncio: the same arguments, the same methods, awaited.

    Checks that are awaited at the same time on a Redis store share a round trip. A task that is cancelled in
    `try_acquire` or `acquire` loses no permits.
    """

    _backend: AsyncBackend

    def _open(self, on_store_error: OnStoreError) -> AsyncBackend:
        return self.store.open_async(self.rule, on_store_error)

    async def try_acquire(self, key: str, permits: int = 1, floor: float | None = None) -> Decision:
        """Spend *permits* from *key*; nothing is spent when denied. One round trip, shared with others.

        With a *floor* only if that share of the capacity remains: 0.2 leaves a fifth to more important callers.
        """
        backend = self._backend
        if floor is not None:
            permits, share = _check_floor(self.rule, backend, permits, floor)
            above: Decision = await backend.try_acquire_above(key, permits, share)  # type: ignore[attr-defined]  # checked
            return above
        if type(backend) is InProcessAsync:  # without a second coroutine, which costs as much as the decision
            made: Decision = backend.backend.try_acquire(key, permits)
            return made
        return await backend.try_acquire(key, permits)

    async def acquire(self, key: str, permits: int = 1, timeout: float | None = None) -> Decision:
        """Wait for the permits, first come first served; raise `RateLimited` after *timeout* seconds."""
        key, permits, timeout = _check_wait(self.rule, key, permits, timeout)
        wake, loop = asyncio.Event(), asyncio.get_running_loop()
        waiter = Waiter(key, functools.partial(_set_threadsafe, loop, wake), loop.is_running)
        return await self._wait(acquire(self._waiters, waiter, self._clock, timeout), key, permits, wake)

    async def pace(self, key: str, permits: int = 1, timeout: float | None = None) -> Decision:
        """Take the next free moment of a leaky bucket and sleep until it comes; calls start evenly spaced.

        Raises `RateLimited` at once when the bucket is full or the wait would be longer than *timeout* seconds.
        """
        key, permits, timeout = _check_pace(self.rule, key, permits, timeout)
        return await self._wait(pace(self.rule, key, permits, timeout), key, permits, asyncio.Event())

    async def book(
        self, key: str, id: str | None = None, permits: int = 1, *, within: float = WITHIN, grace: float = GRACE
    ) -> AsyncSlot:
        """Book a place in time for *permits*, as `Limiter.book` does. A task that is cancelled here books nothing."""
        asked = check_booking(self.rule, self._backend, key, id, permits, within, grace)
        booked: Booked = await self._backend.book(asked)  # type: ignore[attr-defined]  # checked by the line above
        return AsyncSlot(asked, check_booked(asked, booked), self.cancel_slot)

    async def cancel_slot(self, key: str, id: str) -> bool:
        """What `AsyncSlot.cancel` does, for a caller that has no more than the id."""
        key, id = check_cancel(self.rule, self._backend, key, id)
        done: bool = await self._backend.cancel_slot(key, id)  # type: ignore[attr-defined]  # checked by the line above
        self._waiters.wake(key)
        return done

    async def peek(self, key: str, permits: int = 1) -> Decision:
        """The answer that `try_acquire` would give, with nothing spent. 0 permits: how things stand."""
        return await self._backend.peek(key, permits)

    async def refund(self, key: str, permits: int = 1) -> bool:
        """Give *permits* back, never above the capacity; waiters for the key ask again.

        False: the store could not be told, and `on_store_error` is allow, deny or local; raise raises.
        """
        done = await self._backend.refund(key, permits)
        self._waiters.wake(check_key(key))
        return done

    async def reset(self, key: str) -> bool:
        """Forget *key*, as if never seen. False, as for `refund`: the store could not be told, and still knows it."""
        done = await self._backend.reset(key)
        self._waiters.wake(check_key(key))
        return done

    def limit(self, key: Key, *, permits: int = 1, timeout: float | None = None) -> AsyncGuard:
        """A decorator for async functions, and an async context manager: denied raises `RateLimited`, or waits.

        *key* is a text, or a function of the call's arguments that returns one.
        """
        enter = functools.partial(_atake, self) if timeout is None else functools.partial(self.acquire, timeout=timeout)
        return AsyncGuard(key, functools.partial(enter, permits=permits))

    def paced(self, key: Key, *, permits: int = 1, timeout: float | None = None) -> AsyncGuard:
        """The same through `pace`: calls run later and evenly spaced instead of being refused."""
        return AsyncGuard(key, functools.partial(self.pace, permits=permits, timeout=timeout))

    async def health(self) -> Health:
        """Check the store's health, within a second, on a separate connection; the result is kept for a second."""
        return await self.store.ahealth()

    async def aclose(self) -> None:
        """Close the store's connections, unless the store was handed in."""
        if self._owned:
            await self.store.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _wait(self, plan: Wait, key: str, permits: int, wake: asyncio.Event) -> Decision:
        async def answer(request: WaiterRequest | float | None) -> Decision | None:
            if request is WaiterRequest.TAKE:
                wake.clear()
                return await self.try_acquire(key, permits)
            if request is WaiterRequest.PEEK:
                return await self.peek(key, permits)
            await self._clock.wait_async(wake, request)
            return None

        begun, result = monotonic(), "ended"
        try:
            made = await arun(plan, answer)
            result = "allowed"
            return made
        except RateLimited:
            result = "denied"
            raise
        finally:
            self._count_wait(result, begun)


def _check_seconds(seconds: float) -> float:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise ValueError(f"with_timeout() takes a number of seconds above 0, got {seconds!r}")
    return seconds


def _check_floor(rule: Rule, backend: object, permits: int, floor: float) -> tuple[int, int]:
    if not takes_floors(backend):
        raise ValueError(
            "floor= needs a Limiter or AsyncLimiter on memory://, shared://, redis://, postgresql:// or headgate://; "
            f"{type(backend).__name__} decides without one"
        )
    return check_floor(floor, permits, rule.parts)


def _take(limiter: Limiter, key: str, permits: int) -> Decision:
    decision = limiter.try_acquire(key, permits)
    if not decision:
        raise RateLimited(key, decision)
    return decision


async def _atake(limiter: AsyncLimiter, key: str, permits: int) -> Decision:
    decision = await limiter.try_acquire(key, permits)
    if not decision:
        raise RateLimited(key, decision)
    return decision


def _check_wait(rule: Rule, key: str, permits: int, timeout: float | None) -> tuple[str, int, float | None]:
    if timeout is not None and (
        isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 <= timeout < math.inf
    ):
        raise ValueError(f"timeout must be seconds >= 0, or None to wait for ever, got {timeout!r}")
    return (
        check_key(key),
        check_permits(permits, rule.capacity),
        None if timeout is None else min(timeout, LONGEST_WAIT),
    )


def _check_pace(rule: Rule, key: str, permits: int, timeout: float | None) -> tuple[str, int, float | None]:
    if rule.kind != "leaky_bucket" or len(rule.quotas) > 1:
        raise ValueError(
            f"pace() needs a leaky bucket with one quota, this limiter is {rule.kind} with {len(rule.quotas)}; make it "
            "Limiter('10/second burst 100', algorithm='leaky_bucket') for a queue of 100, or use acquire()"
        )
    return _check_wait(rule, key, permits, timeout)


def _set_threadsafe(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(event.set)
