"""Rules that limit concurrency: slots on lease, exact, safe to ask for again, and free again when a client dies."""

import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headgate.coordination.states.semaphore import SEMAPHORE
from headgate.service.concurrency_rules import SlotReply, refuse_slots_apart
from headgate.service.files import Sources
from headgate.service.settings import BadFile, RuleSettings, Settings
from headgate.service.slots import retry_seconds
from tests.service.conftest import Start
from tests.support.proxy import FaultyProxy
from tests.support.resp import RespSocket, command
from tests.support.servers import Server
from tests.support.service import API, Answer, Service, eventually, headgate

RULES = """
trusted_proxies = ["127.0.0.0/8"]

[rules.uploads]
concurrency = 3
overrides = { vip = 5 }
exempt = ["monitoring"]

[rules.crowd]
concurrency = 20

[rules.short]
concurrency = 1
lease = 2

[rules.pair]
concurrency = 2
key = ["address", "header:X-Tenant"]

[rules.trial]
concurrency = 1
shadow = true

[rules.login]
quotas = "5/hour"
"""


@pytest.fixture(scope="module")
def slots() -> Iterator[Service]:
    """A service on memory with both ports; tests take keys of their own."""
    started = Service("--resp-port", "0", config=RULES)
    yield started
    started.forget()


@pytest.fixture
def client(slots: Service) -> Iterator[RespSocket]:
    with RespSocket(slots) as made:
        yield made


def acquire(service: Service, key: str | None, rule: str = "uploads", **query: Any) -> Answer:
    given = {} if key is None else {"key": key}
    return service.ask("POST", f"{API}/acquire", {"rule": rule, **given, **query})


def renew(service: Service, key: str, lease: str, rule: str = "uploads") -> Answer:
    return service.ask("POST", f"{API}/renew", {"rule": rule, "key": key, "lease": lease})


def release(service: Service, key: str, lease: str, rule: str = "uploads", method: str = "POST") -> Answer:
    return service.ask(method, f"{API}/release", {"rule": rule, "key": key, "lease": lease})


def in_use(service: Service, key: str, rule: str = "uploads") -> int:
    found: int = service.remaining(key, rule=rule).json["inUse"]
    return found


# ------------------------------------------------------------------------------------------------------- one service


def test_slots(slots: Service, key: str) -> None:
    """Three slots are taken, the fourth client is refused until one is released."""
    first = acquire(slots, key)
    lease = first.json.pop("lease")
    assert first.status == 200 and first.headers["cache-control"] == "no-store"
    assert first.headers["x-ratelimit-limit"] == "3" and first.headers["x-ratelimit-remaining"] == "2"
    assert first.json == {
        "allowed": True,
        "key": key,
        "limit": 3,
        "remaining": 2,
        "inUse": 1,
        "lease": lease,
        "expiresInSeconds": 30,
        "retryAfterSeconds": 0,
        "message": "Slot acquired",
        "rule": "uploads",
    }
    assert acquire(slots, key, permits=2).json["remaining"] == 0
    denied = acquire(slots, key)
    assert denied.status == 429 and "lease" not in denied.json and not denied.json["allowed"]
    assert denied.json["message"] == "Concurrency limit reached"
    assert 1 <= int(denied.headers["retry-after"]) == denied.json["retryAfterSeconds"] <= 30
    assert renew(slots, key, lease).json == {
        "renewed": True,
        "key": key,
        "lease": lease,
        "expiresInSeconds": 30,
        "message": "Lease renewed",
        "rule": "uploads",
    }
    assert release(slots, key, lease).json["released"] is True
    assert release(slots, key, lease, method="DELETE").json["released"] is True, "a release may be repeated"
    assert acquire(slots, key).status == 200
    assert in_use(slots, key) == 3


def test_the_body(slots: Service, key: str) -> None:
    """The parameters may be a JSON object, or be in both, but none of them twice."""
    body = {"rule": "uploads", "key": key, "lease": "a", "permits": 2}
    assert slots.ask("POST", f"{API}/acquire", body=body).json["inUse"] == 2
    assert slots.ask("POST", f"{API}/renew", {"rule": "uploads"}, {"key": key, "lease": "a"}).status == 200
    twice = slots.ask("POST", f"{API}/release", {"rule": "uploads"}, {"rule": "uploads", "lease": "a"})
    assert twice.status == 400 and "rule is in the query and in the body" in twice.problem
    assert slots.ask("POST", f"{API}/release", body={"rule": "uploads", "key": key, "lease": "a"}).json["released"]


