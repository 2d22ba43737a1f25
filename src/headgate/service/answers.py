"""From a decision to what is counted and what the client reads."""

from __future__ import annotations

import logging
from bisect import bisect_left
from time import monotonic, time_ns
from typing import TYPE_CHECKING

import msgspec

from headgate.decision import Decision, decision
from headgate.errors import InvalidKey, InvalidPermits, PermitsExceedLimit, StoreUnavailable
from headgate.keys import check_key
from headgate.service.board import ALLOWED, BOUNDS, DEGRADED, DENIED, NEAR, SHADOW, TIMING_WORDS, UNANSWERED, WAITED
from headgate.service.http import Refusal, Reply
from headgate.service.ietf import limit_headers
from headgate.service.rules import Lane

if TYPE_CHECKING:
    from headgate.service.app import App, State

logger = logging.getLogger("headgate.service")

_BOUNDS_NS = tuple(round(bound * 1e9) for bound in BOUNDS)
EXEMPT = ',"exempt":true'

_encode = msgspec.json.encode


def count(app: App, lane: Lane, key: str, made: Decision, nanoseconds: int | None) -> bool:
    """Write down what was decided; returns what the client is told."""
    slots, timings, slot = app.slots, app.timings, lane.slot
    allowed = made.allowed
    if made.degraded:
        slots[slot + DEGRADED] += 1
    if not allowed:
        app.denied.add(lane.name, key)
        if lane.shadow:
            slots[slot + SHADOW] += 1
            allowed = True
    elif made.remaining * 5 <= made.limit:
        slots[slot + NEAR] += 1
    timing = lane.timing
    if allowed:
        slots[slot + ALLOWED] += 1
        timing += TIMING_WORDS
    else:
        slots[slot + DENIED] += 1
    if nanoseconds is None:  # it waited, which says nothing about our speed
        timings[timing + WAITED] += 1
    else:
        timings[timing] += nanoseconds
        timings[timing + 1 + bisect_left(_BOUNDS_NS, nanoseconds)] += 1
    if app.debug:
        word = "allowed" if allowed else "denied"
        logger.debug("Request %s for key: %s, remaining: %d", word, app.state.shown(key), made.remaining)
    return allowed


def exempted(app: App, lane: Lane, key: str, nanoseconds: int) -> Reply:
    try:
        check_key(key)
    except InvalidKey as error:
        raise Refusal(400, str(error)) from None
    made = decision(True, lane.capacity, lane.capacity)
    count(app, lane, key, made, nanoseconds)
    return reply(app.state, lane, as_shown(key), made, True, extra=EXEMPT)


def refused(lane: Lane, cost: int, error: InvalidKey | InvalidPermits) -> Refusal:
    """What is wrong with a check, in the numbers of who sent it: the limiter knows only what it would cost."""
    if lane.cost == 1 or not isinstance(error, PermitsExceedLimit):
        return Refusal(400, str(error))
    permits, most = cost // lane.cost, lane.capacity // lane.cost
    why = f"{permits} at a cost of {lane.cost} each are {cost}, above the capacity of {lane.capacity}"
    return Refusal(400, f"permits must be at most {most}: {why}")


def unanswered(app: App, lane: Lane, key: str, error: StoreUnavailable) -> Refusal:
    app.slots[lane.slot + UNANSWERED] += 1
    if monotonic() - app.error_logged_at >= 1:  # one of them tells what is wrong; the metric tells how many there are
        app.error_logged_at = monotonic()
        logger.error("Error executing rate limit check for key: %s: %s", app.state.shown(key), error)
    return Refusal(503, f"the store of rule {lane.name!r} does not answer; try again", ("retry-after", "1"))


def reply(
    state: State,
    lane: Lane,
    shown: str,
    made: Decision,
    allowed: bool,
    message: str = "Request allowed",
    extra: str = "",
) -> Reply:
    """The answer, its headers and its body; *shown* is the key as JSON."""
    left, limit, reset_us = made.remaining, made.limit, made.reset_us
    reset = -(-reset_us // 1_000_000)
    if made.degraded:
        extra += ',"degraded":true'
    if allowed is not made.allowed:
        extra += ',"shadow":true'
    headers = [
        ("content-type", "application/json"),
        ("cache-control", "no-store"),
        lane.limit_header if limit == lane.capacity else ("x-ratelimit-limit", str(limit)),
        ("x-ratelimit-remaining", str(left)),
        ("x-ratelimit-reset", str((time_ns() // 1000 + reset_us + 999_999) // 1_000_000)),
    ]
    if allowed:
        retry = 0
        text = (
            f'{{"allowed":true,"key":{shown}{lane.middle}{limit},"remaining":{left},"resetAfterSeconds":{reset},'
            f'"retryAfterSeconds":0,"message":"{message}"{extra}{lane.tail}'
        )
    else:
        retry = -(-made.retry_us // 1_000_000) or 1
        headers.append(("retry-after", str(retry)))
        text = (
            f'{{"allowed":false,"key":{shown}{lane.middle}{limit},"remaining":{left},"resetAfterSeconds":{reset},'
            f'"retryAfterSeconds":{retry},"message":"Rate limit exceeded"{extra}{lane.tail}'
        )
    if state.ietf_headers:
        headers += limit_headers(lane.name, lane.policy, left, retry or reset)
    return 200 if allowed else 429, headers, text


def as_shown(key: str) -> str:
    """A key as JSON."""
    return _encode(key).decode()
