"""When a request is sent again, and how long after.

A request that was refused (429, or an answer that retires its member) was not carried out, so it is sent again with
another member, whatever its method. A request that failed (5xx, 408, no answer) may have been carried out, so it is
sent again only if its method may be repeated. No request is sent earlier than the server asked: a member that was
refused cools down in the pool, and the Retry-After of a failure is waited for, whatever *learn* made of the answer. If
that takes longer than the time that is left, the caller gets the answer as it is.

Where members are for all servers, no server knows them as clients of its own. Then a refusal is about this process, and
its Retry-After is waited for, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from headgate.coordination.arguments import check_count, check_seconds
from headgate.coordination.feedback import Feedback, of_response, status_of

JITTER = Random()
REPEATABLE = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE"})
FIRST_PAUSE = 0.5  # seconds after a failure that does not say how long; doubled each time
LONGEST_PAUSE = 30.0


@dataclass(frozen=True, slots=True)
class Retries:
    """How often and how long a request is tried.

    Args:
        attempts: how many times it is sent at most
        timeout: seconds for all of it: waiting for a member, for the server, and between attempts
    """

    attempts: int = 4
    timeout: float = 60.0

    def __post_init__(self) -> None:
        check_count("attempts", self.attempts)
        check_seconds("timeout", self.timeout)

    def pause(
        self, method: str, status: int | None, feedback: Feedback, number: int, left: float, others: bool = True
    ) -> float | None:
        """Seconds to wait before the next attempt; None if there is to be none.

        status  of the answer; None if there was none
        number  of attempts so far
        left    seconds until the time is over
        others  whether another member may be tried at once after a refusal, as the refused one cools down in the pool
        """
        if number >= self.attempts:
            return None
        if feedback.retire or (status == 429 and others):
            return 0.0
        if status is not None and status < 500 and status not in (408, 429):
            return None
        if status != 429 and method.upper() not in REPEATABLE:
            return None
        pause = feedback.cooldown or min(FIRST_PAUSE * 2 ** (number - 1), LONGEST_PAUSE) * JITTER.uniform(0.5, 1.0)
        return pause if pause < left else None

    def pause_after(
        self, response: Any, method: str, feedback: Feedback, number: int, left: float, *, all_servers: bool
    ) -> float | None:
        """The pause after *response*, which is no shorter than it asks for, whatever was learned from it.

        all_servers  whether members are for all servers, so that a refusal is not about one of them
        """
        asked = of_response(response).cooldown
        others = feedback.cooldown >= asked and not all_servers
        feedback = feedback._replace(cooldown=max(feedback.cooldown, asked))
        return self.pause(method, status_of(response), feedback, number, left, others)
