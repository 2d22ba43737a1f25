"""Dramatiq actors at the pace of a limit.

    broker.add_middleware(Slots())

    @dramatiq.actor(slots=JobSlots(limiter, "mails"))
    def send(address): ...

A message whose slot is to come is enqueued again with that delay, under its own id and with the retries that it has,
and this delivery is skipped.
"""

from __future__ import annotations

import math
from typing import Any

from dramatiq.middleware import Middleware, SkipMessage

from headgate.jobs.job_slots import JobSlots


class Slots(Middleware):
    """The middleware; it concerns the actors that have the option `slots`."""

    @property
    def actor_options(self) -> set[str]:
        return {"slots"}

    def before_process_message(self, broker: Any, message: Any) -> None:
        slots: JobSlots | None = broker.get_actor(message.actor_name).options.get("slots")
        if slots is None:
            return
        retries = message.options.get("retries", 0)
        delay = slots.delay(f"{message.message_id}:{retries}", message.args, message.kwargs)
        if delay:
            broker.enqueue(message, delay=math.ceil(delay * 1000))
            message.options["store_results"] = False  # of this delivery, which has no result: the next one has
            raise SkipMessage
