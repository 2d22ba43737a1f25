"""A fleet of crawlers that is never banned, although its workers know nothing of each other and some are killed.

The site that they crawl runs in this example, too. It lets each token make 30 requests in any 3 seconds; a token that
makes one more is banned for good. Now and then it fails. Four workers, each a process with several tasks, share three
tokens through a pool on Redis. Two workers are killed in the middle of their work, and new ones take their place.

Set HEADGATE_EXAMPLE_REDIS to the URL of a Redis of yours.
"""

import asyncio
import os
import random
import subprocess
import sys
import time
from collections import defaultdict, deque
from typing import Any

import httpx

from headgate.clients.httpx import AsyncPoolTransport, Retries, header
from headgate.coordination import AsyncPool
from headgate.errors import HeadgateError, StoreUnavailable

REDIS = os.environ.get("HEADGATE_EXAMPLE_REDIS", "redis://localhost:6379/0")
TOKENS = ("token-1", "token-2", "token-3")
LIMIT, WINDOW, ROUNDS = 30, 3.0, 3
LEAST = float(os.environ.get("HEADGATE_EXAMPLE_LEAST", "0.5"))  # share of what the site allows
NAME = f"crawler-{os.getpid()}"
# A worker that is paused for longer than the lease, just before it sends a request, sends it when the pool has leased
# the token to another worker. So the lease must be longer than any such pause.
RULES: Any = {"quota": f"{LIMIT}/{WINDOW:g} seconds", "failures": 5, "open_for": 1.0, "slots": 5, "lease": 10.0}


class Site:
    """A server that bans tokens which exceed its limit."""

    def __init__(self) -> None:
        self.visits: dict[str, deque[float]] = defaultdict(deque)
        self.served: list[float] = []
        self.banned: set[str] = set()
        self.dice = random.Random(1)

    def visit(self, token: str, now: float) -> int:
        """The status for one more visit."""
        recent = self.visits[token]
        while recent and recent[0] <= now - WINDOW:
            recent.popleft()
        recent.append(now)
        if len(recent) > LIMIT:
            self.banned.add(token)
        if token in self.banned:
            return 403
        self.served.append(now)
        return 500 if self.dice.random() < 0.02 else 200

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                token = head.lower().partition(b"bearer ")[2].partition(b"\r")[0].decode()
                status = self.visit(token, time.monotonic())
                writer.write(f"HTTP/1.1 {status} -\r\nContent-Length: 0\r\n\r\n".encode())
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the worker was killed
        finally:
            writer.close()


async def work(name: str, url: str, seconds: float) -> None:
    """Crawl with several tasks. Limits, cooldowns and retries are the business of the pool and the transport."""
    pool = AsyncPool(name, store=REDIS, **RULES)
    transport = AsyncPoolTransport(pool, header("Authorization", "Bearer {}"), retries=Retries(timeout=seconds))
    until = time.monotonic() + seconds

    async def crawl(client: httpx.AsyncClient) -> None:
        while time.monotonic() < until:
            try:
                await client.get(url)
            except (HeadgateError, httpx.TransportError) as error:
                print(f"worker {os.getpid()}: {error}")

    async with httpx.AsyncClient(transport=transport, timeout=10) as client:
        tasks = [asyncio.create_task(crawl(client)) for _ in range(5)]
        await asyncio.wait(tasks, timeout=seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def main() -> None:
    site = Site()
    server = await asyncio.start_server(site.handle, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    pool = AsyncPool(NAME, store=REDIS, **RULES)
    try:
        await pool.add(*TOKENS)
    except StoreUnavailable:
        sys.exit("no Redis answers: start one here, or set HEADGATE_EXAMPLE_REDIS to the URL of yours")
    seconds = WINDOW * ROUNDS + 2.0

    def hire() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, __file__, NAME, url, str(seconds)])

    workers = [hire() for _ in range(4)]
    while not site.served:  # noqa: ASYNC110  # the site has no event for its first visit
        await asyncio.sleep(0.01)
    begun = site.served[0]
    for victim in workers[:2]:
        await asyncio.sleep(WINDOW)
        victim.kill()
        workers.append(hire())
    await asyncio.sleep(max(begun + WINDOW * ROUNDS - time.monotonic(), 0))
    for worker in workers:
        worker.kill()  # no worker needs to be stopped gently, either
        await asyncio.to_thread(worker.wait)
    server.close()
    status = await pool.status()
    allowed = LIMIT * ROUNDS * len(TOKENS)
    made = sum(when < begun + WINDOW * ROUNDS for when in site.served)
    print(f"{made} of {allowed} requests that the site allows in {WINDOW * ROUNDS:g} s: {made / allowed:.0%}")
    print(f"banned: {len(site.banned)}; {status.ready} of {len(TOKENS)} tokens may be used again at once")
    assert not site.banned, "never"
    assert made >= LEAST * allowed, "the machine was very busy, or something is wrong"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(work(sys.argv[1], sys.argv[2], float(sys.argv[3])))
    else:
        asyncio.run(main())
