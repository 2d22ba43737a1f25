"""Book a slot of a rule, and give one up: `Limiter.book` over HTTP.

A booking may be sent again: an id takes one slot. An id that the service made up is known to the client only from the
answer, so its slot is given up if the request is dropped before that.
"""

from __future__ import annotations

from contextlib import suppress
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import msgspec

from headgate.booking import GRACE, WITHIN, AsyncSlot
from headgate.decision import Decision, decision
from headgate.errors import InvalidKey, InvalidPermits, RateLimited, SlotMismatch, StoreUnavailable
from headgate.keys import check_key
from headgate.service.model import BookingAnswer, BookingRequest, CancelAnswer
from headgate.service.request import parse_permits, parse_query, query_and_body
from headgate.service.resolve import resolve_request
from headgate.service.responses import bad_check, record, store_unavailable
from headgate.service.rsgi import HTTPError, HTTPProtocol, Response, Scope
from headgate.service.rules import CompiledRule

if TYPE_CHECKING:
    from headgate.service.app import App

FORM = '{"rule": "mails", "key": "tenant:7", "id": "job-4711", "within": 900}'
PARAMETERS = frozenset(BookingRequest.__struct_fields__)


async def book(app: App, scope: Scope, protocol: HTTPProtocol) -> Response:
    """Book a slot: 200 with its delay, or 429 if it would be too late."""
    began = perf_counter_ns()
    app.state.tokens.demand("check", scope.headers)
    asked = await query_and_body(app.bodies, scope, protocol, BookingRequest, FORM)
    rule, key, exempt = resolve_request(app.state, scope, asked.get("rule"), asked.get("algorithm"), asked.get("key"))
    within, grace = _seconds(asked, "within", WITHIN), _seconds(asked, "grace", GRACE)
    given, permits = asked.get("id"), parse_permits(asked)
    slot, made = await book_slot(app, rule, key, exempt, given, permits, within, grace)
    allowed = record(app, rule, key, made, perf_counter_ns() - began)
    if slot is not None and given is None and not slot.degraded:
        app.delivery.undo_if_dropped(protocol, lambda: _give_up(slot))
    return booking_response(rule, key, slot, made, allowed, exempt)


async def book_slot(
    app: App,
    rule: CompiledRule,
    key: str,
    exempt: bool,
    id: str | None,
    permits: int,
    within: float = WITHIN,
    grace: float = GRACE,
) -> tuple[AsyncSlot | None, Decision]:
    """The slot, None if the client is exempt or denied; and the decision. Raises `HTTPError`."""
    cost = permits * rule.cost
    try:
        if exempt:
            check_key(key)
            return None, decision(True, rule.capacity, rule.capacity)
        slot = await rule.limiter.book(key, id, cost, within=within, grace=grace)
    except RateLimited as error:
        return None, error.decision
    except SlotMismatch as error:
        raise HTTPError(409, str(error)) from None
    except (InvalidKey, InvalidPermits) as error:
        raise bad_check(rule, cost, error) from None
    except StoreUnavailable as error:
        raise store_unavailable(app, rule, key, error) from None
    except ValueError as error:
        raise HTTPError(400, f"rule {rule.name!r}: {error}") from None
    return slot, slot.decision


async def cancel(app: App, scope: Scope, protocol: HTTPProtocol) -> Response:
    """Give a slot up. Always 200: `cancelled` says whether another booking can have it."""
    app.state.tokens.demand("check", scope.headers)
    asked = parse_query(scope.query_string, frozenset({"rule", "key", "algorithm", "id"}))
    rule, key, exempt = resolve_request(app.state, scope, asked.get("rule"), asked.get("algorithm"), asked.get("key"))
    if "id" not in asked:
        raise HTTPError(400, "give id=ID, the id of the booking")
    try:
        done = not exempt and await rule.limiter.cancel_slot(key, asked["id"])
    except StoreUnavailable as error:
        raise store_unavailable(app, rule, key, error) from None
    except ValueError as error:
        raise HTTPError(400, f"rule {rule.name!r}: {error}") from None
    message = "Slot given up" if done else "The slot's time has come, or there is no such slot"
    return _json(200, CancelAnswer(cancelled=done, key=key, id=asked["id"], message=message, rule=rule.name), [])


def booking_response(
    rule: CompiledRule, key: str, slot: AsyncSlot | None, made: Decision, allowed: bool, exempt: bool
) -> Response:
    """The response to a booking. A shadow rule delays none."""
    retry = 0 if allowed else max(-(-made.retry_us // 1_000_000), 1)
    answer = BookingAnswer(
        allowed=allowed,
        key=key,
        algorithm=rule.label,
        limit=made.limit,
        id=slot.id if slot else None,
        delaySeconds=delay_of(rule, slot) if allowed else None,
        at=slot.at if slot else None,
        again=slot is not None and slot.again,
        retryAfterSeconds=retry,
        message="Slot booked" if allowed else "Rate limit exceeded",
        rule=rule.name,
        degraded=made.degraded,
        shadow=rule.shadow and (slot is None or slot.delay > 0) and not exempt,
        exempt=exempt,
    )
    headers = [("x-ratelimit-limit", str(made.limit)), ("x-ratelimit-remaining", str(made.remaining))]
    return _json(200 if allowed else 429, answer, headers + [("retry-after", str(retry))] * bool(retry))


def delay_of(rule: CompiledRule, slot: AsyncSlot | None) -> float:
    """Seconds that the client has to wait; none if it is exempt or the rule is a shadow."""
    return 0.0 if slot is None or rule.shadow else slot.delay


def _seconds(asked: dict[str, Any], name: str, default: float) -> float:
    given = asked.get(name, default)
    try:
        return float(given)
    except ValueError:
        raise HTTPError(400, f"{name} must be a number of seconds, got {given!r:.40}") from None


async def _give_up(slot: AsyncSlot) -> None:
    with suppress(StoreUnavailable):
        await slot.cancel()


def _json(status: int, answer: msgspec.Struct, headers: list[tuple[str, str]]) -> Response:
    own = [("content-type", "application/json"), ("cache-control", "no-store")]
    return status, own + headers, msgspec.json.encode(answer)
