"""The Redis protocol: CL.THROTTLE as redis-cell, the service's rules as commands, passwords, order, exactness."""

import hashlib
import threading
from pathlib import Path
from typing import Any

import pytest

from headgate.stores.memory import MemoryStore
from headgate.testing import ManualClock
from tests.service.conftest import Start
from tests.support.resp import RULES, RespListener, RespSocket, command
from tests.support.servers import Server, free_port
from tests.support.service import Service, eventually

# seconds to wait before, quantity, and what redis-cell answers: limited, limit, remaining, retry after, reset after
REDIS_CELL = [
    (0.0, 6, [1, 5, 5, -1, 0]),  # more than the limit is never granted
    (0.0, 1, [0, 5, 4, -1, 1]),
    (0.0, 1, [0, 5, 3, -1, 2]),
    (0.0, 1, [0, 5, 2, -1, 3]),
    (0.0, 1, [0, 5, 1, -1, 4]),
    (0.0, 1, [0, 5, 0, -1, 5]),
    (0.0, 1, [1, 5, 0, 1, 5]),
    (3.0, 1, [0, 5, 2, -1, 3]),
    (0.1, 1, [0, 5, 1, -1, 4]),
    (0.9, 1, [0, 5, 1, -1, 4]),
    (4.0, 1, [0, 5, 4, -1, 1]),
    (1.5, 1, [0, 5, 4, -1, 1]),
    (0.0, 0, [0, 5, 4, -1, 1]),  # a look
    (0.0, 2, [0, 5, 2, -1, 3]),
    (0.0, 5, [1, 5, 2, 3, 3]),
]


def test_redis_cell(tmp_path: Path) -> None:
    """CL.THROTTLE answers as redis-cell does, step by step, with a burst of 4 and one permit a second."""
    clock = ManualClock()
    listener = RespListener(tmp_path, MemoryStore(clock=clock))

    async def steps() -> list[list[int]]:
        client, found = await listener.connect(), []
        for seconds, quantity, _ in REDIS_CELL:
            clock.advance(seconds)
            found.append(await client.ask("CL.THROTTLE", "foo", 4, 1, 1, quantity))
        client.writer.close()
        return found

    try:
        assert listener.run(steps()) == [expected for _, _, expected in REDIS_CELL]
    finally:
        listener.close()


def test_the_example_of_redis_cell(client: RespSocket) -> None:
    """30 in 60 seconds with a burst of 15: the first of 16; a lone permit every two seconds is denied at once."""
    assert client.ask("CL.THROTTLE", "user123", 15, 30, 60, 1) == [0, 16, 15, -1, 2]
    assert client.ask("CL.THROTTLE", "other", 0, 1, 2) == [0, 1, 0, -1, 2]
    assert client.ask("CL.THROTTLE", "other", 0, 1, 2) == [1, 1, 0, 2, 2]


@pytest.mark.parametrize(
    "words, expected",
    [
        ((), "usage: CL.THROTTLE key max_burst count period [quantity]"),
        (("k", 1, 1, 1, 1, 1), "usage: CL.THROTTLE key max_burst count period [quantity]"),
        (("k", "x", 1, 1), "max_burst must be a whole number from 0 to 999999999, got 'x'"),
        (("k", -1, 1, 1), "max_burst must be a whole number from 0 to 999999999, got '-1'"),
        (("k", 1, 0, 1), "count and period must be at least 1: zero rates are not supported"),
        (("k", 1, 1, 0), "count and period must be at least 1: zero rates are not supported"),
        (("k", 1, 10**9 + 1, 1), "count must be a whole number from 0 to 1000000000, got '1000000001'"),
        (("k", 1, 1, "9" * 300), "period must be a whole number"),
        (("k", 1, 1, 1, -1), "quantity must be a whole number from 0 to 1000000000, got '-1'"),
        (("k", 999_999_999, 1, 316_224_000), "would take more than a century"),
    ],
)
def test_bad_numbers(client: RespSocket, words: tuple[object, ...], expected: str) -> None:
    """A number that cannot be used is named in the error, and the connection goes on."""
    found = client.ask("CL.THROTTLE", *words)
    assert found.startswith("-ERR ") and expected in found
    assert client.ask("PING") == "PONG"


