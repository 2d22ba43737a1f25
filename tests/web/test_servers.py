"""The examples for web frameworks under the servers that people run them with, asked over HTTP."""

from pathlib import Path

import httpx
import pytest

from tests.support.web_servers import START, served

EXAMPLES = Path(__file__).parent.parent.parent / "examples"

# the application, how it is imported, the server's command
SERVED = {
    "FastAPI on uvicorn": ("from web_fastapi import app", "uvicorn", "shop:app"),
    "Flask on gunicorn": ("from web_flask import app", "gunicorn", "--threads=8", "shop:app"),
    "Django on daphne": (
        "import web_django; from django.core.asgi import get_asgi_application; app = get_asgi_application()",
        "daphne",
        "shop:app",
    ),
    "Litestar on granian": ("from web_litestar import app", "granian", "--interface=asgi", "shop:app"),
    "aiohttp": ("from web_aiohttp import application", "aiohttp.web", "shop:application"),
}  # hypercorn serves Quart and Django in tests of theirs


@pytest.mark.server
@pytest.mark.parametrize("name", SERVED)
def test_example(name: str, tmp_path: Path) -> None:
    """Some searches, and then a 429; headers on every answer, once; what is not found has the default."""
    imports, *command = SERVED[name]
    source = f"import sys\nsys.path.insert(0, {str(EXAMPLES)!r})\n{imports}\n"
    with served(tmp_path, source, *command) as url, httpx.Client(base_url=url, timeout=START) as client:
        search = "/search/" if "Django" in name else "/search"
        answers = [client.get(search, params={"words": "a b"})]
        while answers[-1].status_code == 200 and len(answers) < 10:
            answers.append(client.get(search, params={"words": "a b"}))
        *admitted, denied = answers
        assert denied.status_code == 429 and 2 <= len(admitted) <= 7  # a slow machine sees some come back
        assert denied.headers["content-type"] == "application/problem+json"
        assert denied.headers["cache-control"] == "no-store" and int(denied.headers["retry-after"]) >= 1
        assert denied.json()["status"] == 429
        nothing = client.get("/nothing/")
        assert nothing.status_code == 404 and nothing.headers["x-ratelimit-limit"] == "100"
        for answer in (*answers, nothing):
            assert len(answer.headers.get_list("x-ratelimit-remaining")) == 1
        assert client.head(search, params={"words": "a b"}).content == b""