def test_an_id_takes_one_slot(slots: Service, key: str) -> None:
    """An acquire that is sent again with its id takes no second slot, also when the first answer was never read."""
    with socket.create_connection(("127.0.0.1", slots.port), timeout=30) as connection:
        query = f"rule=uploads&key={key}&lease=job-1"
        connection.sendall(f"POST {API}/acquire?{query} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode())
        eventually(lambda: in_use(slots, key) == 1, "the slot")
    for _ in range(3):
        assert acquire(slots, key, lease="job-1").json["inUse"] == 1
    assert release(slots, key, "job-1").json["released"]
    late = acquire(slots, key, lease="job-1")
    assert late.status == 409 and "choose a new id for each" in late.problem
    assert in_use(slots, key) == 0


def test_remaining_and_reset(slots: Service, key: str) -> None:
    """Remaining takes no slot; reset frees all, and their leases are gone."""
    for lease in "abc":
        acquire(slots, key, lease=lease)
    found = slots.remaining(key, rule="uploads")
    assert found.status == 200 and "retry-after" not in found.headers
    assert not found.json["allowed"] and found.json["remaining"] == 0 and found.json["inUse"] == 3
    assert slots.remaining(key, rule="uploads", permits=0).json["allowed"]
    assert slots.reset(key, rule="uploads").json["remaining"] == 3
    assert in_use(slots, key) == 0
    assert renew(slots, key, "a").status == 404 and not release(slots, key, "b").json["released"]
    assert "rule: uploads, algorithm: CONCURRENCY" in slots.log()


def test_the_wrong_door(slots: Service, key: str) -> None:
    """A check of such a rule names acquire, and an acquire from another rule names check."""
    batch = slots.ask("POST", f"{API}/check/batch", body=[{"rule": "uploads", "key": key}])
    for answer in (slots.check(key, rule="uploads"), slots.get(f"{API}/forward/pair"), batch):
        assert answer.status == 400 and "POST /api/v1/rate-limit/acquire" in answer.problem
    wrong = acquire(slots, key, "login")
    assert wrong.status == 400 and "spend from it with /api/v1/rate-limit/check" in wrong.problem
    assert "Rules with concurrency are: uploads, crowd" in wrong.problem
    assert "unknown rule 'nope'; rules with concurrency are: uploads" in acquire(slots, key, "nope").problem
    missing = slots.ask("POST", f"{API}/acquire", {"key": key})
    assert missing.status == 400 and "give rule=NAME" in missing.problem
    assert slots.get(f"{API}/acquire", {"rule": "uploads"}).status == 405


BAD_LEASES = ["", " ", "a" * 129, "a b", "line\nend", "\x00", "ключ", "\x7f"]


@pytest.mark.parametrize("lease", BAD_LEASES)
def test_bad_leases(slots: Service, client: RespSocket, key: str, lease: str) -> None:
    """An id that cannot be used is a 400 that says what can, at every door, and takes nothing."""
    for answer in (acquire(slots, key, lease=lease), renew(slots, key, lease), release(slots, key, lease)):
        assert answer.status == 400 and "lease must be 1 to 128 printable ASCII" in answer.problem
    sent = slots.ask("POST", f"{API}/acquire", body={"rule": "uploads", "key": key, "lease": lease})
    assert sent.status == 400 and "lease must be 1 to 128 printable ASCII" in sent.problem
    for name in ("ACQUIRE", "RENEW", "RELEASE"):
        assert "lease must be 1 to 128 printable ASCII" in client.ask(f"HEADGATE.{name}", "uploads", key, lease)
    assert in_use(slots, key) == 0


def test_bad_requests(slots: Service, key: str) -> None:
    """Everything else that is wrong is a 400 with the reason, too."""
    table = {
        "rule=uploads&permits=0": "permits must be a whole number of at least 1",
        "rule=uploads&permits=4": "permits must be at most 3",
        "rule=uploads&permits=x": "permits must be a whole number such as 1",
        "rule=uploads&lease=a&lease=b": "lease",
        "rule=uploads&algorithm=GCRA": "unknown parameter 'algorithm'",
        "rule=uploads&key=": "key is empty",
        "rule=uploads&key=" + "k" * 257: "at most 256 are allowed",
        "rule=pair": "needs the header x-tenant",
    }
    for query, why in table.items():
        found = slots.ask("POST", f"{API}/acquire", query)
        assert found.status == 400 and why in found.problem, query
    for path in ("renew", "release"):
        assert "got none" in slots.ask("POST", f"{API}/{path}", {"rule": "uploads", "key": key}).problem
    for body in (b"[]", b"{", b'{"rule":1}', b'{"rule":"uploads","lease":5}', b'{"rule":"uploads","permits":1.5}'):
        sent = slots.ask("POST", f"{API}/acquire", body=body, headers={"content-type": "application/json"})
        assert sent.status == 400 and '"lease": "job-4711"' in sent.problem
    assert "Traceback" not in slots.log()


def test_keys(slots: Service) -> None:
    """The key is found as for a check: the client's address behind trusted proxies, and the parts that a rule lists."""
    headers = {"x-forwarded-for": "203.0.113.9"}
    assert slots.ask("POST", f"{API}/acquire", {"rule": "uploads"}, headers=headers).json["key"] == "203.0.113.9"
    for tenant in ("a", "a", "b"):
        found = slots.ask("POST", f"{API}/acquire", {"rule": "pair"}, headers={**headers, "x-tenant": tenant})
        assert found.json["key"] == f"203.0.113.9|{tenant}" and found.status == 200
    full = slots.ask("POST", f"{API}/acquire", {"rule": "pair"}, headers={**headers, "x-tenant": "a"})
    assert full.status == 429
    assert slots.reset("203.0.113.9|a", rule="pair").json["remaining"] == 2
    for bad, why in (("a\x00|b", "control character"), ("a|" + "b" * 300, "bytes")):
        found = slots.reset(bad, rule="pair")
        assert found.status == 400 and why in found.problem


def test_overrides_exempt_and_shadow(slots: Service, key: str) -> None:
    """An override has its own number, an exempt key holds nothing, and a shadow rule counts and refuses none."""
    assert acquire(slots, "vip", permits=5).json["limit"] == 5
    for _ in range(5):
        found = acquire(slots, "monitoring")
        assert found.json["exempt"] and found.json["inUse"] == 0
        assert renew(slots, "monitoring", found.json["lease"]).json["exempt"]
        assert release(slots, "monitoring", found.json["lease"]).json["released"]
    first, second = acquire(slots, key, "trial").json, acquire(slots, key, "trial").json
    assert "shadow" not in first and second["allowed"] and second["shadow"] and second["lease"]
    assert renew(slots, key, second["lease"], "trial").json["shadow"], "its work goes on"
    assert release(slots, key, second["lease"], "trial").json["released"] is False


def test_a_client_that_dies(slots: Service, key: str) -> None:
    """A slot that is not renewed comes free after its lease; one that is renewed stays taken."""
    lease = acquire(slots, key, "short").json["lease"]
    over = time.monotonic() + 2.5  # by then the lease would have ended
    while time.monotonic() < over:
        denied = acquire(slots, key, "short")
        assert denied.status == 429 and denied.headers["retry-after"] in ("1", "2")
        assert renew(slots, key, lease, "short").status == 200
        time.sleep(0.02)
    eventually(lambda: acquire(slots, key, "short").status == 200, "the slot to come free")
    gone = renew(slots, key, lease, "short")
    assert gone.status == 404 and "acquire a slot again" in gone.problem
    assert release(slots, key, lease, "short").json["released"] is False


def test_a_dropped_request(slots: Service, key: str) -> None:
    """A request that the server drops unanswered holds no slot, unless the client knows the id and may ask again."""

    def half_close(query: str) -> None:
        with socket.create_connection(("127.0.0.1", slots.port), timeout=30) as connection:
            head = f"POST {API}/acquire?rule=crowd&key={query} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
            connection.sendall(head.encode())
            connection.shutdown(socket.SHUT_WR)
            while found := connection.recv(4096):
                answers.append(found)

    answers: list[bytes] = []
    for _ in range(10):
        half_close(key)
    slots.take_turns()
    answered = sum(b"200 OK" in found for found in answers)
    eventually(lambda: in_use(slots, key, "crowd") <= answered + 1, "dropped requests to hold nothing", seconds=10)
    for number in range(10):
        half_close(f"{key}-known&lease=job-{number}")
    slots.take_turns()
    again = [acquire(slots, f"{key}-known", "crowd", lease=f"job-{number}").status for number in range(10)]
    assert again == [200] * 10 and in_use(slots, f"{key}-known", "crowd") == 10


def test_described(slots: Service, service: Service) -> None:
    """The rule is in the info, metrics count it as a kind of its own, and the document has acquire if there is one."""
    info = {rule["rule"]: rule for rule in slots.get("/actuator/info").json["rules"]}
    assert info["short"] == {"rule": "short", "algorithm": "CONCURRENCY", "concurrency": 1, "leaseSeconds": 2}
    before = slots.metrics()
    taken = [acquire(slots, "described").json.get("lease", "") for _ in range(5)]
    release(slots, "described", taken[0])

    def grown(name: str) -> float:
        return slots.metrics()[name] - before.get(name, 0)

    for name in ('rule_requests_total{rule="uploads",', "requests_total{"):
        for allowed, count in (("true", 3), ("false", 2)):
            assert grown(f'rate_limiter_{name}algorithm="CONCURRENCY",allowed="{allowed}"}}') == count
    assert grown('rate_limiter_released_total{rule="uploads"}') == 1
    paths = slots.get("/openapi.json").json["paths"]
    rule = next(one for one in paths[f"{API}/acquire"]["post"]["parameters"] if one["name"] == "rule")
    assert rule["required"] and "uploads" in rule["schema"]["enum"] and "login" not in rule["schema"]["enum"]
    assert f"{API}/acquire" not in service.get("/openapi.json").json["paths"]


# ------------------------------------------------------------------------------------------------ the Redis protocol


def test_commands(slots: Service, client: RespSocket, key: str) -> None:
    """The commands work on the same slots as HTTP."""
    *numbers, lease = client.ask("HEADGATE.ACQUIRE", "uploads", key)
    assert numbers == [1, 3, 2, 0, 30] and len(lease) == 24
    assert client.ask("headgate.acquire", "uploads", key, "mine", 2) == [1, 3, 0, 0, 30, "mine"]
    assert client.ask("HEADGATE.ACQUIRE", "uploads", key, "mine") == [1, 3, 0, 0, 30, "mine"]
    allowed, limit, free, retry, lasts, none = client.ask("HEADGATE.ACQUIRE", "uploads", key, "other")
    assert (allowed, limit, free, lasts, none) == (0, 3, 0, 0, None) and 1 <= retry <= 30
    assert client.ask("HEADGATE.PEEK", "uploads", key)[:3] == [0, 3, 0]
    assert acquire(slots, key).status == 429
    assert client.ask("HEADGATE.RENEW", "uploads", key, lease) == 30
    assert client.ask("HEADGATE.RENEW", "uploads", key, "nope") == 0
    assert release(slots, key, lease).json["released"]
    assert client.ask("HEADGATE.RELEASE", "uploads", key, "mine") == 1
    assert client.ask("HEADGATE.RELEASE", "uploads", key, "mine") == 1
    assert client.ask("HEADGATE.RELEASE", "uploads", key, "nope") == 0
    assert client.ask("HEADGATE.ACQUIRE", "uploads", key, "mine").startswith(
        "-ERR the lease 'mine' was released before"
    )
    client.ask("HEADGATE.ACQUIRE", "uploads", key)
    assert client.ask("HEADGATE.RESET", "uploads", key) == "OK"
    assert client.ask("HEADGATE.PEEK", "uploads", key, 3) == [1, 3, 3, 0, 0]


def test_bad_commands(slots: Service, client: RespSocket, key: str) -> None:
    """A command that cannot be answered is an error that says what would be right."""
    table: list[tuple[tuple[Any, ...], str]] = [
        (("ACQUIRE", "uploads"), "usage: HEADGATE.ACQUIRE rule key [lease [permits]]"),
        (("ACQUIRE", "uploads", key, "a", 1, 2), "usage: HEADGATE.ACQUIRE rule key [lease [permits]]"),
        (("RENEW", "uploads", key), "usage: HEADGATE.RENEW rule key lease"),
        (("RELEASE", "uploads", key, "a", "b"), "usage: HEADGATE.RELEASE rule key lease"),
        (("ACQUIRE", "uploads", key, "a", 0), "permits must be a whole number of at least 1"),
        (("ACQUIRE", "uploads", key, "a", 4), "permits must be at most 3"),
        (("ACQUIRE", "nope", key), "unknown rule 'nope'; rules with concurrency are: uploads"),
        (("RELEASE", "login", key, "a"), "the command HEADGATE.CHECK"),
        (("CHECK", "uploads", key), "the command HEADGATE.ACQUIRE"),
        (("ACQUIRE", "pair", key), "rule 'pair' needs the header x-tenant"),
        (("ACQUIRE", "uploads", key, b"\xff\xfe"), "lease must be 1 to 128 printable ASCII"),
    ]
    for (name, *words), why in table:
        found = client.ask(f"HEADGATE.{name}", *words)
        assert found.startswith("-ERR ") and why in found, found
    assert client.ask("HEADGATE.ACQUIRE", "uploads", b"\x00 odd", "a")[:3] == [1, 3, 2]  # such a key is digested
    assert client.ask("HEADGATE.RELEASE", "uploads", b"\x00 odd", "a") == 1
    names = client.ask("COMMAND", "LIST")
    assert {"headgate.acquire", "headgate.renew", "headgate.release"} <= set(names)
    assert "Traceback" not in slots.log()


def test_tokens(start: Start) -> None:
    """The calls that hold a slot need the scope check, a look read, and a reset admin, at both ports."""
    tokens = {"HEADGATE_CHECK_TOKEN": "c", "HEADGATE_READ_TOKEN": "r", "HEADGATE_ADMIN_TOKEN": "a"}
    service = start("--resp-port", "0", environment=tokens, config=RULES)
    query = {"rule": "uploads", "key": "k", "lease": "a"}
    look = {"rule": "uploads", "key": "k"}
    calls = [("POST", "acquire"), ("POST", "renew"), ("POST", "release"), ("GET", "remaining"), ("DELETE", "reset")]
    for token, expected in {"": "NNNNN", "r": "FFFyF", "c": "yyyyF", "a": "yyyyy"}.items():
        headers = {"authorization": f"Bearer {token}"} if token else {}
        found = ""
        for method, path in calls:
            given = look if path in ("remaining", "reset") else {**query, "lease": f"lease-{token}"}
            status = service.ask(method, f"{API}/{path}", given, headers=headers).status
            found += {401: "N", 403: "F"}.get(status, "y")
        assert found == expected
        with RespSocket(service) as client:
            if token:
                assert client.ask("AUTH", token) == "OK"
            words = [("ACQUIRE", f"resp-{token}"), ("RENEW", f"resp-{token}"), ("RELEASE", f"resp-{token}")]
            replies = [str(client.ask(f"HEADGATE.{name}", "uploads", "k", lease)) for name, lease in words]
            replies += [str(client.ask(f"HEADGATE.{name}", "uploads", "k")) for name in ("PEEK", "RESET")]
            assert "".join("N" if "NOAUTH" in one else "F" if "NOPERM" in one else "y" for one in replies) == expected


# ------------------------------------------------------------------------------------------------------ many clients


def at_once(services: list[Service], count: int, **query: Any) -> list[Answer]:
    """The answers to so many acquires at the same moment, in turn at each of *services*."""
    barrier = threading.Barrier(count)

    def ask(number: int) -> Answer:
        connection = services[number % len(services)].connect()
        connection.connect()
        barrier.wait()
        try:
            return Service.on(connection, "POST", f"{API}/acquire", query)
        finally:
            connection.close()

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(ask, range(count)))


