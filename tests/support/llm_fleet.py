"""Processes that call an LLM server which enforces limits, as fast as they may; the server counts what it refuses.

    python -m tests.support.llm_fleet --processes 8 --seconds 60

Every process has many callers with requests of random sizes; half are streams, and some of these are broken off.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from headgate import AsyncBudget
from headgate.clients.llm import AsyncBudgetTransport
from tests.support.llm_server import LLMServer
from tests.support.servers import KINDS, Server

ROOT = Path(__file__).parent.parent.parent
BROKEN = 0.002  # the chance that a stream is broken off at a line, after the first six


@dataclass
class Outcome:
    """What the server counted."""

    served: int
    refused: int
    refused_late: int  # after the first sixth of the time
    share: float  # of the tokens that it would have given


async def call(client: httpx.AsyncClient, url: str, dice: random.Random, broken: float) -> None:
    body: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": "hello " * dice.randrange(1, 60)}],
        "max_tokens": dice.randrange(100, 500),
        "seed": dice.randrange(50, 500),
    }
    if dice.random() < 0.5:
        await client.post(url, json=body)
        return
    async with client.stream("POST", url, json=body | {"stream": True}) as response:
        pieces = 0
        async for _ in response.aiter_lines():
            pieces += 1
            if pieces > 6 and dice.random() < broken:
                return


async def work(
    store: str, url: str, quotas: dict[str, Any], seed: int, seconds: float, callers: int, broken: float
) -> None:
    budget = AsyncBudget(store=store, name="fleet", **quotas)
    limits = httpx.Limits(max_connections=callers)
    transport = AsyncBudgetTransport(budget, timeout=None, transport=httpx.AsyncHTTPTransport(limits=limits))
    async with httpx.AsyncClient(transport=transport, timeout=60) as client:
        dice, until = random.Random(seed), asyncio.get_running_loop().time() + seconds

        async def caller() -> None:
            while asyncio.get_running_loop().time() < until:
                await call(client, url, dice, broken)

        tasks = [asyncio.create_task(caller()) for _ in range(callers)]
        await asyncio.wait(tasks, timeout=seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await budget.aclose()


def run_fleet(
    store: str, processes: int, seconds: float, period: float, callers: int = 12, broken: float = BROKEN
) -> Outcome:
    """Run the fleet against 500 requests and 100,000 tokens in 60 seconds, scaled to *period* seconds."""
    requests, tokens = 500, 100_000
    with LLMServer(requests, tokens, period, pause=0.002) as server:
        quotas = {"requests": f"{requests}/{period:g}s", "tokens": f"{tokens}/{period:g}s"}
        given = [store, f"{server.url}/v1/chat/completions", json.dumps(quotas)]
        command = [sys.executable, "-m", "tests.support.llm_fleet", "--work", *given]
        workers = [
            subprocess.Popen([*command, str(seed), str(seconds), str(callers), str(broken)], cwd=ROOT)
            for seed in range(processes)
        ]
        for worker in workers:
            worker.wait(timeout=seconds + 60)
        possible = tokens + tokens / period * (server.last - server.first)
        late = [at for at in server.refusals if at > seconds / 6]
        return Outcome(server.served, len(server.refusals), len(late), server.used / possible)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--period", type=float, default=60.0)
    parser.add_argument(
        "--broken", type=float, default=BROKEN, help="the share of streams, line by line: 0.008 is most"
    )
    parser.add_argument("--work", nargs=7)
    arguments = parser.parse_args()
    if arguments.work:
        store, url, quotas, seed, seconds, callers, broken = arguments.work
        asyncio.run(work(store, url, json.loads(quotas), int(seed), float(seconds), int(callers), float(broken)))
        return
    server = Server(KINDS[0])
    try:
        outcome = run_fleet(
            server.url, arguments.processes, arguments.seconds, arguments.period, broken=arguments.broken
        )
    finally:
        server.stop()
    print(outcome)
    assert outcome.refused_late == 0 and outcome.share >= 0.95, "the bars: no late refusal, and 95 % of the tokens"


if __name__ == "__main__":
    main()
