"""What an operator sees: connections, the busiest keys, one line for an outage, and who changed what."""

import base64
import re
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import redis

from headgate.keys import MAX_BYTES
from headgate.service.busy_keys import EVERY, HINT, BusyKeys, rows_for_page
from headgate.service.event_log import OutageLog
from headgate.service.reports import SHOWN_KEYS, WorkerReport, merge_busiest, merge_connections, read_reports
from headgate.service.shared_counters import PID, SharedCounters, create
from headgate.stores.base import StoreHealth
from tests.service.conftest import Start
from tests.service.test_events import events
from tests.support.servers import Server, free_port
from tests.support.service import API, Service, eventually


def test_connections(start: Start, redis_server: Server) -> None:
    """A worker connects before its first check; health and metrics tell how many connections there are."""
    service = start("--store", redis_server.patient_url, config="min_connections = 2\n")
    eventually(lambda: service.metrics()['rate_limiter_redis_connections{state="idle"}'] == 2, "the connections")
    assert service.metrics()['rate_limiter_redis_connections{state="in_use"}'] == 0
    assert service.metrics()["rate_limiter_redis_waiting_calls"] == 0
    shown = service.get("/actuator/health").json["components"]["store"]["connections"]
    assert shown == {"inUse": 0, "idle": 2, "waiting": 0}


def test_application_label(start: Start) -> None:
    """With `application` set, every series has that label, and without it none has."""
    service = start(config="application = 'shop'\n")
    lines = [line for line in service.get("/metrics").body.decode().splitlines() if not line.startswith("#")]
    assert lines and all(re.match(r'[a-z_]+\{application="shop"[,}]', line) for line in lines)
    assert 'rate_limiter_workers{application="shop"}' in service.metrics()


def test_outage_lines(start: Start, mortal_server: Server) -> None:
    """The first check of a rule without the store is logged with its key, the others are not."""
    rules = "log_keys = true\n[rules.api]\nquotas = '5/s'\n[rules.other]\nquotas = '5/s'\non_store_error = 'raise'\n"
    service = start("--store", f"{mortal_server.bare_url}?timeout=1", config=rules)

    def lines(rule: str) -> int:
        text = r"Error executing rate limit check for key: 'somebody', rule: (\w+), on_store_error: (\w+): (.+)"
        return sum(found[0] == rule for found in re.findall(text, service.log()))

    service.check("somebody", rule="api")
    assert lines("api") == 0
    mortal_server.kill()
    for _ in range(6):
        assert service.check("somebody", rule="api").json["degraded"]
        assert service.check("somebody", rule="other").status == 503
    assert lines("api") == lines("other") == 1


def test_outage_ends() -> None:
    """A rule has a new line in the next outage: after a second in which the store answered all of its checks."""
    log = OutageLog()
    down, shaky, up = StoreHealth("open", 3), StoreHealth("closed", 1), StoreHealth("closed")
    assert [log.is_news("a"), log.is_news("a"), log.is_news("b")] == [True, False, True]
    for health in (down, down, shaky):  # quiet seconds in an outage do not end it
        log.end_second(health)
        assert not log.is_news("a")
    log.end_second(up)  # a check of a was not answered in this second
    assert [log.is_news("a"), log.is_news("b")] == [False, True]
    log.end_second(up)
    log.end_second(up)
    assert log.is_news("a")


