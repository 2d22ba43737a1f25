"""Acquire, renew and release a slot of a rule with `concurrency`; and remaining and reset of such a rule.

An acquire with a lease id that the client chose may be sent again: it takes no second slot. An id that the service made
up is known to the client only from the answer, so its slot is freed at once if the request is dropped before that, and
as soon as the store answers if it may have given the slot to a client that was denied meanwhile.
"""

from __future__ import annotations

import re
import secrets
from contextlib import suppress
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import msgspec

from headgate.decision import Decision, decision
from headgate.errors import InvalidPermits, StoreUnavailable
from headgate.rule import check_permits
from headgate.service.concurrency_rules import ConcurrencyRule, MaybeDone, SlotReply
from headgate.service.event_log import log_reset
from headgate.service.model import LEASE_ID, LeaseAnswer, SlotAnswer, SlotLease, SlotRequest
from headgate.service.request import parse_permits, parse_query, query_and_body
from headgate.service.resolve import resolve_slots, slots_to_reset
from headgate.service.responses import record, store_unavailable
from headgate.service.rsgi import HTTPError, HTTPProtocol, Response, Scope
from headgate.service.shared_counters import RELEASED
from headgate.service.tokens import digest_in

if TYPE_CHECKING:
    from headgate.service.app import App, State

ACQUIRE_FORM = '{"rule": "uploads", "key": "tenant:7", "lease": "job-4711"}'
EXEMPT_REPLY = SlotReply(1, 0)

_lease_id = re.compile(LEASE_ID)


async def acquire(app: App, scope: Scope, protocol: HTTPProtocol) -> Response:
    """Take slots: 200 with a lease, or 429."""
    began = perf_counter_ns()
    state = app.state
    state.tokens.demand("check", scope.headers)
    asked = await query_and_body(app.bodies, scope, protocol, SlotRequest, ACQUIRE_FORM)
    rule, key, exempt = resolve_slots(state, scope, asked.get("rule"), asked.get("key"))
    given, permits = asked.get("lease"), parse_permits(asked)
    lease = new_lease_id() if given is None else check_lease_id(given)
    reply, allowed = await take_slots(app, rule, key, exempt, lease, permits, began, given is None)
    if given is None and reply.granted and not (exempt or reply.degraded):
        app.delivery.undo_if_dropped(protocol, lambda: _free(rule, key, lease))
    return slot_response(rule, key, reply, allowed, lease if allowed else "", exempt)


async def take_slots(
    app: App, rule: ConcurrencyRule, key: str, exempt: bool, lease: str, permits: int, began: int, made_up: bool
) -> tuple[SlotReply, bool]:
    """Ask for slots and count the answer; whether the client is told that it has them. Raises `HTTPError`.

    *made_up*: the client does not know the lease yet.
    """
    check_slots(rule, permits, 1)
    try:
        reply = EXEMPT_REPLY if exempt else await rule.ask("acquire", key, lease, permits)
    except StoreUnavailable as error:
        if made_up and isinstance(error, MaybeDone):
            app.delivery.undo(rule.give_back(key, lease))
        raise store_unavailable(app, rule, key, error) from None
    if reply.granted < 0:
        why = f"the lease {lease!r} was released before, and an id is for one acquisition; choose a new id for each"
        raise HTTPError(409, f"{why}, or give none")
    allowed = record(app, rule, key, as_decision(rule, reply), perf_counter_ns() - began)
    if made_up and reply.unsure and not allowed:
        app.delivery.undo(rule.give_back(key, lease))
    return reply, allowed


async def renew(app: App, scope: Scope, protocol: HTTPProtocol) -> Response:
    """Start the time of a lease again: 200, or 404 if it has ended."""
    rule, key, exempt, lease = await _lease_of(app, scope, protocol)
    reply = await renew_lease(app, rule, key, exempt, lease)
    answer = LeaseAnswer(
        renewed=True,
        key=key,
        lease=lease,
        expiresInSeconds=rule.lease // 1_000_000,
        message="Lease renewed",
        rule=rule.name,
        degraded=reply.degraded,
        shadow=not reply.granted,
        exempt=exempt,
    )
    return _json(answer)


