"""An adapter for requests: every request goes out with a member of a pool.

    session = requests.Session()
    session.mount("https://api.example.com/", PoolAdapter(pool, header("Authorization", "Bearer {}")))

The member is the request's until the head of the answer has come. Raises `PoolExhausted` when none is free in time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

try:
    import requests
    from requests.adapters import HTTPAdapter
    from urllib3.exceptions import NewConnectionError
except ImportError as error:
    raise ImportError("headgate.clients.requests needs requests: pip install 'headgate[requests]'") from error

from headgate._plan import run
from headgate.clients.authorize import Authorize, header
from headgate.clients.retries import Delivery, Drop, Retries, Send, Take, Wait
from headgate.coordination.feedback import Feedback, Learn, of_response, of_stranger
from headgate.coordination.leases import Leased
from headgate.coordination.pool import Pool

__all__ = ["Feedback", "PoolAdapter", "Retries", "header", "of_response", "of_stranger"]


def _may_be_sent(error: requests.RequestException) -> bool:
    """Whether the other side may have got the request, and count it when it comes to it."""
    if isinstance(error, requests.ConnectTimeout):
        return False
    cause = getattr(error.args[0] if error.args else None, "reason", None)
    return isinstance(error, requests.ConnectionError | requests.Timeout) and not isinstance(cause, NewConnectionError)


class PoolAdapter(HTTPAdapter):
    """For `requests.Session.mount`.

    pool       where members come from
    authorize  called with the prepared request and the member before each attempt; see `header`
    retries    how often and how long to try
    origins    URLs of the servers that members are for; if not given, that of the first request. Requests to others, to
               which a redirect may lead, go out without a member. ``"*"``: members are for all servers
    learn      what an answer says about the member, as a function of the response that returns a `Feedback`: if not
               given `of_response`, or `of_stranger` where members are for all servers
    options    of requests' own adapter (pool_connections, pool_maxsize, ...)
    """

    def __init__(
        self,
        pool: Pool,
        authorize: Authorize,
        *,
        retries: Retries | None = None,
        origins: str | Iterable[str] | None = None,
        learn: Learn | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(pool, Pool):
            raise TypeError(f"PoolAdapter takes a Pool, got {type(pool).__name__}")
        super().__init__(**options)
        self._members = pool
        self._delivery = Delivery(authorize, retries, origins, learn)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a PoolAdapter cannot be pickled or copied: mount one in each process")

    def send(self, request: requests.PreparedRequest, *args: Any, **kwargs: Any) -> requests.Response:
        if request.url not in self._delivery.origins:
            return super().send(request, *args, **kwargs)

        def answer(wish: Take | Send | Drop | Wait) -> Any:
            if isinstance(wish, Take):
                return self._members.acquire(timeout=wish.timeout)
            if isinstance(wish, Send):
                return self._send(request, wish.leased, *args, **kwargs)
            return wish.response.close() if isinstance(wish, Drop) else time.sleep(wish.seconds)

        repeatable = request.body is None or isinstance(request.body, bytes | str)
        response: requests.Response = run(self._delivery.plan(request.method or "", repeatable), answer)
        return response

    def _send(
        self, request: requests.PreparedRequest, lease: Leased, *args: Any, **kwargs: Any
    ) -> tuple[requests.Response | Exception, Feedback]:
        response = None
        try:
            with lease as leased:
                leased.excuse()
                mine = request.copy()  # what follows a redirect takes over the headers of the request as it was
                self._delivery.authorize(mine, leased.member)
                leased.unanswered = True
                try:
                    response = super().send(mine, *args, **kwargs)
                    leased.unanswered = False
                except requests.RequestException as error:
                    error.request = request  # the copy has the secret, and errors are logged
                    leased.unanswered = _may_be_sent(error)
                    if not isinstance(error, requests.ConnectionError | requests.Timeout):
                        raise
                    leased.release(failed=True)
                    return error, Feedback("failure")
                response.request = request
                verdict = leased.observe(response, self._delivery.learn)
        except BaseException:
            if response is not None:
                response.close()
            raise
        return response, verdict
