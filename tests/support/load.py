"""Callers that make one call after another, and the list of what they were answered and when."""

import asyncio
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, Self

from headgate import AsyncLimiter, Decision, Limiter
from tests.support.pulse import Pulse

CALLERS = {"threads": 32, "tasks": 200}
PAUSE = {"threads": 0.01, "tasks": 0.05}  # seconds between two calls of a caller: 3,000 to 4,000 calls a second


class Answer(NamedTuple):
    """One call: when it began (monotonic), how long it took, and the decision or what was raised instead."""

    begun: float
    took: float
    key: str
    decision: Decision | None
    error: Exception | None

    @property
    def ended(self) -> float:
        return self.begun + self.took

    @property
    def by_store(self) -> bool:
        return self.decision is not None and not self.decision.degraded

    @property
    def admitted(self) -> bool:
        return self.decision is not None and self.decision.allowed


class Load:
    """`with Load("threads", url, "100/30d") as load`: 32 threads, or 200 tasks of one event loop, that check.

    The event loop runs in a thread too, so that the test can injure servers meanwhile without holding it up.
    """

    def __init__(self, how: str, store: str, quota: Any, *, keys: tuple[str, ...] = ("k",), **options: Any) -> None:
        self.answers: list[Answer] = []  # in the order in which they ended
        self.pulse = Pulse()
        self.limiter: Limiter | AsyncLimiter
        self._how = how
        self._keys = keys
        self._make: Callable[[type[Any]], Any] = lambda kind: kind(quota, store=store, **options)
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        if self._how == "threads":
            limiter = self.limiter = self._make(Limiter)
            count = CALLERS["threads"]
            self._threads += [threading.Thread(target=self._call, args=(limiter, i)) for i in range(count)]
        else:
            self._threads += [threading.Thread(target=asyncio.run, args=(self._acall_all(),))]
        self.pulse.__enter__()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        self.pulse.__exit__(kind, error, trace)
        if isinstance(self.limiter, Limiter):
            self.limiter.close()

    def wait_for(self, wanted: Callable[[Answer], bool], since: float = 0.0, timeout: float = 40.0) -> Answer:
        """The first answer to a call begun after *since* that is as *wanted*; fails when none comes in time."""
        deadline = time.monotonic() + timeout
        seen = 0
        while time.monotonic() < deadline:
            now = len(self.answers)
            for answer in self.answers[seen:now]:
                if answer.begun >= since and wanted(answer):
                    return answer
            seen = now
            time.sleep(0.005)
        last = self.answers[-1] if self.answers else None
        raise TimeoutError(f"no such answer within {timeout} s; {seen} answers, the last one: {last}")

    def between(self, begin: float, end: float) -> list[Answer]:
        """The answers to calls that began in this time."""
        return [answer for answer in self.answers if begin <= answer.begun < end]

    @property
    def errors(self) -> list[Exception]:
        return [answer.error for answer in self.answers if answer.error]

    @property
    def admitted(self) -> int:
        """How many calls the store admitted; those that the policy let through do not count."""
        return sum(answer.admitted and answer.by_store for answer in self.answers)

    @property
    def slack(self) -> float:
        """Seconds that this machine may add to any bound, see `Pulse`."""
        return self.pulse.slack

    def _call(self, limiter: Limiter, number: int) -> None:
        while not self._over.wait(PAUSE["threads"]):
            key = self._keys[number % len(self._keys)]
            number += 1
            begun = time.monotonic()
            try:
                decision, failure = limiter.try_acquire(key), None
            except Exception as error:
                decision, failure = None, error
            self.answers.append(Answer(begun, time.monotonic() - begun, key, decision, failure))

    async def _acall_all(self) -> None:
        async with self._make(AsyncLimiter) as limiter:
            self.limiter = limiter
            await asyncio.gather(*(self._acall(limiter, i) for i in range(CALLERS["tasks"])))

    async def _acall(self, limiter: AsyncLimiter, number: int) -> None:
        await asyncio.sleep(PAUSE["tasks"] * number / CALLERS["tasks"])  # not all at the same moment
        while not self._over.is_set():
            key = self._keys[number % len(self._keys)]
            number += 1
            begun = time.monotonic()
            try:
                decision, failure = await limiter.try_acquire(key), None
            except Exception as error:
                decision, failure = None, error
            self.answers.append(Answer(begun, time.monotonic() - begun, key, decision, failure))
            await asyncio.sleep(PAUSE["tasks"])
