"""Answers to checks that spent permits: a client that has disconnected gets its permits back.

hyper, the HTTP library under granian, drops a request when its client half-closes the connection
(`shutdown(SHUT_WR)`), and granian has no option for hyper's `half_close`. Such a request cannot be answered, so it must
not be charged. `response_str` does not report that the request was dropped; a response stream does. A stream often
takes two writes where one is enough, which made checks a tenth slower. So only the first granted check of a connection
is answered by a stream: a client that half-closes after its request usually sends one request per connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from headgate.errors import StoreUnavailable
from headgate.service.rsgi import Exchange, Response, Scope, request_id_of
from headgate.service.rules import Charge

MAX_PEERS = 65_536


class Delivery:
    """Sends answers, and remembers the peers (address and port) whose connections have had one."""

    def __init__(self) -> None:
        self._peers: set[str] = set()
        self._peers_before: set[str] = set()

    def rotate(self) -> None:
        """Forget the peers that sent nothing since the call before; the server has closed their connections."""
        self._peers_before, self._peers = self._peers, set()

    def is_known(self, peer: str) -> bool:
        """Whether the connection of *peer* has had an answer before; from now on it counts as one that has."""
        if peer in self._peers:
            return True
        if len(self._peers) >= MAX_PEERS:
            self._peers.clear()
        self._peers.add(peer)
        return peer in self._peers_before

    async def send(self, scope: Scope, exchange: Exchange, response: Response, charges: Sequence[Charge]) -> None:
        """Send *response*; refund *charges* if the connection was closed before."""
        status, headers, text = response
        if request_id := request_id_of(scope.headers):
            headers.append(("x-request-id", request_id))
        body = text.encode() if isinstance(text, str) else text
        headers.append(("content-length", str(len(body))))
        try:
            await exchange.response_stream(status, headers).send_bytes(body)
        except RuntimeError:  # granian's own error; this is its only public base class
            for rule, key, cost in charges:
                with suppress(StoreUnavailable):
                    await rule.limiter.refund(key, cost)
