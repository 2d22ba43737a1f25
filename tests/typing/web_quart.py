"""Limits of a Quart application as a user writes them, read by mypy and pyright and never run."""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from typing import assert_type

from quart import Blueprint, Quart, Request

from headgate import Decision
from headgate.web.quart import RateLimitExceeded, RateLimits

app = Quart(__name__)
limits = RateLimits(app, default="100/minute", trusted_proxies=["10.0.0.0/8"])


@app.route("/search")
@limits.limit("5/minute")
async def search() -> str:
    async with limits.limit("3/minute", scope="export") as decision:
        assert_type(decision, Decision)
    assert_type(await limits.limit("1000/minute", scope="graphql").check(cost=17), Decision)
    return "found"


async def by_user(request: Request) -> str:
    return request.headers["X-User"]


@app.websocket("/chat")
@limits.limit(["10/second", "1000/hour"], key=["address", by_user])
async def chat() -> None: ...


@app.errorhandler(RateLimitExceeded)
async def sorry(error: RateLimitExceeded) -> tuple[str, int]:
    return f"{error.description}, {error.decision.limit}", 429


blueprint = limits.exempt(limits.limit("20/minute")(Blueprint("pages", __name__)))
assert_type(blueprint, Blueprint)

limits.limit("5/minute", scop="a")  # type: ignore[call-arg]
RateLimits(app, headers="xx")  # type: ignore[arg-type]
