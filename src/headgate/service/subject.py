"""Whose limit a request is about: its lane, its key, and whether it is exempt."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from headgate.errors import InvalidKey
from headgate.keys import check_key
from headgate.service.address import Address
from headgate.service.http import Refusal, Scope
from headgate.service.rules import Lane

if TYPE_CHECKING:
    from headgate.service.app import State


def find(
    state: State, scope: Scope, rule: str | None, algorithm: str | None, given: str | None
) -> tuple[Lane, str, bool]:
    """The lane and the key of a request, and whether it is exempt."""
    lane = state.book.lane(rule, algorithm)
    key = _key(state, scope, lane, given)
    if lane.exempt_keys is not None and lane.is_exempt(key, _address(state, scope)):
        return lane, key, True
    if lane.overrides is not None:
        lane = lane.overrides.get(key, lane)
    return lane, key, False


def forgettable(
    state: State, scope: Scope, rule: str | None, algorithm: str | None, given: str | None
) -> list[tuple[Lane, str]]:
    """What a reset is about, first what its answer shows.

    Under a rule that joins parts, *given* may be the key of a check, with the rest as this client would send it, or a
    key as answers show it. Where it could be either, both are forgotten: a 200 must not have spared the one meant.
    """
    lane = state.book.lane(rule, algorithm)
    parts = len(lane.parts or ())
    keys = [given] if given is not None and (parts == 1 or given.count("|") == parts - 1) else []
    try:
        keys.append(check_key(_key(state, scope, lane, given)))
    except (InvalidKey, Refusal) as error:
        if not keys:
            more = "" if lane.parts is None else "; or give the key as answers show it"
            raise Refusal(400, f"{error}{more}") from None
    return [(lane.overrides.get(key, lane) if lane.overrides else lane, key) for key in dict.fromkeys(keys)]


def _key(state: State, scope: Scope, lane: Lane, given: str | None) -> str:
    if lane.parts is not None:
        return _joined(state, scope, lane, given)
    return state.locator.key(scope.client, scope.headers) if given is None else given


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
