"""Many checks in one request, each on its own, answered in order.

One invalid check refuses the whole batch before anything is spent. A check that gets no decision, because its rule has
`on_store_error = "raise"` and the store is down, says so in its place: the others were spent, and their answers count.

A batch is decided in slices, and other requests are served between two slices. For the same reason only a few batches
are decided at a time; the rest wait in line.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from time import perf_counter_ns
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from headgate.decision import Decision
from headgate.errors import InvalidKey, InvalidPermits, StoreUnavailable
from headgate.keys import check_key
from headgate.rule import check_permits
from headgate.service import responses
from headgate.service.checks import FORM
from headgate.service.model import BATCH, Answer, Check, Checks
from headgate.service.request import parse_json, parse_query, quoted_names, refuse_duplicates
from headgate.service.resolve import resolve_request
from headgate.service.rsgi import HTTPError, HTTPProtocol, Response, Scope
from headgate.service.rules import Charge, CompiledRule

if TYPE_CHECKING:
    from headgate.service.app import App, State

SLICE = 16  # checks on the memory store: a few hundred microseconds
REDIS_SLICE = 64  # checks that one round trip to Redis carries
MAX_BATCHES = 4  # decided at the same time: another request waits for at most one slice of each
MAX_QUOTES = 14  # quotation marks of one check: four names and three texts


def count_objects(raw: bytes) -> int:
    """Estimate how many checks a JSON text has, without parsing it: a megabyte of `{}` took 100 ms to refuse."""
    count = raw.count(b"{")
    if count <= BATCH:
        return count
    bare = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    quotes = bare.count(b'"')
    if quotes > MAX_QUOTES * BATCH:
        return quotes // MAX_QUOTES
    return sum(part.count(b"{") for part in bare.split(b'"')[::2])  # braces between two quotes belong to keys


class PlannedCheck(NamedTuple):
    """A valid check that is not decided yet."""

    rule: CompiledRule
    key: str
    exempt: bool
    cost: int


async def batch(app: App, scope: Scope, protocol: HTTPProtocol) -> Response | None:
    """Answer a list of checks with a list."""
    state = app.state
    state.tokens.demand("check", scope.headers)
    parse_query(scope.query_string, frozenset())
    raw = await app.bodies.read(scope, protocol)
    charges: list[Charge] = []
    async with app.batches:
        answers = await _answers(app, state, scope, raw, charges)
    headers = [("content-type", "application/json"), ("cache-control", "no-store")]
    response = 200, headers, "[" + ",".join(answers) + "]"
    if not charges:
        return response
    app.delivery.watch(protocol, charges)
    return response


async def _answers(app: App, state: State, scope: Scope, raw: bytes, charges: list[Charge]) -> list[str]:
    if count_objects(raw) > BATCH:
        raise HTTPError(400, f"more than {BATCH} checks in one batch; send at most {BATCH}")
    checks: list[Check] = parse_json(scope, raw, Checks, f"a list of up to {BATCH} such as [{FORM}]")
    # A name given twice, a null or an escape makes the count of strings differ: then each check is looked at.
    objects: list[msgspec.Raw] = []
    if b"\\" in raw or raw.count(b'"') != 2 * sum(map(_strings, checks)):
        objects = msgspec.json.decode(raw, type=list[msgspec.Raw])
    names = quoted_names(Check)
    await asyncio.sleep(0)
    planned: list[PlannedCheck] = []
    for start in range(0, len(checks), SLICE):
        for i, one in enumerate(checks[start : start + SLICE], start):
            try:
                if objects:
                    refuse_duplicates(bytes(objects[i]), names)
                planned.append(_plan(state, scope, one))
            except HTTPError as error:
                place = f"check {i + 1} of {len(checks)}, $[{i}]"
                raise HTTPError(400, f"{place}: {error.detail}; nothing was spent") from None
        await asyncio.sleep(0)
    found: list[str | HTTPError] = []
    width = REDIS_SLICE if planned and planned[0].rule.take_now is None else SLICE
    for start in range(0, len(planned), width):
        found += await _decide(app, state, planned[start : start + width], charges)
        await asyncio.sleep(0)
    failed = [one for one in found if isinstance(one, HTTPError)]
    if failed and len(failed) == len(found):
        raise failed[0]
    return [_unanswered(planned[i], one.detail) if isinstance(one, HTTPError) else one for i, one in enumerate(found)]


def _strings(one: Check) -> int:
    """The strings in the JSON of a check without nulls: the names of its fields, and the values that are texts."""
    texts = (one.key is not None) + (one.algorithm is not None) + (one.rule is not None)
    return 2 * texts + (one.permits is not None)


def _plan(state: State, scope: Scope, one: Check) -> PlannedCheck:
    rule, key, exempt = resolve_request(state, scope, one.rule, one.algorithm, one.key)
    cost = int(one.permits or 1) * rule.cost
    try:
        check_key(key)
        if not exempt:
            check_permits(cost, rule.capacity)
    except (InvalidKey, InvalidPermits) as error:
        raise responses.bad_check(rule, cost, error) from None
    return PlannedCheck(rule, key, exempt, cost)


async def _decide(app: App, state: State, planned: list[PlannedCheck], charges: list[Charge]) -> list[str | HTTPError]:
    """The answers to a slice; what was spent is added to *charges*.

    Checks of different keys are sent to Redis together, checks of the same key one after the other. A hybrid rule
    decides at once where its lease suffices, unless an earlier check of the same key has to wait.
    """
    answers: list[str | HTTPError] = [""] * len(planned)
    same_key: dict[tuple[int, str], list[int]] = {}
    asked: dict[int, Awaitable[Decision]] = {}
    for i, one in enumerate(planned):
        began = perf_counter_ns()
        if one.exempt:
            answers[i] = str(responses.exempt_response(app, one.rule, one.key, 0)[2])
        elif one.rule.take_now:
            try:
                made = one.rule.take_now(one.key, one.cost)
            except StoreUnavailable as error:
                answers[i] = responses.store_unavailable(app, one.rule, one.key, error)
                continue
            answers[i] = _answer(app, state, one, made, perf_counter_ns() - began, charges)
        else:
            place = id(one.rule), one.key
            if one.rule.take_leased and place not in same_key:
                try:
                    leased = one.rule.take_leased(one.key, one.cost)
                except StoreUnavailable as error:
                    answers[i] = responses.store_unavailable(app, one.rule, one.key, error)
                    continue
                if isinstance(leased, Decision):
                    answers[i] = _answer(app, state, one, leased, perf_counter_ns() - began, charges)
                    continue
                asked[i] = leased
            same_key.setdefault(place, []).append(i)

    async def take(positions: list[int]) -> None:
        for i in positions:
            one, began = planned[i], perf_counter_ns()
            try:
                made = await (asked.pop(i) if i in asked else one.rule.limiter.try_acquire(one.key, one.cost))
            except StoreUnavailable as error:
                answers[i] = responses.store_unavailable(app, one.rule, one.key, error)
                continue
            answers[i] = _answer(app, state, one, made, perf_counter_ns() - began, charges)

    await asyncio.gather(*(take(positions) for positions in same_key.values()))
    return answers


def _answer(app: App, state: State, one: PlannedCheck, made: Decision, nanoseconds: int, charges: list[Charge]) -> str:
    if made.allowed and not made.degraded:
        charges.append((one.rule, one.key, one.cost))
    allowed = responses.record(app, one.rule, one.key, made, nanoseconds)
    return str(responses.decision_response(state, one.rule, responses.as_json(one.key), made, allowed)[2])


def _unanswered(one: PlannedCheck, why: str) -> str:
    """The answer to a check without a decision: it looks like a denial to a client that reads `allowed` alone."""
    rule = one.rule
    answer = Answer(False, one.key, rule.label, rule.capacity, 0, 0, 1, why, unanswered=True)
    if rule.name != "default":
        answer.rule = rule.name
    return msgspec.json.encode(answer).decode()
