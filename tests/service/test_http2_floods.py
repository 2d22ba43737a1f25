"""Peers that mean harm: floods of frames that cost work, and thousands of broken connections."""

import gc
import os
import random
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator

import hpack as other
import pytest

from headgate.service.grpc import FRAMES_PER_CALL
from headgate.service.grpc_calls import SHOULD_RATE_LIMIT, GrpcCalls
from headgate.service.http2.connection import MAX_STREAMS, Http2Connection
from headgate.service.http2.frames import (
    CONTINUATION,
    END_HEADERS,
    ENHANCE_YOUR_CALM,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    NO_ERROR,
    PING,
    PREFACE,
    REFUSED_STREAM,
    RST_STREAM,
    WINDOW_UPDATE,
    frame,
    settings,
)
from headgate.service.http2.output import STALLED_TICKS
from headgate.service.http2.request_head import RequestHead
from headgate.service.listeners import CALLS_PER_TURN
from headgate.service.rls_messages import DescriptorStatus, RateLimitRequest, RateLimitResponse
from tests.support.floods import CALLING, FLOODS, HUFFMAN, TABLE_CHURN
from tests.support.http2 import ALL, BLOCK, Talk, data, frames, goaways, headers, resets

CONNECTIONS = int(os.environ.get("HEADGATE_MUTATED_CONNECTIONS", "3000"))
READ = 1 << 18  # bytes of one read, as uvloop reads
ENOUGH = 2 << 20  # bytes of a flood
TURN = 0.02  # seconds
MEMORY = 4 << 20  # bytes that a flood may make one connection keep


@pytest.mark.parametrize("name", FLOODS)
def test_floods(name: str) -> None:
    """A flood is ended with ENHANCE_YOUR_CALM before it costs much; until then it keeps little memory."""
    talk = Talk(at_once=False)
    sent = 0
    tracemalloc.start()
    try:
        for piece in FLOODS[name]():
            sent += len(piece)
            heard = talk.say(piece)
            talk.bodies.clear()
            talk.heads.clear()
            for stream_id in talk.cancelled:  # the service lets go of a cancelled call soon
                talk.server.respond(stream_id, (b"", b""), b"", None)
            talk.cancelled.clear()
            if talk.server.closed:
                break
            assert sent < 64 << 20
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [code for _, code in goaways(heard)] == [ENHANCE_YOUR_CALM]
    assert peak < MEMORY


def test_calls_pay_for_their_windows() -> None:
    """A client that calls may send a few control frames with each call, for as long as it likes."""
    talk = Talk()
    for stream_id in range(1, 30_001, 2):
        talk.say(headers(stream_id, END_HEADERS) + data(stream_id, b"x" * 100))
        talk.say(frame(WINDOW_UPDATE, 0, 0, (101).to_bytes(4, "big")) + frame(PING, 0, 0, bytes(8)))
        talk.say(frame(RST_STREAM, 0, stream_id, bytes(4)))
    assert not talk.server.closed and len(talk.bodies) == 15_000


def longest_turn(make: Callable[[], Iterator[bytes]]) -> float:
    """The most seconds that the processor spends on what a flood makes of one turn of the event loop."""
    talk, pieces = Talk(), make()
    longest = sent = 0.0
    while sent < ENOUGH and not talk.server.closed:
        chunk = b""
        while len(chunk) < READ:
            chunk += next(pieces)
        sent += len(chunk)
        while chunk or (talk.server.backlog and not talk.server.closed):
            began = time.thread_time()
            talk.server.receive(chunk, CALLS_PER_TURN * FRAMES_PER_CALL)
            longest = max(longest, time.thread_time() - began)
            chunk = b""
            talk.server.take_output()
            talk.bodies.clear()
            talk.heads.clear()
    return longest


@pytest.mark.slow  # all of them together
@pytest.mark.parametrize("name", [*FLOODS, *CALLING])
def test_turns_are_short(name: str) -> None:
    """No flood makes a turn of the event loop long, so others are served meanwhile; plain Python takes 6 ms at most."""
    gc.disable()  # the objects of other tests are not what a turn takes
    try:
        assert min(longest_turn({**FLOODS, **CALLING}[name]) for _ in range(3)) < TURN
    finally:
        gc.enable()


@pytest.mark.parametrize("block", [BLOCK + TABLE_CHURN, HUFFMAN], ids=["table churn", "Huffman code"])
def test_long_blocks_count_as_several_frames(block: bytes) -> None:
    """A block of headers that takes long to read leaves less of a turn; others are not kept waiting for it."""
    talk = Talk()
    talk.say(b"".join(headers(one, 5, block) for one in range(1, 41, 2)), limit=60)
    assert 1 <= len(talk.heads) <= 4 and talk.server.backlog
    assert talk.server.frames >= 60
    while talk.server.backlog:
        talk.say(b"", limit=60)
    assert len(talk.heads) == 20
    talk.say(headers(101) + headers(103))
    assert talk.server.frames == 2


def test_an_error_uses_the_turn_up() -> None:
    """A client that is disconnected has had all of its turn: to connect again and again is not for free."""
    talk = Talk()
    talk.say(frame(PING, 0, 1, bytes(8)), limit=60)
    assert talk.server.closed and talk.server.frames == 60


