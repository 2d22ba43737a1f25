"""An adapter for requests: every request goes out with a member of a pool.

    session = requests.Session()
    session.mount("https://api.example.com/", PoolAdapter(pool, header("Authorization", "Bearer {}")))

The request has the member until the headers of the answer have come. Raises `PoolExhausted` when no member is ready in
time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

try:
    import requests
    from requests.adapters import HTTPAdapter
    from urllib3.exceptions import NewConnectionError
except ImportError as error:
    raise ImportError("headgate.clients.requests needs requests: pip install 'headgate[requests]'") from error

from headgate.clients.authorize import Authorize, header
from headgate.clients.retries import Retries
from headgate.clients.sender import PooledSender, check_pool, passed_through
from headgate.coordination.feedback import Feedback, Learn, of_response, of_stranger
from headgate.coordination.pool import Pool

__all__ = ["Feedback", "PoolAdapter", "Retries", "header", "of_response", "of_stranger"]


def _may_be_sent(error: Exception) -> bool:
    if not isinstance(error, requests.RequestException):
        return True
    if isinstance(error, requests.ConnectTimeout) or not _is_failure(error):
        return False
    cause = getattr(error.args[0] if error.args else None, "reason", None)
    # TLS that fails in the handshake raises the same errors as later
    return not isinstance(cause, NewConnectionError) and not passed_through(error, "do_handshake")


def _is_failure(error: Exception) -> bool:
    return isinstance(error, requests.ConnectionError | requests.Timeout)


class PoolAdapter(HTTPAdapter):
    """For `requests.Session.mount`.

    Args:
        pool: where members come from
        authorize: called with the prepared request and the member before each attempt; see `header`
        retries: how often and how long a request is tried
        origins: URLs of the servers that members are for; if not given, that of the first request. Requests to other
            servers, to which a redirect may lead, go out without a member. ``"*"``: members are for all servers
        learn: what an answer says about the member, as a function of the response that returns a `Feedback`: if not
            given `of_response`, or `of_stranger` where members are for all servers
        **options: of requests' own adapter (pool_connections, pool_maxsize, ...)
    """

    def __init__(
        self,
        pool: Pool,
        authorize: Authorize,
        *,
        origins: str | Iterable[str] | None = None,
        retries: Retries | None = None,
        learn: Learn | None = None,
        **options: Any,
    ) -> None:
        check_pool(self, pool, Pool)
        super().__init__(**options)
        self._members = pool
        self._sender = PooledSender(
            authorize, retries, origins, learn, may_be_sent=_may_be_sent, is_failure=_is_failure
        )

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a PoolAdapter cannot be pickled or copied: mount one in each process")

    def send(self, request: requests.PreparedRequest, *args: Any, **kwargs: Any) -> requests.Response:
        if request.url not in self._sender.origins:
            return super().send(request, *args, **kwargs)
        send = super().send

        def send_copy(copy: requests.PreparedRequest) -> requests.Response:
            try:
                response = send(copy, *args, **kwargs)
            except requests.RequestException as error:
                error.request = request  # the copy has the secret, and errors are logged
                raise
            response.request = request
            return response

        repeatable = request.body is None or isinstance(request.body, bytes | str)
        return self._sender.send(self._members, request.method or "", repeatable, request.copy, send_copy)
