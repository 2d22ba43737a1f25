"""Limits of an aiohttp application as a user writes them, read by mypy and pyright and never run."""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from collections.abc import Awaitable, Callable

from aiohttp import web

from headgate import Decision
from headgate.web.aiohttp import RateLimits
from headgate.web.exchange import ResponseInfo

limits = RateLimits(default="100/minute", key="address", trusted_proxies=["10.0.0.0/8"])


@limits.limit("5/minute")
async def search(request: web.Request) -> web.Response:
    return web.json_response(["found"])


async def denied(request: web.Request, decision: Decision) -> web.Response:
    return web.Response(text=f"retry in {decision.retry_after} s", status=429)


def failed(response: ResponseInfo) -> bool:
    return response.status_code >= 400


@limits.limit(["10/second", "1000/hour"], key=["address", "header:X-API-Key"], count_if=failed, on_denied=denied)
class Items(web.View):
    @limits.exempt
    async def get(self) -> web.Response:
        return web.Response()


handler: Callable[[web.Request], Awaitable[web.Response]] = search
view: type[Items] = Items
app = web.Application(middlewares=[limits.middleware])
app.add_routes([web.get("/search", search), web.view("/items", Items)])

handler = limits.exempt(Items)  # type: ignore[assignment]
limits.limit("5/minute", scop="a")  # type: ignore[call-arg]
RateLimits(headers="xx")  # type: ignore[arg-type]
