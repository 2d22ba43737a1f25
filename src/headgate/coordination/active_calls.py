"""Which calls run through a circuit breaker, and which of them the running code is part of.

Code may enter one breaker several times on the way to one request: a decorator outside, a ``with`` inside. That is one
call with several layers. Only its outermost layer asks for admission, and only that one reports a result.

The layers are kept in a `contextvars` context, so threads and tasks are told apart. A task that is started inside a
call is part of it until the outermost layer ends.
"""

from __future__ import annotations

import os
from collections.abc import Hashable
from contextvars import ContextVar
from typing import NamedTuple

MAX_LAYERS = 1000  # that a context or a breaker remembers: code that enters and never leaves must not fill the memory


class Admission(NamedTuple):
    """What a breaker said to a call."""

    id: str
    generation: int  # of the breaker's state: its result counts in no other; or ANY_GENERATION
    local: bool  # the store did not answer, and this process decided alone


class ActiveCall:
    """A call from its admission until its outermost layer ends."""

    __slots__ = ("admission", "breaker", "ended", "process", "until")

    def __init__(self, breaker: Hashable, admission: Admission, until: int) -> None:
        self.breaker = breaker
        self.admission: Admission | None = admission  # None: its result was reported
        self.until = until  # a layer that is entered later is a call of its own
        self.ended = False
        self.process = os.getpid()


class CallLayer:
    """One entry into a breaker, by ``with``, `call` or a decorator, through the object *owner*."""

    __slots__ = ("call", "inner_outcome", "is_outermost", "left", "owner")

    def __init__(self, owner: ActiveCalls, call: ActiveCall, is_outermost: bool) -> None:
        self.owner = owner
        self.call = call
        self.is_outermost = is_outermost
        self.inner_outcome = ""  # outcome of the last layer that was entered and left within this one
        self.left = False


_LAYERS: ContextVar[tuple[CallLayer, ...]] = ContextVar("headgate_breaker_layers", default=())  # of all breakers


class ActiveCalls:
    """The calls through one `CircuitBreaker` object; *breaker* is equal for all objects of the same breaker."""

    def __init__(self, breaker: Hashable) -> None:
        self._breaker = breaker
        self._open: dict[CallLayer, None] = {}

    def current(self) -> CallLayer | None:
        """The layer that the running code is in, entered through this object or another one of the same breaker."""
        process = os.getpid()
        for layer in reversed(_not_left()):
            call = layer.call
            if call.breaker == self._breaker and not call.ended and call.process == process:
                return layer
        return None

    def enter(self, admission: Admission, until: int) -> None:
        """Begin a call."""
        self._push(CallLayer(self, ActiveCall(self._breaker, admission, until), True))

    def enter_again(self, call: ActiveCall) -> None:
        """Add a layer to *call*."""
        self._push(CallLayer(self, call, False))

    def leave(self) -> CallLayer | None:
        """End the innermost layer that this object entered in this context; if there is none, its last in any.

        The latter is for code that enters in one thread or task and leaves in another.
        """
        mine = (each for each in reversed(_not_left()) if each.owner is self)
        layer = next(mine, None) or next(reversed(list(self._open)), None)
        if layer:
            layer.left = True
            if layer.is_outermost:
                layer.call.ended = True
            self._open.pop(layer, None)
            _LAYERS.set(_not_left())
        return layer

    def _push(self, layer: CallLayer) -> None:
        _LAYERS.set((*_not_left()[1 - MAX_LAYERS :], layer))
        self._open[layer] = None
        if len(self._open) > MAX_LAYERS:
            [oldest, *_] = list(self._open)  # in one step: other threads change it, too
            self._open.pop(oldest, None)


def _not_left() -> tuple[CallLayer, ...]:
    return tuple(each for each in _LAYERS.get() if not each.left)
