"""Whether a limit holds: 60 requests at once against 20 an hour, at every door of headgate and of its peers.

    make exactness                                  # the peers in an environment of their own
    python -m benchmarks.exactness                  # what is installed
    python -m benchmarks.exactness --only slowapi --runs 20

Each application runs in two worker processes on one Redis. A run sends 60 requests of one client at once: to one
worker, and to both (30 each). Then 30 requests, one after the other, each with another X-Forwarded-For, from a peer
that no setting trusts. A limit that holds admits 20 each time, and then another client. WSGI applications are called
from as many threads as there are requests, the others by tasks of one event loop; aiohttp by its server and client.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import select
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.web_apps import DOORS, LIMIT, Door

ROOT = Path(__file__).resolve().parent.parent
REQUESTS, FORGED = 60, 30
PATIENCE = 30.0  # seconds
PEER, OTHER = "203.0.113.7", "203.0.113.8"

Statuses = Counter[int]


# ---------------------------------------------------------------------------------------------------- in a worker


class Threads:
    """A WSGI application, called from threads that start together."""

    def __init__(self, app: Any) -> None:
        self.app = app

    def burst(self, requests: int) -> Statuses:
        start = threading.Barrier(requests)
        statuses: Statuses = Counter()

        def ask() -> None:
            start.wait()
            statuses[self._ask("")] += 1

        threads = [threading.Thread(target=ask) for _ in range(requests)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return statuses

    def forged(self, requests: int) -> Statuses:
        return Counter(self._ask(f"198.51.100.{n}") for n in range(requests))

    def other(self, requests: int) -> Statuses:
        """Requests of another client."""
        return Counter(self._ask("", OTHER) for _ in range(requests))

    def _ask(self, forwarded: str, peer: str = PEER) -> int:
        from wsgiref.util import setup_testing_defaults

        environ: dict[str, Any] = {"REMOTE_ADDR": peer, "PATH_INFO": "/", "SCRIPT_NAME": "", "QUERY_STRING": ""}
        setup_testing_defaults(environ)
        if forwarded:
            environ["HTTP_X_FORWARDED_FOR"] = forwarded
        seen: list[str] = []

        def start_response(status: str, headers: Any, exc_info: Any = None) -> Any:
            seen[:] = [status]
            return lambda data: None

        body = self.app(environ, start_response)
        for _ in body:
            pass
        getattr(body, "close", lambda: None)()
        return int(seen[0][:3])


class Tasks:
    """An application of an event loop, called by tasks."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.loop = asyncio.new_event_loop()
        self.loop.run_until_complete(self.start())

    def burst(self, requests: int) -> Statuses:
        return self.loop.run_until_complete(self._burst(requests))

    def forged(self, requests: int) -> Statuses:
        return self.loop.run_until_complete(self._forged(requests))

    def other(self, requests: int) -> Statuses:
        return self.loop.run_until_complete(self._other(requests))

    async def start(self) -> None:
        """What a server does before the first request: the lifespan of ASGI."""
        before = getattr(getattr(self.app, "state", None), "before", None)
        if before is not None:
            await before()
        if hasattr(self.app, "asgi"):
            self.app.asgi = True
        started = asyncio.Event()
        messages = iter([{"type": "lifespan.startup"}])

        async def receive() -> Any:
            for message in messages:
                return message
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            started.set()

        async def lifespan() -> None:
            try:
                await self.app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, receive, send)
            except Exception:  # an application need not know it, and says so by raising
                logging.getLogger(__name__).debug("no lifespan", exc_info=True)
            started.set()

        self._lifespan = asyncio.ensure_future(lifespan())
        await started.wait()

    async def ask(self, forwarded: str, peer: str = PEER) -> int:
        headers = [(b"host", b"localhost"), *([(b"x-forwarded-for", forwarded.encode())] if forwarded else [])]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "path": "/",
            "raw_path": b"/",
            "root_path": "",
            "query_string": b"",
            "headers": headers,
            "client": (peer, 40000),
            "server": ("localhost", 80),
            "state": {},
        }
        status = 0
        asked = False

        async def receive() -> Any:
            nonlocal asked
            if asked:
                await asyncio.Event().wait()
            asked = True
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]

        await self.app(scope, receive, send)
        return status

    async def _burst(self, requests: int) -> Statuses:
        return Counter(await asyncio.gather(*[self.ask("") for _ in range(requests)]))

    async def _forged(self, requests: int) -> Statuses:
        return Counter([await self.ask(f"198.51.100.{n}") for n in range(requests)])

    async def _other(self, requests: int) -> Statuses:
        return Counter([await self.ask("", OTHER) for _ in range(requests)])


class AiohttpTasks(Tasks):
    """An application of aiohttp, behind its own server."""

    async def start(self) -> None:
        from aiohttp import ClientSession, TCPConnector
        from aiohttp.test_utils import TestServer

        self.server = TestServer(self.app)
        await self.server.start_server()
        addresses = {PEER: "127.0.0.1", OTHER: "127.0.0.2"}
        self.clients = {
            peer: ClientSession(connector=TCPConnector(limit=0, local_addr=(address, 0)))
            for peer, address in addresses.items()
        }

    async def ask(self, forwarded: str, peer: str = PEER) -> int:
        headers = {"X-Forwarded-For": forwarded} if forwarded else {}
        async with self.clients[peer].get(self.server.make_url("/"), headers=headers) as response:
            return int(response.status)


CALLERS: dict[str, Any] = {"wsgi": Threads, "asgi": Tasks, "aiohttp": AiohttpTasks}


