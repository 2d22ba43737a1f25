"""The sending half of an HTTP/2 connection: streams, the peer's flow control, responses, resets, and patience.

A peer may send frames that cost work and do nothing for it: resets, pings, settings, empty frames, tiny windows. Each
counts a point. Responses and time take points off; a peer that has MAX_NUISANCE of them is disconnected, so such frames
cost at most a small multiple of what the same peer could cost by calling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from headgate.service.http2.frames import (
    DATA,
    DEFAULT_WINDOW,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    GOAWAY,
    MAX_FRAME,
    MAX_STREAM_ID,
    NO_ERROR,
    PING,
    RST_STREAM,
    HeaderFrame,
    Http2Error,
    frame,
)
from headgate.service.http2.request_head import RequestHead

MAX_NUISANCE: Final = 10_000  # points
FORGIVEN_BY_CALL: Final = 4  # points: a call may come with a few window updates, and pings to measure the line
FORGIVEN_BY_TICK: Final = 1_000  # points
MAX_RESET_IDS: Final = 1_024  # streams that we have reset: frames that were under way for them are no error
STALLED_TICKS: Final = 10  # for a body that does not end, or a response that the peer leaves no window for
DRAIN_TICKS: Final = 2  # for a client to say that it knows of the drain

RECEIVING: Final = 0  # its request has not ended
RUNNING: Final = 1  # its request was handed over, its response has not come
SENDING: Final = 2  # its response waits for the peer's window

DRAIN_PING: Final = b"headgate"

CancelHandler = Callable[[int], None]

_SMALL: Final = 1_024
_DATA_PREFIX: Final = [size.to_bytes(3, "big") + bytes((DATA, 0)) for size in range(_SMALL)]


class Http2Stream:
    """One request and its response."""

    __slots__ = ("begun", "body", "data", "ended", "head", "state", "trailer", "window")

    def __init__(self, head: RequestHead, window: int, begun: int) -> None:
        self.head = head
        self.window = window  # bytes that the peer takes on this stream
        self.begun = begun  # the tick in which it came to its state
        self.state = RECEIVING
        self.ended = False  # the peer has said all
        self.body: bytearray | None = None
        self.data = b""  # what is left of the response
        self.trailer: HeaderFrame | None = None


class Http2Output:
    """Streams by their numbers, and the frames that are to be sent."""

    def __init__(self, cancel: CancelHandler) -> None:
        self.closed = False  # nothing more is read; what is in the output ends the connection
        self.error = ""  # why it was closed
        self.error_code = NO_ERROR
        self.nuisance = 0
        self.responses = 0
        self._cancel = cancel
        self._out: list[bytes] = []
        self._streams: dict[int, Http2Stream] = {}
        self._blocked: dict[int, Http2Stream] = {}  # those that are SENDING
        self._abandoned: set[int] = set()  # reset while they were RUNNING: what runs for them still counts
        self._reset_ids: dict[int, bool] = {}
        self._window = DEFAULT_WINDOW  # bytes that the peer takes on all streams together
        self._peer_window = DEFAULT_WINDOW  # of each new stream
        self._buffered = 0  # bytes of all bodies
        self._last = 0  # the newest stream
        self._ticks = 0
        self._prefaced = False  # the client has begun as HTTP/2 does, and was greeted
        self._draining_since = -1  # the tick
        self._final = -1  # after the second GOAWAY: streams above this one are not served

    def take_output(self) -> bytes:
        """The bytes to send now."""
        out = self._out
        if not out:
            return b""
        ready = out[0] if len(out) == 1 else b"".join(out)
        out.clear()
        return ready

    def open_streams(self) -> int:
        """Streams that are not over, and calls that still run for streams that are."""
        return len(self._streams) + len(self._abandoned)

    def respond(self, stream_id: int, head: HeaderFrame, data: bytes, trailer: HeaderFrame | None) -> None:
        """Answer a request; every request that was handed over is answered once, even if it was reset meanwhile.

        Without data and trailer, *head* ends the stream.
        """
        stream = self._streams.get(stream_id)
        if stream is None:
            self._abandoned.discard(stream_id)
            return
        number = stream_id.to_bytes(4, "big")
        size = len(data)
        if trailer is not None and size < _SMALL and size <= self._window and size <= stream.window:
            self._window -= size
            before, block = head
            between, last = trailer
            self._out.append(before + number + block + _DATA_PREFIX[size] + number + data + between + number + last)
            self._end(stream_id, stream)
            return
        self._out.append(head[0] + number + head[1])
        if not data and trailer is None:
            self._end(stream_id, stream)
            return
        stream.state = SENDING
        stream.begun = self._ticks
        stream.data = data
        stream.trailer = trailer
        self._blocked[stream_id] = stream
        self._push(stream_id, stream)

    def _push(self, stream_id: int, stream: Http2Stream) -> None:
        """Send as much of a response as the windows allow."""
        data = stream.data
        at = 0
        while at < len(data):
            size = min(len(data) - at, stream.window, self._window, MAX_FRAME)
            if size <= 0:
                stream.data = data[at:]
                return
            stream.window -= size
            self._window -= size
            ends = at + size == len(data) and stream.trailer is None
            self._out.append(frame(DATA, END_STREAM if ends else 0, stream_id, data[at : at + size]))
            at += size
        trailer = stream.trailer
        if trailer is not None:
            self._out.append(trailer[0] + stream_id.to_bytes(4, "big") + trailer[1])
        self._end(stream_id, stream)

    def _push_all(self) -> None:
        """Send what the connection's window has room for."""
        self._annoy(len(self._blocked) >> 4)
        for stream_id, stream in list(self._blocked.items()):
            if self._window <= 0:
                return
            self._push(stream_id, stream)

    def _end(self, stream_id: int, stream: Http2Stream) -> None:
        """Forget a stream whose response is complete."""
        self._forget(stream_id, stream)
        self.responses += 1
        self.nuisance = max(0, self.nuisance - FORGIVEN_BY_CALL)
        if not stream.ended:  # a client that is still sending is told to stop
            self._send_reset(stream_id, NO_ERROR)

    def _forget(self, stream_id: int, stream: Http2Stream) -> None:
        del self._streams[stream_id]
        if stream.state == SENDING:
            del self._blocked[stream_id]
        elif stream.body is not None:
            self._buffered -= len(stream.body)
            stream.body = None

    def _drop(self, stream_id: int) -> None:
        """Forget a stream that will not be answered; a call that runs for it is cancelled."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        self._forget(stream_id, stream)
        if stream.state == RUNNING:
            self._abandoned.add(stream_id)
            self._cancel(stream_id)

    def _reset(self, stream_id: int, code: int) -> None:
        """End a stream because of an error that is only its own."""
        self._drop(stream_id)
        self._send_reset(stream_id, code)
        self._annoy(1)

    def _send_reset(self, stream_id: int, code: int) -> None:
        self._out.append(frame(RST_STREAM, 0, stream_id, code.to_bytes(4, "big")))
        if len(self._reset_ids) >= MAX_RESET_IDS:
            del self._reset_ids[next(iter(self._reset_ids))]
        self._reset_ids[stream_id] = True

    def _annoy(self, points: int) -> None:
        self.nuisance += points
        if self.nuisance > MAX_NUISANCE:
            raise Http2Error(ENHANCE_YOUR_CALM, "too many frames that do nothing")

    def drain(self) -> None:
        """Ask the client to take new calls elsewhere. Those that it has sent meanwhile are still served."""
        if self._draining_since < 0 and not self.closed:
            self._draining_since = self._ticks
            if self._prefaced:
                self._announce_drain()

    def _announce_drain(self) -> None:
        """The first step; the answer to the PING shows that the client has read it."""
        self._out.append(frame(GOAWAY, 0, 0, MAX_STREAM_ID.to_bytes(4, "big") + bytes(4)))
        self._out.append(frame(PING, 0, 0, DRAIN_PING))

    def finish_drain(self) -> None:
        """The second step: say which stream is the last that is served."""
        if self._draining_since >= 0 and self._final < 0 and not self.closed:
            self._final = self._last
            if self._prefaced:
                self._out.append(frame(GOAWAY, 0, 0, self._last.to_bytes(4, "big") + bytes(4)))

    def draining(self) -> bool:
        return self._draining_since >= 0

    def drained(self) -> bool:
        """Whether a drain is over, so that the connection can be closed."""
        return self._final >= 0 and not self._streams

    def close(self, code: int, why: str) -> None:
        """End the connection with an error; calls that run are not answered any more."""
        if not self.closed:
            self.closed = True
            self.error_code = code
            self.error = why
            payload = max(0, self._last).to_bytes(4, "big") + code.to_bytes(4, "big") + why.encode()
            self._out.append(frame(GOAWAY, 0, 0, payload))