def test_audit(start: Start) -> None:
    """A reset and a change of the rules are one line each: who, what, and the rules' hash before and after."""
    rules = "[rules.a]\nquotas = '5/s'\n[rules.b]\nquotas = '5/s'\n"
    port = free_port()
    options = ("--workers", "2", "--resp-port", str(port))
    service = start(*options, config=rules, environment={"HEADGATE_ADMIN_TOKEN": "secret"})
    eventually(lambda: service.metrics()["rate_limiter_workers"] == 2, "both workers")
    assert service.reset("somebody", {"authorization": "Bearer secret"}, rule="a").status == 200
    what = r"Reset of key: #\S+, rule: a, algorithm: TOKEN_BUCKET"
    text = rf"headgate\.audit: {what}, by token \w{{8}} \(admin\) from 127\.0\.0\.1"
    assert len(re.findall(text, service.log())) == 1
    assert service.reset("somebody", rule="a").status == 401
    with redis.Redis(port=port, password="secret") as client:
        assert client.execute_command("HEADGATE.RESET", "a", "somebody") == b"OK"
    assert len(re.findall(text, service.log())) == 2
    basic = {"authorization": "Basic " + base64.b64encode(b"any:secret").decode()}
    assert service.reset("somebody", basic, rule="a").status == 200
    assert len(set(re.findall(rf"{what}, by (token \w{{8}})", service.log()))) == 1
    service.config.write_text("[rules.a]\nquotas = '6/s'\n[rules.c]\nquotas = '5/s'\n")
    service.signal(signal.SIGHUP)
    eventually(lambda: service.log().count("Settings read again") >= 2, "both workers have read it")
    lines = re.findall(r"headgate\.audit: Rules changed by (\S+): hash before (\w+), after (\w+): (.*)", service.log())
    [(source, before, after, what)] = lines
    assert source == str(service.config) and before != after and what == "added c; removed b; changed a"
    assert "secret" not in service.log() and "somebody" not in service.log()


def test_busiest_keys(start: Start) -> None:
    """The live stream shows an administrator the busiest keys; a metric has the rate of each rule's busiest one."""
    service: Service = start(environment={"HEADGATE_ADMIN_TOKEN": "t"})
    connection = service.connect()
    for _ in range(3 * EVERY):
        service.on(connection, "GET", f"{API}/check", "key=busy&algorithm=GCRA")
    connection.close()
    name = 'rate_limiter_busiest_key_checks{rule="default"}'
    eventually(lambda: service.metrics().get(name, 0) > 0, "the rate of the busiest key")
    for event in events(service, {"authorization": "Bearer t"}):
        if event["busiest_keys"]:
            break
    [row] = event["busiest_keys"]
    assert row["key"] == "busy" and row["rule"] == "default" and row["perSecond"] > 0
    assert "busiest_keys" not in next(events(service))
    assert b"busy" not in service.get("/metrics").body


def test_busiest_keys_of_all_workers() -> None:
    """Rates of one key add up over workers; a broken report is left out; a hot rule on Redis gets a hint."""
    one = msgspec.json.encode(WorkerReport(busiest=[("api", "a", 150.0), ("api", "b", 10.0)]))
    other = msgspec.json.encode(WorkerReport(busiest=[("api", "a", 100.0), ("login", "c", 900.0)]))
    rows = merge_busiest(read_reports([one, other, b"", other[:-3]]))
    assert rows == [("login", "c", 900.0), ("api", "a", 250.0), ("api", "b", 10.0)]
    shown = rows_for_page(rows, frozenset({"api"}))
    assert [row.get("hint") for row in shown] == [None, HINT, None]


def test_longest_report(tmp_path: Path) -> None:
    """A report fits with the longest keys, all of characters that JSON escapes; a dead worker has no report."""
    create(tmp_path / "counters", 1, 0)
    counters = SharedCounters(tmp_path / "counters")
    own = counters.claim()
    rows = [("r" * 64, f"{i:03}" + '"' * (MAX_BYTES - 3), 10**9) for i in range(SHOWN_KEYS)]
    servers = {f"{'h' * 200}-{i}:65535": (4, 4, 10_000) for i in range(100)}
    report = WorkerReport(rows, [(*row[:2], 1e9) for row in rows], servers, {"resp": 4096, "grpc": 4096})
    own.write_report(msgspec.json.encode(report))
    [found] = read_reports(list(counters.reports()))
    assert found == report and merge_connections([found, found])[f"{'h' * 200}-7:65535"] == (8, 8, 20_000)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    own.gauges[PID] = dead.pid
    assert list(counters.reports()) == []


def test_busiest_keys_are_bounded() -> None:
    """A flood of new keys neither grows the counts nor hides the busiest key."""
    busy = BusyKeys()
    for i in range(20_000):
        busy.add("api", f"once-{i}")
        if i % 10 == 0:
            busy.add("api", "busy")
    assert busy.top()[0][1] == "busy" and len(busy._counts) <= 1000
