"""Jobs of a Celery worker."""

import os
import time
from typing import Any

from celery import Celery
from celery.signals import worker_process_init

from headgate.jobs import JobSlots
from headgate.jobs.celery import slotted
from headgate.jobs.celery_request import SlottedRequest
from headgate.jobs.prompt import PromptSlots
from tests.jobs.work import QUOTA, URL, CountedLimiter, client, fails_once, note, options

MAIN = os.getpid()  # whose pool is forked from it


class NotedLimiter(CountedLimiter):
    """Notes new slots; with JOBS_SLOW the first process of the pool that books takes that many seconds longer."""

    def book(self, *args: Any, **kwargs: Any) -> Any:
        slow = os.environ.get("JOBS_SLOW")
        if slow and os.getpid() != MAIN and (client.set("test:slow", os.getpid(), nx=True) or _is_slow()):
            time.sleep(float(slow))
        slot = super().book(*args, **kwargs)
        if not slot.again:
            client.hset("test:slots", slot.id, slot.at)
        return slot


def _is_slow() -> bool:
    return int(client.get("test:slow")) == os.getpid()


app = Celery("jobs", broker=URL, backend=URL)
app.conf.broker_connection_retry_on_startup = True
app.conf.broker_transport_options = {"visibility_timeout": int(os.environ.get("JOBS_VISIBILITY", "3600"))}
slots = JobSlots(NotedLimiter(QUOTA, **options()), "k")
mails = slotted(slots)
if "JOBS_SLOW" in os.environ:  # a test of order: a busy machine may take its time
    SlottedRequest.prompt[slots] = PromptSlots(slots, longest=20.0)


@worker_process_init.connect  # type: ignore[untyped-decorator]  # celery has no types
def connect(**_: Any) -> None:
    """Connect what only the tests need, so that the first job of a process does not wait for it."""
    client.ping()


@app.task(base=mails, acks_late=True)  # type: ignore[untyped-decorator]  # celery has no types
def late(name: str) -> None:
    note(name)


@app.task(base=mails, bind=True, max_retries=1)  # type: ignore[untyped-decorator]  # celery has no types
def job(self: Any, name: str) -> str:
    note(name)
    try:
        fails_once(name)
    except ValueError as error:
        raise self.retry(exc=error, countdown=0) from error
    return name
