"""The HTTP/2 core without sockets: what RFC 9113 calls an error, flow control, draining, and what does not go on."""

import pytest

from headgate.service.http2.connection import CONNECTION_WINDOW, MAX_BUFFERED, MAX_HEADER_BLOCK, MAX_STREAMS
from headgate.service.http2.frames import (
    ACK,
    CANCEL,
    COMPRESSION_ERROR,
    CONTINUATION,
    DATA,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_FRAME,
    MAX_STREAM_ID,
    MAX_WINDOW,
    NO_ERROR,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    REFUSED_STREAM,
    RST_STREAM,
    SETTINGS,
    STREAM_CLOSED,
    WINDOW_UPDATE,
    WITH_PRIORITY,
    frame,
    settings,
)
from headgate.service.http2.hpack import encode
from headgate.service.http2.output import DRAIN_PING, DRAIN_TICKS, STALLED_TICKS
from tests.support.http2 import BLOCK, EMPTY_SETTINGS, POST, Talk, data, goaways, headers, resets, responses

OPEN = headers(1, END_HEADERS)  # a request without its body
ON_ITSELF = (1).to_bytes(4, "big") + b"\x10"
UPDATE = (1).to_bytes(4, "big")
TOO_MUCH = MAX_WINDOW.to_bytes(4, "big")

