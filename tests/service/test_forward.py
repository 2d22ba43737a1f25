"""Sub-requests of proxies: which rule, whose key, which status; and that a client can choose none of them."""

import base64
import http.client
from collections.abc import Iterator, Mapping

import pytest

from headgate.service.forwarded import normal_host, normal_method, normal_path
from tests.service.conftest import Start
from tests.support.service import API, Answer, Service

PROXY = "127.0.0.2"  # the whole network 127.0.0.0/8 is this machine
RULES = f"""
trusted_proxies = ["{PROXY}"]

[rules.api]
quotas = "2/hour"
key = ["address"]
exempt = ["192.0.2.0/24"]
overrides = {{ "198.51.100.7" = "50/hour" }}

[rules.request]
quotas = "1/hour"
key = ["host", "method", "path"]

[rules.by-token]
quotas = "1/hour"
key = ["header:X-Api-Key"]

[rules.named]
quotas = "2/hour"
key = ["address", "key"]

[rules.quiet]
quotas = "1/hour"
key = ["address"]
shadow = true
"""
ASKED = {"x-forwarded-host": "example.com", "x-forwarded-method": "GET", "x-forwarded-uri": "/"}


@pytest.fixture(scope="module")
def asked() -> Iterator[Service]:
    service = Service(config=RULES)
    yield service
    service.forget()


def forward(
    service: Service,
    rule: str,
    headers: Mapping[str, str] | None = None,
    method: str = "GET",
    query: str = "",
    body: bytes | None = None,
    source: str = PROXY,
) -> Answer:
    """Ask as the proxy does."""
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=30, source_address=(source, 0))
    try:
        return service.on(connection, method, f"{API}/forward/{rule}", query, body, headers)
    finally:
        connection.close()


def client(address: str) -> dict[str, str]:
    return {"x-forwarded-for": address}


def test_answers(asked: Service) -> None:
    """Allowed is 200 without a body, denied a problem that shows no key; both have the usual headers."""
    for left in ("1", "0"):
        answer = forward(asked, "api", client("198.51.100.1"))
        assert (answer.status, answer.body) == (200, b"")
        assert (answer.headers["x-ratelimit-limit"], answer.headers["x-ratelimit-remaining"]) == ("2", left)
        assert answer.headers["cache-control"] == "no-store" and answer.headers["content-type"] is None
    answer = forward(asked, "api", client("198.51.100.1"))
    assert answer.status == 429 and int(answer.headers["retry-after"]) > 1
    assert "Rate limit exceeded" in answer.problem and b"198.51" not in answer.body
    assert answer.headers["x-ratelimit-remaining"] == "0" and answer.headers.get_all("cache-control") == ["no-store"]
    denied = {'rate_limiter_rule_requests_total{rule="api",algorithm="TOKEN_BUCKET",allowed="false"}': 1}
    assert asked.metrics().items() >= denied.items()
    assert asked.reset("198.51.100.1", rule="api").status == 200
    assert forward(asked, "api", client("198.51.100.1")).status == 200, "the counter of the check"


def test_denied_as_403(asked: Service) -> None:
    """The path may ask for a 403, which nginx passes on; it is the same counter."""
    answers = [forward(asked, rule, client("198.51.100.2")) for rule in ("api/403", "api", "api/403")]
    assert [answer.status for answer in answers] == [200, 200, 403]
    assert int(answers[2].headers["retry-after"]) > 1 and answers[2].json["status"] == 403


def test_methods(asked: Service) -> None:
    """Every method asks and spends, with a body or without one, HEAD and OPTIONS too."""
    for i, method in enumerate(("GET", "POST", "PUT", "HEAD", "OPTIONS", "DELETE", "PROPFIND")):
        address = client(f"198.51.100.{20 + i}")
        body = b"x" * 100_000 if method in ("POST", "PUT") else None
        statuses = [forward(asked, "api", address, method, body=body).status for _ in range(3)]
        assert statuses == [200, 200, 429], method