def test_rules(resp_service: Service, client: RespSocket) -> None:
    """HEADGATE.CHECK, PEEK and RESET apply a rule as HTTP does, to the same state."""
    assert client.ask("HEADGATE.CHECK", "login", "ada", 2) == [1, 5, 3, 0, 3600]
    assert client.ask("HEADGATE.PEEK", "login", "ada", 5)[:3] == [0, 5, 3]
    assert resp_service.remaining("ada", rule="login").json["remaining"] == 3
    assert resp_service.check("ada", rule="login", permits=3).json["allowed"]
    allowed, limit, remaining, retry, reset = client.ask("headgate.check", "login", "ada")
    assert (allowed, limit, remaining) == (0, 5, 0) and 3500 < retry <= 3600 and 3500 < reset <= 3600
    assert client.ask("HEADGATE.RESET", "login", "ada") == "OK"
    assert client.ask("HEADGATE.PEEK", "login", "ada") == [1, 5, 5, 0, 0]
    assert client.ask("HEADGATE.CHECK", "login", "vip")[:3] == [1, 50, 49]
    assert client.ask("HEADGATE.CHECK", "login", "monitoring", 4) == [1, 5, 5, 0, 0]
    assert client.ask("HEADGATE.CHECK", "costly", "ada", 3)[:3] == [1, 10, 1]
    assert client.ask("HEADGATE.CHECK", "costly", "ada", 4) == (
        "-ERR permits must be at most 3: 4 at a cost of 3 each are 12, above the capacity of 10"
    )
    assert [client.ask("HEADGATE.CHECK", "trial", "ada")[0] for _ in range(3)] == [1, 1, 1]
    assert client.ask("HEADGATE.CHECK", "pair", "ada")[2] == 4
    assert resp_service.remaining("ada", rule="pair").json["key"] == "ada|127.0.0.1"
    assert resp_service.remaining("ada", rule="pair").json["remaining"] == 4
    assert client.ask("HEADGATE.CHECK", "tenant", "ada") == "-ERR rule 'tenant' needs the header x-tenant"
    assert client.ask("HEADGATE.CHECK", "nope", "ada").startswith("-ERR unknown rule 'nope'; known are default, login")
    assert client.ask("HEADGATE.CHECK", "login") == "-ERR usage: HEADGATE.CHECK rule key [permits]"
    assert client.ask("HEADGATE.CHECK", "login", "ada", 0).startswith("-ERR permits must be a whole number of at least")
    assert client.ask("HEADGATE.RESET", "login") == "-ERR usage: HEADGATE.RESET rule key"


def test_counted(resp_service: Service, client: RespSocket) -> None:
    """Checks are counted by rule and outcome, as those over HTTP are."""
    before = resp_service.metrics()
    for _ in range(3):
        client.ask("CL.THROTTLE", "counted", 1, 1, 3600)
    for _ in range(6):
        client.ask("HEADGATE.CHECK", "login", "counted")
    client.ask("HEADGATE.CHECK", "nope", "counted")

    def grown(name: str) -> float:
        return resp_service.metrics()[name] - before.get(name, 0)

    labels = 'rate_limiter_rule_requests_total{rule="%s",algorithm="%s",allowed="%s"}'
    assert grown(labels % ("cl.throttle", "GCRA", "true")) == 2
    assert grown(labels % ("cl.throttle", "GCRA", "false")) == 1
    assert grown(labels % ("login", "SLIDING_WINDOW", "true")) == 5
    assert grown(labels % ("login", "SLIDING_WINDOW", "false")) == 1
    assert grown("rate_limiter_problems_total") == 1


ODD_KEYS = [b"", b"a" * 257, b"a" * 258, b"\xff\xfe", b"line\r\nend", b"line\nend", b"\0"]


def test_odd_keys(client: RespSocket) -> None:
    """A key that is no text of 1 to 256 bytes is digested: it works, and is no other's."""
    for key in (*ODD_KEYS, "ключ", "a" * 256):
        assert client.ask("CL.THROTTLE", key, 0, 1, 3600)[0] == 0
    for key in ODD_KEYS:
        assert client.ask("CL.THROTTLE", key, 0, 1, 3600)[0] == 1


TOKENS = {"HEADGATE_CHECK_TOKEN": "c", "HEADGATE_READ_TOKEN": "r", "HEADGATE_ADMIN_TOKEN": "a"}
NOAUTH = "-NOAUTH Authentication required."


def test_joined_keys_that_are_too_long(resp_service: Service, client: RespSocket) -> None:
    """A key that is too long with its other parts is an error that says so, and not in the log."""
    for words in (("CHECK", "k" * 250), ("PEEK", "k" * 250), ("CHECK", "%" * 100)):
        assert "at most 256 are allowed" in str(client.ask(f"HEADGATE.{words[0]}", "pair", words[1]))
    assert "Traceback" not in resp_service.log() and "kkkk" not in resp_service.log()


