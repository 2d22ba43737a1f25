"""The limits of one route, and when each of them is decided; and the body of a request that several read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from headgate.web.asgi import Message, Receive
from headgate.web.hot_fields import PlainLimit, RouteFields
from headgate.web.limit import SetupError

if TYPE_CHECKING:
    from headgate.web.starlette import StarletteLimit, StarletteRateLimits


MAX_REPLAYED = 1 << 20


class Placed(NamedTuple):
    """A limit of a route, and where it stands."""

    limit: StarletteLimit
    place: int  # how many dependencies of the application come before it
    dependency: bool  # or a decorator of the endpoint
    asked: bool = True  # False: the decorator stands above the route's, so the endpoint does not run it


class RoutePlan(RouteFields):
    """The limits of one route, and which of them are decided together. Made once for a route."""

    __slots__ = (
        "_methods",
        "_template",
        "by_dependency",
        "calls_functions",
        "dependencies",
        "early",
        "exempt",
        "freed",
        "limits",
        "messages",
        "texts",
    )

    def __init__(self, template: str, methods: Iterable[str], default: StarletteLimit | None) -> None:
        self._template = template
        self._methods = ",".join(sorted(set(methods) - {"HEAD", "OPTIONS"})) or ",".join(methods)
        self.texts: dict[str, str] = {}
        self.exempt = False
        self.limits: dict[
            StarletteLimit, tuple[StarletteLimit, ...]
        ] = {}  # limits of the route, and those decided with each
        self.early: tuple[StarletteLimit, ...] = () if default is None else (default,)  # before the endpoint is called
        self.messages: tuple[StarletteLimit, ...] = ()  # for each message of a WebSocket
        self.freed: frozenset[StarletteLimit] = frozenset()  # limits around the route from which it is exempt
        self.by_dependency: frozenset[StarletteLimit] = frozenset()  # FastAPI: the limits among the dependencies
        self.provider = None
        self.dependencies: list[Any] = []  # FastAPI: all dependencies, if some are decided early and taken out
        self.calls_functions = bool(default and default.functions)
        self.at_once = None
        self.quick = {}
        self.unlimited = False

    def place(self, placed: list[Placed], *, websocket: bool) -> None:
        """Decide when each of the limits *placed*, given in the order of their places, is decided."""
        for limit in [each.limit for each in placed if each.limit.per_message]:
            if not websocket:
                raise SetupError(f"messages() is for WebSockets, but {limit!r} is on {self._methods} {self._template}")
            self.messages += (limit,)
        placed = [each for each in placed if not each.limit.per_message]
        if not placed:
            return
        early: list[StarletteLimit] = []
        for moment in _moments(placed):
            together = tuple(each.limit for each in moment)
            self.limits.update(dict.fromkeys(together, together))
            first = moment[0].place == 0 or not any(each.dependency for each in moment)
            if first and not any(each.limit.functions for each in moment):
                early += together
            else:
                early += (each.limit for each in moment if not each.asked)
        self.early = tuple(early)
        self.calls_functions = any(limit.functions for limit in self.limits)

    def shorten(self, limits: StarletteRateLimits[Any]) -> None:
        """Find out whether all that is to be done first is to decide one limit, which can be decided at once."""
        simple = len(self.early) == 1 and not (self.calls_functions or self.messages or self.exempt)
        self.at_once = self.early[0] if simple and limits.is_at_once(self.early[0]) else None
        self.unlimited = not (self.early or self.limits or self.messages)

    def quick_limit(self, limits: StarletteRateLimits[Any], prefix: str) -> PlainLimit:
        """The limit that is decided at once, with what counts it."""
        made = limits.plain_limit(self.at_once, self.text(prefix))
        assert made is not None
        self.quick[prefix] = made
        return made

    def text(self, prefix: str) -> str:
        """The route as a scope, such as `GET /items/{id}`; *prefix* is of the mounts that lead to it."""
        text = self.texts.get(prefix)
        if text is None:
            text = self.texts[prefix] = f"{self._methods} {prefix}{self._template}".strip() if self._template else ""
        return text


def _moments(placed: list[Placed]) -> list[list[Placed]]:
    """Limits that are decided together: those of one place, and those of one subject that need no later place."""
    moments: list[list[Placed]] = []
    for each in placed:
        for moment in moments:
            if any(each.place == other.place or each.limit.needs_no_more_than(other.limit) for other in moment):
                moment.append(each)
                break
        else:
            moments.append([each])
    return moments


class BodyReplay:
    """The body of a request that a function of a limit reads, and the application too: each gets all of it.

    What the application has read first is kept up to a size, so that a large upload does not stay in memory.
    """

    __slots__ = ("_by_app", "_by_function", "_lost", "_receive", "_seen", "_size", "recording")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._seen: list[Message] = []
        self._by_app = self._by_function = self._size = 0
        self._lost = False
        self.recording = True  # until the limits are decided; what comes then is the application's alone

    async def for_app(self) -> Message:
        """The `receive` of the application."""
        if self._by_app < len(self._seen):
            self._by_app += 1
            return self._seen[self._by_app - 1]
        message = await self._receive()
        if self.recording:
            self._size += len(message.get("body", b""))
            self._seen.append(message)
            self._by_app += 1
            if self._size > MAX_REPLAYED:
                self._seen, self._by_app, self._lost, self.recording = [], 0, True, False
        return message

    async def for_function(self) -> Message:
        """The `receive` of a limit's function."""
        if self._lost:
            raise RuntimeError(
                f"a function of a limit reads a body of more than {MAX_REPLAYED} bytes that was read before; let the "
                "endpoint take the request as a parameter, or put the limit into Depends"
            )
        if self._by_function == len(self._seen):
            self._seen.append(await self._receive())
        self._by_function += 1
        return self._seen[self._by_function - 1]
