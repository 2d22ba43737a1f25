"""Wait instead of being refused: in line with `acquire`, evenly spaced with `pace`."""

import asyncio
import time

from headgate import AsyncLimiter, Limiter, RateLimited


def in_line() -> None:
    limiter = Limiter("20/second burst 1")
    started = time.monotonic()
    for _ in range(4):
        limiter.acquire("api.example.com", timeout=1.0)
    print(f"four calls took {time.monotonic() - started:.2f} s, one each 50 ms")
    try:
        limiter.acquire("api.example.com", timeout=0.01)
    except RateLimited as refused:
        print(f"no patience: {refused}")


async def evenly_spaced() -> None:
    limiter = AsyncLimiter("50/second burst 10", algorithm="leaky_bucket")

    @limiter.paced(key=lambda url: url.split("/")[2])
    async def fetch(url: str) -> float:
        return time.monotonic()

    started = time.monotonic()
    times = sorted(await asyncio.gather(*(fetch(f"https://example.com/{page}") for page in range(5))))
    print("started after", ", ".join(f"{1000 * (moment - started):.0f}" for moment in times), "ms")
    assert times[-1] - started >= 0.07, "five calls, 20 ms apart"


in_line()
asyncio.run(evenly_spaced())
