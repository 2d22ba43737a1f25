"""A service as the store of limiters in other processes: what it allows, what it refuses, and when it fails."""

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
import trustme

from headgate import AsyncLimiter, Limiter, Quota
from headgate.errors import PermitsExceedLimit, StoreUnavailable
from headgate.joint import JointCheck, try_acquire_all
from headgate.remote.commands import MAX_CHECKS, MAX_QUOTAS, parse_rule, rule_text
from headgate.remote.http import ResponseParser, parse_replies
from headgate.rule import POLICIES, Rule
from headgate.service.settings import BadSetting, check_store_of_rules, convert
from headgate.stores import ServiceStore
from tests.service.conftest import Start
from tests.support.clocks import until
from tests.support.pulse import Pulse
from tests.support.resp import RespListener, RespSocket, command, port_of
from tests.support.servers import Server, free_port
from tests.support.service import API, Service

PATIENT = "timeout=20&connect_timeout=20"
RULE = "token_bucket|5/30d|default"
TOKENS = {"HEADGATE_CHECK_TOKEN": "ask", "HEADGATE_READ_TOKEN": "look"}


def url_of(service: Service, options: str = PATIENT, token: str = "") -> str:
    return f"headgate://{f':{token}@' if token else ''}127.0.0.1:{port_of(service)}?{options}"


@pytest.fixture(scope="module")
def serving() -> Iterator[Service]:
    """One service on memory with a rule, tokens, and room for limits of clients; tests take names of their own."""
    started = Service(
        "--resp-port", "0", "--client-limits", "100", environment=TOKENS, config='[rules.login]\nquotas = "5/30d"\n'
    )
    yield started
    started.forget()


# ----------------------------------------------------------------------------------------------- rules as text

