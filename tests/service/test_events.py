"""Live events and the playground, as the page uses them."""

import http.client
import json
import time
from typing import Any

import pytest

from tests.service.conftest import Start
from tests.support.quotas import ALGORITHMS
from tests.support.service import Service, eventually


def events(service: Service, headers: dict[str, str] | None = None) -> Any:
    """The events of one stream, as they come."""
    connection: http.client.HTTPConnection = service.connect()
    connection.request("GET", "/live", headers=headers or {})
    answer = connection.getresponse()
    assert answer.status == 200 and answer.headers["content-type"] == "text/event-stream"
    try:
        while line := answer.readline():
            if line.startswith(b"data: "):
                yield json.loads(line[6:])
    finally:
        connection.close()


def row(event: Any, rule: str, algorithm: str) -> Any:
    return next(one for one in event["rules"] if (one["rule"], one["algorithm"]) == (rule, algorithm))


def test_events(start: Start) -> None:
    """An event has the counts since the last one."""
    service = start("--workers", "2")
    eventually(lambda: service.metrics()["rate_limiter_workers"] == 2, "both workers")
    stream = events(service)
    first = next(stream)
    assert row(first, "default", "GCRA")["allowed"] == 0
    for _ in range(4):
        service.check("k", algorithm="GCRA", permits=50)
    seen = [0, 0]
    for event in stream:
        one = row(event, "default", "GCRA")
        seen = [seen[0] + one["allowed"], seen[1] + one["denied"]]
        if sum(seen) == 4:
            break
    assert sum(seen) == 4
    assert 0 < event["latency"]["p50"] <= event["latency"]["p99"] <= 1
    assert event["store"]["state"] == "closed" and event["store"]["kind"] == "shared"
    assert event["version"] and event["uptime"] >= 0 and abs(event["at"] - time.time()) < 60
    after = next(stream)
    assert row(after, "default", "GCRA")["allowed"] == 0 and after["latency"] == {"p50": 0.0, "p99": 0.0}
    assert after["workers"] == 2


def test_denied_keys(start: Start) -> None:
    service = start(environment={"HEADGATE_ADMIN_TOKEN": "t"})
    service.check("greedy", permits=100)
    for _ in range(3):
        service.check("greedy", permits=100)
    for event in events(service, {"authorization": "Bearer t"}):
        if sum(one["denied"] for one in event["denied_keys"]) >= 3:  # a worker tells of them once a second
            break
    assert event["denied_keys"] == [{"key": "greedy", "rule": "default", "denied": 3}]
    assert "denied_keys" not in next(events(service))


@pytest.mark.usefixtures("within_a_minute")
@pytest.mark.parametrize("name", ALGORITHMS)
def test_playground(service: Service, key: str, name: str) -> None:
    """The playground denies at the right moment."""
    play = {"session": key, "algorithm": name.upper(), "quota": "3/minute", "permits": 1}
    left = [service.ask("POST", "/playground/check", body=play) for _ in range(4)]
    assert [answer.status for answer in left] == [200] * 4
    assert [answer.json["allowed"] for answer in left] == [True, True, True, False]
    assert [answer.json["remaining"] for answer in left] == [2, 1, 0, 0]
    last = left[-1].json
    assert last["limit"] == 3 and 0 < last["retryAfterSeconds"] <= 120 and last["resetAfterSeconds"] > 0
    assert abs(last["at"] - time.time()) < 60
    looked = service.get("/playground/peek", play)
    assert looked.status == 200 and looked.json["allowed"] is False
    other = service.get("/playground/peek", {**play, "session": key + "x", "permits": 0})
    assert other.json["remaining"] == 3


def test_playground_workers(start: Start, service: Service) -> None:
    """The playground of several workers says so."""
    play = {"session": "s", "quota": "3/minute"}
    assert "2 workers" in start("--workers", "2").ask("POST", "/playground/check", body=play).json["note"]
    assert "note" not in service.ask("POST", "/playground/check", body=play).json


@pytest.mark.parametrize(
    "change, says",
    [
        ({"quota": "lots"}, "100/minute"),
        ({"quota": "10/second burst 5", "algorithm": "FIXED_WINDOW"}, "burst"),
        ({"quota": "1000000/s"}, "too much to play with"),
        ({"algorithm": "MAGIC"}, "TOKEN_BUCKET"),
        ({"permits": 11}, "at most 10"),
        ({"permits": -1}, ">= 0"),
        ({"session": ""}, "length"),
        ({"session": "a" * 100}, "length"),
        ({"more": 1}, "more"),
    ],
)
def test_bad_plays(service: Service, change: dict[str, Any], says: str) -> None:
    play = {"session": "s", "algorithm": "TOKEN_BUCKET", "quota": "10/second", "permits": 1} | change
    answer = service.ask("POST", "/playground/check", body=play)
    assert answer.status == 400 and says in answer.problem
    if "permits" not in change:
        assert service.get("/playground/peek", play).status == 400


def test_playground_bounds(start: Start, key: str) -> None:
    """The playground is bounded, and apart from the real limits."""
    service = start()
    connection = service.connect()
    for i in range(1100):
        play = {"session": f"{key}-{i}", "quota": "3/minute"}
        assert service.on(connection, "POST", "/playground/check", body=play).status == 200
    connection.close()
    forgotten = service.get("/playground/peek", {"session": f"{key}-0", "quota": "3/minute", "permits": 0})
    assert forgotten.json["remaining"] == 3  # it made room
    assert service.metrics()["rate_limiter_keys"] <= 100
