"""Hybrid rules: decided from leases on Redis, never one too many, and given back when a rule or the service goes."""

import itertools
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from headgate.service.files import Sources
from headgate.service.settings import BadFile
from tests.service.conftest import Start
from tests.service.test_redis import Load
from tests.support.servers import Server
from tests.support.service import API, Service, eventually, headgate

RULES = """
[rules.api]
quotas = "1000/second burst 20000"
hybrid = true
overrides = { vip = "1000/second burst 40000" }
exempt = ["monitor"]

[rules.loose]
quotas = "500/hour"
algorithm = "gcra"
hybrid = { accuracy = "Low" }

[rules.try-out]
quotas = "2/hour"
hybrid = true
shadow = true
"""
PERMITS = 'rate_limiter_hybrid_permits_total{{rule="api",algorithm="TOKEN_BUCKET",decided="{}"}}'
HELD = 'rate_limiter_hybrid_held{rule="api",algorithm="TOKEN_BUCKET"}'


def ledger(server: Server, key: str, rule: str, kind: str = "token_bucket") -> str:
    return f"rate_limiter:hybrid:{kind}:{{{key}}}:{rule}"


def nodes(server: Server, name: str) -> dict[str, int]:
    """The processes that the ledger *name* knows, and the permits on lease to each."""
    with server.client() as client:
        fields = client.hgetall(name)
    records = {field: value.split(":") for field, value in fields.items() if field.startswith("n:")}
    return {node: int(numbers[2]) for node, numbers in records.items()}


def leased(server: Server, name: str) -> int:
    return sum(nodes(server, name).values())


def check_many(service: Service, count: int, **query: Any) -> list[int]:
    """The statuses of *count* checks on one connection."""
    connection = service.connect()
    try:
        return [service.on(connection, "GET", f"{API}/check", query).status for _ in range(count)]
    finally:
        connection.close()


def test_two_instances_admit_the_limit(start: Start, redis_server: Server) -> None:
    """Two instances under overload admit no more than the limit, and most of it."""
    rules = "[rules.shared]\nquotas = '600/hour'\nhybrid = true\n"
    began = time.monotonic()
    one, other = (start("--store", redis_server.patient_url, config=rules) for _ in range(2))
    load = Load(one, other, query="rule=shared&key=k")
    load.until(lambda: len(load.answers) >= 1800, "three times the limit")
    answers = load.stop()
    refilled = (time.monotonic() - began) / 6
    admitted = sum(answer.status == 200 for answer in answers)
    assert 400 <= admitted <= 600 + refilled
    assert {answer.status for answer in answers} == {200, 429}
    assert not any("degraded" in answer.json for answer in answers)


def test_checks_are_decided_here(start: Start, redis_server: Server) -> None:
    """A hot key needs few round trips, and the metrics of all workers say so."""
    service = start("--store", redis_server.patient_url, "--workers", "2", config=RULES)
    eventually(lambda: service.metrics()["rate_limiter_workers"] == 2, "both workers")
    assert set(check_many(service, 400, rule="api", key="k")) == {200}

    def counted(*places: str) -> float:
        found = service.metrics()
        return sum(found[PERMITS.format(place)] for place in places)

    eventually(lambda: counted("local", "redis") >= 400, "the checks in the metrics")
    assert counted("local") > 4 * counted("redis")
    found = service.metrics()
    assert found[HELD] >= 0
    assert found["rate_limiter_hybrid_up"] == 1
    assert found["rate_limiter_hybrid_trips_total"] >= 1
    assert found["rate_limiter_hybrid_failed_trips_total"] == 0
    for name in ("reports_total", "burned_total", "keys", "unreported"):
        assert f'rate_limiter_hybrid_{name}{{rule="api",algorithm="TOKEN_BUCKET"}}' in found
    rule = 'rate_limiter_rule_requests_total{rule="api",algorithm="TOKEN_BUCKET",allowed="true"}'
    assert found[rule] == 400


def test_everything_else_a_rule_can_do(start: Start, redis_server: Server) -> None:
    """Overrides, exemptions, shadow, batches, waits, remaining, reset and other algorithms work as for other rules."""
    service = start("--store", redis_server.patient_url, config=RULES)
    info = {one["rule"]: one for one in service.get("/actuator/info").json["rules"]}
    assert info["api"]["hybrid"] == "high" and info["loose"]["hybrid"] == "low" and "hybrid" not in info["default"]
    assert service.check("vip", rule="api").json["limit"] == 40_000
    assert service.check("monitor", rule="api").json["exempt"] is True
    assert [service.check("k", rule="try-out").json.get("shadow") for _ in range(3)] == [None, None, True]
    batch = [{"key": f"b{i % 3}", "rule": "loose", "permits": 100} for i in range(18)]
    answers = service.ask("POST", f"{API}/check/batch", body=batch).json
    assert [answer["key"] for answer in answers] == [check["key"] for check in batch]
    assert [answer["allowed"] for answer in answers] == [True] * 15 + [False] * 3
    assert service.remaining("b0", rule="loose").json["remaining"] == 0
    assert service.reset("b0", rule="loose").json["remaining"] == 500
    assert service.check("b0", rule="loose", permits=500).status == 200
    waited = service.check("w", rule="api", permits=20_000, wait=20)
    assert waited.status == 200
    assert service.check("w", rule="api", permits=300, wait=20).status == 200  # the rate is 1000 a second
    assert service.check("k", rule="api", algorithm="SLIDING_WINDOW_COUNTER").status == 400  # a burst fits no window
    assert service.check("k", rule="loose", algorithm="SLIDING_WINDOW").status == 200  # no leases: asks Redis
    assert "rate_limiter:sliding_window:{k}:loose" in redis_server.names()
    assert service.check("k", rule="loose", permits=501).status == 400
    assert "Traceback" not in service.log()


