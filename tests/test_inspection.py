"""What new settings change, whether a store is fit for limits, and what a service does, as operators see it."""

import json
import socket
import threading
from pathlib import Path

import pytest

from headgate import Limiter
from headgate.cli import main
from headgate.inspection.doctor import examine, worst
from headgate.inspection.plan import compare_quotas
from headgate.inspection.redis_server import of_info
from headgate.inspection.top import parse, rates
from headgate.quota import Quota
from tests.support.clusters import Cluster, Sentinels
from tests.support.postgres import PostgresServer
from tests.support.servers import Server, free_port
from tests.support.service import Service, headgate


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        (["10/second"], ["10/second"], "same"),
        (["600/minute burst 10"], ["10/second"], "same"),
        (["10/second"], ["9/second"], "tighter"),
        (["10/second"], ["10/second burst 9"], "tighter"),
        (["10/second"], ["10/second", "1000/hour"], "tighter"),
        (["10/second", "1000/hour"], ["1000/hour"], "looser"),
        (["10/second"], ["20/second burst 5"], "mixed"),
        (["10/second", "100/hour"], ["20/second", "50/hour"], "mixed"),
        (["10/second", "100/hour"], ["10/second", "100/hour", "100/second burst 1000"], "same"),
    ],
    ids=str,
)
def test_compare_quotas(old: list[str], new: list[str], kind: str) -> None:
    """By what they admit in any stretch of time, not by how they are written."""
    opposite = {"tighter": "looser", "looser": "tighter"}.get(kind, kind)
    before, after = [Quota.parse(text) for text in old], [Quota.parse(text) for text in new]
    assert compare_quotas(before, after) == kind
    assert compare_quotas(after, before) == opposite


OLD = """
[rules.api]
quotas = "10/second"
overrides = { vip = "50/second" }
[rules.login]
quotas = "5/minute"
exempt = ["10.0.0.0/8"]
[rules.gone]
quotas = "1/minute"
[rules.slots]
concurrency = 5
"""
NEW = """
[rules.api]
quotas = "20/second"
overrides = { vip = "40/second" }
[rules.login]
quotas = "5/minute"
key = ["address"]
[rules.slots]
concurrency = 9
[rules.fresh]
quotas = "1/minute"
"""


@pytest.mark.server
def test_plan(tmp_path: Path) -> None:
    """It names what each rule becomes, and its exit code is 3 where clients may be refused that were not."""
    for name, text in (("old.toml", OLD), ("new.toml", NEW), ("bad.toml", "[rules.a]\nquotas = 'x'\n")):
        (tmp_path / name).write_text(text)
    done = headgate("plan", "old.toml", "new.toml", "--json", folder=tmp_path)
    found = {(row["rule"], row["field"]): row["kind"] for row in json.loads(done.stdout)}
    assert found == {
        ("api", "quotas"): "looser",
        ("api", "overrides.vip"): "tighter",
        ("fresh", "rule"): "added",
        ("gone", "rule"): "removed",
        ("login", "key"): "key changed",
        ("login", "exempt"): "tighter",
        ("slots", "concurrency"): "looser",
    }
    assert done.returncode == 3
    same = headgate("plan", "old.toml", "old.toml", folder=tmp_path)
    assert (same.returncode, same.stdout) == (0, "nothing changes\n")
    bad = headgate("plan", "old.toml", "bad.toml", folder=tmp_path)
    assert bad.returncode == 5 and "bad.toml:2" in bad.stderr


@pytest.mark.store_timeout(20)
def test_doctor(redis_server: Server) -> None:
    """A plain Redis does all that is needed, and what it keeps is told; no key of the doctor's stays."""
    found = {finding.check.split()[-1]: finding for finding in examine(redis_server.url)}
    assert found["limiters"].state == found["queues"].state == found["version"].state == found["clock"].state == "ok"
    assert found["eviction"].state == found["memory"].state == found["replicas"].state == "ok"
    assert found["persistence"].state in ("ok", "warning")
    assert "p99" in found["latency"].detail
    assert [name for name in redis_server.names() if "rate_limiter" in name] == []


