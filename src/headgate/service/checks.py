"""Check, remaining and reset: from a request to a decision.

The way of a check that names its key is kept short: one look at the path, one walk over the query, one look-up of the
lane, the decision, one f-string. Everything unusual (a body, a wait, another way to find the key) branches off it.
"""

from __future__ import annotations

import asyncio
import logging
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from headgate.decision import Decision, decision
from headgate.errors import InvalidKey, InvalidPermits, RateLimited, StoreUnavailable
from headgate.keys import check_key
from headgate.limiter import AsyncLimiter
from headgate.rule import check_permits
from headgate.service.answers import EXEMPT, as_shown, count, exempted, refused, reply, unanswered
from headgate.service.body import from_json
from headgate.service.http import Exchange, Refusal, Reply, Scope
from headgate.service.model import WaitingCheck
from headgate.service.query import parse, whole
from headgate.service.rules import Lane
from headgate.service.subject import find, forgettable

if TYPE_CHECKING:
    from headgate.service.app import App, State

logger = logging.getLogger("headgate.service")

PARAMETERS = frozenset({"key", "algorithm", "permits", "rule"})
CHECK_PARAMETERS = PARAMETERS | {"wait"}
FORM = '{"key": "user:123", "algorithm": "TOKEN_BUCKET", "permits": 1, "rule": "default"}'
MAX_SEEN = 16_384  # queries whose meaning is remembered: the same few keys send most of the traffic
MAX_QUERY = 512  # characters of such a query
MAX_WAITERS = 4000  # in one worker; who comes later is answered at once


async def check(app: App, scope: Scope, exchange: Exchange) -> Reply | None:
    """Spend permits: 200 when granted, 429 when not."""
    began = perf_counter_ns()
    state = app.state
    if "check" in state.tokens.guarded:
        state.tokens.demand("check", scope.headers)
    query = scope.query_string
    seen = state.seen.get(query)
    if seen is not None:
        return await _take(app, state, scope, exchange, *seen, began)
    asked = parse(query, CHECK_PARAMETERS)
    permits = whole("permits", asked["permits"]) if "permits" in asked else 1
    return await _check(app, state, scope, exchange, asked, permits, began, query)


async def post(app: App, scope: Scope, exchange: Exchange) -> Reply | None:
    """The same; what is asked may be in the query, in the body, or in both."""
    state = app.state
    state.tokens.demand("check", scope.headers)
    asked: dict[str, Any] = parse(scope.query_string, CHECK_PARAMETERS)
    permits = whole("permits", asked["permits"]) if "permits" in asked else 1
    if raw := await app.bodies.read(scope, exchange):
        sent: WaitingCheck = from_json(scope, raw, WaitingCheck, FORM)
        given = {name: value for name in sent.__struct_fields__ if (value := getattr(sent, name)) is not None}
        if both := asked.keys() & given.keys():
            raise Refusal(400, f"{', '.join(sorted(both))} is in the query and in the body; give it once")
        permits = int(given.get("permits", permits))
        asked |= given
    return await _check(app, state, scope, exchange, asked, permits, perf_counter_ns(), None)


async def _check(
    app: App,
    state: State,
    scope: Scope,
    exchange: Exchange,
    asked: dict[str, Any],
    permits: int,
    began: int,
    query: str | None,
) -> Reply | None:
    lane, key, exempt = find(state, scope, asked.get("rule"), asked.get("algorithm"), asked.get("key"))
    if exempt:
        return exempted(app, lane, key, perf_counter_ns() - began)
    if "wait" in asked:
        seconds = _seconds(state, asked["wait"])
        if not lane.shadow:  # what is always allowed needs no waiting
            return await _wait(app, state, scope, exchange, lane, key, permits, seconds)
    shown = as_shown(key)
    answer = await _take(app, state, scope, exchange, lane, key, shown, permits * lane.cost, began)
    if query is not None and "key" in asked and len(query) <= MAX_QUERY and lane.plain:
        # it was a good one, short enough to keep, and nothing but the query decided what it asks for
        if len(state.seen) >= MAX_SEEN:
            state.seen.clear()
        state.seen[query] = lane, key, shown, permits * lane.cost
    return answer


async def _take(
    app: App, state: State, scope: Scope, exchange: Exchange, lane: Lane, key: str, shown: str, cost: int, began: int
) -> Reply | None:
    try:
        made = lane.take(key, cost) if lane.take else await lane.limiter.try_acquire(key, cost)
    except (InvalidKey, InvalidPermits) as error:
        raise refused(lane, cost, error) from None
    except StoreUnavailable as error:
        raise unanswered(app, lane, key, error) from None
    answer = reply(state, lane, shown, made, count(app, lane, key, made, perf_counter_ns() - began))
    if not made.allowed or made.degraded or app.delivery.is_known(scope.client):
        return answer
    await app.delivery.send(scope, exchange, answer, [(lane, key, cost)])
    return None


