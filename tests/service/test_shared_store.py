"""The service on a shared store: one that was named, and the one that several workers get by themselves."""

import shutil
import sys
import threading
from pathlib import Path

import pytest

from headgate.stores.shared import files
from tests.service.conftest import Start
from tests.support.service import API, Service, eventually, headgate

LOGIN = "[rules.login]\nquotas = '10/day'\n"


def admitted(service: Service, calls: int, rule: str) -> int:
    """How many of so many checks are allowed, each on a connection of its own, from four threads."""
    allowed: list[bool] = []

    def send() -> None:
        for _ in range(calls // 4):
            allowed.append(service.check("k", rule=rule).json["allowed"])

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(allowed)


@pytest.mark.skipif(sys.platform != "linux", reason="looks for workers in /proc")
def test_workers_share_a_store_of_their_own(start: Start) -> None:
    """Without a store, four workers admit the limit once, not four times; the store is gone after the service."""
    service = start("--workers", "4", config=LOGIN)
    eventually(lambda: service.metrics()["rate_limiter_workers"] == 4, "all workers")
    assert admitted(service, 80, "login") == 10
    assert service.get("/actuator/info").json["store"] == "shared"
    answer = service.get("/actuator/health")
    assert answer.json["components"]["store"]["kind"] == "shared" and answer.status == 200
    assert "shared by the workers" in service.log() and "times as high" not in service.log()
    batch = [{"key": "k", "rule": "login"}, {"key": "other", "rule": "login"}]
    answers = service.ask("POST", f"{API}/check/batch", body=batch).json
    assert [one["allowed"] for one in answers] == [False, True]
    maps = Path(f"/proc/{service.workers()[0]}/maps").read_text()
    mapped = next(Path(line.split()[-1]) for line in maps.splitlines() if "/store/" in line)
    assert mapped.exists()
    service.stop()
    assert not mapped.parent.parent.exists()


@pytest.fixture
def url() -> str:
    return "shared://service-test"


def test_a_named_store_outlives_the_service(start: Start, url: str) -> None:
    """Two services on one machine share their limits, and a third one finds what they have left."""
    try:
        one, two = (start("--store", url, config=LOGIN) for _ in range(2))
        assert one.check("k", rule="login", permits=6).json["remaining"] == 4
        assert two.check("k", rule="login", permits=4).json["remaining"] == 0
        assert not one.check("k", rule="login").json["allowed"]
        one.stop()
        two.stop()
        three = start("--store", url, "--workers", "2", config=LOGIN)
        assert not three.check("k", rule="login").json["allowed"]
        assert three.reset("k", rule="login").status == 200
        assert three.check("k", rule="login").json["allowed"]
    finally:
        shutil.rmtree(files.home() / "service-test", ignore_errors=True)


@pytest.mark.server
def test_a_store_that_cannot_be_used(tmp_path: Path) -> None:
    """The service does not start, and says why."""
    tmp_path.chmod(0o777)
    done = headgate("serve", "--port", "0", "--store", f"shared://{tmp_path}", folder=tmp_path)
    assert done.returncode == 5
    assert "set its mode to 700" in done.stderr
