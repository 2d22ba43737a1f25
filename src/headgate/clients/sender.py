"""The loop of attempts that all HTTP clients share: acquire a member, send the request, learn, wait, send again.

`PooledSender` knows no HTTP library. A client gives it functions that copy a request, send a copy and classify errors.
The attempts are a plan (see `headgate._plan`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator, Iterable
from time import monotonic
from traceback import walk_tb
from typing import Any, NamedTuple, Protocol, TypeVar

from headgate._plan import arun, run
from headgate.clients.authorize import Authorize, Origins
from headgate.clients.retries import Retries
from headgate.coordination.arguments import is_async
from headgate.coordination.feedback import Feedback, Learn, of_response, of_stranger
from headgate.coordination.leases import AsyncLeased, Leased
from headgate.coordination.pool import AsyncPool, Pool
from headgate.errors import PoolExhausted


class Closes(Protocol):
    def close(self) -> object: ...


Request = TypeVar("Request")
Response = TypeVar("Response", bound=Closes)
AsyncResponse = TypeVar("AsyncResponse")


class AcquireMember(NamedTuple):
    """Acquire a member of the pool; the answer is the lease."""

    timeout: float


class SendRequest(NamedTuple):
    """Send the request with this lease; the answer is the response, or the error in its place, and its feedback."""

    leased: Any


class CloseResponse(NamedTuple):
    """Close this response, which the caller will not get."""

    response: Any


Step = AcquireMember | SendRequest | CloseResponse | float  # a float: sleep that many seconds
Plan = Generator[Step, Any, Any]


def check_pool(client: object, pool: object, expected: type[Pool | AsyncPool]) -> None:
    """Raise if *pool* is not of the type that *client* takes."""
    if not isinstance(pool, expected):
        name = type(client).__name__
        raise TypeError(f"pool of {name} must be of type {expected.__name__}, got {type(pool).__name__}")


class PooledSender:
    """Sends requests of any HTTP library with members of a pool.

    may_be_sent  whether the server may have got a request that ended with this error, and count it later
    is_failure   whether the error is a failure of the server or the network, and not of the caller
    """

    def __init__(
        self,
        authorize: Authorize,
        retries: Retries | None,
        origins: str | Iterable[str] | None,
        learn: Learn | None,
        *,
        may_be_sent: Callable[[Exception], bool],
        is_failure: Callable[[Exception], bool],
    ) -> None:
        if not callable(authorize) or is_async(authorize):
            what = "an async function" if callable(authorize) else type(authorize).__name__
            raise TypeError(f"authorize must be a function of request and member, such as header('X-Key'), got {what}")
        if retries is not None and not isinstance(retries, Retries):
            raise TypeError(f"retries must be such as Retries(attempts=1), which sends only once, got {retries!r:.80}")
        if learn is not None and not callable(learn):
            raise TypeError(f"learn must be a function of a response that returns a Feedback, got {learn!r:.80}")
        self.origins = Origins(origins)
        self._authorize = authorize
        self._retries = retries or Retries()
        self._learn = learn or (of_stranger if self.origins.any else of_response)
        self._may_be_sent = may_be_sent
        self._is_failure = is_failure

    def send(
        self,
        pool: Pool,
        method: str,
        repeatable: bool,
        copy: Callable[[], Request],
        send: Callable[[Request], Response],
    ) -> Response:
        """Send a request with members of *pool* until there is an answer, or no more time.

        repeatable  whether its body is at hand to be sent again
        copy        makes the copy of the request that the member is written into. The request itself stays without:
                    what follows a redirect takes over its headers, and errors that are logged show it
        send        sends such a copy
        """

        def attempt(lease: Leased) -> tuple[Response | Exception, Feedback]:
            response = None
            try:
                with lease as leased:
                    request = self._authorized(leased, copy())
                    try:
                        response = send(request)
                    except Exception as error:
                        self._check_failure(leased, error)
                        leased.release(failed=True)
                        return error, Feedback("failure")
                    return response, leased.observe(response, self._learn)
            except BaseException:
                if response is not None:
                    response.close()
                raise

        def answer(step: Step) -> Any:
            match step:
                case AcquireMember():
                    return pool.acquire(timeout=step.timeout)
                case SendRequest():
                    return attempt(step.leased)
                case CloseResponse():
                    return step.response.close()
                case _:
                    return time.sleep(step)

        response: Response = run(self._attempts(method, repeatable), answer)
        return response

    async def asend(
        self,
        pool: AsyncPool,
        method: str,
        repeatable: bool,
        copy: Callable[[], Request],
        send: Callable[[Request], Awaitable[AsyncResponse]],
        close: Callable[[AsyncResponse], Awaitable[object]],
    ) -> AsyncResponse:
        """`send` for asyncio. *close* ends a response that the caller will not get."""

        async def attempt(lease: AsyncLeased) -> tuple[AsyncResponse | Exception, Feedback]:
            response = None
            try:
                async with lease as leased:
                    request = self._authorized(leased, copy())
                    try:
                        response = await send(request)
                    except Exception as error:
                        self._check_failure(leased, error)
                        await leased.release(failed=True)
                        return error, Feedback("failure")
                    return response, leased.observe(response, self._learn)
            except BaseException:
                if response is not None:
                    await close(response)
                raise

        async def answer(step: Step) -> Any:
            match step:
                case AcquireMember():
                    return await pool.acquire(timeout=step.timeout)
                case SendRequest():
                    return await attempt(step.leased)
                case CloseResponse():
                    return await close(step.response)
                case _:
                    return await asyncio.sleep(step)

        response: AsyncResponse = await arun(self._attempts(method, repeatable), answer)
        return response

    def _authorized(self, leased: Leased | AsyncLeased, request: Request) -> Request:
        """The request with the member in it, about to be sent."""
        leased.ignore_errors()  # an error of authorize, or of the caller's task, says nothing about the member
        self._authorize(request, leased.member)
        leased.unanswered = True
        return request

    def _check_failure(self, leased: Leased | AsyncLeased, error: Exception) -> None:
        """Raise an error again that is no failure of the server or the network."""
        leased.unanswered = self._may_be_sent(error)
        if not self._is_failure(error):
            raise error

    def _attempts(self, method: str, repeatable: bool) -> Plan:
        """Send until there is an answer that is not to be retried; the result is the response."""
        until = monotonic() + self._retries.timeout
        answer: Any = None  # a response, or an exception
        number = 0
        try:
            while True:
                number += 1
                try:
                    leased = yield from _acquire(until, again=number > 1)
                except PoolExhausted:
                    if answer is None:
                        raise
                    break  # the answer of the last attempt says more
                if _is_response(answer):
                    yield CloseResponse(answer)
                answer = None
                answer, feedback = yield SendRequest(leased)
                pause = self._pause(method, answer, feedback, number, until - monotonic()) if repeatable else None
                if pause is None:
                    break
                yield pause
        except GeneratorExit:
            raise  # a plan that is closed may yield no more
        except BaseException:
            if _is_response(answer):
                yield CloseResponse(answer)
            raise
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _pause(self, method: str, answer: Any, feedback: Feedback, number: int, left: float) -> float | None:
        if not _is_response(answer):
            return self._retries.pause(method, None, feedback, number, left)
        return self._retries.pause_after(answer, method, feedback, number, left, all_servers=self.origins.any)


def _acquire(until: float, again: bool) -> Plan:
    """Acquire a member in time. After an answer, wait for one only if one will be ready in time or may be returned."""
    if again:
        try:
            return (yield AcquireMember(0.0))
        except PoolExhausted as error:
            soon = error.retry_after is not None and error.retry_after <= until - monotonic()
            if not soon and not error.reasons.get("leased"):
                raise
    return (yield AcquireMember(max(until - monotonic(), 0.0)))


def _is_response(answer: Any) -> bool:
    return answer is not None and not isinstance(answer, Exception)


def passed_through(error: BaseException | None, function: str) -> bool:
    """Whether *error*, or one that it came from, was raised inside a function of this name.

    HTTP libraries raise one error for different things, which only the place tells apart.
    """
    while error is not None:
        if any(frame.f_code.co_name == function for frame, _ in walk_tb(error.__traceback__)):
            return True
        error = error.__cause__ or error.__context__
    return False