def test_the_query_is_ignored(asked: Service) -> None:
    """A client whose query is forwarded chooses nothing by it, and breaks nothing."""
    address = client("198.51.100.3")
    for query in ("key=a&permits=2", "rule=named&" + "x" * 9000):
        assert forward(asked, "api", address, query=query).status == 200
    assert forward(asked, "api", address, query="key=b&algorithm=GCRA&denied=200").status == 429


def test_rules_apply(asked: Service) -> None:
    """Exemptions, overrides and shadow rules hold as for a check."""
    for _ in range(3):
        assert forward(asked, "api", client("192.0.2.9")).headers["x-ratelimit-remaining"] == "2"
        assert forward(asked, "api", client("198.51.100.7")).headers["x-ratelimit-limit"] == "50"
        assert forward(asked, "quiet", client("198.51.100.8")).status == 200
    name = 'rate_limiter_shadow_denied_total{rule="quiet",algorithm="TOKEN_BUCKET"}'
    assert asked.metrics()[name] == 2


@pytest.mark.parametrize(
    "rule",
    ["", "nope", "api/", "api/429", "api/403/x", "api%2f403%2fx", "a%20b", "x" * 65, "%C3%A9", "api%00", "..%2fcheck"],
)
def test_odd_names(asked: Service, rule: str) -> None:
    """A path that names no rule is a 404 that says what a path looks like, and names no other rule."""
    answer = forward(asked, rule)
    assert answer.status == 404 and "/forward/RULE" in answer.problem and "quiet" not in answer.problem


def test_a_rule_that_needs_a_key(asked: Service) -> None:
    """A rule whose key the client would have to name is refused, with what to set."""
    for rule in ("default", "named"):
        answer = forward(asked, rule, query="key=a")
        assert answer.status == 400 and 'key = ["address"]' in answer.problem


def test_parts_of_the_request(asked: Service) -> None:
    """Host, method and path each make another key; another spelling of the same request does not."""
    here = {**ASKED, "x-forwarded-uri": "/parts"}
    assert forward(asked, "request", here).status == 200
    for other in ({"x-forwarded-host": "other.com"}, {"x-forwarded-method": "POST"}, {"x-forwarded-uri": "/b"}):
        assert forward(asked, "request", here | other).status == 200
    for same in (
        {"x-forwarded-uri": "/parts?x=1"},
        {"x-forwarded-uri": "//%70arts/./"},
        {"x-forwarded-host": "EXAMPLE.com.:80"},
        {"x-original-uri": "/c", "x-original-method": "PUT"},
    ):
        assert forward(asked, "request", here | same).status == 429, same
    key = "example.com|GET|/parts"
    assert asked.remaining(key, rule="api", permits=0).json["remaining"] == 2, "another rule"
    assert asked.reset(key, rule="request").status == 200
    assert forward(asked, "request", here).status == 200


@pytest.mark.parametrize(
    ("rule", "headers"),
    [("request", {**ASKED, "x-forwarded-uri": "/" + "long" * 2000}), ("by-token", {"x-api-key": "k" * 2000})],
)
def test_long_values(asked: Service, rule: str, headers: Mapping[str, str]) -> None:
    """A value that is too long for a key is one key, not an error that a proxy may take for an outage."""
    assert [forward(asked, rule, headers).status for _ in range(2)] == [200, 429]
    other = {name: f"{value}x" for name, value in headers.items() if name != "x-forwarded-method"}
    assert forward(asked, rule, dict(headers) | other).status == 200


@pytest.mark.parametrize(
    ("rule", "headers"),
    [
        ("request", ASKED | {"x-forwarded-uri": "/caf\xe9"}),
        ("request", ASKED | {"x-forwarded-uri": "/a\tb"}),
        ("request", ASKED | {"x-forwarded-host": "\xff"}),
        ("by-token", {"x-api-key": "\xff"}),
    ],
)
def test_values_that_cannot_be_read(asked: Service, rule: str, headers: Mapping[str, str]) -> None:
    """What a client may put into a header is limited, and never an error, after which a proxy might go on."""
    assert [forward(asked, rule, headers).status for _ in range(2)] == [200, 429]


