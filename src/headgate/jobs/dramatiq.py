"""Dramatiq actors at the pace of a limit.

    broker.add_middleware(Slots())

    @dramatiq.actor(slots=JobSlots(limiter, "mails"))
    def send(address): ...

A message whose slot is to come is enqueued again with that delay, under its own id and with the retries that it has,
and this delivery is skipped.

Two things of Dramatiq would mix the order up. Its threads take messages in order and then race each other: those that
book at the same moment take turns, by the time at which their messages were sent. And a worker looks once a second for
messages whose delay is over, and gives all of them to its threads at once: where actors have slots, it looks every
`POLL` milliseconds, so that they come one by one.
"""

from __future__ import annotations

import math
import time
from typing import Any

from dramatiq.common import q_name
from dramatiq.middleware import Middleware, MiddlewareError, SkipMessage

from headgate.jobs.job_slots import JobSlots
from headgate.jobs.turns import Turns

POLL = 50  # milliseconds between looks at the delayed messages of a queue; each is a command to the broker


class NoSlot(MiddlewareError):
    """No slot could be booked: the key function or the store has failed. The job fails as if it had raised it.

    Of a middleware's errors Dramatiq heeds this kind alone; after another one it would run the job without a slot.
    """


class Slots(Middleware):
    """The middleware; it concerns the actors that have the option `slots`."""

    def __init__(self) -> None:
        self._turns: dict[JobSlots, Turns] = {}

    @property
    def actor_options(self) -> set[str]:
        return {"slots"}

    def after_consumer_thread_boot(self, broker: Any, thread: Any) -> None:
        queue = q_name(thread.queue_name)
        slotted = any(actor.queue_name == queue and "slots" in actor.options for actor in broker.actors.values())
        if slotted and thread.queue_name != queue:  # that of its delayed messages
            thread.worker_timeout = min(thread.worker_timeout, POLL)

    def before_process_message(self, broker: Any, message: Any) -> None:
        slots: JobSlots | None = broker.get_actor(message.actor_name).options.get("slots")
        if slots is None:
            return
        retries = message.options.get("retries", 0)
        try:
            with self._turns.setdefault(slots, Turns()).turn(message.message_timestamp):
                nap, delay = slots.book(f"{message.message_id}:{retries}", message.args, message.kwargs)
        except Exception as error:
            raise NoSlot(f"no slot for {message.actor_name}: {type(error).__name__}: {error}") from error
        time.sleep(nap)
        if delay:
            broker.enqueue(message, delay=math.ceil(delay * 1000))
            message.options["store_results"] = False  # of this delivery, which has no result: the next one has
            raise SkipMessage