def test_sixty_at_once(slots: Service, key: str) -> None:
    """Of 60 acquires at once 20 get a slot, each with a lease of its own, and after 20 releases 20 more."""
    for _ in range(2):
        answers = at_once([slots], 60, rule="crowd", key=key)
        leases = {answer.json["lease"] for answer in answers if answer.status == 200}
        assert len(leases) == 20 and [answer.status for answer in answers].count(429) == 40
        for lease in leases:
            assert release(slots, key, lease, "crowd").json["released"]


def test_two_instances(start: Start, redis_server: Server) -> None:
    """Two instances on one Redis, one of them with two workers, give 20 slots to 60 clients, and know each other's."""
    url = redis_server.patient_url
    one, other = start("--store", url, "--workers", "2", config=RULES), start("--store", url, config=RULES)
    eventually(lambda: one.metrics()["rate_limiter_workers"] == 2, "both workers")
    answers = at_once([one, other], 60, rule="crowd", key="k")
    assert sorted(answer.status for answer in answers) == [200] * 20 + [429] * 40
    assert not any("degraded" in answer.json for answer in answers)
    for number, answer in enumerate(answers):
        if answer.status == 200:  # released at the instance that did not grant it
            assert release([other, one][number % 2], "k", answer.json["lease"], "crowd").json["released"]
    assert in_use(one, "k", "crowd") == 0
    assert "semaphore:{crowd:k}:gone" in redis_server.names()
    assert acquire(one, "a{b}%", lease="x").status == 200
    assert release(other, "a{b}%", "x").json["released"], "the name of the key is the same in both"


