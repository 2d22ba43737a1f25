"""When to send a request again, and not before when; the loop that all clients share, as a plan.

A request that was refused (429, or an answer that retires its member) was not carried out: it goes to another member,
whatever its method. One that failed (5xx, 408, no answer) may have been carried out, so only methods that may be
repeated are. Nothing is ever sent earlier than the other side asked: a member that was refused cools down in the pool,
and a Retry-After of a failure is waited for. Where that takes longer than the time that is left, the answer is handed
to the caller as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from random import Random
from time import monotonic
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from headgate.coordination.arguments import count, seconds
from headgate.coordination.feedback import Feedback, Learn, of_response, of_stranger
from headgate.errors import PoolExhausted

DICE = Random()
REPEATABLE = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE"})
FIRST_PAUSE = 0.5  # seconds after a failure that does not say how long; doubled each time
LONGEST_PAUSE = 30.0

Authorize = Callable[[Any, str], object]  # request, member


@dataclass(frozen=True, slots=True)
class Retries:
    """How often and how long to try.

    attempts  how many times a request is sent at most
    timeout   seconds for all of it: waiting for a member, for the other side, and sending again
    """

    attempts: int = 4
    timeout: float = 60.0

    def __post_init__(self) -> None:
        count("attempts", self.attempts)
        seconds("timeout", self.timeout)

    def pause(self, method: str, status: int | None, feedback: Feedback, number: int, left: float) -> float | None:
        """Seconds to wait before the next attempt; None: there is none.

        status  of the answer; None if there was none
        number  of attempts so far
        left    seconds until the time is over
        """
        if number >= self.attempts:
            return None
        if status == 429 or feedback.retire:
            return 0.0  # another member may go at once; this one the pool gives to nobody
        if status is not None and status < 500 and status != 408:
            return None
        if method.upper() not in REPEATABLE:
            return None
        pause = feedback.cooldown or min(FIRST_PAUSE * 2 ** (number - 1), LONGEST_PAUSE) * DICE.uniform(0.5, 1.0)
        return pause if pause < left else None


class Take(NamedTuple):
    """Take a member of the pool; the answer is the lease."""

    timeout: float


class Send(NamedTuple):
    """Send the request with this lease; the answer is the response (or what was raised instead) and its feedback."""

    leased: Any


class Drop(NamedTuple):
    """Close this response: nobody will read it."""

    response: Any


class Wait(NamedTuple):
    seconds: float


def deliver(retries: Retries, method: str, repeatable: bool) -> Generator[Take | Send | Drop | Wait, Any, Any]:
    """Send a request until there is an answer to be had, or no more time. Returns the response, or raises."""
    until = monotonic() + retries.timeout
    answer: Any = None
    number = 0
    try:
        while True:
            number += 1
            try:
                leased = yield from _take(until, again=number > 1)
            except PoolExhausted:
                if answer is None:
                    raise
                break  # what came says more than that
            if _is_response(answer):
                yield Drop(answer)
            answer = None
            answer, verdict = yield Send(leased)
            status = answer.status_code if _is_response(answer) else None
            pause = retries.pause(method, status, verdict, number, until - monotonic()) if repeatable else None
            if pause is None:
                break
            yield Wait(pause)
    except GeneratorExit:
        raise  # nobody is left to ask
    except BaseException:
        if _is_response(answer):
            yield Drop(answer)
        raise
    if isinstance(answer, Exception):
        raise answer
    return answer


def _take(until: float, again: bool) -> Generator[Take, Any, Any]:
    """Take a member in time. One who has an answer at hand waits only where there is something to wait for."""
    if again:
        try:
            return (yield Take(0.0))
        except PoolExhausted as error:
            soon = error.retry_after is not None and error.retry_after <= until - monotonic()
            if not soon and not error.reasons.get("leased"):
                raise
    return (yield Take(max(until - monotonic(), 0.0)))


def _is_response(answer: Any) -> bool:
    return answer is not None and not isinstance(answer, Exception)


class Origins:
    """Where members may be sent: to those that are given, else where the first request goes; ``"*"``: anywhere.

    A redirect leads where the other side likes, and whoever is there could keep the member, or have it retired.
    """

    def __init__(self, origins: str | Iterable[str] | None) -> None:
        self._lock = threading.Lock()
        self.any = origins == "*"
        listed = [origins] if isinstance(origins, str) else origins
        self._allowed = None if listed is None or self.any else frozenset(_origin(each) for each in listed)

    def __contains__(self, url: object) -> bool:
        if self.any:
            return True
        origin = _origin(str(url))
        with self._lock:
            if self._allowed is None:
                self._allowed = frozenset([origin])
        return origin in self._allowed


def _origin(url: str) -> tuple[str, str, int]:
    parts = urlsplit(url)
    if not parts.scheme or not parts.hostname:
        raise ValueError(f"an origin must be a URL such as 'https://api.example.com', got {url!r:.80}")
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)


def checked(authorize: Authorize, learn: Learn | None, origins: Origins) -> Learn:
    """What to learn from answers: if nothing is given, no more than any server may say where members are for all."""
    if not callable(authorize):
        what = type(authorize).__name__
        raise TypeError(f"authorize must be a function of request and member, such as header('X-Key'), got {what}")
    if learn is not None and not callable(learn):
        raise TypeError(f"learn must be a function of a response that returns a Feedback, got {learn!r:.80}")
    return learn or (of_stranger if origins.any else of_response)


def header(name: str, template: str = "{}", secrets: Mapping[str, str] | None = None) -> Authorize:
    """An *authorize* that writes the member, or its secret, into a header: ``header("Authorization", "Bearer {}")``.

    With *secrets* the pool holds only names; the secrets stay out of Redis.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"name must be that of a header, such as 'Authorization', got {name!r:.80}")
    try:
        found = template.format("\0").count("\0") == 1
    except (AttributeError, IndexError, KeyError, ValueError):  # no text, or a name or a number in it
        found = False
    if not found:
        raise ValueError(f"template must have {{}} where the member goes, such as 'Bearer {{}}', got {template!r:.80}")
    if secrets is not None and not isinstance(secrets, Mapping):
        raise TypeError(f"secrets must be a mapping of members to their secrets, got {type(secrets).__name__}")

    def authorize(request: Any, member: str) -> None:
        if secrets is not None and member not in secrets:
            raise LookupError(f"the pool has the member {member!r}, for whom there is no secret")
        request.headers[name] = template.format(member if secrets is None else secrets[member])

    return authorize
