"""How a process begins and ends: what starts anew in the child of a fork, and what is to be done before an exit."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable
from typing import Protocol


class Forked(Protocol):
    """What knows how to start anew: a lock that another thread held has nobody in the child to release it."""

    def after_fork(self) -> None: ...


_ALL: weakref.WeakSet[Forked] = weakref.WeakSet()
_BORN = os.getpid()  # where this was imported
_promised: set[tuple[int, Callable[[], object]]] = set()  # by process


def renew_after_fork(thing: Forked) -> None:
    """Call *thing*'s `after_fork` in every child, as long as somebody has it."""
    _ALL.add(thing)


def in_each_child(call: Callable[[], object]) -> Callable[[], object]:
    """Do that in the child of every fork, where there are forks: for what a module has only one of."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call)
    return call


@in_each_child
def _renew_all() -> None:
    for thing in list(_ALL):
        thing.after_fork()


def before_exit(farewell: Callable[[], object]) -> Callable[[], None]:
    """Call *farewell* when the process ends. What is returned is to be called where there may be something to do then.

    A child of `multiprocessing` ends without what was registered for the end of a process: it has its own way, which
    forgets at its start whatever it was told in the parent.
    """
    atexit.register(farewell)

    def promise() -> None:
        mp = sys.modules.get("multiprocessing")
        util = sys.modules.get("multiprocessing.util")
        own = os.getpid()
        if mp and util and (own != _BORN or mp.parent_process()) and (own, farewell) not in _promised:
            _promised.add((own, farewell))
            util.Finalize(None, farewell, exitpriority=0)

    return promise
