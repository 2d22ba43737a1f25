"""A replay decides as a limiter would have, reads the logs that servers write, and keeps what its suggestions say."""

import gzip
import json
import os
import random
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from headgate import Limiter
from headgate.cli import main
from headgate.quota import Quota
from headgate.replay.decide import decide, replay
from headgate.replay.logs import BadLog, LineReader, microseconds
from headgate.replay.report import holds, report
from headgate.replay.rules import ReplayRule, rule_of_file, rule_of_quotas
from headgate.replay.suggest import needed_bursts, needed_limits, suggest
from headgate.replay.traffic import Traffic, read_traffic
from headgate.rule import ALGORITHMS, Rule
from headgate.testing import ManualClock

START = 1_699_920_000 * 1_000_000
Row = tuple[int, str, str, str]  # microseconds, address, user, path


def traffic_of(rows: list[tuple[int, str]]) -> Traffic:
    traffic = Traffic()
    traffic.add(rows, lambda count: None)
    traffic.sort()
    return traffic


def rows(seed: int, count: int = 2000, keys: int = 20) -> list[tuple[int, str]]:
    """Requests of some busy and many quiet keys, with bursts and pauses."""
    dice, now, found = random.Random(seed), START, []
    for _ in range(count):
        now += dice.choice([0, 0, 1, 999, 50_000, 200_000, 1_500_000])
        found.append((now, f"user:{min(int(dice.paretovariate(0.7)), keys)}"))
    return found


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("quotas", ["5/second", "30/minute", ["3/second", "40/minute"]], ids=str)
def test_decides_as_a_limiter(algorithm: str, quotas: Any) -> None:
    """Decision by decision, what a limiter with a clock at the times of the log decides."""
    traffic, clock = traffic_of(rows(1)), ManualClock(START / 1_000_000)
    limiter = Limiter(quotas, algorithm=algorithm, clock=clock)  # type: ignore[arg-type]  # any name
    expected = bytearray()
    for now, key in zip(traffic.times, traffic.keys, strict=True):
        clock.advance((now - clock.now()) / 1_000_000)
        expected.append(limiter.try_acquire(traffic.names[key]).allowed)
    outcome = replay(traffic, rule_of_quotas(quotas, algorithm))
    assert outcome.verdicts == expected
    assert 0 < outcome.refused == expected.count(0) == sum(key.refused for key in outcome.keys.values())


def test_overrides_and_exempt_keys(tmp_path: Path) -> None:
    """The rule of a file has its overrides, plans, exempt keys and networks, and its cost."""
    file = tmp_path / "new.toml"
    file.write_text(
        '[plans]\ngold = "6/day"\n[rules.api]\nquotas = "4/day"\ncost = 2\nexempt = ["free", "10.0.0.0/8"]\n'
        'overrides = { vip = "gold" }\n[rules.slots]\nconcurrency = 3\n'
    )
    traffic = traffic_of([(START + i, key) for i in range(5) for key in ("a", "vip", "free", "10.1.2.3")])
    allowed = dict.fromkeys(traffic.names, 0)
    for key, verdict in zip(traffic.keys, decide(traffic, rule_of_file(file, "api")), strict=True):
        allowed[traffic.names[key]] += verdict
    assert allowed == {"a": 2, "vip": 3, "free": 5, "10.1.2.3": 5}
    for name, word in (("nope", "has no rule 'nope'"), ("slots", "slots and no quotas")):
        with pytest.raises(ValueError, match=word):
            rule_of_file(file, name)


