"""Django under real servers, with real connections: processes with threads, and processes with event loops."""

import http.client
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.servers import Server
from tests.support.service import Answer
from tests.support.web_servers import START, served

ROOT = Path(__file__).parent.parent.parent
SHOP = """
import os, sys
os.environ["HEADGATE_TEST_STORE"] = {store!r}
sys.path.insert(0, {root!r})
from tests.web.django_site.servers import application, asgi
"""
SERVERS = {
    "gunicorn": ["gunicorn", "--workers=2", "--threads=8", "shop:application"],
    "hypercorn": ["hypercorn", "--workers=2", "shop:asgi"],
}


def get(url: str, path: str, headers: dict[str, str] | None = None) -> Answer:
    """The answer to a request on a connection of its own."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=START)
    try:
        connection.request("GET", path, headers=headers or {})
        return Answer(connection.getresponse())
    finally:
        connection.close()


@pytest.mark.parametrize("server", SERVERS)
def test_servers(server: str, redis_server: Server, tmp_path: Path) -> None:
    """60 requests at once against 20 an hour: exactly 20, whatever they claim; every answer has its headers once."""
    source = SHOP.format(store=redis_server.patient_url, root=str(ROOT))
    claims = [{"X-Forwarded-For": f"1.2.3.{i}", "X_Forwarded_For": f"1.2.4.{i}"} for i in range(60)]
    with served(tmp_path, source, *SERVERS[server]) as url, ThreadPoolExecutor(60) as threads:
        for path in ("/contested/", "/async_contested/", "/api/contested/", "/ninja/contested"):
            answers = [threads.submit(get, url, path, claim) for claim in claims]
            assert sorted(answer.result().status for answer in answers) == [200] * 20 + [429] * 40, path
        for path in ("/stream/?type=text/csv", "/async_stream/?type=text/csv", "/failures/500/", "/nothing/", "/free/"):
            assert len(get(url, path).headers.get_all("x-ratelimit-remaining", [])) == 1, path
        assert get(url, "/stream/?type=text/csv").body == b"one\ntwo\n"
