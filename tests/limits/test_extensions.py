"""Flask-Limiter and slowapi, unchanged, on ``headgate.limits.install()``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import flask
import flask_limiter
import flask_limiter.commands
import httpx
import pytest
import slowapi
import slowapi.errors
import slowapi.util
from fastapi import FastAPI, Request

from tests.support.callers import in_threads
from tests.support.clocks import until
from tests.support.servers import Server

STRATEGIES = ["fixed-window", "moving-window", "sliding-window-counter", "token-bucket", "leaky-bucket", "gcra"]

pytestmark = pytest.mark.usefixtures("installed")

ROWS = [pytest.param("memory"), pytest.param("redis", marks=pytest.mark.server)]


class Made:
    """Extensions of a test, and the stores that are closed when it ends."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.limiters: list[Any] = []

    def flask(self, **options: Any) -> tuple[flask.Flask, flask_limiter.Limiter]:
        """An application with one route, /, of 20 per hour, which costs what the query says."""
        app = flask.Flask("app")
        options = {"storage_uri": self.url, "headers_enabled": True, **options}
        limiter = flask_limiter.Limiter(lambda: flask.request.headers.get("user", "-"), app=app, **options)

        @app.get("/")
        @limiter.limit("20/hour", cost=lambda: int(flask.request.args.get("cost", 1)))
        def index() -> str:
            return "hello"

        self.limiters.append(limiter)
        return app, limiter

    def slowapi(self, **options: Any) -> tuple[FastAPI, slowapi.Limiter]:
        """The same with slowapi on FastAPI."""
        options = {"storage_uri": self.url, **options}
        limiter = slowapi.Limiter(key_func=slowapi.util.get_remote_address, **options)
        app = FastAPI()
        app.state.limiter = limiter
        app.add_exception_handler(slowapi.errors.RateLimitExceeded, slowapi._rate_limit_exceeded_handler)  # type: ignore[arg-type]  # as its manual has it

        @app.get("/")
        @limiter.limit("20/hour")
        def index(request: Request) -> str:  # a plain function runs in a thread
            return "hello"

        self.limiters.append(limiter)
        return app, limiter


@pytest.fixture(params=ROWS)
def made(request: pytest.FixtureRequest) -> Iterator[Made]:
    """In memory, and on Redis."""
    memory = request.param == "memory"
    made = Made("memory://" if memory else request.getfixturevalue("redis_server").url)
    yield made
    for limiter in made.limiters:
        limiter._storage.storage.close()


def statuses(app: flask.Flask, times: int, path: str = "/") -> list[int]:
    """Ask so many times at once, each from a thread of its own."""
    return in_threads(times, lambda: app.test_client().get(path).status_code)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_flask_limiter_is_exact(strategy: str, made: Made) -> None:
    """Sixty requests at once against 20 per hour: 20."""
    app, _ = made.flask(strategy=strategy)
    found = statuses(app, 60)
    assert sorted(set(found)) == [200, 429]
    assert found.count(200) == 20


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_slowapi_is_exact(strategy: str, made: Made) -> None:
    app, _ = made.slowapi(strategy=strategy)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://a") as client:
        answers = await asyncio.gather(*(client.get("/") for _ in range(60)))
    assert [answer.status_code for answer in answers].count(200) == 20
    assert {answer.status_code for answer in answers} == {200, 429}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_headers_and_costs(strategy: str, made: Made) -> None:
    """Headers count down by the cost; a request that does not fit takes nothing from one that does."""
    app, limiter = made.flask(strategy=strategy)
    client = app.test_client()
    assert client.get("/?cost=5").headers["X-RateLimit-Remaining"] == "15"
    assert client.get("/?cost=16").status_code == 429
    assert client.get("/?cost=15").headers["X-RateLimit-Remaining"] == "0"
    refused = client.get("/")
    assert refused.status_code == 429
    assert refused.headers["X-RateLimit-Limit"] == "20"
    assert 0 <= int(refused.headers["Retry-After"]) <= 2 * 3600 + 1
    assert client.get("/", headers={"user": "another"}).status_code == 200
    limiter.reset()
    assert client.get("/?cost=20").status_code == 200


def test_deduct_when_serves_no_request_uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks `test` before the view and calls `hit` after it: both say the same, in a window partly in view too."""
    now = time.time() // 3600 * 3600
    monkeypatch.setattr(time, "time", lambda: now)
    app, limiter = Made("memory://").flask(strategy="sliding-window-counter")

    @app.get("/failed")
    @limiter.limit("3/hour", deduct_when=lambda response: response.status_code == 401)
    def failed() -> tuple[str, int]:
        return "no", 401

    def ask() -> list[int]:
        return [app.test_client().get("/failed").status_code for _ in range(5)]

    assert ask() == [401, 401, 401, 429, 429]
    now += 3600 + 600  # two and a half of the three are in view
    assert ask() == [429] * 5
    now += 600  # two of them
    assert ask() == [401, 429, 429, 429, 429]


def test_command_line(made: Made) -> None:
    """`flask limiter config` and `limits` show the storage, and `clear` forgets a key."""
    app, _ = made.flask()
    client, runner = app.test_client(), app.test_cli_runner()
    assert client.get("/?cost=20").status_code == 200
    assert "HeadgateStorage" in runner.invoke(flask_limiter.commands.cli, ["config"]).output
    assert "20 per 1 hour" in runner.invoke(flask_limiter.commands.cli, ["limits"]).output
    assert client.get("/").status_code == 429
    assert runner.invoke(flask_limiter.commands.cli, ["clear", "--key=-", "-y"]).exit_code == 0
    assert client.get("/").status_code == 200


@pytest.mark.parametrize("strategy", ["fixed-window", "token-bucket"])
def test_fallback_of_flask_limiter(strategy: str, mortal_server: Server) -> None:
    """When Redis is gone its fallback in memory limits; when Redis is back, Redis does, with what it knew."""
    made = Made(mortal_server.url)
    app, limiter = made.flask(strategy=strategy, in_memory_fallback=["3/hour"])
    client = app.test_client()
    assert client.get("/").status_code == 200
    mortal_server.kill()
    assert [client.get("/").status_code for _ in range(4)] == [200, 200, 200, 429]
    mortal_server.restart()
    until(limiter.storage.check)
    until(lambda: client.get("/").status_code == 200)
    assert client.get("/").headers["X-RateLimit-Limit"] == "20"
    limiter._storage.storage.close()  # type: ignore[union-attr]  # a storage of headgate


@pytest.mark.parametrize("swallow", [True, False])
def test_outage_without_fallback(swallow: bool, mortal_server: Server) -> None:
    """`swallow_errors` lets requests pass; without it the error is the application's."""
    made = Made(mortal_server.url)
    app, _ = made.flask(swallow_errors=swallow)
    mortal_server.kill()
    assert app.test_client().get("/").status_code == (200 if swallow else 500)
