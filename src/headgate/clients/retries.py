"""When to send a request again, and not before when; the loop that all clients share, as a plan.

A request that was refused (429, or an answer that retires its member) was not carried out: it goes to another member,
whatever its method. One that failed (5xx, 408, no answer) may have been carried out, so only methods that may be
repeated are. Nothing is ever sent earlier than the other side asked: a member that was refused cools down in the pool,
and a Retry-After of a failure is waited for, whatever was learned from it. Where that takes longer than the time that
is left, the answer is handed to the caller as it is.

Where members are for all servers they are no clients of any: then a refusal is about us, and waited for, too.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass
from random import Random
from time import monotonic
from typing import Any, NamedTuple

from headgate.clients.authorize import Authorize, Origins
from headgate.coordination.arguments import count, is_async, seconds
from headgate.coordination.feedback import Feedback, Learn, of_response, of_stranger
from headgate.errors import PoolExhausted

DICE = Random()
REPEATABLE = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE"})
FIRST_PAUSE = 0.5  # seconds after a failure that does not say how long; doubled each time
LONGEST_PAUSE = 30.0


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

    def pause(
        self, method: str, status: int | None, feedback: Feedback, number: int, left: float, others: bool = True
    ) -> float | None:
        """Seconds to wait before the next attempt; None: there is none.

        status  of the answer; None if there was none
        number  of attempts so far
        left    seconds until the time is over
        others  whether another member may go where one was refused, who is left alone for as long as was asked
        """
        if number >= self.attempts:
            return None
        if feedback.retire or (status == 429 and others):
            return 0.0
        if status is not None and status < 500 and status not in (408, 429):
            return None
        if status != 429 and method.upper() not in REPEATABLE:
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


class Delivery:
    """What all clients share: their arguments, checked, and the plan that delivers a request."""

    def __init__(
        self, authorize: Authorize, retries: Retries | None, origins: str | Iterable[str] | None, learn: Learn | None
    ) -> None:
        if not callable(authorize) or is_async(authorize):
            what = "an async function" if callable(authorize) else type(authorize).__name__
            raise TypeError(f"authorize must be a function of request and member, such as header('X-Key'), got {what}")
        if retries is not None and not isinstance(retries, Retries):
            raise TypeError(f"retries must be such as Retries(attempts=1), which sends only once, got {retries!r:.80}")
        if learn is not None and not callable(learn):
            raise TypeError(f"learn must be a function of a response that returns a Feedback, got {learn!r:.80}")
        self.authorize = authorize
        self.origins = Origins(origins)
        # where members are for all, no server may say more of one than any
        self.learn = learn or (of_stranger if self.origins.any else of_response)
        self._retries = retries or Retries()

    def plan(self, method: str, repeatable: bool) -> Generator[Take | Send | Drop | Wait, Any, Any]:
        """Send a request until there is an answer to be had, or no more time. Returns the response, or raises.

        repeatable  whether its body is at hand to be sent again
        """
        until = monotonic() + self._retries.timeout
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
                pause = self._pause(method, answer, verdict, number, until - monotonic()) if repeatable else None
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

    def _pause(self, method: str, answer: Any, verdict: Feedback, number: int, left: float) -> float | None:
        """Wait for what was asked for, whatever was learned from it."""
        if not _is_response(answer):
            return self._retries.pause(method, None, verdict, number, left)
        asked = of_response(answer).cooldown
        others = verdict.cooldown >= asked and not self.origins.any
        verdict = verdict._replace(cooldown=max(verdict.cooldown, asked))
        return self._retries.pause(method, answer.status_code, verdict, number, left, others)
