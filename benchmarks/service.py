"""The service over HTTP: checks a second beside a bare "hello" on the same server, and what two instances admit.

A hybrid rule on Redis is measured on one hot key, beside the same rule in memory: that is what hybrid rules are for.

Every contender is a process of its own with one worker. `wrk` asks, if it is on the path: 32 connections, 10,000 keys
in turn. Without it a client of our own asks, which is slower than the services and makes them look alike: the report
says which one it was.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.figures import Bar
from benchmarks.progress import Progress
from benchmarks.server import START_SECONDS, free_port

CONNECTIONS = 32
KEYS = 10_000
HELLO, MEMORY, REDIS = "(hello on granian)", "headgate, memory", "headgate, Redis"
HOT_MEMORY, HOT_HYBRID = "headgate, memory, one key", "headgate, Redis, hybrid, one key"
CHECK = "/api/v1/rate-limit/check"

# One file for wrk: the path comes with the command, the key is another one each time.
LUA = """
local path, n = nil, 0
function init(args) path = args[1] end
function request()
  n = n + 1
  if path:sub(-1) ~= "=" then return wrk.format("GET", path) end
  return wrk.format("GET", path .. (n % KEYS))
end
function done(summary, latency)
  local refused, p99 = summary.errors.status, latency:percentile(99)
  io.write(string.format("RESULT %d %d %d %d\\n", summary.duration, summary.requests, refused, p99))
end
""".replace("KEYS", str(KEYS))


@dataclass(slots=True)
class Run:
    """What one client saw in one go. A refusal (429) is an answer."""

    seconds: float
    requests: int
    refused: int
    p99_us: float


@dataclass(slots=True)
class Contender:
    name: str
    port: int
    path: str  # ends in = where a key is to follow
    runs: list[Run] = field(default_factory=list)

    @property
    def per_second(self) -> float:
        return median(run.requests / run.seconds for run in self.runs)

    @property
    def p99_ms(self) -> float:
        return median(run.p99_us for run in self.runs) / 1000


def share(one: Contender, hello: Contender) -> float:
    """How fast *one* is beside *hello*: the median over the rounds, in each of which both had the same neighbours."""
    pairs = zip(one.runs, hello.runs, strict=True)
    return median((mine.requests / mine.seconds) / (its.requests / its.seconds) for mine, its in pairs)


def client_name() -> str:
    return "wrk" if shutil.which("wrk") else "a client in Python, which is slower than what it measures"


def start_client(port: int, path: str, seconds: float, script: Path) -> subprocess.Popen[str]:
    if shutil.which("wrk"):
        options = ["-t1", f"-c{CONNECTIONS}", f"-d{max(1, round(seconds))}s", "-s", str(script)]
        command = ["wrk", *options, f"http://127.0.0.1:{port}", "--", path]
    else:
        command = [sys.executable, "-m", "benchmarks.http_client", str(port), path, str(seconds), str(CONNECTIONS)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def finish_client(client: subprocess.Popen[str]) -> Run:
    output, _ = client.communicate()
    found = re.search(r"RESULT (\d+) (\d+) (\d+) (\d+)", output)
    if not found:
        raise RuntimeError(f"the client said: {output[:300]}")
    microseconds, requests, refused, p99 = (int(number) for number in found.groups())
    return Run(microseconds / 1e6, requests, refused, p99)


@contextmanager
def process(port: int, *arguments: str, path: str | None = None) -> Iterator[int]:
    """A server of ours and its process id, once it answers, until the end. *path* goes first on its module path."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADGATE_")}
    if path is not None:
        environment["PYTHONPATH"] = path
    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as folder:
        root = Path(__file__).resolve().parent.parent
        command = [sys.executable, *arguments]
        running = subprocess.Popen(
            command,
            cwd=root if any(argument.startswith("benchmarks.") for argument in arguments) else folder,
            env=environment,
            stderr=subprocess.DEVNULL,
        )
        try:
            _wait(port, running)
            yield running.pid
        finally:
            running.terminate()
            running.wait()