def test_redis_lets_a_lease_end(start: Start, redis_server: Server) -> None:
    """A slot comes free by the server's clock, and Redis keeps nothing of it; over the Redis protocol too."""
    service = start("--store", redis_server.patient_url, "--resp-port", "0", config=RULES)
    with RespSocket(service) as client:
        assert client.ask("HEADGATE.ACQUIRE", "short", "k", "dies") == [1, 1, 0, 0, 2, "dies"]
        assert client.ask("HEADGATE.ACQUIRE", "short", "k", "next")[0] == 0
        eventually(lambda: client.ask("HEADGATE.ACQUIRE", "short", "k", "next")[0] == 1, "the slot to come free")
        assert client.ask("HEADGATE.RENEW", "short", "k", "dies") == 0
        assert client.ask("HEADGATE.RENEW", "short", "k", "next") == 2
        assert client.ask("HEADGATE.RESET", "short", "k") == "OK"
    with redis_server.client() as redis:
        assert 0 < redis.pttl(SEMAPHORE.keys("short:k")[2]) <= 60_000


def test_a_lost_reply(start: Start, redis_server: Server) -> None:
    """A reply of Redis that is lost on the way takes no second slot: the call is sent again with the same id."""
    with FaultyProxy(redis_server.port) as proxy:
        service = start("--store", f"{proxy.bare_url}?timeout=20", config=RULES)
        assert acquire(service, "warm-up").status == 200
        for number in range(1, 4):
            before = proxy.truncated
            proxy.truncate = 0
            found = acquire(service, "k")
            assert proxy.truncated == before + 1, "no reply was lost"
            assert found.status == 200 and found.json["inUse"] == number and "degraded" not in found.json
        proxy.truncate = 0
        assert release(service, "k", found.json["lease"]).json["released"]
        assert in_use(service, "k") == 2


