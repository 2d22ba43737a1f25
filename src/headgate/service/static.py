"""The live page: a few static files, read once and served from memory."""

from __future__ import annotations

import hashlib
from pathlib import Path

from headgate.service.http import Reply, Scope

FOLDER = Path(__file__).parent / "page"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".json": "application/json",
}
SECURITY = [
    ("content-security-policy", "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
]


class File:
    """One file and its headers."""

    def __init__(self, path: Path) -> None:
        self.content = path.read_bytes()
        self.tag = f'"{hashlib.sha256(self.content).hexdigest()[:16]}"'
        self.headers = [("content-type", TYPES[path.suffix]), ("etag", self.tag), ("cache-control", "no-cache")]
        self.headers += SECURITY

    def reply(self, scope: Scope) -> Reply:
        if scope.headers.get("if-none-match") == self.tag:
            return 304, self.headers[1:], b""
        return 200, list(self.headers), self.content


def load() -> dict[str, File]:
    """Every file by the path that it is served at: the page itself at `/`, the others below `/page/`."""
    files = {}
    for path in sorted(FOLDER.rglob("*")) if FOLDER.is_dir() else ():
        if path.is_file() and path.suffix in TYPES:
            files["/page/" + path.relative_to(FOLDER).as_posix()] = File(path)
    if "/page/index.html" in files:
        files["/"] = files["/page/index.html"]
    return files
