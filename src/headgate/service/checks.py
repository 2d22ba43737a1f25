"""Check, remaining, reset and batch: from a request to a decision to the bytes of the answer.

The way of a check that names its key is kept short: one look at the path, one walk over the query, one look-up of the
lane, the decision, one f-string. Everything unusual (a body, a wait, another way to find the key) branches off it.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left
from collections.abc import Callable
from time import perf_counter_ns, time_ns
from typing import TYPE_CHECKING, Any

import msgspec

from headgate.decision import Decision, decision
from headgate.errors import InvalidKey, InvalidPermits, RateLimited, StoreUnavailable
from headgate.keys import check_key
from headgate.service.address import Address
from headgate.service.board import (
    ALLOWED,
    BOUNDS,
    DEGRADED,
    DENIED,
    NEAR,
    SHADOW,
    TIMING_WORDS,
    UNANSWERED,
)
from headgate.service.http import Exchange, Refusal, Reply, Scope, read_json
from headgate.service.ietf import limit_headers
from headgate.service.model import BATCH, Check, Checks, WaitingCheck
from headgate.service.query import parse, whole
from headgate.service.rules import Lane

if TYPE_CHECKING:
    from headgate.service.app import App, State

logger = logging.getLogger("headgate.service")

PARAMETERS = frozenset({"key", "algorithm", "permits", "rule"})
CHECK_PARAMETERS = PARAMETERS | {"wait"}
FORM = '{"key": "user:123", "algorithm": "TOKEN_BUCKET", "permits": 1, "rule": "default"}'
MAX_WAITERS = 10_000  # in one worker; who comes later is answered at once

_BOUNDS_NS = tuple(round(bound * 1e9) for bound in BOUNDS)
_encode = msgspec.json.encode


async def check(app: App, scope: Scope, exchange: Exchange) -> Reply:
    """Spend permits: 200 when granted, 429 when not."""
    began = perf_counter_ns()
    state = app.state
    if "check" in state.tokens.guarded:
        state.tokens.demand("check", scope.headers)
    asked = parse(scope.query_string, CHECK_PARAMETERS)
    permits = whole("permits", asked["permits"]) if "permits" in asked else 1
    if scope.method == "POST" and _has_body(scope):
        asked, permits = await _merged(asked, permits, scope, exchange)
        began = perf_counter_ns()  # the time that the client takes to send is not ours
    lane, key, exempt = _find(state, scope, asked.get("rule"), asked.get("algorithm"), asked.get("key"))
    if exempt:
        return _exempt(app, lane, key, perf_counter_ns() - began)
    if "wait" in asked:
        return await _wait(app, state, exchange, lane, key, permits, asked["wait"])
    try:
        cost = permits * lane.cost if lane.cost != 1 else permits
        made = lane.take(key, cost) if lane.take else await lane.limiter.try_acquire(key, cost)
    except (InvalidKey, InvalidPermits) as error:
        raise Refusal(400, str(error)) from None
    except StoreUnavailable as error:
        raise _unanswered(app, lane, key, error) from None
    allowed = _count(app, lane, key, made, perf_counter_ns() - began)
    return _reply(state, lane, key, made, allowed)


async def head(app: App, scope: Scope, exchange: Exchange) -> Reply:
    """The head of the answer that GET would give, with nothing spent."""
    app.state.tokens.demand("check", scope.headers)
    asked = parse(scope.query_string, CHECK_PARAMETERS)
    _seconds(app.state, asked.get("wait", "0"))
    if asked.get("permits") == "0":
        raise Refusal(400, "permits must be a whole number of at least 1, got 0")
    state, lane, key, made = await _look(app, scope, asked)
    return _reply(state, lane, key, made, made.allowed or lane.shadow)


async def remaining(app: App, scope: Scope, exchange: Exchange) -> Reply:
    """The same answer with nothing spent; always 200."""
    app.state.tokens.demand("read", scope.headers)
    state, lane, key, made = await _look(app, scope, parse(scope.query_string, PARAMETERS))
    _, headers, body = _reply(state, lane, key, made, made.allowed or lane.shadow)
    return 200, [header for header in headers if header[0] != "retry-after"], body


async def reset(app: App, scope: Scope, exchange: Exchange) -> Reply:
    """Forget a key. Given, it is taken as answers show it: a rule that joins parts shows them joined."""
    state = app.state
    state.tokens.demand("admin", scope.headers)
    asked = parse(scope.query_string, PARAMETERS)
    lane = state.book.lane(asked.get("rule"), asked.get("algorithm"))
    if "key" in asked:
        key = asked["key"]
        lane = lane.overrides.get(key, lane) if lane.overrides else lane
    else:
        lane, key, _ = _find(state, scope, asked.get("rule"), asked.get("algorithm"), None)
    if "permits" in asked:
        whole("permits", asked["permits"])
    try:
        await lane.limiter.reset(key)
        made = await lane.limiter.peek(key, 0)
    except InvalidKey as error:
        raise Refusal(400, str(error)) from None
    except StoreUnavailable as error:
        raise _unanswered(app, lane, key, error) from None
    logger.info("Reset of key: %s, rule: %s, algorithm: %s", state.shown(key), lane.name, lane.label)
    return _reply(state, lane, key, made, True, "Rate limit reset")


async def batch(app: App, scope: Scope, exchange: Exchange) -> Reply:
    """Many checks in one request, each on its own, answered in order. A bad one among them spends nothing at all."""
    state = app.state
    state.tokens.demand("check", scope.headers)
    parse(scope.query_string, frozenset())
    checks: list[Check] = await read_json(scope, exchange, Checks, f"a list of 1 to {BATCH} such as [{FORM}]")
    planned = []
    for i, one in enumerate(checks):
        try:
            lane, key, exempt = _find(state, scope, _set(one.rule), _set(one.algorithm), _set(one.key))
            cost = int(one.permits) * lane.cost
            check_key(key)
            if cost > lane.capacity:
                raise InvalidPermits(f"permits must be at most {lane.capacity // lane.cost}, the capacity")
        except (Refusal, InvalidKey, InvalidPermits) as error:
            raise Refusal(400, f"check {i} of the batch: {error}; nothing was spent") from None
        planned.append((lane, key, exempt, cost))
    bodies = [""] * len(planned)
    turns: dict[tuple[int, str], list[int]] = {}
    for i, (lane, key, _, _) in enumerate(planned):
        turns.setdefault((id(lane), key), []).append(i)

    async def take(positions: list[int]) -> None:
        for i in positions:
            bodies[i] = await _one(app, state, *planned[i])

    # keys travel together, but what asks for the same key comes in the order of the list
    await asyncio.gather(*(take(positions) for positions in turns.values()))
    headers = [("content-type", "application/json"), ("cache-control", "no-store")]
    return 200, headers, "[" + ",".join(bodies) + "]"


async def _one(app: App, state: State, lane: Lane, key: str, exempt: bool, cost: int) -> str:
    if exempt:
        return str(_exempt(app, lane, key, 0)[2])
    began = perf_counter_ns()
    try:
        made = lane.take(key, cost) if lane.take else await lane.limiter.try_acquire(key, cost)
    except StoreUnavailable as error:
        raise _unanswered(app, lane, key, error) from None
    allowed = _count(app, lane, key, made, perf_counter_ns() - began)
    return str(_reply(state, lane, key, made, allowed)[2])


def _has_body(scope: Scope) -> bool:
    headers = scope.headers
    return headers.get("content-length", "0") != "0" or headers.get("transfer-encoding") is not None


async def _merged(asked: dict[str, str], permits: int, scope: Scope, exchange: Exchange) -> tuple[dict[str, Any], int]:
    """The query's parameters and the body's together."""
    sent: WaitingCheck = await read_json(scope, exchange, WaitingCheck, FORM)
    fields = {"key": _set(sent.key), "algorithm": _set(sent.algorithm), "rule": _set(sent.rule)}
    given: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
    if sent.wait:
        given["wait"] = str(sent.wait)
    if sent.permits != 1:
        given["permits"] = permits = int(sent.permits)
    if both := asked.keys() & given.keys():
        raise Refusal(400, f"{', '.join(sorted(both))} is in the query and in the body; give it once")
    return asked | given, permits


def _set(value: Any) -> Any:
    return None if value is msgspec.UNSET else value


def _find(
    state: State, scope: Scope, rule: str | None, algorithm: str | None, given: str | None
) -> tuple[Lane, str, bool]:
    """The lane and the key of a request, and whether it is exempt."""
    lane = state.book.lane(rule, algorithm)
    if lane.parts is not None:
        key = _joined(state, scope, lane, given)
    else:
        key = state.locator.key(scope.client, scope.headers) if given is None else given
    if lane.exempt_keys is not None and lane.is_exempt(key, _address(state, scope)):
        return lane, key, True
    if lane.overrides is not None:
        lane = lane.overrides.get(key, lane)
    return lane, key, False


def _address(state: State, scope: Scope) -> Callable[[], Address | None]:
    return lambda: state.locator.address(scope.client, scope.headers)


def _joined(state: State, scope: Scope, lane: Lane, given: str | None) -> str:
    """The key of a rule that takes it together from parts; `|` between them, so one inside a part is encoded."""
    values = []
    for part in lane.parts or ():
        if part == "key":
            value = state.locator.key(scope.client, scope.headers) if given is None else given
        elif part == "address":
            value = state.locator.key(scope.client, scope.headers)
        else:
            name = part.removeprefix("header:")
            value = scope.headers.get(name, "")
            if not value:
                raise Refusal(400, f"rule {lane.name!r} needs the header {name}")
        values.append(value)
    if len(values) == 1:
        return str(values[0])
    return "|".join(value.replace("%", "%25").replace("|", "%7C") for value in values)


async def _look(app: App, scope: Scope, asked: dict[str, str]) -> tuple[State, Lane, str, Decision]:
    state = app.state
    permits = whole("permits", asked["permits"]) if "permits" in asked else 1
    lane, key, exempt = _find(state, scope, asked.get("rule"), asked.get("algorithm"), asked.get("key"))
    if exempt:
        check_key(key)
        return state, lane, key, decision(True, lane.capacity, lane.capacity)
    try:
        cost = permits * lane.cost
        return state, lane, key, lane.peek(key, cost) if lane.peek else await lane.limiter.peek(key, cost)
    except (InvalidKey, InvalidPermits) as error:
        raise Refusal(400, str(error)) from None
    except StoreUnavailable as error:
        raise _unanswered(app, lane, key, error) from None


async def _wait(app: App, state: State, exchange: Exchange, lane: Lane, key: str, permits: int, text: str) -> Reply:
    """Hold the answer until the permits are there, or the time is over; a client that leaves takes none."""
    seconds = _seconds(state, text)
    if app.waiting >= MAX_WAITERS:
        seconds = 0.0
    app.waiting += 1
    answer = asyncio.ensure_future(lane.limiter.acquire(key, permits * lane.cost, timeout=seconds))
    gone = asyncio.ensure_future(exchange.client_disconnect())
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise Refusal(400, "the client has left")  # nobody reads it
        made = answer.result()
    except (InvalidKey, InvalidPermits) as error:
        raise Refusal(400, str(error)) from None
    except RateLimited as error:
        made = error.decision
    except StoreUnavailable as error:
        raise _unanswered(app, lane, key, error) from None
    finally:
        app.waiting -= 1
        answer.cancel()
        gone.cancel()
    return _reply(state, lane, key, made, _count(app, lane, key, made, None))


def _seconds(state: State, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    most = state.settings.max_wait
    if not 0 <= seconds <= most:
        raise Refusal(400, f"wait must be a number of seconds from 0 to {most:g}, got {text!r:.40}")
    return seconds


def _count(app: App, lane: Lane, key: str, made: Decision, nanoseconds: int | None) -> bool:
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
    timings[timing + TIMING_WORDS - 1] += 1
    if nanoseconds is not None:  # else it was a wait, which says nothing about our speed
        timings[timing] += nanoseconds
        timings[timing + 1 + bisect_left(_BOUNDS_NS, nanoseconds)] += 1
    if app.debug:
        word = "allowed" if allowed else "denied"
        logger.debug("Request %s for key: %s, remaining: %d", word, app.state.shown(key), made.remaining)
    return allowed


def _exempt(app: App, lane: Lane, key: str, nanoseconds: int) -> Reply:
    try:
        check_key(key)
    except InvalidKey as error:
        raise Refusal(400, str(error)) from None
    made = decision(True, lane.capacity, lane.capacity)
    _count(app, lane, key, made, nanoseconds)
    return _reply(app.state, lane, key, made, True, extra=',"exempt":true')


def _unanswered(app: App, lane: Lane, key: str, error: StoreUnavailable) -> Refusal:
    app.slots[lane.slot + UNANSWERED] += 1
    logger.error("Error executing rate limit check for key: %s: %s", app.state.shown(key), error)
    return Refusal(503, f"the store of rule {lane.name!r} does not answer; try again", ("retry-after", "1"))


def _reply(
    state: State, lane: Lane, key: str, made: Decision, allowed: bool, message: str = "", extra: str = ""
) -> Reply:
    """The answer, its headers and its body."""
    left, limit, reset_us = made.remaining, made.limit, made.reset_us
    reset = -(-reset_us // 1_000_000)
    retry = 0 if allowed else -(-made.retry_us // 1_000_000) or 1
    if made.degraded:
        extra += ',"degraded":true'
    if allowed is not made.allowed:
        extra += ',"shadow":true'
    if lane.name != "default":
        extra += f',"rule":"{lane.name}"'
    if allowed:
        yes, status, message = "true", 200, message or "Request allowed"
    else:
        yes, status, message = "false", 429, "Rate limit exceeded"
    body = (
        f'{{"allowed":{yes},"key":{_encode(key).decode()},"algorithm":"{lane.label}","limit":{limit},'
        f'"remaining":{left},"resetAfterSeconds":{reset},"retryAfterSeconds":{retry},"message":"{message}"{extra}}}'
    )
    headers = [
        ("content-type", "application/json"),
        ("cache-control", "no-store"),
        ("x-ratelimit-limit", str(limit)),
        ("x-ratelimit-remaining", str(left)),
        ("x-ratelimit-reset", str((time_ns() // 1000 + reset_us + 999_999) // 1_000_000)),
    ]
    if not allowed:
        headers.append(("retry-after", str(retry)))
    if state.settings.ietf_headers:
        headers += limit_headers(lane.name, lane.policy, left, retry or reset)
    return status, headers, body
