"""Every row of the service's contract, over a real socket."""

import http.client
import json
import math
import resource
import selectors
import signal
import socket
import time
from typing import Any

import pytest

from tests.service.conftest import Start
from tests.support.quotas import ALGORITHMS, BUCKETS
from tests.support.service import API, Answer, Service, headgate

NAMES = [name.upper() for name in ALGORITHMS]
FIELDS = ["allowed", "key", "algorithm", "limit", "remaining", "resetAfterSeconds", "retryAfterSeconds", "message"]


def drain(service: Service, key: str, permits: int = 50, **query: Any) -> Answer:
    """Take until there are no more: the refusal. However slow the machine, a bucket fills slower than this empties."""
    while (answer := service.check(key, permits=permits, **query)).status == 200:
        pass
    return answer


class TestCheck:
    def test_the_body(self, service: Service) -> None:
        answer = service.check("user:123", algorithm="TOKEN_BUCKET", permits=5)
        assert answer.status == 200
        assert answer.headers["content-type"] == "application/json"
        assert list(answer.json) == FIELDS
        assert answer.json == {
            "allowed": True,
            "key": "user:123",
            "algorithm": "TOKEN_BUCKET",
            "limit": 100,
            "remaining": 95,
            "resetAfterSeconds": 1,
            "retryAfterSeconds": 0,
            "message": "Request allowed",
        }

    @pytest.mark.usefixtures("within_a_minute")
    @pytest.mark.parametrize("name", NAMES)
    def test_capacity(self, service: Service, key: str, name: str) -> None:
        """Every algorithm admits its capacity and no more."""
        taken = service.check(key, algorithm=name, permits=100)
        assert taken.status == 200 and taken.json["remaining"] == 0
        if name.lower() in BUCKETS:
            assert taken.json["resetAfterSeconds"] == 10  # 100 at 10 a second
        refused = service.check(key, algorithm=name, permits=90)
        assert refused.status == 429
        assert list(refused.json) == FIELDS
        assert refused.json["allowed"] is False and refused.json["algorithm"] == name
        assert refused.json["limit"] == 100 and refused.json["remaining"] < 90
        assert refused.json["message"] == "Rate limit exceeded"
        longest = 9 if name.lower() in BUCKETS else 120 if name == "SLIDING_WINDOW_COUNTER" else 60
        assert 1 <= refused.json["retryAfterSeconds"] <= longest

    @pytest.mark.parametrize("name", NAMES)
    def test_any_case_of_the_algorithm(self, service: Service, key: str, name: str) -> None:
        for spelling in (name.lower(), name.title()):
            assert service.check(key, algorithm=spelling).json["algorithm"] == name

    def test_default_algorithm(self, service: Service, key: str) -> None:
        """A check without an algorithm uses the token bucket."""
        service.check(key, permits=99)
        assert service.remaining(key, algorithm="TOKEN_BUCKET").json["remaining"] < 99
        assert service.check(key).json["algorithm"] == "TOKEN_BUCKET"
        assert service.check(key, rule="default").json["remaining"] < 97

    def test_headers_when_allowed(self, service: Service, key: str) -> None:
        before = time.time()
        answer = service.check(key, permits=50)
        assert answer.headers["x-ratelimit-limit"] == "100"
        assert answer.headers["x-ratelimit-remaining"] == "50"
        assert before + 5 <= int(answer.headers["x-ratelimit-reset"]) <= math.ceil(time.time() + 5)
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["retry-after"] is None

    def test_headers_when_denied(self, service: Service, key: str) -> None:
        refused = drain(service, key)
        assert refused.status == 429
        assert 1 <= int(refused.headers["retry-after"]) == refused.json["retryAfterSeconds"] <= 5
        assert refused.headers["x-ratelimit-limit"] == "100"
        assert int(refused.headers["x-ratelimit-remaining"]) == refused.json["remaining"] < 50
        assert int(refused.headers["x-ratelimit-reset"]) >= time.time()
        assert refused.headers["cache-control"] == "no-store"

    def test_retry_after(self, service: Service, key: str) -> None:
        """After a wait of `retryAfterSeconds` the check succeeds."""
        refused = drain(service, key, permits=15)
        time.sleep(int(refused.headers["retry-after"]))
        assert service.check(key, permits=15).status == 200

    def test_post_is_the_same(self, service: Service, key: str) -> None:
        window = {"key": key, "permits": 10, "algorithm": "SLIDING_WINDOW"}
        assert service.ask("POST", f"{API}/check", window).json["remaining"] == 90
        assert service.ask("POST", f"{API}/check", body=window).json["remaining"] == 80
        both = service.ask("POST", f"{API}/check", {"key": key}, {"algorithm": "GCRA", "permits": 7})
        assert both.json["remaining"] == 93 and both.json["algorithm"] == "GCRA"

    def test_head_spends_nothing(self, service: Service, key: str) -> None:
        answer = service.ask("HEAD", f"{API}/check", {"key": key})
        assert answer.status == 200 and answer.body == b""
        assert answer.headers["x-ratelimit-remaining"] == "99"  # as GET would say
        assert service.remaining(key, permits=0).json["remaining"] == 100
        service.check(key, permits=100)
        assert service.ask("HEAD", f"{API}/check", {"key": key, "permits": 100}).status == 429

    def test_keys_do_not_share(self, service: Service, key: str) -> None:
        for other in (f"{key}:a", f"{key}:b", f"{key} a", f"{key}%", f"{key}é{{}}", key.upper()):
            answer = service.check(other)
            assert answer.json["key"] == other and answer.json["remaining"] == 99

    def test_plus_sign(self, service: Service, key: str) -> None:
        """In a query, `+` is a space and `%2B` a plus."""
        assert service.get(f"{API}/check", f"key={key}+a").json["key"] == f"{key} a"
        assert service.get(f"{API}/check", f"key={key}%2Ba").json["key"] == f"{key}+a"


