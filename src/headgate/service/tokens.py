"""Tokens with scopes, kept as digests and compared in constant time.

A scope is guarded as soon as a token for it is set; `admin` (reset, most denied keys) as soon as any token is set.
An admin token opens everything, a check token also `read`.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from headgate.service.environment import PREFIX
from headgate.service.rsgi import HTTPError, RequestHeaders
from headgate.service.settings import SCOPES, BadFile, Settings

IMPLIED = {"check": frozenset({"check", "read"}), "read": frozenset({"read"}), "admin": frozenset(SCOPES)}

_CHALLENGE = ("www-authenticate", 'Bearer realm="headgate"')


def digest(token: str) -> str:
    """The SHA-256 of a token, in hexadecimal."""
    return hashlib.sha256(token.encode()).hexdigest()


def token_in(authorization: str) -> str | None:
    """The token of a header: of `Bearer`, or the password of `Basic`, for clients that can only put it into a URL."""
    kind, _, given = authorization.partition(" ")
    if kind.lower() == "bearer":
        return given.strip()
    if kind.lower() != "basic":
        return None
    try:
        return base64.b64decode(given.strip(), validate=True).decode().partition(":")[2]
    except ValueError:
        return None


def digest_in(headers: RequestHeaders) -> bytes | None:
    """The SHA-256 of the token that a request carries."""
    token = token_in(headers.get("authorization", ""))
    return None if token is None else hashlib.sha256(token.encode(errors="surrogatepass")).digest()


def read_tokens(settings: Settings, environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Digest and scope of each token: those of HEADGATE_ADMIN_TOKEN and so on, and those of the settings."""
    found = []
    for scope in SCOPES:
        name = f"{PREFIX}{scope.upper()}_TOKEN"
        for token in re.split(r"[\s,]+", environment.get(name, "").strip()):
            if token:
                found.append((digest(token), scope))
    for i, entry in enumerate(settings.tokens):
        known = entry.sha256
        if entry.file:
            try:
                secret = Path(entry.file).read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise BadFile(f"tokens.{i}.file: cannot read {entry.file!r}: {error}") from None
            if not secret:
                raise BadFile(f"tokens.{i}.file: {entry.file!r} is empty")
            known = digest(secret)
        found.append((known, entry.scope))
    return found


class Tokens:
    """All tokens in force, given as pairs of digest and scope; one token may have several scopes."""

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
        """Whether the bearer may use *scope*; every bearer may use a scope that is not guarded."""
        return scope not in self.guarded or scope in (self._scopes_of(headers) or ())

    def describe(self, token_digest: bytes | None) -> str:
        """A token for a log: the start of its digest, as `headgate config show` prints it, and its scope."""
        scopes = None if token_digest is None else self.scopes(token_digest)
        if token_digest is None or scopes is None:
            return "no token"
        return f"token {token_digest.hex()[:8]} ({'admin' if 'admin' in scopes else ', '.join(sorted(scopes))})"

    def demand(self, scope: str, headers: RequestHeaders) -> None:
        """Refuse a bearer that may not use *scope*: 401 without a known token, 403 with one of another scope."""
        if scope not in self.guarded:
            return
        scopes = self._scopes_of(headers)
        if scopes is None:
            why = f"this needs a token with the scope {scope!r}: Authorization: Bearer TOKEN"
            raise HTTPError(401, why, _CHALLENGE)
        if scope not in scopes:
            raise HTTPError(403, f"this token does not have the scope {scope!r}")

    def _scopes_of(self, headers: RequestHeaders) -> frozenset[str] | None:
        found = digest_in(headers)
        return None if found is None else self.scopes(found)

    def scopes(self, token_digest: bytes) -> frozenset[str] | None:
        """What the bearer of a token may use, by the token's SHA-256; None if there is no such token."""
        found = None
        for known, scopes in self._scopes:  # all are compared, so that the time does not tell which one matched
            if hmac.compare_digest(known, token_digest):
                found = scopes
        return found