def test_zero_windows() -> None:
    """A peer that takes no responses gets a bounded number of them, and loses them after a while."""
    talk = Talk()
    talk.say(settings((INITIAL_WINDOW_SIZE, 0)))
    tracemalloc.start()
    try:
        for stream_id in range(1, 4 * MAX_STREAMS, 2):
            talk.say(headers(stream_id, END_HEADERS) + data(stream_id, b"x" * 1_000))
            talk.bodies.clear()
            talk.heads.clear()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MEMORY
    assert talk.server.open_streams() == MAX_STREAMS
    assert len(resets(talk.tick(STALLED_TICKS + 1))) == MAX_STREAMS
    assert talk.server.open_streams() == 0


def test_refusals_are_no_harm() -> None:
    """A client beyond the limit of streams for a moment is told to try again, and stays connected."""
    talk = Talk(at_once=False)
    heard = talk.say(b"".join(headers(one) for one in range(1, 3 * MAX_STREAMS, 2)))
    assert {code for _, code in resets(heard)} == {REFUSED_STREAM}
    assert not talk.server.closed


class Backend:
    """Rules that decide some calls at once and others later."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.later: list[int] = []

    def rules(self) -> "Backend":
        return self

    def authorize(self, head: RequestHead) -> None: ...

    def serving(self, service: str) -> int:
        return 1

    def count_failure(self) -> None: ...

    def start(
        self, connection: Http2Connection, stream_id: int, request: RateLimitRequest, timeout: float | None
    ) -> None:
        self.later.append(stream_id)

    def decide_now(self, request: RateLimitRequest) -> RateLimitResponse | None:
        if self.dice.random() < 0.3:
            return None
        return RateLimitResponse(1, [DescriptorStatus(1, ("", 5, 2), 4, 1.0) for _ in request.descriptors])

    async def decide(self, request: RateLimitRequest, timeout: float | None) -> RateLimitResponse:
        raise NotImplementedError


MESSAGE = b"\x0a\x04demo\x12\x0f\x0a\x0d\x0a\x04user\x12\x05alice\x12\x06\x0a\x04\x0a\x02ip\x18\x02"
CALL = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", SHOULD_RATE_LIMIT),
    (":authority", "headgate"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
    ("grpc-timeout", "20m"),
]


def real_connection(dice: random.Random) -> bytearray:
    """What a client sends: calls with some other frames between them."""
    encoder = other.Encoder()
    out = bytearray(PREFACE + settings((INITIAL_WINDOW_SIZE, dice.choice([0, 20, 65_535, 1 << 20]))))
    for i in range(dice.randint(1, 6)):
        stream_id = 2 * i + 1
        extra = (f"x-{dice.randint(0, 9)}", "v" * dice.randint(0, 60))
        block = encoder.encode([*CALL, extra], huffman=dice.random() < 0.5)
        cut = dice.randint(0, len(block)) if dice.random() < 0.3 else len(block)
        out += frame(HEADERS, 0 if cut < len(block) else END_HEADERS, stream_id, block[:cut])
        if cut < len(block):
            out += frame(CONTINUATION, END_HEADERS, stream_id, block[cut:])
        out += data(stream_id, b"\0" + len(MESSAGE).to_bytes(4, "big") + MESSAGE)
        if dice.random() < 0.4:
            kind, size = dice.choice([2, 3, 4, 6, 7, 8, 9, 10]), dice.choice([0, 4, 5, 6, 8, 12])
            out += frame(kind, dice.randint(0, 255), dice.choice([0, stream_id, stream_id + 2]), dice.randbytes(size))
    return out


def mutate(dice: random.Random, sent: bytearray) -> None:
    for _ in range(dice.choice([0, 0, 1, 1, 2, 4, 6])):
        at = dice.randint(24 if dice.random() < 0.95 else 0, len(sent) - 1)
        what = dice.random()
        if what < 0.6:
            sent[at] = dice.randint(0, 255)
        elif what < 0.8:
            del sent[at : at + dice.randint(1, 5)]
        else:
            sent[at:at] = dice.randbytes(dice.randint(1, 5))


def run_mutated(seed: int) -> str:
    """One broken connection to its end; how it ended."""
    dice = random.Random(seed)
    sent = real_connection(dice)
    mutate(dice, sent)
    backend = Backend(dice)
    calls = GrpcCalls(backend)
    server = Http2Connection(calls.handle, lambda _: None, 65_541)
    at = 0
    while at < len(sent):
        size = dice.randint(1, 200)
        server.receive(bytes(sent[at : at + size]), dice.choice([1, 3, ALL]))
        at += size
        if dice.random() < 0.05:
            server.tick()
    while server.backlog:
        server.receive(b"", 5)
    for stream_id in backend.later:
        calls.answer(server, stream_id, b"\x08\x01")
    server.drain()
    for _ in range(STALLED_TICKS + 2):
        server.tick()
    if not server.error.endswith("HTTP/1"):
        assert list(frames(server.take_output()))
    assert server.closed == bool(server.error) == (server.error_code != NO_ERROR)
    assert server.closed or server.open_streams() == 0
    return "refused" if server.closed else "served"


def test_mutated_connections() -> None:
    """Whatever bytes come, nothing but errors of the protocol comes of it, and every stream ends."""
    ends = Counter(run_mutated(seed) for seed in range(CONNECTIONS))
    assert ends["refused"] > CONNECTIONS // 10 and ends["served"] > CONNECTIONS // 10
