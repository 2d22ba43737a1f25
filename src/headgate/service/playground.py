"""The page's playground: limits to play with, in memory of their own, bounded, never near the real ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from time import time
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from headgate.algorithms import ALGORITHMS
from headgate.decision import Decision
from headgate.limiter import Limiter
from headgate.quota import Quota
from headgate.service.body import from_json
from headgate.service.http import Exchange, Refusal, Reply, Scope, as_json
from headgate.service.query import parse, whole
from headgate.stores.memory import MemoryStore

if TYPE_CHECKING:
    from headgate.service.app import App

SESSIONS = 1000
MOST = 10_000  # permits of a quota: more could not be clicked, and a log of them would take memory

FORM = '{"session": "any text", "algorithm": "TOKEN_BUCKET", "quota": "10/second burst 20", "permits": 1}'


class Play(msgspec.Struct, forbid_unknown_fields=True):
    """One click in the playground."""

    session: Annotated[str, Meta(min_length=1, max_length=64, description="any text: whose bucket it is")]
    quota: Annotated[str, Meta(max_length=100, examples=["10/second burst 20"])]
    algorithm: Annotated[str, Meta(examples=["TOKEN_BUCKET"])] = "TOKEN_BUCKET"
    permits: Annotated[int, Meta(ge=0, le=MOST)] = 1


class Played(msgspec.Struct):
    """What happened to it."""

    allowed: bool
    limit: int
    remaining: int
    resetAfterSeconds: float  # noqa: N815
    retryAfterSeconds: float  # noqa: N815
    at: Annotated[float, Meta(description="seconds since the epoch")]
    note: str | msgspec.UnsetType = msgspec.UNSET


class Sessions:
    """The limiters of those who play; the one that was not used for longest makes room."""

    def __init__(self) -> None:
        self._limiters: OrderedDict[tuple[str, str, str], Limiter] = OrderedDict()

    def limiter(self, play: Play) -> Limiter:
        place = play.session, play.algorithm.lower(), play.quota
        limiter = self._limiters.get(place)
        if limiter is None:
            limiter = self._limiters[place] = _make(play)
            if len(self._limiters) > SESSIONS:
                self._limiters.popitem(last=False)
        self._limiters.move_to_end(place)
        return limiter


def _make(play: Play) -> Limiter:
    kind = play.algorithm.lower()
    if kind not in ALGORITHMS:
        known = ", ".join(name.upper() for name in ALGORITHMS)
        raise Refusal(400, f"unknown algorithm {play.algorithm!r:.80}; use one of {known}")
    try:
        quota = Quota.parse(play.quota)
        if max(quota.capacity, quota.limit) > MOST:
            raise Refusal(400, f"{quota} is too much to play with; at most {MOST:,} at once")
        return Limiter(quota, algorithm=kind, store=MemoryStore(max_keys=2))
    except ValueError as error:
        raise Refusal(400, str(error)) from None


async def check(app: App, scope: Scope, exchange: Exchange) -> Reply:
    """Spend; a denial is an answer like any other here, so 200."""
    parse(scope.query_string, frozenset())
    play: Play = from_json(scope, await app.bodies.read(scope, exchange), Play, FORM)
    limiter = app.playground.limiter(play)
    return _reply(app, lambda: limiter.try_acquire("play", play.permits))


async def peek(app: App, scope: Scope, exchange: Exchange) -> Reply:
    """Look without spending."""
    asked = parse(scope.query_string, frozenset(Play.__struct_fields__))
    if "session" not in asked or "quota" not in asked:
        raise Refusal(400, "give session and quota")
    permits = whole("permits", asked["permits"]) if "permits" in asked else 1
    try:
        play = msgspec.convert({**asked, "permits": permits}, Play)
    except msgspec.ValidationError as error:
        raise Refusal(400, str(error)) from None
    limiter = app.playground.limiter(play)
    return _reply(app, lambda: limiter.peek("play", play.permits))


def _reply(app: App, decide: Callable[[], Decision]) -> Reply:
    try:
        made = decide()
    except ValueError as error:
        raise Refusal(400, str(error)) from None
    played = Played(made.allowed, made.limit, made.remaining, made.reset_after, made.retry_after, time())
    if (workers := app.state.settings.workers) > 1:
        played.note = (
            f"This service has {workers} workers, and here each counts for itself: a request may come to any of them, "
            "so more may be allowed than the quota says. Start it with --workers 1 to play."
        )
    return as_json(played)
