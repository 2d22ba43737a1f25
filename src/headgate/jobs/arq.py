"""arq functions at the pace of a limit.

    @slotted(AsyncJobSlots(limiter, "mails"))
    async def send(ctx, address): ...

A job whose slot is to come is deferred until then. For arq that is a retry, so the try is taken off its count first.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from arq import Retry
from arq.constants import retry_key_prefix

from headgate.jobs.job_slots import AsyncJobSlots

Function = TypeVar("Function", bound=Callable[..., Awaitable[Any]])


def slotted(slots: AsyncJobSlots) -> Callable[[Function], Function]:
    """A decorator of functions of arq, which then run at the slots of *slots*."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        async def run(ctx: dict[Any, Any], *args: Any, **kwargs: Any) -> Any:
            delay = await slots.delay(f"{ctx['job_id']}:{ctx['job_try']}", args, kwargs)
            if delay:
                await ctx["redis"].decr(retry_key_prefix + ctx["job_id"])
                raise Retry(defer=delay)
            return await function(ctx, *args, **kwargs)

        return run  # type: ignore[return-value]  # it has the signature of the function

    return decorate
