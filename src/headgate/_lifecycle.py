"""What must happen in the child of a fork, before the process exits, and when an event loop ends."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Protocol


class ForkAware(Protocol):
    """An object with a lock or a thread: in the child of a fork the thread that holds the lock does not exist."""

    def after_fork(self) -> None: ...


_FORK_AWARE: weakref.WeakSet[ForkAware] = weakref.WeakSet()
_IMPORTED_IN = os.getpid()
_registered: set[tuple[int, Callable[[], object]]] = set()  # by process


def renew_after_fork(thing: ForkAware) -> None:
    """Call `after_fork` of *thing* in every child, as long as *thing* is alive."""
    _FORK_AWARE.add(thing)


def in_each_child(call: Callable[[], object]) -> Callable[[], object]:
    """Call *call* in the child of every fork; for the globals of a module. Also a decorator."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call)
    return call


@in_each_child
def _renew_all() -> None:
    for thing in list(_FORK_AWARE):
        thing.after_fork()


def before_exit(finish: Callable[[], object]) -> Callable[[], None]:
    """Call *finish* when the process exits. Returns a function to call whenever there may be something to finish.

    The function is for the children of `multiprocessing`, which do not run `atexit` handlers: it registers *finish* in
    the child itself, because `multiprocessing` forgets at the start of a child what its parent registered.
    """
    atexit.register(finish)

    def register() -> None:
        mp = sys.modules.get("multiprocessing")
        util = sys.modules.get("multiprocessing.util")
        own = os.getpid()
        if mp and util and (own != _IMPORTED_IN or mp.parent_process()) and (own, finish) not in _registered:
            _registered.add((own, finish))
            util.Finalize(None, finish, exitpriority=0)

    return register


def at_loop_end(finish: Callable[[], Awaitable[object]]) -> AsyncGenerator[None]:
    """Await ``finish()`` when the running event loop ends, or when the returned generator is closed or collected.

    An event loop that ends closes the asynchronous generators that were begun in it, and nothing else: so this is one.
    """
    end = _finish_when_closed(finish)
    try:
        end.asend(None).send(None)  # to its yield
    except StopIteration:
        pass
    return end


async def _finish_when_closed(finish: Callable[[], Awaitable[object]]) -> AsyncGenerator[None]:
    try:
        yield
    finally:
        await finish()


class Closable(Protocol):
    """What makes calls from an event loop."""

    async def aclose(self) -> None: ...


class ClosingExchange:
    """An async context manager: gives *exchange* on *executor* for the last calls of an event loop, then closes it.

    A class and not a generator: an event loop that ends refuses new async generators.
    """

    def __init__(self, exchange: Callable[[Any, Any], Coroutine[Any, Any, Any]], executor: Closable | None) -> None:
        self._exchange = exchange
        self._executor = executor

    async def __aenter__(self) -> Callable[[Any], Coroutine[Any, Any, Any]] | None:
        return partial(self._exchange, self._executor) if self._executor else None

    async def __aexit__(self, *_: object) -> None:
        if self._executor:
            await self._executor.aclose()