# What the peer sends after its greeting, and what the connection is closed with.
CONNECTION_ERRORS = {
    "a frame that is too large": (DATA.to_bytes(1, "big") + b"\x40\x01" + bytes(6), FRAME_SIZE_ERROR),
    "DATA on stream 0": (data(0, b"x"), PROTOCOL_ERROR),
    "DATA on an idle stream": (data(1, b"x"), PROTOCOL_ERROR),
    "DATA on a closed stream": (headers(1) + data(1, b"x"), STREAM_CLOSED),
    "DATA after its reset": (OPEN + frame(RST_STREAM, 0, 1, bytes(4)) + data(1, b"x"), STREAM_CLOSED),
    "DATA with too much padding": (OPEN + frame(DATA, PADDED, 1, b"\x05abcd"), PROTOCOL_ERROR),
    "DATA without its padding length": (OPEN + frame(DATA, PADDED, 1, b""), FRAME_SIZE_ERROR),
    "HEADERS on stream 0": (headers(0), PROTOCOL_ERROR),
    "HEADERS on an even stream": (headers(2), PROTOCOL_ERROR),
    "HEADERS on a closed stream": (headers(1) + headers(1), STREAM_CLOSED),
    "HEADERS on a stream that was skipped": (headers(5) + headers(3), STREAM_CLOSED),
    "HEADERS with too much padding": (headers(1, 0xD, b"\xff" + BLOCK), PROTOCOL_ERROR),
    "HEADERS without its padding length": (headers(1, 0xD, b""), FRAME_SIZE_ERROR),
    "HEADERS without its whole priority": (headers(1, WITH_PRIORITY | 5, b"abcd"), FRAME_SIZE_ERROR),
    "HEADERS that depends on itself": (headers(1, WITH_PRIORITY | 5, ON_ITSELF + BLOCK), PROTOCOL_ERROR),
    "HEADERS that cannot be decoded": (headers(1, 5, b"\x80"), COMPRESSION_ERROR),
    "another frame within a block": (headers(1, 1, BLOCK[:3]) + frame(PING, 0, 0, bytes(8)), PROTOCOL_ERROR),
    "an unknown frame within a block": (headers(1, 1, BLOCK[:3]) + frame(0xEE, 0, 0, b""), PROTOCOL_ERROR),
    "CONTINUATION of another stream": (headers(1, 1, b"") + frame(CONTINUATION, 4, 3, BLOCK), PROTOCOL_ERROR),
    "CONTINUATION of no block": (headers(1) + frame(CONTINUATION, 4, 1, BLOCK), PROTOCOL_ERROR),
    "CONTINUATION on stream 0": (frame(CONTINUATION, 4, 0, BLOCK), PROTOCOL_ERROR),
    "PRIORITY on stream 0": (frame(PRIORITY, 0, 0, bytes(5)), PROTOCOL_ERROR),
    "PRIORITY of another size": (frame(PRIORITY, 0, 1, bytes(4)), FRAME_SIZE_ERROR),
    "PRIORITY on itself": (frame(PRIORITY, 0, 1, ON_ITSELF), PROTOCOL_ERROR),
    "RST_STREAM on stream 0": (frame(RST_STREAM, 0, 0, bytes(4)), PROTOCOL_ERROR),
    "RST_STREAM on an idle stream": (frame(RST_STREAM, 0, 1, bytes(4)), PROTOCOL_ERROR),
    "RST_STREAM of another size": (OPEN + frame(RST_STREAM, 0, 1, bytes(3)), FRAME_SIZE_ERROR),
    "SETTINGS on a stream": (frame(SETTINGS, 0, 1, b""), PROTOCOL_ERROR),
    "SETTINGS of another size": (frame(SETTINGS, 0, 0, bytes(5)), FRAME_SIZE_ERROR),
    "SETTINGS acknowledged with content": (frame(SETTINGS, ACK, 0, bytes(6)), FRAME_SIZE_ERROR),
    "SETTINGS to push twice": (settings((2, 2)), PROTOCOL_ERROR),
    "SETTINGS with too large a window": (settings((INITIAL_WINDOW_SIZE, 1 << 31)), FLOW_CONTROL_ERROR),
    "SETTINGS with too small frames": (settings((5, MAX_FRAME - 1)), PROTOCOL_ERROR),
    "SETTINGS with too large frames": (settings((5, 1 << 24)), PROTOCOL_ERROR),
    "PUSH_PROMISE": (frame(PUSH_PROMISE, 0, 1, bytes(4)), PROTOCOL_ERROR),
    "PING on a stream": (frame(PING, 0, 1, bytes(8)), PROTOCOL_ERROR),
    "PING of another size": (frame(PING, 0, 0, bytes(6)), FRAME_SIZE_ERROR),
    "GOAWAY on a stream": (frame(GOAWAY, 0, 1, bytes(8)), PROTOCOL_ERROR),
    "WINDOW_UPDATE of another size": (frame(WINDOW_UPDATE, 0, 0, bytes(3)), FRAME_SIZE_ERROR),
    "WINDOW_UPDATE by nothing": (frame(WINDOW_UPDATE, 0, 0, bytes(4)), PROTOCOL_ERROR),
    "WINDOW_UPDATE by too much": (frame(WINDOW_UPDATE, 0, 0, TOO_MUCH), FLOW_CONTROL_ERROR),
    "WINDOW_UPDATE on an idle stream": (frame(WINDOW_UPDATE, 0, 1, UPDATE), PROTOCOL_ERROR),
    "a window too large by SETTINGS": (
        OPEN + frame(WINDOW_UPDATE, 0, 1, (MAX_WINDOW - DEFAULT_WINDOW).to_bytes(4, "big")) + settings((4, 1 << 17)),
        FLOW_CONTROL_ERROR,
    ),
    "an endless header block": (
        headers(1, 1, b"") + 3 * frame(CONTINUATION, 0, 1, bytes(MAX_FRAME)),
        ENHANCE_YOUR_CALM,
    ),
}

