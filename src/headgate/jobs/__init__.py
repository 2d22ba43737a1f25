"""Jobs at the pace of a limit: a job queue runs each job at its slot, in order, with one reschedule and no retry.

job_slots.py       JobSlots: when a job may start, for any queue
turns.py           threads that book at the same moment keep their order
prompt.py          bookings in a loop that must not wait
celery.py          a base class of Celery tasks
celery_request.py  deliveries to a Celery worker, booked in order
dramatiq.py        a Dramatiq middleware
taskiq.py          a dependency of taskiq tasks
arq.py             a decorator of arq functions
"""

from headgate.jobs.job_slots import AsyncJobSlots, JobSlots

__all__ = ["AsyncJobSlots", "JobSlots"]