def test_pipelines(start: Start, redis_server: Server) -> None:
    """Commands about one key in one pipeline are run in order, also where each needs a round trip."""
    service = start("--store", redis_server.patient_url, "--resp-port", "0", config=RULES)
    with RespSocket(service) as client:
        words = [
            ("ACQUIRE", "a"),
            ("ACQUIRE", "b"),
            ("RELEASE", "a"),
            ("ACQUIRE", "c"),
            ("RENEW", "c"),
            ("RELEASE", "b"),
        ]
        client.send(b"".join(command(f"HEADGATE.{name}", "short", "k", lease) for name, lease in words))
        replies = [client.reply() for _ in words]
        assert [one[0] if isinstance(one, list) else one for one in replies] == [1, 0, 1, 1, 2, 0]


# ------------------------------------------------------------------------------------------------- outages, reloads


def test_redis_goes_away(start: Start, mortal_server: Server) -> None:
    """Without Redis the policy of each rule answers; a lease that it gave is marked, and no key is in the log."""
    policies = ("allow", "deny", "local", "raise")
    rules = "".join(f"[rules.{policy}]\nconcurrency = 2\non_store_error = '{policy}'\n" for policy in policies)
    service = start("--store", f"{mortal_server.bare_url}?timeout=1", config=rules)
    held = {policy: acquire(service, "secret-key", policy).json["lease"] for policy in policies}
    mortal_server.kill()
    expected = {"allow": [200] * 3, "deny": [429] * 3, "local": [200, 200, 429], "raise": [503] * 3}
    for policy, statuses in expected.items():
        found = [acquire(service, "secret-key", policy, lease=f"out-{number}") for number in range(3)]
        assert [answer.status for answer in found] == statuses, policy
        assert all(answer.status == 503 or answer.json["degraded"] is True for answer in found)
        assert all("inUse" not in answer.json for answer in found)
        assert all(answer.status == 200 or int(answer.headers["retry-after"]) >= 1 for answer in found)
    after = {policy: renew(service, "secret-key", held[policy], policy).status for policy in policies}
    assert after == {"allow": 200, "deny": 503, "local": 404, "raise": 503}
    assert renew(service, "secret-key", "out-0", "local").json["degraded"]
    assert release(service, "secret-key", "out-1", "local").json["released"]
    nothing = release(service, "secret-key", held["allow"], "allow").json
    assert nothing["released"] is False and nothing["degraded"] and "when the lease ends" in nothing["message"]
    assert release(service, "secret-key", held["raise"], "raise").status == 503
    looks = {policy: service.remaining("secret-key", rule=policy).status for policy in policies}
    assert looks == {"allow": 200, "deny": 200, "local": 200, "raise": 503}
    assert {service.reset("secret-key", rule=policy).status for policy in ("allow", "deny", "raise")} == {503}
    lines = [line for line in service.log().splitlines() if "Error executing rate limit check for key: #" in line]
    assert [sum(f"rule: {policy}," in line for line in lines) for policy in policies] == [1, 1, 1, 1]
    assert "secret-key" not in service.log() and "Traceback" not in service.log()
    assert service.metrics()['rate_limiter_degraded_total{rule="allow",algorithm="CONCURRENCY"}'] >= 3
    mortal_server.restart()
    eventually(lambda: "degraded" not in acquire(service, "new", "allow", lease="b").json, "Redis to be used again")
    assert release(service, "secret-key", "out-0", "local").json["released"], "a local lease is known until its end"


