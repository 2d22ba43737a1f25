"""Errors as `application/problem+json` (RFC 9457): what was wrong with a request, and what would be right."""

from __future__ import annotations

import msgspec


class Problem(msgspec.Struct):
    """The body of an error."""

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


def problem(
    status: int, detail: str, *headers: tuple[str, str], request_id: str = ""
) -> tuple[int, list[tuple[str, str]], bytes]:
    """The response to a request that cannot be served: status, headers, body."""
    body = msgspec.json.encode(Problem(TITLES[status], status, detail, requestId=request_id))
    return status, [("content-type", "application/problem+json"), ("cache-control", "no-store"), *headers], body
