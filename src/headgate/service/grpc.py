"""The gRPC listener: connections of Envoy's rate-limit service on the worker's event loop.

`http2` and `grpc_calls` know the protocol; here are the socket, the clock and the tasks. A connection is closed, after
its calls were answered, when it is idle for IDLE seconds or as old as [grpc] max_connection_age says, a little more or
less: clients then connect anew, and find workers and instances that have been added.
"""

from __future__ import annotations

import asyncio
import logging
import random
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from headgate.errors import StoreUnavailable
from headgate.service.grpc_calls import (
    MAX_MESSAGE,
    NOT_SERVING,
    PERMISSION_DENIED,
    PREFIX,
    RATE_LIMIT_SERVICE,
    SERVICE_UNKNOWN,
    SERVING,
    UNAUTHENTICATED,
    UNAVAILABLE,
    GrpcCalls,
    GrpcError,
    RateLimitDecisions,
    failure,
)
from headgate.service.http2.connection import Http2Connection
from headgate.service.http2.frames import INTERNAL_ERROR
from headgate.service.http2.request_head import RequestHead
from headgate.service.rls_messages import RateLimitRequest, RateLimitResponse, encode_response
from headgate.service.rsgi import HTTPError
from headgate.service.shared_counters import PROBLEMS, STOPPING

if TYPE_CHECKING:
    from headgate.service.app import App
    from headgate.service.listeners import Listener

logger = logging.getLogger("headgate.service")

TICK = 1.0  # seconds
IDLE = 900  # seconds without a call
AGE_JITTER = 0.1  # of max_connection_age, so that clients that came together do not leave together
STUCK_TICKS = 30  # for a peer that does not read what it is sent
WRITE_BUFFER = 1 << 18  # bytes that the peer has not taken; no more calls are read then
FRAMES_PER_CALL = 2
ANSWERING = 0.25, 0.01  # of a deadline, at most so many seconds: kept for the way of the answer

SERVICES = ("ratelimit", RATE_LIMIT_SERVICE)
CANCELLED = failure(UNAVAILABLE, "the call was cancelled")


class BearerMetadata:
    """The metadata of a call that tokens are checked against."""

    def __init__(self, authorization: str) -> None:
        self._authorization = authorization

    def get(self, key: str, default: Any = None) -> Any:
        return self._authorization if key == "authorization" else default

    def get_all(self, key: str) -> list[str]:
        return [self._authorization] if key in self else []

    def __contains__(self, key: str) -> bool:
        return key == "authorization" and bool(self._authorization)