@pytest.mark.parametrize(("policy", "status"), [("deny", 429), ("raise", 503)])
def test_redis_is_frozen(start: Start, mortal_server: Server, policy: str, status: int) -> None:
    """A slot that Redis gave too late, under an id that no client knows, does not stay taken until its lease ends."""
    rules = f"[rules.jobs]\nconcurrency = 2\nlease = 3600\non_store_error = '{policy}'\n"
    service = start("--store", f"{mortal_server.bare_url}?timeout=1", "--resp-port", "0", config=rules)
    assert acquire(service, "warm-up", "jobs").status == 200
    for door in ("http", "resp"):
        with RespSocket(service) as client:
            mortal_server.process.send_signal(signal.SIGSTOP)
            try:
                if door == "http":
                    assert acquire(service, door, "jobs").status == status
                else:
                    reply = client.ask("HEADGATE.ACQUIRE", "jobs", door)
                    assert reply[0] == 0 if status == 429 else "does not answer" in reply
            finally:
                mortal_server.process.send_signal(signal.SIGCONT)
        with mortal_server.client() as redis:
            leases, _, released, *_ = SEMAPHORE.keys(f"jobs:{door}")
            eventually(lambda gone=released: redis.zcard(gone) == 1, "the id to be released")
            assert redis.zcard(leases) == 0
        eventually(lambda: acquire(service, "after", "jobs", lease="a").status == 200, "Redis to be used again")
    assert "Traceback" not in service.log()


