"""Rules from a file: what they may say, how they are refused, and how they are taken over while the service runs."""

import hashlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headgate.service.files import FileWatch, read_file
from headgate.service.settings import BadFile
from tests.service.conftest import Start
from tests.support.service import API, Service, eventually

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "headgate.toml"

RULES = """
trusted_proxies = ["127.0.0.1"]

[plans]
gold = ["50/minute", "500/hour"]

[rules.default]
quotas = { bucket = "5/second burst 20", window = "30/minute" }

[rules.login]
quotas = ["3/minute", "5/hour"]
algorithm = "SLIDING_WINDOW"
key = ["key", "address"]

[rules.api]
quotas = "10/minute"
algorithm = "sliding_window"
overrides = { vip = "20/minute", "gold one" = "gold" }
exempt = ["monitor", "192.0.2.0/24"]

[rules.report]
quotas = "10/minute"
algorithm = "sliding_window"
cost = 4

[rules.try-out]
quotas = "2/minute"
algorithm = "gcra"
shadow = true

[rules.half]
quotas = { bucket = "5/second" }
on_store_error = "Deny"

[rules.by-token]
quotas = "2/minute"
key = ["header:X-Api-Key"]

[rules.by-two]
quotas = "2/minute"
key = ["key", "header:X-Api-Key"]
"""


@pytest.fixture(scope="module")
def ruled() -> Iterator[Service]:
    service = Service(config=RULES)
    yield service
    service.forget()


