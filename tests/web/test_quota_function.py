"""A function of the request gives the quota: tiers, and clients without a limit."""

from typing import Annotated, Any

import httpx
import pytest
from fastapi import APIRouter, Depends, FastAPI
from litestar import Litestar, get

from headgate import Decision
from headgate.web.asgi import RateLimitMiddleware, Receive, Scope, Send
from headgate.web.fastapi import RateLimits
from headgate.web.litestar import RateLimits as LitestarRateLimits


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


def tier(scope: Scope) -> str | None:
    plan = dict(scope["headers"]).get(b"x-plan", b"free")
    return {b"free": "1/hour", b"paid": "3/hour"}.get(plan)


async def test_tiers() -> None:
    """Each plan has its own allowance; a plan without a quota has no limit, and no headers of one."""
    transport = httpx.ASGITransport(RateLimitMiddleware(hello, tier))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for plan, admitted in (("free", 1), ("paid", 3), ("staff", 6)):
            answers = [await client.get("/", headers={"x-plan": plan}) for _ in range(6)]
            assert [answer.status_code for answer in answers] == [200] * admitted + [429] * (6 - admitted), plan
            assert ("x-ratelimit-limit" in answers[0].headers) is (plan != "staff")


def plain(request: Any) -> str:
    return "1/hour"


async def slow(request: Any) -> str:
    return "1/hour"


@pytest.mark.parametrize("quota", [plain, slow, lambda request: "1/hour"], ids=["plain", "async", "lambda"])
async def test_as_dependency_and_guard(quota: Any) -> None:
    """Frameworks look into a limit before they call it, and find that it is a limit also where a function has it."""
    limits, app, guards = RateLimits(), FastAPI(), LitestarRateLimits()
    limits.install(app)
    router = APIRouter(dependencies=[Depends(limits.limit(quota))])

    @app.get("/route", dependencies=[Depends(limits.limit(quota, key=lambda request: "one"))])
    @router.get("/router")
    def route() -> None: ...

    @app.get("/decision")
    def decision(made: Annotated[Decision, Depends(limits.limit(quota))]) -> None:
        assert made.limit == 1

    @get("/guard", guards=[guards.limit(quota)])
    async def guarded() -> None: ...

    app.include_router(router)
    for served, paths in (
        (app, ("/route", "/router", "/decision")),
        (Litestar([guarded], plugins=[guards]), ("/guard",)),
    ):
        transport = httpx.ASGITransport(served)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for path in paths:
                assert [(await client.get(path)).status_code for _ in range(2)] == [200, 429], path
