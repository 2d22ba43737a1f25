"""What granian hands to a handler and what a handler gives back, and the answers that are not about limits."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any, Protocol

import msgspec

Headers = list[tuple[str, str]]
Reply = tuple[int, Headers, str | bytes]


class RequestHeaders(Protocol):
    def get(self, key: str, default: Any = None) -> Any: ...
    def get_all(self, key: str) -> list[str]: ...
    def __contains__(self, key: str) -> bool: ...


class Scope(Protocol):
    """A request without its body, as RSGI has it."""

    @property
    def client(self) -> str: ...
    @property
    def http_version(self) -> str: ...
    @property
    def method(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def query_string(self) -> str: ...
    @property
    def headers(self) -> RequestHeaders: ...


class Stream(Protocol):
    async def send_str(self, data: str) -> None: ...
    async def send_bytes(self, data: bytes) -> None: ...


class Exchange(Protocol):
    """The other half of a request: its body, and where the answer goes."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...
    async def client_disconnect(self) -> None: ...
    def response_empty(self, status: int, headers: Headers) -> None: ...
    def response_str(self, status: int, headers: Headers, body: str) -> None: ...
    def response_bytes(self, status: int, headers: Headers, body: bytes) -> None: ...
    def response_stream(self, status: int, headers: Headers) -> Stream: ...


class Problem(msgspec.Struct):
    """What was wrong and what would be right, as RFC 9457 has it."""

    title: str
    status: int
    detail: str
    type: str = "about:blank"
    requestId: str = ""  # noqa: N815  # a name on the wire


class Refusal(Exception):
    """A request that gets a problem for an answer."""

    def __init__(self, status: int, detail: str, *headers: tuple[str, str]) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.headers = headers


TITLES = {
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    413: "Content Too Large",
    414: "URI Too Long",
    415: "Unsupported Media Type",
    429: "Too Many Requests",
    500: "Internal Server Error",
    503: "Service Unavailable",
}

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

_encode = msgspec.json.encode


def problem(status: int, detail: str, *headers: tuple[str, str], request_id: str = "") -> Reply:
    """The answer to a request that cannot be served."""
    body = _encode(Problem(TITLES[status], status, detail, requestId=request_id))
    return status, [("content-type", "application/problem+json"), ("cache-control", "no-store"), *headers], body


def request_id_of(headers: RequestHeaders) -> str:
    """The client's own id of its request, if it is one that can be sent back."""
    given = headers.get("x-request-id")
    return given if given is not None and _REQUEST_ID.fullmatch(given) else ""


def check_framing(version: str, headers: RequestHeaders) -> None:
    """Refuse what two servers in a row could understand differently: the host of a request, and where its body ends."""
    hosts = len(headers.get_all("host"))
    if hosts > 1 or (hosts == 0 and version != "1"):
        raise Refusal(400, f"the request has {hosts or 'no'} Host fields; HTTP/1.1 needs one", ("connection", "close"))
    codings = headers.get_all("transfer-encoding")
    if codings and [coding.lower() for coding in codings] != ["chunked"]:
        why = f"the transfer coding {', '.join(codings)!r:.60} cannot be read; send chunked, or Content-Length"
        raise Refusal(400, why, ("connection", "close"))


def as_json(value: Any, status: int = 200) -> Reply:
    return status, [("content-type", "application/json"), ("cache-control", "no-store")], _encode(value)