def _wait(port: int, running: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if running.poll() is not None:
            raise RuntimeError(f"the service ended at once with code {running.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5):
                return
        except urllib.error.HTTPError:
            return  # an answer, too
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"nobody answers on port {port}")


def throughput(
    url: str, build: str | None, rounds: int, seconds: float, script: Path, progress: Progress
) -> list[Contender]:
    """All of them, in turn, round by round; the first round warms up and does not count."""
    key = f"{CHECK}?algorithm=TOKEN_BUCKET&key=user:="
    contenders = [
        Contender(HELLO, free_port(), "/hello"),
        Contender(MEMORY, free_port(), key),
        Contender(REDIS, free_port(), key),
        Contender(HOT_MEMORY, free_port(), f"{CHECK}?rule=hot&key=one"),
        Contender(HOT_HYBRID, free_port(), f"{CHECK}?rule=hot&key=one"),
    ]
    hello, memory, redis, hot, hybrid = contenders
    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as folder, ExitStack() as stack:
        stack.enter_context(process(hello.port, "-m", "benchmarks.hello", str(hello.port), path=build))
        stack.enter_context(process(memory.port, "-m", "headgate", "serve", "--port", str(memory.port), path=build))
        serve = ("-m", "headgate", "serve", "--port", str(redis.port), "--store", f"{url}?timeout=5")
        stack.enter_context(process(redis.port, *serve, path=build))
        for one, lines, store in ((hot, "", "memory://"), (hybrid, "hybrid = true\n", f"{url}?timeout=5")):
            rules = Path(folder) / f"{one.port}.toml"
            rules.write_text(f'[rules.hot]\nquotas = "1000000/second"\n{lines}')
            options = ("--port", str(one.port), "--store", store, "--config", str(rules))
            stack.enter_context(process(one.port, "-m", "headgate", "serve", *options, path=build))
        progress.begin("service", (rounds + 1) * len(contenders))
        for number in range(rounds + 1):
            for one in contenders:
                progress.step(one.name)
                run = finish_client(start_client(one.port, one.path, seconds, script))
                if number:
                    one.runs.append(run)
        progress.end()
    return contenders


@dataclass(frozen=True, slots=True)
class Overload:
    """What two instances admitted of far more than the limit, and what they may have."""

    admitted: int
    offered: int
    least: float
    most: float


def overload(
    url: str, build: str | None, seconds: float, script: Path, progress: Progress, lines: str = ""
) -> Overload:
    """Two instances on one Redis, one key; a burst of a second, so that a client that stalls loses nothing.

    *lines*: more of the rule.
    """
    rate, burst = 500, 500
    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as folder, ExitStack() as stack:
        rules = Path(folder) / "rules.toml"
        rules.write_text(f'[rules.shared]\nquotas = "{rate}/second burst {burst}"\nalgorithm = "gcra"\n{lines}')
        ports = [free_port(), free_port()]
        for port in ports:
            serve = ("-m", "headgate", "serve", "--port", str(port), "--store", f"{url}?timeout=5")
            stack.enter_context(process(port, *serve, "--config", str(rules), path=build))
        progress.begin("service", 1)
        progress.step("two instances on one Redis, overloaded" + (", hybrid" if lines else ""))
        began = time.monotonic()
        clients = [start_client(port, f"{CHECK}?rule=shared&key=one", seconds, script) for port in ports]
        runs = [finish_client(client) for client in clients]
        elapsed = time.monotonic() - began
        progress.end()
    offered = sum(run.requests for run in runs)
    admitted = offered - sum(run.refused for run in runs)
    return Overload(admitted, offered, burst + rate * min(run.seconds for run in runs), burst + rate * elapsed)


def bars(contenders: list[Contender], shared: Overload, hybrid: Overload) -> list[Bar]:
    """What the service promises. Speed as a share of hello: the machine decides how many a second that is."""
    hello = next(one for one in contenders if one.name == HELLO)
    found = []
    for name, least, enough in ((MEMORY, 0.60, 20_000), (REDIS, 0.35, 10_000)):
        one = next(one for one in contenders if one.name == name)
        ratio = share(one, hello)
        met = ratio >= least or one.per_second >= enough
        need = f">= {least:g}, or >= {enough:,}/s"
        found.append(Bar(f"service, {name}: share of hello", need, f"{ratio:.2f}, {one.per_second:,.0f}/s", met))
        found.append(Bar(f"service, {name}: p99", "< 10 ms", f"{one.p99_ms:.1f} ms", one.p99_ms < 10))
    hot, leased = (next(one for one in contenders if one.name == name) for name in (HOT_MEMORY, HOT_HYBRID))
    ratio = share(leased, hot)
    found.append(Bar("service, a hybrid rule on Redis: share of memory", ">= 0.9", f"{ratio:.2f}", ratio >= 0.9))
    for seen, part, kind in ((shared, 0.99, ""), (hybrid, 0.98, ", hybrid")):
        what = f"service, two instances on one Redis{kind}, {seen.offered / seen.least:.0f} times the limit: admitted"
        met = part * seen.least <= seen.admitted <= seen.most
        found.append(Bar(what, f"{part * seen.least:,.0f} to {seen.most:,.0f}", f"{seen.admitted:,}", met))
    return found


@contextmanager
def script() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as folder:
        file = Path(folder) / "checks.lua"
        file.write_text(LUA)
        yield file
