"""One machine, many processes: `shared://` beside other ways to share a count without a server, and beside Redis.

Two parts. One process, all algorithms, 1,000 keys: our shared store beside our memory store, by `rounds` in a worker.
Then 1 and 4 processes that decide as fast as they can, on one key and on 1,000, with a quota that is never reached:
each contender by `python -m benchmarks.shared NAME FOLDER SOCKET PROCESSES KEYS SECONDS`, which forks them and prints
one line of JSON. That program also runs where headgate is not installed: the peers have an environment of their own.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIMIT, PERIOD = 1_000_000_000, 30 * 24 * 3600  # a token bucket that no contender empties
PROCESSES = 4
CHUNK = 100  # decisions between two looks at the clock

Decide = Callable[[str], Any]  # true if admitted; or a coroutine function
Connect = Callable[[], Decide]  # called in each process
Start = Callable[[str, str], Connect]  # folder and socket of Redis -> what each process calls


# ------------------------------------------------------------------------------------------------------ contenders


def limiter(store: str) -> Connect:
    def connect() -> Decide:
        from headgate import Limiter

        return Limiter(f"{LIMIT}/{PERIOD}s", store=store).try_acquire

    return connect


def ours(folder: str, _socket: str) -> Connect:
    return limiter(f"shared://{folder}/shared")


def on_redis(_folder: str, socket: str) -> Connect:
    return limiter(f"unix://{socket}")


TAKE = """INSERT INTO states(key, paid) VALUES(?1, ?2 + ?3) ON CONFLICT(key) DO
UPDATE SET paid = max(paid, ?2) + ?3 WHERE max(paid, ?2) + ?3 - ?2 <= ?4 RETURNING paid"""


def sqlite(folder: str, _socket: str) -> Connect:
    """A token bucket in one UPSERT, in seconds."""
    import sqlite3

    def connect() -> Decide:
        database = sqlite3.connect(f"{folder}/sqlite", isolation_level=None, timeout=60)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = OFF")
        database.execute("CREATE TABLE IF NOT EXISTS states(key TEXT PRIMARY KEY, paid REAL NOT NULL) WITHOUT ROWID")
        one, execute, now = PERIOD / LIMIT, database.execute, time.monotonic

        def decide(key: str) -> bool:
            return execute(TAKE, (key, now(), one, PERIOD)).fetchone() is not None

        return decide

    connect()
    return connect


def lmdb(folder: str, _socket: str) -> Connect:
    """A token bucket in one write transaction, without waiting for a disk."""
    import lmdb  # type: ignore[import-not-found]  # only in the environment of the peers

    def connect() -> Decide:
        options = {"subdir": False, "sync": False, "metasync": False, "writemap": True, "map_async": True}
        environment = lmdb.open(f"{folder}/lmdb", map_size=64 << 20, max_readers=64, **options)
        word, now = struct.Struct("=d"), time.monotonic

        def decide(key: str) -> bool:
            name = key.encode()
            with environment.begin(write=True) as transaction:
                kept = transaction.get(name)
                start = now()
                paid = max(word.unpack(kept)[0] if kept else 0.0, start) + PERIOD / LIMIT
                if paid - start > PERIOD:
                    return False
                transaction.put(name, word.pack(paid))
                return True

        return decide

    return connect


def traffik(_folder: str, _socket: str) -> Connect:
    """Its backend in shared memory, with a token bucket. It is made before the processes are forked."""
    import traffik.strategies  # type: ignore[import-not-found]  # only in the environment of the peers
    from traffik.backends.multiprocess import MultiProcessInMemoryBackend  # type: ignore[import-not-found]
    from traffik.rates import Rate  # type: ignore[import-not-found]

    backend = MultiProcessInMemoryBackend(namespace=f"bench{os.getpid()}")
    backend.start()
    rate, strategy = Rate(limit=LIMIT, hours=PERIOD // 3600), traffik.strategies.TokenBucketStrategy()
    initialized = False

    async def decide(key: str) -> bool:
        nonlocal initialized
        if not initialized:
            await backend.initialize()
            initialized = True
        wait: float = await strategy(key, rate, backend, 1)
        return wait == 0

    return lambda: decide


def pyrate(folder: str, _socket: str) -> Connect:
    """Its bucket in SQLite. It keeps a log and knows no keys: 1,000 a second, so that it does not grow without end."""
    from pyrate_limiter import Limiter, Rate, SQLiteBucket

    def connect() -> Decide:
        rates = [Rate(1000, 1000)]
        bucket = SQLiteBucket.init_from_file(rates, db_path=f"{folder}/pyrate", use_file_lock=True)
        found = Limiter(bucket)
        return lambda key: found.try_acquire(key, blocking=False)

    return connect


OURS = "headgate, shared://"
CONTENDERS: dict[str, Start] = {
    OURS: ours,
    "headgate, Redis on a Unix socket": on_redis,
    "SQLite, WAL, one UPSERT": sqlite,
    "LMDB, one transaction": lmdb,
    "traffik, shared memory": traffik,
    "pyrate-limiter, SQLite": pyrate,
}


# ------------------------------------------------------------------------------------- the program: fork, decide, count


def decide_for(decide: Decide, keys: Sequence[str], seconds: float) -> dict[str, float]:
    """Decide for so many seconds, key after key."""
    if asyncio.iscoroutinefunction(decide):
        runner = asyncio.Runner()
        awaited = decide

        async def some(names: Sequence[str]) -> int:
            return sum([bool(await awaited(key)) for key in names])

        chunk: Callable[[Sequence[str]], int] = lambda names: runner.run(some(names))  # noqa: E731
    else:
        chunk = lambda names: sum([bool(decide(key)) for key in names])  # noqa: E731
    for at in range(0, len(keys), CHUNK):  # connected, and each key seen
        chunk(keys[at : at + CHUNK])
    checks = admitted = at = 0
    begun = now = time.perf_counter()
    while now < begun + seconds:
        names = keys[at : at + CHUNK]
        admitted += chunk(names)
        checks += len(names)
        at = (at + CHUNK) % len(keys)
        now = time.perf_counter()
    return {"checks": checks, "admitted": admitted, "seconds": now - begun}


def one_process(connect: Connect, keys: Sequence[str], seconds: float, begin: int, done: int) -> None:
    try:
        decide = connect()
        os.write(done, b"\n")
        os.read(begin, 1)  # ends when all are ready
        os.write(done, json.dumps(decide_for(decide, keys, seconds)).encode() + b"\n")
    except Exception as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    os._exit(0)


def program(name: str, folder: str, socket: str, processes: int, keys: int, seconds: float) -> dict[str, float]:
    connect = CONTENDERS[name](folder, socket)
    names = [f"user:{number:07d}" for number in range(keys)] * max(1, CHUNK // keys)
    begin, opened = os.pipe()
    heard, done = os.pipe()
    for _ in range(processes):
        if not os.fork():
            os.close(opened)
            one_process(connect, names, seconds, begin, done)
    os.close(done)
    with os.fdopen(heard) as lines:
        for _ in range(processes):
            lines.readline()
        os.close(opened)
        found = [json.loads(line) for line in lines]
    if len(found) < processes:
        sys.exit(1)  # a process has said why
    checks = sum(one["checks"] for one in found)
    return {
        "per_second": sum(one["checks"] / one["seconds"] for one in found),
        "us": 1e6 * sum(one["seconds"] for one in found) / checks,  # of one decision in one process
        "least_share": min(one["checks"] for one in found) / max(one["checks"] for one in found),
        "admitted": sum(one["admitted"] for one in found) / checks,
    }


# -------------------------------------------------------------------------------------- the part of the benchmark


@contextmanager
def fresh(algorithm: str) -> Iterator[Callable[[Sequence[str]], int]]:
    """A loop over a shared store that has seen no key."""
    from benchmarks.workload import QUOTA
    from headgate import Limiter
    from headgate.rule import check_algorithm

    with scratch() as folder:
        try_acquire = Limiter(QUOTA, algorithm=check_algorithm(algorithm), store=f"shared://{folder}/one").try_acquire

        def loop(keys: Sequence[str]) -> int:
            admitted = 0
            for key in keys:
                if try_acquire(key):
                    admitted += 1
            return admitted

        yield loop


def rounds(library: str, scale: Any, _url: str) -> dict[str, Callable[[], Any]]:
    """One round for each algorithm, for a worker: of the shared store, or of our memory store beside it."""
    from benchmarks.memory import headgate, one_round
    from benchmarks.workload import ALGORITHMS, traffic

    start = fresh if library == OURS else headgate
    keys = traffic(scale.memory_keys)
    return {algorithm: partial(one_round, start, algorithm, keys) for algorithm in ALGORITHMS}


@contextmanager
def scratch() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="headgate-bench-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    try:
        yield folder
    finally:
        with suppress(OSError):
            shutil.rmtree(folder)


def measure(name: str, processes: int, keys: int, seconds: float, socket: str, path: str | None) -> dict[str, Any]:
    """One contender; those that are not headgate in the environment of the peers, if there is one."""
    peers = ROOT / "build/shared-peers/bin/python"
    own = not name.startswith("headgate") and peers.exists()
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT)] if own or not path else [path, str(ROOT)]))
    with scratch() as folder:
        words = [name, folder, socket, str(processes), str(keys), str(seconds)]
        command = [str(peers) if own else sys.executable, "-m", "benchmarks.shared", *words]
        try:
            options: dict[str, Any] = {"cwd": folder, "env": environment, "timeout": 60 + 10 * seconds}
            done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
        except subprocess.TimeoutExpired:
            return {"error": "does not end"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["failed"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    name, folder, socket, processes, keys, seconds = sys.argv[1:]
    print(json.dumps(program(name, folder, socket, int(processes), int(keys), float(seconds))))
