"""The rules as the live page shows them: the last hour by minute, and a rule as TOML; and the doors."""

import socket
import tomllib
from pathlib import Path
from typing import Any

import pytest

from headgate.service.doors import HTTPConnections
from headgate.service.live_rules import SHOWN_RULES, hours_by_rule, rule_as_toml
from headgate.service.rule_minutes import MINUTES, RuleHour, RuleMinutes
from headgate.service.settings import DEFAULT_BUCKET, RuleSettings, Settings, convert
from headgate.service.shared_counters import ALLOWED, COUNTERS_FILE, DENIED, SLOT_WORDS, SharedCounters, create
from tests.service.conftest import Start
from tests.service.test_events import events
from tests.support.resp import RespSocket, command
from tests.support.service import Service, eventually

ADMIN = {"authorization": "Bearer secret"}
RULES = """
[rules.login]
quotas = ["5/minute", "20/hour"]
algorithm = "sliding_window"
key = ["key", "header:x-tenant"]
cost = 2
on_store_error = "deny"
exempt = ["10.0.0.0/8", "health-probe"]
[rules.login.overrides]
"user:1@example.com" = "gold"
"quoted\\"\\u007f" = ["9/minute", "90/hour"]
[rules."two.words"]
quotas = { bucket = "9/minute", window = "10/minute" }
shadow = true
[rules.plain]
quotas = "9/minute"
[plans]
gold = "50/minute"
silver = "7/minute"
"""


class TwoWorkers:
    """The counters and the minutes of two workers, which are both of this process."""

    def __init__(self, folder: Path) -> None:
        create(folder / COUNTERS_FILE, 2, 0)
        self.counters = SharedCounters(folder / COUNTERS_FILE)
        self.slots = [self.counters.claim().slots for _ in range(2)]
        self.minutes = [RuleMinutes(folder, 100) for _ in range(2)]

    def count(self, worker: int, name: str, allowed: int, denied: int) -> None:
        at = self.counters.slot(name) * SLOT_WORDS
        self.slots[worker][at + ALLOWED] += allowed
        self.slots[worker][at + DENIED] += denied

    def hour(self, name: str, minute: int) -> tuple[dict[int, int], dict[int, int]]:
        """Allowed and denied by minutes ago, without zeros; the same in both workers."""
        one, other = (minutes.hours(self.counters, minute).get(name, RuleHour([], [])) for minutes in self.minutes)
        assert one == other
        allowed, denied = ({len(row) - 1 - i: count for i, count in enumerate(row) if count} for row in one)
        return allowed, denied


@pytest.fixture
def workers(tmp_path: Path) -> TwoWorkers:
    return TwoWorkers(tmp_path)


def test_minutes(workers: TwoWorkers) -> None:
    """The counts of all workers are in the minute that they were made in, also in a worker that starts later."""
    workers.count(0, "api GCRA", 3, 1)
    workers.count(1, "api GCRA", 4, 0)
    assert workers.hour("api GCRA", 100) == ({0: 7}, {0: 1})
    workers.minutes[1].advance(workers.counters, 101)
    workers.count(1, "api GCRA", 5, 2)
    assert workers.hour("api GCRA", 101) == ({1: 7, 0: 5}, {1: 1, 0: 2})
    workers.minutes[0].advance(workers.counters, 100)  # a worker that is late changes nothing
    assert workers.hour("api GCRA", 104) == ({4: 7, 3: 5}, {4: 1, 3: 2})
    workers.count(0, "other GCRA", 1, 0)
    assert workers.hour("other GCRA", 104) == ({0: 1}, {})


def test_minutes_end_after_an_hour(workers: TwoWorkers) -> None:
    """A minute is shown for an hour, and its place is empty when it is used again."""
    workers.count(0, "api GCRA", 3, 1)
    assert workers.hour("api GCRA", 100 + MINUTES - 1) == ({MINUTES - 1: 3}, {MINUTES - 1: 1})
    assert workers.hour("api GCRA", 100 + MINUTES) == ({}, {})
    workers.count(0, "api GCRA", 2, 0)
    assert workers.hour("api GCRA", 100 + 5 * MINUTES) == ({}, {})
    workers.count(0, "api GCRA", 9, 0)
    assert workers.hour("api GCRA", 100 + 5 * MINUTES + 1) == ({1: 9}, {})


def test_minutes_without_workers(workers: TwoWorkers) -> None:
    """Minutes in which no worker ran are empty, though their places were used an hour before."""
    workers.count(0, "api GCRA", 3, 1)
    assert workers.hour("api GCRA", 101) == ({1: 3}, {1: 1})
    assert workers.hour("api GCRA", 100 + MINUTES + 30) == ({}, {})


def test_minutes_of_all_algorithms() -> None:
    zeros = [0] * 3
    slots = {"api GCRA": RuleHour([1, 2, 3], zeros), "api FIXED_WINDOW": RuleHour([1, 0, 0], [0, 0, 5])}
    assert hours_by_rule(slots) == {"api": RuleHour([2, 2, 3], [0, 0, 5])}


