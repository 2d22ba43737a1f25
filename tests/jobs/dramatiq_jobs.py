"""Jobs of a Dramatiq worker."""

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend

from headgate.jobs import JobSlots
from headgate.jobs.dramatiq import Slots
from tests.jobs.work import QUOTA, URL, CountedLimiter, fails_once, note, options

broker = RedisBroker(url=URL)  # type: ignore[no-untyped-call]  # dramatiq has few types
broker.add_middleware(Results(backend=RedisBackend(url=URL)))  # type: ignore[no-untyped-call]  # the same
broker.add_middleware(Slots())
dramatiq.set_broker(broker)
limiter = CountedLimiter(QUOTA, **options())


@dramatiq.actor(slots=JobSlots(limiter, "k"), store_results=True, max_retries=1, min_backoff=1)
def job(name: str) -> str:
    note(name)
    fails_once(name)
    return name
