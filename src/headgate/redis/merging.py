"""Requests that travel together, as few commands: calls of one limiter are one call of its script.

Threads (see `headgate.redis.shared_trips`) and event loops (see `headgate.redis.batching`) put requests together in the
same way. A trip is bounded: 64 quotas of 5 to 20 microseconds hold Redis for about a millisecond.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, Protocol, TypeVar

from redis.exceptions import ResponseError

from headgate.redis.execute import ScriptRequest
from headgate.redis.script import REPLY_SIZE, pack, text
from headgate.redis.topology import ServerCommand

MAX_BATCH = 64  # quotas


class Pending(Protocol):
    """A request that waits to be sent, and its caller for the reply."""

    @property
    def request(self) -> ServerCommand | ScriptRequest: ...


Sent = TypeVar("Sent", bound=Pending)


def quotas_of(pending: Pending) -> int:
    """How many quotas a request decides; a trip carries at most `MAX_BATCH` of them."""
    request = pending.request
    return request.script.quota_count if isinstance(request, ScriptRequest) else 1


def groups(batch: list[Sent], partitioned: bool) -> list[list[Sent]]:
    """The requests that share a command; in a Cluster none do, since a script's keys must lie in one slot."""
    if partitioned or len(batch) == 1:
        return [[pending] for pending in batch]
    return [list(group) for _, group in groupby(batch, key=_group_key)]


def packed(group: Sequence[Pending]) -> bytes:
    """The command of a group."""
    request = group[0].request
    if isinstance(request, ServerCommand):
        return request.command
    calls = [request.call] if len(group) == 1 else [pending.request.call for pending in group]  # type: ignore[union-attr]  # `_group_key` puts no ServerCommand beside a call
    command = request.script.command(calls, request.send_source)
    return pack("ASKING") + command if request.asking else command


def replies(group: Sequence[Pending], reply: Any) -> list[Any]:
    """What each request of a group is answered by the reply to their command; an error where one failed alone."""
    if len(group) == 1:
        return [reply]
    parts = [reply[start : start + REPLY_SIZE] for start in range(0, len(reply), REPLY_SIZE)]
    return [ResponseError(text(part[1])) if part[0] < 0 else part for part in parts]


def _group_key(pending: Pending) -> object:
    request = pending.request
    if isinstance(request, ScriptRequest) and request.script.mergeable and not request.asking:
        return request.script, request.call.op, request.send_source
    return pending
