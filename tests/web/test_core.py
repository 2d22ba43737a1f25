"""One request against its limits: exact, all or nothing, one decision; what the client is told; keys that are reset."""

import asyncio
import logging
import time
from typing import Any
from unittest.mock import patch

import pytest

from headgate import Decision, Quota
from headgate.stores import MemoryStore
from headgate.testing import ManualClock
from headgate.web.headers import RawXHeaders, XHeaders
from headgate.web.limit import SetupError
from tests.support.door import CoreLimits, Door, Request
from tests.support.forged import FORGED
from tests.support.servers import Server


def user(request: Request) -> Any:
    return request.user


# ------------------------------------------------------------------------------------------------------- exactness


@pytest.mark.parametrize("store", ["memory://", pytest.param("redis", marks=pytest.mark.server)])
def test_exact(door: Door, store: str, request: pytest.FixtureRequest) -> None:
    """60 requests at once against 20 an hour: exactly 20."""
    url = request.getfixturevalue("redis_url") if store == "redis" else store
    assert door.admitted_at_once(door.limits(store=url).limit("20/hour"), times=60) == 20


@pytest.mark.parametrize("store", ["memory://", pytest.param("redis", marks=pytest.mark.server)])
def test_exact_by_several_subjects(door: Door, store: str, request: pytest.FixtureRequest) -> None:
    """Also where each request asks two subjects and two limits."""
    url = request.getfixturevalue("redis_url") if store == "redis" else store
    limits = door.limits(store=url)
    both = [limits.limit("20/hour", key=[user, "address"]), limits.limit("50/hour", scope="all")]
    assert door.admitted_at_once(both, times=60, user="a") == 20
    assert door.get(limits.limit("50/hour", scope="all")).remaining == 29


def test_one_round_trip(door: Door, redis_server: Server) -> None:
    """Whatever the number of limits and of subjects: one command for a decision."""
    limits = door.limits(store=redis_server.url)
    several = [
        limits.limit("9/hour"),
        limits.limit(["20/hour", "90/day"], scope="api", key=["address", user]),
        limits.limit("50/hour", scope="all", algorithm="sliding_window"),
    ]
    door.get(several, user="a")  # connects, and loads the script
    before = {name: redis_server.calls(name) for name in ("evalsha", "eval")}
    assert [door.get(several, user="a").remaining for _ in range(8)] == [7, 6, 5, 4, 3, 2, 1, 0]
    assert not door.get(several, user="a")
    assert {name: redis_server.calls(name) - before[name] for name in before} == {"evalsha": 9, "eval": 0}


# -------------------------------------------------------------------------------------------------- several limits


def test_limits_are_all_or_nothing(door: Door) -> None:
    """A request that one limit refuses spends nothing of the others, whether they are met at once or in turn."""
    limits = door.limits()
    wide, narrow = limits.limit("9/hour", scope="wide"), limits.limit("2/hour", scope="narrow")
    assert door.admitted([wide, narrow], times=4) == 2
    assert door.admitted(wide, narrow, times=4) == 0
    assert door.get(wide).remaining == 6


def test_the_tightest_limit_is_told(door: Door) -> None:
    """The headers are those of the limit with the least left, or of the one that refuses for the longest time."""
    limits = door.limits(clock=ManualClock())
    day, hour = limits.limit("100/day", scope="day"), limits.limit("3/hour", scope="hour")
    for order in ([day, hour], [hour, day]):
        answer = door.get(order)
        assert answer.headers["x-ratelimit-limit"] == "3"
    assert door.get(day, hour).remaining == 0
    denied = door.get([hour, day])
    assert not denied and denied.headers["x-ratelimit-limit"] == "3" and denied.headers["retry-after"] == "1200"


def test_two_refusals(door: Door) -> None:
    """Retry-After is that of the longer one: earlier the request would be refused again."""
    limits = door.limits(clock=ManualClock())
    short, long = limits.limit("1/minute", scope="short"), limits.limit("1/hour", scope="long")
    assert door.get([short, long])
    for order in ([short, long], [long, short]):
        assert door.get(order).headers["retry-after"] == "3600"


def test_default_is_one_allowance(door: Door) -> None:
    limits = door.limits(default="3/hour")
    default = limits.default
    assert default is not None
    assert [door.admitted(default, times=1, route=route) for route in ("GET /a", "", "POST /b", "GET /a")] == [
        1,
        1,
        1,
        0,
    ]


