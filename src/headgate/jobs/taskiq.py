"""taskiq tasks at the pace of a limit.

    mails = slotted(AsyncJobSlots(limiter, "mails"), source)

    @broker.task
    async def send(address: str, slot: None = mails): ...

A task whose slot is to come is given to the schedule source for that moment, under its own id and with the labels that
it has; a `taskiq scheduler` on the same source sends it then. This delivery ends without a result.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from taskiq import Context, ScheduleSource, TaskiqDepends
from taskiq.exceptions import NoResultError
from taskiq.kicker import AsyncKicker

from headgate.jobs.job_slots import AsyncJobSlots


def slotted(slots: AsyncJobSlots, source: ScheduleSource) -> Any:
    """The default of a task's parameter, by which the task runs at the slots of *slots*. The parameter is None."""

    async def wait_for_slot(context: Context = TaskiqDepends()) -> None:  # noqa: B008  # how taskiq declares it
        message = context.message
        retries = message.labels.get("_retries", 0)
        delay = await slots.delay(f"{message.task_id}:{retries}", message.args, message.kwargs)
        if delay:
            kicker: AsyncKicker[Any, Any] = AsyncKicker(message.task_name, context.broker, message.labels)
            at = datetime.now(UTC) + timedelta(seconds=delay)
            await kicker.with_task_id(message.task_id).schedule_by_time(source, at, *message.args, **message.kwargs)
            raise NoResultError

    return TaskiqDepends(wait_for_slot)
