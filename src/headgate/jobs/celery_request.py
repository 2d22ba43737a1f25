"""What a Celery worker does with a task that has slots when its message is delivered.

Messages come to the main process of a worker in order; the processes of its pool overtake each other. So the slot is
booked here, under the id under which the task asks again when it runs, and until then Celery holds the message like
one with a countdown: not acknowledged, so that the broker delivers it again if this worker dies. A message that has a
countdown or an eta of its own is booked by the pool, when its time has come.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

from celery.worker.request import Request

from headgate.jobs.celery import MAX_DELAY
from headgate.jobs.job_slots import JobSlots
from headgate.jobs.prompt import PromptSlots


class SlottedRequest(Request):  # type: ignore[misc]  # celery has no types
    """The delivery of a task, held by the worker until its slot."""

    prompt: ClassVar[dict[JobSlots, PromptSlots]] = {}  # those of this worker
    _slot: datetime | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if super().eta is not None or self.revoked():  # a task that will not run takes no slot
            return
        slots: JobSlots = self.task.slots
        if (prompt := self.prompt.get(slots)) is None:
            prompt = self.prompt[slots] = PromptSlots(slots)
        delay = prompt.delay(f"{self.id}:{self.request_dict.get('retries', 0)}", self.args, self.kwargs)
        if delay and not prefetch_is_fixed(self.app):
            self._slot = datetime.now(UTC) + timedelta(seconds=min(delay, MAX_DELAY))

    @property
    def eta(self) -> datetime | None:
        eta: datetime | None = self._slot or super().eta
        return eta


def prefetch_is_fixed(app: Any) -> bool:
    """Whether a message that is held keeps others out: with quorum queues a worker cannot ask for more meanwhile."""
    queues = app.amqp.queues.values()
    return any((queue.queue_arguments or {}).get("x-queue-type") == "quorum" for queue in queues)
