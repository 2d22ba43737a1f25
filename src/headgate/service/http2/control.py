"""The frames of HTTP/2 that make no request: settings, windows, pings, resets, priorities (RFC 9113, section 6)."""

from __future__ import annotations

from typing import Final

from headgate.service.http2.frames import (
    ACK,
    ENABLE_PUSH,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    GOAWAY,
    INITIAL_WINDOW_SIZE,
    LARGEST_FRAME,
    MAX_FRAME,
    MAX_FRAME_SIZE,
    MAX_WINDOW,
    PING,
    PRIORITY,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Http2Error,
    frame,
    uint32,
)
from headgate.service.http2.output import DRAIN_PING, Http2Output

_SETTINGS_ACK: Final = frame(SETTINGS, ACK, 0, b"")


class Http2Control(Http2Output):
    """What the peer says about the connection, and about streams that it has opened."""

    def _on_control(self, kind: int, stream_id: int, flags: int, data: bytes, at: int, stop: int) -> None:
        """All frames but those that make a request."""
        if kind == WINDOW_UPDATE:
            self._on_window_update(stream_id, data, at, stop)
        elif kind == SETTINGS:
            self._on_settings(stream_id, flags, data, at, stop)
        elif kind == PING:
            if stream_id:
                raise Http2Error(PROTOCOL_ERROR, "PING on a stream")
            if stop - at != 8:
                raise Http2Error(FRAME_SIZE_ERROR, "PING has 8 bytes")
            self._annoy(1)
            if not flags & ACK:
                self._out.append(frame(PING, ACK, 0, data[at:stop]))
            elif data[at:stop] == DRAIN_PING:
                self.finish_drain()
        elif kind == RST_STREAM:
            if stop - at != 4:
                raise Http2Error(FRAME_SIZE_ERROR, "RST_STREAM has 4 bytes")
            if stream_id == 0 or stream_id > self._last:
                raise Http2Error(PROTOCOL_ERROR, "RST_STREAM on a stream that was not opened")
            self._annoy(1)
            self._drop(stream_id)
        elif kind == PRIORITY:
            if stream_id == 0:
                raise Http2Error(PROTOCOL_ERROR, "PRIORITY on no stream")
            if stop - at != 5:
                raise Http2Error(FRAME_SIZE_ERROR, "PRIORITY has 5 bytes")
            if uint32(data, at) & MAX_WINDOW == stream_id:
                raise Http2Error(PROTOCOL_ERROR, "a stream depends on itself")
            self._annoy(1)
        elif kind == PUSH_PROMISE:
            raise Http2Error(PROTOCOL_ERROR, "PUSH_PROMISE from a client")
        elif kind == GOAWAY and stream_id:
            raise Http2Error(PROTOCOL_ERROR, "GOAWAY on a stream")
        else:
            self._annoy(1)  # GOAWAY needs no answer; frames that are not known are skipped

    def _on_window_update(self, stream_id: int, data: bytes, at: int, stop: int) -> None:
        if stop - at != 4:
            raise Http2Error(FRAME_SIZE_ERROR, "WINDOW_UPDATE has 4 bytes")
        if stream_id > self._last:
            raise Http2Error(PROTOCOL_ERROR, "WINDOW_UPDATE on a stream that was not opened")
        self._annoy(1)
        more = uint32(data, at) & MAX_WINDOW
        if stream_id == 0:
            if more == 0:
                raise Http2Error(PROTOCOL_ERROR, "WINDOW_UPDATE by nothing")
            self._window += more
            if self._window > MAX_WINDOW:
                raise Http2Error(FLOW_CONTROL_ERROR, "a window of more than 2^31-1 bytes")
            if self._blocked:
                self._push_all()
            return
        stream = self._streams.get(stream_id)
        if stream is None:
            return  # it was answered, or reset, while this was under way
        stream.window += more
        if more == 0 or stream.window > MAX_WINDOW:
            self._reset(stream_id, FLOW_CONTROL_ERROR if more else PROTOCOL_ERROR)
        elif stream_id in self._blocked:
            self._push(stream_id, stream)

    def _on_settings(self, stream_id: int, flags: int, data: bytes, at: int, stop: int) -> None:
        if stream_id:
            raise Http2Error(PROTOCOL_ERROR, "SETTINGS on a stream")
        if (stop - at) % 6 or (flags & ACK and at != stop):
            raise Http2Error(FRAME_SIZE_ERROR, "SETTINGS has 6 bytes for each, and none to acknowledge")
        self._annoy(1 + (stop - at >> 6))
        if flags & ACK:
            return
        window = self._peer_window
        while at < stop:
            name = data[at] << 8 | data[at + 1]
            value = uint32(data, at + 2)
            at += 6
            if name == INITIAL_WINDOW_SIZE:
                if value > MAX_WINDOW:
                    raise Http2Error(FLOW_CONTROL_ERROR, "a window of more than 2^31-1 bytes")
                window = value
            elif name == ENABLE_PUSH and value > 1:
                raise Http2Error(PROTOCOL_ERROR, "SETTINGS_ENABLE_PUSH is 0 or 1")
            elif name == MAX_FRAME_SIZE and not MAX_FRAME <= value <= LARGEST_FRAME:
                raise Http2Error(PROTOCOL_ERROR, "SETTINGS_MAX_FRAME_SIZE is 16,384 to 16,777,215")
        if window != self._peer_window:
            self._resize_windows(window)
        self._out.append(_SETTINGS_ACK)

    def _resize_windows(self, window: int) -> None:
        """Change the window of every stream, which may become negative; once for all the values of a frame."""
        self._annoy(len(self._streams) >> 4)
        more = window - self._peer_window
        self._peer_window = window
        for stream in self._streams.values():
            stream.window += more
            if stream.window > MAX_WINDOW:
                raise Http2Error(FLOW_CONTROL_ERROR, "a window of more than 2^31-1 bytes")
        if more > 0 and self._blocked:
            self._push_all()
