"""The dashboard and the alerts for applications ask for metrics that there are."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # it ships no types

from headgate.telemetry.families import FAMILIES, prometheus_name
from tests.service.deploy import tools

pytestmark = pytest.mark.once

RULES = tools.HOUSE / "deploy" / "prometheus" / "library.yml"
DASHBOARD = tools.HOUSE / "deploy" / "grafana" / "dashboards" / "library.json"
CASES = Path(__file__).with_name("alerts_test.yml")
PROMTOOL = tools.PROGRAMS["promtool"].find()
NAMES = {prometheus_name(name) for name in FAMILIES}

with_promtool = pytest.mark.skipif(PROMTOOL is None, reason=tools.missing_reason("promtool"))


def alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def metrics(text: str) -> set[str]:
    return set(re.findall(r"\bheadgate_\w+", text))


def test_metrics_exist() -> None:
    """Every query names metrics that exist, and every metric has a panel or an alert."""
    shown = metrics("\n".join(target["expr"] for panel in panels() for target in panel.get("targets", [])))
    asked = metrics("\n".join(rule["expr"] for rule in alerts()))
    variables = metrics(json.dumps(json.loads(DASHBOARD.read_text())["templating"]))
    assert (shown | asked | variables) - NAMES == set()
    times = {
        name for name in NAMES if re.search(r"_(pool|queue|budget)_wait_time_", name)
    }  # by their panels of results
    assert NAMES - shown - asked - times - {"headgate_queue_acquires_total"} == set()


def test_every_alert_is_tried() -> None:
    tried = [row for case in yaml.safe_load(CASES.read_text())["tests"] for row in case["alert_rule_test"]]
    for rule in alerts():
        rows = [row for row in tried if row["alertname"] == rule["alert"]]
        assert [bool(row.get("exp_alerts")) for row in rows] == [False, True], rule["alert"]


@with_promtool
@pytest.mark.server
def test_alerts(tmp_path: Path) -> None:
    """Each alert fires in its scenario and in no other; promtool takes every query of the dashboard too."""
    queries = [target["expr"] for panel in panels() for target in panel.get("targets", [])]
    for name, value in {"$__rate_interval": "1m", "$job": ".*", "$limiter": ".*"}.items():
        queries = [query.replace(name, value) for query in queries]
    recorded = [{"record": f"panel:{number}", "expr": query} for number, query in enumerate(queries)]
    as_rules = tmp_path / "panels.yml"
    as_rules.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": recorded}]}))
    for words in (["check", "rules", str(as_rules), str(RULES)], ["test", "rules", str(CASES)]):
        command = [str(PROMTOOL), *words]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=50, env=tools.environment(), check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr
