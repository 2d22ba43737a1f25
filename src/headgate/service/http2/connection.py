"""The server's side of HTTP/2 (RFC 9113) without input and output: bytes go in, bytes come out, time is `tick()`.

Made for small requests: a body is collected and handed over whole, and a response is given whole. Everything that a
peer can make it keep or do is bounded: header blocks and lists, streams at once, bodies, output (the caller stops
reading while the peer does not read), and frames that do nothing (see `output.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from headgate.service.http2.control import Http2Control
from headgate.service.http2.frames import (
    ACK,
    CANCEL,
    CONTINUATION,
    DATA,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_CONCURRENT_STREAMS,
    MAX_FRAME,
    MAX_HEADER_LIST_SIZE,
    MAX_WINDOW,
    PADDED,
    PREFACE,
    PROTOCOL_ERROR,
    REFUSED_STREAM,
    SETTINGS,
    STREAM_CLOSED,
    WINDOW_UPDATE,
    WITH_PRIORITY,
    Http2Error,
    frame,
    settings,
    uint32,
)
from headgate.service.http2.hpack import MAX_HEADER_LIST
from headgate.service.http2.output import (
    DRAIN_TICKS,
    FORGIVEN_BY_TICK,
    RECEIVING,
    RUNNING,
    STALLED_TICKS,
    CancelHandler,
    Http2Stream,
)
from headgate.service.http2.request_head import RequestHead, RequestHeads

MAX_STREAMS: Final = 1_024  # at once on a connection
MAX_HEADER_BLOCK: Final = 32_768  # bytes, all its frames together
MAX_BUFFERED: Final = 1 << 20  # bytes of unfinished bodies on a connection
STREAM_WINDOW: Final = 1 << 17  # bytes; more than a body may have, so it never needs to grow
CONNECTION_WINDOW: Final = 1 << 20  # bytes
MAX_HTTP1_LINE: Final = 1_024  # bytes

_GREETING: Final = settings(
    (MAX_CONCURRENT_STREAMS, MAX_STREAMS), (INITIAL_WINDOW_SIZE, STREAM_WINDOW), (MAX_HEADER_LIST_SIZE, MAX_HEADER_LIST)
) + frame(WINDOW_UPDATE, 0, 0, (CONNECTION_WINDOW - DEFAULT_WINDOW).to_bytes(4, "big"))

_NOT_HTTP2: Final = (
    b"HTTP/1.1 505 HTTP Version Not Supported\r\ncontent-type: text/plain\r\nconnection: close\r\n\r\n"
    b"This port speaks gRPC, which needs HTTP/2.\n"
)

RequestHandler = Callable[["Http2Connection", int, RequestHead, bytes], None]


class Http2Connection(Http2Control):
    """One connection. *handle* gets each request; it, or a later call, calls `respond` for its stream.

    A body longer than *max_body* is handed over as soon as that is certain, cut off: *handle* sees that it is too long.
    *cancel* is told when a request is reset that has not been answered yet.
    """

    def __init__(self, handle: RequestHandler, cancel: CancelHandler, max_body: int) -> None:
        super().__init__(cancel)
        self.greeted = False  # the client speaks HTTP/2
        self.backlog = False  # whole frames may be left, because of a limit
        self.frames = 0  # handled by the last `receive`; a block of headers that takes long counts as several
        self.requests = 0
        self._handle = handle
        self._max_body = max_body
        self._heads = RequestHeads()
        self._buffer = b""
        self._room = CONNECTION_WINDOW  # bytes that the peer may still send
        self._block = bytearray()
        self._block_stream = 0  # whose header block has not ended
        self._block_flags = 0
        self._block_frames = 0  # that the blocks of the last frame count for, beyond one
        self._waiting_since = 0  # the tick in which the unfinished frame or block began

    def receive(self, data: bytes, limit: int) -> None:
        """Take bytes from the peer, which may be none, and handle frames until there are *limit* of them."""
        self.frames = 0
        self.backlog = False
        if self.closed:
            return
        if data:
            self._buffer = self._buffer + data if self._buffer else data
        try:
            if self._prefaced or self._read_preface():
                self._read_frames(limit)
        except Http2Error as error:
            self.frames = limit  # to connect anew and to be disconnected at once is not for free
            self._buffer = b""
            self.close(error.code, error.why)

    def tick(self) -> None:
        """Once a second: forgive, and end what does not go on."""
        self._ticks += 1
        self.nuisance = max(0, self.nuisance - FORGIVEN_BY_TICK)
        oldest = self._ticks - STALLED_TICKS
        try:
            for stream_id, stream in list(self._streams.items()):
                if stream.state != RUNNING and stream.begun < oldest:
                    self._reset(stream_id, CANCEL)
            if (self._buffer or self._block_stream) and not self.backlog and self._waiting_since < oldest:
                raise Http2Error(ENHANCE_YOUR_CALM, "a frame, or a header block, does not end")
        except Http2Error as error:
            self.close(error.code, error.why)
        if self._draining_since >= 0 and self._ticks - self._draining_since >= DRAIN_TICKS:
            self.finish_drain()

    def release(self) -> None:
        """Forget everything once the peer is gone, since only the garbage collector will find this object."""
        self.closed = True
        self._buffer = b""
        self._block = bytearray()
        self._heads = RequestHeads()
        self._streams.clear()
        self._blocked.clear()
        self._reset_ids.clear()
        self._out.clear()
        self._buffered = 0

    def _read_preface(self) -> bool:
        size = len(PREFACE)
        data = self._buffer
        if data[:size] == PREFACE:
            self._prefaced = True
            self._buffer = data[size:]
            self._out.append(_GREETING)
            if self._draining_since >= 0:
                self._announce_drain()
            return True
        if not PREFACE.startswith(data):
            if b"HTTP/1" in data:
                self._out.append(_NOT_HTTP2)
                self.closed = True
                self.error_code = PROTOCOL_ERROR
                self.error = "the client speaks HTTP/1"
            elif b"\n" in data or len(data) > MAX_HTTP1_LINE or not data[:1].isalpha():
                raise Http2Error(PROTOCOL_ERROR, "the client does not speak HTTP/2")
        return False

    def _read_frames(self, limit: int) -> None:
        data = self._buffer
        at = 0
        end = len(data)
        left = limit
        while end - at >= 9:
            if left <= 0:
                self.backlog = True
                break
            size = data[at] << 16 | data[at + 1] << 8 | data[at + 2]
            if size > MAX_FRAME:
                raise Http2Error(FRAME_SIZE_ERROR, f"a frame of {size} bytes; at most {MAX_FRAME} are taken")
            stop = at + 9 + size
            if stop > end:
                break
            kind = data[at + 3]
            flags = data[at + 4]
            stream_id = uint32(data, at + 5) & MAX_WINDOW
            at += 9
            left -= 1
            if not self.greeted:
                if kind != SETTINGS or flags & ACK:
                    raise Http2Error(PROTOCOL_ERROR, "the first frame is not SETTINGS")
                self.greeted = True
            if self._block_stream and (kind != CONTINUATION or stream_id != self._block_stream):
                raise Http2Error(PROTOCOL_ERROR, "a header block was not finished")
            if kind == DATA:
                self._on_data(stream_id, flags, data, at, stop)
            elif kind == HEADERS:
                self._on_headers(stream_id, flags, data, at, stop)
            elif kind == CONTINUATION:
                self._on_continuation(stream_id, flags, data, at, stop)
            else:
                self._on_control(kind, stream_id, flags, data, at, stop)
            left -= self._block_frames
            self._block_frames = 0
            at = stop
            if self.closed:
                break
        self.frames = limit - left
        if left < limit:
            self._waiting_since = self._ticks
        self._buffer = data[at:] if at < end else b""

    def _on_headers(self, stream_id: int, flags: int, data: bytes, at: int, stop: int) -> None:
        if not stream_id & 1:
            raise Http2Error(PROTOCOL_ERROR, "HEADERS on a stream that a client cannot open")
        if flags & PADDED:
            if at == stop:
                raise Http2Error(FRAME_SIZE_ERROR, "HEADERS without the length of its padding")
            stop -= data[at]
            at += 1
        if flags & WITH_PRIORITY:
            if at + 5 > stop:
                raise Http2Error(FRAME_SIZE_ERROR, "HEADERS without its whole priority")
            if uint32(data, at) & MAX_WINDOW == stream_id:
                raise Http2Error(PROTOCOL_ERROR, "a stream depends on itself")
            at += 5
        if at > stop:
            raise Http2Error(PROTOCOL_ERROR, "HEADERS with more padding than frame")
        if flags & END_HEADERS:
            self._on_block(stream_id, flags, data[at:stop])
        else:
            self._block = bytearray(data[at:stop])
            self._block_stream = stream_id
            self._block_flags = flags

    def _on_continuation(self, stream_id: int, flags: int, data: bytes, at: int, stop: int) -> None:
        if not self._block_stream:
            raise Http2Error(PROTOCOL_ERROR, "CONTINUATION of no header block")
        self._annoy(1)
        self._block += data[at:stop]
        if len(self._block) > MAX_HEADER_BLOCK:
            raise Http2Error(ENHANCE_YOUR_CALM, f"a header block of more than {MAX_HEADER_BLOCK} bytes")
        if flags & END_HEADERS:
            block = bytes(self._block)
            self._block = bytearray()
            self._block_stream = 0
            self._on_block(stream_id, self._block_flags, block)

    def _on_block(self, stream_id: int, flags: int, block: bytes) -> None:
        """A whole header block: a request, or the trailers of one."""
        if stream_id <= self._last:
            self._on_trailers(stream_id, flags, block)
            return
        self._last = stream_id
        head = self._heads.read(block)
        self._block_frames = self._heads.frames
        self._annoy(self._heads.work >> 4)  # long lists of headers cost work, call after call
        if self._final >= 0:
            return  # the client was told that this stream is not served; it asks again elsewhere
        if self.open_streams() >= MAX_STREAMS:
            self._reset(stream_id, REFUSED_STREAM)
        elif head.malformed:
            self._reset(stream_id, PROTOCOL_ERROR)
        else:
            stream = Http2Stream(head, self._peer_window, self._ticks)
            self._streams[stream_id] = stream
            if flags & END_STREAM:
                self._complete(stream_id, stream, b"")

    def _on_trailers(self, stream_id: int, flags: int, block: bytes) -> None:
        wrong = self._heads.read_trailers(block)  # even if it is not wanted: the table changes
        self._block_frames = self._heads.frames
        self._annoy(1 + (self._heads.work >> 4))
        stream = self._streams.get(stream_id)
        if stream is None:
            if not self._is_ignored(stream_id):
                raise Http2Error(STREAM_CLOSED, "HEADERS on a closed stream")
        elif stream.ended:
            self._reset(stream_id, STREAM_CLOSED)
        elif wrong or not flags & END_STREAM:
            self._reset(stream_id, PROTOCOL_ERROR)
        elif stream.state == RECEIVING:
            self._complete(stream_id, stream, b"")
        else:
            stream.ended = True  # it was too long, and handed over before its end

    def _is_ignored(self, stream_id: int) -> bool:
        """Whether frames for a closed stream may have been under way when it was closed."""
        return stream_id in self._reset_ids or 0 <= self._final < stream_id

    def _on_data(self, stream_id: int, flags: int, data: bytes, at: int, stop: int) -> None:
        if stream_id == 0 or stream_id > self._last:
            raise Http2Error(PROTOCOL_ERROR, "DATA on a stream that was not opened")
        self._room -= stop - at
        if self._room < 0:
            raise Http2Error(FLOW_CONTROL_ERROR, "DATA beyond the window of the connection")
        if self._room < CONNECTION_WINDOW >> 1:
            self._out.append(frame(WINDOW_UPDATE, 0, 0, (CONNECTION_WINDOW - self._room).to_bytes(4, "big")))
            self._room = CONNECTION_WINDOW
        if flags & PADDED:
            if at == stop:
                raise Http2Error(FRAME_SIZE_ERROR, "DATA without the length of its padding")
            stop -= data[at]
            at += 1
            if at > stop:
                raise Http2Error(PROTOCOL_ERROR, "DATA with more padding than frame")
            self._annoy(1)
        stream = self._streams.get(stream_id)
        if stream is None:
            if not self._is_ignored(stream_id):
                raise Http2Error(STREAM_CLOSED, "DATA on a closed stream")
            self._annoy(1)
        elif stream.ended:
            self._reset(stream_id, STREAM_CLOSED)
        elif stream.state == RECEIVING:
            if flags & END_STREAM and stream.body is None and stop - at <= self._max_body:
                self._complete(stream_id, stream, data[at:stop])
            else:
                self._collect(stream_id, stream, flags, data[at:stop])
        elif flags & END_STREAM:
            stream.ended = True  # it was too long, and handed over before its end

    def _collect(self, stream_id: int, stream: Http2Stream, flags: int, piece: bytes) -> None:
        """Add to a body that comes in several frames, or is too long."""
        if len(piece) < 64:
            self._annoy(1)
        body = stream.body
        if body is None:
            body = stream.body = bytearray()
        body += piece
        self._buffered += len(piece)
        if flags & END_STREAM:
            self._complete(stream_id, stream, b"")
        elif len(body) > self._max_body:
            self._hand_over(stream_id, stream, b"")
        elif self._buffered > MAX_BUFFERED:
            self._reset(stream_id, ENHANCE_YOUR_CALM)

    def _complete(self, stream_id: int, stream: Http2Stream, body: bytes) -> None:
        """The request is whole; its body is *body*, or was collected."""
        stream.ended = True
        expected = stream.head.content_length
        if expected >= 0 and expected != (len(body) if stream.body is None else len(stream.body)):
            self._reset(stream_id, PROTOCOL_ERROR)
        else:
            self._hand_over(stream_id, stream, body)

    def _hand_over(self, stream_id: int, stream: Http2Stream, body: bytes) -> None:
        stream.state = RUNNING
        if stream.body is not None:
            body = bytes(stream.body)
            self._buffered -= len(body)
            stream.body = None
        self.requests += 1
        self._handle(self, stream_id, stream.head, body)
