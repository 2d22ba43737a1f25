"""Limits of a Flask application as a user writes them, read by mypy and pyright and never run."""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from typing import assert_type

from flask import Blueprint, Flask, Request, Response
from flask.views import MethodView

from headgate import Decision
from headgate.web.exchange import ResponseInfo
from headgate.web.flask import RateLimitExceeded, RateLimits
from headgate.web.wsgi import RateLimitMiddleware

app = Flask(__name__)
limits = RateLimits(app, default="100/minute", trusted_proxies=["10.0.0.0/8"])


@app.route("/search")
@limits.limit("5/minute")
def search() -> str:
    return "found"


@limits.limit("5/minute")
@app.route("/later/<int:item>")
async def later(item: int) -> dict[str, int]:
    return {"item": item}


def by_user(request: Request) -> str:
    return request.headers["X-User"]


def denied(request: Request, decision: Decision) -> Response:
    return Response(f"retry in {decision.retry_after} s", status=429)


def failed(response: ResponseInfo) -> bool:
    return response.status_code >= 400


class Items(MethodView):
    decorators = [limits.limit(["10/second", "1000/hour"], key=["address", by_user], count_if=failed)]  # noqa: RUF012

    @limits.limit("9/day", on_denied=denied, timeout=2.0)
    def post(self) -> str:
        with limits.limit("3/minute", scope="export") as decision:
            assert_type(decision, Decision)
        return str(limits.limit("1000/minute", scope="graphql").check(cost=17).remaining)


@app.errorhandler(RateLimitExceeded)
def sorry(error: RateLimitExceeded) -> tuple[str, int]:
    return f"{error.description}, {error.decision.limit}", 429


blueprint = limits.exempt(limits.limit("20/minute")(Blueprint("pages", __name__)))
assert_type(blueprint, Blueprint)
assert_type(search(), str)
later_limits = RateLimits(store="redis://localhost:6379/0", timeout=0.5)
later_limits.init_app(app)
around = RateLimitMiddleware(app, "100/minute", key="header:X-API-Key")

limits.limit("5/minute", scop="a")  # type: ignore[call-arg]
limits.limit("5/minute", timeout="2")  # type: ignore[arg-type]
RateLimits(app, headers="xx")  # type: ignore[arg-type]
coroutine = later(item="1")  # type: ignore[arg-type]
