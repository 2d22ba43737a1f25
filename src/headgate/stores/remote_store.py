"""What stores on a server share: an executor for threads, one for each event loop, and a health asked once a second.

An executor has the connections and the circuit breaker of its callers. A subclass opens them, and examines the server.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from time import monotonic
from typing import Any, ClassVar, Generic, NoReturn, Protocol, TypeVar

from headgate._lifecycle import renew_after_fork
from headgate._plan import arun, run
from headgate.clock import Clock
from headgate.decision import Decision
from headgate.rule import Rule
from headgate.stores.base import NO_PICKLE, Health, StoreCheck
from headgate.stores.remote import RuleForTasks, RuleForThreads, ServerExecutor
from headgate.stores.remote_joint import JointScripts, take_all
from headgate.telemetry.limiters import watch_executor


class TaskExecutor(ServerExecutor, Protocol):
    """What makes calls from one event loop."""

    loop: asyncio.AbstractEventLoop

    def close_with_loop(self) -> None: ...
    async def aclose(self) -> None: ...


Threads = TypeVar("Threads", bound=ServerExecutor)
Tasks = TypeVar("Tasks", bound=TaskExecutor)


class StoreOnServer(Generic[Threads, Tasks]):
    """Thread-safe; usable in the child of a fork."""

    clock: Clock | None
    kind: ClassVar[str]
    display_name: str  # for messages and labels, without secrets
    joint_scripts: JointScripts[Any]
    partitioned = False  # whether keys lie at different servers
    backends: ClassVar[tuple[type[RuleForThreads], type[RuleForTasks]]]  # those of this store

    def __init__(self) -> None:
        self._sync_executor: Threads | None = None
        self._latest_executor: Tasks | None = None
        self._async_executors: dict[asyncio.AbstractEventLoop, Tasks] = {}
        self._health: Health | None = None
        self._health_at = 0.0
        self.after_fork()
        renew_after_fork(self)

    def after_fork(self) -> None:
        """Start with free locks: a thread that held one, or a task that checked the health, is in the parent."""
        self._health_check: asyncio.Task[Health] | None = None
        self._lock = threading.Lock()
        self._health_lock = threading.Lock()

    def __reduce__(self) -> NoReturn:
        raise TypeError(NO_PICKLE)

    def open(self, rule: Rule, on_store_error: str = "allow") -> RuleForThreads:
        """The backend of *rule* for threads."""
        return self.backends[0](self, rule, on_store_error)

    def open_async(self, rule: Rule, on_store_error: str = "allow") -> RuleForTasks:
        """The backend of *rule* for asyncio."""
        return self.backends[1](self, rule, on_store_error)

    def partition(self, key: str) -> int:
        """Where the client's key lies; all keys are together unless the store is partitioned."""
        return 0

    def _open_threads(self) -> Threads:
        raise NotImplementedError

    def _open_tasks(self) -> Tasks:
        raise NotImplementedError

    async def _examine(self) -> Health:
        """Check the server's health, and keep the answer."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the connections for threads."""
        raise NotImplementedError

    def sync_executor(self) -> Threads:
        """What makes calls from threads; it and its connections are made when they are first needed."""
        if self._sync_executor is None:
            with self._lock:
                if self._sync_executor is None:
                    executor = self._open_threads()
                    watch_executor(executor, self.kind, self.display_name)
                    self._sync_executor = executor
        return self._sync_executor

    def async_executor(self) -> Tasks:
        """What makes calls from the running event loop; each event loop has its own."""
        loop = asyncio.get_running_loop()
        latest = self._latest_executor
        if latest is not None and latest.loop is loop:
            return latest
        with self._lock:
            executor = self._async_executors.get(loop)
            if executor is None:
                known = list(self._async_executors)  # a copy: `close_loop` of another thread may shorten it
                for closed in [other for other in known if other.is_closed()]:  # without an aclose()
                    self._async_executors.pop(closed, None)
                executor = self._async_executors[loop] = self._open_tasks()
                executor.close_with_loop()
                watch_executor(executor, self.kind, self.display_name)
            self._latest_executor = executor
        return executor

    def take_all(self, checks: Sequence[StoreCheck[Any]]) -> list[Decision]:
        """Spend all *checks* or none, in one call to the server; in a Cluster their keys share a slot."""
        executor = self.sync_executor()
        return run(take_all(self.joint_scripts, executor, checks), executor.answer)

    async def take_all_async(self, checks: Sequence[StoreCheck[Any]]) -> list[Decision]:
        """The same for asyncio; calls that are awaited at the same time share a round trip."""
        executor = self.async_executor()
        return await arun(take_all(self.joint_scripts, executor, checks), executor.answer)

    def latest_executor(self) -> Tasks | None:
        """The running event loop's executor, or that of the last event loop that had one."""
        try:
            return self._async_executors.get(asyncio.get_running_loop(), self._latest_executor)
        except RuntimeError:
            return self._latest_executor

    async def close_loop(self) -> None:
        """Close the running event loop's connections."""
        executor, self._latest_executor = self._async_executors.pop(asyncio.get_running_loop(), None), None
        if executor:
            await executor.aclose()

    async def aclose(self) -> None:
        """Close the running event loop's connections, and those for threads."""
        await self.close_loop()
        self.close()

    async def ahealth(self) -> Health:
        """Check the server's health on a connection of its own; the answer is good for a second."""
        if self._health is not None and monotonic() - self._health_at <= 1.0:
            return self._health
        check, loop = self._health_check, asyncio.get_running_loop()
        if check is None or check.done() or check.get_loop() is not loop:
            check = self._health_check = loop.create_task(self._examine())
        return await asyncio.shield(check)
