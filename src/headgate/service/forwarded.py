"""Host, method and path of the request that a proxy asks for, as parts of a key.

Only the headers of a trusted proxy count, and only those that the settings name: a proxy replaces the headers that it
writes and passes others on as the client sent them, so looking for a second name would let the client choose. Each
value is written in one way, so that a client gets no second limit by spelling the same request differently.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from headgate.service.rsgi import HTTPError, Scope

if TYPE_CHECKING:
    from headgate.service.app import State

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
UNREADABLE = "~"  # in the place of a value that granian does not give, because it is not ASCII
OTHER = "OTHER"  # all other methods together: a client may invent as many as it likes

_ESCAPE = re.compile("%([0-9A-Fa-f]{2})")
_PLAIN = frozenset(map(chr, range(0x21, 0x7F))) - set("%/?#")  # the same to most servers with and without escape


def forwarded_part(state: State, scope: Scope, rule_name: str, part: str) -> str:
    """*part* of the request that a proxy asks for; raises `HTTPError` where no trusted proxy has said it once."""
    header = _header_of(state, part)
    if not state.client_ip.trusts(scope.client):
        peer = scope.client.rpartition(":")[0]
        why = f"the {part} that {peer} names does not count; add its network to trusted_proxies"
        raise HTTPError(400, f"rule {rule_name!r} needs a trusted proxy: {why}")
    lines = scope.headers.get_all(header)
    if not lines and header in scope.headers:
        return UNREADABLE
    if len(lines) != 1:
        why = f"the header {header} once, written by the proxy; it came {len(lines)} times"
        raise HTTPError(400, f"rule {rule_name!r} needs {why}")
    return PARTS[part](lines[0])


def normal_host(text: str) -> str:
    """A host in lower case, without its port and without the dot at its end."""
    host = text.strip().lower()
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0].rstrip(".")


def normal_method(text: str) -> str:
    """A method that is well known, or OTHER."""
    return text if text in METHODS else OTHER


def normal_path(uri: str) -> str:
    """The path of *uri* without its query, with needless escapes, empty segments and dots taken out."""
    path = uri.partition("?")[0].partition("#")[0]
    if not path.startswith("/"):  # http://host/path
        path = path.partition("://")[2].partition("/")[2]
    kept: list[str] = []
    for segment in _ESCAPE.sub(_plain, path).split("/"):
        if segment == "..":
            del kept[-1:]
        elif segment not in ("", "."):
            kept.append(segment)
    return "/" + "/".join(kept)


def _header_of(state: State, part: str) -> str:
    settings = state.settings
    names = {"host": settings.host_header, "method": settings.method_header, "path": settings.uri_header}
    return names[part].lower()


def _plain(escape: re.Match[str]) -> str:
    character = chr(int(escape[1], 16))
    return character if character in _PLAIN else escape[0].upper()


PARTS: dict[str, Callable[[str], str]] = {"host": normal_host, "method": normal_method, "path": normal_path}
