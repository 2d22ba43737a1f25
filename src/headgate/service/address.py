"""Who is asking: the peer, or the client that proxies we trust name; as a text that limits can be kept for.

Read from the right: each proxy appends the address it saw, so the last address that is not one of our proxies is
the last that somebody we trust has seen. Anything further left is the client's own claim. A peer that is not trusted
is the client, whatever its headers say. Header names are matched as they are: `X_Forwarded_For` is another header.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from headgate.service.http import RequestHeaders

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

MAX_HOPS = 20  # more proxies than anybody has; a longer list is not worth the time
HEADERS = ("x-forwarded-for", "x-real-ip", "forwarded")


def network(text: str) -> Network:
    """A CIDR or an address; raises ValueError with what would be right."""
    try:
        return ip_network(text)
    except ValueError as error:
        raise ValueError(f"{text!r:.60} is no network: {error}; write 10.0.0.0/8, 192.0.2.1 or 2001:db8::/32") from None


class Locator:
    """Names clients. *trusted*: the proxies; *headers*: where they write, the first that is there counts."""

    def __init__(self, trusted: Sequence[Network], headers: Sequence[str], ipv6_prefix: int) -> None:
        self.trusted = tuple(trusted)
        self.headers = tuple(headers)
        self.ipv6_prefix = ipv6_prefix
        self.of_peer = lru_cache(10_000)(self._of_peer)

    def address(self, peer: str, headers: RequestHeaders) -> Address | None:
        """The client's address; None for a peer that has none."""
        own = read(peer)
        if own is None or not self.trusted or not within(own, self.trusted):
            return own
        for name in self.headers:
            lines = headers.get_all(name)
            if lines:
                return self._client(own, _forwarded(lines) if name == "forwarded" else _listed(lines))
        return own

    def key(self, peer: str, headers: RequestHeaders) -> str:
        """The text that the client's limits are kept for: its address, or its network in IPv6."""
        if not self.trusted:
            return self.of_peer(peer.rpartition(":")[0])
        return self.text(self.address(peer, headers))

    def text(self, address: Address | None) -> str:
        if address is None:
            return "unknown"
        if isinstance(address, IPv6Address) and self.ipv6_prefix < 128:
            return str(IPv6Network((address, self.ipv6_prefix), strict=False))
        return str(address)

    def _of_peer(self, host: str) -> str:
        return self.text(read(host))

    def _client(self, peer: Address, hops: Sequence[str]) -> Address:
        client = peer
        for hop in reversed(hops[-MAX_HOPS:]):
            address = read(hop)
            if address is None:
                return client  # nobody we trust has seen what lies further left
            client = address
            if not within(address, self.trusted):
                return client
        return client


def read(text: str) -> Address | None:
    """An address out of ``1.2.3.4``, ``1.2.3.4:80``, ``2001:db8::1``, ``[2001:db8::1]:80`` or a quoted one."""
    text = text.strip().strip('"').strip()
    if text.startswith("["):
        text, closed, _ = text[1:].partition("]")
        if not closed:
            return None
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped  # else one client has two names, and IPv4 as a whole one /64
    return address


def within(address: Address, networks: Iterable[Network]) -> bool:
    return any(address in network for network in networks)


def _listed(lines: Sequence[str]) -> list[str]:
    return ",".join(lines).split(",")


def _forwarded(lines: Sequence[str]) -> list[str]:
    """The `for` of each element of RFC 7239's header; an element without one stands for an unknown address."""
    return [_for(element) for element in _split(",".join(lines), ",")]


def _for(element: str) -> str:
    for pair in _split(element, ";"):
        name, _, value = pair.partition("=")
        if name.strip().lower() == "for":
            return value
    return "unknown"


def _split(text: str, at: str) -> list[str]:
    """*text* cut at every *at* that is not inside quotes."""
    parts, quoted, start = [], False, 0
    for i, character in enumerate(text):
        if character == '"':
            quoted = not quoted
        elif character == at and not quoted:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]