def test_lockouts() -> None:
    """A lockout lasts from a refusal to the next request that is allowed, or to the last refusal."""
    seconds = [0, 0, 1, 9, 10, 11, 15]
    traffic = traffic_of([(START + second * 1_000_000, "a") for second in seconds])
    outcome = replay(traffic, rule_of_quotas("2/20s", "sliding_window"))
    assert list(outcome.verdicts) == [1, 1, 0, 0, 0, 0, 0]
    assert outcome.longest_lockout == 14_000_000
    outcome = replay(traffic, rule_of_quotas("2/10s", "sliding_window"))
    assert list(outcome.verdicts) == [1, 1, 0, 0, 1, 1, 0] and outcome.longest_lockout == 9_000_000


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
def test_a_suggestion_refuses_what_it_says(algorithm: str, share: float) -> None:
    """A limiter with the suggested quota refuses exactly what it says, and no more keys than asked."""
    traffic = traffic_of(rows(3))
    found = suggest(traffic, share, algorithm)
    assert [each.quota.period for each in found] == [1, 60]
    for each in found:
        clock = ManualClock(START / 1_000_000)
        limiter = Limiter(each.quota, algorithm=algorithm, clock=clock)  # type: ignore[arg-type]  # any name
        refused = []
        for now, key in zip(traffic.times, traffic.keys, strict=True):
            clock.advance((now - clock.now()) / 1_000_000)
            if not limiter.try_acquire(str(key)):
                refused.append(key)
        assert (each.requests_refused, each.keys_refused) == (len(refused), len(set(refused)))
        assert each.keys_refused <= share * len(traffic.names) or algorithm == "sliding_window_counter"


def test_the_burst_that_a_key_needs() -> None:
    """With it the key is never refused, with one less it is; the same for the limit of a window."""
    traffic = traffic_of(rows(4))
    quota = Quota(7, 3.0)
    bursts, limits = needed_bursts(traffic, quota), needed_limits(traffic, 3_000_000)
    assert max(bursts) > 3 and max(limits) > 3
    for needed, algorithm in ((bursts, "token_bucket"), (limits, "sliding_window")):
        for number in set(needed):
            tried = Quota(7, 3.0, number) if needed is bursts else Quota(number, 3.0)
            outcome = replay(traffic, ReplayRule(Rule(tried, algorithm)))
            assert set(outcome.keys) == {key for key, need in enumerate(needed) if need > number}
    burst = sorted(needed_bursts(traffic, quota))[-3]
    (found,) = suggest(traffic, 2 / len(traffic.names), "gcra", quota)
    assert found.quota == Quota(7, 3.0, burst)


ROWS: list[Row] = [
    (START + 2_000_000, "10.0.0.1", "ann", "/a"),
    (START, "10.0.0.2", "-", "/b"),
    (START + 1_000_000, "10.0.0.1", "bob", "/a"),
    (START + 2_000_000, "::1", "bob", "/c"),
]


