"""Health, info, description, logs."""

import json
import re
import time

import pytest

from headgate.algorithms import ALGORITHMS
from tests.service.conftest import Start
from tests.support.servers import Server
from tests.support.service import API, Service, eventually


def test_all_is_well_on_memory(service: Service) -> None:
    answer = service.get("/actuator/health")
    assert answer.status == 200 and answer.json["status"] == "UP"
    assert answer.json["components"]["store"]["kind"] == "memory"
    for path in ("liveness", "readiness"):
        answer = service.get(f"/actuator/health/{path}")
        assert answer.status == 200 and answer.json == {"status": "UP"}


def test_info(service: Service) -> None:
    found = service.get("/actuator/info").json
    assert found["name"] == "headgate" and found["version"] and found["store"] == "memory" and found["workers"] == 1
    assert found["rules"] == [{"rule": "default", "algorithm": "TOKEN_BUCKET", "quotas": ["10/second burst 100"]}]


def test_the_store_is_redis(start: Start, redis_server: Server) -> None:
    service = start("--store", redis_server.patient_url)
    answer = service.get("/actuator/health")
    assert answer.status == 200 and answer.json["components"]["store"]["role"] == "master"
    assert service.get("/actuator/info").json["store"] == "redis"
    assert service.check("user:{1}").status == 200
    assert redis_server.names() == ["rate_limiter:token_bucket:{user:%7B1%7D}"]


def test_redis_was_never_there(start: Start) -> None:
    service = start("--store", "redis://127.0.0.1:1/0", config="[rules.strict]\nquotas='1/s'\non_store_error='raise'\n")
    assert service.check("k").json["degraded"] is True
    answer = service.get("/actuator/health")
    assert answer.status == 503 and answer.json["status"] == "DOWN"
    assert service.get("/actuator/health/liveness").status == 200
    assert service.get("/actuator/health/readiness").status == 200  # it answers, by policy
    answer = service.check("k", rule="strict")
    assert answer.status == 503 and answer.headers["retry-after"] == "1" and "strict" in answer.problem
    assert "Error executing rate limit check for key: #" in service.log()
    assert service.metrics()["rate_limiter_redis_up"] == 0
    assert service.reset("k", rule="strict").status == 503


def test_no_password_is_shown(start: Start) -> None:
    service = start("--store", "redis://me:hunter2@127.0.0.1:1/0?sentinel_password=hunter2&password=hunter2")
    for _ in range(4):
        service.check("k")
    for path in ("/metrics", "/actuator/health", "/actuator/info", "/openapi.json"):
        assert b"hunter2" not in service.get(path).body
    assert "hunter2" not in service.log() and "redis://***@127.0.0.1:1/0" in service.log()


def test_ready_when_deny(start: Start) -> None:
    """With `deny` as the default, the service is not ready while the store is down."""
    service = start("--store", "redis://127.0.0.1:1/0", config="[rules.default]\non_store_error='deny'\n")
    for _ in range(5):
        answer = service.check("k")
        assert answer.status == 429 and answer.json["degraded"] is True
    assert service.get("/actuator/health/readiness").status == 503


@pytest.mark.parametrize("policy", ["deny", "raise"])
def test_ready_fresh(start: Start, mortal_server: Server, policy: str) -> None:
    """A fresh instance whose default is to refuse asks the store before it says that it is ready."""
    config = f"[rules.default]\non_store_error='{policy}'\n"
    service = start("--store", mortal_server.patient_url, config=config)
    eventually(lambda: service.get("/actuator/health/readiness").json == {"status": "UP"}, "to be ready")
    mortal_server.kill()  # no check is made by which the service could notice it
    eventually(lambda: service.get("/actuator/health/readiness").status == 503, "not to be ready")
    assert service.get("/actuator/health/readiness").json == {"status": "OUT_OF_SERVICE"}
    assert service.get("/actuator/health/liveness").status == 200
    fresh = start("--store", mortal_server.patient_url, config=config)
    assert fresh.get("/actuator/health/readiness").status == 503
    mortal_server.restart()
    eventually(lambda: service.get("/actuator/health/readiness").status == 200, "to be ready again")


def test_docs_and_description(service: Service) -> None:
    page = service.get("/docs")
    assert page.status == 200 and page.headers["content-type"].startswith("text/html")
    assert f"{API}/check".encode() in page.body and b"<script" not in page.body
    description = service.get("/openapi.json").json
    assert description["openapi"] == "3.1.0"
    for path, methods in description["paths"].items():
        for method in methods if "{" not in path else ():  # a path with a rule in it answers every method
            allowed = service.ask("OPTIONS", path).headers["allow"]
            assert method.upper() in allowed, f"{method} {path} is described, but there is only {allowed}"
    answer = service.check("described").json
    assert set(description["components"]["schemas"]["Answer"]["required"]) == set(answer)


def test_the_page(service: Service) -> None:
    answer = service.get("/")
    assert answer.status == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    again = service.get("/", headers={"if-none-match": answer.headers["etag"]})
    assert again.status == 304 and again.body == b""
    script = service.get("/page/main.js")
    assert script.status == 200 and script.headers["content-type"].startswith("text/javascript")


def test_algorithms_of_the_page(service: Service) -> None:
    """The playground offers every algorithm."""
    script = service.get("/page/algorithms.js").body.decode()
    assert sorted(re.findall(r'^  \["([A-Z_]+)"', script, re.MULTILINE)) == sorted(map(str.upper, ALGORITHMS))


def test_debug_log(start: Start) -> None:
    """The debug log has every decision, with a digest in place of the key."""
    service = start("--log-level", "debug", "--log-format", "json")
    service.check("somebody@example.com", permits=100)
    service.check("somebody@example.com", permits=100)
    service.check("")
    lines = [json.loads(line) for line in service.log().splitlines() if line.startswith("{")]
    messages = [line["message"] for line in lines]
    allowed = next(message for message in messages if message.startswith("Request allowed for key: #"))
    assert allowed.endswith(", remaining: 0")
    assert any(message.startswith("Request denied for key: #") for message in messages)
    problem = next(line for line in lines if line["message"].startswith("400: key is empty"))
    assert len(problem["requestId"]) == 16
    assert "somebody" not in service.log()


def test_keys_in_logs_on_request(start: Start) -> None:
    service = start(environment={"HEADGATE_LOG_KEYS": "1"})
    service.reset("some body\u2028")
    assert "'some body\\u2028'" in service.log()


def test_ietf_headers_on_request(start: Start) -> None:
    service = start(
        config="ietf_headers = true\n[rules.two]\nquotas = ['10/minute', '100/1500ms']\n"
        "[rules.slow]\nquotas = ['9/second', '1000/day']\n"
    )
    answer = service.check("k", permits=40)
    assert answer.headers["ratelimit-policy"] == '"default";q=10;w=1'
    assert answer.headers["ratelimit"] == '"default";r=60;t=4'
    two = service.check("k", rule="two")
    assert two.headers["ratelimit-policy"] == '"two.1";q=10;w=60, "two.2";q=100;w=2'
    assert two.headers["ratelimit"].startswith('"two.1";r=9;'), "the quota that binds, by the name of its policy"
    slow = service.check("k", rule="slow", permits=9)
    assert slow.json["resetAfterSeconds"] == 778
    assert slow.headers["ratelimit"] == '"slow.1";r=0;t=1', "and its own reset, not the slowest quota's"
    assert int(slow.headers["x-ratelimit-reset"]) <= time.time() + 2


def test_they_are_off_by_default(service: Service, key: str) -> None:
    assert service.check(key).headers["ratelimit"] is None
