"""Metrics as an operator uses them: a real Prometheus scrapes a real service, and every query that we ship is asked."""

import json
import re
import subprocess
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml  # type: ignore[import-untyped]  # it ships no types

from headgate.service import shared_counters
from tests.service.deploy import tools
from tests.service.deploy.processes import ask, running
from tests.support.servers import KINDS, Server, free_port
from tests.support.service import Service

DEPLOY = tools.HOUSE / "deploy"
RULES = [DEPLOY / "prometheus" / name for name in ("recording.yml", "alerts.yml")]
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "headgate.json"
PROMETHEUS = tools.PROGRAMS["prometheus"].find()
PROMTOOL = tools.PROGRAMS["promtool"].find()
Test = TypeVar("Test", bound=Callable[..., None])
SEEN = 30.0  # seconds for a scrape to be seen, on a busy machine

# The sample queries of the specification, as written there (section 7.3).
SPECIFIED = [
    'sum(rate(rate_limiter_requests_total{allowed="false"}[1m])) by (algorithm)',
    "histogram_quantile(0.99, rate(rate_limiter_check_seconds_bucket[5m]))",
    "sum(rate(rate_limiter_requests_total[5m])) by (algorithm)",
]
CONFIG = """
[rules.login]
quotas = "3/hour"
algorithm = "sliding_window"
[rules.export]
quotas = "2/hour"
shadow = true
[rules.hot]
quotas = "1000/hour"
hybrid = true
"""
# Only of a memory store, which the service under test does not use; and what is shown only when it is not zero.
MEMORY_ONLY = {"rate_limiter_keys", "rate_limiter_keys_limit"}
MAY_BE_EMPTY = {"Checks without an answer from the store", "Redis memory", "Busiest key, by rule"}

pytestmark = pytest.mark.xdist_group("prometheus")  # they share one


def needs(name: str, program: Path | None) -> Callable[[Test], Test]:
    """Mark a test that runs *program*."""
    absent = pytest.mark.skipif(program is None, reason=tools.missing_reason(name))
    return lambda test: pytest.mark.server(absent(test))


with_prometheus, with_promtool = needs("prometheus", PROMETHEUS), needs("promtool", PROMTOOL)


def promtool(*words: str, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(PROMTOOL), *words],
        input=given,
        capture_output=True,
        text=True,
        timeout=50,
        env=tools.environment(),
        check=False,
    )


@with_promtool
def test_rules_are_well_formed() -> None:
    ran = promtool("check", "rules", *map(str, RULES))
    assert ran.returncode == 0, ran.stdout + ran.stderr


@with_promtool
def test_compose_configuration() -> None:
    """promtool accepts the configuration that compose uses."""
    ran = promtool("check", "config", str(DEPLOY / "prometheus" / "prometheus.yml"))
    assert ran.returncode == 0, ran.stdout + ran.stderr


@with_promtool
def test_alerts() -> None:
    """Each alert fires in its scenario and in no other."""
    cases = Path(__file__).with_name("alerts_test.yml")
    ran = promtool("test", "rules", str(cases))
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_every_alert_is_tried() -> None:
    cases = yaml.safe_load(Path(__file__).with_name("alerts_test.yml").read_text())
    tried = [row for case in cases["tests"] for row in case["alert_rule_test"]]
    for rule in alerts():
        rows = [row for row in tried if row["alertname"] == rule["alert"]]
        assert any(row.get("exp_alerts") for row in rows), f"nothing sets off {rule['alert']}"
        assert len(rows) > sum(bool(row.get("exp_alerts")) for row in rows), f"{rule['alert']} is never seen quiet"


@with_promtool
def test_metrics_are_well_formed(service: Service, key: str) -> None:
    service.check(key)
    ran = promtool("check", "metrics", given=service.get("/actuator/prometheus").body.decode())
    assert ran.returncode == 0, ran.stdout + ran.stderr


