"""Many checks in one request, each on its own, answered in order.

A bad one among them refuses them all before anything is spent. One that gets no answer, because its rule says `raise`
and the store is down, says so in its place: the others have been spent, and their answers must not be lost.

They are decided in slices, and between two slices others have their turn: a thousand checks at once are no reason to
let everybody else wait. For the same reason only a few batches are decided at a time, and the rest stand in line.
"""

from __future__ import annotations

import asyncio
from time import perf_counter_ns
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from headgate.decision import Decision
from headgate.errors import InvalidKey, InvalidPermits, StoreUnavailable
from headgate.keys import check_key
from headgate.rule import check_permits
from headgate.service.answers import as_shown, count, exempted, refused, reply, unanswered
from headgate.service.body import from_json, refuse_doubled
from headgate.service.checks import FORM
from headgate.service.http import Exchange, Refusal, Reply, Scope
from headgate.service.model import BATCH, Answer, Check, Checks
from headgate.service.query import parse
from headgate.service.rules import Charge, Lane
from headgate.service.subject import find

if TYPE_CHECKING:
    from headgate.service.app import App, State

SLICE = 16  # some hundred microseconds
TRIP = 64  # what one trip to Redis carries
AT_ONCE = 4  # batches in a worker: between two turns of somebody else lies a slice of each; as many trips are under way


QUOTES = 14  # of one check: four names, three texts


def count_objects(raw: bytes) -> int:
    """How many checks a JSON text has, found without making any: a megabyte of `{}` took 100 ms to refuse."""
    count = raw.count(b"{")
    if count <= BATCH:
        return count
    bare = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    quotes = bare.count(b'"')
    if quotes > QUOTES * BATCH:
        return quotes // QUOTES
    return sum(part.count(b"{") for part in bare.split(b'"')[::2])  # those between two quotes belong to keys


class Planned(NamedTuple):
    """A check that may be made."""

    lane: Lane
    key: str
    exempt: bool
    cost: int


async def batch(app: App, scope: Scope, exchange: Exchange) -> Reply | None:
    """Answer a list with a list."""
    state = app.state
    state.tokens.demand("check", scope.headers)
    parse(scope.query_string, frozenset())
    raw = await app.bodies.read(scope, exchange)
    async with app.batches:
        charges: list[Charge] = []
        bodies = await _answers(app, state, scope, raw, charges)
    headers = [("content-type", "application/json"), ("cache-control", "no-store")]
    answers = 200, headers, "[" + ",".join(bodies) + "]"
    if not charges:
        return answers
    await app.delivery.send(scope, exchange, answers, charges)
    return None


async def _answers(app: App, state: State, scope: Scope, raw: bytes, charges: list[Charge]) -> list[str]:
    if count_objects(raw) > BATCH:
        raise Refusal(400, f"more than {BATCH} checks in one batch; send at most {BATCH}")
    checks: list[Check] = from_json(scope, raw, Checks, f"a list of up to {BATCH} such as [{FORM}]")
    objects = msgspec.json.decode(raw, type=list[msgspec.Raw])
    await asyncio.sleep(0)
    planned: list[Planned] = []
    found: list[str | Refusal] = []
    for start in range(0, len(checks), SLICE):
        for i, one in enumerate(checks[start : start + SLICE], start):
            try:
                refuse_doubled(bytes(objects[i]), one.__struct_fields__)
                planned.append(_plan(state, scope, one))
            except Refusal as refusal:
                place = f"check {i + 1} of {len(checks)}, $[{i}]"
                raise Refusal(400, f"{place}: {refusal.detail}; nothing was spent") from None
        await asyncio.sleep(0)
    width = TRIP if planned and planned[0].lane.take is None else SLICE
    for start in range(0, len(planned), width):
        found += await _decide(app, state, planned[start : start + width], charges)
        await asyncio.sleep(0)
    lost = [one for one in found if isinstance(one, Refusal)]
    if lost and len(lost) == len(found):
        raise lost[0]
    return [_without(planned[i], one.detail) if isinstance(one, Refusal) else one for i, one in enumerate(found)]


def _plan(state: State, scope: Scope, one: Check) -> Planned:
    lane, key, exempt = find(state, scope, one.rule, one.algorithm, one.key)
    cost = int(one.permits or 1) * lane.cost
    try:
        check_key(key)
        if not exempt:
            check_permits(cost, lane.capacity)
    except (InvalidKey, InvalidPermits) as error:
        raise refused(lane, cost, error) from None
    return Planned(lane, key, exempt, cost)


async def _decide(app: App, state: State, planned: list[Planned], charges: list[Charge]) -> list[str | Refusal]:
    """The answers to a slice; what was spent is added to *charges*.

    Different keys travel together, checks of the same key are made in order.
    """
    bodies: list[str | Refusal] = [""] * len(planned)
    turns: dict[tuple[int, str], list[int]] = {}
    for i, one in enumerate(planned):
        began = perf_counter_ns()
        if one.exempt:
            bodies[i] = str(exempted(app, one.lane, one.key, 0)[2])
        elif one.lane.take:
            made = one.lane.take(one.key, one.cost)
            bodies[i] = _body(app, state, one, made, perf_counter_ns() - began, charges)
        else:
            turns.setdefault((id(one.lane), one.key), []).append(i)

    async def take(positions: list[int]) -> None:
        for i in positions:
            one, began = planned[i], perf_counter_ns()
            try:
                made = await one.lane.limiter.try_acquire(one.key, one.cost)
            except StoreUnavailable as error:
                bodies[i] = unanswered(app, one.lane, one.key, error)
                continue
            bodies[i] = _body(app, state, one, made, perf_counter_ns() - began, charges)

    await asyncio.gather(*(take(positions) for positions in turns.values()))
    return bodies


def _body(app: App, state: State, one: Planned, made: Decision, nanoseconds: int, charges: list[Charge]) -> str:
    if made.allowed and not made.degraded:
        charges.append((one.lane, one.key, one.cost))
    allowed = count(app, one.lane, one.key, made, nanoseconds)
    return str(reply(state, one.lane, as_shown(one.key), made, allowed)[2])


def _without(one: Planned, why: str) -> str:
    """In the place of an answer that there is none, in the form of a denial: whoever reads no more must not go on."""
    lane = one.lane
    answer = Answer(False, one.key, lane.label, lane.capacity, 0, 0, 1, why, unanswered=True)
    if lane.name != "default":
        answer.rule = lane.name
    return msgspec.json.encode(answer).decode()