class TestRules:
    def test_the_default_rule_may_be_another(self, ruled: Service, key: str) -> None:
        assert ruled.check(key).json["limit"] == 20
        assert ruled.check(key, algorithm="FIXED_WINDOW").json["limit"] == 30

    def test_several_quotas_all_or_nothing(self, ruled: Service, key: str) -> None:
        for left in (2, 1, 0):
            answer = ruled.check(key, rule="login")
            assert answer.status == 200 and answer.json["remaining"] == left
            assert answer.json["rule"] == "login" and answer.json["algorithm"] == "SLIDING_WINDOW"
        assert ruled.check(key, rule="login").status == 429

    def test_parts_of_a_key(self, ruled: Service, key: str) -> None:
        here = {"x-forwarded-for": "198.51.100.1"}
        assert ruled.check(key, here, rule="login").json["key"] == f"{key}|198.51.100.1"
        assert ruled.check(f"{key}|%", here, rule="login").json["key"] == f"{key}%7C%25|198.51.100.1"
        assert ruled.check(key, rule="login").json["remaining"] == 2  # another address
        assert ruled.reset(f"{key}|198.51.100.1", rule="login").status == 200
        assert ruled.remaining(key, here, rule="login", permits=0).json["remaining"] == 3

    def test_reset_by_query(self, ruled: Service, key: str) -> None:
        """A reset takes the query of a check."""
        for given in (key, f"{key}|%", f"{key}|b", "k" * 240):  # one with a bar could be a key as answers show it
            shown = ruled.check(given, rule="login").json["key"]
            assert ruled.remaining(given, rule="login", permits=0).json["remaining"] == 2
            assert ruled.reset(given, rule="login").status == 200
            assert ruled.remaining(given, rule="login", permits=0).json["remaining"] == 3, given
            assert shown.endswith("|127.0.0.1")
        assert ruled.reset(key, rule="login").json["key"] == f"{key}|127.0.0.1"

    def test_reset_by_joined_key(self, ruled: Service) -> None:
        """A reset takes a joined key as answers show it."""
        elsewhere = {"x-forwarded-for": "198.51.100.9"}
        for given in ("a", "a|b", "k" * 242):  # the last has no room for another address behind it
            shown = ruled.check(given, elsewhere, rule="login").json["key"]
            answer = ruled.reset(shown, rule="login")
            assert answer.status == 200 and answer.json["key"] == shown
            assert ruled.remaining(given, elsewhere, rule="login", permits=0).json["remaining"] == 3, given

    def test_reset_of_a_key_that_is_a_header(self, ruled: Service, key: str) -> None:
        here = {"x-api-key": key}
        piped = {"x-api-key": f"{key}|a|b"}
        ruled.check(headers=piped, rule="by-token")
        assert ruled.reset(f"{key}|a|b", rule="by-token").json["key"] == f"{key}|a|b"
        assert ruled.remaining(headers=piped, rule="by-token", permits=0).json["remaining"] == 2
        for headers, given in ((here, None), (here, "whatever"), (None, key)):
            ruled.check(headers=here, rule="by-token")
            assert ruled.reset(given, headers, rule="by-token").status == 200
            assert ruled.remaining(headers=here, rule="by-token", permits=0).json["remaining"] == 2, (headers, given)
        answer = ruled.reset(rule="by-token")
        assert answer.status == 400 and "x-api-key" in answer.problem
        answer = ruled.reset(key, rule="by-two")
        assert answer.status == 400 and "x-api-key" in answer.problem and "as answers show it" in answer.problem

    def test_a_header_as_the_key(self, ruled: Service, key: str) -> None:
        assert ruled.check(headers={"x-api-key": key}, rule="by-token").json["key"] == key
        answer = ruled.check(rule="by-token")
        assert answer.status == 400 and "x-api-key" in answer.problem

    def test_overrides_and_plans(self, ruled: Service) -> None:
        assert ruled.check("anybody", rule="api").json["limit"] == 10
        assert ruled.check("vip", rule="api").json["limit"] == 20
        assert ruled.check("gold one", rule="api").json["limit"] == 50
        ruled.reset("vip", {"x-forwarded-for": "192.0.2.77"}, rule="api")  # the address of an exempt client
        assert ruled.remaining("vip", rule="api", permits=0).json["remaining"] == 20

    def test_exempt_keys_and_networks(self, ruled: Service) -> None:
        for _ in range(15):
            answer = ruled.check("monitor", rule="api")
            assert answer.status == 200 and answer.json["exempt"] is True and answer.json["remaining"] == 10
        inside = {"x-forwarded-for": "192.0.2.77"}
        assert ruled.check("x", inside, rule="api", permits=10).json["exempt"] is True
        assert ruled.remaining("x", inside, rule="api").json["exempt"] is True
        assert ruled.remaining("", inside, rule="api").status == 400
        assert ruled.check("monitor", rule="api", permits=11).json["exempt"] is True
        many = [{"key": "monitor", "rule": "api", "permits": 11}]
        assert ruled.ask("POST", f"{API}/check/batch", body=many).json[0]["exempt"] is True
        assert "exempt" not in ruled.check("x", {"x-forwarded-for": "192.0.3.1"}, rule="api").json

    def test_cost(self, ruled: Service, key: str) -> None:
        assert ruled.check(key, rule="report").json["remaining"] == 6
        assert ruled.check(key, rule="report", permits=1).json["remaining"] == 2
        assert ruled.check(key, rule="report").status == 429
        too_many = [
            ruled.check(key, rule="report", permits=3),
            ruled.check(key, rule="report", permits=3, wait=1),
            ruled.remaining(key, rule="report", permits=3),
            ruled.reset(key, rule="report", permits=3),
            ruled.ask("POST", f"{API}/check/batch", body=[{"key": key, "rule": "report", "permits": 3}]),
        ]
        for answer in too_many:
            assert answer.status == 400
            assert "permits must be at most 2: 3 at a cost of 4 each are 12, above the capacity of 10" in answer.problem

    def test_shadow(self, ruled: Service, key: str) -> None:
        """A shadow rule always allows, and says that it would have denied."""
        before = ruled.metrics()['rate_limiter_shadow_denied_total{rule="try-out",algorithm="GCRA"}']
        answers = [ruled.check(key, rule="try-out") for _ in range(3)]
        assert [answer.status for answer in answers] == [200, 200, 200]
        assert [answer.json.get("shadow") for answer in answers] == [None, None, True]
        assert answers[2].json["message"] == "Request allowed" and answers[2].headers["retry-after"] is None
        after = ruled.metrics()['rate_limiter_shadow_denied_total{rule="try-out",algorithm="GCRA"}']
        assert after == before + 1

    def test_shadow_waits_for_nobody(self, ruled: Service, key: str) -> None:
        began = time.monotonic()
        answers = [ruled.check(key, rule="try-out", wait=25) for _ in range(3)]
        assert [answer.json.get("shadow") for answer in answers] == [None, None, True]
        assert time.monotonic() - began < 20
        assert ruled.check(key, rule="try-out", wait="long").status == 400

    def test_quotas_of_one_kind(self, ruled: Service, key: str) -> None:
        """A table of quotas with one kind is for algorithms of that kind."""
        assert ruled.check(key, rule="half", algorithm="GCRA").json["limit"] == 5
        answer = ruled.check(key, rule="half", algorithm="FIXED_WINDOW")
        assert answer.status == 400 and "no window" in answer.problem

    def test_another_algorithm_for_one_call(self, ruled: Service, key: str) -> None:
        assert ruled.check(key, rule="api", algorithm="GCRA").json["limit"] == 10

    def test_a_batch_with_rules(self, ruled: Service, key: str) -> None:
        checks = [{"key": key, "rule": "report"}, {"key": "monitor", "rule": "api"}, {"key": key, "rule": "try-out"}]
        answer = ruled.ask("POST", f"{API}/check/batch", body=checks)
        assert [one["rule"] for one in answer.json] == ["report", "api", "try-out"]
        assert answer.json[1]["exempt"] is True and answer.json[0]["remaining"] == 6

    def test_override_burst(self, start: Start) -> None:
        """An override with a burst is refused under a window algorithm."""
        service = start(config="[rules.default]\noverrides = { vip = '1/second burst 7' }\n")
        assert service.check("vip").json["limit"] == 7
        assert service.check("vip", algorithm="GCRA").json["limit"] == 7
        answer = service.check("other", algorithm="FIXED_WINDOW")
        assert answer.status == 400 and "cannot be applied as FIXED_WINDOW" in answer.problem

    def test_info_and_description_name_them(self, ruled: Service) -> None:
        rules = {rule["rule"]: rule for rule in ruled.get("/actuator/info").json["rules"]}
        assert rules["login"] == {"rule": "login", "algorithm": "SLIDING_WINDOW", "quotas": ["3/minute", "5/hour"]}
        assert rules["try-out"]["shadow"] is True
        parameters = ruled.get("/openapi.json").json["paths"][f"{API}/check"]["get"]["parameters"]
        assert parameters[3]["schema"]["enum"] == list(rules)