def test_an_address_that_cannot_be_read(asked: Service) -> None:
    """A client cannot get another address, nor be exempt, by a header that granian does not hand on."""
    made_up = [{"x-forwarded-for": "\xe9, 203.0.113.5", "x-real-ip": f"192.0.2.{i}"} for i in range(4)]
    assert [forward(asked, "api", headers).status for headers in made_up] == [200, 200, 429, 429]


def test_missing_parts(asked: Service) -> None:
    """What a proxy has to say and does not say is a 400 that names the header."""
    for name in ASKED:
        answer = forward(asked, "request", {key: value for key, value in ASKED.items() if key != name})
        assert answer.status == 400 and name in answer.problem
    answer = forward(asked, "by-token")
    assert answer.status == 400 and "x-api-key" in answer.problem


def test_untrusted(asked: Service) -> None:
    """Headers of a peer that is not trusted do not count, and the log tells of a proxy that is not."""
    answer = forward(asked, "request", ASKED, source="127.0.0.3")
    assert answer.status == 400 and "127.0.0.3" in answer.problem and "trusted_proxies" in answer.problem
    statuses = [forward(asked, "api", client(f"203.0.113.{i}"), source="127.0.0.3").status for i in range(3)]
    assert statuses == [200, 200, 429]
    assert asked.log().count("127.0.0.3 is not in trusted_proxies") == 1


def test_another_header(start: Start) -> None:
    """The settings name the headers that the proxy writes; others do not count."""
    service = start(
        config='trusted_proxies = ["127.0.0.1"]\nuri_header = "X-Original-URI"\n'
        "[rules.p]\nquotas = '1/hour'\nkey = ['path']\n",
    )
    path = f"{API}/forward/p"
    assert service.get(path, headers={"x-original-uri": "/a", "x-forwarded-uri": "/b"}).status == 200
    assert service.get(path, headers={"x-original-uri": "/a", "x-forwarded-uri": "/c"}).status == 429
    assert service.get(path, headers={"x-forwarded-uri": "/a"}).status == 400


def test_forward_token(start: Start) -> None:
    """The scope is that of a check; the token may be the password of a URL."""
    service = start(
        environment={"HEADGATE_CHECK_TOKEN": "c", "HEADGATE_READ_TOKEN": "r"},
        config="[rules.api]\nquotas = '9/hour'\nkey = ['address']\n",
    )
    basic = [base64.b64encode(text.encode()).decode() for text in ("proxy:c", ":c", "c:", "proxy:x")]
    table = {"": 401, "Bearer c": 200, "Bearer r": 403, "Basic c": 401}
    table |= dict(zip((f"Basic {text}" for text in basic), (200, 200, 401, 401), strict=True))
    for authorization, status in table.items():
        headers = {"authorization": authorization} if authorization else {}
        assert service.get(f"{API}/forward/api", headers=headers).status == status, authorization


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("/", "/"),
        ("", "/"),
        ("*", "/"),
        ("/a/b?c=/d", "/a/b"),
        ("/a/b#c", "/a/b"),
        ("//a///b/", "/a/b"),
        ("/a/./b/../c", "/a/c"),
        ("/../../a", "/a"),
        ("/%61%2fb%2Fc%20d", "/a%2Fb%2Fc%20d"),
        ("/%2e%2e/a", "/a"),
        ("/u/%40me%3Ab%21", "/u/@me:b!"),
        ("/%25%3f%23", "/%25%3F%23"),
        ("/a%", "/a%"),
        ("http://example.com/a?b", "/a"),
        ("http://example.com", "/"),
    ],
)
def test_normal_path(uri: str, path: str) -> None:
    """One request has one path, however it is spelled."""
    assert normal_path(uri) == path


def test_normal_host_and_method() -> None:
    """A host has no port and one case; methods that a client invents are one."""
    hosts = {"A.Example:80": "a.example", "a.example.": "a.example", "[::1]:80": "[::1]", " a ": "a"}
    assert {text: normal_host(text) for text in hosts} == hosts
    assert [normal_method(text) for text in ("GET", "get", "X1", "X2")] == ["GET", "OTHER", "OTHER", "OTHER"]
