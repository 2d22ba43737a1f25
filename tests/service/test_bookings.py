"""Slots in time over HTTP and the Redis protocol: what `Limiter.book` gives."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.service.conftest import Start
from tests.support.resp import RespSocket
from tests.support.servers import Server
from tests.support.service import API, Answer, Service

RULES = """
[rules.mails]
quotas = "2/day burst 1"
exempt = ["monitoring"]

[rules.pairs]
quotas = ["2/day burst 2", "100/day"]
algorithm = "gcra"
cost = 2

[rules.trial]
quotas = "1/day"
shadow = true

[rules.windows]
quotas = "5/hour"
algorithm = "fixed_window"

[rules.uploads]
concurrency = 3
"""
HALF_A_DAY = 43_200


@pytest.fixture(scope="module")
def bookings() -> Iterator[Service]:
    """A service on memory with both ports; tests take keys of their own."""
    started = Service("--resp-port", "0", config=RULES)
    yield started
    started.forget()


def book(service: Service, key: str, rule: str = "mails", **query: Any) -> Answer:
    return service.ask("POST", f"{API}/book", {"rule": rule, "key": key, **query})


def cancel(service: Service, key: str, id: str, rule: str = "mails") -> Answer:
    return service.ask("DELETE", f"{API}/book", {"rule": rule, "key": key, "id": id})


def test_slots(bookings: Service, key: str) -> None:
    """Slots follow each other; an id gets its own again; what is too late is refused and takes nothing."""
    first = book(bookings, key, id="a")
    at = first.json["at"]
    assert first.status == 200 and first.headers["cache-control"] == "no-store"
    assert first.json == {
        "allowed": True,
        "key": key,
        "algorithm": "TOKEN_BUCKET",
        "limit": 1,
        "id": "a",
        "delaySeconds": 0.0,
        "retryAfterSeconds": 0,
        "message": "Slot booked",
        "rule": "mails",
        "at": at,
    }
    late = book(bookings, key, id="b")
    assert late.status == 429 and not late.json["allowed"] and late.json["message"] == "Rate limit exceeded"
    assert HALF_A_DAY - 1000 < int(late.headers["retry-after"]) == late.json["retryAfterSeconds"] <= HALF_A_DAY
    second = book(bookings, key, id="b", within=50_000).json
    again = book(bookings, key, id="b").json
    assert HALF_A_DAY - 100 < second["delaySeconds"] <= HALF_A_DAY and again["again"] and again["at"] == second["at"]
    assert second["at"] == pytest.approx(at + HALF_A_DAY, abs=0.001)
    assert bookings.check(key, rule="mails").status == 429
    assert cancel(bookings, key, "b").json == {
        "cancelled": True,
        "key": key,
        "id": "b",
        "message": "Slot given up",
        "rule": "mails",
    }
    assert not cancel(bookings, key, "b").json["cancelled"]
    assert not book(bookings, key, id="c", within=50_000).json.get("again")


def test_rules(bookings: Service, key: str) -> None:
    """Costs, exempt keys and shadow rules count as for checks; without an id one is made up."""
    assert book(bookings, key, "pairs").json["delaySeconds"] == 0
    assert book(bookings, key, "pairs", within=90_000).json["delaySeconds"] > 2 * HALF_A_DAY - 100
    assert len(book(bookings, key).json["id"]) == 32
    exempt = [book(bookings, "monitoring").json for _ in range(3)]
    assert all(answer["exempt"] and answer["delaySeconds"] == 0 for answer in exempt)
    shadow = [book(bookings, key, "trial", within=within).json for within in (1, 1, 100_000)]
    assert [answer["delaySeconds"] for answer in shadow] == [0, 0, 0]
    assert [answer.get("shadow", False) for answer in shadow] == [False, True, True]


def test_json(bookings: Service, key: str) -> None:
    """Parameters may be in the body; an id that has a slot of other permits is a conflict."""
    body = {"rule": "default", "key": key, "id": "x", "permits": 1, "within": 1e5, "grace": None}
    assert bookings.ask("POST", f"{API}/book", body=body).json["id"] == "x"
    other = bookings.ask("POST", f"{API}/book", body=body | {"permits": 2})
    assert other.status == 409 and "a slot of 1 permits, not 2" in other.problem


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ({"rule": "windows"}, "book() needs a bucket, this limiter is fixed_window"),
        ({"rule": "uploads"}, "limits concurrency"),
        ({"rule": "nope"}, "unknown rule"),
        ({"permits": 2}, "permits must be at most 1"),
        ({"permits": 0}, "at least 1"),
        ({"within": "soon"}, "within must be a number of seconds"),
        ({"within": -1}, "within must be a number of seconds"),
        ({"grace": "nan"}, "grace must be a number of seconds"),
        ({"id": "a\nb"}, "control character"),
        ({"wait": 1}, "unknown parameter 'wait'"),
    ],
    ids=str,
)
def test_bad_requests(bookings: Service, key: str, query: dict[str, Any], why: str) -> None:
    answer = book(bookings, key, **query)
    assert answer.status == 400 and why in answer.problem
    assert bookings.remaining(key, rule="mails").json["remaining"] == 1


def test_cancel_needs_an_id(bookings: Service, key: str) -> None:
    answer = bookings.ask("DELETE", f"{API}/book", {"rule": "mails", "key": key})
    assert answer.status == 400 and "give id=ID" in answer.problem


def test_commands(bookings: Service, key: str) -> None:
    """HEADGATE.BOOK has the same slots."""
    with RespSocket(bookings) as client:
        assert client.ask("HEADGATE.BOOK", "mails", key, "a") == [1, 1, 0, 0, 0]
        allowed, limit, left, retry, delay = client.ask("headgate.book", "mails", key, "b")
        assert (allowed, limit, left, delay) == (0, 1, 0, 0) and HALF_A_DAY - 1000 < retry <= HALF_A_DAY
        book(bookings, key, id="b", within=50_000)
        *_, delay = client.ask("HEADGATE.BOOK", "mails", key, "b", 1)
        assert HALF_A_DAY - 100 < delay / 1000 <= HALF_A_DAY
        assert "usage: HEADGATE.BOOK rule key id [permits]" in client.ask("HEADGATE.BOOK", "mails", key)
        assert "needs a bucket" in client.ask("HEADGATE.BOOK", "windows", key, "a")


def test_on_redis(start: Start, redis_server: Server) -> None:
    """Slots of the service are those of the library on the same Redis."""
    service = start("--store", redis_server.url, config=RULES)
    assert book(service, "k", id="a").json["delaySeconds"] == 0
    with RespSocket(start("--store", redis_server.url, "--resp-port", "0", config=RULES)) as client:
        assert client.ask("HEADGATE.BOOK", "mails", "k", "a") == [1, 1, 0, 0, 0]
        assert client.ask("HEADGATE.BOOK", "mails", "k", "b")[0] == 0
    assert cancel(service, "k", "a").json["cancelled"]
    assert book(service, "k", id="b").json["delaySeconds"] == 0
