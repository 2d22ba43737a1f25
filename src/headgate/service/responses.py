"""From a decision to the counters, to the response, and to the client."""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from time import time_ns
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from headgate.decision import Decision, decision
from headgate.errors import InvalidKey, InvalidPermits, PermitsExceedLimit, StoreUnavailable
from headgate.keys import check_key
from headgate.service.rsgi import HTTPError, HTTPProtocol, Response
from headgate.service.rules import Charge, CompiledRule
from headgate.service.shared_counters import (
    ALLOWED,
    BOUNDS,
    DEGRADED,
    DENIED,
    NEAR,
    SHADOW,
    TIMING_WORDS,
    UNANSWERED,
    WAITED,
)
from headgate.web.headers import limit_header

if TYPE_CHECKING:
    from headgate.service.app import App, State

logger = logging.getLogger("headgate.service")

_BOUNDS_NS = tuple(round(bound * 1e9) for bound in BOUNDS)
MAX_PEERS = 65_536
DROP_NOTICE = 0.25  # seconds to watch for a dropped request; after that it counts as delivered
EXEMPT = ',"exempt":true'

_encode = msgspec.json.encode


class CountedRule(Protocol):
    """What counting asks of a rule: its name, its policy, its limiter, and where its counters are."""

    name: Any
    shadow: Any
    on_store_error: Any
    limiter: Any
    slot: int
    timing: int


def record(app: App, rule: CountedRule, key: str, made: Decision, nanoseconds: int | None) -> bool:
    """Count a decision; returns whether the client is told that it is allowed. A shadow rule always allows."""
    slots, timings, slot = app.slots, app.timings, rule.slot
    allowed = made.allowed
    if made.degraded:
        slots[slot + DEGRADED] += 1
        if app.outages.is_news(rule.name):
            reason = rule.limiter.store_health().last_error if rule.limiter else ""
            app.outages.log(rule, app.state.show_key(key), reason)
    busiest = app.busiest
    busiest.until_next -= 1
    if not busiest.until_next:
        busiest.add(rule.name, key)
    if not allowed:
        app.denied.add(rule.name, key)
        if rule.shadow:
            slots[slot + SHADOW] += 1
            allowed = True
    elif made.remaining * 5 <= made.limit:
        slots[slot + NEAR] += 1
    timing = rule.timing
    if allowed:
        slots[slot + ALLOWED] += 1
        timing += TIMING_WORDS
    else:
        slots[slot + DENIED] += 1
    if nanoseconds is None:  # the check waited for permits, so its time says nothing about the service's speed
        timings[timing + WAITED] += 1
    else:
        timings[timing] += nanoseconds
        timings[timing + 1 + bisect_left(_BOUNDS_NS, nanoseconds)] += 1
    if app.debug:
        word = "allowed" if allowed else "denied"
        logger.debug("Request %s for key: %s, remaining: %d", word, app.state.show_key(key), made.remaining)
    return allowed


def exempt_response(app: App, rule: CompiledRule, key: str, nanoseconds: int) -> Response:
    try:
        check_key(key)
    except InvalidKey as error:
        raise HTTPError(400, str(error)) from None
    made = decision(True, rule.capacity, rule.capacity)
    record(app, rule, key, made, nanoseconds)
    return decision_response(app.state, rule, as_json(key), made, True, extra=EXEMPT)


def bad_check(rule: CompiledRule, cost: int, error: InvalidKey | InvalidPermits) -> HTTPError:
    """The error for a check that the limiter refused, in permits as the client counts them, not in their cost."""
    if rule.cost == 1 or not isinstance(error, PermitsExceedLimit):
        return HTTPError(400, str(error))
    permits, most = cost // rule.cost, rule.capacity // rule.cost
    why = f"{permits} at a cost of {rule.cost} each are {cost}, above the capacity of {rule.capacity}"
    return HTTPError(400, f"permits must be at most {most}: {why}")


def store_unavailable(app: App, rule: CountedRule, key: str, error: StoreUnavailable) -> HTTPError:
    app.slots[rule.slot + UNANSWERED] += 1
    if app.outages.is_news(rule.name):
        app.outages.log(rule, app.state.show_key(key), str(error))
    return HTTPError(503, f"the store of rule {rule.name!r} does not answer; try again", ("retry-after", "1"))


