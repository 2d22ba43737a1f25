"""Compressed headers: the examples of RFC 7541, another implementation as a twin, and what must be refused."""

import hpack as other
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.service.http2.frames import COMPRESSION_ERROR, ENHANCE_YOUR_CALM, Http2Error
from headgate.service.http2.hpack import (
    HARD_HEADER_LIST,
    MAX_HEADER_LIST,
    STATIC,
    TABLE_SIZE,
    HeaderDecoder,
    encode,
    read_integer,
    write_integer,
)
from headgate.service.http2.request_head import (
    BAD_TIMEOUT,
    MAX_HEADS,
    NO_TIMEOUT,
    RequestHeads,
    make_head,
    parse_timeout,
)

GET = [(":method", "GET"), (":scheme", "http"), (":path", "/"), (":authority", "www.example.com")]
NO_CACHE = [*GET, ("cache-control", "no-cache")]
CUSTOM = [
    (":method", "GET"),
    (":scheme", "https"),
    (":path", "/index.html"),
    (":authority", "www.example.com"),
    ("custom-key", "custom-value"),
]
DATE = "Mon, 21 Oct 2013 20:13:21 GMT"
LATER = "Mon, 21 Oct 2013 20:13:22 GMT"
AT = ("location", "https://www.example.com")
MOVED = [(":status", "302"), ("cache-control", "private"), ("date", DATE), AT]
COOKIE = "foo=ASDJKHQKBZXOQWEOPIUAXQWEOIU; max-age=3600; version=1"
SET = [
    (":status", "200"),
    ("cache-control", "private"),
    ("date", LATER),
    AT,
    ("content-encoding", "gzip"),
    ("set-cookie", COOKIE),
]

# RFC 7541, appendix C: blocks of one connection, their fields, and the size of the table afterwards.
EXAMPLES = {
    "C.2.1": [("400a637573746f6d2d6b65790d637573746f6d2d686561646572", [("custom-key", "custom-header")], 55)],
    "C.2.2": [("040c2f73616d706c652f70617468", [(":path", "/sample/path")], 0)],
    "C.2.3": [("100870617373776f726406736563726574", [("password", "secret")], 0)],
    "C.2.4": [("82", [(":method", "GET")], 0)],
    "C.3": [
        ("828684410f7777772e6578616d706c652e636f6d", GET, 57),
        ("828684be58086e6f2d6361636865", NO_CACHE, 110),
        ("828785bf400a637573746f6d2d6b65790c637573746f6d2d76616c7565", CUSTOM, 164),
    ],
    "C.4": [
        ("828684418cf1e3c2e5f23a6ba0ab90f4ff", GET, 57),
        ("828684be5886a8eb10649cbf", NO_CACHE, 110),
        ("828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf", CUSTOM, 164),
    ],
    "C.5": [  # with a table of 256 bytes, which the first three bytes ask for
        (
            "3fe101" + "4803333032580770726976617465611d4d6f6e2c203231204f637420323031332032303a31333a323120474d54"
            "6e1768747470733a2f2f7777772e6578616d706c652e636f6d",
            MOVED,
            222,
        ),
        ("4803333037c1c0bf", [(":status", "307"), *MOVED[1:]], 222),
        (
            (
                "88c1611d4d6f6e2c203231204f637420323031332032303a31333a323220474d54c05a04677a69707738666f6f3d4153444a4b48"
                "514b425a584f5157454f50495541585157454f49553b206d61782d6167653d333630303b2076657273696f6e3d31"
            ),
            SET,
            215,
        ),
    ],
    "C.6": [
        (
            "3fe101" + "488264025885aec3771a4b6196d07abe941054d444a8200595040b8166e082a62d1bff"
            "6e919d29ad171863c78f0b97c8e9ae82ae43d3",
            MOVED,
            222,
        ),
        ("4883640effc1c0bf", [(":status", "307"), *MOVED[1:]], 222),
        (
            (
                "88c16196d07abe941054d444a8200595040b8166e084a62d1bffc05a839bd9ab77ad94e7821dd7f2e6c7b335dfdfcd5b3960"
                "d5af27087f3672c1ab270fb5291f9587316065c003ed4ee5b1063d5007"
            ),
            SET,
            215,
        ),
    ],
}

REFUSED = {
    "index 0": "80",
    "an index beyond the table": "be",
    "a name beyond the table": "7f00",
    "a number that does not end": "ff",
    "a number that is too large": "ffffffffff0f",
    "a text that does not end": "40056162",
    "a text that is not there": "4001",
    "a table larger than was agreed": "3fe21f",
    "a table size behind a header": "8220",
    "EOS in a text": "00016184ffffffff",
    "padding of eight bits": "00016181ff",
    "padding with zeros": "0001618118",
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name: str) -> None:
    """The examples of the RFC decode to what it says, and leave the table that it says."""
    decoder = HeaderDecoder()
    for block, fields, size in EXAMPLES[name]:
        assert decoder.decode(bytes.fromhex(block)) == fields
        assert decoder.table_size() == size


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """A block that means nothing ends the connection with COMPRESSION_ERROR."""
    with pytest.raises(Http2Error) as raised:
        HeaderDecoder().decode(bytes.fromhex(REFUSED[name]))
    assert raised.value.code == COMPRESSION_ERROR


fields = st.lists(
    st.tuples(
        st.sampled_from([name for name, _ in STATIC]) | st.text("abcxyz-", min_size=1, max_size=40),
        st.sampled_from([value for _, value in STATIC])
        | st.binary(max_size=300).map(lambda raw: raw.decode("latin-1")),
    ),
    max_size=12,
)
blocks = st.lists(st.tuples(fields, st.booleans(), st.none() | st.integers(0, TABLE_SIZE)), max_size=12)


