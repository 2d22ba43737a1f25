"""Jobs of an arq worker."""

from typing import Any

from arq import Retry
from arq.connections import RedisSettings

from headgate.jobs import AsyncJobSlots
from headgate.jobs.arq import slotted
from tests.jobs.work import QUOTA, URL, CountedAsyncLimiter, fails_once, note, options

slots = AsyncJobSlots(CountedAsyncLimiter(QUOTA, **options()), "k")


@slotted(slots)
async def job(ctx: dict[str, Any], name: str) -> str:
    note(name)
    try:
        fails_once(name)
    except ValueError as error:
        raise Retry(defer=0.01) from error
    return name


class WorkerSettings:
    functions = (job,)
    redis_settings = RedisSettings.from_dsn(URL)
    poll_delay = 0.05
    max_tries = 2
    max_jobs = 8
