"""Limits of a Litestar application as a user writes them, read by mypy and pyright and never run."""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from typing import Any

from litestar import Controller, Litestar, Request, Response, Router, get

from headgate import Decision
from headgate.web.exchange import ResponseInfo
from headgate.web.litestar import RateLimits

limits = RateLimits(default="100/minute", key="address", trusted_proxies=["10.0.0.0/8"])


@get("/search", guards=[limits.limit("5/minute")])
async def search() -> list[str]:
    return ["found"]


def denied(request: Request[Any, Any, Any], decision: Decision) -> Response[str]:
    return Response(f"retry in {decision.retry_after} s", status_code=429)


def failed(response: ResponseInfo) -> bool:
    return response.status_code >= 400


class Items(Controller):
    path = "/items"
    guards = [limits.limit(["10/second", "1000/hour"], key=["address", "header:X-API-Key"], count_if=failed)]  # noqa: RUF012

    @limits.exempt
    @get()
    async def items(self) -> None: ...


router = limits.exempt(Router("/v1", route_handlers=[Items], guards=[limits.limit("9/day", on_denied=denied)]))
app = Litestar([search, router], plugins=[limits], guards=[limits.limit("1000/day", scope="all", shadow=True)])

limits.limit("5/minute", scop="a")  # type: ignore[call-arg]
limits.limit("5/minute", timeout="2")  # type: ignore[arg-type]
RateLimits(headers="xx")  # type: ignore[arg-type]
