"""Thirty requests with three tokens of an API that allows each token five requests in a second.

The API runs in this example, too. It answers one request too many with 429 and Retry-After. The pool knows the quota,
so that this hardly ever happens; where it does, the token rests for as long as the API asked, and another takes over.
"""

import asyncio
import time
from collections import Counter, defaultdict, deque

import aiohttp
from aiohttp import web

from headgate.clients.aiohttp import PoolMiddleware, header
from headgate.coordination import AsyncPool

SECRETS = {"alice": "s3cr3t-1", "bob": "s3cr3t-2", "carol": "s3cr3t-3"}  # by member: the pool has only the names
LIMIT, WINDOW = 5, 1.0
recent: dict[str, deque[float]] = defaultdict(deque)
answers: Counter[int] = Counter()


async def answer(request: web.Request) -> web.Response:
    """The API."""
    now, calls = time.monotonic(), recent[request.headers["Authorization"]]
    while calls and calls[0] <= now - WINDOW:
        calls.popleft()
    status = 429 if len(calls) >= LIMIT else 200
    if status == 200:
        calls.append(now)
    answers[status] += 1
    return web.Response(status=status, headers={"Retry-After": "1"} if status == 429 else {})


async def main() -> None:
    api = web.Application()
    api.router.add_get("/", answer)
    runner = web.AppRunner(api)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]

    pool = AsyncPool("tokens", quota=f"{LIMIT}/second")
    await pool.add(*SECRETS)
    middleware = PoolMiddleware(pool, header("Authorization", "Bearer {}", SECRETS))
    begun = time.monotonic()
    async with aiohttp.ClientSession(middlewares=[middleware], raise_for_status=True) as session:

        async def fetch() -> int:
            async with session.get(f"http://{host}:{port}/") as response:
                return response.status

        done = await asyncio.gather(*(fetch() for _ in range(30)))
    print(f"{len(done)} requests in {time.monotonic() - begun:.1f} s; the API answered {dict(answers)}")
    assert done == [200] * 30 and answers[200] == 30
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(main())