def test_doctor_tries_rights(redis_server: Server) -> None:
    """A user that may not write is found by trying, although the server answers."""
    client = redis_server.client()
    client.execute_command("ACL", "SETUSER", "reader", "on", ">pw", "~*", "+@read", "+ping", "+info", "+time")
    try:
        url = redis_server.url.replace("redis://", "redis://reader:pw@")
        found = examine(url)
        assert found[0].check == "limiters" and found[0].state == "problem" and worst(found) == "problem"
    finally:
        client.execute_command("ACL", "DELUSER", "reader")


def test_doctor_of_cluster(cluster: Cluster) -> None:
    """Rights and latency are tried at each server that decides, which has users of its own; all tell of themselves."""
    primaries = [f"127.0.0.1:{node.port}" for node in cluster.primaries()]
    found = {finding.check: finding.state for finding in examine(cluster.url)}
    for name in primaries:
        assert found[f"{name} limiters"] == found[f"{name} version"] == "ok"
        assert f"{name} latency" in found  # what it is depends on the machine
        assert found[f"{name} replicas"] == found[f"{name} connections"] == found[f"{name} clock"] == "ok"
    strict = cluster.primaries()[1]
    strict.client().execute_command("ACL", "SETUSER", "headgate", "-evalsha")
    try:
        broken = {finding.check for finding in examine(cluster.url) if finding.state == "problem"}
    finally:
        strict.client().execute_command("ACL", "SETUSER", "headgate", "+evalsha")
    assert broken == {f"{primaries[1]} limiters"}


@pytest.mark.once
def test_doctor_of_sentinels(sentinels: Sentinels) -> None:
    """The primary that they name is looked at, and each Sentinel says whether it could be replaced."""
    found = {finding.check: finding for finding in examine(sentinels.url)}
    asked = [finding for check, finding in found.items() if check.startswith("Sentinel ")]
    assert len(asked) == 3 and all("Quorum" in finding.detail for finding in asked)
    assert found[f"127.0.0.1:{sentinels.primary.port} version"].state == "ok"


def test_doctor_of_postgresql(postgres_server: PostgresServer) -> None:
    """Version, clock, connections and tables are told; locks are not for it; a user that may not is found by trying."""
    found = {finding.check: finding for finding in examine(postgres_server.url)}
    for check in ("limiters", "health", "version", "clock", "connections", "autovacuum", "size"):
        assert found[check].state == "ok", found[check]
    assert found["locks and queues"].state == "unknown"
    assert found["persistence"].state == "ok" and "UNLOGGED" in found["persistence"].detail
    postgres_server.rows("ALTER TABLE headgate_state SET LOGGED")
    warned = {finding.check for finding in examine(postgres_server.url) if finding.state == "warning"}
    assert warned - {"latency"} == {"persistence"}  # a busy machine is slow
    postgres_server.rows("REVOKE ALL ON headgate_version FROM headgate")
    found = {finding.check: finding for finding in examine(postgres_server.url)}
    assert found["limiters"].state == "problem" and "permission denied" in found["limiters"].detail
    assert found["version"].state == found["size"].state == "ok"


@pytest.mark.server
@pytest.mark.once
def test_doctor_of_a_standby() -> None:
    """A server that follows another one takes no writes, which is said beside what then fails."""
    server = PostgresServer()
    try:
        Path(server.directory, "data", "standby.signal").touch()
        server.restart()
        found = {finding.check: finding for finding in examine(server.url)}
    finally:
        server.stop()
    assert found["limiters"].state == "problem" and found["version"].state == "ok"
    assert found["role"].state == "problem" and "standby" in found["role"].detail


