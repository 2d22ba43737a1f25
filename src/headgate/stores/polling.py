"""Asks several stores at the same time: what the plans of `headgate.stores.agreement` request, for threads and asyncio.

A thread hands the calls to workers, of which each store has its own, so that no store waits behind a silent one. In an
event loop each call is a task. A caller that waits no longer (its time is up, it was cancelled, a signal came) leaves
calls behind: they end by the time-out of their store, and what they take is given back.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Mapping
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from headgate._lifecycle import renew_after_fork
from headgate._plan import arun, run
from headgate._waiters import SignalSafeEvent
from headgate.decision import Decision
from headgate.errors import StoreUnavailable
from headgate.stores.agreement import Agreement, Background, Failure, Poll, Vote
from headgate.stores.breaker import Breaker
from headgate.stores.remote import LimiterCall, share_of

logger = logging.getLogger("headgate")

MAX_WORKERS = 64  # threads for each store; a call that finds none free waits for one
IDLE = 2.0  # seconds after which a worker without a call ends

Request = Poll | Background | float


def call_store(backend: Any, op: str, key: str, permits: int) -> Generator[Callable[[], Any], Any, Vote]:
    """A plan: one call to one store; it yields functions that ask."""
    vote: Vote
    try:
        if op == "reset":
            vote = yield partial(backend.reset, key)
        elif op == "charge":  # as far as there is room for it
            vote = yield partial(backend.try_acquire, key, permits)
            while isinstance(vote, Decision) and not vote and vote.remaining:
                vote = yield partial(backend.try_acquire, key, vote.remaining)
        elif share := share_of(op) if op.startswith("take") else 0:
            vote = yield partial(backend.try_acquire_above, key, permits, share)
        else:
            vote = yield partial(getattr(backend, "try_acquire" if op == "take" else op), key, permits)
    except StoreUnavailable as error:
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        return Failure(cause, refused=hasattr(backend, "refused") and backend.refused(cause))
    return vote


def _ask(function: Callable[[], Any]) -> Any:
    return function()


class PollExecutor:
    """What makes calls to all stores: the part that threads and event loops share."""

    timeout = 60.0  # seconds that a call may have after a debt was charged; each store has its own time-out

    def __init__(self, *, in_background: bool = True) -> None:
        self._in_background = in_background  # False: the caller waits for what others do not wait for

    def plan(self, script: Agreement, call: LimiterCall, time_limit: float | None) -> Generator[Request, Any, Any]:
        """What the stores say to *call* together. *time_limit*: None for the time-outs of the stores."""
        return script.plan(call, time_limit)

    def breakers(self) -> list[Breaker]:
        return []


# -------------------------------------------------------------------------------------------------------- for threads


class Workers:
    """Threads that make the calls to one store. One is started when a call finds none idle, and ends when it is idle.

    Usable from signal handlers: no lock is held while a task is handed over.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.after_fork()
        renew_after_fork(self)

    def after_fork(self) -> None:
        """Start without threads, which are the parent's."""
        self._tasks: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._idle: set[int] = set()
        self._running: set[int] = set()

    def submit(self, task: Callable[[], object]) -> None:
        self._tasks.put(task)
        if self._tasks.qsize() > len(self._idle) and len(self._running) < MAX_WORKERS:
            thread = threading.Thread(target=self._work, name=f"headgate-{self._name}", daemon=True)
            self._running.add(id(thread))
            try:
                thread.start()
            except BaseException:
                self._running.discard(id(thread))
                if not self._running:
                    raise

    def busy(self) -> bool:
        return self._tasks.qsize() > 0 or len(self._running) > len(self._idle)

    def _work(self) -> None:
        own = id(threading.current_thread())
        try:
            while True:
                self._idle.add(own)
                try:
                    task = self._tasks.get(timeout=IDLE)
                except Empty:
                    return
                self._idle.discard(own)
                try:
                    task()
                except Exception:  # a defect of a store, in a call that no caller waits for
                    logger.exception("a call in the background failed")
                del task  # it refers to the caller
        finally:
            self._idle.discard(own)
            self._running.discard(own)
            if self._tasks.qsize() > 0:  # a task came while this worker left
                self.submit(lambda: None)


class WorkerCall:
    """One call that a worker makes for a waiting caller."""

    def __init__(self, poll: Poll, store: int, ended: Callable[[], None]) -> None:
        self.vote: Vote | Exception | None = None
        self._poll = poll
        self._backend = poll.backends[store]
        self._ended = ended
        self._unwanted: dict[None, object] = {}  # one entry: what came first, the vote or the order to give back

    def __call__(self) -> None:
        if self._unwanted:  # the caller has left before the call was made
            return self._ended()
        try:
            self.vote = run(call_store(self._backend, self._poll.op, self._poll.key, self._poll.permits), _ask)
        except Exception as error:  # a defect of the store: raised at the caller
            self.vote = error
        if self._unwanted.setdefault(None, self) is not self:
            self._refund()
        self._ended()

    def give_back(self) -> None:
        """Give back what was taken, in the worker if it has not ended yet."""
        if self._unwanted.setdefault(None, "give back") is self:
            self._refund()

    def _refund(self) -> None:
        taken = isinstance(self.vote, Decision) and self.vote
        if self._poll.op.startswith("take") and taken:
            run(call_store(self._backend, "refund", self._poll.key, self._poll.permits), _ask)