@given(blocks)
def test_twin(sent: list[tuple[list[tuple[str, str]], bool, int | None]]) -> None:
    """What another implementation encodes, Huffman, table and its sizes, decodes to the same."""
    encoder, decoder = other.Encoder(), HeaderDecoder()
    for given_fields, huffman, size in sent:
        if size is not None:
            encoder.header_table_size = size
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in given_fields]
        assert decoder.decode(encoder.encode(raw, huffman=huffman)) == given_fields
        assert decoder.table_size() <= TABLE_SIZE


@given(fields)
def test_encoder(given_fields: list[tuple[str, str]]) -> None:
    """What we encode, another implementation decodes, and its table stays empty."""
    decoder = other.Decoder()
    block = encode(given_fields)
    decoded = decoder.decode(block, raw=True)
    assert [(name.decode("latin-1"), value.decode("latin-1")) for name, value in decoded] == given_fields
    assert len(decoder.header_table.dynamic_entries) == 0


@given(st.integers(0, 1 << 24), st.sampled_from([0x0F, 0x1F, 0x3F, 0x7F]))
def test_integers(value: int, mask: int) -> None:
    """A number comes back as it was written."""
    raw = write_integer(value, mask, 0)
    assert read_integer(raw, 0, len(raw), mask) == (value, len(raw))


def test_bomb() -> None:
    """A block of bytes that each stand for kilobytes is not unpacked beyond a bound."""
    decoder = HeaderDecoder()
    decoder.decode(encode_with_table("x", "v" * 4000))
    kept = decoder.decode(b"\xbe" * 10)
    assert decoder.oversized and sum(len(value) for _, value in kept) <= MAX_HEADER_LIST
    with pytest.raises(Http2Error) as raised:
        decoder.decode(b"\xbe" * 16_000)
    assert raised.value.code == ENHANCE_YOUR_CALM
    assert decoder.fields_read <= HARD_HEADER_LIST // 4000 + 1


def encode_with_table(name: str, value: str) -> bytes:
    """One field that goes into the table."""
    raw = b"\x40" + write_integer(len(name), 0x7F, 0) + name.encode()
    return raw + write_integer(len(value), 0x7F, 0) + value.encode()


WELL = [(":method", "POST"), (":scheme", "http"), (":path", "/a")]

MALFORMED = {
    "no method": WELL[1:],
    "no scheme": [WELL[0], WELL[2]],
    "no path": WELL[:2],
    "an empty path": [*WELL[:2], (":path", "")],
    "a method twice": [WELL[0], *WELL],
    "a pseudo-header of responses": [*WELL, (":status", "200")],
    "a pseudo-header behind others": [("a", "b"), *WELL],
    "capitals": [*WELL, ("X-Upper", "a")],
    "a name with a colon": [*WELL, ("a:b", "a")],
    "an empty name": [*WELL, ("", "a")],
    "a name with a space": [*WELL, ("a b", "a")],
    "a line break": [*WELL, ("a", "b\r\nc: d")],
    "space before a value": [*WELL, ("a", " b")],
    "connection": [*WELL, ("connection", "close")],
    "transfer-encoding": [*WELL, ("transfer-encoding", "chunked")],
    "te": [*WELL, ("te", "gzip")],
    "two lengths": [*WELL, ("content-length", "1"), ("content-length", "2")],
    "a length that is none": [*WELL, ("content-length", "-1")],
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_heads(name: str) -> None:
    """A head that RFC 9113 calls malformed is; nothing else is."""
    assert make_head(MALFORMED[name]).malformed
    assert not make_head([*WELL, ("te", "trailers"), ("a", "b\tc"), ("user-agent", "grpc/é")]).malformed


def test_two_tokens() -> None:
    """A header that comes twice is not the first, nor the second: no proxy can smuggle a token past another."""
    head = make_head([*WELL, ("authorization", "Bearer a"), ("authorization", "Bearer b"), ("grpc-timeout", "1S")])
    assert head.authorization == "Bearer a,Bearer b"
    assert make_head([*WELL, ("grpc-timeout", "1S"), ("grpc-timeout", "1S")]).timeout == BAD_TIMEOUT
    assert make_head(WELL).timeout == NO_TIMEOUT


@pytest.mark.parametrize(
    "text, seconds",
    [("20m", 0.02), ("1H", 3600.0), ("2M", 120.0), ("3S", 3.0), ("5u", 5e-6), ("7n", 7e-9), ("99999999S", 99999999.0)]
    + [(text, BAD_TIMEOUT) for text in ("", "1", "S", "-1S", "1s", "123456789S", "1.5S", "١S")],
)
def test_timeouts(text: str, seconds: float) -> None:
    """grpc-timeout is read as gRPC writes it, and nothing else is."""
    assert parse_timeout(text) == pytest.approx(seconds)


def test_remembered_heads() -> None:
    """A block that came before is not decoded again, unless the table has changed, which changes what it means."""
    heads = RequestHeads()
    start = b"\x83\x86"  # POST, http
    heads.read(start + encode_with_table(":path", "/a"))
    first = heads.read(start + b"\xbe")
    assert first.path == "/a" and heads.work == 3
    assert heads.read(start + b"\xbe") is first and heads.work == 0
    heads.read(start + encode_with_table(":path", "/b"))
    assert heads.read(start + b"\xbe").path == "/b"
    for i in range(3 * MAX_HEADS):
        heads.read(encode([*WELL, ("n", str(i))]))
    assert heads.remembered() <= MAX_HEADS