def test_doctor_of_nothing_there(tmp_path: Path) -> None:
    """A directory that is not there is said to be missing, and is not made; one that cannot be used is a problem."""
    missing, wide, file = tmp_path / "not" / "there", tmp_path / "wide", tmp_path / "file"
    wide.mkdir()
    wide.chmod(0o777)
    file.touch()
    before = sorted(tmp_path.rglob("*"))
    (found,) = examine(f"shared://{missing}")
    assert (found.check, found.state) == ("directory", "warning") and "not there yet" in found.detail
    for unfit, words in ((wide, "mode to 700"), (file, "another kind of file"), (file / "x", "cannot be made")):
        (found,) = examine(f"shared://{unfit}")
        assert found.state == "problem" and words in found.detail
    with pytest.raises(ValueError, match="max_keys"):
        examine(f"shared://{missing}?max_keys=few")
    assert sorted(tmp_path.rglob("*")) == before


def test_doctor_of_shared(tmp_path: Path) -> None:
    """What a limiter does is tried in the directory, and what is there stays as it was, without a file more."""
    url = f"shared://{tmp_path}/a store"
    with Limiter("10/30d", store=url) as limiter:
        limiter.try_acquire("k")
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        found = {finding.check: finding.state for finding in examine(url)}
        assert found["directory"] == found["limiters"] == found["health"] == "ok"
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
        assert [finding.check for finding in examine(url, f"shared://{tmp_path}/b")][-1] == "together"
        assert len(list(tmp_path.rglob("*"))) == 2


@pytest.mark.server  # none that answers
@pytest.mark.parametrize("url", ["redis://127.0.0.1:{}", "postgresql://a@127.0.0.1:{}/b", "headgate://127.0.0.1:{}"])
def test_doctor_says_a_cause_once(url: str) -> None:
    """A server that is not there is one problem; what could not be looked at is unknown."""
    found = examine(url.format(free_port()))
    assert [finding.state for finding in found] == ["problem", "unknown"]
    assert str(found).count("onnection refused") == 1


def test_doctor_of_several(redis_server: Server, postgres_server: PostgresServer) -> None:
    """Each store of a list is looked at by its name, without its password; then whether they decide together."""
    dead = f"redis://user:s3cret@127.0.0.1:{free_port()}"
    found = examine(redis_server.url, postgres_server.url, dead)
    assert [(finding.check, finding.state) for finding in found][-1] == ("majority limiters", "ok")
    broken = {finding.check.split()[0] for finding in found if finding.state == "problem"}
    assert len(broken) == 1 and all(dead.rpartition("@")[2] in name for name in broken)
    assert "s3cret" not in str(found)


def test_doctor_without_information() -> None:
    """What a cloud hides is unknown, which is no problem; what it shows is judged."""
    assert {finding.state for finding in of_info({}, 0.0)} == {"unknown"}
    assert worst(list(of_info({}, 0.0))) == "ok"
    info = {
        "redis_version": "6.0.9",
        "maxmemory_policy": "allkeys-lru",
        "maxmemory": "100",
        "used_memory": "97",
        "aof_enabled": "0",
        "rdb_last_bgsave_status": "err",
        "role": "slave",
        "connected_slaves": "0",
        "server_time_usec": "5000000",
        "connected_clients": "95",
        "maxclients": "100",
    }
    found = {finding.check: finding.state for finding in of_info(info, 0.0)}
    assert found == {
        "version": "problem",
        "eviction": "warning",
        "persistence": "problem",
        "memory": "problem",
        "replicas": "problem",
        "connections": "warning",
        "clock": "warning",
    }
    lonely = {"role": "master", "connected_slaves": "0"}
    assert [finding.state for finding in of_info(lonely, 0.0, alone=False) if finding.check == "replicas"] == [
        "warning"
    ]


