"""The messages of Envoy's rate-limit service v3: envoy.service.ratelimit.v3.RateLimitRequest and RateLimitResponse.

Only the fields that the service uses; the numbers are those of Envoy's rls.proto and ratelimit.proto.

    RateLimitRequest      domain 1, descriptors 2, hits_addend 3
    RateLimitDescriptor   entries 1 (key 1, value 2), limit 2 (requests_per_unit 1, unit 2), hits_addend 3 (value 1)
    RateLimitResponse     overall_code 1, statuses 2, response_headers_to_add 3 (key 1, value 2)
    DescriptorStatus      code 1, current_limit 2 (requests_per_unit 1, unit 2, name 3), limit_remaining 3,
                          duration_until_reset 4 (seconds 1)

A unit is its number in Envoy's enums: 1 second, 2 minute, 3 hour, 4 day, 5 month, 6 year, 7 week.
"""

from __future__ import annotations

from typing import Final

from headgate.service.protobuf import (
    MalformedMessage,
    message,
    number,
    read_size,
    read_tag,
    read_text,
    read_texts,
    read_varint,
    skip,
    text,
)

Entry = tuple[str, str]

UNKNOWN: Final = 0
OK: Final = 1
OVER_LIMIT: Final = 2

MAX_DESCRIPTORS: Final = 128  # of a request
MAX_ENTRIES: Final = 64  # of a descriptor
MAX_UINT32: Final = 0xFFFFFFFF

# Tags: the number of a field, and its wire type in the lowest three bits.
_NUMBER_1: Final = 0x08
_NUMBER_2: Final = 0x10
_NUMBER_3: Final = 0x18
_BYTES_1: Final = 0x0A
_BYTES_2: Final = 0x12
_BYTES_3: Final = 0x1A
_BYTES_4: Final = 0x22


class Descriptor:
    """What is to be limited. *limit* is an override, requests_per_unit and unit; *hits* replaces the request's."""

    __slots__ = ("entries", "hits", "limit")

    def __init__(self, entries: list[Entry], limit: tuple[int, int] | None = None, hits: int | None = None) -> None:
        self.entries = entries
        self.limit = limit
        self.hits = hits


class RateLimitRequest:
    """One call: its domain, its descriptors, and the hits of each (0: not said)."""

    __slots__ = ("descriptors", "domain", "hits_addend")

    def __init__(self, domain: str, descriptors: list[Descriptor], hits_addend: int = 0) -> None:
        self.domain = domain
        self.descriptors = descriptors
        self.hits_addend = hits_addend


class DescriptorStatus:
    """The answer to a descriptor; *limit* is name, requests_per_unit and unit of the limit that decided."""

    __slots__ = ("code", "limit", "remaining", "reset_seconds")

    def __init__(
        self,
        code: int,
        limit: tuple[str, int, int] | None = None,
        remaining: int = 0,
        reset_seconds: float | None = None,
    ) -> None:
        self.code = code
        self.limit = limit
        self.remaining = remaining
        self.reset_seconds = reset_seconds


class RateLimitResponse:
    """The answer to a call; *headers* are added to the response that the proxy sends."""

    __slots__ = ("headers", "overall", "statuses")

    def __init__(
        self, overall: int, statuses: list[DescriptorStatus], headers: list[tuple[str, str]] | None = None
    ) -> None:
        self.overall = overall
        self.statuses = statuses
        self.headers: list[tuple[str, str]] = [] if headers is None else headers


def decode_request(data: bytes) -> RateLimitRequest:
    """The request in *data*; `MalformedMessage` says why there is none."""
    domain = ""
    hits = 0
    descriptors: list[Descriptor] = []
    at = 0
    end = len(data)
    while at < end:
        tag, at = read_tag(data, at, end)
        if tag == _BYTES_2:
            stop, at = read_size(data, at, end)
            descriptors.append(_descriptor(data, at, stop))
            at = stop
        elif tag == _BYTES_1:
            domain, at = read_text(data, at, end)
        elif tag == _NUMBER_3:
            hits, at = read_varint(data, at, end)
        else:
            at = skip(data, at, end, tag)
    if len(descriptors) > MAX_DESCRIPTORS:
        raise MalformedMessage(f"a request has at most {MAX_DESCRIPTORS} descriptors")
    return RateLimitRequest(domain, descriptors, hits & MAX_UINT32)


def _descriptor(data: bytes, at: int, end: int) -> Descriptor:
    entries: list[Entry] = []
    limit: tuple[int, int] | None = None
    hits: int | None = None
    while at < end:
        tag, at = read_tag(data, at, end)
        if tag not in (_BYTES_1, _BYTES_2, _BYTES_3):
            at = skip(data, at, end, tag)
            continue
        stop, at = read_size(data, at, end)
        if tag == _BYTES_1:
            entries.append(read_texts(data, at, stop))
        elif tag == _BYTES_2:
            limit = _limit(data, at, stop, (0, 0) if limit is None else limit)
        else:
            hits = _wrapped(data, at, stop, 0 if hits is None else hits)
        at = stop
    if len(entries) > MAX_ENTRIES:
        raise MalformedMessage(f"a descriptor has at most {MAX_ENTRIES} entries")
    return Descriptor(entries, limit, hits)


def _limit(data: bytes, at: int, end: int, before: tuple[int, int]) -> tuple[int, int]:
    """An override; a message that comes twice is merged, so *before* is what the first one said."""
    requests, unit = before
    while at < end:
        tag, at = read_tag(data, at, end)
        if tag == _NUMBER_1:
            requests, at = read_varint(data, at, end)
            requests &= MAX_UINT32
        elif tag == _NUMBER_2:
            unit, at = read_varint(data, at, end)
            unit &= MAX_UINT32
            if unit > 0x7FFFFFFF:
                unit -= 1 << 32
        else:
            at = skip(data, at, end, tag)
    return requests, unit


def _wrapped(data: bytes, at: int, end: int, value: int) -> int:
    """The number in a google.protobuf.UInt64Value."""
    while at < end:
        tag, at = read_tag(data, at, end)
        if tag == _NUMBER_1:
            value, at = read_varint(data, at, end)
        else:
            at = skip(data, at, end, tag)
    return value


def encode_response(response: RateLimitResponse) -> bytes:
    """The bytes of *response*. A reset is in whole seconds, rounded up: Envoy drops fractions in its headers."""
    out = number(_NUMBER_1, response.overall)
    for status in response.statuses:
        out += message(_BYTES_2, _status(status))
    for name, value in response.headers:
        out += message(_BYTES_3, text(_BYTES_1, name) + text(_BYTES_2, value))
    return out


def _status(status: DescriptorStatus) -> bytes:
    out = number(_NUMBER_1, status.code)
    limit = status.limit
    if limit is not None:
        name, requests, unit = limit
        body = number(_NUMBER_1, min(requests, MAX_UINT32)) + number(_NUMBER_2, unit) + text(_BYTES_3, name)
        out += message(_BYTES_2, body)
    out += number(_NUMBER_3, max(0, min(status.remaining, MAX_UINT32)))
    reset = status.reset_seconds
    if reset is not None:
        whole = int(reset)
        if whole < reset:
            whole += 1
        out += message(_BYTES_4, number(_NUMBER_1, whole))
    return out
