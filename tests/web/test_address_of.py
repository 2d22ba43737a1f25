"""`limits.address_of(request)`: a key function knows the client as limits by address do, in every framework."""

from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from django.test import RequestFactory
from fastapi import FastAPI
from flask import Flask
from litestar import Litestar
from quart import Quart
from starlette.applications import Starlette

from headgate.web.aiohttp import RateLimits as AiohttpRateLimits
from headgate.web.asgi import RateLimitMiddleware as ASGIMiddleware
from headgate.web.fastapi import RateLimits as FastAPIRateLimits
from headgate.web.flask import RateLimits as FlaskRateLimits
from headgate.web.litestar import RateLimits as LitestarRateLimits
from headgate.web.quart import RateLimits as QuartRateLimits
from headgate.web.sanic import RateLimits as SanicRateLimits
from headgate.web.starlette import RateLimits as StarletteRateLimits
from headgate.web.wsgi import RateLimitMiddleware as WSGIMiddleware
from tests.web.test_sanic import application as sanic_application
from tests.web.test_sanic import handler, in_asgi

PROXIES = ["127.0.0.0/8"]


def limits_of(kind: Any, *arguments: Any, quota: str = "") -> Any:
    """Limits whose key function is of the application: a key of the client's, or else its address."""
    made: Any = None

    def key(request: Any) -> str:
        address: str = made.address_of(request)
        return address

    options: dict[str, Any] = {"key": key, "trusted_proxies": PROXIES, "default": "1/hour"}
    if quota:
        del options["default"]
        arguments = (*arguments, quota)
    made = kind(*arguments, **options)
    return made


def installed(kind: Any, app: Any) -> Any:
    limits_of(kind).install(app)
    return app


def with_app(kind: Any, app: Any) -> Any:
    limits_of(kind, app)
    return app


APPS: dict[str, Callable[[], Any]] = {
    "starlette": lambda: installed(StarletteRateLimits, Starlette()),
    "fastapi": lambda: installed(FastAPIRateLimits, FastAPI()),
    "litestar": lambda: Litestar([], plugins=[limits_of(LitestarRateLimits)]),
    "asgi": lambda: limits_of(ASGIMiddleware, Starlette(), quota="1/hour"),
    "quart": lambda: with_app(QuartRateLimits, quart()),
    "flask": lambda: with_app(FlaskRateLimits, flask()),
    "wsgi": lambda: limits_of(WSGIMiddleware, Flask("wsgi"), quota="1/hour"),
    "aiohttp": lambda: web.Application(middlewares=[limits_of(AiohttpRateLimits).middleware]),
    "sanic": lambda: with_app(SanicRateLimits, sanic()),
}


def quart() -> Quart:
    app = Quart("address")
    app.add_url_rule("/", "page", lambda: "")
    return app


def sanic() -> Any:
    app = sanic_application()
    app.add_route(handler(), "/")
    return app


def flask() -> Flask:
    app = Flask("address")
    app.add_url_rule("/", "page", lambda: "")
    return app


@pytest.mark.parametrize("framework", APPS)
async def test_address_of(framework: str) -> None:
    """Two clients behind a trusted proxy are two; each is one, whatever it claims."""
    app = APPS[framework]()
    async with AsyncExitStack() as stack:
        if framework == "sanic":
            await stack.enter_async_context(in_asgi(app))
        if framework == "aiohttp":
            server = await stack.enter_async_context(TestServer(app))
            base, transport = str(server.make_url("/")), None
        else:
            base = "http://test"
            transport = Threaded(app) if framework in ("flask", "wsgi") else httpx.ASGITransport(app)
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=base, transport=transport))
        sent = ["6.6.6.6, 192.0.2.1", "192.0.2.2", "7.7.7.7, 192.0.2.1"]
        answers = [await client.get("/", headers={"X-Forwarded-For": each}) for each in sent]
        assert [answer.status_code == 429 for answer in answers] == [False, False, True]


class Threaded(httpx.AsyncBaseTransport):
    """A WSGI application for an async client."""

    def __init__(self, app: Any) -> None:
        self._inner = httpx.WSGITransport(app)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        answer = self._inner.handle_request(request)
        return httpx.Response(answer.status_code)


def test_in_django(wsgi_site: Any) -> None:
    from headgate.web.django.settings import current

    wsgi_site.configure(HEADGATE={"TRUSTED_PROXIES": PROXIES})
    request = RequestFactory().get("/", REMOTE_ADDR="127.0.0.1", HTTP_X_FORWARDED_FOR="6.6.6.6, 192.0.2.1")
    assert current().address_of(request) == "192.0.2.1"