@pytest.mark.server
def test_doctor_command(tmp_path: Path) -> None:
    """Exit code 0 for a store that is fit, 1 for one that does not answer, 2 for a URL that is none."""
    done = headgate("doctor", "memory://", "--json", folder=tmp_path)
    assert done.returncode == 0 and json.loads(done.stdout)["state"] == "ok"
    done = headgate("doctor", f"redis://127.0.0.1:{free_port()}", folder=tmp_path)
    assert done.returncode == 1 and done.stdout.startswith("problem  limiters: try_acquire failed")
    done = headgate("doctor", "mongodb://x", folder=tmp_path)
    assert done.returncode == 2 and "redis://" in done.stderr


@pytest.mark.server
def test_top(tmp_path: Path) -> None:
    """The rules of a running service and their rates; a service that does not answer is an error."""
    service = Service(config='[rules.login]\nquotas = "2/day"\n')
    try:
        for _ in range(3):
            service.get("/api/v1/rate-limit/check?key=a&rule=login")
        url = f"http://127.0.0.1:{service.port}"
        done = headgate("top", url, "--once", "--json", "--interval", "0.05", folder=tmp_path)
        found = json.loads(done.stdout)["rules"]
        assert [(row["rule"], row["total"]) for row in found if row["total"]] == [("login", 3)]
        done = headgate("top", url, "--once", "--interval", "0.05", folder=tmp_path)
        assert done.returncode == 0 and "1 workers, the store answers" in done.stdout and "login" in done.stdout
    finally:
        service.forget()
    done = headgate("top", url, "--once", folder=tmp_path)
    assert done.returncode == 1 and url in done.stderr
    assert headgate("top", url, "--interval", "0", folder=tmp_path).returncode == 2
    for wrong in ("http://me:s3cret@127.0.0.1:1", "redis://:s3cret@127.0.0.1:1", "http://127.0.0.1:1/ s3cret"):
        done = headgate("top", wrong, "--once", folder=tmp_path)
        assert done.returncode == 1 and "Traceback" not in done.stderr
        assert "@" not in wrong or ("s3cret" not in done.stderr and "such as http://127.0.0.1:8080" in done.stderr)


@pytest.mark.server
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.0 401 Unauthorized\r\n\r\n", "401 Unauthorized; its metrics need a token, in HEADGATE_TOKEN"),
        (b"HTTP/1.0 500 Oh\r\n\r\n", "it answers 500 Oh\n"),
        (b"HTTP/1.0 200 OK\r\n\r\n\xff\x80 1\n", "no headgate service"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nup", "not answer as a web server does"),
        (b"-ERR unknown command\r\n", "not answer as a web server does"),
        (b"", "not answer as a web server does"),
    ],
    ids=["token", "failed", "binary", "short", "redis", "nothing"],
)
def test_top_of_something_else(answer: bytes, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What answers in another way is said in a line."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection = listener.accept()[0]
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(SystemExit) as ended:
            main(["top", f"http://127.0.0.1:{listener.getsockname()[1]}", "--once"])
        thread.join()
    error = capsys.readouterr().err
    assert ended.value.code == 1 and words in error and error.count("\n") == 1


def test_rates() -> None:
    """Counts between two readings, a second; a restarted service counts from 0."""

    def reading(at: float, allowed: int, denied: int) -> str:
        labels = 'rule="a",algorithm="GCRA",allowed='
        return (
            f'rate_limiter_rule_requests_total{{{labels}"true"}} {allowed}\n'
            f'rate_limiter_rule_requests_total{{{labels}"false"}} {denied}\nrate_limiter_workers 1\n'
        )

    first, second = parse(reading(0, 10, 5), 1.0), parse(reading(0, 30, 6), 3.0)
    (row,) = rates(first, second)
    assert (row.allowed, row.denied, row.total) == (10.0, 0.5, 36)
    (row,) = rates(second, parse(reading(0, 4, 0), 5.0))
    assert (row.allowed, row.denied) == (2.0, 0.0)
    with pytest.raises(ValueError, match="no headgate service"):
        parse("up 1\n", 0.0)
