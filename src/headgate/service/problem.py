"""An error that ends a request, and the schema of its body."""

from __future__ import annotations

import msgspec


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
