"""A Celery worker books in its main process, in the order of its messages, and holds each until its slot."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from headgate import Limiter
from headgate.jobs import JobSlots
from headgate.jobs.prompt import PromptSlots
from tests.jobs.drain import workers
from tests.support.clusters import wait_until
from tests.support.servers import PATIENCE, Server

celery = pytest.importorskip("celery")
kombu = pytest.importorskip("kombu")

from headgate.jobs.celery import slotted  # noqa: E402  # they import celery
from headgate.jobs.celery_request import prefetch_is_fixed  # noqa: E402

JOB, LATE = "tests.jobs.celery_jobs.job", "tests.jobs.celery_jobs.late"


class Queue:
    """A broker with jobs, whose ids are their names."""

    def __init__(self, server: Server) -> None:
        self.client = server.client()
        self.url = f"redis://127.0.0.1:{server.port}/0"
        self.app = celery.Celery("jobs", broker=self.url, backend=self.url)

    def send(self, *names: str, task: str = JOB, **options: Any) -> None:
        for name in names:
            self.app.send_task(task, (name,), task_id=name, **options)

    def worker(self, quota: str, **settings: str) -> Any:
        return workers("celery", os.environ | {"JOBS_URL": self.url, "JOBS_QUOTA": quota, **settings})

    def slots(self) -> list[str]:
        """The jobs that have slots, in the order of these."""
        at = {id.partition(":")[0]: float(at) for id, at in self.client.hgetall("test:slots").items()}
        return sorted(at, key=lambda name: at[name])

    def ran(self) -> list[str]:
        return [line.partition(" ")[0] for line in self.client.lrange("test:starts", 0, -1)]

    def wait_for(self, count: int) -> None:
        wait_until(lambda: len(self.ran()) >= count, f"{count} jobs have run")


@pytest.fixture
def queue(redis_server: Server) -> Iterator[Queue]:
    queue = Queue(redis_server)
    yield queue
    queue.app.close()
    queue.client.close()


@pytest.mark.once
def test_order(queue: Queue) -> None:
    """Jobs have slots in the order in which they were sent, and none is sent twice, although a process is slow."""
    names = [str(number) for number in range(24)]
    queue.send(*names)
    with queue.worker("20/second burst 4", JOBS_SLOW="0.3"):
        queue.wait_for(len(names))
    assert sorted(queue.ran()) == sorted(names) and queue.slots() == names
    assert int(queue.client.get("test:asked")) == 2 * len(names)  # when they came, and when they ran


@pytest.mark.once
def test_revoked(queue: Queue) -> None:
    """A job that is revoked while the worker holds it does not run; one that expired in the queue takes no slot."""
    queue.send("expired", expires=0.01)
    queue.send("first", "revoked", "last")
    with queue.worker("1/second burst 1"):
        wait_until(lambda: queue.slots() == ["first", "revoked", "last"], "they are booked")
        queue.app.control.revoke("revoked")
        queue.wait_for(2)
        states = [queue.app.AsyncResult(name).state for name in ("expired", "revoked")]
    assert queue.ran() == ["first", "last"] and states == ["REVOKED", "REVOKED"]


@pytest.mark.once
def test_killed(queue: Queue) -> None:
    """What a killed worker held is delivered again, runs once, and is acknowledged, early and late."""
    queue.send("runs", "held")
    queue.send("late", task=LATE)
    with queue.worker("20/minute burst 1", JOBS_VISIBILITY="1"):
        wait_until(lambda: len(queue.slots()) == 3 and queue.client.hlen("unacked") == 2, "two are held")
        queue.wait_for(1)
    with queue.app.connection_for_read(transport_options={"visibility_timeout": 1}) as connection:
        qos = connection.default_channel.qos
        wait_until(lambda: qos.restore_visible(interval=1) or not queue.client.hlen("unacked"), "the broker has them")
    assert queue.ran() == ["runs"]
    with queue.worker("20/minute burst 1"):
        queue.wait_for(3)
        wait_until(lambda: not queue.client.hlen("unacked"), "all are acknowledged")
    assert queue.ran() == ["runs", "held", "late"]


@pytest.mark.once
@pytest.mark.parametrize(("policy", "state"), [("allow", "SUCCESS"), ("raise", "FAILURE")])
def test_outage(queue: Queue, mortal_server: Server, policy: str, state: str) -> None:
    """While the store is down `on_store_error` answers, where the jobs run; the worker hears commands."""
    results = [queue.app.AsyncResult(str(number)) for number in range(20)]
    queue.send(*(result.id for result in results))
    mortal_server.kill()
    with queue.worker("1/hour", JOBS_STORE=mortal_server.bare_url, JOBS_POLICY=policy):
        wait_until(lambda: {result.state for result in results} == {state}, "the policy has answered all")
        assert queue.app.control.broadcast("ping", reply=True, timeout=20, limit=1)


def test_a_silent_store(mortal_server: Server) -> None:
    """A booking takes a loop no longer than its limit, and the next ones nothing; then the store is asked again."""
    limiter = Limiter("1/minute", store=mortal_server.patient_url, on_store_error="local")
    slots = PromptSlots(JobSlots(limiter, "k"), longest=0.1, pause=4.0)
    assert slots.delay("a") == 0.0 < slots.delay("b")
    os.kill(mortal_server.process.pid, signal.SIGSTOP)
    begun = time.monotonic()
    try:
        assert [slots.delay(str(number)) for number in range(100)] == [0.0] * 100
    finally:
        os.kill(mortal_server.process.pid, signal.SIGCONT)
    assert time.monotonic() - begun < PATIENCE / 2 and limiter.store_health().degraded == 1
    wait_until(lambda: slots.delay("later"), "the store is asked again")
    limiter.close()


def test_without_a_worker() -> None:
    """A task that is called like a function, or run eagerly, needs no slot."""
    app = celery.Celery("jobs", set_as_current=False)
    app.conf.task_always_eager = True

    @app.task(base=slotted(JobSlots(Limiter("1/hour"), "k")))  # type: ignore[untyped-decorator]  # celery has no types
    def double(number: int) -> int:
        return 2 * number

    assert [double(1), double(2), double.delay(3).get()] == [2, 4, 6]


@pytest.mark.parametrize(("arguments", "fixed"), [({"x-queue-type": "quorum"}, True), ({}, False)])
def test_quorum_queues(arguments: dict[str, str], fixed: bool) -> None:
    """A worker holds nothing where that would keep other messages out."""
    app = celery.Celery("jobs", set_as_current=False)
    app.conf.task_queues = [kombu.Queue("mails", queue_arguments=arguments)]
    assert prefetch_is_fixed(app) == fixed


def test_what_a_job_raises() -> None:
    """A job whose key cannot be known, or whose limiter keeps no slots, raises where it runs, not in the loop."""
    keyless = JobSlots(Limiter("1/second"), lambda tenant: f"{tenant}")
    windows = JobSlots(Limiter("1/second", algorithm="fixed_window"), "k")
    assert [PromptSlots(slots).delay("a") for slots in (keyless, windows)] == [0.0, 0.0]
