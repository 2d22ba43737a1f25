"""Answers to checks that spent permits: a client that is gone by then gets its permits back.

hyper, under granian, drops a request as soon as its client half-closes the connection (`shutdown(SHUT_WR)`), and
granian has no option for hyper's `half_close`: such a request cannot be answered, so it must not be charged.
`response_str` does not say that the request was dropped. A response stream does, but it often takes two writes where
one would do, which made checks a tenth slower. So only the first answered check of a connection takes a stream: a
client that half-closes mostly sends one request, and the ones that send many keep the connection open in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from headgate.errors import StoreUnavailable
from headgate.service.http import Exchange, Reply, Scope, request_id_of
from headgate.service.rules import Charge

MAX_PEERS = 65_536


class Delivery:
    """Sends answers, and knows the peers (address and port) whose connections have had one."""

    def __init__(self) -> None:
        self._peers: set[str] = set()
        self._peers_before: set[str] = set()

    def rotate(self) -> None:
        """Forget peers that were not seen since the last call but one; idle connections are closed sooner."""
        self._peers_before, self._peers = self._peers, set()

    def is_known(self, peer: str) -> bool:
        """Whether the connection of *peer* has had an answer before; it counts as one that has from now on."""
        if peer in self._peers:
            return True
        if len(self._peers) >= MAX_PEERS:
            self._peers.clear()
        self._peers.add(peer)
        return peer in self._peers_before

    async def send(self, scope: Scope, exchange: Exchange, reply: Reply, charges: Sequence[Charge]) -> None:
        """Send *reply*; refund *charges* if the connection was closed before."""
        status, headers, text = reply
        if request_id := request_id_of(scope.headers):
            headers.append(("x-request-id", request_id))
        body = text.encode() if isinstance(text, str) else text
        headers.append(("content-length", str(len(body))))
        try:
            await exchange.response_stream(status, headers).send_bytes(body)
        except RuntimeError:  # granian's own error; this is its only public base class
            for lane, key, cost in charges:
                with suppress(StoreUnavailable):
                    await lane.limiter.refund(key, cost)
