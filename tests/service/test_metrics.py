"""What Prometheus sees: names, labels, and counts that are right, whichever worker answers."""

import os
import re
import signal
import sys
import threading
from collections.abc import Iterator

import pytest

from tests.service.conftest import Start
from tests.support.quotas import ALGORITHMS
from tests.support.servers import Server
from tests.support.service import API, Service, eventually, runs

NAMES = [name.upper() for name in ALGORITHMS]
REQUESTS = 'rate_limiter_requests_total{{algorithm="{}",allowed="{}"}}'
SAMPLE = re.compile(r'^([a-z_]+)(?:\{((?:[a-z]+="[^"\\\n]*",?)+)\})? (-?[0-9.e+-]+)$')


@pytest.fixture(scope="module")
def counted() -> Iterator[Service]:
    """A service whose counts only this file changes."""
    service = Service()
    yield service
    service.forget()


def test_all_series(start: Start) -> None:
    """Every series exists from the start."""
    found = start().metrics()
    for name in NAMES:
        for allowed in ("true", "false"):
            assert found[REQUESTS.format(name, allowed)] == 0
            labels = f'algorithm="{name}",allowed="{allowed}"'
            assert found[f"rate_limiter_check_seconds_count{{{labels}}}"] == 0
            assert found[f'rate_limiter_check_seconds_bucket{{{labels},le="5e-05"}}'] == 0
            assert found[f'rate_limiter_check_seconds_bucket{{{labels},le="+Inf"}}'] == 0


def test_the_text_is_well_formed(counted: Service) -> None:
    answer = counted.get("/actuator/prometheus")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    declared: dict[str, str] = {}
    seen = set()
    text = answer.body.decode()
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert name not in declared
            declared[name] = kind
        elif not line.startswith("# HELP "):
            found = SAMPLE.match(line)
            assert found, line
            family = found[1] if found[1] in declared else re.sub("_(bucket|sum|count)$", "", found[1])
            assert declared[family] in ("counter", "gauge", "histogram"), line
            assert (declared[family] == "counter") == family.endswith("_total"), line
            assert line.rpartition(" ")[0] not in seen
            seen.add(line.rpartition(" ")[0])
    assert "rate_limiter_build_info" in declared


def test_both_paths_are_the_same(counted: Service) -> None:
    paths = ("/metrics", "/actuator/prometheus")
    eventually(lambda: len({counted.get(path).body for path in paths}) == 1, "no number to change between the two")


@pytest.mark.usefixtures("within_a_minute")
@pytest.mark.parametrize("name", NAMES)
def test_requests_total(counted: Service, key: str, name: str) -> None:
    """Checks are counted by algorithm and outcome."""
    before = counted.metrics()
    counted.check(key, algorithm=name, permits=100)
    counted.check(key, algorithm=name, permits=100)
    counted.remaining(key, algorithm=name)
    counted.check(key, algorithm=name, permits=101)  # no check: it could never succeed
    after = counted.metrics()
    for allowed in ("true", "false"):
        assert after[REQUESTS.format(name, allowed)] == before[REQUESTS.format(name, allowed)] + 1
        labels = f'algorithm="{name}",allowed="{allowed}"'
        for sample in (f"count{{{labels}}}", f'bucket{{{labels},le="+Inf"}}'):
            sample = f"rate_limiter_check_seconds_{sample}"
            assert after[sample] == before[sample] + 1
        total = f"rate_limiter_check_seconds_sum{{{labels}}}"
        assert 0 < after[total] - before[total] < 10
    rule = f'rate_limiter_rule_requests_total{{rule="default",algorithm="{name}",allowed="true"}}'
    assert after[rule] == before[rule] + 1


def test_buckets_grow_with_their_bound(counted: Service, key: str) -> None:
    counted.check(key)
    found = counted.metrics()
    bounds = ["5e-05", "0.0001", "0.00025", "0.0005", "0.001", "0.0025", "0.005", "0.01", "0.025", "0.05"]
    bounds += ["0.1", "0.25", "1", "+Inf"]
    name = 'rate_limiter_check_seconds_bucket{{algorithm="TOKEN_BUCKET",allowed="true",le="{}"}}'
    counts = [found[name.format(bound)] for bound in bounds]
    assert counts == sorted(counts) and counts[-1] >= 1