def combined(row: Row) -> str:
    when = time.strftime("%d/%b/%Y:%H:%M:%S +0000", time.gmtime(row[0] // 1_000_000))
    return f'{row[1]} - {row[2]} [{when}] "GET {row[3]} HTTP/1.1" 200 5 "-" "curl/8"\n'


def as_json(row: Row) -> str:
    return json.dumps({"ts": row[0] / 1_000_000, "ip": row[1], "user": {"name": row[2]}, "path": row[3]}) + "\n"


def as_csv(rows: list[Row]) -> str:
    lines = ["time,client_ip,user,path"]
    for time_us, address, user, path in rows:
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time_us // 1_000_000))
        lines.append(f'{when},{address},"{user}",{path}')
    return "\n".join(lines) + "\n"


FORMS: dict[str, Callable[[list[Row]], str]] = {
    "combined": lambda rows: "".join(map(combined, rows)),
    "json": lambda rows: "".join(map(as_json, rows)),
    "csv": as_csv,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("packed", [False, True])
def test_formats(form: str, packed: bool, tmp_path: Path) -> None:
    """Each format gives the same requests, in the order of their time; lines that are none are counted."""
    text = FORMS[form](ROWS) + ("" if form == "csv" else "nonsense\n")
    path = tmp_path / ("log.gz" if packed else "log")
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    traffic = read_traffic([path], LineReader())
    assert traffic.times == array("q", sorted(row[0] for row in ROWS))
    assert [traffic.names[key] for key in traffic.keys] == ["10.0.0.2", "10.0.0.1", "10.0.0.1", "::1"]
    assert traffic.skipped == ({} if form == "csv" else {"no time or no key": 1})
    user = "user.name" if form == "json" else "user"
    traffic = read_traffic([path, path], LineReader(key=f"{{{user}}}:{{path}}"))
    assert [traffic.names[key] for key in traffic.keys] == ["bob:/a"] * 2 + ["ann:/a", "bob:/c"] * 2
    assert traffic.skipped.total() == (2 if form == "csv" else 4), "a user of - is none"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (b"14/Nov/2023:00:00:00 +0000", START),
        (b"14/Nov/2023:09:00:00 +0900", START),
        ("2023-11-14T00:00:00Z", START),
        ("2023-11-14T00:00:00", START),  # no zone: UTC, whatever that of the host is
        ("2023-11-14T01:00:00.000001+01:00", START + 1),
        (1_699_920_000, START),
        ("1699920000.25", START + 250_000),
        (1_699_920_000_001, START + 1000),
        (START + 7, START + 7),
        ("soon", None),
        (None, None),
        (True, None),
        (-5, None),
    ],
    ids=repr,
)
def test_times(given: object, expected: int | None) -> None:
    """The forms of time that logs have."""
    assert microseconds(given) == expected


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("a b c\n", {"format": "combined"}, "combined format"),
        ("[1]\n", {"format": "json"}, "no JSON object"),
        ('{"when": 5}\n', {}, "say --time FIELD: its lines have when"),
        ('{"ts": 5, "who": "a"}\n', {}, "say --key FIELD"),
        ("ts,who\n5,a\n", {"key": "user"}, "no 'user'; it has ts, who"),
        (combined(ROWS[0]), {"key": "usr"}, "no field 'usr'; it has address"),
        (combined(ROWS[0]), {"key": "{user"}, "template"),
        (combined(ROWS[0]), {"time": "ts"}, "--time is for JSON and CSV"),
        ("\x7fELF\0\1\2\n", {}, "log: it is no text"),
        ("a\rb\rc\n", {}, "log: its first line is of no known format"),
    ],
    ids=range(10),
)
def test_bad_logs(text: str, options: Any, words: str, tmp_path: Path) -> None:
    """The error says what the log has."""
    path = tmp_path / "log"
    path.write_text(text)
    with pytest.raises(BadLog, match=words):
        read_traffic([path], LineReader(**options))


@pytest.mark.parametrize(
    "text",
    [
        b"Log begins\n" + combined(ROWS[0]).encode() + b"\0\1\n" + b"x" * 200_000 + b"\n",
        b'\xef\xbb\xbf{"ts": 5, "ip": "a"}\nnull\n[1]\n' + b'{"a":' * 100_000 + b"\n",
        b"\xef\xbb\xbfts,ip\n5,a\n6,\n7," + b"x" * 200_000 + b"\nsoon,a\n",
        gzip.compress(b'{"ts": 5, "ip": "a"}\n7\n8\n9\n'),  # packed, and its name does not say so
    ],
    ids=["combined", "json", "csv", "gzip"],
)
def test_broken_lines(text: bytes, tmp_path: Path) -> None:
    """They are counted and left out, also at the beginning; the other lines are replayed."""
    path = tmp_path / "log"
    path.write_bytes(text)
    traffic = read_traffic([path], LineReader())
    assert len(traffic) == 1 and traffic.skipped.total() == 3


def test_one_client_in_logs_of_two_formats(tmp_path: Path) -> None:
    """It is one key."""
    (tmp_path / "a").write_text(combined((START, "10.0.0.1", "-", "/")))
    (tmp_path / "b").write_text('{"ts": 1699920000, "ip": "10.0.0.1"}\n')
    assert read_traffic([tmp_path / "a", tmp_path / "b"], LineReader()).names == ["10.0.0.1"]


def test_broken_archive(tmp_path: Path) -> None:
    """The error names the file."""
    (tmp_path / "cut.gz").write_bytes(gzip.compress(os.urandom(5000))[:3000])
    with pytest.raises(BadLog, match=r"cut\.gz: it is packed, and broken"):
        read_traffic([tmp_path / "cut.gz"], LineReader())


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "access.log"
    path.write_text("".join(combined((time_us, key, "-", "/")) for time_us, key in rows(5)))
    return path