def test_passwords(start: Start) -> None:
    """The tokens of the service are the passwords, with their scopes."""
    service = start("--resp-port", "0", environment=TOKENS, config=RULES)
    commands = [
        ("PING",),
        ("CL.THROTTLE", "k", 1, 1, 1),
        ("HEADGATE.CHECK", "login", "k"),
        ("HEADGATE.PEEK", "login", "k"),
        ("HEADGATE.RESET", "login", "k"),
    ]
    table = {"": "NNNNN", "r": "yPPyP", "c": "yyyyP", "a": "yyyyy"}
    for token, expected in table.items():
        with RespSocket(service) as client:
            if token:
                assert client.ask("AUTH", token) == "OK"
            found = [str(client.ask(*words)) for words in commands]
            assert ["N" if NOAUTH in one else "P" if "-NOPERM" in one else "y" for one in found] == list(expected)
    with RespSocket(service) as client:
        assert client.ask("AUTH", "wrong").startswith("-WRONGPASS")
        assert client.ask("HELLO", 3).startswith("-NOAUTH HELLO must be called")
        assert client.ask("HELLO", 3, "AUTH", "default", "wrong").startswith("-WRONGPASS")
        assert client.ask("PING") == NOAUTH
        assert client.ask("HELLO", 3, "AUTH", "default", "c", "SETNAME", "me")["proto"] == 3
        assert client.ask("CLIENT", "GETNAME") == "me"
        assert client.ask("AUTH", "any user", "a") == "OK"
        assert client.ask("HEADGATE.RESET", "login", "k") == "OK"
        assert client.ask("RESET") == "RESET"
        assert client.ask("PING") == NOAUTH


def test_a_token_that_goes(start: Start) -> None:
    """A connection whose token is no longer in the file must authenticate again."""
    token = "[[tokens]]\nscope = 'check'\nsha256 = '%s'\n"
    one, other = (hashlib.sha256(text).hexdigest() for text in (b"one", b"other"))
    service = start("--resp-port", "0", config=token % one)
    with RespSocket(service) as client:
        assert client.ask("AUTH", "one") == "OK"
        assert client.ask("PING") == "PONG"
        service.config.write_text(token % other)
        eventually(lambda: client.ask("PING") == NOAUTH, "the token has gone")
        assert client.ask("AUTH", "one").startswith("-WRONGPASS")
        assert client.ask("AUTH", "other") == "OK"
        assert client.ask("PING") == "PONG"


def admitted(service: Service, connections: int, words: tuple[object, ...], calls: int) -> int:
    """How many of *calls* commands on each of so many connections are allowed, sent as pipelines of ten."""
    counts: list[int] = []

    def send() -> None:
        with RespSocket(service) as client:
            for _ in range(calls // 10):
                client.send(command(*words) * 10)
                counts.append(sum(client.reply()[0] == 0 for _ in range(10)))

    threads = [threading.Thread(target=send) for _ in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(counts) == connections * (calls // 10)
    return sum(counts)


def test_exact_in_memory(resp_service: Service, key: str) -> None:
    """Many connections are admitted the limit together, and not one more."""
    assert admitted(resp_service, 12, ("CL.THROTTLE", key, 299, 1, 100_000), 100) == 300


def test_exact_on_redis(start: Start, redis_server: Server) -> None:
    """The same on Redis."""
    service = start("--resp-port", "0", "--store", redis_server.patient_url)
    assert admitted(service, 16, ("CL.THROTTLE", "k", 199, 1, 100_000), 50) == 200


def test_order_on_redis(start: Start, redis_server: Server) -> None:
    """Replies come in the order of the commands, and checks of one key are decided in that order."""
    service = start("--resp-port", "0", "--store", redis_server.patient_url, config=RULES)
    with RespSocket(service) as client:
        sent, expected = [], []
        for i in range(300):
            key = f"k{i % 3}"
            sent += [("CL.THROTTLE", key, 99, 1, 100_000), ("ECHO", i)]
            expected += [[0, 100, 99 - i // 3], str(i)]
        sent += [("HEADGATE.CHECK", "login", "a", 5), ("HEADGATE.PEEK", "login", "a"), ("HEADGATE.RESET", "login", "a")]
        sent += [("HEADGATE.PEEK", "login", "a"), ("PING",)]
        expected += [[1, 5, 0], [0, 5, 0], "OK", [1, 5, 5], "PONG"]
        client.send(b"".join(command(*words) for words in sent))
        found = [client.reply() for _ in sent]
        assert [one[:3] if isinstance(one, list) else one for one in found] == expected


@pytest.mark.parametrize("default, throttled", [("local", [0, 5, 4]), ("raise", "-ERR the store of rule")])
def test_store_down(start: Start, default: str, throttled: Any) -> None:
    """Without its store a command is answered by the rule's policy, CL.THROTTLE by that of the default rule."""
    expected = {"allow": [1, 5], "deny": [0, 5], "local": [1, 5, 4], "raise": "-ERR the store of rule 'raise'"}
    rules = f"[rules.default]\non_store_error = '{default}'\n"
    rules += "".join(f"[rules.{name}]\nquotas = '5/hour'\non_store_error = '{name}'\n" for name in expected)
    service = start("--resp-port", "0", "--store", f"redis://127.0.0.1:{free_port()}/0", config=rules)
    with RespSocket(service) as client:
        assert client.ask("CL.THROTTLE", "k", 4, 1, 3600)[: len(throttled)] == throttled
        for name, answer in expected.items():
            assert client.ask("HEADGATE.CHECK", name, "k")[: len(answer)] == answer
            assert client.ask("HEADGATE.RESET", name, "k").startswith(
                f"-ERR the store of rule '{name}' does not answer"
            )
