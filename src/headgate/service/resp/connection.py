"""One connection of the Redis protocol: commands come in, replies go out in the same order.

On a store in the process a command is answered as it is read. Otherwise its reply takes a place in line, a task asks
the store, and replies leave the line from the front; commands about one key wait for each other.

A connection works on what it has received until its share of this turn of the event loop is used up, the client does
not read its replies, or too many replies are in line. Then it reads nothing until it can go on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, cast

from headgate.service.resp.commands import AT_ONCE, find
from headgate.service.resp.replies import CommandScope, LaterReply
from headgate.service.resp.session import RespClient
from headgate.service.resp.throttle import ThrottleLimits
from headgate.service.resp.wire import Command, error, parse
from headgate.service.rsgi import HTTPError
from headgate.service.shared_counters import PROBLEMS

if TYPE_CHECKING:
    from headgate.service.app import App
    from headgate.service.listeners import Listener

logger = logging.getLogger("headgate.service")

READ_BYTES = 8192  # of one connection in one go
WRITE_BYTES = 32_768  # that wait for the client before its commands do
MAX_IN_LINE = 128  # replies that the store is asked for
STORE_CALLS = 3  # calls more that a round trip counts as in the budget of a turn
LINGER = 0.1  # seconds between our end of the stream and the close: a close with bytes unread would discard replies
READ_WITHIN = 60.0  # seconds after which a client that does not read its replies is cut off

_buffer = bytearray(READ_BYTES)  # of all connections: what is read is copied before the next read
_view = memoryview(_buffer)

FAILED = error("an error of the service, not of the command; its log has more")


class PendingReply:
    """A reply, or None until it is there."""

    __slots__ = ("reply",)

    def __init__(self, reply: bytes | None) -> None:
        self.reply = reply


class RespConnection(RespClient, asyncio.BufferedProtocol):
    """The server's side of a connection."""

    def __init__(self, app: App, listener: Listener) -> None:
        if listener.shared is None:
            listener.shared = ThrottleLimits(app)
        super().__init__(app)
        self.listener = listener
        self.limits: ThrottleLimits = listener.shared
        self.turn = listener.turn
        self._loop = asyncio.get_running_loop()
        self._rest = b""  # the beginning of a command
        self._more = 1  # bytes that must follow it before it can be complete
        self._refused = ""  # why no more commands are taken
        self._pending: list[Command] = []  # received, not answered
        self._line: deque[PendingReply] = deque()
        self._last: dict[str | None, asyncio.Task[None]] = {}  # of each key with a reply in line
        self._unordered: set[asyncio.Task[None]] = set()  # those without a key; event loops keep weak references
        self._leave_scheduled = False
        self._waits_for_turn = False
        self._write_timer: asyncio.TimerHandle | None = None  # set while the client does not read
        self._end_timer: asyncio.TimerHandle | None = None  # set when our side of the stream has ended
        self._admitted = self._reading_paused = self._draining = self._lost = False

    # ------------------------------------------------------------------------------------------------ asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(WRITE_BYTES)
        host, port, *_ = self._transport.get_extra_info("peername") or ("", 0)
        self.scope = CommandScope(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        self._lost = not self.listener.add(self, self._transport)

    def get_buffer(self, sizehint: int) -> bytearray:
        return _buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._draining or self._refused or self._lost:
            return
        data = self._rest + _view[:nbytes] if self._rest else bytes(_view[:nbytes])
        self._more -= nbytes
        if self._more > 0:
            self._rest = data
            return
        found = parse(data)
        self._rest, self._more, self._refused = found.rest, found.more, found.refused
        self._pending += found.commands
        self._work()

    def eof_received(self) -> bool:
        """Answer what has come, then close; a client may end its side of the stream first."""
        self.drain()
        return self._transport.can_write_eof()

    def pause_writing(self) -> None:
        self._write_timer = self._loop.call_later(READ_WITHIN, self.abort)

    def resume_writing(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        self._work()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = self._draining = True
        self._pending.clear()
        for timer in (self._write_timer, self._end_timer):
            if timer is not None:
                timer.cancel()
        self.listener.remove(self)

    def drain(self) -> None:
        """Answer the commands that were received, take no new ones, then close."""
        self._draining = True
        self._loop.call_soon(self._work)  # not at once: QUIT calls this before its own reply is written

    def abort(self) -> None:
        self._transport.abort()

    # ----------------------------------------------------------------------------------------------------- the work

    def _work(self) -> None:
        """Answer pending commands, as many as can be answered now; then read on, wait, or close."""
        if self._waits_for_turn or self._lost or self._transport.is_closing():
            return
        if self._pending and self._write_timer is None:
            self._answer()
        if self._pending:
            if not self._reading_paused:
                self._reading_paused = True
                self._transport.pause_reading()
            if self._write_timer is None and len(self._line) < MAX_IN_LINE:
                self._waits_for_turn = True
                self.turn.wait(self._have_turn)
        elif self._refused and not self._draining:
            self._put(self.problem(f"Protocol error: {self._refused}"))
            self.drain()
        elif self._draining:
            if not self._line:
                self._end()
        elif self._reading_paused:
            self._reading_paused = False
            self._transport.resume_reading()

    def _have_turn(self) -> None:
        self._waits_for_turn = False
        self._work()

    def _answer(self) -> None:
        if self._state is not self.app.state:
            self.follow_settings()
            self.limits.follow_settings()
        turn, line, commands = self.turn, self._line, self._pending
        out: list[bytes] = []
        share, done, size = turn.share, 0, 0
        for words in commands:
            if done >= share or done >= turn.left or size > WRITE_BYTES or len(line) >= MAX_IN_LINE:
                break
            done += 1
            try:
                function = AT_ONCE.get(words[0]) or find(self, words[0])
                reply = function(self, words)
            except Exception:
                logger.exception("Error answering a command")
                self.app.gauges[PROBLEMS] += 1
                reply = FAILED
            if type(reply) is not bytes:
                self._ask_store(cast("LaterReply", reply))
            elif line:
                line.append(PendingReply(reply))
            else:
                out.append(reply)
                size += len(reply)
            if self._draining and words[0].upper() == b"QUIT":
                done = len(commands)
                break
        turn.spend(done)
        self._pending = commands[done:]
        if out:
            self._transport.write(b"".join(out))
        if not self._admitted and not self.is_unknown:
            self._admitted = True
            self.listener.admit(self)

    def _put(self, reply: bytes) -> None:
        if self._line:
            self._line.append(PendingReply(reply))
        else:
            self._transport.write(reply)

    def _ask_store(self, later: LaterReply) -> None:
        place = PendingReply(None)
        self._line.append(place)
        self.turn.spend(STORE_CALLS)
        task = self._loop.create_task(self._fill(place, later, self._last.get(later.key)))
        if later.key is None:
            self._unordered.add(task)
            task.add_done_callback(self._unordered.discard)
        else:
            self._last[later.key] = task

    async def _fill(self, place: PendingReply, later: LaterReply, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await before
        try:
            place.reply = await later.reply
        except HTTPError as reason:
            place.reply = self.problem(reason.detail)
        except Exception:
            logger.exception("Error answering a command")
            self.app.gauges[PROBLEMS] += 1
            place.reply = FAILED
        if self._last.get(later.key) is asyncio.current_task():
            del self._last[later.key]
        if self._leave_scheduled:
            return
        if len(self._line) == 1:  # a lone command, which would wait for the next turn of the event loop for nothing
            self._leave_line()
        else:  # replies that come in one turn of the event loop are written together
            self._leave_scheduled = True
            self._loop.call_soon(self._leave_line)

    def _leave_line(self) -> None:
        """Write the replies at the front of the line that are there."""
        self._leave_scheduled = False
        out: list[bytes] = []
        line = self._line
        while line and (reply := line[0].reply) is not None:
            out.append(reply)
            line.popleft()
        if self._lost or self._transport.is_closing():
            return
        if out:
            self._transport.write(b"".join(out))
        if self._pending or self._draining:
            self._work()

    def _end(self) -> None:
        """End our side of the stream, and close when the client has had a moment to read."""
        if self._end_timer is not None:
            return
        self._end_timer = self._loop.call_later(READ_WITHIN, self.abort)
        if self._transport.can_write_eof():
            self._transport.write_eof()
            self._transport.resume_reading()  # what comes now is read and dropped
            self._loop.call_later(LINGER, self._transport.close)
        else:
            self._transport.close()