def test_reload_and_stop_give_leases_back(start: Start, redis_server: Server) -> None:
    """A reload keeps the leases of a rule that stays the same and gives back others; a stop gives back all."""
    service = start("--store", redis_server.patient_url, config=RULES)
    ledgers = [ledger(redis_server, "k", "api"), ledger(redis_server, "k", "loose", "gcra")]
    for rule, name in zip(("api", "loose"), ledgers, strict=True):
        deadline = itertools.count()
        while not leased(redis_server, name) and next(deadline) < 200:
            check_many(service, 20, rule=rule, key="k")
    before = nodes(redis_server, ledgers[1])
    assert leased(redis_server, ledgers[0]) > 0 and leased(redis_server, ledgers[1]) > 0
    service.config.write_text(RULES.replace('"1000/second burst 20000"', '"900/second burst 20000"'))
    service.signal(signal.SIGHUP)
    # a lease that is not used any more would go back by itself after 20 s
    eventually(lambda: leased(redis_server, ledgers[0]) == 0, "the leases of the changed rule to go back", 12)
    assert service.check("k", rule="api").json["limit"] == 20_000
    check_many(service, 5, rule="loose", key="k")
    assert nodes(redis_server, ledgers[1]).keys() == before.keys()
    assert service.stop() == 0
    assert leased(redis_server, ledgers[0]) == leased(redis_server, ledgers[1]) == 0


def test_redis_goes_away(start: Start, mortal_server: Server) -> None:
    """Without Redis the policy of each rule answers, the metrics say so, and the log has one line for each rule."""
    rules = "".join(
        f"[rules.{policy}]\nquotas = '50/hour'\nhybrid = true\non_store_error = '{policy}'\n"
        for policy in ("allow", "deny", "raise")
    )
    service = start("--store", f"{mortal_server.bare_url}?timeout=1", config=rules)
    assert service.check("k", rule="allow").status == 200
    mortal_server.kill()
    statuses = {"allow": 200, "deny": 429, "raise": 503}
    for rule, status in statuses.items():
        for _ in range(3):
            answer = service.check("new", rule=rule)
            assert answer.status == status
            assert status == 503 or answer.json["degraded"] is True
    eventually(lambda: service.metrics()["rate_limiter_hybrid_up"] == 0, "the metrics to say so")
    lines = [line for line in service.log().splitlines() if "Error executing rate limit check for key: #" in line]
    assert [sum(f"rule: {rule}," in line for line in lines) for rule in statuses] == [1, 1, 1]
    mortal_server.restart()
    eventually(lambda: "degraded" not in service.check("new", rule="allow").json, "Redis to be used again")
    eventually(lambda: service.metrics()["rate_limiter_hybrid_up"] == 1, "the metrics to say so")


X = "[rules.x]\nquotas='5/s'\nhybrid="
WRONG = {
    f"{X}true\n": ":3: rules.x.hybrid: .* the store is memory://; .*redis://host",
    f"store='shared://a'\n{X}true\n": ":4: rules.x.hybrid: .* the store is shared://",
    f"{X}true\nalgorithm='leaky_bucket'\n": ":3: rules.x.hybrid: leases cannot serve leaky_bucket; use one of token",
    f"{X}true\nalgorithm='sliding_window'\n": "leases cannot serve sliding_window; use one of token_bucket",
    "[rules.x]\nquotas=['5/s', '9/h']\nhybrid=true\n": "rules.x.hybrid: a hybrid rule takes one quota, got 2",
    f"{X}true\noverrides={{a=['5/s','9/h']}}\n": "rules.x.overrides.a: a hybrid rule takes one quota",
    f"{X}{{accuracy='best'}}\n": "rules.x.hybrid.accuracy: .*use one of high, medium, low",
    f"{X}{{accuracy=0.1}}\n": "rules.x.hybrid.accuracy: .*or the seconds between two reports, from 0.5 to 300",
    f"{X}{{speed=1}}\n": "rules.x.hybrid.speed: there is no such setting; known are accuracy",
    f"{X}'medium'\n": 'rules.x.hybrid: .*write true, false or { accuracy = "medium" }',
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_settings(text: str, tmp_path: Path) -> None:
    """A hybrid rule that cannot work is refused with its path and what would be right."""
    file = tmp_path / "a.toml"
    file.write_text(text)
    with pytest.raises(BadFile, match=WRONG[text]):
        Sources(file, {}, {}).read()


def test_the_store_may_come_from_elsewhere(tmp_path: Path) -> None:
    """A file with a hybrid rule may leave the store to the environment; `config show` prints such a rule."""
    file = tmp_path / "a.toml"
    file.write_text("[rules.x]\nquotas='5/s'\nhybrid={accuracy='medium'}\n")
    environment = {"HEADGATE_STORE": "redis://127.0.0.1:1"}
    assert Sources(file, {}, environment).read().rules["x"].hybrid
    shown = headgate("config", "show", str(file), folder=tmp_path, environment=environment)
    assert shown.returncode == 0 and '"accuracy": "medium"' in shown.stdout


def test_reload_needs_the_same_store(start: Start) -> None:
    """A reload that makes a rule hybrid on a store without leases changes nothing and says why."""
    service = start(config="[rules.x]\nquotas='5/s'\n")
    service.config.write_text("store='redis://127.0.0.1:1'\n[rules.x]\nquotas='6/s'\nhybrid=true\n")
    service.signal(signal.SIGHUP)
    eventually(lambda: "restart it with a Redis" in service.log(), "the reason in the log")
    assert service.check("k", rule="x").json["limit"] == 5
