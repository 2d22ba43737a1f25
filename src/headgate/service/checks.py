"""Check, remaining and reset: from a request to a decision.

A check that names its key takes a short path: one look-up of the route, one of the query among those seen before, the
decision, one f-string. A body, a wait, or a key that is not in the query branches off that path.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from headgate.decision import Decision, decision
from headgate.errors import InvalidKey, InvalidPermits, RateLimited, StoreUnavailable
from headgate.keys import check_key
from headgate.rule import check_permits
from headgate.service import slots
from headgate.service.event_log import log_reset
from headgate.service.model import WaitingCheck
from headgate.service.request import parse_integer, parse_permits, parse_query, query_and_body
from headgate.service.resolve import keys_to_reset, resolve_request
from headgate.service.responses import (
    EXEMPT,
    as_json,
    bad_check,
    decision_response,
    exempt_response,
    record,
    store_unavailable,
)
from headgate.service.rsgi import HTTPError, HTTPProtocol, Response, Scope
from headgate.service.rules import Charge, CompiledRule
from headgate.service.tokens import digest_in

if TYPE_CHECKING:
    from headgate.service.app import App, State

PARAMETERS = frozenset({"key", "algorithm", "permits", "rule"})
CHECK_PARAMETERS = PARAMETERS | {"wait"}
FORM = '{"key": "user:123", "algorithm": "TOKEN_BUCKET", "permits": 1, "rule": "default"}'
MAX_SEEN = 16_384  # parsed queries that are remembered: the same few keys send most of the traffic
MAX_SEEN_QUERY = 512  # characters of such a query
MAX_WAITERS = 4000  # in one worker; a check beyond them is answered at once


def check(app: App, scope: Scope, protocol: HTTPProtocol) -> Awaitable[Response | None]:
    """Spend permits: 200 when granted, 429 when not.

    A plain function that returns what to await: a coroutine around it would cost more than its own lines.
    """
    began = perf_counter_ns()
    state = app.state
    if state.checks_guarded:
        state.tokens.demand("check", scope.headers)
    query = scope.query_string
    seen = state.seen.get(query)
    if seen is not None:
        return take(app, state, scope, protocol, *seen, began)
    asked = parse_query(query, CHECK_PARAMETERS)
    permits = parse_integer("permits", asked["permits"]) if "permits" in asked else 1
    return _check(app, state, scope, protocol, asked, permits, began, query)


async def post(app: App, scope: Scope, protocol: HTTPProtocol) -> Response | None:
    """The same; parameters may be in the query, in the body, or in both."""
    state = app.state
    state.tokens.demand("check", scope.headers)
    asked = await query_and_body(app.bodies, scope, protocol, WaitingCheck, FORM)
    return await _check(app, state, scope, protocol, asked, parse_permits(asked), perf_counter_ns(), None)


async def _check(
    app: App,
    state: State,
    scope: Scope,
    protocol: HTTPProtocol,
    asked: dict[str, Any],
    permits: int,
    began: int,
    query: str | None,
) -> Response | None:
    rule, key, exempt = resolve_request(state, scope, asked.get("rule"), asked.get("algorithm"), asked.get("key"))
    if exempt:
        return exempt_response(app, rule, key, perf_counter_ns() - began)
    if "wait" in asked:
        seconds = _seconds(state, asked["wait"])
        if not rule.shadow:  # a shadow rule always allows, so there is nothing to wait for
            return await _wait(app, state, scope, protocol, (rule, key, permits * rule.cost), seconds)
    json_key = as_json(key)
    response = await take(app, state, scope, protocol, rule, key, json_key, permits * rule.cost, began)
    if query is not None and "key" in asked and len(query) <= MAX_SEEN_QUERY and rule.key_only:
        # the query was valid, and it alone determines the rule, the key and the cost
        if len(state.seen) >= MAX_SEEN:
            state.seen.clear()
        state.seen[query] = rule, key, json_key, permits * rule.cost
    return response


async def take(
    app: App,
    state: State,
    scope: Scope,
    protocol: HTTPProtocol,
    rule: CompiledRule,
    key: str,
    json_key: str,
    cost: int,
    began: int,
) -> Response | None:
    try:
        if rule.take_now:
            made = rule.take_now(key, cost)
        elif rule.take_leased:
            leased = rule.take_leased(key, cost)
            made = leased if isinstance(leased, Decision) else await leased
        else:
            made = await rule.limiter.try_acquire(key, cost)
    except (InvalidKey, InvalidPermits) as error:
        raise bad_check(rule, cost, error) from None
    except StoreUnavailable as error:
        raise store_unavailable(app, rule, key, error) from None
    allowed = record(app, rule, key, made, perf_counter_ns() - began)
    response = decision_response(state, rule, json_key, made, allowed)
    if not made.allowed or made.degraded:
        return response
    delivery, peer = app.delivery, scope.client
    if peer in delivery.recent or not delivery.is_first(peer):
        return response
    delivery.watch(protocol, [(rule, key, cost)])
    return response


async def head(app: App, scope: Scope, protocol: HTTPProtocol) -> Response:
    """The headers that GET would give, with nothing spent."""
    app.state.tokens.demand("check", scope.headers)
    asked = parse_query(scope.query_string, CHECK_PARAMETERS)
    _seconds(app.state, asked.get("wait", "0"))
    if asked.get("permits") == "0":
        raise HTTPError(400, "permits must be a whole number of at least 1, got 0")
    state, rule, key, made, extra = await _peek(app, scope, asked)
    return decision_response(state, rule, as_json(key), made, made.allowed or rule.shadow, extra=extra)


async def remaining(app: App, scope: Scope, protocol: HTTPProtocol) -> Response:
    """What remains, and whether the permits would be granted; nothing is spent. Always 200."""
    app.state.tokens.demand("read", scope.headers)
    asked = parse_query(scope.query_string, PARAMETERS)
    if asked.get("rule") in app.state.rule_set.concurrency_rules:
        return await slots.remaining(app, scope, asked)
    (state, rule, key, would, extra), (*_, now, _) = await asyncio.gather(
        _peek(app, scope, asked), _peek(app, scope, asked | {"permits": "0"})
    )
    made = decision(would.allowed, now.limit, now.remaining, now.reset_us, would.retry_us, would.degraded)
    allowed = made.allowed or rule.shadow
    _, headers, text = decision_response(state, rule, as_json(key), made, allowed, extra=extra)
    return 200, [header for header in headers if header[0] != "retry-after"], text


async def reset(app: App, scope: Scope, protocol: HTTPProtocol) -> Response:
    """Forget the key of a check with the same query, or a joined key as responses show it."""
    state = app.state
    state.tokens.demand("admin", scope.headers)
    asked = parse_query(scope.query_string, PARAMETERS)
    if asked.get("rule") in state.rule_set.concurrency_rules:
        return await slots.reset(app, scope, asked)
    permits = parse_integer("permits", asked["permits"]) if "permits" in asked else 1
    found = keys_to_reset(state, scope, asked.get("rule"), asked.get("algorithm"), asked.get("key"))
    rule, key = found[0]
    try:
        check_permits(permits * rule.cost, rule.capacity)
        for each_rule, each_key in reversed(found):
            made = await reset_key(each_rule, each_key)
    except (InvalidKey, InvalidPermits) as error:
        raise bad_check(rule, permits * rule.cost, error) from None
    except StoreUnavailable as error:
        raise store_unavailable(app, rule, key, error) from None
    log_reset(state, scope, digest_in(scope.headers), rule, key)
    return decision_response(state, rule, as_json(key), made, True, "Rate limit reset")


async def reset_key(rule: CompiledRule, key: str) -> Decision:
    """Forget *key*, and return how things stand then. Raises `StoreUnavailable`, whatever `on_store_error` says."""
    if not await rule.limiter.reset(key):  # on_store_error is about checks: a reset that was not made must be a 503
        raise StoreUnavailable(f"the key was not reset: {rule.limiter.store_health().last_error}")
    return await rule.limiter.peek(key, 0)


async def _peek(app: App, scope: Scope, asked: dict[str, str]) -> tuple[State, CompiledRule, str, Decision, str]:
    state = app.state
    permits = parse_integer("permits", asked["permits"]) if "permits" in asked else 1
    rule, key, exempt = resolve_request(state, scope, asked.get("rule"), asked.get("algorithm"), asked.get("key"))
    cost = permits * rule.cost
    try:
        if exempt:
            check_key(key)
            return state, rule, key, decision(True, rule.capacity, rule.capacity), EXEMPT
        made = rule.peek_now(key, cost) if rule.peek_now else await rule.limiter.peek(key, cost)
        return state, rule, key, made, ""
    except (InvalidKey, InvalidPermits) as error:
        raise bad_check(rule, cost, error) from None
    except StoreUnavailable as error:
        raise store_unavailable(app, rule, key, error) from None


async def _wait(
    app: App, state: State, scope: Scope, protocol: HTTPProtocol, wanted: Charge, seconds: float
) -> Response | None:
    """Hold the response until the permits are there or the time is over; a client that disconnects spends none.

    On a leaky bucket it is held until the check's place in time, see `headgate.service.paced`.
    """
    rule, key, cost = wanted
    if app.waiting >= MAX_WAITERS:
        seconds = 0.0
    app.waiting += 1
    if rule.paces:
        acquired = asyncio.ensure_future(app.paced.wait(rule.limiter, key, cost, seconds))
    else:
        acquired = asyncio.ensure_future(rule.limiter.acquire(key, cost, timeout=seconds))
    disconnected = asyncio.ensure_future(protocol.client_disconnect())
    try:
        await asyncio.wait({acquired, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not acquired.done():
            raise HTTPError(400, "the client has disconnected")  # cannot be sent, but ends up in the debug log
        made = acquired.result()
    except (InvalidKey, InvalidPermits) as error:
        raise bad_check(rule, cost, error) from None
    except RateLimited as error:
        made = error.decision
    except StoreUnavailable as error:
        raise store_unavailable(app, rule, key, error) from None
    finally:
        app.waiting -= 1
        acquired.cancel()
        disconnected.cancel()
    response = decision_response(state, rule, as_json(key), made, record(app, rule, key, made, None))
    if not made.allowed or made.degraded:
        return response
    app.delivery.watch(protocol, [wanted])
    return response


def _seconds(state: State, text: str | float) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    most = state.settings.max_wait
    if not 0 <= seconds <= most:
        raise HTTPError(400, f"wait must be a number of seconds from 0 to {most:g}, got {text!r:.40}")
    return seconds