class TestRemaining:
    @pytest.mark.parametrize("name", NAMES)
    def test_it_spends_nothing(self, service: Service, key: str, name: str) -> None:
        service.check(key, algorithm=name, permits=60)
        answers = [service.remaining(key, algorithm=name) for _ in range(3)]
        assert all(answer.status == 200 and list(answer.json) == FIELDS for answer in answers)
        left = [answer.json["remaining"] for answer in answers]
        assert left == sorted(left) and left[0] >= 40  # later there may be more, never less

    def test_200_also_when_nothing_is_left(self, service: Service, key: str) -> None:
        service.check(key, algorithm="SLIDING_WINDOW", permits=100)
        answer = service.remaining(key, algorithm="SLIDING_WINDOW")
        assert answer.status == 200
        assert answer.json["allowed"] is False and answer.json["retryAfterSeconds"] >= 1
        assert answer.headers["x-ratelimit-remaining"] == "0" and answer.headers["retry-after"] is None

    def test_a_key_never_seen(self, service: Service, key: str) -> None:
        for answer in (service.remaining(key), service.remaining(key, permits=0), service.remaining(key, permits=7)):
            assert answer.json["remaining"] == 100 and answer.json["resetAfterSeconds"] == 0

    def test_as_many_as_the_last_check_said(self, service: Service, key: str) -> None:
        said = service.check(key, algorithm="SLIDING_WINDOW", permits=30).json["remaining"]
        assert service.remaining(key, algorithm="SLIDING_WINDOW").json["remaining"] == said == 70

    def test_remaining_permits(self, service: Service, key: str) -> None:
        """`remaining` tells whether that many permits would be granted."""
        service.check(key, algorithm="SLIDING_WINDOW", permits=90)
        assert service.remaining(key, algorithm="SLIDING_WINDOW", permits=10).json["allowed"] is True
        answer = service.remaining(key, algorithm="SLIDING_WINDOW", permits=11)
        assert answer.json["allowed"] is False and answer.json["remaining"] == 10


class TestReset:
    @pytest.mark.parametrize("name", NAMES)
    def test_as_if_never_seen(self, service: Service, key: str, name: str) -> None:
        assert drain(service, key, algorithm=name).status == 429
        answer = service.reset(key, algorithm=name)
        assert answer.status == 200 and answer.json["remaining"] == 100 and answer.json["key"] == key
        assert service.check(key, algorithm=name).json["remaining"] == 99

    def test_again_and_for_a_key_never_seen(self, service: Service, key: str) -> None:
        assert service.reset(key).status == service.reset(key).status == 200

    def test_other_keys_keep_their_state(self, service: Service, key: str) -> None:
        service.check(key, algorithm="SLIDING_WINDOW", permits=30)
        service.reset(key + "x", algorithm="SLIDING_WINDOW")
        service.reset(key, algorithm="FIXED_WINDOW")
        assert service.remaining(key, algorithm="SLIDING_WINDOW", permits=0).json["remaining"] == 70

    @pytest.mark.parametrize(
        "permits, says", [("0", "at least 1"), ("101", "at most 100"), ("-1", "whole number"), ("x", "whole number")]
    )
    def test_permits_are_those_of_a_check(self, service: Service, key: str, permits: str, says: str) -> None:
        assert service.check(key, algorithm="SLIDING_WINDOW", permits=7).status == 200
        answer = service.reset(key, algorithm="SLIDING_WINDOW", permits=permits)
        assert answer.status == 400 and says in answer.problem
        assert service.remaining(key, algorithm="SLIDING_WINDOW", permits=0).json["remaining"] == 93
        assert service.reset(key, algorithm="SLIDING_WINDOW", permits=100).json["remaining"] == 100

    def test_get_does_not_reset(self, service: Service, key: str) -> None:
        answer = service.get(f"{API}/reset", {"key": key})
        assert answer.status == 405 and "DELETE" in answer.headers["allow"]
        assert "DELETE" in answer.problem


