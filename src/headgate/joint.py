"""Several limiters and keys at once: all allow, or nothing is spent.

    decisions = try_acquire_all([JointCheck(per_address, "192.0.2.7"), JointCheck(per_user, "user:123", permits=2)])
    if all(decisions):
        ...

Limiters on one store that can (memory, Redis) are decided in one atomic step of it. Otherwise there are several steps:
the checks of each step are taken in order, and given back if a later one refuses. The steps are a plan (see
`headgate._plan`), which `try_acquire_all` runs for threads and `try_acquire_all_async` for asyncio.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from headgate._plan import arun, run
from headgate.decision import Decision
from headgate.errors import StoreUnavailable
from headgate.keys import check_key
from headgate.limiter import AsyncLimiter, Limiter
from headgate.rule import check_permits
from headgate.stores.base import StoreCheck

AnyLimiter = TypeVar("AnyLimiter", bound=Limiter | AsyncLimiter, covariant=True)


class JointCheck(NamedTuple, Generic[AnyLimiter]):
    """What is asked of one limiter: a `Limiter` for `try_acquire_all`, an `AsyncLimiter` for its async twin.

    Attributes:
        limiter: the limiter that is asked
        key: whose permits are spent
        permits: how many
    """

    limiter: AnyLimiter
    key: str
    permits: int = 1


def try_acquire_all(checks: Sequence[JointCheck[Limiter]]) -> list[Decision]:
    """Spend all *checks* or none; a decision for each, in order, and all of them are true if and only if it was spent.

    When nothing is spent, the limiters that refuse say so, and the others report their state as it is. Checks of one
    limiter and key add up. One round trip if all limiters are on one Redis; docs/redis.md says what holds elsewhere.

    Args:
        checks: what to ask of each limiter
    """
    store, asked = _joint_store(checks, Limiter)
    if len(checks) < 2:
        return [check.limiter.try_acquire(check.key, check.permits) for check in checks]
    if store is not None:
        decisions: list[Decision] = store.take_all(asked)
        return decisions
    return run(_take_in_steps(checks), _answer)


async def try_acquire_all_async(checks: Sequence[JointCheck[AsyncLimiter]]) -> list[Decision]:
    """The same for limiters of asyncio. A task that is cancelled loses no permits.

    Args:
        checks: what to ask of each limiter
    """
    store, asked = _joint_store(checks, AsyncLimiter)
    if len(checks) < 2:
        return [await check.limiter.try_acquire(check.key, check.permits) for check in checks]
    if store is not None:
        decisions: list[Decision] = await store.take_all_async(asked)
        return decisions
    return await arun(_take_in_steps(checks), _answer_async)


def _joint_store(
    checks: Sequence[JointCheck[Any]], kind: type[Limiter | AsyncLimiter]
) -> tuple[Any, list[StoreCheck[Any]]]:
    """The store of all *checks* if it decides them in one step, else None; and what it is asked."""
    store: Any = checks[0].limiter.store if checks else None
    asked: list[StoreCheck[Any]] = []
    for limiter, key, permits in checks:
        if not isinstance(limiter, kind):
            other = "try_acquire_all_async" if kind is Limiter else "try_acquire_all"
            raise TypeError(f"this takes checks of {kind.__name__}, got {limiter!r:.80}; for others there is {other}")
        if limiter.store is not store:
            store = None
        asked.append((limiter._backend, key, permits))
    return (store if hasattr(store, "take_all") and not store.partitioned else None), asked


def refund_degraded(limiter: Limiter | AsyncLimiter, key: str, permits: int) -> None:
    """Give back what `on_store_error` granted: the store may not have spent it, so it gives nothing back."""
    fallback = getattr(limiter._backend, "fallback", None)
    if fallback is not None:
        fallback.refund(key, permits)  # to the limiter of `local`, or from what it owes the store


# ------------------------------------------------------------------------------------------------- in several steps


class Look(NamedTuple):
    """A request: peek at all of these."""

    checks: list[JointCheck[Any]]


class Take(NamedTuple):
    """A request: take all of these in one step, or none."""

    checks: list[JointCheck[Any]]


class GiveBack(NamedTuple):
    """A request: give back what was taken by these checks, with these decisions."""

    taken: dict[JointCheck[Any], Decision]


Request = Look | Take | GiveBack


def _take_in_steps(checks: Sequence[JointCheck[Any]]) -> Generator[Request, Any, list[Decision]]:
    unique, places = _added_up(checks)
    made: dict[JointCheck[Any], Decision] = {}
    if not _partitions_of_one_store(unique):
        made = yield from _look(unique)  # most refusals are seen here, and disturb no other caller
    if not all(made.values()):
        made |= yield from _look([check for check, decision in made.items() if decision], permits=0)
    else:
        made = yield from _take(_steps(unique))
    return [made[unique[place]] for place in places]


def _take(steps: list[list[JointCheck[Any]]]) -> Generator[Request, Any, dict[JointCheck[Any], Decision]]:
    """Take in order; give back if a step refuses, and then look at those that do not."""
    taken: dict[JointCheck[Any], Decision] = {}
    for number, step in enumerate(steps):
        try:
            decisions = yield Take(step)
        except BaseException:
            try:
                yield GiveBack(taken)
            except StoreUnavailable:
                pass  # the first error is the one to raise
            raise
        made = dict(zip(step, decisions, strict=True))
        if not all(decisions):
            yield GiveBack(taken)
            later = yield from _look([check for step in steps[number + 1 :] for check in step])
            idle = yield from _look([*taken, *[check for check, decision in later.items() if decision]], permits=0)
            return made | later | idle
        taken |= made
    return taken


def _look(
    checks: list[JointCheck[Any]], permits: int | None = None
) -> Generator[Request, Any, dict[JointCheck[Any], Decision]]:
    if not checks:
        return {}
    asked = checks if permits is None else [check._replace(permits=permits) for check in checks]
    decisions = yield Look(asked)
    return dict(zip(checks, decisions, strict=True))


def _for_store(checks: Sequence[JointCheck[Any]]) -> list[StoreCheck[Any]]:
    return [(limiter._backend, key, permits) for limiter, key, permits in checks]


def _added_up(checks: Sequence[JointCheck[Any]]) -> tuple[list[JointCheck[Any]], list[int]]:
    """The checks, those of one limiter and key as one, and the place of each; raises if an argument is wrong."""
    unique: list[JointCheck[Any]] = []
    places: list[int] = []
    known: dict[tuple[object, str], int] = {}
    for limiter, key, permits in checks:
        key, permits = check_key(key), check_permits(permits)
        place = known.setdefault((limiter._backend, key), len(unique))
        if place == len(unique):
            unique.append(JointCheck(limiter, key, 0))
        total = check_permits(unique[place].permits + permits, limiter.rule.capacity)
        unique[place] = unique[place]._replace(permits=total)
        places.append(place)
    return unique, places


def _partitions_of_one_store(checks: Sequence[JointCheck[Any]]) -> bool:
    return hasattr(checks[0].limiter.store, "take_all") and len({id(check.limiter.store) for check in checks}) == 1


def _steps(checks: Sequence[JointCheck[Any]]) -> list[list[JointCheck[Any]]]:
    """The checks by what decides them together: a store, a partition of one, or else each alone."""
    steps: dict[object, list[JointCheck[Any]]] = {}
    for check in checks:
        store = check.limiter.store
        if not hasattr(store, "take_all"):
            together: object = check
        elif store.partitioned:
            together = (id(store), store.partition(check.key))
        else:
            together = id(store)
        steps.setdefault(together, []).append(check)
    return list(steps.values())


def _answer(request: Request) -> Any:
    """Do what the plan requests, for threads."""
    if isinstance(request, Look):
        return [check.limiter.peek(check.key, check.permits) for check in request.checks]
    if isinstance(request, Take):
        if len(request.checks) == 1:
            [check] = request.checks
            return [check.limiter.try_acquire(check.key, check.permits)]
        return request.checks[0].limiter.store.take_all(_for_store(request.checks))
    failed = None
    for limiter, key, permits in _spent(request.taken):
        try:
            limiter.refund(key, permits)
        except StoreUnavailable as error:
            failed = failed or error
    if failed:
        raise failed
    return None


async def _answer_async(request: Request) -> Any:
    """The same for asyncio."""
    if isinstance(request, Look):
        return await asyncio.gather(*[check.limiter.peek(check.key, check.permits) for check in request.checks])
    if isinstance(request, Take):
        if len(request.checks) == 1:
            [check] = request.checks
            return [await check.limiter.try_acquire(check.key, check.permits)]
        return await request.checks[0].limiter.store.take_all_async(_for_store(request.checks))
    refunds = [limiter.refund(key, permits) for limiter, key, permits in _spent(request.taken)]
    # shielded: a task may be cancelled a second time while it gives back
    for result in await asyncio.shield(asyncio.gather(*refunds, return_exceptions=True)):
        if isinstance(result, BaseException):
            raise result
    return None


def _spent(taken: dict[JointCheck[Any], Decision]) -> list[JointCheck[Any]]:
    """The checks whose permits a store has; what a policy granted in an outage is given back here."""
    for (limiter, key, permits), decision in taken.items():
        if decision.degraded:
            refund_degraded(limiter, key, permits)
    return [check for check, decision in taken.items() if not decision.degraded]