def test_command(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report has who, when, how long, what is new; the pictures are well-formed; the exit code tells CI."""
    old = tmp_path / "old.toml"
    old.write_text('[rules.default]\nquotas = "60/minute"\n')
    html, svg = tmp_path / "r.html", tmp_path / "r.svg"
    options = ["--quota", "20/minute", "--against", old, "--suggest", "5%", "--html", html, "--svg", svg]
    code, out, err = run(capsys, "replay", log, *options, "--json")
    found = json.loads(out)
    assert (code, err, found["requests"]) == (0, "", 2000)
    limit = found["limit"]
    assert found["newly_refused"] == limit["refused"] - found["against"]["refused"] + found["newly_allowed"] > 0
    assert limit["worst"][0]["refused"] == max(row["refused"] for row in limit["worst"])
    assert limit["worst"][0]["longest_lockout"] > 0
    assert sum(bar["requests"] for bar in limit["timeline"]) == 2000
    assert sum(bar["refused"] for bar in limit["timeline"]) == limit["refused"]
    assert found["suggestions"][0]["keys_share"] <= 0.05
    ElementTree.parse(svg)
    assert "<svg" in html.read_text() and "user:1" in html.read_text()
    code, out, _ = run(capsys, "replay", log, *options)
    assert code == 0 and "newly refused" in out and "suggestion: 20/minute burst" in out
    for condition, expected in (("denied > 0.1%", 3), ("denied > 99%", 0), ("new_denied >= 1", 3), ("lockout < 1s", 0)):
        assert run(capsys, "replay", log, *options, "--fail-if", condition)[0] == expected, condition
    assert holds("keys_denied > 0", found)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 5, "say what to try"),
        (["--quota", "ten"], 5, "cannot read the quota"),
        (["--quota", "9/s", "--config", "x"], 5, "not both"),
        (["--quota", "9/s", "--algorithm", "leaky"], 5, "unknown algorithm"),
        (["--quota", "9/s", "--fail-if", "bad > 1"], 5, "denied > 0.1%"),
        (["--quota", "9/s", "--fail-if", "denied > 5s"], 5, "a condition is"),
        (["--quota", "9/s", "--fail-if", "new_denied > 1"], 5, "needs --against"),
        (["--quota", "9/s", "--against", "nope.toml"], 5, "no file, and no quota"),
        (["--config", "nope.toml"], 5, "nope.toml"),
        (["--suggest", "200%"], 5, "--suggest takes a share"),
        (["--suggest", "--svg", "x"], 5, "need a limit"),
        (["--quota", "9/s", "--key", "usr"], 1, "usr"),
        (["--quota", "9/s", "--html", "no/such/x.html"], 5, "no folder"),
    ],
    ids=str,
)
def test_bad_commands(
    arguments: list[str], code: int, words: str, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error says what would be right, before a large log is read where that is possible."""
    found, out, err = run(capsys, "replay", log, *arguments)
    assert (found, out) == (code, "") and words in err and "Traceback" not in err


def test_empty_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A log without a request is an error, and a file that is not there too."""
    (tmp_path / "empty").write_text("")
    code, _, error = run(capsys, "replay", tmp_path / "empty", "--quota", "1/s")
    assert code == 1 and "the log is empty" in error
    assert run(capsys, "replay", tmp_path / "none", "--quota", "1/s")[0] == 1


@pytest.mark.slow
def test_large_log(tmp_path: Path) -> None:
    """A fifth of a million lines takes a fifth of 6 s of the processor."""
    path = tmp_path / "access.log"
    path.write_text("".join(combined((time_us, f"10.0.0.{key[5:]}", "-", "/")) for time_us, key in rows(6, 200_000)))
    begun = time.process_time()
    traffic = read_traffic([path], LineReader())
    report(traffic, replay(traffic, rule_of_quotas("100/minute")))
    assert time.process_time() - begun < 1.2