def test_disabled(door: Door) -> None:
    """Nothing is limited, and nothing is told; it may be switched at any time."""
    limits = door.limits(enabled=False)
    limit = limits.limit("2/hour")
    answers = [door.get(limit) for _ in range(3)]
    assert all(answers) and not any(answer.headers for answer in answers)
    limits.enabled = True
    assert door.admitted(limit, times=5) == 2


# -------------------------------------------------------------------------------------------------------- headers

STYLES: list[tuple[Any, dict[str, str]]] = [
    ("x", {"x-ratelimit-limit": "3", "x-ratelimit-remaining": "2", "x-ratelimit-reset": "*"}),
    ("ietf", {"ratelimit-policy": '"search";q=3;w=3600', "ratelimit": '"search";r=2;t=1200'}),
    (None, {}),
]
STYLES.append(("both", STYLES[0][1] | STYLES[1][1]))


@pytest.mark.parametrize(("style", "expected"), STYLES, ids=lambda row: str(row)[:6])
def test_headers(door: Door, style: Any, expected: dict[str, str]) -> None:
    """Those of an admitted request and, with Retry-After, of a refused one; and their names are listed for CORS."""
    limits = door.limits(headers=style, clock=ManualClock())
    limit = limits.limit("3/hour", scope="search")
    headers = door.get(limit).headers
    assert headers == {name: headers[name] if value == "*" else value for name, value in expected.items()}
    door.admitted(limit, times=2)
    denied = door.get(limit)
    assert set(denied.headers) == {*expected, "retry-after", "content-type", "cache-control"}
    assert sorted(limits.header_names) == sorted({*expected, "retry-after"})


def test_reset_of_several_quotas(door: Door) -> None:
    """It is that of the quota whose limit the headers tell; of a denial it is the time to come back."""
    limits = door.limits(headers="both", clock=ManualClock())
    limit = limits.limit(["10/second", "1000/day"], scope="s")
    for remaining in (*range(9, -1, -1), 0):
        headers = door.get(limit).headers
        assert headers["ratelimit"] == f'"s.1";r={remaining};t=1'
        assert int(headers["x-ratelimit-reset"]) <= time.time() + 2
    bucket = limits.limit("10/hour", scope="one")
    door.admitted(bucket, times=10)
    assert door.get(bucket).headers["ratelimit"] == '"one";r=0;t=360'


def test_refusal(door: Door) -> None:
    answers = CoreLimits(clock=ManualClock())
    limit = answers.limit(["2/hour", "100/day"])
    door.admitted(limit, times=2)
    denied = door.get(limit)
    assert denied.status == 429
    assert denied.headers["content-type"] == "application/problem+json"
    assert denied.headers["cache-control"] == "no-store"
    assert denied.headers["retry-after"] == "1800"
    assert denied.body == {
        "type": "about:blank",
        "title": "Too Many Requests",
        "status": 429,
        "detail": "Rate limit exceeded (2/hour); retry in 1800 s",
        "retryAfterSeconds": 1800,
    }


def test_on_denied(door: Door) -> None:
    """The limit's own function answers, else the application's, else the 429."""

    def ours(request: Any, decision: Any) -> None: ...
    def its(request: Any, decision: Any) -> None: ...

    limits = door.limits(on_denied=ours)
    plain, own = limits.limit("1/hour", scope="plain"), limits.limit("1/hour", scope="own", on_denied=its)
    assert [limits.on_denied_of(door.get(limit).exchange) for limit in (plain, own)] == [ours, ours]
    assert [limits.on_denied_of(door.get(limit).exchange) for limit in (plain, own)] == [ours, its]


# ------------------------------------------------------------------------------------------------------ addresses


def test_address(door: Door) -> None:
    """Each address is a client; an IPv6 client is known by its network."""
    limit = door.limits().limit("2/hour")
    assert [door.admitted(limit, times=3, peer=peer) for peer in ("192.0.2.1", "192.0.2.2")] == [2, 2]
    assert door.admitted(limit, times=3, peer="2001:db8::1") == 2
    assert door.admitted(limit, times=3, peer="2001:db8::ffff:2") == 0
    assert door.admitted(limit, times=3, peer="::ffff:192.0.2.1") == 0
    assert door.admitted(limit, times=3, peer="testclient") == 2


def test_ipv6_prefix(door: Door) -> None:
    limit = door.limits(ipv6_prefix=128).limit("2/hour")
    assert [door.admitted(limit, times=3, peer=peer) for peer in ("2001:db8::1", "2001:db8::2")] == [2, 2]