class TestBatch:
    def test_answers_in_order(self, service: Service, key: str) -> None:
        checks = [
            {"key": key, "permits": 60, "algorithm": "SLIDING_WINDOW"},
            {"key": key, "permits": 60, "algorithm": "SLIDING_WINDOW"},
            {"key": key + "b"},
            {"key": key, "permits": 40, "algorithm": "sliding_window", "rule": "default"},
            {},
        ]
        answer = service.ask("POST", f"{API}/check/batch", body=checks)
        assert answer.status == 200 and answer.headers["cache-control"] == "no-store"
        assert [one["allowed"] for one in answer.json] == [True, False, True, True, True]
        assert [one["key"] for one in answer.json] == [key, key, key + "b", key, "127.0.0.1"]
        assert all(list(one) == FIELDS for one in answer.json)

    @pytest.mark.parametrize(
        "body, says",
        [
            ([{}] * 1001, "at most 1000"),
            ({}, "list"),
            (["a"], "object"),
            ([{"key": 5}], "str"),
            ([{"kee": "a"}], "kee"),
            ([{"permits": True}], "int"),
            ([{"permits": 1.5}], "multiple of 1"),
            ([{"permits": 0}], ">= 1"),
            ([{"permits": "1"}], "int"),
            ([{"key": ""}], "length"),
            ([{"rule": "nope"}], "unknown rule 'nope'"),
            ([{"algorithm": "nope"}], "TOKEN_BUCKET"),
            ([{"permits": 101}], "at most 100"),
            ([{"key": "a\0"}], "control character"),
            ([{"key": "é" * 200}], "400 bytes"),
        ],
    )
    def test_a_bad_one_spends_nothing(self, service: Service, key: str, body: object, says: str) -> None:
        if isinstance(body, list) and body and isinstance(body[0], dict):
            body = [{"key": key, "permits": 10, "algorithm": "SLIDING_WINDOW"}, *body[1:], body[0]]
            body = body if len(body) < 1000 else [*body, {}]
        answer = service.ask("POST", f"{API}/check/batch", body=body)
        assert answer.status == 400 and says in answer.problem
        assert service.remaining(key, algorithm="SLIDING_WINDOW", permits=0).json["remaining"] == 100

    def test_empty_batch(self, service: Service) -> None:
        """An empty batch is answered with an empty list."""
        answer = service.ask("POST", f"{API}/check/batch", body=[])
        assert answer.status == 200 and answer.json == []

    def test_the_bad_one_is_pointed_at(self, service: Service) -> None:
        for bad, place in (({"rule": "nope"}, "check 2 of 3, $[1]: unknown rule"), ({"key": 5}, "$[1].key")):
            answer = service.ask("POST", f"{API}/check/batch", body=[{}, bad, {}])
            assert answer.status == 400 and place in answer.problem

    def test_not_json(self, service: Service) -> None:
        answer = service.ask("POST", f"{API}/check/batch", body=b"[{", headers={"content-type": "application/json"})
        assert answer.status == 400 and "such as" in answer.problem
        answer = service.ask("POST", f"{API}/check/batch", body=b"a=b", headers={"content-type": "text/plain"})
        assert answer.status == 415 and "application/json" in answer.problem