async def renew_lease(app: App, rule: ConcurrencyRule, key: str, exempt: bool, lease: str) -> SlotReply:
    """Renew a lease. A shadow rule lets a client go on that has none; else that is a 404."""
    reply = EXEMPT_REPLY if exempt else await _ask(app, rule, "renew", key, lease)
    if not reply.granted and not rule.shadow:
        why = f"rule {rule.name!r} has no lease {lease!r} for this key: it has ended, or was released"
        raise HTTPError(404, f"{why}; acquire a slot again")
    return reply


async def release(app: App, scope: Scope, protocol: HTTPProtocol) -> Response:
    """End a lease. Always 200: `released` says whether it was there."""
    rule, key, exempt, lease = await _lease_of(app, scope, protocol)
    reply = await release_lease(app, rule, key, exempt, lease)
    message = "Slot released" if reply.granted else "There is no such lease: it has ended, or never was"
    if reply.degraded and not reply.granted:
        message = "The store does not answer; the slot comes free when the lease ends"
    answer = LeaseAnswer(
        released=bool(reply.granted),
        key=key,
        lease=lease,
        message=message,
        rule=rule.name,
        degraded=reply.degraded,
        exempt=exempt,
    )
    return _json(answer)


async def release_lease(app: App, rule: ConcurrencyRule, key: str, exempt: bool, lease: str) -> SlotReply:
    reply = EXEMPT_REPLY if exempt else await _ask(app, rule, "release", key, lease)
    if reply.granted and not exempt:
        app.slots[rule.slot + RELEASED] += 1
    return reply


async def remaining(app: App, scope: Scope, asked: dict[str, str]) -> Response:
    """How many slots are free, and whether the permits would be granted; takes none. Always 200.

    An algorithm among the parameters says nothing about slots, here and in `reset`: the description of both allows it.
    """
    permits = parse_permits(asked)
    rule, key, exempt = resolve_slots(app.state, scope, asked.get("rule"), asked.get("key"))
    reply = await look(app, rule, key, exempt, permits)
    _, headers, body = slot_response(rule, key, reply, bool(reply.granted) or rule.shadow, "", exempt)
    return 200, [header for header in headers if header[0] != "retry-after"], body


async def look(app: App, rule: ConcurrencyRule, key: str, exempt: bool, permits: int) -> SlotReply:
    """What an acquire would be answered; takes no slot. Raises `HTTPError`."""
    check_slots(rule, permits, 0)
    if exempt:
        return EXEMPT_REPLY
    reply = await _ask(app, rule, "peek", key, "")
    if reply.degraded and rule.on_store_error != "local":
        return reply
    return reply._replace(granted=int(reply.used + permits <= rule.limit))


async def reset(app: App, scope: Scope, asked: dict[str, str]) -> Response:
    """End all leases of a key."""
    found = slots_to_reset(app.state, scope, asked["rule"], asked.get("key"))
    check_slots(found[0][0], parse_permits(asked), 1)
    reply = await free_slots(app, scope, digest_in(scope.headers), found)
    return slot_response(*found[0], reply._replace(granted=1), True, "", False, "All slots freed")


async def free_slots(
    app: App, scope: Scope, token_digest: bytes | None, found: list[tuple[ConcurrencyRule, str]]
) -> SlotReply:
    """End all leases of each key in *found*, and log it; the reply about the first. Raises `HTTPError`."""
    rule, key = found[0]
    try:
        for each_rule, each_key in reversed(found):
            reply = await each_rule.free_all(each_key, new_lease_id())
    except StoreUnavailable as error:
        raise store_unavailable(app, rule, key, error) from None
    log_reset(app.state, scope, token_digest, rule, key)
    return reply


