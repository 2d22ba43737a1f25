"""How a member of a pool is written into a request, and to which servers it may be sent."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

Authorize = Callable[[Any, str], object]  # request, member

_VALUE = re.compile(r"[!-~\x80-\xff]([\t -~\x80-\xff]*[!-~\x80-\xff])?")  # what a header can carry


class Origins:
    """The servers that members may be sent to: those given, else that of the first request; ``"*"``: all.

    A redirect may lead to any server, which could keep the member for itself, or have it retired with a 401.
    """

    def __init__(self, origins: str | Iterable[str] | None) -> None:
        self._lock = threading.Lock()
        self.any = origins == "*"
        listed = [origins] if isinstance(origins, str) else None if origins is None else list(origins)
        if listed == []:
            raise ValueError("origins is empty, so no member would ever be sent; leave it out, or give URLs")
        self._allowed = None if listed is None or self.any else frozenset(_origin(each) for each in listed)

    def __contains__(self, url: object) -> bool:
        if self.any:
            return True
        origin = _origin(str(url))
        with self._lock:
            if self._allowed is None:
                self._allowed = frozenset([origin])
        return origin in self._allowed


def _origin(url: str) -> tuple[str, str, int]:
    parts = urlsplit(url)
    if not parts.scheme or not parts.hostname:
        raise ValueError(f"an origin must be a URL such as 'https://api.example.com', got {url!r:.80}")
    host = parts.hostname if parts.hostname.isascii() else parts.hostname.encode("idna").decode()  # as it is sent
    return parts.scheme, host, parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)


def header(name: str, template: str = "{}", secrets: Mapping[str, str] | None = None) -> Authorize:
    """An *authorize* that writes the member, or its secret, into a header: ``header("Authorization", "Bearer {}")``.

    Args:
        name: of the header
        template: its value, with ``{}`` for the member or its secret
        secrets: of members by name: then the pool holds only names, and the secrets stay out of Redis
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"name must be that of a header, such as 'Authorization', got {name!r:.80}")
    try:
        found = template.format("\0").count("\0") == 1
    except (AttributeError, IndexError, KeyError, ValueError):  # not a str, or {name} or {1} in it
        found = False
    if not found:
        raise ValueError(f"template must have {{}} where the member goes, such as 'Bearer {{}}', got {template!r:.80}")
    if secrets is not None and not isinstance(secrets, Mapping):
        raise TypeError(f"secrets must be a mapping of members to their secrets, got {type(secrets).__name__}")

    def authorize(request: Any, member: str) -> None:
        if secrets is not None and member not in secrets:
            raise LookupError(f"the pool has the member {member!r}, for which there is no secret")
        secret = member if secrets is None else secrets[member]
        value = template.format(secret)
        if not isinstance(secret, str) or not _VALUE.fullmatch(value):  # the libraries would put it into their error
            whose = "a member" if secrets is None else f"the secret of {member!r}"
            why = "it is empty, has space or a line end around it, or characters beyond Latin-1"
            raise ValueError(f"{whose} is no text for a header: {why}")
        request.headers[name] = value

    return authorize