# What the peer sends after its greeting, and what stream 1 is reset with; the connection stays.
STREAM_ERRORS = {
    "DATA on a half-closed stream": (headers(1) + data(1, b"x"), STREAM_CLOSED),
    "HEADERS on a half-closed stream": (headers(1) + headers(1), STREAM_CLOSED),
    "WINDOW_UPDATE by nothing": (OPEN + frame(WINDOW_UPDATE, 0, 1, bytes(4)), PROTOCOL_ERROR),
    "WINDOW_UPDATE by too much": (OPEN + frame(WINDOW_UPDATE, 0, 1, TOO_MUCH), FLOW_CONTROL_ERROR),
    "trailers that do not end": (OPEN + headers(1, END_HEADERS, encode([("a", "b")])), PROTOCOL_ERROR),
    "trailers with a pseudo-header": (OPEN + headers(1, 5, encode([(":path", "/")])), PROTOCOL_ERROR),
    "a malformed head": (headers(1, 5, encode([*POST, ("connection", "close")])), PROTOCOL_ERROR),
    "a body shorter than its length": (
        headers(1, END_HEADERS, encode([*POST, ("content-length", "2")])) + data(1, b"x"),
        PROTOCOL_ERROR,
    ),
    "a body longer than its length": (
        headers(1, END_HEADERS, encode([*POST, ("content-length", "2")])) + data(1, b"x", 0) + data(1, b"yz"),
        PROTOCOL_ERROR,
    ),
}


@pytest.mark.parametrize("name", CONNECTION_ERRORS)
@pytest.mark.parametrize("step", [1, 1 << 20])
def test_connection_errors(name: str, step: int) -> None:
    """An error of the connection closes it with the right code, in whatever pieces the bytes come."""
    sent, code = CONNECTION_ERRORS[name]
    talk = Talk()
    heard = []
    for at in range(0, len(sent), step):
        heard += talk.say(sent[at : at + step])
    assert talk.server.closed
    assert [found for _, found in goaways(heard)] == [code] == [talk.server.error_code]
    assert talk.server.error
    assert talk.say(headers(9)) == []


@pytest.mark.parametrize("name", STREAM_ERRORS)
def test_stream_errors(name: str) -> None:
    """An error of a stream resets that stream with the right code, and others go on."""
    sent, code = STREAM_ERRORS[name]
    talk = Talk(at_once=False)
    assert resets(talk.say(sent)) == [(1, code)]
    talk.at_once = True
    assert responses(talk.say(OPEN.replace(b"\0\0\0\1", b"\0\0\0\3", 1) + data(3, b"fine")))[3] == b"fine"
    assert not talk.server.closed


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00",
        b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n",
        b"\r\n\r\n",
        b"a" * 2_000,
        PREFACE + frame(PING, 0, 0, bytes(8)),
        PREFACE + frame(SETTINGS, ACK, 0, b""),
    ],
)
def test_bad_greeting(sent: bytes) -> None:
    """A client that does not begin as HTTP/2 does is disconnected."""
    talk = Talk(greet=False)
    assert goaways(talk.say(sent)) == [(0, PROTOCOL_ERROR)]
    assert talk.server.closed


def test_http1() -> None:
    """A client that speaks HTTP/1 is told so in HTTP/1."""
    talk = Talk(greet=False)
    talk.server.receive(b"GET / HT", 9)
    talk.server.receive(b"TP/1.1\r\nhost: a\r\n\r\n", 9)
    assert talk.server.closed
    assert talk.server.take_output().startswith(b"HTTP/1.1 505 ")


def test_ignored() -> None:
    """What an HTTP/2 server must ignore does nothing: unknown frames, settings and flags, late frames."""
    talk = Talk()
    talk.say(frame(0xEE, 0xFF, 0, b"?") + settings((0xFF, 1)) + frame(GOAWAY, 0, 0, bytes(8)))
    talk.say(headers(1, 0xFF & ~PADDED & ~WITH_PRIORITY) + frame(WINDOW_UPDATE, 0, 1, UPDATE))
    talk.say(frame(RST_STREAM, 0, 1, bytes(4)) + frame(PRIORITY, 0, 1, bytes(5)) + frame(PRIORITY, 0, 9, bytes(5)))
    assert not talk.server.closed


