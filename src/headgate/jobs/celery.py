"""Celery tasks at the pace of a limit.

    mails = slotted(JobSlots(limiter, "mails"))

    @app.task(base=mails)
    def send(address): ...

The main process of a worker books a slot for each message in the order in which they come, and holds the message until
then (`celery_request.py`). A task asks again when it runs. If its slot is still to come, as after an outage or for a
message with a countdown, it is sent again with that countdown, under its own id and with the retries that it has, and
this delivery ends as ignored. A worker holds messages in memory, and with Redis as broker they are delivered a second
time after the ``visibility_timeout`` of an hour: so none is held for longer than `MAX_DELAY`.
"""

from __future__ import annotations

from typing import Any

from celery import Task
from celery.exceptions import Ignore

from headgate.jobs.job_slots import JobSlots

MAX_DELAY = 1800.0  # seconds; half of the visibility time-out of Celery on Redis


class SlottedTask(Task):  # type: ignore[misc]  # celery has no types
    """A task that runs at its slot; `slotted` makes a subclass with the slots."""

    abstract = True
    slots: JobSlots
    Request = "headgate.jobs.celery_request:SlottedRequest"  # by name: only a worker needs to import it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        request = self.request
        if request.called_directly or request.is_eager:
            return self.run(*args, **kwargs)
        delay = self.slots.delay(f"{request.id}:{request.retries}", args, kwargs)
        if not delay:
            return self.run(*args, **kwargs)
        # without the arguments that a bound task gets as self: the request has those that were sent
        again = self.signature_from_request(request, countdown=min(delay, MAX_DELAY), retries=request.retries)
        again.apply_async()
        raise Ignore


def slotted(slots: JobSlots) -> type[SlottedTask]:
    """The base class of tasks that run at the slots of *slots*."""
    return type("SlottedTask", (SlottedTask,), {"abstract": True, "slots": slots})