BAD_TOML = [
    ("port = 'x'", 1, "port"),
    ("\nprot = 80", 2, "known are host, port"),
    ("port = 70000", 1, "65535"),
    ("store = 'http://x'", 1, "redis://"),
    ("trusted_proxies = ['10.0.0.1/8']", 1, "host bits"),
    ("trusted_proxies = ['*']", 1, "every client"),
    ("client_headers = ['x-client-ip']", 1, "x-client-ip"),
    ("ipv6_prefix = 8", 1, ">= 16"),
    ("\n\n[rules.a]\n\nquotas = '10 apples'", 5, "100/minute"),
    ("[rules.a]\nquotas = '10/fortnight'", 2, "fortnight"),
    ("[rules.a]\nquotas = 10", 2, "str"),
    ("[rules.a]\nquotas = []", 2, "at least one"),
    ("[rules.a]\nquotas = '10/m burst 5'\nalgorithm = 'fixed_window'", 2, "burst"),
    ("[rules.a]\nquotas = '10/m'\nalgorithm = 'magic'", 3, "token_bucket"),
    ("[rules.b]\nquotas = '1/s'\n[rules.a]\nquotas = '10/m'\n\nshaddow = true", 6, "shadow"),
    ("[rules.a]\nquotas = '10/m'\nshadow = 'yes'", 3, "bool"),
    ("[rules.a]\nquotas = '10/m'\nshadow = 'yes'", 3, "write true or false"),
    ("client_limits = true", 1, "write a whole number"),
    ("[rules.a]\nquotas = '10/m'\ncost = 0", 3, ">= 1"),
    ("[rules.a]\nquotas = '10/m'\non_store_error = 'panic'", 3, "allow, deny, local, raise"),
    ("[rules.a]\nquotas = '10/m'\ncost = 11", 3, "capacity of 10"),
    ("[rules.a]\nquotas = '10/m'\nexempt = ['key/1', '10.0.0.1/8']", 3, "host bits"),
    ("[rules.a]\nquotas = {}", 2, "no bucket"),
    ("[rules.default]\nquotas = {}", 2, "no bucket"),
    ("[rules.a]\nquotas = { window = '1/s' }", 2, "no bucket"),
    ("log_level = 'loud'", 1, "debug, info, warning, error"),
    ("port = " + "[" * 50_000, 1, "deeply"),
    ("".join(f"[rules.r{i}]\nquotas = '1/s'\n" for i in range(2001)), 1, "at most 2000"),
    ("[rules.a]\nquotas = '10/m'\nkey = ['ip']", 3, "header:NAME"),
    ("uri_header = 'X Uri'", 1, "uri_header"),
    ("[rules.a]\nquotas = '10/m'\nkey = []", 3, "length"),
    ("[rules.a]\nquotas = '10/m'\noverrides = { vip = 'platinum' }", 3, "100/minute"),
    ("[rules.a]\nquotas = '10/m'\noverrides = { vip = 'gold' }", 3, "; or add that plan to [plans]"),
    (
        "[plans]\nsilver = '9/m'\nbasic = '5/m'\n[rules.a]\nquotas = '10/m'\noverrides = { vip = 'gold' }",
        6,
        "cannot read the quota 'gold'; write N/period",
    ),
    (
        "[plans]\nsilver = '9/m'\nbasic = '5/m'\n[rules.a]\nquotas = '10/m'\noverrides = { vip = 'gold' }",
        6,
        "; or name one of the plans silver, basic",
    ),
    ("[rules.a]\nquotas = { day = '1/d' }", 2, "bucket and window"),
    ("[rules.a]\nalgorithm = 'gcra'", 1, "needs quotas"),
    ("[rules.'a b']\nquotas = '10/m'", 1, "no name"),
    ("[plans]\ngold = 'lots'", 2, "100/minute"),
    ("[[tokens]]\nscope = 'admin'\n[[tokens]]\nscope = 'god'", 4, "god"),
    ("[[tokens]]\nscope = 'admin'", 1, "sha256 or file"),
    ("[[tokens]]\nscope = 'admin'\nsha256 = 'abc'", 3, "64"),
    ("port = 1\nport = 2", 2, "TOML"),
    ("rules = 5", 1, "object"),
]