def test_late_frames_of_a_reset_stream() -> None:
    """Frames that were under way when we reset a stream are no error, and headers still change the table."""
    talk = Talk()
    bad = headers(1, END_HEADERS, encode([*POST, ("connection", "close")]))
    assert resets(talk.say(bad)) == [(1, PROTOCOL_ERROR)]
    talk.say(data(1, b"late", 0) + headers(1, 5, b"\x40\x01a\x01b"))
    talk.say(headers(3, 5, BLOCK + b"\xbe"))  # the entry that the ignored block has made
    assert 3 in talk.bodies and not talk.server.closed


@pytest.mark.parametrize("step", [1, 7, 1000, 1 << 20])
def test_pieces(step: int) -> None:
    """Requests are the same in whatever pieces they come: bytes, padded frames, continued blocks, several DATA."""
    sent = b"".join(
        [
            PREFACE,
            EMPTY_SETTINGS,
            headers(1, END_HEADERS),
            data(1, b"one"),
            frame(HEADERS, PADDED | WITH_PRIORITY, 3, b"\x03" + bytes(5) + BLOCK[:2] + b"pad"),
            frame(CONTINUATION, 0, 3, BLOCK[2:5]),
            frame(CONTINUATION, END_HEADERS, 3, BLOCK[5:]),
            frame(DATA, PADDED, 3, b"\x02t" + b"pp"),
            frame(DATA, 0, 3, b"w" * 5000),
            frame(DATA, END_STREAM, 3, b"o"),
            headers(5),
        ]
    )
    talk = Talk(greet=False)
    heard = []
    for at in range(0, len(sent), step):
        heard += talk.say(sent[at : at + step])
    assert responses(heard) == {1: b"one", 3: b"t" + b"w" * 5000 + b"o", 5: b""}


def test_limited_turns() -> None:
    """No more frames are handled at once than the caller allows; the rest waits, in order."""
    talk = Talk()
    sent = b"".join(headers(stream_id) for stream_id in range(1, 41, 2))
    talk.say(sent, 7)
    assert talk.server.frames == 7 and talk.server.backlog and len(talk.bodies) == 7
    while talk.server.backlog:
        talk.say(b"", 7)
        assert talk.server.frames <= 7
    assert list(talk.bodies) == list(range(1, 41, 2))


def test_ping_and_settings_are_answered() -> None:
    """PING comes back with its content, SETTINGS is acknowledged, and neither is answered with an answer to it."""
    talk = Talk()
    assert [(one.kind, one.flags, one.payload) for one in talk.say(frame(PING, 0, 0, b"abcdefgh"))] == [
        (PING, ACK, b"abcdefgh")
    ]
    assert [(one.kind, one.flags) for one in talk.say(settings((3, 100)))] == [(SETTINGS, ACK)]
    assert talk.say(frame(PING, ACK, 0, bytes(8)) + frame(SETTINGS, ACK, 0, b"")) == []


def test_flow_control() -> None:
    """A response never exceeds the windows of stream and connection; it goes on as they grow, and may shrink."""
    talk = Talk(max_body=200_000)
    talk.say(settings((INITIAL_WINDOW_SIZE, 10)))
    heard = talk.say(headers(1, END_HEADERS) + data(1, bytes(range(30))))
    assert sum(len(one.payload) for one in heard if one.kind == DATA) == 10 and 1 not in responses(heard)
    assert talk.say(settings((INITIAL_WINDOW_SIZE, 3)))[0].kind == SETTINGS  # now it owes seven
    assert talk.say(frame(WINDOW_UPDATE, 0, 1, (7).to_bytes(4, "big"))) == []
    heard += talk.say(frame(WINDOW_UPDATE, 0, 1, (5).to_bytes(4, "big")))
    heard += talk.say(settings((INITIAL_WINDOW_SIZE, 100_000)))
    assert responses(heard) == {1: bytes(range(30))}
    heard = talk.say(b"".join([headers(3, END_HEADERS), *(data(3, bytes(16_000), 0) for _ in range(5)), data(3, b"")]))
    assert sum(len(one.payload) for one in heard if one.kind == DATA) == DEFAULT_WINDOW - 30
    heard += talk.say(frame(WINDOW_UPDATE, 0, 0, (80_000).to_bytes(4, "big")))
    assert responses(heard) == {3: bytes(80_000)}
    assert talk.server.open_streams() == 0