def work(name: str, url: str) -> None:
    """Serve one application: read commands, one a line, and answer each with the statuses that were seen."""
    door = next(door for door in DOORS if door.name == name)
    logging.disable(logging.CRITICAL)
    try:
        # By default a check that takes longer than 0.08 s is answered by on_store_error, as in an outage. 60 threads on
        # a busy machine are none; the peers have no time-out at all.
        caller = CALLERS[door.kind](door.make(f"{url}?timeout=5" if door.ours else url))
        packages = {package for package in (door.package, door.framework) if package and package != "headgate"}
        print(json.dumps({"versions": {package: version(package) for package in packages}}), flush=True)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"[:200]}), flush=True)
        return
    for line in sys.stdin:
        command, requests = line.split()
        try:
            print(json.dumps(getattr(caller, command)(int(requests))), flush=True)
        except Exception as error:
            print(json.dumps({"error": f"{type(error).__name__}: {error}"[:200]}), flush=True)


# ---------------------------------------------------------------------------------------------------- in the parent


class Worker:
    """A process that runs one application."""

    def __init__(self, python: str, door: Door, url: str) -> None:
        command = [python, "-m", "benchmarks.exactness", "--worker", door.name, "--url", url]
        environment = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PATH": "/usr/bin:/bin", "PYTHONWARNINGS": "ignore"}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, cwd=ROOT, env=environment
        )

    def send(self, command: str, requests: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command} {requests}\n")
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], PATIENCE)[0]:
            return {"error": f"no answer in {PATIENCE:g} s"}
        line = self.process.stdout.readline()
        found: dict[str, Any] = json.loads(line) if line else {"error": "it ended"}
        return found

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()


@dataclass(slots=True)
class Result:
    """How many were admitted, run by run; what is neither admitted nor refused is an error."""

    door: Door
    versions: dict[str, str] = field(default_factory=dict)
    one: list[int] = field(default_factory=list)
    two: list[int] = field(default_factory=list)
    forged: list[int] = field(default_factory=list)
    other: list[int] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)

    def add(self, runs: list[int], *answers: dict[str, Any]) -> None:
        for answer in answers:
            if "error" in answer:
                self.errors[str(answer["error"])] += 1
            for status, times in answer.items():
                if status not in ("200", "429", "403", "error"):
                    self.errors[f"status {status}"] += times
        runs.append(sum(int(answer.get("200", 0)) for answer in answers))


def measure(door: Door, python: str, url: str, flush: Any, runs: int) -> Result:
    result = Result(door)
    with ExitStack() as stack:
        workers = [Worker(python, door, url) for _ in range(2)]
        for worker in workers:
            stack.callback(worker.stop)
        for worker in workers:
            hello = worker.receive()
            if "error" in hello:
                result.errors[hello["error"]] += 1
                return result
            result.versions = hello["versions"]
        for _ in range(runs):
            flush()
            workers[0].send("burst", REQUESTS)
            result.add(result.one, workers[0].receive())
            workers[0].send("other", 1)
            result.add(result.other, workers[0].receive())
            flush()
            for worker in workers:
                worker.send("burst", REQUESTS // 2)
            result.add(result.two, *[worker.receive() for worker in workers])
            flush()
            workers[0].send("forged", FORGED)
            result.add(result.forged, workers[0].receive())
    return result


@contextmanager
def redis_server(kind: str) -> Iterator[tuple[str, str, Any]]:
    import redis

    from benchmarks.server import running

    with running(kind) as server, redis.Redis.from_url(server.url) as client:
        yield server.url, server.description, client.flushall


def span(runs: list[int]) -> str:
    if not runs:
        return "-"
    return str(runs[0]) if len(set(runs)) == 1 else f"{min(runs)} to {max(runs)}"


def row(result: Result) -> str:
    door = result.door
    library = f"headgate: {door.name}" if door.ours else door.name
    if door.ours and not result.errors:
        library = f"**{library}**"
    framework = f"{door.framework} {result.versions[door.framework]}" if door.framework in result.versions else ""
    own = "" if door.ours else result.versions.get(door.package, "")
    how = "threads" if door.kind == "wsgi" else "asyncio"
    notes = "; ".join([*result.errors, *(["all clients share the limit"] if 0 in result.other else [])])
    cells = [library, own, framework, how, span(result.one), span(result.two), span(result.forged), notes]
    return "| " + " | ".join(cells).replace("|  |", "| |") + " |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exactness", description="does a limit hold?")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has frameworks and peers")
    parser.add_argument("--only", action="append", help="doors whose name contains this (may be given again)")
    parser.add_argument("--runs", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--server", default="valkey", help="valkey (default), redis, or the path of a server program")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.url)
        return
    doors = [door for door in DOORS if not options.only or any(text in door.name for text in options.only)]
    with redis_server(options.server) as (url, description, flush):
        print(f"{REQUESTS} requests at once, {LIMIT} an hour, {description}, {options.runs} runs\n")
        print(f"| library | version | on | by | one process | two processes | {FORGED} forged addresses | |")
        print("|---|---|---|---|---|---|---|---|")
        wrong = []
        for door in doors:
            began = time.monotonic()
            result = measure(door, str(Path(options.python).absolute()), url, flush, options.runs)
            print(row(result), flush=True)
            print(f"{door.name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
            if door.ours and ({*result.one, *result.two, *result.forged} != {LIMIT} or 0 in result.other):
                wrong.append(door.name)
    if wrong:
        sys.exit(f"headgate did not hold its limit: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