@pytest.mark.parametrize("trusted", [[], ["10.0.0.0/8"]])
def test_forged_headers(door: Door, trusted: list[str]) -> None:
    """What a peer that is not trusted says of itself changes nothing."""
    limit = door.limits(trusted_proxies=trusted).limit("2/hour")
    assert sum(bool(door.get(limit, peer="203.0.113.7", headers=dict(headers))) for headers in FORGED) == 2


def test_trusted_proxy(door: Door) -> None:
    """Behind a trusted proxy the client is the address that it has seen, not what the client wrote before it."""
    limit = door.limits(trusted_proxies=["10.0.0.0/8"]).limit("2/hour")
    answers = [
        door.get(limit, peer="10.0.0.1", headers={"X-Forwarded-For": f"{forged}, 203.0.113.7"})
        for forged in ("1.1.1.1", "2.2.2.2", "3.3.3.3", "10.0.0.9")
    ]
    assert [bool(answer) for answer in answers] == [True, True, False, False]
    assert door.get(limit, peer="10.0.0.1", headers={"X-Forwarded-For": "203.0.113.8"})


def test_other_forwarded_headers_through_a_trusted_proxy(door: Door) -> None:
    """A proxy that writes X-Forwarded-For hands on what a client writes into the others: they do not count then."""
    limit = door.limits(trusted_proxies=["10.0.0.0/8"]).limit("2/hour")
    for name, value in [("X-Real-IP", "6.6.6.{}"), ("Forwarded", "for=6.6.6.{}")]:
        headers = {"X-Forwarded-For": "203.0.113.7"}
        answers = [door.get(limit, peer="10.0.0.1", headers=headers | {name: value.format(n)}) for n in range(3)]
    assert not any(answers)


def test_one_forwarded_header(door: Door) -> None:
    """`forwarded` names the header that the proxies write, and the others are not read."""
    limit = door.limits(trusted_proxies=["10.0.0.0/8"], forwarded=["X-Real-IP"]).limit("2/hour")
    forged = [{"X-Real-IP": "203.0.113.7", "X-Forwarded-For": f"6.6.6.{n}"} for n in range(4)]
    assert sum(bool(door.get(limit, peer="10.0.0.1", headers=headers)) for headers in forged) == 2


def test_unknown_address(door: Door) -> None:
    """A server on a Unix socket gives none: an error says what to do, and no bucket is shared by all clients."""
    with pytest.raises(SetupError, match=r"trusted_proxies=\['unix'\]"):
        door.get(door.limits().limit("2/hour"), peer="")
    limit = door.limits(trusted_proxies=["unix"]).limit("2/hour")
    clients = [{"X-Forwarded-For": f"6.6.6.6, {address}"} for address in ("192.0.2.1", "192.0.2.2")]
    assert [door.admitted(limit, times=3, peer="", headers=headers) for headers in clients] == [2, 2]
    with pytest.raises(SetupError, match=r"no address in x-forwarded-for or .* X-Forwarded-For \$proxy_add"):
        door.get(limit, peer="")


# ---------------------------------------------------------------------------------------------------------- reset


@pytest.mark.parametrize("store", ["memory://", pytest.param("redis", marks=pytest.mark.server)])
def test_reset(door: Door, store: str, request: pytest.FixtureRequest) -> None:
    """A key is forgotten in every limit, however it is kept: an address, a header's value, what a function gives."""
    url = request.getfixturevalue("redis_url") if store == "redis" else store
    limits = door.limits(store=url)
    asked: list[tuple[Any, Any, dict[str, Any]]] = [
        ("192.0.2.1", limits.limit("1/hour", scope="a"), {}),
        ("2001:db8::7", limits.limit("1/hour", scope="a"), {"peer": "2001:db8::1"}),
        ("k3y", limits.limit("1/hour", key="header:x-api-key"), {"headers": {"X-API-Key": "k3y"}}),
        ("192.0.2.9", limits.limit("1/hour", key="header:x-api-key"), {"peer": "192.0.2.9"}),
        ("u" * 300, limits.limit("1/hour", key=user), {"user": "u" * 300}),
        ("7", limits.limit(lambda request: "1/hour", key=user), {"user": 7}),
        (8, limits.limit(lambda request: "1/hour", key=user), {"user": 8}),
    ]
    for key, limit, sent in asked:
        assert door.admitted(limit, times=2, **sent) == 1
        assert door.reset(limits, key)
        assert door.admitted(limit, times=2, **sent) == 1, key
    for nothing in (None, "", " ", False, object()):
        with pytest.raises(SetupError, match=r"reset\(\) takes the key of a client"):
            door.reset(limits, nothing)