def test_reload(start: Start) -> None:
    """A reload keeps the leases; a lower limit grants nothing until enough were released, a higher one at once."""
    service = start(config="[rules.x]\nconcurrency = 4\nlease = 600\n")

    def change(limit: int, lease: int) -> None:
        service.config.write_text(f"[rules.x]\nconcurrency = {limit}\nlease = {lease}\n")
        service.signal(signal.SIGHUP)

        def is_new() -> bool:
            shown = service.get("/actuator/info").json["rules"][1]
            return bool((shown["concurrency"], shown["leaseSeconds"]) == (limit, lease))

        eventually(is_new, "the new rule")

    for lease in "abcd":
        assert acquire(service, "k", "x", lease=lease).status == 200
    change(2, 300)
    found = acquire(service, "k", "x")
    assert found.status == 429 and found.json["limit"] == 2 and found.json["remaining"] == 0
    assert found.json["inUse"] == 4 and 500 < found.json["retryAfterSeconds"] <= 600
    assert renew(service, "k", "a", "x").json["expiresInSeconds"] == 300
    for lease in "bc":
        assert release(service, "k", lease, "x").json["released"]
        assert acquire(service, "k", "x").status == 429
    assert release(service, "k", "d", "x").json["released"]
    assert acquire(service, "k", "x").status == 200
    change(3, 300)
    assert acquire(service, "k", "x").status == 200 and acquire(service, "k", "x").status == 429


@pytest.mark.parametrize(
    "wait, seconds", [(-1, 1), (0, 1), (1, 1), (1_000_000, 1), (1_000_001, 2), (86_400_000_000, 86_400)]
)
def test_retry_after(wait: int, seconds: int) -> None:
    """Retry-After is a whole second or more, and never before the first lease ends."""
    assert retry_seconds(SlotReply(0, 5, wait)) == seconds


def test_workers_apart() -> None:
    """Workers that could make no store of their own refuse a reload with concurrency: each would count for itself."""
    rules = {"x": RuleSettings(quotas="5/s"), "y": RuleSettings(concurrency=2)}
    with pytest.raises(ValueError, match=r"rules.y.concurrency: .*; restart it"):
        refuse_slots_apart(Settings(rules=rules))
    refuse_slots_apart(Settings(rules={"x": rules["x"]}))


def test_reload_needs_a_store_with_slots(start: Start, tmp_path: Path) -> None:
    """A reload that asks for concurrency where it is not possible changes nothing and says why."""
    service = start("--store", f"shared://{tmp_path / 'store'}", config="[rules.x]\nquotas='5/s'\n")
    service.config.write_text("[rules.x]\nquotas='6/s'\n[rules.y]\nconcurrency=2\n")
    service.signal(signal.SIGHUP)
    eventually(lambda: "the store shared:// keeps no slots" in service.log(), "the reason in the log")
    workers = start("--workers", "2", config="[rules.x]\nquotas='5/s'\n")
    assert "shared by the workers" in workers.log()
    workers.config.write_text("[rules.x]\nquotas='6/s'\n[rules.y]\nconcurrency=2\n")
    workers.signal(signal.SIGHUP)
    eventually(lambda: "2 workers cannot share slots in memory" in workers.log(), "the reason in the log")
    fewer = start(config="workers=2\n[rules.x]\nquotas='5/s'\n")
    fewer.config.write_text("workers=1\n[rules.x]\nquotas='6/s'\n[rules.y]\nconcurrency=2\n")
    fewer.signal(signal.SIGHUP)
    eventually(lambda: "runs on a shared store; restart it with a Redis" in fewer.log(), "the reason in the log")
    for running in (service, workers, fewer):
        assert running.check("k", rule="x").json["limit"] == 5