class GrpcConnection(asyncio.Protocol):
    """One connection of the listener; also the `CallBackend` of its calls."""

    _transport: asyncio.Transport

    def __init__(self, app: App, listener: Listener) -> None:
        self._app = app
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._calls = GrpcCalls(self)
        self._http2 = Http2Connection(self._calls.handle, self._cancel, MAX_MESSAGE + PREFIX)
        self._tasks: dict[int, asyncio.Task[RateLimitResponse]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._lost = False
        self._admitted = False
        self._reading = True
        self._write_paused = False
        self._waiting = False  # for its turn
        self._flushing = False
        self._age_factor = random.uniform(1 - AGE_JITTER, 1 + AGE_JITTER)
        self._ticks = self._idle_ticks = self._drain_ticks = self._stuck_ticks = 0
        self._requests_seen = 0

    # The transport calls these.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are of no class of asyncio
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER)
        if self._listener.add(self, self._transport):
            self._timer = self._loop.call_later(TICK, self._tick)
        else:
            self._lost = True

    def data_received(self, data: bytes) -> None:
        if not self._lost:
            self._run(data)

    def pause_writing(self) -> None:
        self._write_paused = True
        self._stuck_ticks = 0
        self._pause_reading()

    def resume_writing(self) -> None:
        self._write_paused = False
        self._run(b"")

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = True
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._tasks.values()):
            task.cancel()
        self._http2.release()  # connections that come and go would pile up until the next collection of cycles
        self._listener.remove(self)

    # The listener calls these.

    def drain(self) -> None:
        self._http2.drain()
        self._flush()

    def abort(self) -> None:
        self._transport.abort()

    # Reading and writing.

    def _run(self, data: bytes) -> None:
        """Handle what was received, as far as this turn of the event loop has room for it."""
        http2, turn = self._http2, self._listener.turn
        limit = 0 if self._write_paused or self._waiting else max(0, FRAMES_PER_CALL * turn.share)
        try:
            http2.receive(data, limit)
        except Exception:
            logger.exception("Error on a gRPC connection")
            http2.close(INTERNAL_ERROR, "an error of the service")
        if http2.frames:
            turn.spend((http2.frames + 1) // FRAMES_PER_CALL)
            if http2.greeted and not self._admitted:
                self._admitted = True
                self._listener.admit(self)
        self._flush()
        if self._lost or self._transport.is_closing() or self._write_paused or self._waiting:
            return
        if http2.backlog:
            self._waiting = True
            self._pause_reading()
            turn.wait(self._go_on)
        elif not self._reading:
            self._reading = True
            self._transport.resume_reading()

    def _pause_reading(self) -> None:
        if self._reading and not self._transport.is_closing():
            self._reading = False
            self._transport.pause_reading()

    def _go_on(self) -> None:
        self._waiting = False
        if not self._lost:
            self._run(b"")

    def _flush(self) -> None:
        self._flushing = False
        http2 = self._http2
        out = http2.take_output()
        if self._lost or self._transport.is_closing():
            return
        if out:
            self._transport.write(out)
        if http2.closed or (http2.draining() and http2.drained()):
            if http2.error:
                logger.debug("A gRPC connection is closed: %s", http2.error)
            self._transport.close()

    def _tick(self) -> None:
        """Once a second: end what does not go on, and close what is idle, old or stuck."""
        self._timer = self._loop.call_later(TICK, self._tick)
        http2 = self._http2
        http2.tick()
        if http2.requests != self._requests_seen or http2.open_streams():
            self._requests_seen = http2.requests
            self._idle_ticks = 0
        self._idle_ticks += 1
        self._ticks += 1
        limits = self._app.state.settings.grpc
        oldest = limits.max_connection_age * self._age_factor
        if self._idle_ticks > IDLE / TICK or (oldest and self._ticks * TICK >= oldest):
            http2.drain()
        self._drain_ticks += http2.draining()
        self._stuck_ticks += self._write_paused or self._transport.is_closing()
        if self._drain_ticks * TICK > limits.max_connection_age_grace or self._stuck_ticks > STUCK_TICKS:
            self._transport.abort()
        else:
            self._flush()

    # The backend of the calls.

    def rules(self) -> RateLimitDecisions | None:
        found: RateLimitDecisions | None = getattr(self._app.state, "envoy", None)
        return found

    def authorize(self, head: RequestHead) -> None:
        tokens = self._app.state.tokens
        if head.granted is tokens:  # the same head was sent before, and the tokens are still the same
            return
        try:
            tokens.demand("check", BearerMetadata(head.authorization))
        except HTTPError as error:
            raise GrpcError(UNAUTHENTICATED if error.status == 401 else PERMISSION_DENIED, error.detail) from None
        head.granted = tokens

    def serving(self, service: str) -> int:
        if service and service not in SERVICES:
            return SERVICE_UNKNOWN
        stopping = self._app.counters.header[STOPPING] or self._http2.draining()
        return NOT_SERVING if stopping or (service and self.rules() is None) else SERVING

    def count_failure(self) -> None:
        self._app.gauges[PROBLEMS] += 1

    def start(
        self, connection: Http2Connection, stream_id: int, request: RateLimitRequest, timeout: float | None
    ) -> None:
        task = self._loop.create_task(self._decide(request, timeout))
        self._tasks[stream_id] = task
        task.add_done_callback(partial(self._decided, stream_id))

    async def _decide(self, request: RateLimitRequest, timeout: float | None) -> RateLimitResponse:
        rules = self.rules()
        if rules is None:
            raise StoreUnavailable("the limits were removed from the settings")
        if timeout is None:
            return await rules.decide(request, None)
        share, most = ANSWERING
        async with asyncio.timeout(timeout):
            return await rules.decide(request, timeout - min(share * timeout, most))

    def _decided(self, stream_id: int, task: asyncio.Task[RateLimitResponse]) -> None:
        del self._tasks[stream_id]
        calls, http2 = self._calls, self._http2
        error = None if task.cancelled() else task.exception()
        if task.cancelled():  # almost always because the client does not want to know any more
            http2.respond(stream_id, CANCELLED, b"", None)
        elif error is None:
            calls.answer(http2, stream_id, encode_response(task.result()))
        else:
            calls.fail_with(http2, stream_id, error)
        if not self._flushing:  # calls that end in the same turn are written together
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _cancel(self, stream_id: int) -> None:
        task = self._tasks.get(stream_id)
        if task is not None:
            task.cancel()