BAD = [
    ("algorithm=NOPE", "TOKEN_BUCKET, LEAKY_BUCKET"),
    ("algorithm=", "TOKEN_BUCKET"),
    ("rule=nope", "known are default"),
    ("permits=0", "at least 1"),
    ("permits=-1", "whole number"),
    ("permits=1.5", "whole number"),
    ("permits=1e3", "whole number"),
    ("permits=", "whole number"),
    ("permits=%2B1", "whole number"),
    ("permits=%D9%A1", "whole number"),  # an Arabic digit
    ("permits=101", "at most 100"),
    ("permits=99999999999999999999", "whole number"),
    ("key=", "empty"),
    ("key=%00", "control character"),
    ("key=a%0d%0aX-Evil:%201", "control character"),
    ("key=%ff", "UTF-8"),
    ("key=%zz", "%25"),
    ("key=" + "a" * 257, "257 bytes"),
    ("key=" + "%C3%A9" * 129, "258 bytes"),
    ("key=a&key=b", "twice"),
    ("permits=1&permits=2", "twice"),
    ("kee=a", "unknown parameter 'kee'"),
    ("wait=x", "seconds"),
    ("wait=-1", "seconds"),
    ("wait=nan", "seconds"),
    ("wait=1e9", "from 0 to 30"),
]


@pytest.mark.parametrize("query, says", BAD, ids=[query[:30] for query, _ in BAD])
def test_bad_input(service: Service, query: str, says: str) -> None:
    """Bad input is a 400 that says what would be right."""
    answer = service.get(f"{API}/check", query)
    assert answer.status == 400 and says in answer.problem
    assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    "body, says",
    [
        (b"{", "cannot read the body"),
        (b"", ""),
        (b"null", "object"),
        (b'{"permits": "1"}', "int"),
        (b'{"key": "a", "x": 1}', "unknown field"),
        (b'{"key": "\xff"}', "body"),
        (b'{"key": "a", "key": "b", "permits": 1e400}', "body"),
        (b"[" * 100_000, "body"),
    ],
)
def test_bad_bodies(service: Service, body: bytes, says: str) -> None:
    answer = service.ask("POST", f"{API}/check", body=body, headers={"content-type": "application/json"})
    if not body:
        assert answer.status == 200  # the query alone, and that may be empty
    else:
        assert answer.status == 400 and says in answer.problem


def test_null_is_as_good_as_left_out(service: Service, key: str) -> None:
    nothing = dict.fromkeys(("algorithm", "permits", "rule", "wait"))
    answer = service.ask("POST", f"{API}/check", body={"key": key, **nothing})
    assert answer.status == 200 and answer.json["algorithm"] == "TOKEN_BUCKET" and answer.json["remaining"] == 99
    assert service.ask("POST", f"{API}/check", body={"key": None}).json["key"] == "127.0.0.1"
    query = {"key": key, "algorithm": "GCRA", "permits": 5, "wait": 1}
    answer = service.ask("POST", f"{API}/check", query, {"key": None, **nothing})
    assert answer.json["algorithm"] == "GCRA" and answer.json["remaining"] == 95
    del nothing["wait"]
    answer = service.ask("POST", f"{API}/check/batch", body=[{"key": key, **nothing}, {"key": None}])
    assert [one["key"] for one in answer.json] == [key, "127.0.0.1"]
    field = service.get("/openapi.json").json["components"]["schemas"]["Check"]["properties"]["algorithm"]
    assert {"type": "null"} in field["anyOf"]


def test_query_and_body_may_not_disagree(service: Service) -> None:
    answer = service.ask("POST", f"{API}/check", {"key": "a"}, {"key": "b"})
    assert answer.status == 400 and "query and in the body" in answer.problem


def test_unknown_paths_and_methods(service: Service) -> None:
    for path in ("/nope", "/api/v1/rate-limit", f"{API}/check/", "//", "/page/../app.py", "/page/nope.js"):
        assert service.get(path).status == 404
    answer = service.ask("PUT", f"{API}/check")
    assert answer.status == 405 and answer.headers["allow"] == "GET, POST, HEAD, OPTIONS"
    answer = service.ask("OPTIONS", f"{API}/check")
    assert answer.status == 204 and "POST" in answer.headers["allow"]
    assert service.ask("HEAD", "/metrics").status == service.ask("HEAD", "/live").status == 200


