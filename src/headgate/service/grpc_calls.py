"""gRPC over HTTP/2: from a request to a call of this service, and from its answer to a response.

    envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit    needs a token of the scope `check` where one is set
    grpc.health.v1.Health/Check                                    for "", "ratelimit" and Envoy's name of the service

Only unary calls of one small message without compression. Every failure has a status that says what to do about it;
none is UNKNOWN, with which Envoy would let the request pass.
"""

from __future__ import annotations

import logging
from typing import Final, Protocol

from headgate.errors import StoreUnavailable
from headgate.service.http2.connection import Http2Connection
from headgate.service.http2.frames import END_STREAM, HeaderFrame, header_frame, uint32
from headgate.service.http2.hpack import MAX_HEADER_LIST, encode
from headgate.service.http2.request_head import BAD_TIMEOUT, NO_TIMEOUT, RequestHead
from headgate.service.protobuf import MalformedMessage, number, read_texts
from headgate.service.rls_messages import (
    OVER_LIMIT,
    RateLimitRequest,
    RateLimitResponse,
    decode_request,
    encode_response,
)

logger = logging.getLogger("headgate.service")

MAX_MESSAGE: Final = 65_536  # bytes
PREFIX: Final = 5  # bytes before a message: whether it is compressed, and its length
MAX_WHY: Final = 500  # characters of a grpc-message

RATE_LIMIT_SERVICE: Final = "envoy.service.ratelimit.v3.RateLimitService"
SHOULD_RATE_LIMIT: Final = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit"
HEALTH_CHECK: Final = "/grpc.health.v1.Health/Check"

INVALID_ARGUMENT: Final = 3
DEADLINE_EXCEEDED: Final = 4
NOT_FOUND: Final = 5
PERMISSION_DENIED: Final = 7
RESOURCE_EXHAUSTED: Final = 8
UNIMPLEMENTED: Final = 12
INTERNAL: Final = 13
UNAVAILABLE: Final = 14
UNAUTHENTICATED: Final = 16

SERVING: Final = 1
NOT_SERVING: Final = 2
SERVICE_UNKNOWN: Final = 3

_STATUS_TAG: Final = 0x08  # of HealthCheckResponse.status

_CONTENT_TYPE: Final = ("content-type", "application/grpc")
_HEAD: Final = header_frame(encode([(":status", "200"), _CONTENT_TYPE]), 0)
_TRAILER: Final = header_frame(encode([("grpc-status", "0")]), END_STREAM)
_SMALL: Final = 1_024
_PREFIXES: Final = [b"\0" + size.to_bytes(4, "big") for size in range(_SMALL)]

_PLAIN: Final = ("content-type", "text/plain")
_NOT_POST: Final = header_frame(encode([(":status", "405"), ("allow", "POST"), _PLAIN]), 0)
_NOT_GRPC: Final = header_frame(encode([(":status", "415"), _PLAIN]), 0)
_EXPLAINED: Final = b"This port speaks gRPC: POST with the content type application/grpc.\n"
_OVER: Final = encode_response(RateLimitResponse(OVER_LIMIT, []))


class GrpcError(Exception):
    """A call that fails with *status*."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status
        self.why = why


class RateLimitDecisions(Protocol):
    """What decides on a request."""

    def decide_now(self, request: RateLimitRequest) -> RateLimitResponse | None:
        """The answer, or None if it has to be awaited."""
        ...

    async def decide(self, request: RateLimitRequest, timeout: float | None) -> RateLimitResponse: ...


class CallBackend(Protocol):
    """What calls need of the worker."""

    def rules(self) -> RateLimitDecisions | None:
        """The rules in force; None if there are none."""
        ...

    def authorize(self, head: RequestHead) -> None:
        """Raise `GrpcError` if the bearer of the call's token may not check."""
        ...

    def serving(self, service: str) -> int:
        """The health of a service."""
        ...

    def start(
        self, connection: Http2Connection, stream_id: int, request: RateLimitRequest, timeout: float | None
    ) -> None:
        """Decide later; `answer` or `fail` is called then."""
        ...

    def count_failure(self) -> None: ...