class Prometheus:
    """A running one, that scrapes one service twice a second."""

    def __init__(self, url: str, service: Service) -> None:
        self.url, self.service = url, service

    def query(self, text: str) -> list[dict[str, Any]]:
        answer = ask(f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': text})}")
        parsed = json.loads(answer.body)
        assert parsed["status"] == "success", f"{text}\n{parsed}"
        found: list[dict[str, Any]] = parsed["data"]["result"]
        return found

    def until(self, text: str) -> list[dict[str, Any]]:
        """Ask until there is an answer that is not empty."""
        deadline = time.monotonic() + SEEN
        while not (found := self.query(text)):
            assert time.monotonic() < deadline, f"no data within {SEEN:g} s: {text}"
            time.sleep(0.2)
        return found


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A service on Redis that has allowed, denied and shadowed, seen before and after by Prometheus."""
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    redis = Server(KINDS[0])
    service = Service("--store", redis.patient_url, config=CONFIG)
    for path in RULES:
        (folder / path.name).write_text(path.read_text().replace("interval: 15s", "interval: 500ms"))
    scrape = {
        "job_name": "headgate",
        "metrics_path": "/actuator/prometheus",
        "static_configs": [{"targets": [f"127.0.0.1:{service.port}"]}],
    }
    config = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"},
        "rule_files": [path.name for path in RULES],
        "scrape_configs": [scrape],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    options = {
        "config.file": folder / "prometheus.yml",
        "storage.tsdb.path": folder / "data",
        "web.listen-address": f"127.0.0.1:{port}",
    }
    command = [str(PROMETHEUS), *(f"--{name}={value}" for name, value in options.items())]
    url = f"http://127.0.0.1:{port}"
    with running(command, f"{url}/-/ready", folder):
        started = Prometheus(url, service)
        started.until('rate_limiter_requests_total{allowed="true"}')  # all zeros, before the traffic
        rules = ({"rule": "login"}, {"rule": "export"}, {"rule": "hot"})
        for query in (*rules, {"algorithm": "GCRA"}, {"algorithm": "FIXED_WINDOW"}):
            for _ in range(5):
                service.check("somebody", None, **query)
        service.get("/nowhere")
        started.until("sum(rate(rate_limiter_requests_total[1m])) > 0")
        started.until("sum(rate(rate_limiter_problems_total[1m])) > 0")
        yield started
    service.forget()
    redis.stop()


@with_prometheus
def test_specified_queries(prometheus: Prometheus) -> None:
    """The specification's queries have results."""
    denied, p99, asked = (prometheus.until(query) for query in SPECIFIED)
    rates = {row["metric"]["algorithm"]: float(row["value"][1]) for row in denied}
    assert len(rates) == len(shared_counters.KINDS), "every known series is there from the start"
    assert rates["SLIDING_WINDOW"] > 0 and rates["GCRA"] == 0
    seconds = {(row["metric"]["algorithm"], row["metric"]["allowed"]): float(row["value"][1]) for row in p99}
    assert 0 < seconds["GCRA", "true"] < 60
    assert {row["metric"]["algorithm"] for row in asked if float(row["value"][1]) > 0} >= {"GCRA", "SLIDING_WINDOW"}


@with_prometheus
def test_counts(prometheus: Prometheus) -> None:
    """Prometheus has the counts of the traffic that was sent."""

    def total(labels: str) -> float:
        return float(prometheus.until(f"sum(rate_limiter_rule_requests_total{{{labels}}})")[0]["value"][1])

    assert total('rule="login",allowed="true"') == 3
    assert total('rule="login",allowed="false"') == 2
    assert total('rule="export",allowed="true"') == 5, "a shadow rule allows everything"
    assert float(prometheus.until('sum(rate_limiter_shadow_denied_total{rule="export"})')[0]["value"][1]) == 3


@with_prometheus
def test_dashboard(prometheus: Prometheus) -> None:
    """Every panel of the dashboard has data."""
    for title, query in panels():
        if any(re.search(rf"\b{name}\b", query) for name in MEMORY_ONLY):
            prometheus.query(query)  # it parses
        elif title in MAY_BE_EMPTY:
            prometheus.query(query)
        else:
            prometheus.until(query)


@with_prometheus
def test_no_false_alert(prometheus: Prometheus) -> None:
    """Prometheus evaluates every rule, and no alert fires in normal operation."""
    prometheus.until("job:rate_limiter_check_seconds:p99_5m")
    groups = json.loads(ask(f"{prometheus.url}/api/v1/rules").body)["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == len(alerts()) + len(recorded())
    assert {rule["name"]: rule["lastError"] for rule in rules if rule.get("lastError")} == {}
    assert [rule["name"] for rule in rules if rule.get("state") == "firing"] == []


@with_prometheus
def test_metrics_exist(prometheus: Prometheus) -> None:
    """Every metric that a rule or a panel names exists."""
    text = prometheus.service.get("/metrics").body.decode()
    known = set(re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE)) | MEMORY_ONLY
    asked = "\n".join([query for _, query in panels()] + [rule["expr"] for rule in alerts() + recorded()])
    names = set(re.findall(r"(?<![:\w])rate_limiter_\w+", asked))
    assert {re.sub(r"_(bucket|count|sum)$", "", name) for name in names} - known == set()


def panels() -> list[tuple[str, str]]:
    """Title and query of everything that the dashboard asks, with its variables filled in."""
    dashboard = json.loads(DASHBOARD.read_text())
    asked = [(panel["title"], target["expr"]) for panel in dashboard["panels"] for target in panel.get("targets", [])]
    asked += [(note["name"], note["expr"]) for note in dashboard["annotations"]["list"] if note["name"] != "Restarts"]
    filled = {"$__rate_interval": "1m", "$job": ".*", "$rule": ".*"}
    for name, value in filled.items():
        asked = [(title, query.replace(name, value)) for title, query in asked]
    assert not [query for _, query in asked if "$" in query], "a variable that this test does not know"
    return asked


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in _rules() if "alert" in rule]


def recorded() -> list[dict[str, Any]]:
    return [rule for rule in _rules() if "record" in rule]


def _rules() -> list[dict[str, Any]]:
    groups = [group for path in RULES for group in yaml.safe_load(path.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"]]
