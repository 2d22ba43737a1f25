"""The headers that tell a client its limit: `X-RateLimit-*`, and `RateLimit` with `RateLimit-Policy`.

The latter are as drafts 08 to 11 of draft-ietf-httpapi-ratelimit-headers define them. The draft may still change, so
they are off unless the operator turns them on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from time import time
from typing import Any, Final, Literal

from headgate.decision import Decision
from headgate.quota import Quota

HeaderStyle = Literal["x", "ietf", "both"]

X_LIMIT: Final = "x-ratelimit-limit"
X_REMAINING: Final = "x-ratelimit-remaining"
X_RESET: Final = "x-ratelimit-reset"
X_NAMES = (X_LIMIT, X_REMAINING, X_RESET)
RAW_X_NAMES: Final[dict[str, bytes]] = {name: name.encode() for name in X_NAMES}
MAX_DIGITS = 20  # of a number in a header that another limiter has written
IETF_NAMES = ("ratelimit", "ratelimit-policy")
LIMIT_HEADERS: Final[frozenset[str]] = frozenset((*X_NAMES, *IETF_NAMES))
RAW_LIMIT_HEADERS: Final[frozenset[bytes]] = frozenset(name.encode() for name in LIMIT_HEADERS)  # ASGI: in lower case

read_time: Final[Callable[[], float]] = time  # compiled code finds its own names quicker than those it imports


def check_style(style: object) -> HeaderStyle | None:
    """Return *style* if it is a value of ``headers``; else raise."""
    if style is None or style == "x" or style == "ietf" or style == "both":
        return style
    raise ValueError(f"headers must be 'x', 'ietf', 'both' or None, got {style!r:.40}")


def header_names(style: HeaderStyle | None) -> list[str]:
    """The names of the headers of *style*, for a list of what a browser may read (CORS)."""
    names = X_NAMES if style in ("x", "both") else ()
    return [*names, *(IETF_NAMES if style in ("ietf", "both") else ()), "retry-after"]


def limit_headers(
    style: HeaderStyle | None, made: Decision, policy_name: str, quotas: Sequence[Quota]
) -> list[tuple[str, str]]:
    """The headers of *style* for a decision."""
    headers = XHeaders(quotas).of(made) if style == "x" or style == "both" else []
    if style == "ietf" or style == "both":
        names = policy_names(policy_name, quotas)
        binds = binding_quota(made, quotas)
        headers += [
            policy_header(policy_name, quotas),
            limit_header(names[binds], made.remaining, -(-reset_us(made, quotas) // 1_000_000)),
        ]
    return headers


class NumberHeader:
    """A header with a number, the same for all answers that tell it."""

    def __init__(self, number: int, pair: Any) -> None:
        self.number = number
        self.pair: Any = pair


class XHeaders:
    """`X-RateLimit-*` of the decisions of one limiter. What several answers tell alike is made once."""

    def __init__(self, quotas: Sequence[Quota]) -> None:
        self.quotas = quotas
        self.limit = NumberHeader(-1, None)
        self.reset = NumberHeader(-1, None)

    def of(self, made: Decision) -> list[Any]:
        """The headers for *made*."""
        limit, reset = self.limit, self.reset
        if limit.number != made.limit:
            self.limit = limit = NumberHeader(made.limit, self.pair(X_LIMIT, made.limit))
        seconds = ceil(read_time() + reset_us(made, self.quotas) / 1_000_000)
        if reset.number != seconds:
            self.reset = reset = NumberHeader(seconds, self.pair(X_RESET, seconds))
        return [limit.pair, self.pair(X_REMAINING, made.remaining), reset.pair]

    def pair(self, name: str, number: int) -> Any:
        """A header as WSGI wants it."""
        return name, str(number)


class RawXHeaders(XHeaders):
    """The same as ASGI wants them: in bytes."""

    def pair(self, name: str, number: int) -> Any:
        return RAW_X_NAMES[name], b"%d" % number


def with_x_headers(headers: list[tuple[str, str]], ours: list[Any]) -> list[tuple[str, str]] | None:
    """*headers* and *ours*; None if another limiter has written some of its own among them."""
    for name, _ in headers:
        if name.lower() in LIMIT_HEADERS:
            return None
    return headers + ours


def with_limit_headers(message: Any, ours: list[Any], replace: bool = False) -> dict[str, Any]:
    """The ASGI message *message*, which starts an answer, with the headers *ours*.

    Those of a limiter further in stay if it is tighter.
    """
    headed: dict[str, Any] = message.copy() if isinstance(message, dict) else dict(message)
    given = headed.get("headers") or ()
    headers: list[Any] = given if isinstance(given, list) else list(given)
    for pair in headers:
        if pair[0] in RAW_LIMIT_HEADERS:
            if not replace and _remaining(headers) <= _remaining(ours):
                ours = []
            else:
                headers = [pair for pair in headers if pair[0] not in RAW_LIMIT_HEADERS]
            break
    headed["headers"] = headers + ours
    return headed


def _remaining(headers: list[Any]) -> int:
    """What X-RateLimit-Remaining says; -1 if it is not there."""
    for name, value in headers:
        if name == b"x-ratelimit-remaining" and value.isdigit() and len(value) < MAX_DIGITS:
            return int(value)
    return -1


def binding_quota(made: Decision, quotas: Sequence[Quota]) -> int:
    """Which of *quotas* has decided. Of several with one capacity: the shortest period that holds the wait."""
    equal = [i for i, quota in enumerate(quotas) if quota.capacity == made.limit] or [0]
    wait = made.reset_us if made.allowed else made.retry_us
    long_enough = [i for i in equal if quotas[i].period_us >= wait]
    return min(long_enough, key=lambda i: quotas[i].period_us) if long_enough else equal[-1]


def reset_us(made: Decision, quotas: Sequence[Quota]) -> int:
    """What the headers of *made* call its reset, in microseconds from now.

    Of a denial: when the same request succeeds. Else when the quota that binds is as good as new, at the latest:
    `Decision.reset_us` is that of the slowest quota.
    """
    if made.allowed and len(quotas) == 1:
        return made.reset_us
    return made.retry_us or min(made.reset_us, recovery_us(quotas[binding_quota(made, quotas)]))


def recovery_us(quota: Quota) -> int:
    """Microseconds in which *quota* gives its capacity back."""
    return -(-quota.period_us * quota.capacity // quota.limit)


def retry_seconds(made: Decision) -> int:
    """What Retry-After says of a denial: whole seconds, rounded up; 0: no wait is long enough."""
    return -(-made.retry_us // 1_000_000)


def denial_headers(made: Decision) -> list[tuple[str, str]]:
    """What the answer to a denied request says besides its limit, unless the application says it otherwise."""
    seconds = retry_seconds(made)
    retry = [("retry-after", str(seconds))] if seconds else []
    return [*retry, ("cache-control", "no-store")]


def policy_names(rule: str, quotas: Sequence[Quota]) -> list[str]:
    """A name for each quota of *rule*; a rule's name needs no escapes."""
    return [rule] if len(quotas) == 1 else [f"{rule}.{i + 1}" for i in range(len(quotas))]


def policy_header(rule: str, quotas: Sequence[Quota]) -> tuple[str, str]:
    """The quotas of *rule*. A window is at least 1 whole second."""
    items = [
        f'"{name}";q={quota.limit};w={max(1, -(-quota.period_us // 1_000_000))}'
        for name, quota in zip(policy_names(rule, quotas), quotas, strict=True)
    ]
    return "ratelimit-policy", ", ".join(items)


def limit_header(policy_name: str, remaining: int, reset: int) -> tuple[str, str]:
    """What remains of the quota called *policy_name*; *reset* is in whole seconds from now."""
    return "ratelimit", f'"{policy_name}";r={remaining};t={reset}'
