"""The Helm chart, rendered by Helm's own library: its manifests are valid, and values that are wrong are refused."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # it ships no types

from tests.service.deploy.test_manifests import check_rights, validate
from tests.service.deploy.tools import HOUSE

pytestmark = pytest.mark.server  # the library of Helm is not among the tools of the fast lane

CHART = HOUSE / "deploy" / "helm" / "headgate"
SECRET = {"redis": {"password": "secret"}}
DOORS = {"grpc": {"enabled": True}, "resp": {"enabled": True}}
VALUES: dict[str, dict[str, Any]] = {
    "plain": SECRET,
    "own store": {"store": {"url": "redis+sentinel://:p@a:26379,b:26379/headgate/0"}, "tokens": {"check": "c"}},
    "own secrets": {"store": {"existingSecret": "mine"}, "tokens": {"existingSecret": "mine"}, **DOORS},
    "fixed": {
        **SECRET,
        "autoscaling": {"enabled": False},
        "replicas": 3,
        "settings": {"rules": {"a": {"quotas": "1/s"}}},
    },
}
# values that are wrong, and what the refusal has to name
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "redis.password"),
    ({"redis": {"enabled": False}}, "no store"),
    ({**SECRET, "replica": 3}, "replica"),
    ({**SECRET, "replicas": 0}, "replicas"),
    ({"redis": {"password": "a:b@c"}}, "password"),
    ({**SECRET, "settings": {"store": "memory://"}}, "settings"),
    ({"store": {"url": "memory://"}}, "url"),
]


@pytest.fixture(scope="module")
def helm() -> dict[str, Any]:
    """What Helm makes of all values, in one run."""
    if importlib.util.find_spec("helm_python") is None:
        pytest.skip("no library of Helm on this machine; `pip install helm-python-sdk` where there is a wheel for it")
    wanted = [*VALUES.values(), *(values for values, _ in REFUSED)]
    ran = subprocess.run(
        [sys.executable, "-m", "tests.service.deploy.charts", str(CHART)],
        input=json.dumps(wanted),
        capture_output=True,
        text=True,
        cwd=HOUSE,
        timeout=100,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def manifests(helm: dict[str, Any], name: str) -> list[dict[str, Any]]:
    rendered = helm["rendered"][list(VALUES).index(name)]
    assert isinstance(rendered, dict), rendered
    texts = [text for path, text in rendered.items() if path.endswith(".yaml")]
    return [one for text in texts for one in yaml.safe_load_all(text) if one]


def only(found: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (one,) = [manifest for manifest in found if manifest["kind"] == kind]
    return one


@pytest.mark.parametrize("name", VALUES)
def test_chart_schemas(helm: dict[str, Any], name: str) -> None:
    """Every manifest is valid by the schemas of Kubernetes, and every pod has no rights that it does not need."""
    validator = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for manifest in manifests(helm, name):
        validator.validate(manifest, "1.29", strict=True)
        if "template" in manifest.get("spec", {}):
            check_rights(manifest["spec"]["template"]["spec"])


@pytest.mark.parametrize("name", ["plain", "fixed"])
def test_chart_settings(helm: dict[str, Any], name: str, tmp_path: Path) -> None:
    """The rules in the ConfigMap are valid settings of the service."""
    rules = next(
        one["data"]["headgate.yaml"] for one in manifests(helm, name) if "headgate.yaml" in one.get("data", {})
    )
    validate(rules, tmp_path, "headgate.yaml")


def test_chart_store(helm: dict[str, Any]) -> None:
    """Its own Redis has the password of the URL; with a store of the user's there is no Redis."""
    plain = manifests(helm, "plain")
    secret = only(plain, "Secret")["stringData"]
    assert secret["HEADGATE_STORE"] == "redis://:secret@try-headgate-redis:6379/0"
    assert secret["REDIS_PASSWORD"] == "secret"
    assert any(one["kind"] == "Service" and one["metadata"]["name"] == "try-headgate-redis" for one in plain)
    for name in ("own store", "own secrets"):
        assert not [one for one in manifests(helm, name) if one["kind"] == "StatefulSet"]
    assert only(manifests(helm, "own store"), "Secret")["stringData"]["HEADGATE_CHECK_TOKEN"] == "c"


def test_chart_doors(helm: dict[str, Any]) -> None:
    """gRPC and the Redis protocol are served when they are asked for; the pod then waits for gRPC too."""
    found = manifests(helm, "own secrets")
    (container,) = only(found, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert {"--grpc-port=8081", "--resp-port=6380"} <= set(container["args"])
    assert container["startupProbe"]["grpc"] == {"port": 8081}
    assert [port["targetPort"] for port in only(found, "Service")["spec"]["ports"]] == ["http", "grpc", "resp"]
    (container,) = only(manifests(helm, "plain"), "Deployment")["spec"]["template"]["spec"]["containers"]
    assert [port["name"] for port in container["ports"]] == ["http"]


@pytest.mark.parametrize("i", range(len(REFUSED)), ids=[named for _, named in REFUSED])
def test_chart_refuses(helm: dict[str, Any], i: int) -> None:
    """Values that are wrong are refused with a reason that names them."""
    said = helm["rendered"][len(VALUES) + i]
    assert isinstance(said, str) and REFUSED[i][1] in said


def test_chart_lint(helm: dict[str, Any]) -> None:
    """`helm lint --strict` has nothing to say but that there is no icon."""
    assert helm["lint"]["errors"] == []
    assert [one for one in helm["lint"]["messages"] if one["severity"] > 1] == []
