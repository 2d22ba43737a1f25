"""Limits of a Sanic application as a user writes them, read by mypy and pyright and never run."""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from sanic import Blueprint, HTTPResponse, Request, Sanic, json, text
from sanic.response import JSONResponse
from sanic.views import HTTPMethodView

from headgate import Decision
from headgate.web.exchange import ResponseInfo
from headgate.web.sanic import RateLimits

app = Sanic("shop")
limits = RateLimits(app, default="100/minute", key="address", trusted_proxies=["10.0.0.0/8"])


@app.get("/search")
@limits.limit("5/minute")
async def search(request: Request) -> JSONResponse:
    return json(["found"])


def denied(request: Request, decision: Decision) -> HTTPResponse:
    return text(f"retry in {decision.retry_after} s", status=429)


def failed(response: ResponseInfo) -> bool:
    return response.status_code >= 400


@limits.limit(["10/second", "1000/hour"], key=["address", "header:X-API-Key"], count_if=failed, on_denied=denied)
class Items(HTTPMethodView):
    @limits.exempt
    async def get(self, request: Request) -> HTTPResponse:
        return text("items")


blueprint: Blueprint = limits.limit("50/minute")(Blueprint("api"))
limits.exempt(Blueprint.group(blueprint))
app.add_route(Items.as_view(), "/items")

limits.limit("5/minute", scop="a")  # type: ignore[call-arg]
RateLimits(app, headers="xx")  # type: ignore[arg-type]
RateLimits(app, defalt="5/minute")  # type: ignore[call-arg]
