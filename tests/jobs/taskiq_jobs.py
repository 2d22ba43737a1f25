"""Jobs of a taskiq worker, and its scheduler."""

from taskiq import SimpleRetryMiddleware, TaskiqScheduler
from taskiq_redis import ListQueueBroker, ListRedisScheduleSource, RedisAsyncResultBackend

from headgate.jobs import AsyncJobSlots
from headgate.jobs.taskiq import slotted
from tests.jobs.work import QUOTA, URL, CountedAsyncLimiter, fails_once, note, options

broker = ListQueueBroker(URL).with_result_backend(RedisAsyncResultBackend(URL))
broker.add_middlewares(SimpleRetryMiddleware())
source = ListRedisScheduleSource(URL)
scheduler = TaskiqScheduler(broker, [source])
slot_of_job = slotted(AsyncJobSlots(CountedAsyncLimiter(QUOTA, **options()), "k"), source)


@broker.task(retry_on_error=True, max_retries=2)
async def job(name: str, slot: None = slot_of_job) -> str:
    note(name)
    fails_once(name)
    return name
