"""Errors as `application/problem+json` (RFC 9457): what was wrong with a request, and what would be right."""

from __future__ import annotations

import json

CONTENT_TYPE = "application/problem+json"

TITLES = {
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    409: "Conflict",
    413: "Content Too Large",
    414: "URI Too Long",
    415: "Unsupported Media Type",
    429: "Too Many Requests",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


def problem_body(status: int, detail: str, **members: object) -> bytes:
    """The body of an error; *members* are added to those of the RFC."""
    body = {"title": TITLES[status], "status": status, "detail": detail, "type": "about:blank", **members}
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()


def problem(
    status: int, detail: str, *headers: tuple[str, str], **members: object
) -> tuple[int, list[tuple[str, str]], bytes]:
    """The response to a request that cannot be served: status, headers, body."""
    fixed = [("content-type", CONTENT_TYPE), ("cache-control", "no-store")]
    return status, [*fixed, *headers], problem_body(status, detail, **members)
