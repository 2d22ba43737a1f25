"""/docs: the description as a page that needs no script and nothing from elsewhere."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from headgate.service.http import Exchange, Reply, Scope
from headgate.service.openapi import describe

if TYPE_CHECKING:
    from headgate.service.app import App

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
HEADERS = [
    ("content-type", "text/html; charset=utf-8"),
    ("content-security-policy", "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"),
    ("x-content-type-options", "nosniff"),
]

_EXAMPLE = """curl -i 'http://localhost:8080/api/v1/rate-limit/check?key=user:123&amp;algorithm=TOKEN_BUCKET'

{"allowed":true,"key":"user:123","algorithm":"TOKEN_BUCKET","limit":100,"remaining":99,
 "resetAfterSeconds":1,"retryAfterSeconds":0,"message":"Request allowed"}"""


async def serve(app: App, scope: Scope, exchange: Exchange) -> Reply:
    return 200, list(HEADERS), page(describe(app.state))


def page(description: dict[str, Any]) -> str:
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