@pytest.mark.parametrize("text, line, says", BAD_TOML, ids=[text[-30:] for text, _, _ in BAD_TOML])
def test_bad_file(tmp_path: Path, text: str, line: int, says: str) -> None:
    """A bad file is refused with the line of the error."""
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(BadFile) as caught:
        read_file(file)
    assert str(caught.value).startswith(f"{file}:{line}: "), caught.value
    assert says in str(caught.value)


BAD_YAML = [
    ("rules:\n  a:\n    quotas: 10/m\n  b:\n    quotas: 10/x\n", 5, "unknown period"),
    ("rules:\n  a:\n    quotas: 10/m\n    shaddow: true\n", 4, "shadow"),
    ("trusted_proxies:\n  - 10.0.0.0/8\n  - nope\n", 3, "no network"),
    ("a: [", 1, "YAML"),
    ("rules:\n  a:\n    quotas: 10/m\n  a:\n    quotas: 10/h\n", 4, "given twice"),
    ("port: " + "[" * 20_000, 1, "deeply"),
    ("- 1\n", 1, "object"),
    ("rules: !!python/object/apply:os.system ['true']", 1, "YAML"),
]


@pytest.mark.parametrize("text, line, says", BAD_YAML, ids=[text[-30:] for text, _, _ in BAD_YAML])
def test_a_bad_yaml_file_too(tmp_path: Path, text: str, line: int, says: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(BadFile) as caught:
        read_file(file)
    assert str(caught.value).startswith(f"{file}:{line}: "), caught.value
    assert says in str(caught.value)


def test_yaml_and_toml_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "port: 9000\nrules:\n  login:\n    quotas: [5/minute, 20/hour]\n    algorithm: sliding_window\n"
    )
    (tmp_path / "a.toml").write_text(
        'port = 9000\n[rules.login]\nquotas = ["5/minute", "20/hour"]\nalgorithm = "sliding_window"\n'
    )
    assert read_file(tmp_path / "a.yaml") == read_file(tmp_path / "a.toml")


