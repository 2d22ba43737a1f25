"""One limiter on a Cluster of one to six nodes: checks a second, and what they cost the servers.

All nodes and the clients share the cores of one machine, so checks a second say little about more machines. What does:
what all servers do for one check, and how evenly checks are spread, as the busiest node is full first. The commands of
a check must not grow with the nodes. Its processor time grows a little: a node that has little to do wakes up for every
single check, and nodes on the same cores take each other's caches. One load is
`python -m benchmarks.cluster LOAD SECONDS PORT...`, which prints one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.cluster_nodes import Node
from benchmarks.figures import Bar
from benchmarks.team import ROOT
from benchmarks.workload import quiet

QUOTA = "100/hour"
COUNTS = (1, 2, 3, 4, 6)
THREADS = 4
TASKS = 256
KEYS = 20_000
WARM_UP = 1_024  # checks before the clock starts: connections are opened; the servers count them too
IDLE_SECONDS = 0.5
THREADS_LOAD, TASKS_LOAD = f"Limiter, {THREADS} threads", f"AsyncLimiter, {TASKS} tasks"
MOST_CPU = 1.25  # a check, times that of one node
MOST_COMMANDS = 1.02  # a check, times those of one node
MOST_UNEVEN = 1.1  # times its fair share, for the busiest node


def url(ports: Sequence[str]) -> str:
    return "redis+cluster://" + ",".join(f"127.0.0.1:{port}" for port in ports) + "?timeout=10"


def threads(ports: Sequence[str], seconds: float) -> dict[str, float]:
    from headgate import Limiter

    done = [0] * THREADS
    with Limiter(QUOTA, store=url(ports), on_store_error="raise") as limiter:
        for number in range(WARM_UP):
            limiter.try_acquire(f"warm-up:{number}")
        end = 0.0

        def work(mine: int) -> None:
            number = mine
            while time.monotonic() < end:
                limiter.try_acquire(f"user:{number % KEYS:07d}")
                number += THREADS
            done[mine] = (number - mine) // THREADS

        with quiet():
            begun = time.monotonic()
            end = begun + seconds
            team = [threading.Thread(target=work, args=(mine,)) for mine in range(THREADS)]
            for thread in team:
                thread.start()
            for thread in team:
                thread.join()
            took = time.monotonic() - begun
    return {"checks": sum(done), "seconds": took}


async def tasks(ports: Sequence[str], seconds: float) -> dict[str, float]:
    from headgate import AsyncLimiter

    async with AsyncLimiter(QUOTA, store=url(ports), on_store_error="raise") as limiter:
        await asyncio.gather(*(limiter.try_acquire(f"warm-up:{number}") for number in range(WARM_UP)))
        checks, end = 0, 0.0

        async def work(number: int) -> None:
            nonlocal checks
            while time.monotonic() < end:
                await limiter.try_acquire(f"user:{number % KEYS:07d}")
                number += TASKS
                checks += 1

        with quiet():
            begun = time.monotonic()
            end = begun + seconds
            await asyncio.gather(*(work(number) for number in range(TASKS)))
            took = time.monotonic() - begun
    return {"checks": checks, "seconds": took}


def measure(load: str, nodes: Sequence[Node], seconds: float, path: str | None) -> dict[str, Any]:
    """One load on the Cluster: checks a second, microseconds of all servers a check, and each node's share."""
    for node in nodes:
        node.client.flushall()
        node.client.config_resetstat()
    idle = [node.cpu_seconds() for node in nodes]
    time.sleep(IDLE_SECONDS)  # what nodes compute while nobody asks them anything: gossip, timers
    before = [node.cpu_seconds() for node in nodes]
    resting = [(now - then) / IDLE_SECONDS for now, then in zip(before, idle, strict=True)]
    command = [sys.executable, "-m", "benchmarks.cluster", load, str(seconds), *(str(node.port) for node in nodes)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [path, str(ROOT)]))}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, timeout=600, check=True
    )
    found = json.loads(done.stdout)
    spent = [node.cpu_seconds() - at for node, at in zip(nodes, before, strict=True)]
    busy = [max(0.0, cpu - rest * found["seconds"]) for cpu, rest in zip(spent, resting, strict=True)]
    keys = [node.keys() for node in nodes]
    reads = sum(node.reads() for node in nodes)
    served = found["checks"] + WARM_UP
    return {
        "per_second": found["checks"] / found["seconds"],
        "server_us": sum(busy) / served * 1e6,
        "commands": sum(node.commands() for node in nodes) / served,
        "checks_per_trip": served / reads,
        "keys": keys,
        "busiest": max(busy) / sum(busy),  # its share of the servers' time
        "fullest": max(keys) / sum(keys),
    }


def medians(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Give the medians; and `full_at`, the checks a second at which the busiest node would take a whole core."""
    found = {name: median(each[name] for each in rounds) for name in rounds[0] if name != "keys"}
    full = 1e6 / (found["server_us"] * found["busiest"])
    return found | {"keys": rounds[-1]["keys"], "full_at": full, "rounds": rounds}


def bars(found: dict[str, dict[str, Any]]) -> list[Bar]:
    """By load, then by the number of nodes."""
    made = []
    least, most = str(min(COUNTS)), str(max(COUNTS))
    for load, by in found.items():
        more = by[most]["commands"] / by[least]["commands"]
        what = f"cluster, {load}: commands a check with {most} nodes, times those of one"
        made.append(Bar(what, f"<= {MOST_COMMANDS}", f"{more:.3f}", more <= MOST_COMMANDS))
        cpu = by[most]["server_us"] / by[least]["server_us"]
        what = f"cluster, {load}: servers' CPU time a check with {most} nodes, times that of one"
        made.append(Bar(what, f"<= {MOST_CPU}", f"{cpu:.2f}", cpu <= MOST_CPU))
    uneven = found[THREADS_LOAD][most]["fullest"] * int(most)
    what = f"cluster: keys on the fullest of {most} nodes, times its fair share"
    return [*made, Bar(what, f"<= {MOST_UNEVEN}", f"{uneven:.3f}", uneven <= MOST_UNEVEN)]


def main(load: str, seconds: str, *ports: str) -> None:
    if load == THREADS_LOAD:
        found = threads(ports, float(seconds))
    else:
        found = asyncio.run(tasks(ports, float(seconds)))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
