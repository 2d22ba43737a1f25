"""What the page says beside its figures: for each part what they mean for a user, in two sentences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks import page_library, page_proof, page_service
from benchmarks.page_library import Parts

INTRODUCTION = """
headgate beside its peers, on one machine. `python -m benchmarks.page` has written this page from the figures that the
benchmarks kept; no figure on it was typed in by hand.
""".strip()

READING = """
## How to read it

- **Ratios hold, microseconds do not.** Both sides of a ratio were measured in turns on the same machine; on another
  machine the times are others and the ratios much the same. 4.0x beside a peer: it takes four times as long as
  headgate.
- **A check** asks for one permit of one of many keys; half of all checks are refused, for every library alike.
- **Two cores** carry clients and servers here, so what a server can do is bounded by the client beside it.
- **Promises** are what headgate says of itself. A missed one is shown like a met one.
- How contenders are treated alike, and what each part does, is in [benchmarks/README.md](../benchmarks/README.md).
""".strip()

REPEAT = """
## Repeat it

```console
$ make bench-report                                        # all of it: this page and its pictures, for your machine
$ make bench BENCH_FLAGS="--only redis --only latency"     # some parts, as tables in the terminal
$ make bench BENCH_FLAGS="--quick"                         # to see that it works
$ make bench BENCH_FLAGS="--server valkey"                 # beside Valkey in place of Redis
```

An idle machine gives steady figures; a busy one does not treat all contenders alike.
""".strip()


@dataclass(frozen=True, slots=True)
class Section:
    """A part's heading, what its figures mean for a user in two sentences, and how they are shown."""

    part: str
    heading: str
    meaning: str
    show: Callable[[Parts], list[str]]


SECTIONS = (
    Section(
        "memory",
        "In memory",
        "One process that limits itself pays well under a microsecond a decision, so a limit can stand in front of "
        "every call. The compiled build is what a wheel installs; plain Python is what runs where there is no wheel.",
        page_library.memory,
    ),
    Section(
        "redis",
        "On Redis",
        "A check by many servers on one limit is one script and one round trip, whatever the algorithm, and its answer "
        "says what remains and when to come back. Most of its time is the wire and the client library, so algorithms "
        "hardly differ: choose by what they promise.",
        page_library.redis,
    ),
    Section(
        "async",
        "Under asyncio",
        "Checks that are awaited at the same time travel together, so a busy event loop gets many times the throughput "
        "of one connection for each task. You change nothing for it: `await limiter.try_acquire(key)` is all.",
        page_library.asynchronous,
    ),
    Section(
        "hybrid",
        "Hybrid",
        "A `HybridLimiter` decides at the speed of memory and still keeps one limit for all processes, because it "
        "leases permits from Redis in the background. Use it where a round trip for each request is too slow, or too "
        "much load for Redis.",
        page_library.hybrid,
    ),
    Section(
        "latency",
        "A Redis that is farther away",
        "Over a network you pay one round trip a check, never two, and 256 tasks pay hardly more than one. A warm key "
        "of the hybrid limiter pays none, however far away Redis is; only the first call of a key waits.",
        page_proof.latency,
    ),
    Section(
        "cluster",
        "A Cluster of one to six nodes",
        "Keys spread evenly and a check is the same few commands on any number of nodes, so a Cluster grows with its "
        "nodes, if not quite in proportion. One key is always on one node: for a single hot key more nodes do not "
        "help, and a `HybridLimiter` does.",
        page_proof.cluster,
    ),
    Section(
        "sizing",
        "How much memory a user takes",
        "Plan with 100 to 200 bytes a user in Redis, about as many in a process, and half of that in `shared://`. Most "
        "of it is not the limiter's state but what a server or Python keeps for any key.",
        page_proof.sizing,
    ),
    Section(
        "size",
        "A million keys in memory, and a flood of ten million",
        "A process holds a million users in the memory of a browser tab. An attacker who sends a new key with every "
        "request cannot make it grow further, nor push out a key that is at its limit.",
        page_proof.size,
    ),
    Section(
        "shared",
        "Several processes of one machine",
        "Workers under gunicorn or uvicorn share exact limits through `shared://` without a server, at a fraction of "
        "the cost of a local Redis. Four processes on one key all get their share.",
        page_library.shared,
    ),
    Section(
        "postgresql",
        "On PostgreSQL",
        "Where there is a database and no Redis, a check costs one statement. Under asyncio checks travel together, so "
        "they can be cheaper than a bare `SELECT 1` each.",
        page_library.postgresql,
    ),
    Section(
        "remote",
        "A service as the store",
        "Python programs can use a headgate service as their store: a hop as far as Redis, with the service's rules, "
        "metrics and live page. If that service itself keeps its state in Redis, you pay both hops.",
        page_library.remote,
    ),
    Section(
        "service",
        "The service over HTTP",
        "One worker is promised to answer 10,000 checks a second with a p99 below 10 ms, and half of this machine goes "
        "to the client that asks. Two instances on one Redis together admit what one limit allows, also overloaded.",
        page_service.service,
    ),
    Section(
        "resp",
        "The service over the Redis protocol",
        "Any Redis client can ask by `CL.THROTTLE`, in any language, without a library of ours. Pipelines multiply the "
        "throughput, as with Redis itself.",
        page_service.resp,
    ),
    Section(
        "grpc",
        "Envoy's rate-limit service over gRPC",
        "Envoy can ask headgate in place of envoyproxy/ratelimit. Our own HTTP/2 server answers several times as many "
        "calls as the usual Python server that decides nothing.",
        page_service.grpc,
    ),
    Section(
        "web",
        "Web frameworks",
        "A limit on a route costs a few percent of what the application can serve when it does nothing else; with real "
        "work in a handler it cannot be measured. Compare with the peer's line: that is the cost you would save.",
        page_service.web,
    ),
    Section(
        "lock",
        "Locks",
        "An acquisition of a free lock is one round trip, and a waiter is woken when the lock is released instead of "
        "asking again and again. The promise is a p99 below 50 ms.",
        page_library.lock,
    ),
    Section(
        "budget",
        "Budgets",
        "To reserve tokens before a call and settle what it really cost takes two round trips, and microseconds in "
        "memory. Beside a call to a language model it is nothing.",
        page_library.budget,
    ),
)
