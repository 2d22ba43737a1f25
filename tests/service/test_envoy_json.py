"""`POST /json`: what it takes, what it answers, how it is counted, and how new rules come into force."""

import http.client
import json
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from headgate.service.envoy_json import parse_request, response_json
from headgate.service.rls_messages import OK, OVER_LIMIT, DescriptorStatus, RateLimitResponse
from headgate.service.rsgi import HTTPError
from tests.service.conftest import Start
from tests.support.servers import Server
from tests.support.service import Answer, Service, eventually, headgate

RULES = """
domain: shop
descriptors:
  - key: tenant
    rate_limit: {unit: hour, requests_per_unit: 20}
  - key: user
    rate_limit: {name: user, unit: hour, requests_per_unit: 2}
  - key: trial
    shadow_mode: true
    rate_limit: {unit: hour, requests_per_unit: 1}
  - key: free
    rate_limit: {unlimited: true}
"""
SETTINGS = '[envoy]\nfiles = ["*.yaml"]\n'


def call(*entries: tuple[str, str], **more: Any) -> dict[str, Any]:
    descriptors = [{"entries": [{"key": key, "value": value}]} for key, value in entries]
    return {"domain": "shop", "descriptors": descriptors, **more}


def send(service: Service, *entries: tuple[str, str], **more: Any) -> Answer:
    return service.ask("POST", "/json", body=call(*entries, **more))


@pytest.fixture(scope="module")
def shop() -> Iterator[Service]:
    """A service with these rules, in memory."""
    service = Service(config=SETTINGS, files={"shop.yaml": RULES})
    yield service
    service.forget()


def test_answers(shop: Service) -> None:
    """200 with the statuses while the call is within its limits, 429 with them when it is over one."""
    answer = send(shop, ("tenant", "acme"), ("user", "a"), ("free", ""), ("nosuch", ""))
    assert answer.status == 200 and answer.headers["content-type"] == "application/json"
    tenant, user, free, none = answer.json["statuses"]
    assert answer.json["overallCode"] == "OK"
    seconds = int(user.pop("durationUntilReset").removesuffix("s"))
    assert 1 <= seconds <= 3600
    limit = {"name": "user", "requestsPerUnit": 2, "unit": "HOUR"}
    assert user == {"code": "OK", "currentLimit": limit, "limitRemaining": 1}
    assert (free, none) == ({"code": "OK", "limitRemaining": 4294967295}, {"code": "OK"})
    assert tenant["limitRemaining"] == 19
    assert send(shop, ("user", "a")).status == 200
    over = send(shop, ("tenant", "acme"), ("user", "a"))
    assert over.status == 429 and over.json["overallCode"] == "OVER_LIMIT"
    assert [one["code"] for one in over.json["statuses"]] == ["OK", "OVER_LIMIT"]
    assert over.json["statuses"][0]["limitRemaining"] == 19, "all or nothing"
    assert "limitRemaining" not in over.json["statuses"][1]


def test_as_curl_sends_it(shop: Service) -> None:
    """The content type of a form, which curl sends, is no obstacle; a query is."""
    body = json.dumps(call(("user", "curl"))).encode()
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert shop.ask("POST", "/json", body=body, headers=form).status == 200
    assert shop.ask("POST", "/json", "key=a", body=body).status == 400
    assert shop.ask("GET", "/json").status == 405


def test_bad_calls(shop: Service) -> None:
    """What cannot be decided is a 400 that says what would be right."""
    assert "the domain is empty" in shop.ask("POST", "/json", body={"descriptors": [{}]}).problem
    assert "there are no descriptors" in shop.ask("POST", "/json", body={"domain": "shop"}).problem
    assert "the unit of a limit is one of" in send(shop, descriptors=[{"limit": {"requestsPerUnit": 1}}]).problem
    assert shop.ask("POST", "/json", body=b" " * 70_000).status == 413


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("", "cannot read the body"),
        ("[]", "the body is a JSON object"),
        ('{"domian": "d"}', "has no field 'domian'; known are domain, descriptors, hitsAddend"),
        ('{"domain": "d", "domain": "e"}', "given twice"),
        ('{"hitsAddend": 1, "hits_addend": 1}', "hits_addend in two spellings"),
        ('{"hitsAddend": -1}', "hits_addend is a whole number from 0 to 4294967295, got -1"),
        ('{"hitsAddend": 1.5}', "got 1.5"),
        ('{"hitsAddend": true}', "got True"),
        ('{"hitsAddend": NaN}', "NaN is no JSON"),
        ('{"domain": 5}', "domain is a text, got 5"),
        ('{"domain": "\\ud800"}', "lone surrogate"),
        ('{"descriptors": {}}', "descriptors is a list"),
        ('{"descriptors": [1]}', r"descriptors\[0\] is a JSON object"),
        ('{"descriptors": [{"entries": [{"value": 1}]}]}', r"descriptors\[0\]\.entries\[0\]\.value is a text"),
        ('{"descriptors": [{"limit": {"unit": "FORTNIGHT"}}]}', r"limit\.unit is one of .*SECOND"),
        ('{"descriptors": [' + "{}," * 128 + "{}]}", "129 items; at most 128"),
        ("[" * 30_000, "nested too deeply|cannot read"),
    ],
)
def test_bad_bodies(body: str, why: str) -> None:
    """A body that is no call is refused with what would be right."""
    with pytest.raises(HTTPError, match=why) as caught:
        parse_request(body.encode())
    assert caught.value.status == 400