def test_near_the_limit(counted: Service, key: str) -> None:
    name = 'rate_limiter_near_limit_total{rule="default",algorithm="SLIDING_WINDOW"}'
    before = counted.metrics()[name]
    counted.check(key, algorithm="SLIDING_WINDOW", permits=79)
    assert counted.metrics()[name] == before
    counted.check(key, algorithm="SLIDING_WINDOW", permits=1)
    assert counted.metrics()[name] == before + 1


def test_batches_and_waits_are_counted(counted: Service, key: str) -> None:
    before = counted.metrics()
    checks = [{"key": key, "permits": 60, "algorithm": "GCRA"}] * 3
    counted.ask("POST", f"{API}/check/batch", body=checks)
    counted.check(key, algorithm="GCRA", wait=20)
    after = counted.metrics()
    assert after[REQUESTS.format("GCRA", "true")] == before[REQUESTS.format("GCRA", "true")] + 2
    assert after[REQUESTS.format("GCRA", "false")] == before[REQUESTS.format("GCRA", "false")] + 2


def test_problems_keys_and_workers(counted: Service, key: str) -> None:
    before = counted.metrics()
    assert before["rate_limiter_workers"] == 1
    assert counted.check("").status == 400
    assert counted.metrics()["rate_limiter_problems_total"] == before["rate_limiter_problems_total"] + 1
    counted.check(key, algorithm="FIXED_WINDOW")
    eventually(lambda: counted.metrics()["rate_limiter_keys"] >= 1, "the keys to be counted")
    assert counted.metrics()["rate_limiter_keys_limit"] == 1_000_000


def test_keys_are_never_labels(counted: Service) -> None:
    counted.check("a-very-special-key", permits=100)
    counted.check("a-very-special-key", permits=100)
    assert b"a-very-special-key" not in counted.get("/metrics").body


def test_two_workers_count_every_request(start: Start) -> None:
    service = start("--workers", "2")
    eventually(lambda: service.metrics()["rate_limiter_workers"] == 2, "both workers")

    def send() -> None:
        for _ in range(10):  # each on a connection of its own: the kernel spreads them over the workers
            service.check("k", algorithm="GCRA")

    threads = [threading.Thread(target=send) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in range(6):  # whichever worker answers
        found = service.metrics()
        counted = found[REQUESTS.format("GCRA", "true")] + found[REQUESTS.format("GCRA", "false")]
        assert counted == 60


@pytest.mark.skipif(sys.platform != "linux", reason="looks for workers in /proc")
def test_counts_survive(start: Start) -> None:
    """The counts of a worker that died stay, and a new worker goes on."""
    service = start("--workers", "2")
    eventually(lambda: service.metrics()["rate_limiter_workers"] == 2, "both workers")
    for _ in range(20):
        service.check("k", algorithm="GCRA")
    victim = service.workers()[0]
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: victim not in service.workers() and len(service.workers()) == 2, "a new worker")

    def counted() -> bool:
        try:
            found = service.metrics()
        except OSError:
            return False
        return found["rate_limiter_workers"] == 2 and found[REQUESTS.format("GCRA", "true")] == 20

    eventually(counted, "all counts, of the dead one too")


@pytest.mark.skipif(sys.platform != "linux", reason="looks for workers in /proc")
def test_orphans(start: Start) -> None:
    """Workers end with the main process."""
    service = start("--workers", "2")
    eventually(lambda: service.metrics()["rate_limiter_workers"] == 2, "both workers")
    workers = service.workers()
    service.process.kill()
    service.process.wait()
    eventually(lambda: not any(runs(pid) for pid in workers), "the workers to stop")


def test_numbers_of_redis_itself(start: Start, redis_server: Server) -> None:
    service = start("--store", redis_server.patient_url)
    service.check("k")
    found = service.metrics()
    assert found["rate_limiter_redis_up"] == 1
    assert 0 < found["rate_limiter_redis_response_seconds"] < 10
    assert found["rate_limiter_redis_memory_used_bytes"] > 100_000
    for name in ("expired_keys", "evicted_keys", "network_input_bytes", "network_output_bytes", "commands"):
        assert found[f"rate_limiter_redis_{name}_total"] >= 0
    assert found["rate_limiter_breaker_open"] == 0
    assert "rate_limiter_keys" not in found
