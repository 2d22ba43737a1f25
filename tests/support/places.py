"""A place where limiters keep their state: this process's memory, or a server of ours."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from headgate import AsyncLimiter, Limiter, Quota
from tests.support.servers import Server

ALGORITHMS = ["token_bucket", "leaky_bucket", "fixed_window", "sliding_window", "sliding_window_counter", "gcra"]
BUCKETS = ["token_bucket", "leaky_bucket", "gcra"]  # those that may have a burst; they refill all the time
WINDOWS = ["fixed_window", "sliding_window", "sliding_window_counter"]

QuotaLike = str | Quota | Sequence[str | Quota]


class Place:
    """Make limiters on one store, and close them when the test ends."""

    def __init__(self, server: Server | None) -> None:
        self.server = server
        self.url = server.url if server else "memory://"
        self._open: list[Limiter] = []

    def limiter(self, quota: QuotaLike, **options: Any) -> Limiter:
        limiter = Limiter(_listed(quota), **{"store": self.url, "on_store_error": "raise", **options})
        self._open.append(limiter)
        return limiter

    def async_limiter(self, quota: QuotaLike, **options: Any) -> AsyncLimiter:
        """The caller closes it, in the event loop that used it."""
        return AsyncLimiter(_listed(quota), **{"store": self.url, "on_store_error": "raise", **options})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for limiter in self._open:
            limiter.close()


def _listed(quota: QuotaLike) -> Any:
    return quota if isinstance(quota, str | Quota) else list(quota)