def test_receive_window() -> None:
    """The peer gets back the window that it uses, whatever becomes of the data; more than it has is an error."""
    talk = Talk(at_once=False)
    sent = granted = 0
    for stream_id in range(1, 400, 2):
        heard = talk.say(headers(stream_id, END_HEADERS) + data(stream_id, bytes(16_000)))
        sent += 16_000
        granted += sum(int.from_bytes(one.payload, "big") for one in heard if one.kind == WINDOW_UPDATE)
        assert sent - granted < CONNECTION_WINDOW
    assert not talk.server.closed


def test_body_too_long() -> None:
    """A body beyond the limit is handed over cut off, at once; after the answer the client is told to stop."""
    talk = Talk(max_body=1000)
    heard = talk.say(headers(1, END_HEADERS) + data(1, bytes(900), 0))
    assert talk.bodies == {}
    heard += talk.say(data(1, bytes(900), 0))
    assert len(talk.bodies[1]) == 1800 and resets(heard) == [(1, NO_ERROR)]
    assert resets(talk.say(data(1, bytes(900)))) == []
    talk.say(headers(3, END_HEADERS) + data(3, bytes(1001)))
    assert len(talk.bodies[3]) == 1001
    talk.at_once = False
    talk.say(headers(5, END_HEADERS) + data(5, bytes(1001), 0) + data(5, b"x") + frame(WINDOW_UPDATE, 0, 5, UPDATE))
    talk.answer(5)
    assert resets(talk.heard()) == [] and list(talk.bodies) == [1, 3, 5]
    assert not talk.server.closed and talk.server.open_streams() == 0


def test_bodies_are_bounded() -> None:
    """Unfinished bodies of all streams together are bounded; a stream beyond that is reset, and its bytes are freed."""
    talk = Talk(max_body=65_000)
    lost = []
    for stream_id in range(1, 101, 2):
        talk.say(headers(stream_id, END_HEADERS))
        for _ in range(4):
            lost += resets(talk.say(data(stream_id, bytes(16_000), 0)))
    assert {code for _, code in lost} == {ENHANCE_YOUR_CALM}
    assert talk.server._buffered <= MAX_BUFFERED + 16_000
    for stream_id in range(1, 101, 2):
        talk.say(frame(RST_STREAM, 0, stream_id, bytes(4)))
    assert talk.server._buffered == 0


def test_streams_are_bounded() -> None:
    """Streams beyond the limit are refused, so that the client can try again; ended ones make room."""
    talk = Talk(at_once=False)
    numbers = range(1, 2 * MAX_STREAMS, 2)
    assert resets(talk.say(b"".join(headers(one) for one in numbers))) == []
    late = 2 * MAX_STREAMS + 1
    assert resets(talk.say(headers(late))) == [(late, REFUSED_STREAM)]
    talk.answer(1)
    assert resets(talk.say(headers(late + 2))) == []


def test_reset_calls_count_until_they_end() -> None:
    """A call that the client resets is cancelled, and counts until it has ended: resets make no room for more work."""
    talk = Talk(at_once=False)
    for stream_id in range(1, 2 * MAX_STREAMS, 2):
        talk.say(headers(stream_id) + frame(RST_STREAM, 0, stream_id, bytes(4)))
    assert talk.cancelled == list(range(1, 2 * MAX_STREAMS, 2))
    late = 2 * MAX_STREAMS + 1
    assert resets(talk.say(headers(late))) == [(late, REFUSED_STREAM)]
    talk.answer(1)
    assert talk.heard() == []
    assert resets(talk.say(headers(late + 2))) == []