class GrpcCalls:
    """The calls of one connection."""

    def __init__(self, backend: CallBackend) -> None:
        self._backend = backend

    def handle(self, connection: Http2Connection, stream_id: int, head: RequestHead, body: bytes) -> None:
        """Answer a request, or start what will."""
        if head.method != "POST" or not is_grpc(head.content_type):
            refusal = _NOT_GRPC if head.method == "POST" else _NOT_POST
            connection.respond(stream_id, refusal, b"" if head.method == "HEAD" else _EXPLAINED, None)
            return
        try:
            message = self._call(connection, stream_id, head, body)
        except Exception as error:
            self.fail_with(connection, stream_id, error)
        else:
            if message is not None:
                self.answer(connection, stream_id, message)

    def _call(self, connection: Http2Connection, stream_id: int, head: RequestHead, body: bytes) -> bytes | None:
        if head.oversized:
            raise GrpcError(RESOURCE_EXHAUSTED, f"metadata of more than {MAX_HEADER_LIST} bytes")
        if head.path == SHOULD_RATE_LIMIT:
            return self._should_rate_limit(connection, stream_id, head, body)
        if head.path == HEALTH_CHECK:
            status = self._backend.serving(read_service(unwrap(head, body)))
            if status == SERVICE_UNKNOWN:
                raise GrpcError(NOT_FOUND, f"there is no such service; {RATE_LIMIT_SERVICE} is here")
            return number(_STATUS_TAG, status)
        raise GrpcError(UNIMPLEMENTED, f"there is no method {head.path:.100}; {SHOULD_RATE_LIMIT[1:]} is here")

    def _should_rate_limit(
        self, connection: Http2Connection, stream_id: int, head: RequestHead, body: bytes
    ) -> bytes | None:
        self._backend.authorize(head)
        rules = self._backend.rules()
        if rules is None:
            raise GrpcError(UNIMPLEMENTED, "no limits are configured; name their files: [envoy] files = [...]")
        timeout = head.timeout
        if timeout == BAD_TIMEOUT:
            raise GrpcError(INVALID_ARGUMENT, "grpc-timeout is not 1 to 8 digits and one of H, M, S, m, u, n")
        # A client can make a message too long by a long header. The answer is OVER_LIMIT, because Envoy would let the
        # request pass after an error.
        if is_too_long(body):
            self._backend.count_failure()
            return _OVER
        request = decode_request(unwrap(head, body))
        response = rules.decide_now(request)
        if response is None:
            self._backend.start(connection, stream_id, request, None if timeout == NO_TIMEOUT else timeout)
            return None
        return encode_response(response)

    def answer(self, connection: Http2Connection, stream_id: int, message: bytes) -> None:
        """Send the answer to a call."""
        size = len(message)
        prefix = _PREFIXES[size] if size < _SMALL else b"\0" + size.to_bytes(4, "big")
        connection.respond(stream_id, _HEAD, prefix + message, _TRAILER)

    def fail(self, connection: Http2Connection, stream_id: int, status: int, why: str) -> None:
        """Send the failure of a call."""
        self._backend.count_failure()
        connection.respond(stream_id, failure(status, why), b"", None)

    def fail_with(self, connection: Http2Connection, stream_id: int, error: BaseException) -> None:
        """Send the failure that an exception stands for; one that stands for none is an error of the service."""
        status, why = INTERNAL, "an error of the service, not of the call; its log has more"
        if isinstance(error, GrpcError):
            status, why = error.status, error.why
        elif isinstance(error, MalformedMessage):
            status, why = INVALID_ARGUMENT, f"the message cannot be read: {error}"
        elif isinstance(error, ValueError):
            status, why = INVALID_ARGUMENT, str(error)
        elif isinstance(error, StoreUnavailable):
            status, why = UNAVAILABLE, f"the store does not answer: {error}"
        elif isinstance(error, TimeoutError):
            status, why = DEADLINE_EXCEEDED, "no decision was made in time"
        else:
            logger.error("Error answering a gRPC call", exc_info=error)
        self.fail(connection, stream_id, status, why)


def is_grpc(content_type: str) -> bool:
    """Whether messages of this type are protocol buffers of gRPC."""
    return content_type == "application/grpc" or content_type.partition(";")[0].rstrip() in (
        "application/grpc",
        "application/grpc+proto",
    )


def is_too_long(body: bytes) -> bool:
    """Whether the message in *body* is too long, or says that it is."""
    size = len(body) - PREFIX
    return size >= 0 and (size > MAX_MESSAGE or uint32(body, 1) > MAX_MESSAGE)


def unwrap(head: RequestHead, body: bytes) -> bytes:
    """The message of a call; `GrpcError` unless it is one, whole, not compressed and not too long."""
    size = len(body) - PREFIX
    if size < 0:
        raise GrpcError(INVALID_ARGUMENT, "the call has no message")
    declared = uint32(body, 1)
    if is_too_long(body):
        raise GrpcError(RESOURCE_EXHAUSTED, f"a message of more than {MAX_MESSAGE} bytes")
    if body[0]:
        raise GrpcError(UNIMPLEMENTED, "compressed messages are not taken; send them with the encoding identity")
    if declared != size:
        raise GrpcError(INVALID_ARGUMENT, "the call has not exactly one whole message")
    return body[PREFIX:]


def read_service(message: bytes) -> str:
    """The service in a grpc.health.v1.HealthCheckRequest."""
    return read_texts(message, 0, len(message))[0]


def failure(status: int, why: str) -> HeaderFrame:
    """A response that is only a status; its text is percent-encoded, as gRPC wants it."""
    shown = "".join(
        chr(byte) if 0x20 <= byte < 0x7F and byte != 0x25 else f"%{byte:02X}"
        for byte in why[:MAX_WHY].encode(errors="replace")
    )
    fields = [(":status", "200"), _CONTENT_TYPE, ("grpc-status", str(status)), ("grpc-message", shown)]
    if status == UNIMPLEMENTED:
        fields.append(("grpc-accept-encoding", "identity"))
    return header_frame(encode(fields), END_STREAM)