def test_spellings() -> None:
    """Names in two ways, numbers as texts, units by name or number, and null for what is left out."""
    text = """{"domain": "d", "hits_addend": "7", "descriptors": [
        {"entries": [{"key": "a", "value": null}], "limit": {"requests_per_unit": "5", "unit": "MINUTE"},
         "hitsAddend": "0"},
        {"entries": null, "limit": {"requestsPerUnit": 5.0, "unit": 7}, "hits_addend": 18446744073709551615}, {}]}"""
    request = parse_request(text.encode())
    assert (request.domain, request.hits_addend) == ("d", 7)
    found = [(one.entries, one.limit, one.hits) for one in request.descriptors]
    assert found == [([("a", "")], (5, 2), 0), ([], (5, 7), (1 << 64) - 1), ([], None, None)]


def test_response() -> None:
    """Zeros are left out, as protocol buffers write them."""
    statuses = [DescriptorStatus(OVER_LIMIT, ("", 5, 0), 0, 3.0), DescriptorStatus(OK)]
    assert response_json(RateLimitResponse(OVER_LIMIT, statuses, [("a", "b")])) == {
        "overallCode": "OVER_LIMIT",
        "statuses": [
            {"code": "OVER_LIMIT", "currentLimit": {"requestsPerUnit": 5}, "durationUntilReset": "3s"},
            {"code": "OK"},
        ],
        "responseHeadersToAdd": [{"key": "a", "value": "b"}],
    }


