"""FastAPI and Starlette as type checkers see them: the examples of the documentation, and what they give."""

from __future__ import annotations

from typing import Annotated, assert_type

from fastapi import APIRouter, Depends, FastAPI, Request, Response, WebSocket
from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.responses import PlainTextResponse

import headgate.web.starlette
from headgate import Decision
from headgate.web.asgi import RateLimitMiddleware
from headgate.web.exchange import ResponseInfo
from headgate.web.fastapi import FastAPILimit, RateLimits

app = FastAPI()
limits = RateLimits(store="memory://", default="100/minute", key="address", trusted_proxies=["10.0.0.0/8"])
limits.install(app)


@app.get("/search")
@limits.limit("5/minute")
async def search(words: str) -> list[str]:
    return words.split()


@app.get("/plain")
@limits.limit(["10/second", "1000/hour"], scope="search", methods=["GET"])
def plain(words: str) -> list[str]:
    return words.split()


async def direct_call() -> None:
    """A decorated function is typed as before."""
    assert_type(await search("a b"), list[str])
    assert_type(plain("a b"), list[str])


def by_user(request: Request) -> str:
    return str(request.state.user)


async def cost_of(request: Request) -> int:
    return len(await request.body())


def my_response(request: Request, decision: Decision) -> Response:
    return PlainTextResponse(f"in {decision.retry_after} s", 429)


def failed(response: ResponseInfo) -> bool:
    return response.status_code >= 400


limit = limits.limit(
    "10/second",
    key=["address", by_user],
    cost=cost_of,
    count_if=failed,
    algorithm="sliding_window",
    on_store_error="deny",
    shadow=True,
    timeout=2.0,
    on_denied=my_response,
)
assert_type(limit, FastAPILimit)
router = APIRouter(dependencies=[Depends(limit), Depends(limits.exempt)])


@router.get("/")
async def root(decision: Annotated[Decision, Depends(limits.limit("5/minute"))], request: Request) -> int:
    found = await limit.check(request)
    assert_type(found, Decision)
    return decision.remaining


@app.get("/health")
@limits.exempt
def health() -> str:
    return "ok"


assert_type(health(), str)


@app.websocket("/chat")
@limits.limit("5/minute")
@limits.messages("20/second")
async def chat(websocket: WebSocket) -> None:
    await websocket.accept()


starlette_limits = headgate.web.starlette.RateLimits(default="100/minute", headers="both")
starlette_limits.install(Starlette())


@starlette_limits.limit("5/minute")
class Items(HTTPEndpoint):
    @starlette_limits.limit("5/minute")
    async def get(self, request: Request) -> Response:
        return PlainTextResponse("items")


assert_type(Items, type[Items])
wrapped = RateLimitMiddleware(app, "100/minute", store="memory://", key="header:X-API-Key")
