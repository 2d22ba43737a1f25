"""Workers of one server share their limits through `shared://`, without another server."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.web_servers import START, served

FASTAPI = """
from fastapi import FastAPI
from headgate.web.fastapi import RateLimits

app = FastAPI()
limits = RateLimits(store={url!r})
limits.install(app)
"""

FLASK = """
from flask import Flask
from headgate.web.flask import RateLimits

app = Flask("shop")
limits = RateLimits(app, store={url!r})
"""

ROUTES = """
@app.get("/search")
@limits.limit("20/day", algorithm="fixed_window")
@limits.limit("200/day", scope="all", algorithm="fixed_window")
def search():
    return "found"

@app.get("/report")
@limits.limit("200/day", scope="all", algorithm="fixed_window", cost=60)
def report():
    return "written"
"""

SERVED = {
    "FastAPI on uvicorn": (FASTAPI, "uvicorn", "--workers=2", "shop:app"),
    "Flask on gunicorn": (FLASK, "gunicorn", "--workers=2", "--threads=8", "shop:app"),
}


@pytest.mark.server
@pytest.mark.parametrize("name", SERVED)
def test_exact_over_workers(name: str, tmp_path: Path) -> None:
    """20 of 60 at once; what was refused has spent nothing of the other limit; no worker warns that it counts alone."""
    app, *command = SERVED[name]
    source = app.format(url=f"shared://{tmp_path}/limits") + ROUTES
    barrier = threading.Barrier(60)

    def search(_: int) -> int:
        barrier.wait()
        return httpx.get(url + "/search", timeout=START).status_code

    with served(tmp_path, source, *command) as url:
        with ThreadPoolExecutor(60) as pool:
            assert sorted(pool.map(search, range(60))) == [200] * 20 + [429] * 40
        reports = [httpx.get(url + "/report", timeout=START).status_code for _ in range(4)]
    assert reports == [200] * 3 + [429]
    assert "every worker admits the whole limit" not in (tmp_path / "log").read_text()
