"""What the workers of all queues do: each job notes that it ran, and each question for a slot is counted."""

import os
import time
from typing import Any

import redis

from headgate import AsyncLimiter, Limiter

URL = os.environ["JOBS_URL"]  # the broker, and the store of the limiter
QUOTA = os.environ.get("JOBS_QUOTA", "100/second burst 1")
FAILING = "fails once"

client: Any = redis.Redis.from_url(URL, decode_responses=True)


def note(name: str) -> None:
    """A job starts."""
    client.rpush("test:starts", f"{name} {time.time()}")


def fails_once(name: str) -> None:
    """Raise the first time."""
    if name.startswith(FAILING) and client.incr(f"test:{name}") == 1:
        raise ValueError("the first attempt")


class CountedLimiter(Limiter):
    def book(self, *args: Any, **kwargs: Any) -> Any:
        client.incr("test:asked")
        return super().book(*args, **kwargs)


class CountedAsyncLimiter(AsyncLimiter):
    async def book(self, *args: Any, **kwargs: Any) -> Any:
        client.incr("test:asked")
        return await super().book(*args, **kwargs)


def options() -> dict[str, Any]:
    store, policy = os.environ.get("JOBS_STORE", URL), os.environ.get("JOBS_POLICY", "raise")
    return {"store": store, "timeout": 20.0, "connect_timeout": 20.0, "on_store_error": policy}
