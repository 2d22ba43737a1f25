"""Holds: what `Budget.reserve` and `AsyncBudget.reserve` give.

On Redis, nearly every reservation and settlement of threads finds no waiter. It goes a short way then, past the plan:
the packed request, one trip, the reply. What else comes of it, the plans of `AnyHold` do.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from headgate.budget.amounts import Amount
from headgate.budget.hold_plans import AnyHold
from headgate.budget.server_calls import ServerCalls
from headgate.budget.subjects import process_id
from headgate.coordination.runner import wait_with_ticket
from headgate.errors import StoreUnavailable


class Hold(AnyHold):
    """What `Budget.reserve` gives. ``with`` settles it at the end: see `settle`; after an error, what was spent."""

    def spend(self, **amounts: Amount) -> None:
        """Count what was used. Reserves more before it runs out; raises `BudgetExceeded` when there is no more.

        What was used is counted all the same. Asks the store only to reserve more, and to keep the hold when half of
        its time is over.

        Args:
            **amounts: what was used since the last call

        Raises:
            BudgetExceeded: more was used than is reserved, and the budget has no more
        """
        if self._count(amounts):
            self._subject.runner.run(self._extend_plan())

    def settle(self, **amounts: Amount) -> bool:
        """Charge what was used, and give the rest back; more than was reserved is a debt. False if settled before.

        An amount that is not named is charged as spent, or as reserved if nothing of it was spent. Repeated in the
        background if the store does not answer.

        Args:
            **amounts: what was used in all
        """
        return self._settle(amounts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not self.settled:
            self._settle({} if error is None else None)

    # ---------------------------------------------------------------------------------------- the short way on Redis

    def _reserve_at_server(self) -> bool:
        """Reserve as `wait_in_queue` does, without a plan for the first attempt; False: nothing was done.

        For holds without an id of the caller's, while no other caller of this process waits or asks.
        """
        subject, runner = self._subject, self._subject.runner
        calls, channel, asking = subject.calls, runner.channel, runner.backend.asking
        if calls is None or self._nonce or channel in asking or not runner.backend.waiters.is_empty(channel):
            return False
        with runner.counts.acquiring() as request:
            try:
                problem: StoreUnavailable | None = None
                try:
                    asking.add(channel)
                    granted, waits = self._attempt_at_server(calls)
                except StoreUnavailable as error:
                    waits = self._until is None or self._terms.clock.now() < self._until
                    if self._until is None or not waits:
                        raise
                    granted, problem = False, error
                finally:
                    asking.discard(channel)
                if not granted and waits:
                    plan = wait_with_ticket(runner, runner.ticket, self._attempt, self._until, True, problem)
                    granted = runner.run(plan) is not None
                if granted:
                    request.granted = True
                    return True
                runner.run(self._leave_queue())
                raise self._refused()
            except BaseException:
                self._withdraw()
                raise

    def _attempt_at_server(self, calls: ServerCalls) -> tuple[bool, bool]:
        """`_attempt` with a packed request: whether it is granted, and whether it waits else."""
        sent = self._terms.clock.now()
        waits = self._asks_at(sent)
        try:
            reply = calls.reserve(self.id, self._subject.amounts.units(self._reserved), waits)
            self._subject.wake(reply, 5)
        except StoreUnavailable as error:
            reply = self._reserve_without_store(self._request(waits), error)
        granted, _ = self._answered(reply, sent, waits)
        return granted is True, waits

    def _settle(self, amounts: dict[str, Amount] | None) -> bool:
        """Settle the short way, in memory or on Redis, or else as the plan says."""
        calls = self._subject.calls
        if calls is None:
            return self._settle_directly(amounts) or self._subject.runner.run(self._settle_plan(amounts))
        if self.settled or self._nonce or self.degraded or self._process != process_id():
            return self._subject.runner.run(self._settle_plan(amounts))
        final = self._final(amounts)  # raises before anything is changed
        self._ended(final)
        answered = False
        try:
            reply = calls.settle(self.id, self._subject.amounts.units(final))
            answered = True
            self._subject.wake_own()
            self._subject.wake(reply, 1)
            return bool(reply[0])
        except StoreUnavailable:
            return True  # in the background
        finally:
            if not answered:
                self._repeat(self._settlement(final))


class AsyncHold(AnyHold):
    """`Hold` for asyncio."""

    async def spend(self, **amounts: Amount) -> None:
        """Count what was used. Reserves more before it runs out; raises `BudgetExceeded` when there is no more."""
        if self._count(amounts):
            await self._subject.runner.arun(self._extend_plan())

    async def settle(self, **amounts: Amount) -> bool:
        """Charge what was used, and give the rest back. See `Hold.settle`."""
        return self._settle_directly(amounts) or await self._subject.runner.arun(self._settle_plan(amounts))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        amounts: dict[str, Amount] | None = {} if error is None else None
        if not self.settled and not self._settle_directly(amounts):
            await self._subject.runner.arun(self._settle_plan(amounts))