def decision_response(
    state: State,
    rule: CompiledRule,
    json_key: str,
    made: Decision,
    allowed: bool,
    message: str = "Request allowed",
    extra: str = "",
) -> Response:
    """The response to a check; *json_key* is the key as JSON."""
    left, limit, reset_us = made.remaining, made.limit, made.reset_us
    reset = -(-reset_us // 1_000_000)
    until = made.retry_us  # what the headers call the reset
    if allowed or not until:
        until = min(reset_us, rule.recoveries.get(limit, reset_us)) if rule.recoveries else reset_us
    if made.degraded:
        extra += ',"degraded":true'
    if allowed is not made.allowed:
        extra += ',"shadow":true'
    headers = [
        ("content-type", "application/json"),
        ("cache-control", "no-store"),
        rule.limit_header if limit == rule.capacity else ("x-ratelimit-limit", str(limit)),
        ("x-ratelimit-remaining", str(left)),
        ("x-ratelimit-reset", str((time_ns() // 1000 + until + 999_999) // 1_000_000)),
    ]
    if allowed:
        retry = 0
        text = (
            f'{{"allowed":true,"key":{json_key}{rule.json_middle}{limit},"remaining":{left},'
            f'"resetAfterSeconds":{reset},"retryAfterSeconds":0,"message":"{message}"{extra}{rule.json_end}'
        )
    else:
        retry = -(-made.retry_us // 1_000_000) or 1
        headers.append(("retry-after", str(retry)))
        text = (
            f'{{"allowed":false,"key":{json_key}{rule.json_middle}{limit},"remaining":{left},'
            f'"resetAfterSeconds":{reset},"retryAfterSeconds":{retry},"message":"Rate limit exceeded"'
            f"{extra}{rule.json_end}"
        )
    if state.ietf_headers:
        name = rule.policy_names.get(limit, rule.name)  # of the quota that binds
        headers += [rule.policy, limit_header(name, left, retry or -(-until // 1_000_000))]
    return 200 if allowed else 429, headers, text


def as_json(text: str) -> str:
    return _encode(text).decode()


class Delivery:
    """Gives the permits of a check back if the server drops its request before the response.

    hyper, the HTTP library under granian, drops a request when its client half-closes the connection
    (`shutdown(SHUT_WR)`), and granian has no option for hyper's `half_close`. Such a request cannot be answered, so it
    must not be charged. granian reports a dropped request, but not the end of a connection whose response was sent: a
    client that leaves once it has its answer is charged. To watch costs about as much as a check, so only the first
    granted check of a connection is watched: a client that half-closes usually sends one request per connection. The
    connection is known by the peer's address and port.
    """

    def __init__(self) -> None:
        self.recent: set[str] = set()
        self._before: set[str] = set()
        self._refunds: set[asyncio.Task[None]] = set()

    def rotate(self) -> None:
        """Forget the peers that sent nothing since the call before; the server has closed their connections."""
        self._before, self.recent = self.recent, set()

    def is_first(self, peer: str) -> bool:
        """Whether *peer*, which is not among the recent peers, has had no answer before; adds it to them."""
        if len(self.recent) >= MAX_PEERS:
            self.recent.clear()
        self.recent.add(peer)
        return peer not in self._before

    def watch(self, protocol: HTTPProtocol, charges: Sequence[Charge]) -> None:
        """Refund *charges* if the client of *protocol* leaves. Call this before the response."""
        self.undo_if_dropped(protocol, lambda: _refund(charges))

    def undo_if_dropped(self, protocol: HTTPProtocol, undo: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run *undo* if the client of *protocol* leaves. Call this before the response."""
        dropped = asyncio.ensure_future(protocol.client_disconnect())
        timer = asyncio.get_running_loop().call_later(DROP_NOTICE, dropped.cancel)

        def noticed(dropped: asyncio.Future[None]) -> None:
            timer.cancel()
            if not dropped.cancelled() and not dropped.exception():
                self.undo(undo())

        dropped.add_done_callback(noticed)

    def undo(self, refund: Coroutine[Any, Any, None]) -> None:
        """Run *refund* in the background, until it has ended or the worker stops."""
        task = asyncio.ensure_future(refund)
        self._refunds.add(task)
        task.add_done_callback(self._refunds.discard)

    async def aclose(self) -> None:
        """End the refunds that are under way."""
        refunds = list(self._refunds)
        for task in refunds:
            task.cancel()
        await asyncio.gather(*refunds, return_exceptions=True)


async def _refund(charges: Sequence[Charge]) -> None:
    for rule, key, cost in charges:
        with suppress(StoreUnavailable):
            await rule.limiter.refund(key, cost)
