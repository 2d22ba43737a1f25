"""The client's IP address: the peer's, or the one that trusted proxies name; and the key that limits are kept under.

Forwarded headers are read from the right. Each proxy appends the address it saw, so the last address that is not a
trusted proxy is the last that a trusted proxy has seen; anything further left is the client's own claim. The headers
of a peer that is not trusted are ignored. Header names are matched literally: `X_Forwarded_For` is another header.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Protocol

IPAddress = IPv4Address | IPv6Address
IPNetwork = IPv4Network | IPv6Network

MAX_HOPS = 20  # longer chains of proxies do not occur; a longer list is not worth the time


class ForwardedHeaders(Protocol):
    """The headers of a request, as far as this module reads them."""

    def get_all(self, key: str) -> list[str]: ...


def parse_network(text: str) -> IPNetwork:
    """A network in CIDR notation, or one address; raises ValueError with what would be right."""
    try:
        return ip_network(text)
    except ValueError as error:
        raise ValueError(f"{text!r:.60} is no network: {error}; write 10.0.0.0/8, 192.0.2.1 or 2001:db8::/32") from None


class ClientIP:
    """Finds the client of a request.

    *trusted* are the proxies' networks; *headers* the names of the headers that they write, the first one present
    counts; an IPv6 client is known by its network of *ipv6_prefix* bits. *trust_unix*: a peer without an address, on a
    Unix socket, is a trusted proxy.
    """

    def __init__(
        self, trusted: Sequence[IPNetwork], headers: Sequence[str], ipv6_prefix: int, trust_unix: bool = False
    ) -> None:
        self._trusted = tuple(trusted)
        self.headers = tuple(headers)
        self._ipv6_prefix = ipv6_prefix
        self._trust_unix = trust_unix
        self._peer_key = lru_cache(10_000)(self._key_of_host)
        self.named_host_key = lru_cache(10_000)(self._key_of_named_host)

    def address(self, peer: str, headers: ForwardedHeaders) -> IPAddress | None:
        """The client's address; None if the peer has none, as on a Unix socket."""
        own = parse_address(peer)
        if not self._is_trusted(own):
            return own
        for name in self.headers:
            lines = headers.get_all(name)
            if lines:
                return self._last_untrusted(own, hops_in(name, lines))
        return own

    def trusts(self, peer: str) -> bool:
        """Whether *peer* is a trusted proxy, whose headers count."""
        return self._is_trusted(parse_address(peer))

    def key(self, peer: str, headers: ForwardedHeaders) -> str:
        """The key of the client's limits: its address, or its network in IPv6."""
        if not self._trusted:
            return self._peer_key(peer.rpartition(":")[0])
        return self._key_of(self.address(peer, headers))

    def host_key(self, host: str, headers: ForwardedHeaders) -> str:
        """The same for a peer that is given without its port: a name stays as the server gave it, '' stays ''."""
        if not self._trusted and not self._trust_unix:
            return self.named_host_key(host)
        address = self.address(host, headers)
        return host if address is None else self._key_of(address)

    @property
    def key_of_peer(self) -> Callable[[str], str]:
        """A function that gives the key of a peer at once; it gives '' where headers of the request may say more."""
        return (lambda host: "") if self._trusted or self._trust_unix else self.named_host_key

    def without_address(self) -> str:
        """What to tell an application if neither the server nor a proxy gives a client's address."""
        if self._trust_unix:
            return (
                f"the proxy on the Unix socket has sent no address in {' or '.join(self.headers)}; have it send "
                "one, in nginx: proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;"
            )
        return (
            "the server gives no address for this client, as on a Unix socket; name the proxy in front of it: "
            "trusted_proxies=['unix'], or limit by another key"
        )

    def _is_trusted(self, peer: IPAddress | None) -> bool:
        return self._trust_unix if peer is None else in_networks(peer, self._trusted)

    def _key_of(self, address: IPAddress | None) -> str:
        if address is None:
            return "unknown"
        if isinstance(address, IPv6Address) and self._ipv6_prefix < 128:
            return str(IPv6Network((address, self._ipv6_prefix), strict=False))
        return str(address)

    def _key_of_host(self, host: str) -> str:
        return self._key_of(parse_address(host))

    def _key_of_named_host(self, host: str) -> str:
        address = parse_address(host)
        return host if address is None else self._key_of(address)

    def _last_untrusted(self, peer: IPAddress | None, hops: Sequence[str]) -> IPAddress | None:
        client = peer
        for hop in reversed(hops[-MAX_HOPS:]):
            address = parse_address(hop)
            if address is None:
                return client  # no trusted proxy has seen what stands further left
            client = address
            if not in_networks(address, self._trusted):
                return client
        return client


def parse_address(text: str) -> IPAddress | None:
    """An address from ``1.2.3.4``, ``1.2.3.4:80``, ``2001:db8::1``, ``[2001:db8::1]:80`` or a quoted one."""
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
        return address.ipv4_mapped  # otherwise a client would have two keys, and all of IPv4 would be one /64
    return address


def in_networks(address: IPAddress, networks: Iterable[IPNetwork]) -> bool:
    return any(address in network for network in networks)


def hops_in(name: str, lines: Sequence[str]) -> list[str]:
    """What the header *name* says of the way of a request: an address for each hop, the client's first."""
    return _forwarded(lines) if name == "forwarded" else ",".join(lines).split(",")


def _forwarded(lines: Sequence[str]) -> list[str]:
    """The `for` of each element of the `Forwarded` header (RFC 7239); `unknown` for an element without one."""
    return [_for(element) for element in _split(",".join(lines), ",")]


def _for(element: str) -> str:
    for pair in _split(element, ";"):
        name, _, value = pair.partition("=")
        if name.strip().lower() == "for":
            return value
    return "unknown"


def _split(text: str, separator: str) -> list[str]:
    """*text* split at every *separator* outside quotes."""
    parts, quoted, start = [], False, 0
    for i, character in enumerate(text):
        if character == '"':
            quoted = not quoted
        elif character == separator and not quoted:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]
