"""The ledgers of a region in its Redis, and the fetches of its stock from home.

An exchange with the region's Redis may tell this process to fetch: it asks home on behalf of the region and deposits
the reply. That happens in a thread, or a task, beside the one that makes the exchanges: home may be far away. A region
uses its floor only after home has promised it, which each Redis keeps for ever. Until then there is nothing to lease.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from redis.exceptions import RedisError

from headgate._lifecycle import ClosingExchange, renew_after_fork
from headgate._plan import arun, run
from headgate.errors import StoreUnavailable
from headgate.hybrid import region_script, script
from headgate.hybrid.protocol import LeaseReply
from headgate.hybrid.region_script import DepositCall, HomeCall, RegionCall
from headgate.hybrid.stock import (
    SHARES,
    FetchOrder,
    deposit_of,
    floor_params,
    in_units_of,
    refusal,
)
from headgate.keys import label
from headgate.redis.script import LuaScript, ScriptCall, tag_function, text
from headgate.rule import Rule
from headgate.stores.base import LeaseCall

if TYPE_CHECKING:
    from headgate.hybrid.region_store import RegionStore
    from headgate.redis.async_client import AsyncExecutor

MOST_THREADS = 4  # that fetch at the same time
MOST_FETCHES = 64  # keys in one call

Replies = list[LeaseReply | str]


class RegionRequest(NamedTuple):
    """A call of a script that a plan wants made, in the region or at home."""

    at_home: bool
    script: LuaScript
    call: ScriptCall


RegionPlan = Generator[RegionRequest, Any, Any]


class Fetch(NamedTuple):
    """An order, and the call whose reply had it."""

    call: LeaseCall
    order: FetchOrder


@dataclass
class RegionFigures:
    """What `stats()` says of a region: figures of this process."""

    fetches: int = 0  # answered by home
    fetched: int = 0  # permits
    failures: int = 0
    trip_seconds: float = 0.0
    error: str = ""  # why home does not answer; empty while it does
    since: int | None = None  # when the region got its floor; None: not known to have one

    def note_answer(self, seconds: float) -> None:
        self.error = ""
        self.trip_seconds += (seconds - self.trip_seconds) / (5 if self.trip_seconds else 1)

    def note_failure(self, error: Exception) -> None:
        self.failures += 1
        self.error = str(error)


class RegionLeases:
    """See `headgate.stores.base.LeaseBackend`."""

    def __init__(self, store: RegionStore) -> None:
        self.partitioned = store.region_store.partitioned
        self._store = store
        self._tag = tag_function(store.region_store.hash_keys)
        self._kind = self._after = ""
        self._pending: list[Fetch] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.after_fork()
        renew_after_fork(self)

    def after_fork(self) -> None:
        """Start anew in the child of a fork: the threads are the parent's."""
        self._lock = threading.Lock()
        self._threads = 0
        self._pending.clear()

    def key_function(self, rule: Rule) -> Callable[[str], str]:
        """The function that turns a client's key into the Redis key of its Hash in the region."""
        self._kind = rule.kind
        self._after = "" if rule.name == "default" else ":" + label(rule.name)
        before, after, tag = self._before(), self._after, self._tag
        return lambda key: before + tag(key) + after

    def partition(self, key: str) -> int:
        """The Cluster slot of a Hash."""
        return region_script.REGION.slot(key)

    def exchange(self, calls: Sequence[LeaseCall], timeout: float | None = None) -> Replies:
        replies, fetches = run(self._exchange(calls), lambda request: self._answer(request, timeout))
        if fetches:
            self._fetch_in_threads(fetches)
        found: Replies = replies
        return found

    async def exchange_async(self, calls: Sequence[LeaseCall]) -> Replies:
        replies, fetches = await arun(self._exchange(calls), self._answer_async)
        if fetches:
            task = asyncio.get_running_loop().create_task(self._fetch_in_task(fetches), name="headgate-region")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        found: Replies = replies
        return found

    def closing_exchange(self, timeout: float) -> ClosingExchange:
        """`exchange_async` on new connections, without fetches; None with a client that was handed in."""
        return ClosingExchange(self._exchange_on, self._store.region_store.spare_executor(timeout))

    async def close_loop(self) -> None:
        await self.end_fetches()
        await self._store.region_store.close_loop()
        await self._store.home.close_loop()

    async def end_fetches(self) -> None:
        """Give up the fetches of the running event loop: the region has others made instead."""
        loop = asyncio.get_running_loop()
        tasks = [task for task in self._tasks if task.get_loop() is loop]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------------------------------------------------- plans

    def _exchange(self, calls: Sequence[LeaseCall]) -> RegionPlan:
        """The plan of an exchange; returns the replies and what to fetch."""
        if self._store.figures.since is None:
            yield from self._get_floor()
        since, regional = self._store.figures.since or 0, []
        for call in calls:
            params = floor_params(call.params, self._store.share)
            regional.append(RegionCall(call._replace(params=params), since))
        reply = yield self._request(regional)
        replies, fetches = [], []
        for call, made, (answer, order) in zip(calls, regional, region_script.region_replies(reply), strict=True):
            replies.append(answer if isinstance(answer, str) else in_units_of(answer, call.params, made.call.params))
            if order:
                fetches.append(Fetch(call, order))
        return replies, fetches

    def _get_floor(self) -> RegionPlan:
        """Read since when the region has its floor; if it has none, have home promise it, and keep that here."""
        store, figures = self._store, self._store.figures
        kept = f"{store.region_store.prefix}:hybrid:floor:{store.region}:{self._kind}{self._after}"
        now = self._now()
        share, since = yield RegionRequest(False, region_script.RECORD, region_script.RECORD.call([kept], now, "", ""))
        if share < store.share:
            call = region_script.REGISTER.call([self._floors()], store.region, store.share)
            try:
                done, is_first, *known = yield RegionRequest(True, region_script.REGISTER, call)
            except StoreUnavailable as error:
                figures.note_failure(error)
                raise StoreUnavailable(f"home has not promised region {store.region!r} a floor yet: {error}") from None
            if not done:
                names = [text(each) for each in known]
                floors = {name: int(part) for name, part in zip(names[::2], names[1::2], strict=True)}
                floor = f"region {store.region!r}, floor {store.share / SHARES:g}"
                refused = StoreUnavailable(f"{floor}: {refusal(floors)}")
                figures.note_failure(refused)
                raise refused
            share, since = yield RegionRequest(
                False, region_script.RECORD, region_script.RECORD.call([kept], now, store.share, is_first)
            )
        figures.since = int(since)

    def _fetch(self, fetches: Sequence[Fetch]) -> RegionPlan:
        """The plan that asks home and deposits what it answers."""
        store, figures, began = self._store, self._store.figures, monotonic()
        calls = []
        for call, order in fetches:
            ledger = f"{store.home.prefix}:hybrid:home:{call.key.removeprefix(self._region_prefix())}"
            calls.append(
                HomeCall(self._floors(), ledger, call.params, order.request(store.region), store.region, store.share)
            )
        try:
            reply = yield RegionRequest(True, region_script.HOME, region_script.home_call(calls, self._clock_now()))
        except StoreUnavailable as error:
            figures.note_failure(error)
            return
        figures.note_answer(monotonic() - began)
        deposits: dict[int, list[DepositCall]] = defaultdict(list)
        for fetch, answer in zip(fetches, script.replies(reply), strict=True):
            if isinstance(answer, str):
                figures.note_failure(StoreUnavailable(answer))
                continue
            figures.fetches += 1
            figures.fetched += answer.granted
            params = floor_params(fetch.call.params, store.share)
            deposit = DepositCall(fetch.call.key, params, deposit_of(fetch.order, answer))
            deposits[self.partition(fetch.call.key) if self.partitioned else 0].append(deposit)
        for group in deposits.values():
            yield self._request(group)

    # ------------------------------------------------------------------------------------------- threads and tasks

    def _fetch_in_threads(self, fetches: Sequence[Fetch]) -> None:
        with self._lock:
            self._pending.extend(fetches)
            if self._threads >= MOST_THREADS:
                return
            self._threads += 1
        try:
            threading.Thread(target=self._run_thread, name="headgate-region", daemon=True).start()
        except RuntimeError:  # no more threads, or the process ends: the region has another process fetch
            self._threads -= 1

    def _run_thread(self) -> None:
        while True:
            with self._lock:
                batch, self._pending[:MOST_FETCHES] = self._pending[:MOST_FETCHES], []
                if not batch:
                    self._threads -= 1
                    return
            try:
                run(self._fetch(batch), self._answer)
            except StoreUnavailable:
                pass  # of the region: home takes back what was not deposited

    async def _fetch_in_task(self, fetches: Sequence[Fetch]) -> None:
        for start in range(0, len(fetches), MOST_FETCHES):
            try:
                await arun(self._fetch(fetches[start : start + MOST_FETCHES]), self._answer_async)
            except StoreUnavailable:
                pass

    def _answer(self, request: RegionRequest, timeout: float | None = None) -> Any:
        store = self._store.home if request.at_home else self._store.region_store
        try:
            return store.sync_executor().execute(request.script, request.call, None if request.at_home else timeout)
        except (RedisError, OSError) as error:
            raise StoreUnavailable(str(error)) from error

    def _answer_async(self, request: RegionRequest) -> Coroutine[Any, Any, Any]:
        store = self._store.home if request.at_home else self._store.region_store
        return self._execute(store.async_executor(), request)

    async def _execute(self, executor: AsyncExecutor, request: RegionRequest) -> Any:
        try:
            return await executor.execute(request.script, request.call)
        except (RedisError, OSError) as error:
            raise StoreUnavailable(str(error)) from error

    async def _exchange_on(self, executor: AsyncExecutor, calls: Sequence[LeaseCall]) -> Replies:
        if self._store.figures.since is None:
            raise StoreUnavailable("the region has no floor yet")
        replies, _ = await arun(self._exchange(calls), lambda request: self._execute(executor, request))
        found: Replies = replies
        return found

    # -------------------------------------------------------------------------------------------------------- names

    def _request(self, calls: Sequence[RegionCall | DepositCall]) -> RegionRequest:
        return RegionRequest(False, region_script.REGION, region_script.region_call(calls, self._clock_now()))

    def _region_prefix(self) -> str:
        return f"{self._store.region_store.prefix}:hybrid:region:{self._store.region}:"

    def _before(self) -> str:
        return f"{self._region_prefix()}{self._kind}:"

    def _floors(self) -> str:
        return f"{self._store.home.prefix}:hybrid:floors:{self._kind}{self._after}"

    def _clock_now(self) -> int | None:
        return self._store.clock.now() if self._store.clock else None

    def _now(self) -> int | str:
        now = self._clock_now()
        return "" if now is None else now