class ThreadPolls(PollExecutor):
    """Polls stores from threads."""

    def __init__(self, names: Mapping[int, str], *, in_background: bool = True) -> None:
        super().__init__(in_background=in_background)
        self.workers = {store: Workers(name) for store, name in names.items()}
        self._background = Workers("background")

    def answer(self, request: Request) -> Any:
        """Do what a plan (see `headgate._plan`) requests."""
        if isinstance(request, float):
            return time.sleep(request)
        if isinstance(request, Background):
            plan = partial(run, request.plan, self.answer)
            return self._background.submit(plan) if self._in_background else plan()
        if len(request.backends) == 1:
            return self._ask_one(request)
        return self._ask_all(request)

    def busy(self) -> bool:
        return self._background.busy() or any(workers.busy() for workers in self.workers.values())

    def _ask_one(self, poll: Poll) -> dict[int, Vote]:
        [(store, backend)] = poll.backends.items()
        if poll.seconds is not None:
            backend = backend.with_timeout(poll.seconds)
        return {store: run(call_store(backend, poll.op, poll.key, poll.permits), _ask)}

    def _ask_all(self, poll: Poll) -> dict[int, Vote]:
        wake, left = SignalSafeEvent(), list(poll.backends)

        def ended() -> None:
            left.pop()
            if not left:
                wake.set()

        calls = {store: WorkerCall(poll, store, ended) for store in poll.backends}
        own = list(calls)[-1] if poll.seconds is None else None  # a caller that waits for all makes one call itself
        try:
            for store, call in calls.items():
                if store == own:
                    call()
                else:
                    self.workers[store].submit(call)
            wake.wait(poll.seconds)
        except BaseException:
            for call in calls.values():
                self._background.submit(call.give_back)
            raise
        return {store: _vote_of(call.vote, call, self._background) for store, call in calls.items()}


class GiveBackInWorker:
    """A late call of threads: it is given back by a worker, as its caller does not wait."""

    def __init__(self, call: WorkerCall, workers: Workers) -> None:
        self._call, self._workers = call, workers

    def give_back(self) -> None:
        self._workers.submit(self._call.give_back)


def _vote_of(vote: Vote | Exception | None, call: WorkerCall, workers: Workers) -> Vote:
    if vote is None:
        return Failure(TimeoutError("no answer in time"), late=GiveBackInWorker(call, workers))
    if isinstance(vote, Exception):
        raise vote
    return vote


# -------------------------------------------------------------------------------------------------------- for asyncio


class TaskPolls(PollExecutor):
    """Polls stores from event loops."""

    def __init__(self, *, in_background: bool = True) -> None:
        super().__init__(in_background=in_background)
        self._tasks: set[asyncio.Task[Any]] = set()  # that run on, though no caller waits

    def answer(self, request: Request) -> Coroutine[Any, Any, Any]:
        """Do what a plan (see `headgate._plan`) requests."""
        if isinstance(request, float):
            return asyncio.sleep(request)
        if isinstance(request, Background):
            plan = arun(request.plan, self.answer)
            return self._start(plan) if self._in_background else plan
        if len(request.backends) == 1:
            return self._ask_one(request)
        return self._ask_all(request)

    async def finish(self) -> None:
        """Wait for what the running event loop has under way."""
        loop = asyncio.get_running_loop()
        while own := [task for task in self._tasks if task.get_loop() is loop]:
            await asyncio.wait(own)

    async def _start(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._keep(asyncio.get_running_loop().create_task(coroutine))

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # no caller waits for it

    async def _ask_one(self, poll: Poll) -> dict[int, Vote]:
        [(store, backend)] = poll.backends.items()
        if poll.seconds is not None:
            backend = backend.with_timeout(poll.seconds)
        return {store: await arun(call_store(backend, poll.op, poll.key, poll.permits), _ask)}

    async def _ask_all(self, poll: Poll) -> dict[int, Vote]:
        create = asyncio.get_running_loop().create_task
        calls = {
            store: create(arun(call_store(backend, poll.op, poll.key, poll.permits), _ask))
            for store, backend in poll.backends.items()
        }
        try:
            await asyncio.wait(calls.values(), timeout=poll.seconds)
        except BaseException:
            for store, task in calls.items():
                self._keep(task)
                LateTask(self, poll, store, task).give_back()
            raise
        return {store: self._vote_of(poll, store, task) for store, task in calls.items()}

    def _vote_of(self, poll: Poll, store: int, task: asyncio.Task[Vote]) -> Vote:
        if task.done():
            return task.result()
        self._keep(task)
        return Failure(TimeoutError("no answer in time"), late=LateTask(self, poll, store, task))

    def refund(self, poll: Poll, store: int, task: asyncio.Task[Vote]) -> None:
        """Give back in a task of its own what *task* took."""
        if poll.op.startswith("take") and not task.cancelled() and not task.exception():
            vote = task.result()
            if not isinstance(vote, Failure) and vote and not task.get_loop().is_closed():
                refund = call_store(poll.backends[store], "refund", poll.key, poll.permits)
                self._keep(task.get_loop().create_task(arun(refund, _ask)))


class LateTask:
    """A late call of an event loop."""

    def __init__(self, polls: TaskPolls, poll: Poll, store: int, task: asyncio.Task[Vote]) -> None:
        self._polls, self._poll, self._store, self._task = polls, poll, store, task

    def give_back(self) -> None:
        self._task.add_done_callback(partial(self._polls.refund, self._poll, self._store))
