"""Drain a queue with a real worker, and see when its jobs ran.

`python -m tests.jobs.drain celery` drains 1,000 jobs at 10 a second with 8 workers, which takes 99 seconds, and fails
if they took more than 3 % longer, were rescheduled more than 1.05 times each, or ran in another order: workers may
overtake each other by as many places as there are workers. A job that is rescheduled asks for its slot a second time;
those of Celery do so without being sent again.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import redis

from tests.support.servers import KINDS, Server

WORKERS = 8
COMMANDS: dict[str, list[list[str]]] = {
    "celery": [["celery", "-A", "tests.jobs.celery_jobs", "worker", "-c", str(WORKERS), "-l", "warning"]],
    "dramatiq": [["dramatiq", "tests.jobs.dramatiq_jobs", "--processes", "1", "--threads", str(WORKERS)]],
    "taskiq": [
        ["taskiq", "worker", "tests.jobs.taskiq_jobs:broker", "--workers", "1", "--max-async-tasks", str(WORKERS)],
        ["taskiq", "scheduler", "tests.jobs.taskiq_jobs:scheduler", "--update-interval", "1"],
    ],
    "arq": [["arq", "tests.jobs.arq_jobs.WorkerSettings"]],
}


class Drained(NamedTuple):
    """What was seen."""

    names: list[str]  # in the order in which they started
    times: list[float]
    asked: int
    results: list[Any]

    @property
    def seconds(self) -> float:
        return self.times[-1] - self.times[0]

    def displaced(self) -> int:
        """By how many places a job was at most early or late, of jobs that are named by numbers."""
        order = [int(name) for name in self.names]
        return max(abs(number - place) for place, number in enumerate(order))


@contextmanager
def workers(queue: str, environment: dict[str, str]) -> Iterator[None]:
    """The worker processes of *queue*."""
    with tempfile.TemporaryFile("w+") as log:
        started = [
            subprocess.Popen(
                [sys.executable, "-m", *command], env=environment, stdout=log, stderr=log, start_new_session=True
            )
            for command in COMMANDS[queue]
        ]
        try:
            yield
        except BaseException:
            log.seek(0)
            print(log.read()[-4000:], file=sys.stderr)
            raise
        finally:
            for process in started:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def drain(queue: str, url: str, names: list[str], quota: str, seconds: float) -> Drained:
    """Enqueue jobs of these *names*, and let a worker run them within *seconds*."""
    environment = os.environ | {"JOBS_URL": url, "JOBS_QUOTA": quota}
    os.environ.update(environment)
    for module in ("work", f"{queue}_jobs"):
        sys.modules.pop(f"tests.jobs.{module}", None)
    jobs = importlib.import_module(f"tests.jobs.{queue}_jobs")
    client: Any = redis.Redis.from_url(url, decode_responses=True)
    handles = (
        asyncio.run(_enqueue_async(queue, jobs, names)) if queue in ("taskiq", "arq") else _enqueue(queue, jobs, names)
    )
    starts = sum(2 if name.startswith("fails") else 1 for name in names)
    with workers(queue, environment):
        deadline = time.monotonic() + seconds
        while (done := client.llen("test:starts")) < starts:
            assert time.monotonic() < deadline, f"{done} of {starts} jobs have run"
            time.sleep(0.02)
        results = _results(queue, handles, jobs, names)
    seen = [line.rpartition(" ") for line in client.lrange("test:starts", 0, -1)]
    seen.sort(key=lambda line: float(line[2]))
    asked = int(client.get("test:asked"))
    client.close()
    return Drained([name for name, _, _ in seen], [float(at) for _, _, at in seen], asked, results)


def _enqueue(queue: str, jobs: Any, names: list[str]) -> list[Any]:
    return [jobs.job.delay(name) if queue == "celery" else jobs.job.send(name) for name in names]


async def _enqueue_async(queue: str, jobs: Any, names: list[str]) -> list[Any]:
    if queue == "taskiq":
        await jobs.broker.startup()
        made = [await jobs.job.kiq(name) for name in names]
        await jobs.broker.shutdown()
        return [task.task_id for task in made]
    from arq import create_pool

    pool = await create_pool(jobs.WorkerSettings.redis_settings)
    kept = [await pool.enqueue_job("job", name) for name in names]
    await pool.aclose()
    return [job.job_id for job in kept if job]


def _results(queue: str, handles: list[Any], jobs: Any, names: list[str]) -> list[Any]:
    """The results of the first and the last job; those of asyncio are read by tests of their own."""
    if queue == "celery":
        return [handles[at].get(timeout=30) for at in (0, -1)]
    if queue == "dramatiq":
        return [handles[at].get_result(block=True, timeout=30_000) for at in (0, -1)]
    return [names[0], names[-1]]


def main(queue: str, count: int = 1000) -> None:
    server = Server(KINDS[0])
    try:
        found = drain(
            queue,
            f"redis://127.0.0.1:{server.port}/0",
            [str(number) for number in range(count)],
            "10/second burst 10",
            300,
        )
    finally:
        server.stop()
    ideal, rescheduled = (count - 10) / 10, found.asked / count - 1
    print(
        f"{queue}: {count} jobs in {found.seconds:.2f} s ({found.seconds / ideal - 1:+.2%} of {ideal:g} s), "
        f"{rescheduled:.3f} times asked again each, displaced by at most {found.displaced()} places"
    )
    assert len(set(found.names)) == count and found.seconds <= ideal * 1.03
    assert rescheduled <= 1.05 and found.displaced() < WORKERS


if __name__ == "__main__":
    main(sys.argv[1])
