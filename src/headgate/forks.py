"""What starts anew in the child of a fork: a lock that another thread held has nobody there to release it."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forked(Protocol):
    """What knows how to."""

    def after_fork(self) -> None: ...


_ALL: weakref.WeakSet[Forked] = weakref.WeakSet()


def renew_after_fork(thing: Forked) -> None:
    """Call *thing*'s `after_fork` in every child, as long as somebody has it."""
    _ALL.add(thing)


def _after_fork() -> None:
    for thing in list(_ALL):
        thing.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