async def head(app: App, scope: Scope, exchange: Exchange) -> Reply:
    """The head of the answer that GET would give, with nothing spent."""
    app.state.tokens.demand("check", scope.headers)
    asked = parse(scope.query_string, CHECK_PARAMETERS)
    _seconds(app.state, asked.get("wait", "0"))
    if asked.get("permits") == "0":
        raise Refusal(400, "permits must be a whole number of at least 1, got 0")
    state, lane, key, made, extra = await _look(app, scope, asked)
    return reply(state, lane, as_shown(key), made, made.allowed or lane.shadow, extra=extra)


async def remaining(app: App, scope: Scope, exchange: Exchange) -> Reply:
    """How things stand, and whether the permits would be granted; nothing is spent. Always 200."""
    app.state.tokens.demand("read", scope.headers)
    asked = parse(scope.query_string, PARAMETERS)
    (state, lane, key, would, extra), (*_, now, _) = await asyncio.gather(
        _look(app, scope, asked), _look(app, scope, asked | {"permits": "0"})
    )
    made = decision(would.allowed, now.limit, now.remaining, now.reset_us, would.retry_us, would.degraded)
    _, headers, text = reply(state, lane, as_shown(key), made, made.allowed or lane.shadow, extra=extra)
    return 200, [header for header in headers if header[0] != "retry-after"], text


async def reset(app: App, scope: Scope, exchange: Exchange) -> Reply:
    """Forget a key: that of a check with the same query, or one as answers show it."""
    state = app.state
    state.tokens.demand("admin", scope.headers)
    asked = parse(scope.query_string, PARAMETERS)
    permits = whole("permits", asked["permits"]) if "permits" in asked else 1
    named = forgettable(state, scope, asked.get("rule"), asked.get("algorithm"), asked.get("key"))
    lane, key = named[0]
    try:
        check_permits(permits * lane.cost, lane.capacity)
        for found in reversed(named):
            made = await _forget(app, *found)
    except (InvalidKey, InvalidPermits) as error:
        raise refused(lane, permits * lane.cost, error) from None
    except StoreUnavailable as error:
        raise unanswered(app, lane, key, error) from None
    logger.info("Reset of key: %s, rule: %s, algorithm: %s", state.shown(key), lane.name, lane.label)
    return reply(state, lane, as_shown(key), made, True, "Rate limit reset")


async def _forget(app: App, lane: Lane, key: str) -> Decision:
    # what on_store_error says is about checks: a reset that did not happen is no reset
    strict = AsyncLimiter(lane.quotas, algorithm=lane.kind, store=app.store, name=lane.name, on_store_error="raise")
    await strict.reset(key)
    await lane.limiter.reset(key)  # and tells those who wait in this worker
    return await lane.limiter.peek(key, 0)


async def _look(app: App, scope: Scope, asked: dict[str, str]) -> tuple[State, Lane, str, Decision, str]:
    state = app.state
    permits = whole("permits", asked["permits"]) if "permits" in asked else 1
    lane, key, exempt = find(state, scope, asked.get("rule"), asked.get("algorithm"), asked.get("key"))
    cost = permits * lane.cost
    try:
        if exempt:
            check_key(key)
            return state, lane, key, decision(True, lane.capacity, lane.capacity), EXEMPT
        return state, lane, key, lane.peek(key, cost) if lane.peek else await lane.limiter.peek(key, cost), ""
    except (InvalidKey, InvalidPermits) as error:
        raise refused(lane, cost, error) from None
    except StoreUnavailable as error:
        raise unanswered(app, lane, key, error) from None


async def _wait(
    app: App, state: State, scope: Scope, exchange: Exchange, lane: Lane, key: str, permits: int, seconds: float
) -> Reply | None:
    """Hold the answer until the permits are there, or the time is over; a client that leaves takes none."""
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
        raise refused(lane, permits * lane.cost, error) from None
    except RateLimited as error:
        made = error.decision
    except StoreUnavailable as error:
        raise unanswered(app, lane, key, error) from None
    finally:
        app.waiting -= 1
        answer.cancel()
        gone.cancel()
    reply_made = reply(state, lane, as_shown(key), made, count(app, lane, key, made, None))
    if not made.allowed or made.degraded:
        return reply_made
    await app.delivery.send(scope, exchange, reply_made, [(lane, key, permits * lane.cost)])
    return None


def _seconds(state: State, text: str | float) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    most = state.settings.max_wait
    if not 0 <= seconds <= most:
        raise Refusal(400, f"wait must be a number of seconds from 0 to {most:g}, got {text!r:.40}")
    return seconds
