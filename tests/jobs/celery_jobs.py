"""Jobs of a Celery worker."""

from typing import Any

from celery import Celery

from headgate.jobs import JobSlots
from headgate.jobs.celery import slotted
from tests.jobs.work import QUOTA, URL, CountedLimiter, fails_once, note, options

app = Celery("jobs", broker=URL, backend=URL)
app.conf.broker_connection_retry_on_startup = True
limiter = CountedLimiter(QUOTA, **options())


@app.task(base=slotted(JobSlots(limiter, "k")), bind=True, max_retries=1)  # type: ignore[untyped-decorator]  # celery has no types
def job(self: Any, name: str) -> str:
    note(name)
    try:
        fails_once(name)
    except ValueError as error:
        raise self.retry(exc=error, countdown=0) from error
    return name