def test_memory_is_bounded(start: Start) -> None:
    """When as many keys hold slots as memory may have, on_store_error answers for others; ended leases make room."""
    service = start(config="max_keys = 2\n[rules.x]\nconcurrency=1\nlease=2\non_store_error='deny'\n")
    assert [acquire(service, key, "x").status for key in "abc"] == [200, 200, 429]
    assert acquire(service, "c", "x").json["degraded"]
    assert acquire(service, "a", "x").json["retryAfterSeconds"] <= 2, "known keys are decided"
    eventually(lambda: acquire(service, "c", "x").status == 200, "an ended lease to make room")


# ---------------------------------------------------------------------------------------------------------- settings

X = "[rules.x]\nconcurrency="
WRONG = {
    f"{X}5\nquotas='5/s'\n": ":3: rules.x.quotas: a rule has quotas or concurrency; write two rules",
    f"{X}5\nalgorithm='gcra'\n": ":3: rules.x.algorithm: an algorithm is for quotas",
    f"{X}5\nhybrid=true\n": "rules.x.hybrid: hybrid is for quotas",
    f"{X}5\ncost=2\n": "rules.x.cost: a cost is for quotas.* with permits=",
    f"{X}5\noverrides={{a='5/s'}}\n": "rules.x.overrides.a: .* is a number of slots, for example 50, got '5/s'",
    f"{X}0\n": ":2: rules.x.concurrency: expected `int` >= 1",
    f"{X}100001\n": "rules.x.concurrency: expected `int` <= 100000",
    f"{X}'many'\n": "rules.x.concurrency: .*write a number of slots, for example concurrency = 20",
    f"{X}true\n": "rules.x.concurrency: .*write a number of slots",
    f"{X}5\nlease=0\n": ":3: rules.x.lease: expected `int` >= 1",
    f"{X}5\nlease=86401\n": "rules.x.lease: expected `int` <= 86400",
    "[rules.default]\nconcurrency=5\n": "rules.default.concurrency: the default rule .* concurrency = 20",
    "[rules.x]\nquotas='5/s'\nlease=5\n": ":3: rules.x.lease: only a rule with concurrency has a lease",
    "[rules.x]\nquotas='5/s'\noverrides={a=5}\n": "rules.x.overrides.a: 5 is no quota; write one such as",
    "[rules.x]\nlease=5\n": "rules.x.lease: only a rule with concurrency",
    "[rules.x]\nshadow=true\n": "rules.x: a rule needs quotas, .* or concurrency = 20",
    f"workers=2\n{X}5\n": ":3: rules.x.concurrency: 2 workers cannot share slots in memory; set store to redis://",
    f"store='shared://a'\n{X}5\n": ":3: rules.x.concurrency: the store shared:// keeps no slots; set store to redis://",
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_settings(text: str, tmp_path: Path) -> None:
    """A rule that cannot work is refused with its path and what would be right."""
    file = tmp_path / "a.toml"
    file.write_text(text)
    with pytest.raises(BadFile, match=WRONG[text]):
        Sources(file, {}, {}).read()


def test_shown(tmp_path: Path) -> None:
    """`config show` and `config schema` know the fields; several workers are fine with a Redis."""
    (tmp_path / "a.toml").write_text(RULES + "[rules.z]\nconcurrency = 7\nlease = 60\n")
    shown = headgate("config", "show", "a.toml", folder=tmp_path)
    assert shown.returncode == 0 and '"concurrency": 7' in shown.stdout and '"lease": 60' in shown.stdout
    schema = headgate("config", "schema", folder=tmp_path).stdout
    assert '"concurrency"' in schema and '"lease"' in schema and '"maximum": 100000' in schema
    environment = {"HEADGATE_STORE": "redis://127.0.0.1:1", "HEADGATE_WORKERS": "4"}
    assert headgate("config", "validate", "a.toml", folder=tmp_path, environment=environment).returncode == 0
    refused = headgate("serve", "--port", "0", "--workers", "2", "--config", "a.toml", folder=tmp_path)
    assert refused.returncode == 5 and "2 workers cannot share slots in memory" in refused.stderr
