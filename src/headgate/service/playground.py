"""The page's playground: limiters to try out, in a bounded memory of their own, apart from the real ones."""

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
from headgate.service.request import parse_integer, parse_json, parse_query
from headgate.service.rsgi import HTTPError, HTTPProtocol, Response, Scope, json_response
from headgate.stores.memory import MemoryStore

if TYPE_CHECKING:
    from headgate.service.app import App

MAX_SESSIONS = 1000
MAX_PERMITS = 10_000  # of a quota: a sliding-window log of more would take too much memory

FORM = '{"session": "any text", "algorithm": "TOKEN_BUCKET", "quota": "10/second burst 20", "permits": 1}'


class Play(msgspec.Struct, forbid_unknown_fields=True):
    """One check in the playground."""

    session: Annotated[str, Meta(min_length=1, max_length=64, description="any text; each has limits of its own")]
    quota: Annotated[str, Meta(max_length=100, examples=["10/second burst 20"])]
    algorithm: Annotated[str, Meta(examples=["TOKEN_BUCKET"])] = "TOKEN_BUCKET"
    permits: Annotated[int, Meta(ge=0, le=MAX_PERMITS)] = 1


class Played(msgspec.Struct):
    """The decision about it."""

    allowed: bool
    limit: int
    remaining: int
    resetAfterSeconds: float  # noqa: N815
    retryAfterSeconds: float  # noqa: N815
    at: Annotated[float, Meta(description="seconds since the epoch")]
    note: str | msgspec.UnsetType = msgspec.UNSET


class Sessions:
    """The limiters of the playground; the least recently used one makes room for a new one."""

    def __init__(self) -> None:
        self._limiters: OrderedDict[tuple[str, str, str], Limiter] = OrderedDict()

    def limiter(self, play: Play) -> Limiter:
        entry = play.session, play.algorithm.lower(), play.quota
        limiter = self._limiters.get(entry)
        if limiter is None:
            limiter = self._limiters[entry] = _make(play)
            if len(self._limiters) > MAX_SESSIONS:
                self._limiters.popitem(last=False)
        self._limiters.move_to_end(entry)
        return limiter


def _make(play: Play) -> Limiter:
    kind = play.algorithm.lower()
    if kind not in ALGORITHMS:
        known = ", ".join(name.upper() for name in ALGORITHMS)
        raise HTTPError(400, f"unknown algorithm {play.algorithm!r:.80}; use one of {known}")
    try:
        quota = Quota.parse(play.quota)
        if max(quota.capacity, quota.limit) > MAX_PERMITS:
            raise HTTPError(400, f"{quota} is too much to play with; at most {MAX_PERMITS:,} at once")
        return Limiter(quota, algorithm=kind, store=MemoryStore(max_keys=2))
    except ValueError as error:
        raise HTTPError(400, str(error)) from None


async def check(app: App, scope: Scope, protocol: HTTPProtocol) -> Response:
    """Spend permits. Always 200: the page reads `allowed`."""
    parse_query(scope.query_string, frozenset())
    play: Play = parse_json(scope, await app.bodies.read(scope, protocol), Play, FORM)
    limiter = app.playground.limiter(play)
    return _response(app, lambda: limiter.try_acquire("play", play.permits))


async def peek(app: App, scope: Scope, protocol: HTTPProtocol) -> Response:
    """The same decision with nothing spent."""
    asked = parse_query(scope.query_string, frozenset(Play.__struct_fields__))
    if "session" not in asked or "quota" not in asked:
        raise HTTPError(400, "give session and quota")
    permits = parse_integer("permits", asked["permits"]) if "permits" in asked else 1
    try:
        play = msgspec.convert({**asked, "permits": permits}, Play)
    except msgspec.ValidationError as error:
        raise HTTPError(400, str(error)) from None
    limiter = app.playground.limiter(play)
    return _response(app, lambda: limiter.peek("play", play.permits))


def _response(app: App, decide: Callable[[], Decision]) -> Response:
    try:
        made = decide()
    except ValueError as error:
        raise HTTPError(400, str(error)) from None
    played = Played(made.allowed, made.limit, made.remaining, made.reset_after, made.retry_after, time())
    if (workers := app.state.settings.workers) > 1:
        played.note = (
            f"This service has {workers} workers, and here each counts for itself: a request may come to any of them, "
            "so more may be allowed than the quota says. Start it with --workers 1 to play."
        )
    return json_response(played)
