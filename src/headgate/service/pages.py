"""The pages for people: the files of the live page, and /docs, which needs no script and loads nothing."""

from __future__ import annotations

import hashlib
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headgate.service.openapi import describe
from headgate.service.rsgi import HTTPProtocol, Response, Scope

if TYPE_CHECKING:
    from headgate.service.app import App

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


class PageFile:
    """One file of the live page, read once and served from memory."""

    def __init__(self, path: Path) -> None:
        self.content = path.read_bytes()
        self.tag = f'"{hashlib.sha256(self.content).hexdigest()[:16]}"'
        self.headers = [("content-type", TYPES[path.suffix]), ("etag", self.tag), ("cache-control", "no-cache")]
        self.headers += SECURITY

    def response(self, scope: Scope) -> Response:
        if scope.headers.get("if-none-match") == self.tag:
            return 304, self.headers[1:], b""
        return 200, list(self.headers), self.content


def load_files() -> dict[str, PageFile]:
    """Every file by the path that it is served at: the page at `/`, the others below `/page/`."""
    files = {}
    for path in sorted(FOLDER.rglob("*")) if FOLDER.is_dir() else ():
        if path.is_file() and path.suffix in TYPES:
            files["/page/" + path.relative_to(FOLDER).as_posix()] = PageFile(path)
    if "/page/index.html" in files:
        files["/"] = files["/page/index.html"]
    return files


STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; }
body { font: 16px/1.55 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, pre { font: 14px/1.5 ui-monospace, monospace; }
pre { background: var(--soft); padding: .8rem 1rem; border-radius: .5rem; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 1rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem .3rem 0; border-bottom: 1px solid var(--line); }
h2 { margin-top: 2.5rem; border-top: 1px solid var(--line); padding-top: 1.5rem; }
.method { font-weight: 700; }
"""
DOCS_HEADERS = [
    ("content-type", "text/html; charset=utf-8"),
    ("content-security-policy", "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"),
    ("x-content-type-options", "nosniff"),
]

_EXAMPLE = """curl -i 'http://localhost:8080/api/v1/rate-limit/check?key=user:123&amp;algorithm=TOKEN_BUCKET'

{"allowed":true,"key":"user:123","algorithm":"TOKEN_BUCKET","limit":100,"remaining":99,
 "resetAfterSeconds":1,"retryAfterSeconds":0,"message":"Request allowed"}"""


async def docs(app: App, scope: Scope, protocol: HTTPProtocol) -> Response:
    return 200, list(DOCS_HEADERS), docs_page(describe(app.state))


def docs_page(description: dict[str, Any]) -> str:
    operations = "".join(
        _operation(path, method, operation)
        for path, methods in description["paths"].items()
        for method, operation in methods.items()
    )
    info = description["info"]
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8><title>headgate API</title>"
        f"<meta name=viewport content='width=device-width'><style>{STYLE}</style></head><body>"
        f"<h1>headgate {escape(info['version'])}</h1><p>{escape(info['description'])} "
        "For machines: <a href='openapi.json'>openapi.json</a>. Live: <a href='./'>what happens now</a>.</p>"
        f"<pre>{_EXAMPLE}</pre>{operations}</body></html>"
    )


def _operation(path: str, method: str, operation: dict[str, Any]) -> str:
    rows = "".join(_parameter(parameter) for parameter in operation.get("parameters", []))
    parameters = f"<table><tr><th>parameter</th><th></th><th>type</th></tr>{rows}</table>" if rows else ""
    body = operation.get("requestBody")
    sent = ""
    if body:
        schema = body["content"]["application/json"]["schema"]
        many = "a list of " if "items" in schema else ""
        name = schema.get("items", schema)["$ref"].rpartition("/")[2]
        sent = f"<p>Body: {many}<code>{escape(name)}</code> as JSON.</p>"
    answers = "".join(
        f"<tr><td><code>{status}</code></td><td>{escape(answer['description'])}</td></tr>"
        for status, answer in operation["responses"].items()
    )
    return (
        f"<h2><span class=method>{method.upper()}</span> <code>{escape(path)}</code></h2>"
        f"<p>{escape(operation['summary'])}</p>{parameters}{sent}"
        f"<table><tr><th>status</th><th></th></tr>{answers}</table>"
    )


def _parameter(parameter: dict[str, Any]) -> str:
    schema = parameter["schema"]
    kind = ", ".join(schema["enum"]) if "enum" in schema else schema.get("type", "")
    need = " (required)" if parameter["required"] else ""
    return (
        f"<tr><td><code>{escape(parameter['name'])}</code></td>"
        f"<td>{escape(parameter['description'])}{need}</td><td>{escape(str(kind))}</td></tr>"
    )
