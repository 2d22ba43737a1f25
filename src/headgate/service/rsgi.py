"""What granian hands to a handler (RSGI), what a handler gives back, and the error that ends a request."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any, Protocol

import msgspec

Headers = list[tuple[str, str]]
Response = tuple[int, Headers, str | bytes]


class Problem(msgspec.Struct):
    """The body of an error, as `headgate.web.problem` writes it."""

    title: str
    status: int
    detail: str
    type: str = "about:blank"
    requestId: str = ""  # noqa: N815  # a name on the wire


class HTTPError(Exception):
    """Ends a request with a problem as its response; *headers* are added to the response's own."""

    def __init__(self, status: int, detail: str, *headers: tuple[str, str]) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.headers = headers


class RequestHeaders(Protocol):
    def get(self, key: str, default: Any = None) -> Any: ...
    def get_all(self, key: str) -> list[str]: ...
    def __contains__(self, key: str) -> bool: ...


class Scope(Protocol):
    """A request without its body."""

    client: str
    http_version: str
    method: str
    path: str
    query_string: str

    @property
    def headers(self) -> RequestHeaders: ...


class Stream(Protocol):
    async def send_str(self, data: str) -> None: ...
    async def send_bytes(self, data: bytes) -> None: ...


class HTTPProtocol(Protocol):
    """The body of a request, and the ways to respond to it."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...
    async def client_disconnect(self) -> None: ...
    def response_empty(self, status: int, headers: Headers) -> None: ...
    def response_str(self, status: int, headers: Headers, body: str) -> None: ...
    def response_bytes(self, status: int, headers: Headers, body: bytes) -> None: ...
    def response_stream(self, status: int, headers: Headers) -> Stream: ...


_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def request_id_of(headers: RequestHeaders) -> str:
    """The id that the client gave its request, or nothing if it cannot be sent back in a header."""
    given = headers.get("x-request-id")
    return given if given is not None and _REQUEST_ID.fullmatch(given) else ""


def check_framing(version: str, headers: RequestHeaders) -> None:
    """Refuse requests that a proxy could read differently: their host, or the end of their body, is not certain."""
    hosts = len(headers.get_all("host"))
    if hosts > 1 or (hosts == 0 and version != "1"):
        why = f"the request has {hosts or 'no'} Host fields; HTTP/1.1 needs one"
        raise HTTPError(400, why, ("connection", "close"))
    codings = headers.get_all("transfer-encoding")
    if codings and [coding.lower() for coding in codings] != ["chunked"]:
        why = f"the transfer coding {', '.join(codings)!r:.60} cannot be read; send chunked, or Content-Length"
        raise HTTPError(400, why, ("connection", "close"))


def json_response(value: Any, status: int = 200) -> Response:
    return status, [("content-type", "application/json"), ("cache-control", "no-store")], msgspec.json.encode(value)
