"""What can be seen to be wrong when an application starts, or in its first requests, and is then logged."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import sys
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Network, IPv6Network
from typing import Any

from headgate.web.client_ip import MAX_HOPS, ClientIP, IPAddress, hops_in, parse_address, parse_network
from headgate.web.exchange import Exchange
from headgate.web.limit import SetupError

logger = logging.getLogger("headgate.web")

# In this order: most proxies write X-Forwarded-For, and hand on what a client claims in the others.
FORWARDED = ("x-forwarded-for", "x-real-ip", "forwarded")
UNSEEN = "{} is memory://: each server process has its own, which no command sees"
WATCHED_REQUESTS = 100
SERVERS = ("gunicorn", "uvicorn", "granian", "hypercorn", "fastapi", "uwsgi")


def make_client_ip(trusted_proxies: Iterable[str], forwarded: Sequence[str], ipv6_prefix: int) -> ClientIP:
    """The finder of addresses for these arguments of `RateLimits`."""
    proxies = _listed("trusted_proxies", trusted_proxies, "10.0.0.0/8", str | IPv4Network | IPv6Network)
    headers = _listed("forwarded", forwarded, "x-forwarded-for", str)
    if not headers:
        raise SetupError("forwarded is a list, such as ['x-forwarded-for'], got an empty one; leave it out instead")
    if isinstance(ipv6_prefix, bool) or not isinstance(ipv6_prefix, int) or not 0 < ipv6_prefix <= 128:
        raise SetupError(f"ipv6_prefix must be a number of bits from 1 to 128, got {ipv6_prefix!r:.40}")
    networks = [parse_network(name) for name in proxies if name != "unix"]
    return ClientIP(networks, [name.lower() for name in headers], ipv6_prefix, "unix" in proxies)


def _listed(what: str, given: Any, example: str, kinds: Any) -> list[Any]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise SetupError(f"{what} is a list, such as [{example!r}], got {type(given).__name__} {given!r:.60}")
    listed = list(given)
    if wrong := [each for each in listed if not isinstance(each, kinds) or not each]:
        raise SetupError(f"{what} is a list of texts, such as [{example!r}], got {wrong[0]!r:.60} in it")
    return listed


class FirstRequests:
    """Looks at the first requests of an application for what its arguments do not fit. Each warning comes once.

    *owner*: what the application has made, which warnings name. *forwarded*: look for a proxy whose headers are
    ignored. *per_process*: each process counts for itself.
    """

    def __init__(self, owner: str, *, forwarded: bool, per_process: bool) -> None:
        self._owner = owner
        self.count = WATCHED_REQUESTS if forwarded or per_process else 0  # how many are looked at
        self._forwarded = forwarded
        self._per_process = per_process
        if per_process and (reason := several_workers()):
            self._warn_of_workers(reason)

    def look_at(self, exchange: Exchange) -> None:
        """Look at one request, and log what is wrong."""
        if self._per_process and exchange.is_multiprocess():
            self._warn_of_workers("the server says that it runs several processes")
        if self._forwarded:
            found = next((name for name in FORWARDED if exchange.get_all(name)), "")
            peer = parse_address(exchange.peer())
            if found and (peer is None or (peer.is_private and not _names(exchange, found, peer))):
                self._warn_of_proxy(exchange.peer(), found)

    def _warn_of_workers(self, reason: str) -> None:
        self._per_process = False
        logger.warning(
            "%s is on memory://, which counts in each process, and %s: every worker admits the whole limit; share it "
            "with store='shared://NAME' on one machine or store='redis://...' on several",
            self._owner,
            reason,
        )

    def _warn_of_proxy(self, peer: str, header: str) -> None:
        self._forwarded = False
        logger.warning(
            "requests from %s carry %s, which is ignored: all clients behind that proxy share one limit; if it is "
            "your proxy, name it: trusted_proxies=[%r] of %s",
            peer or "a Unix socket",
            header,
            peer or "unix",
            self._owner,
        )


def _names(exchange: Exchange, header: str, peer: IPAddress) -> bool:
    """Whether *peer* is in *header*: then the server has put the client's address in the place of the proxy's."""
    return peer in [parse_address(hop) for hop in hops_in(header, exchange.get_all(header))[-MAX_HOPS:]]


def several_workers() -> str:
    """Why this process looks like one of several workers; '' if it does not."""
    for name in ("WEB_CONCURRENCY", "UVICORN_WORKERS", "GRANIAN_WORKERS"):
        concurrency = os.environ.get(name, "")
        if concurrency.isdigit() and int(concurrency) > 1:
            return f"{name} is {concurrency}"
    arguments = " ".join([*sys.argv[1:], os.environ.get("GUNICORN_CMD_ARGS", "")])
    found = re.search(r"(?:^|\s)(?:-w|--workers|--processes)[ =]?(\d+)", arguments)
    path, program = os.path.split(sys.argv[0] if sys.argv else "")
    if program == "__main__.py":  # python -m
        program = os.path.basename(path)
    if any(server in program or server in sys.orig_argv for server in SERVERS):
        if found and int(found[1]) > 1:
            return f"this server has {found[1]} workers"
        # A child's sys.argv is what its parent was started with. A single worker may be a child, too.
        if not any(argument == "-c" or argument.startswith("--config") for argument in sys.argv):
            return ""
    # A single worker of Sanic is a child as well; `is_multiprocess` knows how many there are.
    alone = "--reload" in sys.argv or "SANIC_WORKER_NAME" in os.environ
    if multiprocessing.parent_process() is not None and not alone:
        return "this process may be one of several workers"
    return ""
