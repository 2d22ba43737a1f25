"""The ledgers of leases in several stores, which lend together: asks them, in threads and in event loops.

The protocol of one key is in `headgate.hybrid.several_keys` if a majority must lend, and in
`headgate.hybrid.failover_keys` if the first that answers does. Each store has its own connections, time-out and circuit
breaker; those that are asked are asked at the same time, and one whose breaker is open fails at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from itertools import islice
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from headgate._plan import arun, run
from headgate._waiters import SignalSafeEvent
from headgate.errors import StoreUnavailable
from headgate.hybrid.failover_keys import FailoverKey
from headgate.hybrid.lease import SECOND
from headgate.hybrid.protocol import VOID, LeaseReply, LeaseRequest
from headgate.hybrid.several_keys import KeyLeases
from headgate.rule import Rule
from headgate.stores.base import LeaseBackend, LeaseCall, LeaseStore

if TYPE_CHECKING:
    from headgate.stores.base import AsyncExchange
    from headgate.stores.several import SeveralStore

Replies = list[LeaseReply | str]
Asks = dict[int, list[LeaseCall]]  # by the place of the store
Answers = dict[int, Replies | StoreUnavailable]
Key = KeyLeases | FailoverKey

IDLE = 60 * SECOND  # nanoseconds after which no lease that was not renewed is known to any store
MOST_OWED = 10_000  # keys that were given back while a store was away, which is yet to be charged
MOST_SEEN = 100_000  # keys of which another store would be told if the first one fails
OWED_AT_ONCE, FORGOTTEN_AT_ONCE = 16, 128  # keys in one exchange


class Trip:
    """One key in an exchange."""

    def __init__(self, call: LeaseCall, key: Key | None) -> None:
        self.call = call
        self.key: Any = key
        self.requests: dict[int, LeaseRequest] = {}
        self.replies: dict[int, LeaseReply] = {}
        self.error = ""  # of a store, about this key
        self.reply: LeaseReply | None = LeaseReply(VOID)  # if the key is not known


class SeveralLeases:
    """See `headgate.stores.base.LeaseBackend`."""

    partitioned = False

    def __init__(self, store: SeveralStore) -> None:
        self._store = store
        self._members: list[LeaseBackend] = []
        for place, member in enumerate(store.stores):
            leases = member.leases() if isinstance(member, LeaseStore) else None
            if leases is None or leases.partitioned:
                kind = "a Redis Cluster" if leases else type(member).__name__
                raise ValueError(
                    f"store {place + 1} of the list is {kind}: HybridLimiter takes a list of Redis servers (or "
                    "services behind Sentinels), PostgreSQL databases and shared://"
                )
            self._members.append(leases)
        self._names: list[list[Callable[[str], str]]] = []  # of each rule, for each store
        self._keys: dict[tuple[str, str], Key] = {}  # by ledger and node, the one used longest ago first
        self._owed: dict[tuple[str, str], LeaseCall] = {}

    def key_function(self, rule: Rule) -> Callable[[str], str]:
        """The function that turns a client's key into text from which each store's name of it can be told."""
        before = f"{len(self._names)}:"
        self._names.append([member.key_function(rule) for member in self._members])
        return lambda key: before + key

    def partition(self, key: str) -> int:
        """All keys are in all stores."""
        return 0

    def exchange(self, calls: Sequence[LeaseCall], timeout: float | None = None) -> Replies:
        return run(self._exchange(calls), partial(self._ask_in_threads, timeout=timeout))

    async def exchange_async(self, calls: Sequence[LeaseCall]) -> Replies:
        return await self._exchange_by([member.exchange_async for member in self._members], calls)

    def closing_exchange(self, timeout: float) -> ClosingExchanges:
        """`exchange_async` on new connections."""
        return ClosingExchanges([member.closing_exchange(timeout) for member in self._members], self._exchange_by)

    async def close_loop(self) -> None:
        for member in self._members:
            await member.close_loop()

    # ------------------------------------------------------------------------------------------------------- the plan

    def _exchange(self, calls: Sequence[LeaseCall]) -> Generator[Asks, Answers, Replies]:
        """The plan (see `headgate._plan`) of an exchange: a trip, and further ones as long as a key needs them."""
        now = self._now()
        self._forget_idle(now)
        trips = [Trip(call, self._key_of(call)) for call in calls]
        asked = [trip for trip in trips if trip.key is not None]
        asked += [Trip(call, self._keys[call.key, call.request.node]) for call in self._owed_calls(calls)]
        failed: dict[int, StoreUnavailable] = {}
        for trip in asked:
            trip.requests = trip.key.requests(now, trip.call.request, trip.call.params)
        while any(trip.requests for trip in asked):
            yield from self._ask(asked, failed)
            now = self._now()
            for trip in asked:
                if trip.requests:
                    trip.requests = trip.key.more_requests(now, trip.replies, trip.call.params)
        for trip in asked:
            trip.reply = trip.key.combine(now, trip.replies, trip.call.params)
            if trip.call.request.op == "release" and trip.reply is not None and trip.reply.status != VOID:
                self._release(trip.call, trip.key, now)
        if len(self._members) - len(failed) < self._store.needed:
            raise StoreUnavailable(self._too_few(len(failed), str(failed[max(failed)])))
        reason = str(next(iter(failed.values()), ""))
        return [
            self._too_few(len(failed), trip.error or reason) if trip.reply is None else trip.reply for trip in trips
        ]

    def _ask(self, trips: Sequence[Trip], failed: dict[int, StoreUnavailable]) -> Generator[Asks, Answers, None]:
        """Send the requests of *trips*, all at the same time, and note the replies."""
        asks: Asks = {}
        senders: dict[int, list[Trip]] = {}
        for trip in trips:
            for place, request in trip.requests.items():
                call = trip.call
                made = LeaseCall(self._name(call.key, place), call.params, call.profile, request)
                asks.setdefault(place, []).append(made)
                senders.setdefault(place, []).append(trip)
        for place, answer in ((yield asks) if asks else {}).items():
            if isinstance(answer, StoreUnavailable):
                failed[place] = answer
                continue
            for trip, reply in zip(senders[place], answer, strict=True):
                if isinstance(reply, LeaseReply):
                    trip.replies[place] = reply
                else:
                    trip.error = reply

    def _too_few(self, failed: int, reason: str) -> str:
        stores = len(self._members)
        return f"{stores - failed} of {stores} stores answered and it takes {self._store.needed}: {reason}"

    def _key_of(self, call: LeaseCall) -> Key | None:
        """What is known of a key; None if the process thinks that it holds a lease, and it has run out."""
        name = (call.key, call.request.node)
        key = self._keys.pop(name, None)
        if key is None:
            if call.request.lease_id:
                return None
            stores, acked_seq = len(self._members), call.request.acked_seq
            majority = self._store.agree == "majority"
            key = KeyLeases(stores, self._store.needed, acked_seq) if majority else FailoverKey(stores, acked_seq)
        if call.request.op != "peek" or key.request is not None:
            self._keys[name] = key
        self._owed.pop(name, None)
        return key

    def _name(self, key: str, place: int) -> str:
        rule, _, client = key.partition(":")
        return self._names[int(rule)][place](client)

    def _now(self) -> int:
        """Nanoseconds."""
        return self._store.clock.now() * 1000 if self._store.clock else monotonic_ns()

    # ------------------------------------------------------------------------------------------ keys that are given up

    def _release(self, call: LeaseCall, key: Key, now: int) -> None:
        """Forget a key that was given back, or once all stores have been charged."""
        name = (call.key, call.request.node)
        if isinstance(key, FailoverKey) and key.remembers(now) and len(self._keys) < MOST_SEEN:
            return
        if not key.owes(now, call.params):
            self._keys.pop(name, None)
            self._owed.pop(name, None)
        elif len(self._owed) < MOST_OWED:
            self._owed[name] = call
        else:
            self._keys.pop(name, None)

    def _owed_calls(self, calls: Sequence[LeaseCall]) -> list[LeaseCall]:
        """Requests about keys that were given back, for stores that were away then."""
        seq = max((call.request.seq for call in calls), default=0)
        if not self._owed or not seq:
            return []
        made = []
        for name in list(islice(self._owed, OWED_AT_ONCE)):
            call, key = self._owed.pop(name), self._keys.pop(name)
            request = LeaseRequest("release", call.request.node, 0, seq, 0, 0, key.returned, 0, 0, (), 0, 0, 0, 0)
            made.append(call._replace(request=request))
            self._owed[name], self._keys[name] = made[-1], key  # to the end
        return made

    def _forget_idle(self, now: int) -> None:
        """Forget keys that no request was about for so long that their leases have run out."""
        for name in list(islice(self._keys, FORGOTTEN_AT_ONCE)):
            key = self._keys[name]
            if now - key.used_at < IDLE:
                return
            del self._keys[name]
            call = self._owed.pop(name, None)
            if isinstance(key, FailoverKey):
                if key.remembers(now) and len(self._keys) < MOST_SEEN:
                    self._keys[name] = key
                    key.used_at = now
            elif call is not None and key.owes(now, call.params):
                self._keys[name], self._owed[name] = key, call
                key.used_at = now

    # ------------------------------------------------------------------------------------------ threads and event loops

    def _ask_in_threads(self, asks: Asks, timeout: float | None) -> Answers:
        """Ask each store in a worker thread of its own, and one of them in this thread."""
        answers: dict[int, Replies | BaseException] = {}
        wake = SignalSafeEvent()

        def ask(place: int) -> None:
            try:
                answers[place] = self._members[place].exchange(asks[place], timeout)
            except BaseException as error:  # raised below, where the caller is
                answers[place] = error
            if len(answers) == len(asks):
                wake.set()

        workers = self._store.sync_executor().workers
        *others, last = asks
        for place in others:
            try:
                workers[place].submit(partial(ask, place))
            except RuntimeError:  # no more threads, or the process ends
                ask(place)
        ask(last)
        wake.wait(None)
        return _checked(answers)

    def _exchange_by(
        self, exchanges: Sequence[AsyncExchange | None], calls: Sequence[LeaseCall]
    ) -> Coroutine[Any, Any, Replies]:
        async def ask(asks: Asks) -> Answers:
            trips = [_ask_one(exchanges[place], made) for place, made in asks.items()]
            return _checked(dict(zip(asks, await asyncio.gather(*trips, return_exceptions=True), strict=True)))

        return arun(self._exchange(calls), ask)


class ClosingExchanges:
    """An async context manager: gives an exchange for the last calls of an event loop, then closes its connections."""

    def __init__(self, closing: Sequence[Any], exchange_by: Callable[..., Coroutine[Any, Any, Replies]]) -> None:
        self._closing = closing
        self._exchange_by = exchange_by
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> AsyncExchange | None:
        opened = [await self._stack.enter_async_context(each) for each in self._closing]
        return partial(self._exchange_by, opened) if any(opened) else None

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()


async def _ask_one(exchange: AsyncExchange | None, calls: list[LeaseCall]) -> Replies:
    if exchange is None:
        raise StoreUnavailable("its client was handed in, and may be closed")
    return await exchange(calls)


def _checked(answers: dict[int, Replies | BaseException]) -> Answers:
    """The answers; raise what is no outage."""
    checked: Answers = {}
    for place, answer in answers.items():
        if isinstance(answer, BaseException) and not isinstance(answer, StoreUnavailable):
            raise answer
        checked[place] = answer
    return checked
