"""Threads that ask a server at the same moment share a trip: one of them sends for those that wait.

A caller that finds no trip under way makes its own, as if there were no other. A caller that finds some waits. When a
trip is over, its sender wakes one of the waiters, which becomes the next sender: it sends the calls of all that wait in
one trip, its own among them, and reads the replies. So no caller works for others for longer than its own call takes.

To share a trip costs each caller a wait, which pays where enough calls share it. With about `ALONE` calls under way or
fewer, each makes a trip of its own; with more, callers wait and share one.

No lock protects this, so a signal cannot leave one held. Each call is *taken* once, in one atomic step: the thread that
took it sends it, and no other does. The rest only decides which calls travel together, and may go wrong: a waiter that
is neither answered nor woken within `PATIENCE` takes its own call, and what else waits, on another connection. So a
sender that hangs, or that was interrupted, holds up no other caller for longer.

Calls that share a trip have the same time-out, and began within `PATIENCE` of each other. A call with a time limit of
its own travels alone. The main thread sends only for itself: exceptions of signal handlers break a trip off there.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from time import monotonic
from typing import TYPE_CHECKING, Any

from redis.exceptions import ConnectionError, ResponseError, TimeoutError

from headgate._plan import run
from headgate.redis.execute import ScriptRequest, reply_after_asking
from headgate.redis.merging import MAX_BATCH, groups, packed, quotas_of, replies
from headgate.redis.script import pack
from headgate.redis.topology import ServerCommand

if TYPE_CHECKING:
    from headgate.redis.sync_client import ServerConnections

PATIENCE = 0.002  # seconds that a caller waits for the trip of another before it makes its own
ALONE = 4  # calls, each in a trip of its own, that are as fast as in one trip
RECHECK = 0.02  # seconds after which a caller whose call was sent looks again: a signal may have lost a wake-up

_GONE = object()  # takes the call of a caller that is gone


class WaitingCall:
    """A call in the queue, whose thread waits for an answer or for its turn to send."""

    __slots__ = ("_taken_by", "_wake_up", "answer", "gone", "request")

    def __init__(self, request: ScriptRequest) -> None:
        self.request = request
        self.answer: Any = None  # the reply, or an Exception
        self.gone = False  # its thread waits no longer
        self._taken_by: dict[None, object] = {}
        self._wake_up = threading.Lock()
        self._wake_up.acquire()

    def take(self, taker: object) -> bool:
        """Claim the call for *taker*, to send it or to drop it. True if no other has claimed it before."""
        return self._taken_by.setdefault(None, taker) is taker

    def is_taken(self) -> bool:
        """Whether it is sent, or its caller is gone."""
        return bool(self._taken_by)

    def wait(self, seconds: float) -> bool:
        """Wait until `wake`, whatever for; False if it does not come."""
        return self._wake_up.acquire(timeout=max(seconds, 0.0))

    def wake(self) -> None:
        try:
            self._wake_up.release()
        except RuntimeError:
            pass  # it was woken already

    def result(self) -> Any:
        """The reply, or the error raised: a copy, since several threads may raise it, which writes into it."""
        if isinstance(self.answer, Exception):
            raise copy.copy(self.answer) from self.answer
        return self.answer


class SharedTrips:
    """The calls of all threads to one server."""

    def __init__(self, connections: ServerConnections, partitioned: bool) -> None:
        self.connections = connections
        self._partitioned = partitioned
        self._senders: set[int] = set()  # the ids of the requests whose trips the others wait for
        self._at_once = ALONE  # trips; threads that look at the same moment may make more
        self._waiting: deque[WaitingCall] = deque()  # some may be taken already
        self._answered: deque[WaitingCall] = deque()  # to be woken; some may be gone already

    def send(self, request: ScriptRequest) -> Any:
        """The reply to *request*."""
        senders, turn = self._senders, id(request)
        if len(senders) >= self._at_once:
            return self._wait(WaitingCall(request))
        try:
            senders.add(turn)
            return self.connections.on_connection(request.deadline, _exchange_one, request)
        finally:
            senders.discard(turn)
            if self._waiting or self._answered:
                self._hand_over(request)

    def _wait(self, call: WaitingCall) -> Any:
        deadline = call.request.deadline
        try:
            self._waiting.append(call)
            # looked at again, since a sender that ends its trip now sees the call
            if len(self._senders) >= self._at_once and not call.wait(min(PATIENCE, deadline - monotonic())):
                self._senders.clear()  # they hang, or a signal has lost them: no other caller waits for them
            if call.answer is None and call.take(call):
                self._send_all(call)
            while call.answer is None:  # another thread sends it
                left = deadline - monotonic()
                if left <= 0:
                    raise TimeoutError("no answer in time to a call that was sent with others")
                call.wait(min(left, RECHECK))
            return call.result()
        finally:
            call.gone = True
            if call.answer is None:
                call.take(_GONE)
            self._hand_over(call.request)

    def _hand_over(self, request: ScriptRequest) -> None:
        """End the turn of *request*: the first call that waits has the next one. Wake one caller with an answer.

        It wakes the next in turn. Woken all at once they would only wait for the interpreter, at twice the cost.
        """
        self._senders.discard(id(request))
        while self._waiting and len(self._senders) < self._at_once:
            if (first := _pop(self._waiting)) is not None:
                turn = id(first.request)
                self._senders.add(turn)  # before the check: a caller that leaves after it ends the turn again
                if first.is_taken():
                    self._senders.discard(turn)
                else:
                    first.wake()
        while self._answered:
            if (answered := _pop(self._answered)) is not None and not answered.gone:
                answered.wake()
                return

    def _send_all(self, call: WaitingCall) -> None:
        """Send *call* and what else waits; all of them have an answer then."""
        batch = [call]
        failure: Exception = ConnectionError("the thread that sent the call with its own was interrupted")
        try:
            self._senders.add(id(call.request))
            if threading.get_ident() == threading.main_thread().ident:
                self._hand_over(call.request)
            else:
                self._gather(batch)
                under_way = len(self._senders) - 1 + len(batch)  # calls
                if under_way != ALONE:
                    self._at_once = 1 if under_way > ALONE else ALONE
            self.connections.on_connection(call.request.deadline, self._exchange_all, batch)
        except Exception as error:
            failure = error.with_traceback(None)  # which would refer to the calls, and so to itself
        finally:
            for sent in batch:
                if sent.answer is None:
                    sent.answer = failure
            self._answered.extend(batch[1:])

    def _gather(self, batch: list[WaitingCall]) -> None:
        """Take the calls that wait, as many as one trip may have, and add them to *batch*."""
        sender = batch[0]
        quotas = quotas_of(sender)
        while quotas < MAX_BATCH and (waiting := _pop(self._waiting)) is not None:
            if waiting is not sender:
                batch.append(waiting)
                if waiting.take(sender):
                    quotas += quotas_of(waiting)
                else:
                    batch.pop()

    def _exchange_all(self, connection: Any, batch: list[WaitingCall]) -> None:
        """Send all calls, then read their replies."""
        sent = groups(batch, self._partitioned)
        connection.send_packed_command([packed(group) for group in sent], check_health=False)
        for group in sent:
            try:
                answers = replies(group, connection.read_response())
            except ResponseError as error:
                answers = [error.with_traceback(None)] * len(group)
            for call, answer in zip(group, answers, strict=True):
                call.answer = answer


def _pop(calls: deque[WaitingCall]) -> WaitingCall | None:
    try:
        return calls.popleft()
    except IndexError:
        return None  # another thread was faster


def _exchange_one(connection: Any, request: ScriptRequest) -> Any:
    """Send one call, in the fewest steps, and read its reply."""
    connection.send_packed_command([request.script.command([request.call])], check_health=False)
    return connection.read_response()


def exchange(connection: Any, request: ServerCommand | ScriptRequest) -> Any:
    """Send any request and read its reply."""
    if isinstance(request, ServerCommand):
        connection.send_packed_command([request.command], check_health=False)
        return connection.read_response()
    command = request.script.command([request.call], request.send_source)
    if request.asking:
        connection.send_packed_command([pack("ASKING") + command], check_health=False)
        return run(reply_after_asking(), lambda _: connection.read_response())
    connection.send_packed_command([command], check_health=False)
    return connection.read_response()
