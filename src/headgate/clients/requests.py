"""An adapter for requests: every request goes out with a member of a pool.

    session = requests.Session()
    session.mount("https://api.example.com/", PoolAdapter(pool, header("Authorization", "Bearer {}")))

The member is the request's until the head of the answer has come. Raises `PoolExhausted` when none is free in time.
"""

from __future__ import annotations

import time
from typing import Any

try:
    import requests
    from requests.adapters import HTTPAdapter
except ImportError as error:
    raise ImportError("headgate.clients.requests needs requests: pip install 'headgate[requests]'") from error

from headgate.clients.retries import Authorize, Drop, Retries, Send, Take, Wait, deliver, header
from headgate.coordination.feedback import Feedback
from headgate.coordination.pool import Pool
from headgate.plan import run

__all__ = ["PoolAdapter", "Retries", "header"]


class PoolAdapter(HTTPAdapter):
    """For `requests.Session.mount`.

    pool       where members come from
    authorize  called with the prepared request and the member before each attempt; see `header`
    retries    how often and how long to try
    options    of requests' own adapter (pool_connections, pool_maxsize, ...)
    """

    def __init__(self, pool: Pool, authorize: Authorize, *, retries: Retries | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._members = pool
        self._authorize = authorize
        self._retries = retries or Retries()

    def send(self, request: requests.PreparedRequest, *args: Any, **kwargs: Any) -> requests.Response:
        def answer(wish: Take | Send | Drop | Wait) -> Any:
            if isinstance(wish, Take):
                return self._members.acquire(timeout=wish.timeout)
            if isinstance(wish, Send):
                with wish.leased as leased:
                    self._authorize(request, leased.member)
                    try:
                        response = HTTPAdapter.send(self, request, *args, **kwargs)
                    except (requests.ConnectionError, requests.Timeout) as error:
                        leased.release(failed=True)
                        return error, Feedback("failure")
                    return response, leased.observe(response)
            return wish.response.close() if isinstance(wish, Drop) else time.sleep(wish.seconds)

        repeatable = request.body is None or isinstance(request.body, bytes | str)
        response: requests.Response = run(deliver(self._retries, request.method or "", repeatable), answer)
        return response
