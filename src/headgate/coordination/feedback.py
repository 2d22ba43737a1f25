"""What the end of a call says about the server that was called, or about the member that called it.

The status and headers of an HTTP answer give a `Feedback`: success or failure, how long the member should not be used,
and whether it should be retired. Dates are compared with the answer's own Date header, so neither the server's clock
nor ours has to be right. An exception is a failure, or counts for nothing: `ExceptionClassifier` decides which.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

from headgate.coordination.arguments import is_async
from headgate.errors import HeadgateError

logger = logging.getLogger("headgate")

TOO_MANY = 60.0  # seconds that a member cools down after a 429 that does not say how long
LONGEST = 30 * 86_400.0  # seconds; a longer time is taken for a mistake of the server
STRANGERS = 60.0  # the longest cooldown, in seconds, that one of many servers can impose; see `of_stranger`

_EPOCH = 1_000_000_000  # a larger reset is a date, not a number of seconds
_EPOCH_MS = 100_000_000_000  # a reset larger than this is a date in milliseconds


class Feedback(NamedTuple):
    """The outcome (success, failure, or '' for neither), seconds to cool down, whether to retire the member."""

    outcome: str = "success"
    cooldown: float = 0.0
    retire: bool = False


Learn = Callable[[Any], Feedback]  # from a response


def feedback(status: int, headers: Mapping[str, str]) -> Feedback:
    """A 429 is neither success nor failure; a 401 retires; 408 and 5xx are failures; all others are successes.

    Retry-After is a cooldown where it has a meaning: with 3xx, 403 (some APIs refuse so), 408, 413, 429 and 5xx. A rate
    limit with nothing remaining is a cooldown until its reset, with any status.
    """
    lower = {str(name).lower(): str(value).strip() for name, value in headers.items()}
    now = _date(lower.get("date")) or time.time()
    after = retry_after(lower, now) if status >= 500 or status // 100 == 3 or status in (403, 408, 413, 429) else None
    cooldown = max(after or 0.0, _until_reset(lower, now))
    if status == 401:
        return Feedback("", cooldown, retire=True)
    if status == 429:
        return Feedback("", cooldown if cooldown or after is not None else TOO_MANY)
    if status >= 500 or status == 408:
        return Feedback("failure", cooldown)
    return Feedback("success", cooldown)


def of_response(response: Any) -> Feedback:
    """The feedback of a response of httpx, requests, aiohttp, urllib3, or of any object with a status and headers."""
    status = status_of(response)
    headers: Any = getattr(response, "headers", None)
    if not isinstance(status, int) or not hasattr(headers, "items"):
        raise TypeError(f"observe() takes an answer with status_code (or status) and headers, got {response!r:.80}")
    return feedback(status, headers)


def status_of(response: Any) -> Any:
    """The status of a response, under either of the names that HTTP libraries give it; None if it has neither."""
    return getattr(response, "status_code", None) or getattr(response, "status", None)


def of_stranger(response: Any) -> Feedback:
    """The feedback of a response of any server, for members that are no credentials, such as User-Agents.

    A 401 is about a page, so it does not retire such a member. And no server can make it cool down for longer than a
    minute, as the other servers would miss it, too.
    """
    outcome, cooldown, _ = of_response(response)
    return Feedback(outcome, min(cooldown, STRANGERS))


def checked_feedback(learn: Learn, response: Any) -> Feedback:
    """What *learn* returns, checked."""
    learned = learn(response)
    if not isinstance(learned, Feedback):
        raise TypeError(f"learn must return a Feedback, got {learned!r:.80}")
    return learned


def retry_after(headers: Mapping[str, str], now: float) -> float | None:
    """Seconds that Retry-After (in lower-case *headers*) asks for, as a number or as a date; None without a valid one.

    HTTP libraries join two such headers, as of a server and a proxy before it, with a comma: the longer counts.
    """
    text = headers.get("retry-after", "")
    if re.fullmatch(r"\d+(\.\d+)?(\s*,\s*\d+(\.\d+)?)*", text):
        return min(max(map(float, text.split(","))), LONGEST)
    date = _date(text)
    return None if date is None else min(max(date - now, 0.0), LONGEST)


def _until_reset(headers: Mapping[str, str], now: float) -> float:
    """Seconds until a limit with nothing remaining is reset, in any of the header formats that servers use."""
    waits = [0.0]
    for prefix in ("ratelimit-", "x-ratelimit-", "x-rate-limit-"):
        if _number(headers.get(prefix + "remaining")) == 0:
            waits.append(_reset(headers.get(prefix + "reset"), now))
    for part in headers.get("ratelimit", "").split(","):  # "default";r=0;t=30
        values = dict(re.findall(r"(\w+)\s*=\s*(\d+)", part))
        if values.get("r") == "0":
            waits.append(float(values.get("t", 0)))
    values = dict(re.findall(r"(\w+)\s*=\s*(\d+)", headers.get("ratelimit", "")))  # limit=10, remaining=0, reset=30
    if values.get("remaining") == "0":
        waits.append(_reset(values.get("reset"), now))
    return min(max(waits), LONGEST)


def _reset(text: str | None, now: float) -> float:
    number = _number(text)
    if number is None:
        date = _date(text)
        return 0.0 if date is None else max(date - now, 0.0)
    if number > _EPOCH_MS:
        number /= 1000
    return max(number - now, 0.0) if number > _EPOCH else number


def _number(text: str | None) -> float | None:
    return float(text) if text and re.fullmatch(r"\d{1,15}(\.\d+)?", text) else None


def _date(text: str | None) -> float | None:
    if not text:
        return None
    try:
        date = parsedate_to_datetime(text)
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError, TypeError, IndexError):
        return None


ExceptionKinds = tuple[type[BaseException], ...] | type[BaseException] | Callable[[BaseException], bool]


def exception_test(argument: str, kinds: ExceptionKinds) -> Callable[[BaseException], bool]:
    """The function that tells whether an exception is one of *kinds*, which were given as this *argument*."""
    if isinstance(kinds, type | tuple):
        types = kinds if isinstance(kinds, tuple) else (kinds,)
        if all(isinstance(each, type) and issubclass(each, BaseException) for each in types):
            return lambda error: isinstance(error, types)
    elif callable(kinds) and not is_async(kinds):
        return kinds
    what = "a type of exception, a tuple of such, or a function that returns a bool"
    raise ValueError(f"{argument} must be {what}, got {kinds!r:.80}")


class ExceptionClassifier:
    """Tells failures from exceptions that count for nothing: those that *ignore* names, as types or by a function."""

    def __init__(self, name: str, ignore: ExceptionKinds) -> None:
        self._name = name
        self._ignores = exception_test("ignore", ignore)

    def outcome(self, error: BaseException | None) -> str:
        """The outcome of a call that ended with *error*: success (for None), failure or ignored."""
        if error is None:
            return "success"
        try:
            return "ignored" if not is_failure(error) or self._ignores(error) else "failure"
        except Exception:  # an error of *ignore* must not replace the error of the call
            logger.exception("ignore of the circuit breaker %r failed", self._name)
            return "failure"


def is_failure(error: BaseException) -> bool:
    """Whether *error* may be the fault of the server that was called.

    A cancellation is not. Nor is an error of headgate: if a limiter, a pool or another breaker refused, the server was
    not called at all.
    """
    return isinstance(error, Exception) and not isinstance(error, HeadgateError)