def test_the_example_is_a_good_file() -> None:
    settings = read_file(EXAMPLE)
    assert len(settings.rules) >= 3


# what a file looks like while it is being written
EMPTIED = ["", "# to be written\n", "[rules.b]\nquotas = '1/s'\n"]


def rewrite(service: Service, text: str) -> None:
    """Change the file and say so: the service looks by itself each second, and reads what stays the same for one."""
    service.config.write_text(text)
    service.signal(signal.SIGHUP)


class TestReload:
    def test_reload(self, start: Start) -> None:
        """The file is read again on SIGHUP and after a change."""
        service = start(config="[rules.a]\nquotas = '10/minute'\nalgorithm = 'fixed_window'\n")
        assert service.check("k", rule="a").json["limit"] == 10
        service.config.write_text("[rules.a]\nquotas = '20/minute'\nalgorithm = 'fixed_window'\n")
        eventually(lambda: service.check("k", rule="a").json["limit"] == 20, "the new quota")
        service.config.write_text("[rules.b]\nquotas = '5/minute'\n")
        service.signal(signal.SIGHUP)
        eventually(lambda: service.check("k", rule="b").status == 200, "the new rule")
        assert service.check("k", rule="a").status == 400
        assert service.metrics()["rate_limiter_config_reload_success"] == 1
        assert service.check("k2").status == 200

    def test_reload_in_a_thread(self, start: Start) -> None:
        """Checks are answered while a file is being read, however long that takes."""
        service = start(config="[rules.a]\nquotas = '5/s'\n")
        pipe, later = service.folder / "pipe", service.folder / "later"
        os.mkfifo(pipe)
        pipe.replace(service.config)
        service.signal(signal.SIGHUP)
        with service.config.open("wb") as file:  # waits until the service reads it, and the service for what is written
            for _ in range(20):
                assert service.check("k").status == 200
            later.write_text(text := "[rules.b]\nquotas = '5/s'\n")
            later.replace(service.config)  # the next one to read it gets a plain file
            file.write(text.encode())
        eventually(lambda: service.check("k", rule="b").status == 200, "the new rule")
        assert service.check("k", rule="a").status == 400

    def test_reload_state(self, start: Start) -> None:
        """A reload keeps the state of rules that did not change."""
        text = "[rules.a]\nquotas = '10/hour'\nalgorithm = 'sliding_window'\n"
        service = start(config=text)
        service.check("k", rule="a", permits=4)
        rewrite(service, text + "[rules.b]\nquotas = '1/hour'\n")
        eventually(lambda: service.check("k", rule="b").status in (200, 429), "the new rule")
        assert service.remaining("k", rule="a", permits=0).json["remaining"] == 6

    def test_reload_bad_file(self, start: Start) -> None:
        """A bad new file changes nothing but the log and a metric."""
        service = start(config="[rules.a]\nquotas = '10/minute'\n")
        rewrite(service, "\n[rules.a]\nquotas = 'nonsense'\n")
        eventually(lambda: service.metrics()["rate_limiter_config_reload_success"] == 0, "the failure")
        assert service.check("k", rule="a").json["limit"] == 10
        assert f"{service.config}:3: rules.a.quotas: " in service.log()
        assert service.metrics()['rate_limiter_config_reloads_total{result="failure"}'] >= 1
        rewrite(service, "[rules.a]\nquotas = '11/minute'\n")
        eventually(lambda: service.metrics()["rate_limiter_config_reload_success"] == 1, "the good one again")
        assert service.check("k", rule="a").json["limit"] == 11

    @pytest.mark.skipif(sys.platform != "linux", reason="looks for workers in /proc")
    def test_replaced_worker(self, start: Start) -> None:
        """A worker that replaces another has the newest good rules."""
        service = start(config="[rules.a]\nquotas = '10/minute'\n")
        rewrite(service, "[rules.a]\nquotas = '20/minute'\n")
        eventually(lambda: service.check("k", rule="a").json["limit"] == 20, "the new quota")
        [victim] = service.workers()
        os.kill(victim, signal.SIGKILL)
        eventually(lambda: service.workers() not in ([], [victim]), "a new worker")

        def limit() -> int:
            try:
                return int(service.check("k", rule="a").json["limit"])
            except OSError:
                return 0  # not there yet

        eventually(lambda: limit() > 0, "an answer")
        assert limit() == 20
        rewrite(service, "[rules.a]\nquotas = 'nonsense'\n")
        eventually(lambda: service.metrics()["rate_limiter_config_reload_success"] == 0, "the failure")
        [victim] = service.workers()
        os.kill(victim, signal.SIGKILL)
        eventually(lambda: service.workers() not in ([], [victim]), "a third worker")
        eventually(lambda: limit() > 0, "an answer")
        assert limit() == 20

    @pytest.mark.parametrize("how", [signal.SIGHUP, None])
    def test_half_written_file(self, start: Start, how: signal.Signals | None) -> None:
        """A half-written file neither opens the API nor drops the rules."""
        rules = "[rules.a]\nquotas = '10/minute'\n"
        service = start(config=f"[[tokens]]\nscope = 'check'\nsha256 = '{hashlib.sha256(b't').hexdigest()}'\n{rules}")
        failures = 'rate_limiter_config_reloads_total{result="failure"}'
        known = {"authorization": "Bearer t"}
        for times, text in enumerate(EMPTIED if how else EMPTIED[:1], 1):
            service.config.write_text(text)
            if how:
                service.signal(how)
            eventually(lambda times=times: service.metrics()[failures] >= times, "the failure")
            assert service.check("k", rule="a").status == 401
            assert service.check("k", known, rule="a").status == 200
        assert service.metrics()["rate_limiter_config_reload_success"] == 0

    def test_file_watch(self) -> None:
        """A changed file is read once it has stayed the same for a second."""
        one, two, three = ({"a": (i, 10 * i, 1)} for i in range(1, 4))
        missing: dict[str, tuple[int, int, int]] = {}
        watch = FileWatch(one)
        looks = [one, two, three, three, three, missing, two, two, two]
        assert [watch.is_new(stamp) for stamp in looks] == [False] * 3 + [True] + [False] * 3 + [True] + [False]
        watch = FileWatch(one)
        assert [watch.is_new(stamp) for stamp in (two, one, one)] == [False] * 3