def test_drain() -> None:
    """A drain has two steps: calls that are under way when the client learns of it are served, later ones are not."""
    talk = Talk(at_once=False)
    talk.say(headers(1))
    talk.server.drain()
    heard = talk.heard()
    assert goaways(heard) == [(MAX_STREAM_ID, NO_ERROR)]
    [ping] = [one.payload for one in heard if one.kind == PING]
    assert ping == DRAIN_PING
    talk.say(headers(3))  # was sent before the client knew
    assert goaways(talk.say(frame(PING, ACK, 0, ping))) == [(3, NO_ERROR)]
    assert talk.say(headers(5, END_HEADERS) + data(5, b"late")) == [] and 5 not in talk.bodies
    assert not talk.server.drained()
    talk.answer(1)
    talk.answer(3)
    assert set(responses(talk.heard())) == {1, 3}
    assert talk.server.drained() and not talk.server.closed


def test_drain_of_a_silent_client() -> None:
    """A client that does not answer is told the last stream after a moment."""
    talk = Talk()
    talk.server.drain()
    talk.server.drain()
    assert len(goaways(talk.heard())) == 1
    assert goaways(talk.tick(DRAIN_TICKS)) == [(0, NO_ERROR)]
    assert talk.server.drained()
    assert goaways(talk.tick(DRAIN_TICKS)) == []


def test_drain_before_the_greeting() -> None:
    """A client that has only connected is greeted first, so that its first call is not lost in a drain."""
    talk = Talk(greet=False)
    talk.server.drain()
    assert talk.heard() == []
    heard = talk.say(PREFACE + EMPTY_SETTINGS + headers(1))
    assert heard[0].kind == SETTINGS and goaways(heard) == [(MAX_STREAM_ID, NO_ERROR)] and 1 in responses(heard)
    silent = Talk(greet=False)
    silent.server.drain()
    assert silent.tick(DRAIN_TICKS) == [] and silent.server.drained()


@pytest.mark.parametrize("stalled", ["body", "response"])
def test_stalled_streams(stalled: str) -> None:
    """A body that does not end, and a response that gets no window, are given up after a while; calls are not."""
    talk = Talk(at_once=False)
    talk.say(settings((INITIAL_WINDOW_SIZE, 0)))
    talk.say(headers(1, END_HEADERS) + data(1, b"x", 0 if stalled == "body" else END_STREAM) + headers(3))
    if stalled == "response":
        talk.answer(1)
    assert resets(talk.tick(STALLED_TICKS)) == []
    assert resets(talk.tick()) == [(1, CANCEL)]
    assert talk.tick(3 * STALLED_TICKS) == [] and talk.server.open_streams() == 1


@pytest.mark.parametrize("piece", [b"\0\0\x08\x06", headers(1, 1, BLOCK[:2]), PREFACE[:5]])
def test_stalled_frames(piece: bytes) -> None:
    """A frame, a header block or a greeting that does not end closes the connection after a while."""
    talk = Talk(greet=piece != PREFACE[:5])
    talk.say(piece)
    talk.tick(STALLED_TICKS)
    assert not talk.server.closed
    assert goaways(talk.tick()) == [(0, ENHANCE_YOUR_CALM)]


def test_idle_connections_stay() -> None:
    """A connection that only sends a PING now and then, as clients do to keep it, is never a nuisance."""
    talk = Talk()
    for _ in range(20_000):
        talk.say(frame(PING, 0, 0, bytes(8)))
        talk.tick()
    assert not talk.server.closed


def test_large_header_block() -> None:
    """A block of many frames that is within the bound is served."""
    block = encode([*POST, *((f"x-{i}", "v" * 1000) for i in range(14))])
    assert MAX_FRAME // 2 < len(block) < MAX_HEADER_BLOCK
    sent = [frame(HEADERS, END_STREAM, 1, b"")]
    sent += [frame(CONTINUATION, 0, 1, block[at : at + 100]) for at in range(0, len(block), 100)]
    talk = Talk()
    talk.say(b"".join(sent) + frame(CONTINUATION, END_HEADERS, 1, b""))
    assert 1 in talk.bodies and not talk.heads[1].oversized