def test_hour_of_a_rule(start: Start) -> None:
    """Every worker tells the counts of all workers; rules are in the order of their traffic."""
    service = start("--workers", "2", config=RULES)
    eventually(lambda: service.metrics()["rate_limiter_workers"] == 2, "both workers")
    for _ in range(12):
        service.check("somebody", rule="plain")
    service.check("somebody", algorithm="GCRA")
    found = [service.get("/live/rules").json for _ in range(8)]
    for one in found:
        assert [row["rule"] for row in one["rules"]] == ["plain", "default", "login", "two.words"]
        plain, default, login, _ = one["rules"]
        assert (plain["allowed"], plain["denied"]) == (9, 3) and plain["quotas"] == ["9/minute"]
        assert sum(plain["perMinute"]["allowed"]) == 9 and len(plain["perMinute"]["denied"]) == one["minutes"] == 60
        assert sum(plain["perMinute"]["allowed"][-3:]) == 9, "the last minute comes last"
        assert default["allowed"] == 1 and login == {**login, "allowed": 0, "denied": 0} and "perMinute" not in login
    assert [row["rule"] for row in service.get("/live/rules", {"find": "WORDS"}).json["rules"]] == ["two.words"]
    assert "find, rule" in service.get("/live/rules", {"name": "x"}).problem


def test_many_rules(start: Start) -> None:
    """An answer has a bounded number of rules, the busiest first, and says how many there are more."""
    rules = "".join(f"[rules.r{i}]\nquotas = '5/s'\n" for i in range(SHOWN_RULES + 4))
    service = start(config=rules)
    service.check("somebody", rule=f"r{SHOWN_RULES + 3}")
    found = service.get("/live/rules").json
    assert len(found["rules"]) == SHOWN_RULES and found["more"] == 5
    assert found["rules"][0]["rule"] == f"r{SHOWN_RULES + 3}"


def toml_of(name: str, admin: bool = True) -> str:
    settings = convert(tomllib.loads(RULES))
    return rule_as_toml(name, settings.rules[name], settings, admin)


@pytest.mark.parametrize("name", ["login", "two.words", "plain"])
def test_toml(name: str) -> None:
    """The text, put into a file of its own, is the same rule."""
    settings = convert(tomllib.loads(RULES))
    again = convert(tomllib.loads(toml_of(name)))
    assert again.rules == {name: settings.rules[name]}
    assert again.plans == ({"gold": "50/minute"} if name == "login" else {})


def test_toml_of_every_field() -> None:
    """A rule with all fields set keeps all of them, those of later versions too."""
    given: dict[str, Any] = {
        "quotas": "10/second burst 20",
        "algorithm": "gcra",
        "key": ["address"],
        "cost": 3,
        "on_store_error": "local",
        "hybrid": {"accuracy": "low"},
        "shadow": True,
        "overrides": {"k": "30/second"},
        "exempt": ["k"],
    }
    settings = convert({"rules": {"all": given}})
    text = rule_as_toml("all", settings.rules["all"], settings, True)
    assert tomllib.loads(text) == {"rules": {"all": given}}
    slots: dict[str, Any] = {"concurrency": 20, "lease": 60, "key": ["address"], "overrides": {"tenant:7": 50}}
    settings = convert({"rules": {"uploads": slots}})
    text = rule_as_toml("uploads", settings.rules["uploads"], settings, True)
    assert tomllib.loads(text) == {"rules": {"uploads": slots}}
    default = rule_as_toml("default", RuleSettings(), Settings(), False)
    assert tomllib.loads(default)["rules"]["default"]["quotas"]["bucket"] == DEFAULT_BUCKET


def test_toml_without_names_of_clients(start: Start) -> None:
    """A reader sees the rule, but no key; an admin token sees all of it, and neither sees a secret."""
    text = toml_of("login", admin=False)
    assert tomllib.loads(text)["rules"]["login"]["quotas"] == ["5/minute", "20/hour"]
    assert "2 of overrides and 2 of exempt" in text
    environment = {"HEADGATE_ADMIN_TOKEN": "secret", "HEADGATE_READ_TOKEN": "reader"}
    service = start(config=RULES, environment=environment)
    assert service.get("/live/rules").status == service.get("/live/rules", {"rule": "login"}).status == 401
    for headers, full in (({"authorization": "Bearer reader"}, False), (ADMIN, True)):
        answer = service.get("/live/rules", {"rule": "login"}, headers)
        for client in ("user:1@example.com", "health-probe", "10.0.0.0/8"):
            assert (client in answer.json["toml"]) is full
        assert b"secret" not in answer.body and b"user:1" not in service.get("/live/rules", headers=headers).body
    assert service.get("/live/rules", {"rule": "nope"}, ADMIN).status == 404


def test_doors(start: Start) -> None:
    """An event tells which ports are open and how many connections each has, of all workers."""
    service: Service = start("--resp-port", "0", "--workers", "2")
    eventually(lambda: service.metrics()["rate_limiter_workers"] == 2, "both workers")
    with RespSocket(service) as one, RespSocket(service) as other:
        for client in (one, other):
            client.send(command("PING"))
            assert client.socket.recv(100).startswith(b"+PONG")
        for event in events(service):
            http, resp, grpc = event["doors"]
            if resp["connections"] == 2 and http["connections"]:
                break
        assert (http["name"], http["port"], http["tls"]) == ("http", service.port, False)
        assert resp["name"] == "resp" and resp["port"] and not resp["tls"] and grpc == {"name": "grpc", "port": None}
        assert service.metrics()['rate_limiter_listener_connections{listener="resp"}'] == 2


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="the tables are those of Linux")
def test_http_connections() -> None:
    """Connections to the port are counted, over IPv4 and IPv6, and no others."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        counted = HTTPConnections(port)
        assert counted.read() == 0
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        accepted = [server.accept()[0] for _ in clients]
        assert counted.read() == 3
        for one in (*clients, *accepted):
            one.close()