def test_a_request_id_comes_back(service: Service, key: str) -> None:
    assert service.check(key, {"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert service.check("", {"x-request-id": "abc-2"}).json["requestId"] == "abc-2"
    assert len(service.check("").headers["x-request-id"]) == 16
    assert service.check(key, {"x-request-id": "a b"}).headers["x-request-id"] is None


def test_wait(service: Service, key: str) -> None:
    """`wait` holds the response until there are permits."""
    assert drain(service, key, permits=15).status == 429
    answer = service.check(key, permits=15, wait=20)
    assert answer.status == 200 and answer.json["allowed"] is True
    answer = service.check(key, permits=90, wait=0.2)
    assert answer.status == 429 and answer.json["retryAfterSeconds"] >= 1


def test_wait_disconnect(service: Service, key: str) -> None:
    """A client that disconnects while it waits spends nothing."""
    service.check(key, algorithm="SLIDING_WINDOW", permits=100)
    connection = service.connect()
    connection.request("GET", f"{API}/check?key={key}&algorithm=SLIDING_WINDOW&permits=100&wait=30")
    service.take_turns()
    connection.close()
    service.take_turns()
    service.reset(key, algorithm="SLIDING_WINDOW")  # wakes a client that still waits
    assert service.remaining(key, algorithm="SLIDING_WINDOW", permits=0).json["remaining"] == 100


def test_wait_many(service: Service, key: str) -> None:
    """Waiting clients do not delay other requests."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 4000:
        if 0 <= hard < 4000:
            pytest.skip("too few files may be open here")
        resource.setrlimit(resource.RLIMIT_NOFILE, (4000, hard))
    service.check(key, algorithm="SLIDING_WINDOW", permits=100)
    request = f"GET {API}/check?key={key}&algorithm=SLIDING_WINDOW&wait=30 HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    waiting = [socket.create_connection(("127.0.0.1", service.port), timeout=30) for _ in range(1500)]
    try:
        for connection in waiting:
            connection.sendall(request)
        for _ in range(5):
            assert service.check(key + "x").status == 200
        service.reset(key, algorithm="SLIDING_WINDOW")
        with selectors.DefaultSelector() as ready:  # the first in line is served as soon as there are permits
            for connection in waiting:
                ready.register(connection, selectors.EVENT_READ, connection)
            served = ready.select(30)[0][0].data
        assert served.recv(12) == b"HTTP/1.1 200"
    finally:
        for connection in waiting:
            connection.close()
    assert "Traceback" not in service.log()


def test_ipv6(start: Start) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    service = start("--host", "::")  # both families
    connection = http.client.HTTPConnection("::1", service.port, timeout=30)
    assert service.on(connection, "GET", f"{API}/check").json["key"] == "::/64"
    connection.close()
    assert service.check().json["key"] == "127.0.0.1"  # and not ::ffff:127.0.0.1


def test_stop(start: Start) -> None:
    """On SIGTERM the service finishes requests in flight and exits with 0."""
    service = start()
    idle, streaming = service.connect(), service.connect()
    service.on(idle, "GET", "/actuator/health")
    streaming.request("GET", "/live")
    assert streaming.getresponse().readline().startswith(b"data: ")
    service.check("a", permits=100)
    waiting = service.connect()
    waiting.request("GET", f"{API}/check?key=a&permits=20&wait=20")
    service.take_turns()
    began = time.monotonic()
    service.signal(signal.SIGTERM)
    assert waiting.getresponse().status == 200
    waiting.close()
    assert service.stop() == 0
    assert time.monotonic() - began < 25  # else a worker was killed, after 40 s, because a stream held it up
    idle.close()
    streaming.close()


def test_ctrl_c_is_a_clean_end_too(start: Start) -> None:
    service = start()
    service.signal(signal.SIGINT)
    assert service.stop() == 0
    assert "Traceback" not in service.log()


def test_a_port_that_is_taken(service: Service, start: Start) -> None:
    done = headgate("serve", "--port", str(service.port), folder=service.folder)
    assert done.returncode == 1 and "in use" in done.stderr
    assert service.check("still-there").status == 200


def test_environment_and_command_line(start: Start) -> None:
    service = start(environment={"HEADGATE_STORE": "memory://", "HEADGATE_PORT": "1", "HEADGATE_LOG_FORMAT": "json"})
    assert service.check("a").status == 200  # the port of the command line
    service.reset("a")
    line = service.log().splitlines()[-1]
    assert json.loads(line)["message"].startswith("Reset of key: #")


def test_the_banner(start: Start) -> None:
    service = start("--workers", "2", "--host", "0.0.0.0", config="[rules.login]\nquotas = '5/minute'\n")
    text = service.log()
    assert f"http://0.0.0.0:{service.port}/" in text and "memory://" in text and "login" in text
    assert "no token is set" in text and "shared by the workers" in text
