"""The messages of Envoy's rate-limit service: Google's implementation of protocol buffers is the twin."""

import math
import random

import pytest
from envoy.extensions.common.ratelimit.v3 import ratelimit_pb2
from envoy.service.ratelimit.v3 import rls_pb2
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from headgate.service.grpc_calls import read_service
from headgate.service.protobuf import MAX_DEPTH, MalformedMessage, varint
from headgate.service.rls_messages import (
    MAX_DESCRIPTORS,
    MAX_ENTRIES,
    MAX_UINT32,
    DescriptorStatus,
    RateLimitRequest,
    RateLimitResponse,
    decode_request,
    encode_response,
)

words = st.text(max_size=20) | st.sampled_from(["", "user", "remote_address", "x" * 300, "\0", "\U0010ffff"])
uint32 = st.sampled_from([0, 1, 127, 128, MAX_UINT32]) | st.integers(0, MAX_UINT32)
uint64 = uint32 | st.integers(0, (1 << 64) - 1)
units = st.integers(0, 7) | st.integers(-(1 << 31), (1 << 31) - 1)

requests = st.builds(
    lambda domain, descriptors, hits: rls_pb2.RateLimitRequest(
        domain=domain, descriptors=descriptors, hits_addend=hits
    ),
    words,
    st.lists(
        st.builds(
            lambda entries, limit, hits: ratelimit_pb2.RateLimitDescriptor(
                entries=[{"key": key, "value": value} for key, value in entries],
                limit=None if limit is None else {"requests_per_unit": limit[0], "unit": limit[1]},
                hits_addend=None if hits is None else {"value": hits},
            ),
            st.lists(st.tuples(words, words), max_size=4),
            st.none() | st.tuples(uint32, units),
            st.none() | uint64,
        ),
        max_size=4,
    ),
    uint32,
)


def assert_same(found: RateLimitRequest, twin: rls_pb2.RateLimitRequest) -> None:
    assert found.domain == twin.domain
    assert found.hits_addend == twin.hits_addend
    assert len(found.descriptors) == len(twin.descriptors)
    for ours, theirs in zip(found.descriptors, twin.descriptors, strict=True):
        assert ours.entries == [(entry.key, entry.value) for entry in theirs.entries]
        limit = (theirs.limit.requests_per_unit, theirs.limit.unit) if theirs.HasField("limit") else None
        assert ours.limit == limit
        assert ours.hits == (theirs.hits_addend.value if theirs.HasField("hits_addend") else None)


@given(requests)
def test_requests(twin: rls_pb2.RateLimitRequest) -> None:
    """A request is read as Google's implementation wrote it."""
    assert_same(decode_request(twin.SerializeToString()), twin)


@given(requests, st.integers(0, 1 << 32))
@example(rls_pb2.RateLimitRequest(domain="a"), 1)
def test_broken_requests(whole: rls_pb2.RateLimitRequest, seed: int) -> None:
    """Of bytes that were changed, both implementations say the same: that they are a message, and which, or none."""
    dice = random.Random(seed)
    for _ in range(50):
        sent = bytearray(whole.SerializeToString())
        for _ in range(dice.randint(1, 4)):
            at = dice.randint(0, len(sent))
            if dice.random() < 0.5 and at < len(sent):
                sent[at] = dice.choice([0, 1, 7, 8, 10, 11, 12, 13, 16, 18, 24, 26, 34, 0x7F, 0x80, 0xFF])
            elif dice.random() < 0.5:
                del sent[at : at + dice.randint(1, 3)]
            else:
                sent[at:at] = dice.randbytes(dice.randint(1, 3))
        raw = bytes(sent)
        try:
            twin = rls_pb2.RateLimitRequest.FromString(raw)
        except DecodeError:
            try:
                ours = decode_request(raw)
            except MalformedMessage:
                continue
            # bytes that are no text: a client must not be able to make an error of them, which Envoy lets pass
            entries = [text for one in ours.descriptors for entry in one.entries for text in entry]
            assert any("\\x" in text for text in entries)
        else:
            assert_same(decode_request(raw), twin)


def test_entries_that_are_no_text() -> None:
    """A value that is not UTF-8, which may be a client's header, is the text of its bytes."""
    request = decode_request(b"\x0a\x01d\x12\x09\x0a\x07\x0a\x01k\x12\x02\xff\xfe")
    assert [one.entries for one in request.descriptors] == [[("k", "\\xff\\xfe")]]


@pytest.mark.parametrize(
    "raw, why",
    [
        (b"\x0a\x05ab", "longer than its message"),
        (b"\x0a\x02\xff\xfe", "not UTF-8"),
        (b"\x18", "within a number"),
        (b"\x18" + b"\xff" * 10, "more than 64 bits"),
        (b"\x00\x00", "no field with the tag 0"),
        (b"\x0f\x00", "does not exist"),
        (b"\x0c", "not begun"),
        (b"\x23" * (MAX_DEPTH + 2), "too deep"),
        (b"\x12\x00" * (MAX_DESCRIPTORS + 1), f"at most {MAX_DESCRIPTORS} descriptors"),
        (b"\x12" + varint(2 * MAX_ENTRIES + 2) + b"\x0a\x00" * (MAX_ENTRIES + 1), f"at most {MAX_ENTRIES} entries"),
    ],
)
def test_errors(raw: bytes, why: str) -> None:
    """A message that cannot be read is refused with the reason."""
    with pytest.raises(MalformedMessage, match=why):
        decode_request(raw)


names = st.text("abc-", min_size=1, max_size=10)
statuses = st.builds(
    DescriptorStatus,
    st.integers(0, 2),
    st.none() | st.tuples(words, uint64, st.integers(0, 7)),
    uint64 | st.integers(-5, -1),
    st.none() | st.floats(0, 1e9),
)


@given(st.integers(0, 2), st.lists(statuses, max_size=5), st.lists(st.tuples(names, words), max_size=3))
def test_responses(overall: int, given_statuses: list[DescriptorStatus], headers: list[tuple[str, str]]) -> None:
    """Google's implementation reads what we wrote; numbers stay within their types, a reset is rounded up."""
    raw = encode_response(RateLimitResponse(overall, given_statuses, headers))
    twin = rls_pb2.RateLimitResponse.FromString(raw)
    assert twin.overall_code == overall
    assert [(one.key, one.value) for one in twin.response_headers_to_add] == headers
    assert len(twin.statuses) == len(given_statuses)
    for ours, theirs in zip(given_statuses, twin.statuses, strict=True):
        assert theirs.code == ours.code
        assert theirs.limit_remaining == max(0, min(ours.remaining, MAX_UINT32))
        assert theirs.HasField("current_limit") == (ours.limit is not None)
        if ours.limit is not None:
            name, number, unit = ours.limit
            limit = theirs.current_limit
            assert (limit.name, limit.requests_per_unit, limit.unit) == (name, min(number, MAX_UINT32), unit)
        assert theirs.HasField("duration_until_reset") == (ours.reset_seconds is not None)
        if ours.reset_seconds is not None:
            assert theirs.duration_until_reset.seconds == math.ceil(ours.reset_seconds)


def test_health_requests() -> None:
    """The service of a health check is read, whatever stands around it."""
    assert read_service(b"") == ""
    assert read_service(b"\x0a\x09ratelimit") == "ratelimit"
    assert read_service(b"\x10\x01\x0a\x01a\x0a\x01b") == "b"
