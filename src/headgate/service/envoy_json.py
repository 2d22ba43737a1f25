"""`POST /json`: a call of Envoy's rate-limit service as JSON, for clients without gRPC; as envoyproxy/ratelimit has it.

The JSON is that of protocol buffers: names as `hitsAddend` or `hits_addend`, numbers also as texts, null for what is
left out, units and codes by name. The content type is not looked at: `curl --data` sends that of a form.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from headgate.errors import StoreUnavailable
from headgate.service.envoy_limits import BadRateLimitRequest
from headgate.service.envoy_settings import UNITS
from headgate.service.request import parse_query
from headgate.service.rls_messages import (
    MAX_DESCRIPTORS,
    MAX_ENTRIES,
    MAX_UINT32,
    OVER_LIMIT,
    Descriptor,
    DescriptorStatus,
    Entry,
    RateLimitRequest,
    RateLimitResponse,
)
from headgate.service.rsgi import HTTPError, HTTPProtocol, Response, Scope

if TYPE_CHECKING:
    from headgate.service.app import App

FORM = '{"domain": "shop", "descriptors": [{"entries": [{"key": "tenant", "value": "acme"}]}]}'
MAX_BYTES = 64 * 1024
CODES = ("UNKNOWN", "OK", "OVER_LIMIT")
UNIT_NAMES = {number: name.upper() for name, number in UNITS.items()} | {0: "UNKNOWN"}
UNIT_NUMBERS = {name: number for number, name in UNIT_NAMES.items()}

REQUEST = {"domain": "domain", "descriptors": "descriptors", "hits_addend": "hitsAddend"}
DESCRIPTOR = {"entries": "entries", "limit": "limit", "hits_addend": "hitsAddend"}
ENTRY = {"key": "key", "value": "value"}
LIMIT = {"requests_per_unit": "requestsPerUnit", "unit": "unit"}


async def post(app: App, scope: Scope, protocol: HTTPProtocol) -> Response:
    """Decide a call: 200, or 429 when it is over a limit; both with the response as JSON."""
    state = app.state
    state.tokens.demand("check", scope.headers)
    rules = state.envoy
    if rules is None:
        raise HTTPError(404, "there are no rules for Envoy; name their files in the settings: [envoy] files = [...]")
    parse_query(scope.query_string, frozenset())
    request = parse_request(await app.bodies.read(scope, protocol))
    try:
        response = rules.decide_now(request) or await rules.decide(request, None)
    except BadRateLimitRequest as error:
        raise HTTPError(400, f"{error}; send {FORM}") from None
    except StoreUnavailable:
        raise HTTPError(503, "the store does not answer; try again", ("retry-after", "1")) from None
    headers = [("content-type", "application/json"), ("cache-control", "no-store")]
    headers += [(name.lower(), value) for name, value in response.headers]
    return 429 if response.overall == OVER_LIMIT else 200, headers, json.dumps(response_json(response))


def parse_request(raw: bytes) -> RateLimitRequest:
    """The call in the body of a request; raises `HTTPError`."""
    if len(raw) > MAX_BYTES:
        raise HTTPError(413, f"the body is {len(raw)} bytes, at most {MAX_BYTES} are read")
    try:
        found = json.loads(raw, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except RecursionError:
        raise HTTPError(400, f"the body is nested too deeply; send {FORM}") from None
    except ValueError as error:
        raise HTTPError(400, f"cannot read the body: {error}; send {FORM}") from None
    fields = _fields(found, REQUEST, "the body")
    descriptors = [_descriptor(one, i) for i, one in enumerate(_list(fields, "descriptors", "", MAX_DESCRIPTORS))]
    return RateLimitRequest(
        _text(fields, "domain", ""), descriptors, _number(fields, "hits_addend", "", MAX_UINT32) or 0
    )


def response_json(response: RateLimitResponse) -> dict[str, Any]:
    """*response* as JSON; what is 0 or empty is left out, as protocol buffers do."""
    found: dict[str, Any] = {"overallCode": CODES[response.overall]}
    found["statuses"] = [_status_json(one) for one in response.statuses]
    if response.headers:
        found["responseHeadersToAdd"] = [{"key": name, "value": value} for name, value in response.headers]
    return found


def _status_json(one: DescriptorStatus) -> dict[str, Any]:
    found: dict[str, Any] = {"code": CODES[one.code]}
    if one.limit is not None:
        name, requests, unit = one.limit
        limit = {"name": name, "requestsPerUnit": requests, "unit": UNIT_NAMES[unit] if unit else ""}
        found["currentLimit"] = {field: value for field, value in limit.items() if value}
    if one.remaining:
        found["limitRemaining"] = one.remaining
    if one.reset_seconds is not None:
        found["durationUntilReset"] = f"{one.reset_seconds:.0f}s"
    return found


def _descriptor(given: Any, i: int) -> Descriptor:
    place = f"descriptors[{i}]"
    fields = _fields(given, DESCRIPTOR, place)
    entries: list[Entry] = []
    for j, one in enumerate(_list(fields, "entries", place, MAX_ENTRIES)):
        entry = _fields(one, ENTRY, f"{place}.entries[{j}]")
        entries.append((_text(entry, "key", f"{place}.entries[{j}]"), _text(entry, "value", f"{place}.entries[{j}]")))
    limit = None
    if fields.get("limit") is not None:
        inner = _fields(fields["limit"], LIMIT, f"{place}.limit")
        limit = _number(inner, "requests_per_unit", f"{place}.limit", MAX_UINT32) or 0, _unit(inner, f"{place}.limit")
    return Descriptor(entries, limit, _number(fields, "hits_addend", place, (1 << 64) - 1))


def _unit(fields: dict[str, Any], place: str) -> int:
    unit = fields.get("unit")
    if isinstance(unit, str) and unit in UNIT_NUMBERS:
        return UNIT_NUMBERS[unit]
    if unit is None or (isinstance(unit, int) and not isinstance(unit, bool)):
        return unit or 0
    raise HTTPError(400, f"{place}.unit is one of {', '.join(UNIT_NUMBERS)}, got {unit!r:.40}")


def _fields(given: Any, known: dict[str, str], place: str) -> dict[str, Any]:
    """The fields of an object under the names of the protocol; each may be written in two ways, and given once."""
    if not isinstance(given, dict):
        raise HTTPError(400, f"{place} is a JSON object; send {FORM}")
    names = {spelling: name for name, camel in known.items() for spelling in (name, camel)}
    found: dict[str, Any] = {}
    for spelling, value in given.items():
        name = names.get(spelling)
        if name is None:
            raise HTTPError(400, f"{place} has no field {spelling!r:.60}; known are {', '.join(known.values())}")
        if name in found:
            raise HTTPError(400, f"{place} has {name} in two spellings; give it once")
        found[name] = value
    return found


def _list(fields: dict[str, Any], name: str, place: str, most: int) -> list[Any]:
    found = fields.get(name)
    where = f"{place}.{name}" if place else name
    if found is None:
        return []
    if not isinstance(found, list):
        raise HTTPError(400, f"{where} is a list; send {FORM}")
    if len(found) > most:
        raise HTTPError(400, f"{where} has {len(found)} items; at most {most} are read")
    return found


def _text(fields: dict[str, Any], name: str, place: str) -> str:
    found = fields.get(name)
    where = f"{place}.{name}" if place else name
    if found is None:
        return ""
    if not isinstance(found, str):
        raise HTTPError(400, f"{where} is a text, got {found!r:.40}")
    try:
        found.encode()
    except UnicodeEncodeError:
        raise HTTPError(400, f"{where} has a lone surrogate, so it is no text") from None
    return found


def _number(fields: dict[str, Any], name: str, place: str, most: int) -> int | None:
    """A whole number, which may be written as a text; None if it is left out."""
    found = fields.get(name)
    if found is None:
        return None
    number = found
    if isinstance(found, str) and found.isascii() and found.isdecimal() and len(found) <= 20:
        number = int(found)
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= most:
        where = f"{place}.{name}" if place else name
        raise HTTPError(400, f"{where} is a whole number from 0 to {most}, got {found!r:.40}")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a field is given twice")
    return found


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")