def test_reset_by_asyncio_run() -> None:
    """A script may run it as a coroutine; in plain code there is nothing to run."""
    limits = CoreLimits()
    reset: Any = limits.reset("k")
    assert reset and asyncio.run(reset) is True


def test_reset_knows_limits_before_their_first_request(door: Door, redis_url: str) -> None:
    """Another process has counted: a command that resets a key must reach what it counted."""
    options: dict[str, Any] = {"store": redis_url, "default": "1/hour"}
    here, there = door.limits(**options), door.limits(**options)
    for limits in (here, there):
        limits.limit("1/hour", scope="search")
    search = here.limit("1/hour", scope="search")
    assert here.default is not None
    assert [door.admitted(limit, times=2) for limit in (here.default, search)] == [1, 1]
    assert len(there.known_limiters()) == 2
    assert door.reset(there, "192.0.2.1")
    assert [door.admitted(limit, times=2) for limit in (here.default, search)] == [1, 1]


def test_limiters_of_a_route_are_known(door: Door) -> None:
    """A framework declares its routes, and their limits are known; a quota function gives none beforehand."""
    limits = door.limits()
    limit = limits.limit("1/hour", key=["address", user])
    assert [limiter.scope for limiter in limits.limiters_of(limit, "GET /a")] == ["GET /a", "GET /a"]
    assert limits.limiters_of(limits.limit(user), "GET /a") == []
    assert len(limits.known_limiters()) == 2


def test_name_tells_applications_apart(door: Door, redis_url: str) -> None:
    one, other = (door.limits(store=redis_url, name=name).limit("2/hour") for name in ("one", "other"))
    assert [door.admitted(limit, times=3) for limit in (one, other)] == [2, 2]


def test_a_store_that_is_handed_in_stays_open(door: Door) -> None:
    """And is shared: the same name and limits on one store are one allowance."""
    store = MemoryStore()
    assert [door.admitted(door.limits(store=store).limit("3/hour"), times=2) for _ in range(2)] == [2, 1]


# --------------------------------------------------------------------------------------------------------- shadow


