"""Who may do what: bearer tokens with scopes, kept as digests and compared in constant time.

A scope is guarded as soon as a token for it is set; `admin` (reset, most denied keys) as soon as any token is.
An admin token opens everything, a check token also `read`.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from headgate.service.http import Refusal, RequestHeaders

SCOPES = ("check", "read", "admin")
IMPLIED = {"check": frozenset({"check", "read"}), "read": frozenset({"read"}), "admin": frozenset(SCOPES)}

_CHALLENGE = ("www-authenticate", 'Bearer realm="headgate"')


def digest(token: str) -> str:
    """What is kept of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


class Tokens:
    """All tokens in force; *given* as pairs of digest and scope, one token may have several."""

    def __init__(self, given: Sequence[tuple[str, str]] = ()) -> None:
        scopes: dict[bytes, frozenset[str]] = {}
        for hexadecimal, scope in given:
            key = bytes.fromhex(hexadecimal)
            scopes[key] = scopes.get(key, frozenset()) | IMPLIED[scope]
        self._scopes = list(scopes.items())
        self.guarded = frozenset(scope for _, scope in given) | ({"admin"} if scopes else set())

    def __len__(self) -> int:
        return len(self._scopes)

    def allows(self, scope: str, headers: RequestHeaders) -> bool:
        """Whether the bearer may; without a token in force everybody may."""
        return scope not in self.guarded or scope in (self._of(headers) or ())

    def demand(self, scope: str, headers: RequestHeaders) -> None:
        """Refuse a bearer that may not: 401 without a known token, 403 with one that is not enough."""
        if scope not in self.guarded:
            return
        scopes = self._of(headers)
        if scopes is None:
            raise Refusal(401, f"this needs a token with the scope {scope!r}: Authorization: Bearer TOKEN", _CHALLENGE)
        if scope not in scopes:
            raise Refusal(403, f"this token does not have the scope {scope!r}")

    def _of(self, headers: RequestHeaders) -> frozenset[str] | None:
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer":
            return None
        shown = hashlib.sha256(token.strip().encode(errors="surrogatepass")).digest()
        found = None
        for known, scopes in self._scopes:  # all of them, so that the time does not tell which one it was
            if hmac.compare_digest(known, shown):
                found = scopes
        return found