RULES = [
    Rule("5/minute"),
    Rule(["10/second burst 25", "1000/hour"], "leaky_bucket", "a name, with | bars"),
    Rule("7/61.000001s", "sliding_window", "사용자"),
    Rule("3/hour", "fixed_window", "x", "first"),
    Rule([Quota(n, 60.0 + n) for n in range(1, MAX_QUOTAS + 1)], "gcra"),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rules_as_text(rule: Rule) -> None:
    """A rule that is written and read is the same rule."""
    assert parse_rule(rule_text(rule)).label == rule.label


WRONG_RULES = {
    "": "unknown algorithm ''",
    "token_bucket||x": "cannot read the quota ''",
    "token_bucket|5/minute": "name is empty",
    "bucket|5/minute|x": "unknown algorithm 'bucket'",
    "token_bucket|5/fortnight|x": "unknown period 'fortnight'",
    "token_bucket|5/60s|x": "write the rule as 'token_bucket|5/minute|x'",
    "TOKEN_BUCKET|5/minute|x": "write the rule as 'token_bucket|5/minute|x'",
    "fixed_window|5/minute burst 9|x": "burst",
    "gcra|" + ",".join(["5/minute"] * (MAX_QUOTAS + 1)) + "|x": f"at most {MAX_QUOTAS} quotas",
}


@pytest.mark.parametrize("text", WRONG_RULES)
def test_wrong_rules(text: str) -> None:
    """What is no rule, or is written in another way, is refused: one rule has one text."""
    with pytest.raises(ValueError, match=WRONG_RULES[text].replace("|", r"\|")):
        parse_rule(text)


# ----------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[RespListener]:
    made = RespListener(tmp_path, client_limits=2)
    yield made
    made.close()


def ask(listener: RespListener, *words: object) -> Any:
    async def once() -> Any:
        socket = await listener.connect()
        try:
            return await socket.ask(*words)
        finally:
            socket.writer.close()

    return listener.run(once())


WRONG_COMMANDS: list[tuple[tuple[object, ...], str]] = [
    ((), "usage: HEADGATE.LIMIT take|peek"),
    (("take", RULE, "k"), "usage"),
    (("steal", RULE, "k", 1), "usage"),
    (("all",), "usage"),
    (("take", RULE, "k", 1, 1_000_000), "share must be a whole number from 0 to 999999"),
    (("book", RULE, "k", 1, "id"), "usage"),
    (("book", RULE, "k", 1, "", 5, 5), "id is empty"),
    (("book", RULE, "k", 1, "id", -5, 5), "within must be a whole number"),
    (("book", RULE.replace("token_bucket", "fixed_window"), "k", 1, "id", 5, 5), "needs a bucket"),
    (("all", RULE, "k"), "usage"),
    (("all", *[RULE, "k", 1] * (MAX_CHECKS + 1)), "words"),
    (("ready", "now"), "usage"),
    (("take", "nonsense", "k", 1), "unknown algorithm"),
    (("take", b"\xff", "k", 1), "invalid start byte"),
    (("take", RULE, "", 1), "key is empty"),
    (("take", RULE, "x" * 257, 1), "at most 256"),
    (("take", RULE, b"\xff", 1), "invalid start byte"),
    (("take", RULE, "k", 0), "permits must be a whole number from 1"),
    (("take", RULE, "k", -1), "permits must be"),
    (("take", RULE, "k", "1.5"), "permits must be"),
    (("take", RULE, "k", "9" * 30), "permits must be"),
    (("take", RULE, "k", 6), "at most 5, the capacity"),
    (("peek", RULE, "k", 6), "at most 5, the capacity"),
    (("all", RULE, "k", 3, RULE, "k", 3), "at most 5, the capacity"),
]


@pytest.mark.parametrize(("words", "why"), WRONG_COMMANDS)
def test_wrong_commands(words: tuple[object, ...], why: str, listener: RespListener) -> None:
    """Each says what was wrong, and nothing is spent."""
    reply = ask(listener, "HEADGATE.LIMIT", *words)
    assert reply.startswith("-ERR") and why in reply
    assert ask(listener, "HEADGATE.LIMIT", "peek", RULE, "k", 0) == [1, 5, 5, 0, 0]


def test_bounded(listener: RespListener) -> None:
    """There are as many rules as allowed, until one of them has not been used for so long that it does not matter."""
    first, second, third = (f"token_bucket|{quota}|x" for quota in ("5/30d", "7/5ms", "9/30d"))
    assert ask(listener, "HEADGATE.LIMIT", "take", first, "k", 1)[2] == 4
    assert ask(listener, "HEADGATE.LIMIT", "take", second, "k", 1)[0] == 1

    def makes_room() -> bool:
        reply = ask(listener, "HEADGATE.LIMIT", "take", third, "k", 1)
        assert reply[0] == 1 or "2 different limits of clients are in use, as many as client_limits" in reply
        return isinstance(reply, list)

    until(makes_room)
    assert ask(listener, "HEADGATE.LIMIT", "peek", first, "k", 0)[2] == 4, "one that counts is never forgotten"
    assert "in use" in ask(listener, "HEADGATE.LIMIT", "take", second, "k", 1)
    assert len(listener.app.store) == 2  # type: ignore[arg-type]  # a MemoryStore has a length


def test_not_allowed(tmp_path: Path) -> None:
    """Without the setting there is nothing to bring along, and the error says how to allow it."""
    listener = RespListener(tmp_path)
    for words in (("take", RULE, "k", 1), ("all", RULE, "k", 1), ("ready",)):
        assert "takes no limits from clients" in ask(listener, "HEADGATE.LIMIT", *words)
    listener.close()


def test_settings() -> None:
    assert convert({"client_limits": 7}).client_limits == 7
    with pytest.raises(BadSetting, match="client_limits"):
        convert({"client_limits": -1})
    with pytest.raises(BadSetting, match=r"client_limits_hybrid: leases save round trips .* set store to redis://"):
        check_store_of_rules(convert({"client_limits_hybrid": True}))
    with pytest.raises(BadSetting, match="the limits of clients have this name"):
        convert({"rules": {"headgate.limit": {"quotas": "5/minute"}}})


# ------------------------------------------------------------------------------------------------ a real service


def test_tokens(serving: Service) -> None:
    """The token is the URL's password. One without the scope is refused, and no message shows it."""
    with Limiter("5/30d", store=url_of(serving, token="ask"), name="tokens", on_store_error="raise") as limiter:
        assert limiter.try_acquire("k").remaining == 4
        assert limiter.health().healthy
    for token, why in (("", "Authentication required"), ("wrong", "invalid"), ("look", "scope 'check'")):
        with Limiter("5/30d", store=url_of(serving, token=token), name="tokens", on_store_error="raise") as limiter:
            with pytest.raises(StoreUnavailable, match=why):
                limiter.try_acquire("k")
            assert not token or token not in repr(limiter)


def test_apart_from_rules(serving: Service) -> None:
    """A limiter with the name and the quota of a rule in the file has a state of its own."""
    with RespSocket(serving) as client, Limiter("5/30d", store=url_of(serving, token="ask"), name="login") as limiter:
        assert client.ask("AUTH", "ask") == "OK"
        assert client.ask("HEADGATE.CHECK", "login", "k")[2] == 4
        assert limiter.try_acquire("k", 3).remaining == 2
        assert limiter.reset("k")
        assert client.ask("HEADGATE.CHECK", "login", "k")[2] == 3
    counted = serving.get("/metrics", headers={"authorization": "Bearer look"}).body.decode()
    assert 'rule="headgate.limit"' in counted


def test_256_tasks(serving: Service) -> None:
    """Calls that are awaited together are few round trips, and each is decided by itself."""

    async def main() -> None:
        async with AsyncLimiter("200/30d", store=url_of(serving, token="ask"), name="tasks") as limiter:
            await limiter.peek("k")
            executor = limiter.store.async_executor()  # type: ignore[attr-defined]  # of a store on a server
            before = executor.round_trips
            decisions = await asyncio.gather(*(limiter.try_acquire("k") for _ in range(256)))
            assert sum(map(bool, decisions)) == 200 and not any(decision.degraded for decision in decisions)
            assert executor.round_trips - before == 256 // 64

    asyncio.run(main())


def test_workers(start: Start) -> None:
    """Several workers of one service share every limit."""
    service = start("--resp-port", "0", "--client-limits", "10", "--workers", "2")
    limiters = [Limiter("50/30d", store=url_of(service), on_store_error="raise") for _ in range(8)]
    granted = [limiter.try_acquire("k").allowed for _ in range(10) for limiter in limiters]
    assert sum(granted) == 50 and not any(granted[50:])
    for limiter in limiters:
        limiter.close()


def test_from_leases(start: Start, redis_server: Server) -> None:
    """With `client_limits_hybrid` each service decides from leases; together they admit the limit and not one more."""
    fleet = [
        start("--store", redis_server.patient_url, "--resp-port", "0", "--client-limits", "10", *switch, config=config)
        for switch, config in ((["--client-limits-hybrid"], ""), ([], "client_limits_hybrid = true"))
    ]
    name = "from leases"
    limiters = [Limiter("400/30d", store=url_of(one), name=name, on_store_error="raise") for one in fleet]
    granted = 0

    def spend() -> bool:
        nonlocal granted
        granted += sum(limiter.try_acquire("k").allowed for _ in range(20) for limiter in limiters)
        return granted >= 400

    until(spend)
    assert not any(limiter.try_acquire("k").allowed for _ in range(50) for limiter in limiters) and granted == 400
    metric = 'rate_limiter_hybrid_permits_total{rule="headgate.limit",algorithm="TOKEN_BUCKET",decided="local"}'
    until(lambda: fleet[0].metrics().get(metric, 0) > 100)
    assert limiters[0].reset("k") and limiters[0].try_acquire("k", 30)
    assert limiters[0].refund("k", 30) and limiters[0].peek("k").allowed

    logs = [
        Limiter("5/30d", store=limiter.store, name=name, algorithm="sliding_window", on_store_error="raise")
        for limiter in limiters
    ]  # leases serve no logs: these ask Redis
    assert [log.try_acquire("k", 2).remaining for log in logs] == [3, 1]
    decisions = try_acquire_all([JointCheck(limiters[1], "j", 2), JointCheck(logs[1], "k", 2)])
    assert [bool(decision) for decision in decisions] == [True, False] and limiters[1].peek("j").remaining >= 399
    with pytest.raises(ValueError, match="floor= is not for limits that this service decides from leases"):
        limiters[0].try_acquire("f", floor=0.5)
    with pytest.raises(ValueError, match=r"book\(\) needs a service that keeps slots"):
        limiters[0].book("b")
    fleet[1].config.write_text("client_limits_hybrid = false")
    fleet[1].signal(signal.SIGHUP)
    until(lambda: fleet[1].metrics()['rate_limiter_config_reloads_total{result="success"}'] >= 1)
    assert limiters[1].try_acquire("f", floor=0.5).remaining == 399, "a reload ends the leases"
    for limiter in limiters:
        limiter.close()


@contextmanager
def timed(budget: float) -> Iterator[Callable[..., Any]]:
    """A function that makes calls; none takes longer than the *budget* in seconds, a busy machine allowed for."""
    slowest = 0.0

    def call(function: Callable[..., Any], *arguments: Any) -> Any:
        nonlocal slowest
        begun = time.monotonic()
        try:
            return function(*arguments)
        finally:
            slowest = max(slowest, time.monotonic() - begun)

    with Pulse() as pulse:
        yield call
    assert slowest <= budget + pulse.slack


def test_frozen_and_killed(start: Start) -> None:
    """A service that stands still, or is gone, is a policy within the budget; when it is back, it is found."""
    resp = free_port()
    arguments = ("--resp-port", str(resp), "--client-limits", "10")
    service = start(*arguments)
    url = f"headgate://127.0.0.1:{resp}?timeout=0.5"
    store = ServiceStore(url)  # one for all: its breaker waits for a silent service three times and not twelve
    limiters = {policy: Limiter("3/30d", store=store, name=policy, on_store_error=policy) for policy in POLICIES}

    def decided() -> bool:
        return not any(limiters[policy].try_acquire("other").degraded for policy in ("allow", "deny", "local"))

    until(decided)

    def see_policies() -> None:
        with timed(0.5) as call:
            for _ in range(5):
                assert call(limiters["allow"].try_acquire, "k").degraded
                assert not call(limiters["deny"].try_acquire, "k")
                with pytest.raises(StoreUnavailable):
                    call(limiters["raise"].try_acquire, "k")
            granted = [bool(call(limiters["local"].try_acquire, "k")) for _ in range(4)]
            assert sum(granted) <= 3

    stopped = [service.process.pid, *service.workers()]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    see_policies()
    assert not limiters["allow"].health().healthy
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    until(decided)
    for pid in service.workers():
        os.kill(pid, signal.SIGKILL)
    service.process.kill()
    service.process.wait()
    see_policies()
    start(*arguments)
    until(decided)
    assert limiters["raise"].try_acquire("k").remaining == 2
    store.close()


def test_its_store_is_down(start: Start, mortal_server: Server) -> None:
    """The client's policy answers when the store of the service does not; a grant of `local` is charged afterwards."""
    service = start("--resp-port", "0", "--client-limits", "10", "--store", mortal_server.bare_url + "?timeout=0.3")
    with (
        Limiter("50/300d", store=url_of(service), name="local", on_store_error="local") as local,
        Limiter("50/300d", store=url_of(service), name="deny", on_store_error="deny") as deny,
        Limiter("50/300d", store=url_of(service), name="local", on_store_error="raise") as honest,
    ):
        until(lambda: not deny.try_acquire("k").degraded)
        os.kill(mortal_server.process.pid, signal.SIGSTOP)
        until(lambda: local.store_health().state == "open" or not local.try_acquire("other"))
        until(lambda: deny.store_health().state == "open" or deny.try_acquire("k").allowed)
        assert sum(local.try_acquire("k").allowed for _ in range(20)) == 20
        health = deny.health()
        assert (health.healthy, health.reason) == (False, "down")
        os.kill(mortal_server.process.pid, signal.SIGCONT)
        until(lambda: not local.peek("k", 0).degraded)
        local.try_acquire("k")
        assert honest.peek("k", 0).remaining == 29
        until(lambda: not deny.peek("k", 0).degraded)


def test_tls(start: Start, tmp_path: Path) -> None:
    """headgates:// speaks TLS and checks the certificate."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    certificate = authority.issue_cert("localhost")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    settings = f"client_limits = 10\n[tls]\ncert = '{tmp_path / 'cert.pem'}'\nkey = '{tmp_path / 'key.pem'}'\n"
    service = start("--host", "localhost", "--resp-port", "0", config=settings)
    url = f"headgates://localhost:{port_of(service)}?{PATIENT}"
    with Limiter("5/30d", store=f"{url}&ssl_ca_certs={tmp_path / 'ca.pem'}", on_store_error="raise") as limiter:
        assert limiter.try_acquire("k").remaining == 4
    with Limiter("5/30d", store=url, on_store_error="raise") as limiter, pytest.raises(StoreUnavailable):
        limiter.try_acquire("k")


# ------------------------------------------------------------------------------------------------------------- URLs

SECRET = "geheim"


def test_urls() -> None:
    """The token is a password or stands alone, the port has a default, and options override the URL."""
    for url in (f"headgate://:{SECRET}@h?timeout=0.5", f"headgate://{SECRET}@h?timeout=0.5"):
        store = ServiceStore(url, max_connections=5)
        assert store.url is not None and store.url.options["password"] == SECRET
        assert (store.url.hosts[0].host, store.url.hosts[0].port) == ("h", 6380)
        assert (store.url.timeout, store.url.max_connections) == (0.5, 5)
        assert SECRET not in repr(store) and "headgate://***@h" in repr(store)
    found = ServiceStore("headgate://[::1]:7000")
    assert found.url is not None and (found.url.hosts[0].host, found.url.hosts[0].port) == ("::1", 7000)
    Limiter("5/second", store="headgate://h", max_keys=5, prefix="x").close()  # options of other stores are dropped
    with pytest.raises(TypeError, match="no option 'colour'"):
        ServiceStore("headgate://h", colour="red")  # type: ignore[call-arg]  # that is the point
    with pytest.raises(ValueError, match=f"at most {MAX_QUOTAS} quotas"):
        Limiter([Quota(5, 60.0 + n) for n in range(MAX_QUOTAS + 1)], store="headgate://h")


WRONG_URLS = {
    "headgate://": "the host is missing",
    "headgate://:geheim@": "the host is missing",
    "headgate://:geheim@h:many": "port must be",
    "headgate://:geheim@h:70000": "port must be",
    "headgate://:geheim@h/0": "nothing behind the port",
    "headgate://:geheim@a,b": "one host only",
    "headgate://:geheim@h?nonsense=1": "unknown parameter nonsense",
    "headgate://:geheim@h?timeout=0": "timeout must be more than 0",
    "headgate://:geheim@[h": "cannot read",
}


@pytest.mark.parametrize("url", WRONG_URLS)
def test_wrong_urls(url: str) -> None:
    """Each says what was wrong and how it is written, without the token."""
    with pytest.raises(ValueError, match=WRONG_URLS[url]) as caught:
        Limiter("5/second", store=url)
    assert SECRET not in str(caught.value) and "write headgate://:token@host:6380" in str(caught.value)


# --------------------------------------------------------------------------------------------------------- over HTTP


def http_url(service: Service, token: str = "ask") -> str:
    return f"headgate+http://{f':{token}@' if token else ''}127.0.0.1:{service.port}?{PATIENT}"


def test_http_is_the_same(serving: Service) -> None:
    """Limiters over HTTP and over the other port share every state; all calls and joint checks work."""
    quotas = ["50/30d", "90/300d"]
    with (
        Limiter(quotas, store=http_url(serving), name="both", on_store_error="raise") as over_http,
        Limiter(quotas, store=url_of(serving, token="ask"), name="both", on_store_error="raise") as other,
    ):
        assert over_http.try_acquire("k", 7).remaining == 43
        assert other.try_acquire("k", 7).remaining == 36
        assert over_http.refund("k", 4) and over_http.peek("k", 0).remaining == 40
        second = Limiter("5/30d", store=over_http.store, name="second", on_store_error="raise")
        assert all(try_acquire_all([JointCheck(over_http, "k", 10), JointCheck(second, "k", 5)]))
        refused = try_acquire_all([JointCheck(over_http, "k", 10), JointCheck(second, "k", 1)])
        assert [bool(decision) for decision in refused] == [True, False]
        assert other.peek("k", 0).remaining == 30
        assert over_http.reset("k") and other.peek("k", 0).remaining == 50
        health = over_http.health()
        assert (health.healthy, health.reason, health.role) == (True, "ok", "master") and health.version
        with pytest.raises(PermitsExceedLimit):
            over_http.try_acquire("k", 51)


def test_http_tokens(serving: Service) -> None:
    """Every call of a batch is refused, not only the first."""

    async def refused(token: str) -> list[Any]:
        store = http_url(serving, token)
        async with AsyncLimiter("5/30d", store=store, name="tokens over HTTP", on_store_error="raise") as limiter:
            calls = [limiter.try_acquire("k") for _ in range(70)]
            return await asyncio.gather(*calls, return_exceptions=True)

    for token, why in (("", "401: this needs a token"), ("wrong", "401: this needs"), ("look", "403: this token")):
        found = asyncio.run(refused(token))
        assert all(isinstance(error, StoreUnavailable) and why in str(error) for error in found), found


def test_http_batches(serving: Service) -> None:
    """256 tasks are four requests."""

    async def main() -> None:
        async with AsyncLimiter("200/30d", store=http_url(serving), name="tasks over HTTP") as limiter:
            await limiter.peek("k")
            executor = limiter.store.async_executor()  # type: ignore[attr-defined]  # of a store on a server
            before = executor.round_trips
            decisions = await asyncio.gather(*(limiter.try_acquire("k") for _ in range(256)))
            assert sum(map(bool, decisions)) == 200 and not any(decision.degraded for decision in decisions)
            assert executor.round_trips - before == 256 // 64

    asyncio.run(main())


def test_http_is_down(serving: Service) -> None:
    """A port that is closed, or that speaks another protocol, is a policy."""
    for port in (free_port(), port_of(serving)):
        url = f"headgate+http://127.0.0.1:{port}?timeout=5"
        with Limiter("5/30d", store=url, on_store_error="deny") as limiter:
            assert [limiter.try_acquire("k").degraded for _ in range(4)] == [True] * 4
            assert limiter.store_health().state == "open" and not limiter.health().healthy


WRONG_BODIES = {
    b"": "there is none",
    b"*1\r\n$4\r\nPI": "the last command is not complete",
    b"*1\r\n:5\r\n": "expected '\\$'",
    command("PING") * 129: "at most 128 commands",
}


@pytest.mark.parametrize("body", WRONG_BODIES, ids=lambda body: repr(body[:12]))
def test_wrong_bodies(body: bytes, serving: Service) -> None:
    """What is no batch of commands is a 400, and nothing of it is done."""
    found = serving.ask("POST", f"{API}/commands", body=body, headers={"authorization": "Bearer ask"})
    assert found.status == 400 and re.search(WRONG_BODIES[body], found.problem)


def test_described(serving: Service, service: Service) -> None:
    """The route is in the description of a service that allows limits of clients, and only there."""
    path = f"{API}/commands"
    assert "post" in serving.get("/openapi.json").json["paths"][path]
    assert path not in service.get("/openapi.json").json["paths"]
    refused = service.ask("POST", path, body=command("HEADGATE.LIMIT", "take", RULE, "k", 1))
    [error] = parse_replies(refused.body)
    assert "takes no limits from clients" in str(error)


def test_other_commands(serving: Service) -> None:
    """Over HTTP there is what the client needs, and no more."""
    body = command("PING") + command("HEADGATE.CHECK", "login", "k") + command("HEADGATE.LIMIT", "steal")
    found = serving.ask("POST", f"{API}/commands", body=body, headers={"authorization": "Bearer ask"})
    first, second, third = parse_replies(found.body)
    assert first == b"PONG" and "only HEADGATE.LIMIT" in str(second) and "usage" in str(third)


RESPONSE = b"HTTP/1.1 200 OK\r\nContent-Length: 31\r\n\r\n*2\r\n:1\r\n:-5\r\n+OK\r\n-UNSURE why\r\n"


def test_responses_in_pieces() -> None:
    """However the bytes come, the replies are the same."""
    for size in (1, 7, len(RESPONSE)):
        parser = ResponseParser()
        pieces = [RESPONSE[at : at + size] for at in range(0, len(RESPONSE), size)]
        *before, found = [parser.feed(piece) for piece in pieces]
        assert before == [None] * len(before) and isinstance(found, list)
        assert found[:2] == [[1, -5], b"OK"] and str(found[2]) == "UNSURE why"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"-ERR no HTTP\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n*1\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nnope\r\n",
        b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 2\r\n\r\n{}",
        b"x" * 70_000,
    ],
)
def test_wrong_responses(data: bytes) -> None:
    """What cannot be read is a lost connection, never an answer."""
    with pytest.raises(redis.ConnectionError):
        ResponseParser().feed(data)
