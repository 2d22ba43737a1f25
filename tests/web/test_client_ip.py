"""The client's address: the headers of trusted proxies count as far as those can have seen, other headers do not."""

import pytest

from headgate.web.client_ip import ClientIP, parse_network


class Lines:
    """Headers with the lines that came."""

    def __contains__(self, key: str) -> bool:
        return key in self._lines

    def __init__(self, **lines: str | list[str]) -> None:
        self._lines = {
            name.replace("_", "-"): [value] if isinstance(value, str) else value for name, value in lines.items()
        }

    def get(self, key: str, default: object = None) -> object:
        return self._lines.get(key, [default])[0]

    def get_all(self, key: str) -> list[str]:
        return self._lines.get(key, [])


TRUSTED = [parse_network("10.0.0.0/8"), parse_network("2001:db8:ffff::/48")]
ALL = ("x-forwarded-for", "x-real-ip", "forwarded")

# peer, headers, the key
CLIENTS = [
    ("203.0.113.9:1", Lines(x_forwarded_for="1.2.3.4"), "203.0.113.9"),
    ("10.0.0.1:1", Lines(), "10.0.0.1"),
    ("10.0.0.1:1", Lines(x_forwarded_for="1.2.3.4"), "1.2.3.4"),
    ("10.0.0.1:1", Lines(x_forwarded_for="6.6.6.6, 1.2.3.4"), "1.2.3.4"),
    ("10.0.0.1:1", Lines(x_forwarded_for=["6.6.6.6", "1.2.3.4"]), "1.2.3.4"),
    ("10.0.0.1:1", Lines(x_forwarded_for="6.6.6.6, 1.2.3.4, 10.0.0.2"), "1.2.3.4"),
    ("10.0.0.1:1", Lines(x_forwarded_for="1.2.3.4:5555"), "1.2.3.4"),
    ("10.0.0.1:1", Lines(x_forwarded_for="::ffff:102:304"), "1.2.3.4"),
    ("10.0.0.1:1", Lines(x_forwarded_for="[2001:db8::1]:443"), "2001:db8::/64"),
    ("10.0.0.1:1", Lines(x_forwarded_for="2001:db8::1"), "2001:db8::/64"),
    ("10.0.0.1:1", Lines(x_forwarded_for="1.2.3.4, unknown"), "10.0.0.1"),
    ("10.0.0.1:1", Lines(x_forwarded_for="1.2.3.4, unknown, 10.0.0.2"), "10.0.0.2"),
    ("10.0.0.1:1", Lines(x_forwarded_for=""), "10.0.0.1"),
    ("10.0.0.1:1", Lines(x_forwarded_for=", ,"), "10.0.0.1"),
    ("10.0.0.1:1", Lines(x_forwarded_for="10.0.0.3, 10.0.0.2"), "10.0.0.3"),
    ("10.0.0.1:1", Lines(x_forwarded_for="9.9.9.9, " * 50 + "10.0.0.2"), "9.9.9.9"),
    ("10.0.0.1:1", Lines(x_forwarded_for=", ".join(["9.9.9.9"] + 30 * ["10.0.0.2"])), "10.0.0.2"),
    ("10.0.0.1:1", Lines(x_forwarded_for="01.2.3.4"), "10.0.0.1"),
    ("10.0.0.1:1", Lines(x_forwarded_for="1.2.3.4\0"), "10.0.0.1"),
    ("10.0.0.1:1", Lines(x_real_ip="1.2.3.4"), "1.2.3.4"),
    ("10.0.0.1:1", Lines(x_real_ip="1.2.3.4", x_forwarded_for="5.6.7.8"), "5.6.7.8"),
    ("203.0.113.9:1", Lines(x_real_ip="1.2.3.4"), "203.0.113.9"),
    ("10.0.0.1:1", Lines(forwarded="for=1.2.3.4;proto=https"), "1.2.3.4"),
    ("10.0.0.1:1", Lines(forwarded='by=x;For="[2001:db8::1]:4711"'), "2001:db8::/64"),
    ("10.0.0.1:1", Lines(forwarded='for=6.6.6.6, for="1.2.3.4:99"'), "1.2.3.4"),
    ("10.0.0.1:1", Lines(forwarded='for="6.6.6.6, for=7.7.7.7"'), "10.0.0.1"),
    ("10.0.0.1:1", Lines(forwarded="for=1.2.3.4, for=unknown"), "10.0.0.1"),
    ("10.0.0.1:1", Lines(forwarded="for=1.2.3.4, proto=https"), "10.0.0.1"),
    ("203.0.113.9:1", Lines(forwarded="for=1.2.3.4"), "203.0.113.9"),
    ("[::ffff:10.0.0.1]:1", Lines(x_forwarded_for="1.2.3.4"), "1.2.3.4"),
    ("[2001:db8:ffff::9]:1", Lines(x_forwarded_for="1.2.3.4"), "1.2.3.4"),
    ("[fe80::1%eth0]:1", Lines(), "fe80::/64"),
    ("[::ffff:1.2.3.4]:1", Lines(), "1.2.3.4"),
    ("[2001:db8:1:2:3:4:5:6]:1", Lines(), "2001:db8:1:2::/64"),
    ("", Lines(), "unknown"),
]


@pytest.mark.parametrize("peer, headers, key", CLIENTS)
def test_forwarded(peer: str, headers: Lines, key: str) -> None:
    """The client is the last address that a trusted proxy has seen."""
    assert ClientIP(TRUSTED, ALL, 64).key(peer, headers) == key


def test_no_proxies() -> None:
    """Without trusted proxies no header changes the client."""
    untrusting = ClientIP([], ALL, 64)
    for peer, headers, _ in CLIENTS:
        assert untrusting.key(peer, headers) == untrusting.key(peer, Lines())


def test_one_header_can_be_pinned() -> None:
    pinned = ClientIP(TRUSTED, ("x-real-ip",), 64)
    assert pinned.key("10.0.0.1:1", Lines(x_forwarded_for="6.6.6.6", x_real_ip="1.2.3.4")) == "1.2.3.4"


def test_ipv6_prefix() -> None:
    assert ClientIP([], ALL, 56).key("[2001:db8:1:2ff::1]:1", Lines()) == "2001:db8:1:200::/56"
    assert ClientIP([], ALL, 128).key("[2001:db8::1]:1", Lines()) == "2001:db8::1"
