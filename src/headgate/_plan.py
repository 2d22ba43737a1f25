"""Logic written once, run twice: a plan is a sans-I/O generator, which yields requests that a driver answers.

`run` answers with plain calls, `arun` with awaited ones. An error of a request, a cancellation included, is thrown
into the plan, which may ask for something more (to give back what it took, say) before it lets the error go on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, TypeVar

Request = TypeVar("Request")
Result = TypeVar("Result")


def run(plan: Generator[Request, Any, Result], answer: Callable[[Request], Any]) -> Result:
    """Drive *plan* to its result, answering its requests with *answer*."""
    try:
        request = next(plan)
        while True:
            try:
                reply = answer(request)
            except BaseException as error:
                request = plan.throw(error)
            else:
                request = plan.send(reply)
    except StopIteration as done:
        result: Result = done.value
        return result


async def arun(plan: Generator[Request, Any, Result], answer: Callable[[Request], Awaitable[Any]]) -> Result:
    """The same, awaiting each answer."""
    try:
        request = next(plan)
        while True:
            try:
                reply = await answer(request)
            except BaseException as error:
                request = plan.throw(error)
            else:
                request = plan.send(reply)
    except StopIteration as done:
        result: Result = done.value
        return result


def without_waiting(error: type[Exception], text: str) -> Callable[[Coroutine[Any, Any, Result]], Result]:
    """A function that runs a coroutine which awaits nothing, without an event loop; *error* if it awaits after all."""

    def completed(work: Coroutine[Any, Any, Result]) -> Result:
        try:
            work.send(None)
        except StopIteration as done:
            result: Result = done.value
            return result
        work.close()
        raise error(text)

    return completed