def new_lease_id() -> str:
    return secrets.token_hex(12)


def check_lease_id(lease: object) -> str:
    """A lease id as clients may choose it."""
    if isinstance(lease, str) and _lease_id.fullmatch(lease):
        return lease
    why = "lease must be 1 to 128 printable ASCII characters without spaces, for example job-4711"
    raise HTTPError(400, f"{why}; got {'none' if lease is None else repr(lease)[:60]}")


def check_slots(rule: ConcurrencyRule, permits: int, least: int) -> None:
    try:
        check_permits(permits, rule.limit, least)
    except InvalidPermits as error:
        raise HTTPError(400, str(error)) from None


def as_decision(rule: ConcurrencyRule, reply: SlotReply) -> Decision:
    """The reply in the form in which decisions are counted."""
    granted = bool(reply.granted)
    return decision(granted, rule.limit, _free_slots(rule, reply), 0, 0 if granted else reply.wait, reply.degraded)


def retry_seconds(reply: SlotReply) -> int:
    """When a denied client should come back: when the first lease ends, at least a second."""
    return max(-(-reply.wait // 1_000_000), 1)


def slot_response(
    rule: ConcurrencyRule,
    key: str,
    reply: SlotReply,
    allowed: bool,
    lease: str,
    exempt: bool,
    message: str = "",
) -> Response:
    """The response to an acquire with *lease*, or to a look at the slots of *key*."""
    free, retry = _free_slots(rule, reply), 0 if allowed else retry_seconds(reply)
    said = ("Slot acquired" if lease else "Slots are free") if allowed else "Concurrency limit reached"
    answer = SlotAnswer(
        allowed=allowed,
        key=key,
        limit=rule.limit,
        remaining=free,
        inUse=None if reply.degraded else reply.used,
        lease=lease or None,
        expiresInSeconds=rule.lease // 1_000_000 if lease else None,
        retryAfterSeconds=retry,
        message=message or said,
        rule=rule.name,
        degraded=reply.degraded,
        shadow=allowed and not reply.granted,
        exempt=exempt,
    )
    headers = [
        ("content-type", "application/json"),
        ("cache-control", "no-store"),
        ("x-ratelimit-limit", str(rule.limit)),
        ("x-ratelimit-remaining", str(free)),
    ]
    if retry:
        headers.append(("retry-after", str(retry)))
    return 200 if allowed else 429, headers, msgspec.json.encode(answer)


def _free_slots(rule: ConcurrencyRule, reply: SlotReply) -> int:
    return max(rule.limit - reply.used, 0)


async def _lease_of(app: App, scope: Scope, protocol: HTTPProtocol) -> tuple[ConcurrencyRule, str, bool, str]:
    """The rule, the key, whether it is exempt, and the lease of a request."""
    state: State = app.state
    state.tokens.demand("check", scope.headers)
    asked: dict[str, Any]
    if scope.method == "DELETE":
        asked = parse_query(scope.query_string, frozenset(SlotLease.__struct_fields__))
    else:
        asked = await query_and_body(app.bodies, scope, protocol, SlotLease, ACQUIRE_FORM)
    rule, key, exempt = resolve_slots(state, scope, asked.get("rule"), asked.get("key"))
    return rule, key, exempt, check_lease_id(asked.get("lease"))


async def _ask(app: App, rule: ConcurrencyRule, operation: str, key: str, lease: str) -> SlotReply:
    try:
        return await rule.ask(operation, key, lease)
    except StoreUnavailable as error:
        raise store_unavailable(app, rule, key, error) from None


async def _free(rule: ConcurrencyRule, key: str, lease: str) -> None:
    with suppress(StoreUnavailable):
        await rule.ask("release", key, lease)


def _json(answer: LeaseAnswer) -> Response:
    headers = [("content-type", "application/json"), ("cache-control", "no-store")]
    return 200, headers, msgspec.json.encode(answer)
