"""The service on Redis: instances share limits exactly, and an outage of Redis is not one of the service."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import pytest

from tests.service.conftest import Start
from tests.support.servers import Server
from tests.support.service import API, Answer, Service, eventually


class Load:
    """Clients that ask until they are told to stop, and what they were answered."""

    def __init__(self, *services: Service, query: str, clients: int = 3) -> None:
        self.answers: list[Answer] = []
        self.errors: list[Exception] = []
        self._going = True
        targets = [service for service in services for _ in range(clients)]
        self._threads = [threading.Thread(target=self._ask, args=(service, query)) for service in targets]
        for thread in self._threads:
            thread.start()

    def _ask(self, service: Service, query: str) -> None:
        connection = service.connect()
        try:
            while self._going:
                self.answers.append(service.on(connection, "GET", f"{API}/check", query))
        except Exception as error:
            self.errors.append(error)
        finally:
            connection.close()

    def stop(self) -> list[Answer]:
        self._going = False
        for thread in self._threads:
            thread.join()
        assert not self.errors
        return self.answers

    def until(self, true: Callable[[], bool], what: str) -> None:
        eventually(true, what)
        assert not self.errors


def test_two_instances(start: Start, redis_server: Server) -> None:
    """Two instances on one Redis admit the limit and not one more."""
    rules = "[rules.shared]\nquotas = '300/hour'\nalgorithm = 'sliding_window'\n"
    one, other = (start("--store", redis_server.patient_url, config=rules) for _ in range(2))
    load = Load(one, other, query="rule=shared&key=k")
    load.until(lambda: len(load.answers) >= 900, "three times the limit")
    answers = load.stop()
    assert sum(answer.status == 200 for answer in answers) == 300
    assert {answer.status for answer in answers} == {200, 429}


def test_never_above_the_rate(start: Start, redis_server: Server) -> None:
    rules = "[rules.rate]\nquotas = '100/second burst 10'\nalgorithm = 'gcra'\n"
    one, other = (start("--store", redis_server.patient_url, config=rules) for _ in range(2))
    began = time.monotonic()
    load = Load(one, other, query="rule=rate&key=k", clients=2)
    time.sleep(2)
    answers = load.stop()
    elapsed = time.monotonic() - began
    assert sum(answer.status == 200 for answer in answers) <= 10 + 100 * elapsed
    assert {answer.status for answer in answers} == {200, 429}


def test_redis_outage(start: Start, mortal_server: Server) -> None:
    """The service answers while Redis is down, and uses it again when it is back."""
    service = start("--store", f"{mortal_server.bare_url}?timeout=1")
    load = Load(service, query="key=k&algorithm=FIXED_WINDOW", clients=4)
    load.until(lambda: len(load.answers) > 50, "traffic")
    mortal_server.kill()
    load.until(lambda: load.answers[-1].json.get("degraded", False), "degraded answers")
    seen = len(load.answers)
    load.until(lambda: len(load.answers) > seen + 200, "more of them")
    name = 'rate_limiter_degraded_total{rule="default",algorithm="FIXED_WINDOW"}'
    assert service.metrics()[name] > 100
    eventually(lambda: service.metrics()["rate_limiter_breaker_open"] == 1, "the breaker in the metrics")
    assert service.metrics()["rate_limiter_store_errors_total"] > 100
    assert service.get("/actuator/health").status == 503
    mortal_server.restart()
    load.until(lambda: "degraded" not in load.answers[-1].json, "Redis to be used again")
    answers = load.stop()
    assert {answer.status for answer in answers} <= {200, 429}  # no 5xx, ever
    assert all(answer.json["allowed"] for answer in answers if answer.json.get("degraded"))
    assert "does not answer" in service.log() and "answers again" in service.log()
    eventually(lambda: service.metrics()["rate_limiter_breaker_open"] == 0, "the breaker to close")
    eventually(lambda: service.get("/actuator/health").status == 200, "to be healthy")
    assert "Traceback" not in service.log()


@pytest.mark.skipif(sys.platform != "linux", reason="looks for workers in /proc")
def test_reset_without_redis(start: Start, mortal_server: Server) -> None:
    """A reset that Redis did not make is a 503; counters outlive their worker."""
    policies = ("deny", "local", "raise")
    rules = "".join(f"[rules.{name}]\nquotas = '5/s'\non_store_error = '{name}'\n" for name in policies)
    service = start("--store", f"{mortal_server.bare_url}?timeout=1", config=rules)
    assert service.reset("k").status == 200
    mortal_server.kill()
    name = "rate_limiter_breaker_opened_total"
    eventually(lambda: service.check("k").json["degraded"] and service.metrics()[name] >= 1, "the breaker")
    for rule in ("default", *policies):
        answer = service.reset("k", rule=rule)
        assert answer.status == 503 and "try again" in answer.problem
    before = service.metrics()[name]
    [victim] = service.workers()
    os.kill(victim, signal.SIGKILL)

    def replaced() -> bool:
        try:
            return service.workers() != [victim] and service.metrics()[name] > 0
        except OSError:
            return False  # not there yet

    eventually(replaced, "another worker")
    time.sleep(1.5)  # until it has looked at its own breaker
    assert service.metrics()[name] >= before


@pytest.mark.usefixtures("within_a_minute")
def test_every_algorithm_and_a_batch(start: Start, redis_server: Server) -> None:
    service = start("--store", redis_server.patient_url)
    for name in ("TOKEN_BUCKET", "LEAKY_BUCKET", "FIXED_WINDOW", "SLIDING_WINDOW", "SLIDING_WINDOW_COUNTER", "GCRA"):
        assert service.check("k", algorithm=name, permits=60).json["remaining"] == 40
        assert service.check("k", algorithm=name, permits=100).status == 429
        assert service.reset("k", algorithm=name).json["remaining"] == 100
    checks = [{"key": f"b{i % 50}", "algorithm": "GCRA", "permits": 30} for i in range(300)]
    answer = service.ask("POST", f"{API}/check/batch", body=checks)
    assert [one["key"] for one in answer.json] == [check["key"] for check in checks]
    assert sum(one["allowed"] for one in answer.json[:150]) == 150