def at_once(service: Service, callers: int, body: dict[str, Any]) -> Counter[int]:
    """The statuses of so many calls, each on a connection of its own, sent when all are connected."""
    found: Counter[int] = Counter()
    ready = threading.Barrier(callers)

    def one() -> None:
        connection: http.client.HTTPConnection = service.connect()
        connection.connect()
        ready.wait(30)
        status = service.on(connection, "POST", "/json", body=body).status
        connection.close()
        found.update([status])

    threads = [threading.Thread(target=one) for _ in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_exact_in_memory(shop: Service, within_an_hour: None) -> None:
    """Of 60 calls at once against 20 in an hour, 20 pass."""
    assert at_once(shop, 60, call(("tenant", "busy"), ("trial", "busy"))) == {200: 20, 429: 40}


def test_exact_on_redis(start: Start, redis_server: Server, within_an_hour: None) -> None:
    """The same with two workers on Redis, and all or nothing over several descriptors in one step."""
    store = ("--store", redis_server.url, "--workers", "2")
    service = start(*store, config=SETTINGS, files={"shop.yaml": RULES})
    assert at_once(service, 60, call(("tenant", "busy"), ("tenant", "other"))) == {200: 20, 429: 40}
    answer = send(service, ("tenant", "other"))
    assert answer.status == 429
    keys = list(redis_server.client().scan_iter("*tenant*"))
    assert len(keys) == 2 and all("{tenant=" in key and "envoy" in key for key in keys), keys


def denied(service: Service) -> Any:
    """The most denied keys of the next event."""
    connection = service.connect()
    try:
        connection.request("GET", "/live")
        line = connection.getresponse().readline()
        return json.loads(line.removeprefix(b"data: "))["denied_keys"]
    finally:
        connection.close()


def test_counted(start: Start) -> None:
    """Decisions are in the metrics under the name of their rule, and the most denied keys in the events."""
    service = start(config=SETTINGS, files={"shop.yaml": RULES})
    for _ in range(3):
        send(service, ("user", "u"), ("trial", "t"), ("nosuch", "x"))
    metrics = service.metrics()
    labels = 'rule="envoy/shop/{}",algorithm="FIXED_WINDOW"'
    requests = 'rate_limiter_rule_requests_total{{{},allowed="{}"}}'
    assert metrics[requests.format(labels.format("user"), "true")] == 2
    assert metrics[requests.format(labels.format("user"), "false")] == 1
    assert metrics[requests.format(labels.format("trial"), "true")] == 2
    assert metrics[f"rate_limiter_shadow_denied_total{{{labels.format('trial')}}}"] == 1
    assert metrics['rate_limiter_rule_requests_total{rule="envoy/",algorithm="NONE",allowed="true"}'] == 3
    assert metrics['rate_limiter_requests_total{algorithm="FIXED_WINDOW",allowed="false"}'] == 1
    key = {"key": "user=u", "rule": "envoy/shop/user", "denied": 1}
    eventually(lambda: key in denied(service), "the denied key is reported")
    assert service.get("/actuator/info").json["envoy"] == [{"domain": "shop", "rules": 4}]
    assert "/json" in service.get("/openapi.json").json["paths"]


def test_token(start: Start) -> None:
    """It needs the scope check, as every check does."""
    service = start(config=SETTINGS, files={"shop.yaml": RULES}, environment={"HEADGATE_CHECK_TOKEN": "secret"})
    assert send(service, ("user", "u")).status == 401
    sent = {"authorization": "Bearer secret"}
    assert service.ask("POST", "/json", body=call(("user", "u")), headers=sent).status == 200


def test_without_rules(service: Service) -> None:
    """Without files there is nothing at /json, and the error says what to set."""
    answer = service.ask("POST", "/json", body=call(("user", "u")))
    assert answer.status == 404 and "[envoy] files" in answer.problem
    assert "/json" not in service.get("/openapi.json").json["paths"]


def test_reload(start: Start) -> None:
    """New rules come into force by themselves; bad ones change nothing but the log and the metrics."""
    service = start(config=SETTINGS, files={"shop.yaml": RULES})
    file = service.folder / "shop.yaml"

    def limit(key: str) -> Any:
        [status] = send(service, (key, "v")).json["statuses"]
        return status.get("currentLimit", {}).get("requestsPerUnit")

    def reloads() -> tuple[float, float]:
        name = "rate_limiter_config_reloads_total"
        found = service.metrics()
        return found[f'{name}{{result="success"}}'], found[f'{name}{{result="failure"}}']

    assert limit("tenant") == 20
    file.write_text(RULES.replace("requests_per_unit: 20", "requests_per_unit: -20"))
    eventually(lambda: reloads() == (0, 1), "a bad file is noticed")
    assert "shop.yaml:5: requests_per_unit is a whole number" in service.log()
    assert limit("tenant") == 20 and service.metrics()["rate_limiter_config_reload_success"] == 0
    file.write_text(RULES.replace("requests_per_unit: 20", "requests_per_unit: 30"))
    (service.folder / "more.yaml").write_text("domain: more\ndescriptors: []")
    service.signal(signal.SIGHUP)
    eventually(lambda: limit("tenant") == 30, "a good file is taken over")
    eventually(lambda: len(service.get("/actuator/info").json["envoy"]) == 2, "with a new one beside it")
    before = reloads()
    service.config.write_text(SETTINGS.replace("*.yaml", "late.yaml"))
    service.signal(signal.SIGHUP)
    eventually(lambda: reloads()[1] > before[1], "settings that name a missing file are refused")
    (service.folder / "late.yaml").write_text(RULES.replace("tenant", "guest"))
    eventually(lambda: limit("guest") == 20, "and taken over once the file is there")
    assert limit("tenant") is None


def test_validate(start: Start, tmp_path: Any) -> None:
    """`headgate config validate` reads the files of Envoy, too."""
    (tmp_path / "headgate.toml").write_text(SETTINGS)
    (tmp_path / "a.yaml").write_text(RULES)
    done = headgate("config", "validate", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "headgate.toml: fine, 0 rules, 1 domain of Envoy\n")
    (tmp_path / "a.yaml").write_text(RULES.replace("hour", "fortnight", 1))
    done = headgate("config", "validate", folder=tmp_path)
    assert done.returncode == 5 and "a.yaml:5: unknown unit 'fortnight'" in done.stderr
    shown = headgate("config", "show", folder=tmp_path)
    assert json.loads(shown.stdout)["envoy"] == {"files": ["*.yaml"]}