def test_shadow(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    """It decides, logs what it would refuse, and refuses nothing; the headers do not speak of it."""
    limits = door.limits()
    shadow, real = limits.limit("2/hour", scope="new", shadow=True), limits.limit("5/hour", scope="old")
    with caplog.at_level(logging.INFO, "headgate.web"):
        answers = [door.get([shadow, real]) for _ in range(6)]
    assert [bool(answer) for answer in answers] == [True] * 5 + [False]
    assert [answer.headers["x-ratelimit-limit"] for answer in answers] == ["5"] * 6
    assert [record.getMessage() for record in caplog.records] == [
        "the shadow limit <Limit 2/hour by address> would refuse a request to GET /"
    ] * 4
    assert not door.get(shadow).headers


def test_shadow_spends_nothing_of_what_is_refused(door: Door) -> None:
    """A request that a real limit refuses goes back to the shadow, too; its subjects are all or nothing."""
    limits = door.limits()
    shadow = limits.limit("2/hour", scope="shadow", key=["address", user], shadow=True)
    same = limits.limit("2/hour", scope="shadow", key=["address", user])
    real = limits.limit("1/hour", scope="real")
    assert door.admitted([shadow, real], times=4, user="a") == 1
    assert door.get(same, user="a").remaining == 0  # one of the first request, and this one
    assert door.get(shadow, user="a")
    assert door.get(same, user="b", peer="192.0.2.2").remaining == 1


# -------------------------------------------------------------------------------------------------------- warnings


def test_proxy_that_is_not_trusted(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    """A private peer that sends the client's address is a proxy, most likely: one warning names the setting."""
    limit = door.limits().limit("9/hour")
    for _ in range(3):
        door.get(limit, peer="8.8.8.8", headers={"X-Forwarded-For": "192.0.2.1"})  # a client that lies
        for header in ({"X-Forwarded-For": "6.6.6.6, 10.20.0.7"}, {"Forwarded": 'for="10.20.0.7:4711"'}):
            door.get(limit, peer="10.20.0.7", headers=header)  # a client in a network of ours, found by the server
    assert not caplog.records
    for _ in range(3):
        door.get(limit, peer="10.1.2.3", headers={"X-Forwarded-For": "192.0.2.1"})
    [record] = caplog.records
    assert "trusted_proxies=['10.1.2.3']" in record.getMessage() and "x-forwarded-for" in record.getMessage()


def test_trusted_proxy_is_no_warning(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    limit = door.limits(trusted_proxies=["10.0.0.0/8"]).limit("9/hour")
    door.get(limit, peer="10.1.2.3", headers={"Forwarded": "for=192.0.2.1"})
    assert not caplog.records


WORKERS = [
    ({"WEB_CONCURRENCY": "4"}, ["app.py"], "WEB_CONCURRENCY is 4"),
    ({}, ["/bin/gunicorn", "-w", "4", "app:app"], "4 workers"),
    ({}, ["/bin/gunicorn", "-w4", "app:app"], "4 workers"),
    ({"GUNICORN_CMD_ARGS": "--workers=3"}, ["/bin/gunicorn", "app:app"], "3 workers"),
    ({}, ["/bin/uvicorn", "--workers", "2", "app:app"], "2 workers"),
    ({"WEB_CONCURRENCY": "1"}, ["/bin/uvicorn", "app:app"], ""),
    ({}, ["/bin/gunicorn", "-w", "1", "app:app"], ""),
    ({}, ["train.py", "-w", "4"], ""),
    ({"GRANIAN_WORKERS": "2"}, ["/bin/granian", "app:app"], "GRANIAN_WORKERS is 2"),
    ({"child": "yes"}, ["/bin/granian", "app:app"], ""),
    ({"child": "yes"}, ["/lib/hypercorn/__main__.py", "app:app"], ""),
    ({"child": "yes"}, ["/lib/hypercorn/__main__.py", "-w", "2", "app:app"], "2 workers"),
    ({"child": "yes"}, ["/bin/hypercorn", "-c", "hypercorn.toml", "app:app"], "may be one of several"),
    ({"child": "yes"}, ["run.py"], "may be one of several"),
]


@pytest.mark.parametrize(("environment", "arguments", "reason"), WORKERS)
def test_several_workers(
    environment: dict[str, str],
    arguments: list[str],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Memory counts in each process: one warning names shared:// and Redis when the application starts."""
    for name in ("WEB_CONCURRENCY", "GUNICORN_CMD_ARGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("multiprocessing.parent_process", lambda: environment.get("child"))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", arguments)
    monkeypatch.setattr("sys.orig_argv", ["python", *arguments])
    CoreLimits()
    CoreLimits(store="redis://localhost:1")
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == bool(reason)
    assert all(reason in text and "shared://" in text and "redis://" in text for text in told)
    assert all(text.startswith("RateLimits is on memory://") for text in told)


def test_server_with_several_processes(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    """A server may say so with each request: it is logged once."""
    limits = door.limits()
    for _ in range(3):
        door.get(limits.limit("9/hour"), multiprocess=True)
    [record] = caplog.records
    assert "several processes" in record.getMessage() and "redis://" in record.getMessage()


# ------------------------------------------------------------------------------------------------- what is read often


@pytest.mark.parametrize("quotas", [["100/minute"], ["10/second", "100/minute"]])
def test_headers_made_in_parts(quotas: list[str]) -> None:
    """Headers whose parts are kept are those that are made anew for each answer, whatever came before."""
    parsed = [Quota.parse(quota) for quota in quotas]
    kept, kept_raw = XHeaders(parsed), RawXHeaders(parsed)
    for made in (
        Decision(limit=100, remaining=99, reset_after=0.6),
        Decision(limit=100, remaining=98, reset_after=1.2),
        Decision(limit=100, remaining=0, reset_after=60.0),
        Decision(limit=10, remaining=9, reset_after=0.1),
        Decision(allowed=False, limit=100, remaining=0, reset_after=60.0, retry_after=600.0),
    ):
        earlier, told, raw = XHeaders(parsed).of(made), kept.of(made), kept_raw.of(made)
        later = XHeaders(parsed).of(made)
        names = ["x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset"]
        assert [name for name, _ in told] == [name.decode() for name, _ in raw] == names
        assert earlier[:2] == told[:2] == [(name.decode(), value.decode()) for name, value in raw[:2]]
        assert told[:2] == [(names[0], str(made.limit)), (names[1], str(made.remaining))]
        assert int(earlier[2][1]) <= int(told[2][1]) <= int(raw[2][1]) <= int(later[2][1])


def test_switched_off_by_a_mock() -> None:
    """`unittest.mock` deletes what it has replaced and sets it again: limits can be switched off so in a test."""
    limits = CoreLimits()
    with patch.object(limits, "enabled", False):
        assert limits.enabled is False
    assert limits.enabled is True
